"""Dataclasses as TOML: a table is read by the fields of a dataclass, and written as it is read."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from strands_cosmos3.errors import ConfigError, Cosmos3Error, ResourceNotFoundError
from strands_cosmos3.resources import require_file

_T = TypeVar("_T")
_MAX_BYTES = 1 << 20


def read_toml(
    path: Path,
    hint: str = "",
    absent: type[Cosmos3Error] = ResourceNotFoundError,
    invalid: type[Cosmos3Error] = ConfigError,
) -> dict[str, Any]:
    """Return the contents of a TOML file of at most 1 MiB; ``hint`` ends the message of an error.

    Raises ``absent`` if there is no such file, or it is no ordinary one, and ``invalid`` if it
    cannot be read, or is not TOML.
    """
    require_file(path, absent, _MAX_BYTES, hint)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    # TOMLDecodeError and UnicodeDecodeError are ValueErrors
    except (OSError, ValueError, RecursionError) as error:
        raise invalid(f"{path} cannot be read as TOML ({str(error)[:200]}). {hint}") from None


@cache
def packaged_worlds() -> dict[str, Any]:
    """Return ``worlds/worlds.toml``: the worlds of the package by name, the default one first. No
    other place outside their folders names them.
    """
    return read_toml(Path(__file__).parent / "worlds/worlds.toml")


def from_table(kind: type[_T], table: Any, where: str, hint: str = "") -> _T:
    """Return a dataclass from a table with its fields' names; lists become tuples.

    A field that is a dataclass, or a tuple of them, is a table, or a list of tables. ``where``
    names the table in errors, e.g. by its file, and ``hint`` ends the message of some of them.

    Raises:
        ConfigError: A field is missing, unknown, or no table where it must be one.
        Errors of the dataclass, whose messages get ``where`` in front.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, got {table!r:.80}. {hint}")
    hints = _hints(kind)
    if unknown := sorted(set(table) - set(hints)):
        raise ConfigError(
            f"{where} has the unknown field {unknown[0]!r}; it may have: {', '.join(hints)}."
        )
    required = {
        name
        for name, field in _fields(kind).items()
        if field.default is MISSING and field.default_factory is MISSING
    }
    if missing := sorted(required - set(table)):
        raise ConfigError(f"{where} lacks {', '.join(missing)}. {hint}")
    values = {
        name: _from_value(hints[name], value, f"{where}: {name}", name, hint)
        for name, value in table.items()
    }
    try:
        return kind(**values)
    except ValueError as error:  # this package's own, which do not name the table
        error.args = (f"{where}: {error}",)
        raise


def from_tables(kind: type[_T], tables: Mapping[str, Any]) -> dict[str, _T]:
    """Return dataclasses by name from tables by name; errors as :func:`from_table`."""
    return {name: from_table(kind, table, name) for name, table in tables.items()}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Types of the fields that a caller may give, by name; of an optional one, the type beside
    None.
    """
    hints = get_type_hints(kind)
    return {
        name: get_args(hints[name])[0] if isinstance(hints[name], UnionType) else hints[name]
        for name in _fields(kind)
    }


def _fields(kind: Any) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(kind) if field.init}


def _from_value(hint: Any, value: Any, where: str, name: str, advice: str) -> Any:
    if isinstance(hint, type) and is_dataclass(hint):
        return from_table(hint, value, where, advice)
    element: Any = get_args(hint)[0] if get_origin(hint) is tuple else None
    if isinstance(element, type) and is_dataclass(element):
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list of tables ([[{name}]]), got {value!r:.80}.")
        return tuple(
            from_table(element, table, f"{where}[{i}]", advice) for i, table in enumerate(value)
        )
    return as_tuples(value)


def as_tuples(value: Any) -> Any:
    """Return a value of JSON or TOML with tuples for its lists."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def to_toml(value: Any) -> str:
    """Return a dataclass as the text of a TOML file, which :func:`from_table` reads; fields with
    their default are left out.
    """
    return "\n".join(_lines(value, "")).strip() + "\n"


def _lines(value: Any, path: str) -> list[str]:
    """The plain fields of a dataclass, then its tables."""
    plain = []
    tables = []
    for field in fields(value):
        inner = getattr(value, field.name)
        name = f"{path}.{field.name}".lstrip(".")
        is_default = inner == field.default or (
            field.default_factory is not MISSING and inner == field.default_factory()
        )
        if is_default or not field.init:
            continue
        if isinstance(inner, tuple) and is_dataclass(inner[0]):
            for element in inner:
                tables += ["", f"[[{name}]]", *_lines(element, name)]
        elif is_dataclass(inner):
            tables += ["", f"[{name}]", *_lines(inner, name)]
        else:
            plain.append(f"{field.name} = {toml_value(inner)}")
    return plain + tables


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it: a mapping, a list, a string, a number, True or False."""
    if isinstance(value, Mapping):
        items = (
            f"{key if key.isidentifier() else toml_value(key)} = {toml_value(item)}"
            for key, item in value.items()
        )
        return f"{{ {', '.join(items)} }}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)
