"""What demonstrations are told: many ways of saying the same, and some that no training ever sees.

Wordings are verbs x names x tails, and some others. Left out is every one in which a wording of :data:`HELD_OUT`, or of the
evaluation's ``paraphrased`` rows, occurs; their words are seen in other sentences.

Every sentence is one that :func:`strands_cosmos3.instruction.parse_instruction` understands, because the expert obeys it and
the tasks judge by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType

import numpy as np

from strands_cosmos3.errors import UnknownNameError
from strands_cosmos3.evaluation.perturbations import PARAPHRASES
from strands_cosmos3.instruction import COLOURS, Verb

_REACHES = (
    *(
        "reach",
        "reach for",
        "go to",
        "move to",
        "touch",
        "approach",
        "point at",
        "hover over",
        "hover above",
        "lean over and touch",
    ),
    *("let the gripper approach", "move over and point at", "let the hand go to"),
)
_PICKS = (
    *("pick up", "grab", "grasp", "lift", "take", "raise", "fetch", "get hold of and lift", "pick", "grab and lift"),
    *("lift up", "take hold of and raise", "fetch me"),
)
_CALLED = ("the {} cube", "the {} block", "the {} one", "that {} cube", "that {} block", "this {} cube", "the cube which is {}")
_TAILS: Mapping[Verb, tuple[str, ...]] = {
    Verb.REACH: ("", " with the hand", " and stay there", " now", " on the table", " with your fingers", ", that is all"),
    Verb.PICK: ("", " off the table", " and hold it up", " now", " from the table", " with the gripper", ", high up"),
}
_OTHERWISE: Mapping[Verb, tuple[str, ...]] = {
    Verb.REACH: (
        "move the gripper so that you touch the {} cube",
        "go to the {} block and stay there",
        "go to where you see the {} block",
        "move to the spot where the {} one lies",
        "the {} cube: touch it",
        "the {} block is what you should reach",
        "could you go to the {} cube",
        "see the {} block over there? touch it",
        "please go to the {} block",
    ),
    Verb.PICK: (
        "pick the {} cube up",
        "grasp the {} cube and lift it",
        "lift the {} block off the table",
        "grab the {} block and pick it up",
        "the {} cube: pick it up",
        "the {} block is what you should lift",
        "could you lift the {} one",
        "see the {} cube over there? grab it",
        "raise the {} block up into the air",
        "please lift the {} one",
    ),
}
_PLAIN: Mapping[Verb, str] = {Verb.REACH: "reach the {} cube", Verb.PICK: "pick up the {} cube"}

HELD_OUT: Mapping[Verb, tuple[str, ...]] = MappingProxyType(
    {
        Verb.REACH: ("please reach the {} cube", "approach the {} block", "touch the {} block", "go to the cube that is {}"),
        Verb.PICK: ("please pick up the {} cube", "grasp the {} block", "take the {} block", "lift up the cube that is {}"),
    }
)
"""Verb -> templates that training never sees."""


def _said(verb: Verb) -> tuple[str, ...]:
    """Every way of saying it, the plainest first, but for those in which a sentence that is kept for tests occurs."""
    verbs = _REACHES if verb is Verb.REACH else _PICKS
    made = (f"{act} {name}{tail}" for act, name, tail in product(verbs, _CALLED, _TAILS[verb]))
    kept = (*HELD_OUT[verb], *(text.replace("{a}", "{}") for text in PARAPHRASES[verb]))
    ways = dict.fromkeys((_PLAIN[verb], *_OTHERWISE[verb], *made))
    return tuple(way for way in ways if not any(text in way for text in kept))


TRAINED: Mapping[Verb, tuple[str, ...]] = MappingProxyType({verb: _said(verb) for verb in (Verb.REACH, Verb.PICK)})
"""Verb -> templates of training, ``{}`` being the colour, the plainest first."""

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
