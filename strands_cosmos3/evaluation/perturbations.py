"""Perturbations of a policy's input. Each is a row of the report.

A perturbation changes one thing and keeps the scene, the seed and the judge, so rows can be compared episode by episode:

- ``blank``: every image is black. The success of a policy that uses images falls to chance.
- ``swapped``: the policy's instruction names another colour than the goal. A policy that reads it does the other thing.
- ``shuffled``: the policy's instruction names a random colour. Success falls to chance for a policy that reads it.
- ``paraphrased``: the same goal in words that no template of this package's demonstrations contains.
- ``steps=N``, ``replan=N``: N denoising steps, or a new chunk after N rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.instruction import COLOURS, TEMPLATES, Goal, Verb, parse_instruction

Text = Literal["asked", "swapped", "shuffled", "paraphrased"]
Images = Literal["seen", "blank"]
TEXTS = ("asked", "swapped", "shuffled", "paraphrased")
IMAGES = ("seen", "blank")
CONTROLS = ("plain", "blank", "swapped", "shuffled", "paraphrased")

PARAPHRASES: Mapping[Verb, tuple[str, ...]] = {
    Verb.REACH: (
        "hover over the {a} block",
        "approach the {a} one with the gripper",
        "touch that {a} block over there",
        "go to where the {a} cube lies",
    ),
    Verb.PICK: (
        "grab the {a} block",
        "take the {a} cube off the table",
        "lift that {a} block into the air",
        "fetch me the {a} one",
    ),
    Verb.PLACE: (
        "put the {a} block into the box",
        "drop the {a} cube inside the bin",
        "the {a} block belongs in the tray",
        "get rid of the {a} one: in the bin with it",
    ),
    Verb.STACK: (
        "put the {a} block on top of the {b} one",
        "set the {a} cube down on the {b} cube",
        "the {a} block goes onto the {b} block",
        "build a tower: the {a} cube on top of the {b} cube",
    ),
}
"""Held out: demonstrations must not use these, or ``paraphrased`` is meaningless."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._=+-]*")


@dataclass(frozen=True)
class Perturbation:
    """One row of an evaluation, and the name of its folder.

    Args:
        images: ``seen``, or ``blank`` for black images of the same size.
        text: The policy's instruction: ``asked`` for the goal's own, or one of the other three.
        num_steps, replan_rows: Denoising steps, and rows before the next chunk; None for the evaluation's own.

    Raises:
        ConfigError, UnknownNameError: The name cannot name a folder, or a value is invalid.
    """

    name: str = "plain"
    images: Images = "seen"
    text: Text = "asked"
    num_steps: int | None = None
    replan_rows: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(f"conditions: {self.name!r} must consist of a-z, 0-9 and . _ = + -, because it names a folder.")
        if self.images not in IMAGES:
            raise UnknownNameError("images of a condition", self.images, IMAGES)
        if self.text not in TEXTS:
            raise UnknownNameError("text of a condition", self.text, TEXTS)
        for name, value in (("num_steps", self.num_steps), ("replan_rows", self.replan_rows)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"condition {self.name!r}: {name} must be a whole number of at least 1, got {value!r}.")

    @classmethod
    def parse(cls, text: str) -> Perturbation:
        """Return a perturbation from its short form: names and settings joined by ``+``, e.g. ``swapped+replan=8``.

        Raises:
            UnknownNameError, ConfigError: It cannot be parsed, or sets the same thing twice.
        """
        parsed = cls(text)
        taken: set[str] = set()
        for part in text.split("+"):
            name, _, number = part.partition("=")
            if number:
                key = {"steps": "num_steps", "replan": "replan_rows"}.get(name)
                if key is None or not number.isdigit():
                    raise UnknownNameError("condition", part, (*CONTROLS, "steps=N", "replan=N"))
                change: dict[str, Any] = {key: int(number)}
            elif part in CONTROLS:
                key = "images" if part == "blank" else "text"
                change = {} if part == "plain" else {key: part}
            else:
                raise UnknownNameError("condition", part, (*CONTROLS, "steps=N", "replan=N"))
            if taken & set(change):
                raise ConfigError(f"condition {text!r} sets {', '.join(change)} twice.")
            taken |= set(change)
            parsed = replace(parsed, **change)
        return parsed

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Perturbation:
        """Return a perturbation from a table of a TOML file.

        Raises:
            UnknownNameError, ConfigError: A key is unknown, the name is missing, or a value is invalid.
        """
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise UnknownNameError("key of a condition", key, known)
        if "name" not in values:
            raise ConfigError(f"a condition needs a name, got {dict(values)}.")
        return cls(**values)

    def policy_instruction(self, goal_instruction: str, rng: np.random.Generator) -> str:
        """Return the policy's instruction; ``rng`` is the episode's.

        Raises:
            InputError: The goal instruction names no verb or colour.
        """
        if self.text == "asked":
            return goal_instruction
        goal = parse_instruction(goal_instruction)
        if self.text == "paraphrased":
            return _worded(rng.choice(PARAPHRASES[goal.verb]), goal)
        below = None if goal.onto is None else _colour(goal.onto)
        free = [colour for colour in COLOURS if colour != below]
        if self.text == "swapped":
            free.remove(_colour(goal.cube))
        return _worded(TEMPLATES[goal.verb], replace(goal, cube=f"cube_{rng.choice(free)}"))


def _colour(cube: str) -> str:
    return cube.removeprefix("cube_")


def _worded(template: str, goal: Goal) -> str:
    return template.format(a=_colour(goal.cube), b="" if goal.onto is None else _colour(goal.onto))


def parse_conditions(texts: list[str] | tuple[str, ...]) -> tuple[Perturbation, ...]:
    """Return perturbations from their short forms; a ConfigError as in :func:`distinct`."""
    return distinct(tuple(Perturbation.parse(text) for text in texts))


def distinct(perturbations: tuple[Perturbation, ...]) -> tuple[Perturbation, ...]:
    """Return the perturbations; raise a ConfigError if there is none or two have the same name."""
    names = [perturbation.name for perturbation in perturbations]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"conditions {names}: an evaluation needs at least one, each with its own name.")
    return perturbations
