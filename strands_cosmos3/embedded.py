"""The bundled policy: the checkpoint that runs when none is named. Its model card is in its
folder.
"""

from __future__ import annotations

from pathlib import Path

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import resource

FOLDER = "assets/table_policy"
EMBODIMENTS = ("droid", "droid_lerobot")
"""The rig's short name, and its domain's."""
ROBOTS = ("panda", "franka")
TASKS = ("reach", "pick", "place")
WORLD = "table"


def embedded_checkpoint(
    embodiment: str = EMBODIMENTS[0],
    robot: str | None = "panda",
    task: str | None = None,
    world: str = WORLD,
) -> Path:
    """Return the folder of the bundled policy, in the released layout.

    It was trained on one simulated table, for one arm and three tasks; anything else raises an
    error.

    Args:
        embodiment: Name of the embodiment.
        robot: Name of the arm.
        task: Name of the task, if known.
        world: Name of the world.

    Raises:
        ConfigError: It was not trained for that embodiment, robot, task or world; the message lists
            what it knows.
        ResourceNotFoundError: The installation lacks it.
    """
    choices = (
        ("world", world, (WORLD,)),
        ("embodiment", embodiment, EMBODIMENTS),
        ("robot", robot, ROBOTS),
        ("task", task or TASKS[0], TASKS),
    )
    for name, value, trained in choices:
        if value not in trained:
            raise ConfigError(
                f"the bundled policy knows {name} {' or '.join(map(repr, trained))} on its own "
                f"simulated table, not {value!r}: use --backend scripted (backend=), replay or "
                "service, or --model (model=), another Cosmos 3 checkpoint, e.g. one that was "
                "post-trained for it (docs/post_training.md)."
            )
    return resource(FOLDER)
