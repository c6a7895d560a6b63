"""Which episodes an evaluation has. Each follows from its condition, task and index alone, so it is the same wherever and
whenever it runs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.instruction import COLOURS, TEMPLATES, Goal, Verb, parse_instruction


@dataclass(frozen=True)
class Assignment:
    """One episode to run.

    Args:
        condition: The row that it belongs to.
        task: What is judged.
        index: Its number within task and condition, from 0.
        seed: Of the scene and of the policy's noise; the same in every condition.
        asked: The instruction that it is judged by.
        told: What the policy is told.
    """

    condition: Perturbation
    task: str
    index: int
    seed: int
    asked: str
    told: str

    @property
    def key(self) -> tuple[str, str, int]:
        """(condition's name, task, index): what the episode is."""
        return self.condition.name, self.task, self.index

    @property
    def label(self) -> str:
        """The same for people."""
        return f"{self.condition.name}/{self.task}/{self.index}"

    @property
    def goals(self) -> tuple[Goal, Goal]:
        """What it is judged by, and what was told. They differ in the controls that swap or shuffle the text."""
        return parse_instruction(self.asked), parse_instruction(self.told)


def episode_seed(base: int, task: str, index: int) -> int:
    """The seed of an episode, below 2**31: a hash of the evaluation's seed, the task and the index.

    ``numpy.random.SeedSequence`` answers the same on every machine and in every version.
    """
    return int(np.random.SeedSequence([base, zlib.crc32(task.encode()), index]).generate_state(1)[0] >> 1)


def asked_instruction(task: str, index: int, template: str = "") -> str:
    """The instruction of an episode. Colours go round with the index: every colour, and for stacking every pair, alike.

    Args:
        task: The task.
        index: The episode's index.
        template: Another wording, in which ``{a}`` and ``{b}`` stand for the colours, if it has them; empty is the task's.
    """
    a = index % 3
    b = (a + 1 + (index // 3) % 2) % 3
    return (template or TEMPLATES[Verb(task)]).format(a=COLOURS[a], b=COLOURS[b])


def make_plan(
    tasks: Sequence[str], seeds: int, base: int, conditions: Sequence[Perturbation], template: str = ""
) -> tuple[Assignment, ...]:
    """Every episode, condition by condition and task by task.

    Raises:
        InputError: An instruction names no verb or colour.
    """
    plan = []
    for condition in conditions:
        for task in tasks:
            for index in range(seeds):
                seed = episode_seed(base, task, index)
                asked = asked_instruction(task, index, template)
                told = condition.told(asked, np.random.default_rng([seed, zlib.crc32(condition.text.encode())]))
                plan.append(Assignment(condition, task, index, seed, asked, told))
    return tuple(plan)
