"""``--help``: the options of a command in groups, from its dataclass."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

_OTHER = "Other options"
_VALUES: Mapping[Any, str] = {int: "INT", float: "FLOAT", Path: "PATH", str: "TEXT"}
_INDENT = 26
_MAX_WIDTH = 110


@dataclass(frozen=True)
class Option:
    """One option of a command: its flag with the kind of value, its description and its default,
    all as text.
    """

    name: str
    flag: str
    description: str
    default: str
    positional: bool = False


def print_commands(
    commands: Mapping[str, type], description: str, console: Console | None = None
) -> None:
    """Print the description, and each command with its one-line summary."""
    console = console or Console(width=min(Console().width, _MAX_WIDTH))
    console.print(Text("usage: strands-cosmos3 COMMAND [OPTIONS]\n"))
    console.print(Text(description))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for name, kind in commands.items():
        table.add_row(Text(name, "bold"), Text(summary_of(kind)))
    console.print(Text("Commands:", "bold"), table)
    console.print(Text("\nstrands-cosmos3 COMMAND --help explains the options of a command."))


def print_options(name: str, kind: type, console: Console | None = None) -> None:
    """Print the documentation of a command and its options, in the groups that ``GROUPS`` of its
    class names.
    """
    console = console or Console(width=min(Console().width, _MAX_WIDTH))
    options = list(options_of(kind))
    positional = "".join(f"{option.flag} " for option in options if option.positional)
    console.print(Text(f"usage: strands-cosmos3 {name} {positional}[OPTIONS]\n"))
    for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n"):
        literal = paragraph.startswith(" ")
        console.print(
            Text(f"{paragraph if literal else ' '.join(paragraph.split())}\n"), soft_wrap=literal
        )
    groups: Mapping[str, tuple[str, ...]] = vars(kind).get("GROUPS", {})
    title_of = {option: title for title, names in groups.items() for option in names}
    for title in (*groups, _OTHER if groups else "Options"):
        chosen = [
            option
            for option in options
            if title_of.get(option.name, title if title not in groups else "") == title
        ]
        if chosen:
            console.print(Text(f"{title}:", "bold"))
            for option in chosen:
                console.print(Text(_lines(option, console.width)), soft_wrap=True)
            console.print()


def summary_of(kind: type) -> str:
    """Return the first line of a command's documentation."""
    return inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]


def options_of(kind: type) -> Iterator[Option]:
    """Yield the visible options of a command; those of a nested dataclass as its own."""
    hints = get_type_hints(kind, include_extras=True)
    documented = _documentation(kind)
    for field in fields(kind):
        hint, marks = hints[field.name], ()
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
        if tyro.conf.Suppress in marks:
            continue
        if isinstance(hint, type) and is_dataclass(hint):
            yield from options_of(hint)
            continue
        positional, value = tyro.conf.Positional in marks, _value(hint)
        dashed = field.name.replace("_", "-")
        flag = value if positional else f"--{dashed} {value}".strip()
        if field.default is True:
            flag = f"--{dashed}, --no-{dashed}"
        yield Option(field.name, flag, documented.get(field.name, ""), _default(field), positional)


def _lines(option: Option, width: int) -> str:
    """Return an option as indented lines: its flag, and its description beside or below it."""
    text = " ".join(f"{option.description} {option.default}".replace("``", "").split())
    body = textwrap.wrap(text, width - _INDENT, break_on_hyphens=False)
    flag = f"  {option.flag}"
    if len(flag) < _INDENT - 1 and body:
        body[0] = flag.ljust(_INDENT) + body[0]
    else:
        body.insert(0, flag)
    return "\n".join(line if line.startswith(flag) else " " * _INDENT + line for line in body)


def _documentation(kind: type) -> dict[str, str]:
    """Return what a dataclass and its bases say of their fields: below each, or under ``Args``."""
    arguments = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2]
    found = dict(re.findall(r"^    (\w+): (.+(?:\n {5,}.+)*)", arguments, re.MULTILINE))
    for part in reversed(kind.__mro__):
        if not is_dataclass(part):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[ast.unparse(field.target)] = str(text.value.value)
    return found


def _value(hint: Any) -> str:
    """Return the kind of value that an option takes, e.g. ``PATH`` or ``{fer,fr3}``; a switch
    takes none.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _value(next(arg for arg in args if arg is not NoneType))
    if origin is Literal:
        return f"{{{','.join(map(str, args))}}}"
    if origin is tuple:
        return f"{_value(args[0])} ..."
    return _VALUES.get(hint, "")


def _default(field: Field[Any]) -> str:
    """Return ``(required)``, the default if it says something, or nothing: then the description
    says what happens.
    """
    if field.default is MISSING and field.default_factory is MISSING:
        return "(required)"
    if field.default is None or field.default is False or field.default in ("", ()):
        return ""
    shown = (
        " ".join(map(str, field.default))
        if isinstance(field.default, tuple)
        else str(field.default)
    )
    return f"(default: {shown})"
