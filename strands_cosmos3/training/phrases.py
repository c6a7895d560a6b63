"""What demonstrations are told: many ways of saying the same, and some that no training ever sees.

Every sentence is one that :func:`strands_cosmos3.instruction.parse_instruction` understands, because the expert obeys it and
the tasks judge by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from strands_cosmos3.errors import UnknownNameError
from strands_cosmos3.instruction import COLOURS, Verb

TRAINED: Mapping[Verb, tuple[str, ...]] = MappingProxyType(
    {
        Verb.REACH: (
            "reach the {} cube",
            "reach for the {} cube",
            "go to the {} cube",
            "move to the {} cube",
            "move to the {} block",
            "touch the {} cube",
            "approach the {} cube",
            "reach the {} block",
            "move the gripper so that you touch the {} cube",
            "go to the {} block and stay there",
        ),
        Verb.PICK: (
            "pick up the {} cube",
            "pick the {} cube up",
            "grasp the {} cube and lift it",
            "lift the {} cube",
            "take the {} cube",
            "grab the {} cube",
            "pick up the {} block",
            "lift the {} block off the table",
            "raise the {} cube",
            "grab the {} block and pick it up",
        ),
    }
)
"""Verb -> templates of training, ``{}`` being the colour."""

HELD_OUT: Mapping[Verb, tuple[str, ...]] = MappingProxyType(
    {
        Verb.REACH: ("please reach the {} cube", "approach the {} block", "touch the {} block", "go to the cube that is {}"),
        Verb.PICK: ("please pick up the {} cube", "grasp the {} block", "take the {} block", "lift up the cube that is {}"),
    }
)
"""Verb -> templates that training never sees."""

GOALS: tuple[tuple[Verb, str], ...] = tuple((verb, colour) for verb in TRAINED for colour in COLOURS)
"""What a demonstration may be asked for, in the order of the labels' leading axis."""


def sentence(goal: int, rng: np.random.Generator, templates: Mapping[Verb, tuple[str, ...]] = TRAINED) -> str:
    """A sentence for a goal by its index in :data:`GOALS`."""
    verb, colour = GOALS[goal]
    choices = templates[verb]
    return choices[int(rng.integers(len(choices)))].format(colour)


def plain(goal: int) -> str:
    """The goal's first, plainest sentence.

    Raises:
        UnknownNameError: No such goal.
    """
    if not 0 <= goal < len(GOALS):
        raise UnknownNameError("goal", str(goal), [f"{i}" for i in range(len(GOALS))])
    verb, colour = GOALS[goal]
    return TRAINED[verb][0].format(colour)
