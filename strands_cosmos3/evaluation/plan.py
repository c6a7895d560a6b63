"""The episodes of an evaluation. Each depends on its perturbation, task and index only, so it is
the same wherever it runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.worlds.table.grammar import (
    COLOURS,
    TEMPLATES,
    Goal,
    Verb,
    parse_instruction,
)
from strands_cosmos3.worlds.table.tasks import get_task

TABLE = "table"
"""The suite of our own tasks."""


@dataclass(frozen=True)
class Assignment:
    """One episode to run: number ``index``, from 0, of its task and perturbation.

    ``seed`` is that of the scene, the same for every perturbation. The episode is judged by
    ``goal_instruction``; the policy receives ``policy_instruction``. ``suite`` is ``table`` or one
    of LIBERO's.
    """

    perturbation: Perturbation
    task: str
    index: int
    seed: int
    goal_instruction: str
    policy_instruction: str
    suite: str = TABLE

    @property
    def key(self) -> tuple[str, str, int]:
        """(perturbation's name, task, index), which identifies the episode."""
        return self.perturbation.name, self.task, self.index

    @property
    def row(self) -> tuple[str, str]:
        """(perturbation's name, task): its row of the report."""
        return self.perturbation.name, self.task

    @property
    def label(self) -> str:
        """The key as text."""
        return "/".join(map(str, self.key))

    @property
    def goals(self) -> tuple[Goal, Goal]:
        """Goals of the two instructions; they differ if the perturbation swaps or shuffles the
        text. Random text has none.
        """
        if self.perturbation.text == "random":
            goal = parse_instruction(self.goal_instruction)
            return goal, goal
        return parse_instruction(self.goal_instruction), parse_instruction(self.policy_instruction)

    @property
    def goals_differ(self) -> bool:
        """Whether the policy is asked for something else than the goal."""
        if self.suite != TABLE:
            return self.goal_instruction != self.policy_instruction
        return self.goals[0] != self.goals[1]

    def noise_seed(self, base: int | None) -> int:
        """Return the seed of the policy's noise: the scene's, or for a base seed another one for
        each scene.
        """
        return (
            self.seed
            if base is None
            else int(np.random.SeedSequence([base, self.seed]).generate_state(1)[0] >> 1)
        )

    def instructions(self) -> dict[str, str]:
        """Return both instructions for JSON, also under the names of version 0.1 (until 0.3)."""
        return {
            "goal_instruction": self.goal_instruction,
            "policy_instruction": self.policy_instruction,
            "asked": self.goal_instruction,
            "told": self.policy_instruction,
        }


def episode_seed(base: int, task: str, index: int) -> int:
    """Return the seed of an episode, below 2**31: a hash of the evaluation's seed, the task and the
    index.

    ``numpy.random.SeedSequence`` gives the same value on every machine and in every version.
    """
    return int(
        np.random.SeedSequence([base, zlib.crc32(task.encode()), index]).generate_state(1)[0] >> 1
    )


def goal_instruction(task: str, index: int, template: str = "") -> str:
    """Return the instruction of an episode. The colours, and for stacking all pairs, rotate with
    the index; a bar has none.

    ``template`` is another wording, in which ``{a}`` and ``{b}`` stand for colours; empty for the
    task's own.
    """
    if get_task(task).bar is not None:
        return template or get_task(task).instruction
    a = index % 3
    b = (a + 1 + (index // 3) % 2) % 3
    return (template or TEMPLATES[Verb(task)]).format(a=COLOURS[a], b=COLOURS[b])


def make_plan(
    tasks: Sequence[str],
    seeds: int,
    base: int,
    perturbations: Sequence[Perturbation],
    template: str = "",
) -> tuple[Assignment, ...]:
    """Return every episode, by perturbation, task and index; an InputError if an instruction
    names no verb or colour.
    """
    plan = []
    for perturbation in perturbations:
        for task in tasks:
            for index in range(seeds):
                seed = episode_seed(base, task, index)
                goal = goal_instruction(task, index, template)
                rng = np.random.default_rng([seed, zlib.crc32(perturbation.text.encode())])
                plan.append(
                    Assignment(
                        perturbation,
                        task,
                        index,
                        seed,
                        goal,
                        perturbation.policy_instruction(goal, rng),
                    )
                )
    return tuple(plan)
