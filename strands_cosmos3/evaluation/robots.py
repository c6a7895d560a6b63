"""The robot of an evaluation on our table: its tasks, the conditions that it can have, and what
identifies it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.robots.catalogue import PANDA, get_robot, model_file
from strands_cosmos3.robots.spec import RobotSpec
from strands_cosmos3.sim.scene_builder import view_names_of
from strands_cosmos3.worlds.arms import ROBOTS
from strands_cosmos3.worlds.table.tasks import CUBE_TASKS, TASKS

DOMAIN = "droid"
"""Embodiment of a robot that Cosmos 3 has no domain for."""
_WRIST = "wrist"
_BAR_TASKS = tuple(name for name in TASKS if name not in CUBE_TASKS)


def evaluated_robot(name: str) -> RobotSpec:
    """Return a robot that the table takes, by name, alias or .toml file.

    Raises:
        UnknownNameError: There is no such robot.
        ConfigError: The simulation does not take it; the message lists those that it takes.
        ConfigError, InputError, ResourceNotFoundError: Its file cannot be read.
    """
    robot = get_robot(name)
    if not _is_file(name) and robot.name not in ROBOTS:
        raise ConfigError(
            f"robot {robot.name!r} is not simulated (docs/robots.md); these are: "
            f"{', '.join(ROBOTS)}."
        )
    return robot


def absolute(robot: str) -> str:
    """Return a robot's name, or its file's absolute path: workers may run in another folder."""
    return str(Path(robot).expanduser().absolute()) if _is_file(robot) else robot


def tasks_of(robot: RobotSpec) -> tuple[str, ...]:
    """Return the names of a robot's tasks: with cubes for one arm, with a bar for two."""
    return CUBE_TASKS if len(robot.limbs) == 1 else _BAR_TASKS


def embodiment_of(robot: RobotSpec) -> str:
    """Return the embodiment whose rows drive a robot."""
    return robot.embodiment or DOMAIN


def require_conditions(robot: RobotSpec, conditions: Iterable[Perturbation]) -> None:
    """Raise ConfigError for a condition that changes nothing of what the robot's policy sees or
    does.
    """
    views, of_bar = view_names_of(robot), len(robot.limbs) > 1
    for one in conditions:
        if one.camera_cm is not None and _WRIST not in views:
            raise ConfigError(
                f"condition {one.name!r} moves the wrist camera, but the pictures of "
                f"{robot.name!r} are {', '.join(views)}; "
                "leave it out, or use light=F or table=NAME."
            )
        if of_bar and (one.cubes_mm is not None or one.close or one.crowded):
            raise ConfigError(
                f"condition {one.name!r} changes cubes, and {robot.name!r} has a bar; leave it out."
            )
        if of_bar and one.text not in ("asked", "random"):
            raise ConfigError(
                f"condition {one.name!r} names another colour or wording, and there is one bar; "
                "leave it out, or use random."
            )


@lru_cache(maxsize=32)
def identity_of(name: str) -> dict[str, Any]:
    """Return what identifies a robot among episodes: nothing for the Panda, as in version 0.1;
    else its name and its files.
    """
    robot = get_robot(name)
    if robot == PANDA:
        return {}
    if not _is_file(name):
        return {"robot": robot.name}
    digest = hashlib.sha256()
    for path in (Path(name), *(model_file(part) for part in robot.model)):
        digest.update(path.read_bytes())
    return {"robot": robot.name, "robot_sha256": digest.hexdigest()}


def _is_file(name: str) -> bool:
    return name.lower().endswith(".toml")
