"""The episodes of an evaluation: conditions, and assignments that depend on their condition, task
and index only, so they are the same wherever they run.

A condition changes one thing and keeps seed and judge, so rows can be compared episode by episode.
The policy's part is the same in every world:

- ``blank``: every image is black. The success of a policy that uses images falls to chance.
- ``swapped``: the policy's instruction asks for another goal than the one that is judged. A policy
  that reads it does the other thing.
- ``shuffled``: the policy's instruction asks for a random goal. Success falls to chance for a
  policy that reads it.
- ``random``: the policy's instruction is letters without a meaning, and no check refuses them.
  Success falls to chance.
- ``paraphrased``: the same goal in words that no demonstration contains.
- ``steps=N``, ``replan=N``: N denoising steps, or a new chunk after N rows.
- ``latency=S``, ``limit=S``: an inference takes S simulated seconds; an episode ends after S
  seconds.

Others are the world's (:class:`~strands_cosmos3.worlds.Variation`), e.g. ``light=0.5``.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np

from strands_cosmos3.checks import known_name
from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.worlds import Start, Variation, World, varied
from strands_cosmos3.worlds.world import NOT_VARIED, REWORDINGS

Text = Literal["swapped", "shuffled", "paraphrased", "random"]
TEXTS: tuple[Text, ...] = get_args(Text)
PLAIN = "plain"
_NAME = re.compile(r"[a-z0-9][a-z0-9._=+-]*")


@dataclass(frozen=True)
class PolicyVariation(Variation):
    """What is varied of a policy's input and timing.

    Args:
        images: ``blank`` for black images of the same size.
        text: The policy's instruction, if it is not the goal's.
        num_steps, replan_rows: Denoising steps, and rows before the next chunk; None for the
            evaluation's own.
        latency_s, limit_s: Simulated duration of an inference, and longest duration of an episode;
            None for 0 and the evaluation's own.
    """

    images: Literal["blank"] | None = field(default=None, metadata={"names": ("blank",)})
    text: Text | None = field(default=None, metadata={"names": TEXTS})
    num_steps: int | None = varied(1, 1000, "steps", whole=True)
    replan_rows: int | None = varied(1, 1000, "replan", whole=True)
    latency_s: float | None = varied(0, 10, "latency")
    limit_s: float | None = varied(0.1, 3600, "limit")


_WORDS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    "blank": {"images": "blank"},
    **{text: {"text": text} for text in TEXTS},
}


@dataclass(frozen=True)
class Condition:
    """One row of an evaluation, and the name of its folder.

    Args:
        policy: What is varied of the policy's input and timing.
        world: What is varied in the world, of its own type.

    Raises:
        ConfigError: The name cannot name a folder.
    """

    name: str = PLAIN
    policy: PolicyVariation = PolicyVariation()
    world: Variation = NOT_VARIED

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"conditions: {self.name!r} must consist of a-z, 0-9 and . _ = + -, because it "
                "names a folder."
            )

    def identity(self) -> dict[str, Any]:
        """Return its name and what it changes, for JSON."""
        return {"name": self.name, **self.policy.identity(), **self.world.identity()}

    @classmethod
    def parse(cls, text: str, variation: type[Variation] = Variation) -> Condition:
        """Return a condition from its short form: words and settings joined by ``+``, e.g.
        ``swapped+replan=8``; ``variation`` is the world's.

        Raises:
            UnknownNameError, ConfigError: It cannot be parsed, or sets the same thing twice.
        """
        cls(text)  # raises for a name that is none
        changes: dict[str, Any] = {}
        for part in text.split("+"):
            change = _change(part, variation)
            if twice := set(changes) & set(change):
                raise ConfigError(f"condition {text!r} sets {', '.join(twice)} twice.")
            changes |= change
        return cls.from_dict({"name": text, **changes}, variation)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], variation: type[Variation] = Variation
    ) -> Condition:
        """Return a condition from a table of a TOML file: its name and fields.

        Raises:
            UnknownNameError, ConfigError: A key is unknown, the name is missing, or a value is
                invalid.
        """
        of_policy = _names_of(PolicyVariation)
        of_world = _names_of(variation)
        valid = ("name", *of_policy, *of_world)
        for key in values:
            known_name(key, "key of a condition", valid)
        if "name" not in values:
            raise ConfigError(f"a condition needs a name, got {dict(values)}.")
        try:
            policy = PolicyVariation(**part_of(values, of_policy))
            return cls(values["name"], policy, variation(**part_of(values, of_world)))
        except ConfigError as error:
            raise ConfigError(f"condition {values['name']!r}: {error}") from None


def part_of(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the values of those names that there are."""
    return {name: values[name] for name in names if name in values}


def _names_of(kind: type[Variation]) -> tuple[str, ...]:
    return tuple(option.name for option in fields(kind))


def _change(part: str, variation: type[Variation]) -> Mapping[str, Any]:
    """Return the fields that one part of a short form sets."""
    if part in _WORDS:
        return _WORDS[part]
    form = part.partition("=")[0]
    for kind in (PolicyVariation, variation):
        if form in kind.forms() and form not in ("images", "text"):
            return kind.change(part)
    numbers = [form for form in PolicyVariation.short_forms() if form.endswith("=N")]
    raise UnknownNameError("condition", part, (*_WORDS, *numbers, *variation.short_forms()))


def require_distinct(conditions: Sequence[Condition]) -> None:
    """Raise a ConfigError if there is no condition, or two have the same name."""
    names = [condition.name for condition in conditions]
    if not names or len(set(names)) != len(names):
        raise ConfigError(
            f"conditions {names}: an evaluation needs at least one, each with its own name."
        )


@dataclass(frozen=True)
class Assignment:
    """One episode to run: number ``index``, from 0, of its task and condition.

    Args:
        seed: Of the scene, the same for every condition.
        goal_instruction: What success is judged by.
        policy_instruction: What the policy receives.
        goals_differ: Whether the policy is asked for something else than the goal.
        category: What the report also groups successes by, if anything
            (:meth:`~strands_cosmos3.worlds.World.category`).
    """

    condition: Condition
    task: str
    index: int
    seed: int
    goal_instruction: str
    policy_instruction: str
    goals_differ: bool = False
    category: str | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """(condition's name, task, index), which identifies the episode."""
        return self.condition.name, self.task, self.index

    @property
    def row(self) -> tuple[str, str]:
        """(condition's name, task): its row of the report."""
        return self.condition.name, self.task

    @property
    def label(self) -> str:
        """The key as text."""
        return "/".join(map(str, self.key))

    @property
    def start(self) -> Start:
        """What the episode begins from."""
        return Start(self.task, self.seed, self.index, self.goal_instruction, self.condition.world)

    def noise_seed(self, base: int | None) -> int:
        """Return the seed of the policy's noise: the scene's, or for a base seed another one for
        each scene.
        """
        return self.seed if base is None else hashed(base, self.seed)

    def instructions(self) -> dict[str, str]:
        """Return both instructions for JSON."""
        return {
            "goal_instruction": self.goal_instruction,
            "policy_instruction": self.policy_instruction,
        }


def episode_seed(base: int, task: str, index: int) -> int:
    """Return the seed of an episode, below 2**31: a hash of the evaluation's seed, the task and the
    index.
    """
    return hashed(base, zlib.crc32(task.encode()), index)


def hashed(*numbers: int) -> int:
    """Return a seed below 2**31 that follows from numbers."""
    # SeedSequence gives the same value on every machine and in every version
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def make_plan(
    world: World,
    tasks: Sequence[str],
    seeds: int,
    base: int,
    conditions: Iterable[Condition],
    template: str = "",
) -> tuple[Assignment, ...]:
    """Return every episode, by condition, task and index.

    Raises:
        InstructionError: An instruction cannot be judged.
        ConfigError: An instruction has no form that a condition asks for.
    """
    variant = world.name.split("/")[1:2]  # suites have tasks of the same names
    plan = []
    for condition in conditions:
        for task in tasks:
            for index in range(seeds):
                seed = episode_seed(base, "/".join([*variant, task]), index)
                goal = world.instruction(task, index, template)
                instruction = _policy_instruction(world, condition.policy.text, task, goal, seed)
                differ = instruction != goal and condition.policy.text in ("swapped", "shuffled")
                plan.append(
                    Assignment(
                        condition,
                        task,
                        index,
                        seed,
                        goal,
                        instruction,
                        differ and not world.same_goal(task, goal, instruction),
                        world.category(task, goal),
                    )
                )
    return tuple(plan)


def _policy_instruction(world: World, text: Text | None, task: str, goal: str, seed: int) -> str:
    """Return the policy's instruction; the seed is the episode's."""
    if text is None:
        return goal
    rng = np.random.default_rng([seed, zlib.crc32(text.encode())])
    if text in REWORDINGS:
        return world.reworded(task, goal, text, rng)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    return " ".join("".join(rng.choice(letters, rng.integers(2, 8))) for _ in range(5))
