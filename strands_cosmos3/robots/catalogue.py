"""Robots by name, and in TOML files: a packaged robot is a file beside this module, in the same
format as a user's, with the fields of :mod:`strands_cosmos3.robots.spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from strands_cosmos3.checks import instance_of
from strands_cosmos3.errors import ResourceNotFoundError, UnknownNameError
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.fetch import DOWNLOADS, ModelSource, model_sources
from strands_cosmos3.robots.spec import ModelPart, RobotSpec
from strands_cosmos3.tables import from_table, read_toml, to_toml

_FILES = {
    path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml")) if path != DOWNLOADS
}
"""The packaged robots' files by the robots' names; each is read when it is asked for."""
_HINT = "`strands-cosmos3 robot inspect model.xml` prints a file to complete."


def read_robot(path: Path) -> RobotSpec:
    """Read a robot's TOML file; a model's path is relative to the file's folder, or the name of a
    packaged or fetched model.

    Raises:
        ResourceNotFoundError: There is no such file.
        ConfigError, InputError, UnknownNameError: It is not TOML, or a field is missing, unknown or
            malformed. The message names the file, the table and the field.
    """
    path = path.expanduser()
    robot = from_table(RobotSpec, read_toml(path, _HINT), str(path), _HINT)
    robot = replace(robot, model=tuple(_located(part, path.parent) for part in robot.model))
    object.__setattr__(robot, "file", str(path))
    return robot


def write_robot(robot: RobotSpec) -> str:
    """Return a robot as the text of a TOML file, which :func:`read_robot` reads."""
    return to_toml(robot)


def _located(part: ModelPart, folder: Path) -> ModelPart:
    file = folder / Path(part.file).expanduser()
    return replace(part, file=str(file)) if file.is_file() else part


def model_file(part: ModelPart) -> Path:
    """Return the path of a part's file: a packaged or fetched one of that name, else as it is.

    Raises:
        ResourceNotFoundError: There is none, or it is not fetched yet.
    """
    path = Path(part.file).expanduser()
    # the name of a packaged model is no file in the working folder
    if path.name == str(path):
        with suppress(ResourceNotFoundError):
            return resource(f"assets/{path}")
    if (source := _source_of(part)) is not None:
        if not source.path.is_file():
            raise ResourceNotFoundError(
                f"the model of {source.name!r} is not on this machine; run `strands-cosmos3 robot "
                f"fetch {source.name}`."
            )
        return source.folder / path.relative_to(source.name)
    if not path.is_file():
        raise ResourceNotFoundError(
            f"the model {part.file!r} is neither a file nor a packaged model; give the path of an "
            ".xml file."
        )
    return path


def _source_of(part: ModelPart) -> ModelSource | None:
    """The source of a part that is fetched: its file is a path in the folder of that name."""
    name, separator, _ = part.file.partition("/")
    return model_sources().get(name) if separator else None


def source_of(robot: RobotSpec) -> ModelSource | None:
    """Return where a robot's model is fetched from; None if it is packaged, or the user's."""
    return _source_of(robot.model[0])


def is_present(robot: RobotSpec) -> bool:
    """Return whether a packaged robot's model is on this machine."""
    source = source_of(robot)
    return source is None or source.path.is_file()


@cache
def _packaged(name: str) -> RobotSpec:
    return from_table(RobotSpec, read_toml(_FILES[name]), name)


@cache
def packaged_robots() -> Mapping[str, RobotSpec]:
    """Return the robots of this package by name: those whose model is packaged, then those to
    fetch.
    """
    robots = sorted(map(_packaged, _FILES), key=lambda robot: source_of(robot) is not None)
    return MappingProxyType({robot.name: robot for robot in robots})


@cache
def aliases() -> Mapping[str, str]:
    """Return the robots' other names, among them strands-robots 0.5.3's, and whose they are."""
    robots = packaged_robots().values()
    return {alias: robot.name for robot in robots for alias in robot.aliases}


def get_robot(robot: str | Path | RobotSpec = "panda") -> RobotSpec:
    """Return a robot by name or alias (``"franka"``), or read its TOML file.

    Raises:
        UnknownNameError: No such robot; the message lists the names.
        InputError, ConfigError, ResourceNotFoundError: The file is missing, or does not describe a
            robot.
    """
    if isinstance(robot, RobotSpec):
        return robot
    if isinstance(robot, Path) or (isinstance(robot, str) and robot.lower().endswith(".toml")):
        return read_robot(Path(robot))
    name = instance_of(robot, str, "the name of a robot").strip().lower()
    if name not in _FILES and (name := aliases().get(name, name)) not in _FILES:
        raise UnknownNameError("robot", robot, (*_FILES, *aliases(), "a path ending in .toml"))
    return _packaged(name)


def recorded_robot(robot_type: str | None) -> RobotSpec | None:
    """Return the packaged robot that a dataset or a recording names; None if it names none, another
    one, or a file.
    """
    if robot_type is None or robot_type.lower().endswith(".toml"):
        return None  # a dataset names no files of this machine
    with suppress(UnknownNameError):
        return get_robot(robot_type)
    return None


PANDA = get_robot("panda")
