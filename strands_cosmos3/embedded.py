"""The checkpoint that comes with this package: what runs where nobody names another. Its card lies beside it."""

from __future__ import annotations

from pathlib import Path

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import resource

FOLDER = "assets/table_policy"
EMBODIMENTS = ("droid", "droid_lerobot")
"""The rig's short name, and its domain's."""
ROBOTS = ("panda", "franka")
TASKS = ("reach", "pick")
_ELSE = "name another: model= (--model) a Cosmos 3 checkpoint, or backend= (--backend) scripted, replay or service"


def embedded_checkpoint(embodiment: str = EMBODIMENTS[0], robot: str | None = "panda", task: str | None = None) -> Path:
    """Folder of the embedded checkpoint, in the released layout.

    It was trained on one simulated table, for one arm and two tasks, and is not offered for anything else.

    Args:
        embodiment: Whose actions are asked for. robot: Which arm follows them. task: What is to be done, where that is known.

    Raises:
        ConfigError: It knows no such embodiment, robot or task.
        ResourceNotFoundError: The installation lacks it.
    """
    asked = (("embodiment", embodiment, EMBODIMENTS), ("robot", robot, ROBOTS), ("task", task or TASKS[0], TASKS))
    for name, value, known in asked:
        if value not in known:
            raise ConfigError(
                f"the embedded checkpoint knows {name} {' or '.join(map(repr, known))} on its own simulated table, not "
                f"{value!r}; {_ELSE}."
            )
    return resource(FOLDER)
