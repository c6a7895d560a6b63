"""Robots in TOML files: the fields of :mod:`strands_cosmos3.robots.spec`, under the same names."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from strands_cosmos3.action_columns import GripperConvention
from strands_cosmos3.checks import instance_of
from strands_cosmos3.errors import ConfigError, ResourceNotFoundError
from strands_cosmos3.resources import require_file, resource
from strands_cosmos3.robots.fetched import FETCHED
from strands_cosmos3.robots.spec import (
    Figures,
    GripperSpec,
    HandRates,
    Limb,
    LimbLimits,
    ModelPart,
    RobotCamera,
    RobotSpec,
    Workspace,
)

_MAX_BYTES = 1 << 20
_TABLES: Mapping[tuple[type, str], type] = {
    (RobotSpec, "workspace"): Workspace,
    (Limb, "limits"): LimbLimits,
    (Limb, "gripper"): GripperSpec,
    (LimbLimits, "hand"): HandRates,
    (GripperSpec, "opening"): GripperConvention,
    (GripperSpec, "command"): GripperConvention,
    **{
        (LimbLimits, name): Figures
        for name in ("q_min", "q_max", "velocity", "acceleration", "jerk", "torque")
    },
}
"""Fields that are tables of their own."""
_LISTS: Mapping[tuple[type, str], type] = {
    (RobotSpec, "model"): ModelPart,
    (RobotSpec, "limbs"): Limb,
    (RobotSpec, "cameras"): RobotCamera,
}
"""Fields that are lists of tables."""
_HINT = "`strands-cosmos3 robot inspect model.xml` prints a file to complete."


def read_robot(path: Path) -> RobotSpec:
    """Read a robot's TOML file; a model's path is relative to the file's folder, or the name of a
    packaged model.

    Raises:
        ResourceNotFoundError: There is no such file.
        ConfigError, InputError, UnknownNameError: It is not TOML, or a field is missing, unknown or
            malformed. The message names the file, the table and the field.
    """
    path = instance_of(path, Path, "path").expanduser()
    require_file(path, ResourceNotFoundError, _MAX_BYTES, _HINT)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        # TOMLDecodeError and UnicodeDecodeError among them
        raise ConfigError(f"{path} cannot be read as TOML ({error}). {_HINT}") from None
    robot = _build(RobotSpec, table, str(path))
    robot = replace(robot, model=tuple(_located(part, path.parent) for part in robot.model))
    object.__setattr__(robot, "file", str(path))
    return robot


def _located(part: ModelPart, folder: Path) -> ModelPart:
    file = folder / Path(part.file).expanduser()
    return replace(part, file=str(file)) if file.is_file() else part


def model_file(part: ModelPart) -> Path:
    """Return the path of a part's file: a packaged or fetched one of that name, else as it is.

    Raises:
        ResourceNotFoundError: There is none, or it is not fetched yet.
    """
    path = Path(instance_of(part, ModelPart, "part").file).expanduser()
    # a file of that name in the working folder is none of the package's business
    if path.name == str(path):
        with suppress(ResourceNotFoundError):
            return resource(f"assets/{path}")
    for name, fetched in FETCHED.items():
        if any(part.file == one.file for one in fetched.robot.model):
            if fetched.source.path.is_file():
                return fetched.source.folder / part.file.removeprefix(f"{fetched.source.name}/")
            raise ResourceNotFoundError(
                f"the model of {name!r} is not on this machine; run `strands-cosmos3 robot fetch "
                f"{name}`."
            )
    if not path.is_file():
        raise ResourceNotFoundError(
            f"the model {part.file!r} is neither a file nor a packaged model; give the path of an "
            ".xml file."
        )
    return path


def _build(kind: Any, table: Any, where: str) -> Any:
    """A dataclass from a table, its tables and lists of tables included."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, got {table!r:.80}. {_HINT}")
    own = {one.name: one for one in fields(kind) if one.init}
    if unknown := sorted(set(table) - set(own)):
        raise ConfigError(
            f"{where} has the unknown field {unknown[0]!r}; it may have: {', '.join(own)}."
        )
    optional = (
        name
        for name, one in own.items()
        if one.default is not MISSING or one.default_factory is not MISSING
    )
    if missing := sorted(set(own) - set(table) - set(optional)):
        raise ConfigError(f"{where} lacks {', '.join(missing)}. {_HINT}")
    values = {name: _value(kind, name, value, f"{where}: {name}") for name, value in table.items()}
    try:
        return kind(**values)
    except ValueError as error:  # this package's own; its message does not know the file
        error.args = (f"{where}: {error}",)
        raise


def _value(kind: type, name: str, value: Any, where: str) -> Any:
    if (table := _TABLES.get((kind, name))) is not None:
        return _build(table, value, where)
    if (each := _LISTS.get((kind, name))) is not None:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list of tables ([[{name}]]), got {value!r:.80}.")
        return tuple(_build(each, one, f"{where}[{i}]") for i, one in enumerate(value))
    if (kind, name) == (Limb, "gains"):
        if not isinstance(value, dict) or set(value) != {"kp", "kd"}:
            raise ConfigError(f"{where} must be a table with kp and kd, got {value!r:.80}.")
        return tuple(_build(Figures, value[key], f"{where}.{key}") for key in ("kp", "kd"))
    return tuple(value) if isinstance(value, list) else value


def write_robot(robot: RobotSpec) -> str:
    """Return a robot as the text of a TOML file, which :func:`read_robot` reads."""
    instance_of(robot, RobotSpec, "robot")
    return "\n".join(_lines(robot, "")).strip() + "\n"


def _lines(value: Any, path: str) -> list[str]:
    """The plain fields of a dataclass, then its tables."""
    plain, tables = [], []
    for one in fields(value):
        inner, name = getattr(value, one.name), f"{path}.{one.name}".lstrip(".")
        if (
            inner is None
            or not one.init
            or (one.default_factory is not MISSING and not inner)
            or inner == one.default
        ):
            continue
        if one.name == "gains":
            for key, figures in zip(("kp", "kd"), inner, strict=True):
                tables += ["", f"[{name}.{key}]", *_lines(figures, f"{name}.{key}")]
        elif isinstance(inner, tuple) and is_dataclass(inner[0]):
            for each in inner:
                tables += ["", f"[[{name}]]", *_lines(each, name)]
        elif is_dataclass(inner):
            tables += ["", f"[{name}]", *_lines(inner, name)]
        else:
            plain.append(f"{one.name} = {_toml(inner)}")
    return plain + tables


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
