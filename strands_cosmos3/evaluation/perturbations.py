"""Perturbations of a policy's input, its scene or its time. Each is a row of the report.

A perturbation changes one thing and keeps the seed and the judge, so rows can be compared episode
by episode:

- ``blank``: every image is black. The success of a policy that uses images falls to chance.
- ``swapped``: the policy's instruction names another colour than the goal. A policy that reads it
  does the other thing.
- ``shuffled``: the policy's instruction names a random colour. Success falls to chance for a policy
  that reads it.
- ``random``: the policy's instruction is letters without a meaning, and no check refuses them.
  Success falls to chance.
- ``paraphrased``: the same goal in words that no template of this package's demonstrations
  contains.
- ``steps=N``, ``replan=N``: N denoising steps, or a new chunk after N rows.
- ``latency=S``, ``limit=S``: an inference takes S simulated seconds; an episode ends after S
  seconds.
- ``light=F``, ``table=NAME``, ``camera=CM``: lights times F, another table, the wrist camera moved
  by CM centimetres.
- ``cubes=MM``, ``close``, ``crowded``: cubes of another size, another cube 6.5 cm from the goal's,
  two cubes of other colours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.worlds.table.appearance import LARGEST_LIGHT, TABLES
from strands_cosmos3.worlds.table.grammar import (
    COLOURS,
    PARAPHRASES,
    TEMPLATES,
    Goal,
    parse_instruction,
)

Text = Literal["asked", "swapped", "shuffled", "paraphrased", "random"]
Images = Literal["seen", "blank"]
TEXTS = ("asked", "swapped", "shuffled", "paraphrased", "random")
IMAGES = ("seen", "blank")
CONTROLS = ("plain", "blank", "swapped", "shuffled", "paraphrased", "random")

_NUMBERS: Mapping[str, tuple[str, float, float]] = {
    "steps": ("num_steps", 1, 1000),
    "replan": ("replan_rows", 1, 1000),
    "latency": ("latency_s", 0, 10),
    "limit": ("limit_s", 0.1, 3600),
    "light": ("light", 0.05, LARGEST_LIGHT),
    "camera": ("camera_cm", 0, 20),
    "cubes": ("cubes_mm", 20, 60),
}
"""Short form -> field, least and largest value."""
_WHOLE = ("num_steps", "replan_rows")
_FLAGS = ("close", "crowded")
SHORT_FORMS = (*CONTROLS, *(f"{name}=N" for name in _NUMBERS), "table=NAME", *_FLAGS)
_NAME = re.compile(r"[a-z0-9][a-z0-9._=+-]*")


@dataclass(frozen=True)
class Perturbation:
    """One row of an evaluation, and the name of its folder.

    Args:
        images: ``seen``, or ``blank`` for black images of the same size.
        text: The policy's instruction: ``asked`` for the goal's own, or one of the other three.
        num_steps, replan_rows: Denoising steps, and rows before the next chunk; None for the
            evaluation's own.
        latency_s, limit_s: Simulated duration of an inference, and longest duration of an episode;
            None for 0 and its own.
        light, table: Factor on all lights, and one of
            :data:`~strands_cosmos3.sim.appearance.TABLES`; None as it is.
        camera_cm: Displacement of the wrist camera in a random direction, None for none.
        cubes_mm: Edge of the cubes, None for 40.
        close: Whether another cube stands 6.5 cm from the goal's, centre to centre.
        crowded: Whether there are two more cubes, of other colours.

    Raises:
        ConfigError, UnknownNameError: The name cannot name a folder, or a value is invalid.
    """

    name: str = "plain"
    images: Images = "seen"
    text: Text = "asked"
    num_steps: int | None = None
    replan_rows: int | None = None
    latency_s: float | None = None
    limit_s: float | None = None
    light: float | None = None
    table: str | None = None
    camera_cm: float | None = None
    cubes_mm: float | None = None
    close: bool = False
    crowded: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"conditions: {self.name!r} must consist of a-z, 0-9 and . _ = + -, because it "
                "names a folder."
            )
        for name, value, known in (
            ("images", self.images, IMAGES),
            ("text", self.text, TEXTS),
            ("table", self.table, TABLES),
        ):
            if value not in known and not (name == "table" and value is None):
                raise UnknownNameError(f"{name} of a condition", value, known)
        for name, least, largest in _NUMBERS.values():
            value = getattr(self, name)
            if value is not None and not _is_number(value, least, largest, name in _WHOLE):
                whole = "a whole number" if name in _WHOLE else "a number"
                raise ConfigError(
                    f"condition {self.name!r}: {name} must be {whole} from {least:g} to "
                    f"{largest:g}, got {value!r}."
                )
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"condition {self.name!r}: {name} must be true or false, got "
                    f"{getattr(self, name)!r}."
                )

    @property
    def changes_scene(self) -> bool:
        """Whether the scene differs from that of other conditions."""
        return any(
            (self.light, self.table, self.camera_cm, self.cubes_mm, self.close, self.crowded)
        )

    def identity(self) -> dict[str, Any]:
        """Return what determines an episode; fields that version 0.1 lacks only where they are
        set, so that it is the same.
        """
        later = (
            *(name for name, _, _ in _NUMBERS.values() if name not in _WHOLE),
            "table",
            *_FLAGS,
        )
        return {
            name: value
            for name, value in vars(self).items()
            if name not in later or value not in (None, False)
        }

    @classmethod
    def parse(cls, text: str) -> Perturbation:
        """Return a perturbation from its short form: names and settings joined by ``+``, e.g.
        ``swapped+replan=8``.

        Raises:
            UnknownNameError, ConfigError: It cannot be parsed, or sets the same thing twice.
        """
        parsed = cls(text)
        taken: set[str] = set()
        for part in text.split("+"):
            change = _change(part)
            if taken & set(change):
                raise ConfigError(f"condition {text!r} sets {', '.join(change)} twice.")
            taken |= set(change)
            parsed = replace(parsed, **change)
        return parsed

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Perturbation:
        """Return a perturbation from a table of a TOML file.

        Raises:
            UnknownNameError, ConfigError: A key is unknown, the name is missing, or a value is
                invalid.
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
        if self.text == "random":
            return " ".join(
                "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), rng.integers(2, 8)))
                for _ in range(5)
            )
        goal = parse_instruction(goal_instruction)
        if self.text == "paraphrased":
            return _worded(rng.choice(PARAPHRASES[goal.verb]), goal)
        below = None if goal.onto is None else _colour(goal.onto)
        free = [colour for colour in COLOURS if colour != below]
        if self.text == "swapped":
            free.remove(_colour(goal.cube))
        return _worded(TEMPLATES[goal.verb], replace(goal, cube=f"cube_{rng.choice(free)}"))


def _change(part: str) -> dict[str, Any]:
    """Return the fields that one part of a short form sets."""
    name, equals, value = part.partition("=")
    if equals and name == "table":
        return {"table": value}
    if equals and name in _NUMBERS:
        field = _NUMBERS[name][0]
        try:
            return {field: int(value) if field in _WHOLE else float(value)}
        except ValueError:
            raise ConfigError(
                f"condition {part!r}: {value!r} is no {'whole ' * (field in _WHOLE)}number."
            ) from None
    if not equals and part in _FLAGS:
        return {part: True}
    if equals or part not in CONTROLS:
        raise UnknownNameError("condition", part, SHORT_FORMS)
    return {} if part == "plain" else {"images" if part == "blank" else "text": part}


def _is_number(value: Any, least: float, largest: float, whole: bool) -> bool:
    kind = int if whole else int | float
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value <= largest


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
        raise ConfigError(
            f"conditions {names}: an evaluation needs at least one, each with its own name."
        )
    return perturbations
