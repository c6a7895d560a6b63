"""Sentences of demonstrations: many trained wordings, and some that are held out.

Trained wordings combine verbs, names and endings; a few are written out. None contains one of
:data:`VALIDATION` or of the evaluation's ``paraphrased`` rows, but their words occur.
``parse_instruction`` must understand every sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType

import numpy as np

from strands_cosmos3.errors import UnknownNameError
from strands_cosmos3.worlds.table.grammar import COLOURS, PARAPHRASES, Verb

_REACH_VERBS = (
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
    ),
    *(
        "lean over and touch",
        "let the gripper approach",
        "move over and point at",
        "let the hand go to",
    ),
)
_PICK_VERBS = (
    *(
        "pick up",
        "grab",
        "grasp",
        "lift",
        "take",
        "raise",
        "fetch",
        "get hold of and lift",
        "pick",
        "grab and lift",
    ),
    *("lift up", "take hold of and raise", "fetch me"),
)
_PLACE_VERBS = (
    *(
        "place",
        "put",
        "drop",
        "move",
        "bring",
        "carry",
        "toss",
        "pick up and put",
        "lift and drop",
        "get rid of",
    ),
    *("grab and place", "set"),
)
_VERBS: Mapping[Verb, tuple[str, ...]] = {
    Verb.REACH: _REACH_VERBS,
    Verb.PICK: _PICK_VERBS,
    Verb.PLACE: _PLACE_VERBS,
}
_PLACES = (
    "in the bin",
    "into the bin",
    "inside the bin",
    "in the box",
    "into the box",
    "in the tray",
    "into the tray",
)
_NAMES = (
    "the {} cube",
    "the {} block",
    "the {} one",
    "that {} cube",
    "that {} block",
    "this {} cube",
    "the cube which is {}",
)
_ENDINGS: Mapping[Verb, tuple[str, ...]] = {
    Verb.REACH: (
        "",
        " with the hand",
        " and stay there",
        " now",
        " on the table",
        " with your fingers",
        ", that is all",
    ),
    Verb.PICK: (
        "",
        " off the table",
        " and hold it up",
        " now",
        " from the table",
        " with the gripper",
        ", high up",
    ),
    Verb.PLACE: ("", " and let go", " now", ", please"),
}
_OTHER: Mapping[Verb, tuple[str, ...]] = {
    Verb.REACH: (
        *("move the gripper so that you touch the {} cube", "go to the {} block and stay there"),
        *(
            "go to where you see the {} block",
            "move to the spot where the {} one lies",
            "the {} cube: touch it",
        ),
        *("the {} block is what you should reach", "could you go to the {} cube"),
        *("see the {} block over there? touch it", "please go to the {} block"),
    ),
    Verb.PICK: (
        *(
            "pick the {} cube up",
            "grasp the {} cube and lift it",
            "lift the {} block off the table",
        ),
        *(
            "grab the {} block and pick it up",
            "the {} cube: pick it up",
            "the {} block is what you should lift",
        ),
        *("could you lift the {} one", "see the {} cube over there? grab it"),
        *("raise the {} block up into the air", "please lift the {} one"),
    ),
    Verb.PLACE: (
        *(
            "the {} cube belongs in the bin",
            "the {} one belongs in the box",
            "could you put the {} one in the tray",
        ),
        *(
            "the {} block: into the bin with it",
            "see the {} cube over there? put it in the bin",
            "in the bin with the {} block",
        ),
        *("the {} cube is what you should put in the box", "please drop the {} block in the tray"),
    ),
}
_PLAIN: Mapping[Verb, str] = {
    Verb.REACH: "reach the {} cube",
    Verb.PICK: "pick up the {} cube",
    Verb.PLACE: "place the {} cube in the bin",
}

VALIDATION: Mapping[Verb, tuple[str, ...]] = MappingProxyType(
    {
        Verb.REACH: (
            "please reach the {} cube",
            "approach the {} block",
            "touch the {} block",
            "go to the cube that is {}",
        ),
        Verb.PICK: (
            "please pick up the {} cube",
            "grasp the {} block",
            "take the {} block",
            "lift up the cube that is {}",
        ),
        Verb.PLACE: (
            "please place the {} cube in the bin",
            "put the {} block in the tray",
            "drop the {} one into the bin",
            "bring the cube that is {} into the bin",
        ),
    }
)
"""Verb -> templates that are never trained."""


def _trained(verb: Verb) -> tuple[str, ...]:
    """Return every trained wording, the plainest first."""
    verbs, places = (
        _VERBS[verb],
        tuple(f" {place}" for place in _PLACES) if verb is Verb.PLACE else ("",),
    )
    combined = (
        "".join((act, " ", *rest)) for act, *rest in product(verbs, _NAMES, places, _ENDINGS[verb])
    )
    untrained = (*VALIDATION[verb], *(text.replace("{a}", "{}") for text in PARAPHRASES[verb]))
    wordings = dict.fromkeys((_PLAIN[verb], *_OTHER[verb], *combined))
    return tuple(wording for wording in wordings if not any(text in wording for text in untrained))


TRAINED: Mapping[Verb, tuple[str, ...]] = MappingProxyType(
    {verb: _trained(verb) for verb in _VERBS}
)
"""Verb -> trained templates with ``{}`` for the colour, the plainest first."""

GOALS: tuple[tuple[Verb, str], ...] = tuple(
    (verb, colour) for verb in TRAINED for colour in COLOURS
)
"""Goals of demonstrations, in the order of the labels' goal axis."""


def sentence(
    goal: int, rng: np.random.Generator, templates: Mapping[Verb, tuple[str, ...]] = TRAINED
) -> str:
    """Draw a sentence for a goal, given by its index in :data:`GOALS`."""
    verb, colour = GOALS[goal]
    choices = templates[verb]
    return choices[int(rng.integers(len(choices)))].format(colour)


def plain(goal: int) -> str:
    """Return the plainest sentence of a goal; an unknown one raises UnknownNameError."""
    if not 0 <= goal < len(GOALS):
        raise UnknownNameError("goal", str(goal), [f"{i}" for i in range(len(GOALS))])
    verb, colour = GOALS[goal]
    return TRAINED[verb][0].format(colour)
