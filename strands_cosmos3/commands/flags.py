"""How tyro reads the dataclasses of commands and options (:mod:`strands_cosmos3.options`): help
texts are the docstrings of their fields, sections are groups, and a default of None is not shown.
"""

from __future__ import annotations

import functools
import inspect
import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro
from docstring_parser import parse_from_object
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from strands_cosmos3.checks import known_name
from strands_cosmos3.errors import ConfigError

registry = ConstructorRegistry()


def from_environment(variable: str) -> Any:
    """Declare a field without a flag that is read from an environment variable."""
    return field(default=None, repr=False, metadata={"environment": variable, "hidden": True})


def require_owned(command: Any, action: str, owners: Mapping[str, str]) -> None:
    """Raise ConfigError for a field of a command that is set, and belongs to other actions: field
    -> the only actions that heed it.
    """
    for declared in fields(command):
        belongs_to = owners.get(declared.name, action)
        if action not in belongs_to and getattr(command, declared.name) != declared.default:
            flag = declared.name.replace("_", "-")
            raise ConfigError(f"--{flag} belongs to {belongs_to}, not to {action}.")


@registry.struct_rule
def _dataclass_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    kind: Any = info.type
    if not is_dataclass(info.type) or kind.__module__.startswith("tyro"):  # a union of subcommands
        return None
    texts = help_texts(kind)
    hints = get_type_hints(kind, include_extras=True)
    flags: list[StructFieldSpec] = []
    for declared in fields(kind):
        default: Any = _default(declared, info.default)
        no_default = default is None or default is False or default in ("", ())
        hint: Any = Annotated[
            hints[declared.name],
            tyro.conf.arg(
                name=declared.metadata.get("flag"),
                help_behavior_hint="" if no_default else None,
            ),
        ]
        if default is False:  # --flag without --no-flag
            hint = tyro.conf.FlagCreatePairsOff[hint]
        if declared.metadata.get("hidden"):
            hint = tyro.conf.Suppress[hint]
        flags.append(StructFieldSpec(declared.name, hint, default, texts.get(declared.name)))
    return StructConstructorSpec(kind, tuple(flags))


@registry.primitive_rule
def _choice_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Names of a Literal, optional or not; the error of another lists them, and the closest."""
    parts = [part for part in get_args(info.type) if part is not NoneType]
    literal = parts[0] if len(parts) == 1 else info.type
    names = get_args(literal)
    if get_origin(literal) is not Literal or not all(isinstance(name, str) for name in names):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(names)}}}",
        instance_from_str=lambda texts: known_name(texts[0], "choice", names),
        is_instance=lambda value: value is None or value in names,
        str_from_instance=lambda value: [str(value)],
    )


@functools.cache  # several commands share sections, and a source is read twice for each
def help_texts(kind: Any) -> dict[str, str]:
    """Return the documentation of a dataclass's fields, those of its bases included, by name."""
    return {
        param.arg_name: " ".join(_plain(param.description or "").split())
        for part in reversed(kind.__mro__)
        if is_dataclass(part)
        for param in parse_from_object(part).params
    }


def description(kind: Any) -> str:
    """Return what the help says of a command: its docstring, in lines as wide as the terminal."""
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, break_on_hyphens=False, break_long_words=False
    )
    return "\n\n".join(
        part if part.startswith(" ") else wrapper.fill(" ".join(part.split()))
        for part in _plain(inspect.getdoc(kind) or "").split("\n\n")
    )


def required_options(kind: Any) -> str:
    """Return the options of a command that have no default, as a usage line writes them."""
    declared = (f for f in fields(kind) if f.default is f.default_factory is MISSING)
    return "".join(
        f" --{f.name.replace('_', '-')} {str(f.type).upper()}"
        for f in declared
        if "Positional" not in str(f.type)
    )


def _plain(text: str) -> str:
    """Return a docstring without reST's marks: roles and quotes of code."""
    return re.sub(r"(:\w+)*:?`+~?([^`]*)`+", r"\2", text)


def _default(declared: Field[Any], parent: Any) -> Any:
    """Return a field's default: that of the instance which is the default of its dataclass, or its
    own.
    """
    if hasattr(parent, declared.name):
        return getattr(parent, declared.name)
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return tyro.MISSING if declared.default is MISSING else declared.default
