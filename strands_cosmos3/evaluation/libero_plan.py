"""The episodes of an evaluation on LIBERO, and what its settings must be: index i of a task is
its official initial state i.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.evaluation.plan import Assignment, episode_seed
from strands_cosmos3.worlds.libero.protocol import CONTROL_HZ
from strands_cosmos3.worlds.libero.suites import INIT_STATES, LiberoTask, get_suite, load_tasks

LIBERO_TASKS = tuple(map(str, range(10)))
"""Names of the tasks of each suite."""
_HERE = ("name", "images", "text", "num_steps", "replan_rows")
_FIXED = ("duration", "control_frequency", "instruction")


def libero_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of an evaluation with LIBERO's defaults: all tasks and initial states, the
    suite's horizon.

    Raises:
        ConfigError, UnknownNameError: An option is fixed by the suite; no such suite.
    """
    horizon = get_suite(given["suite"]).horizon
    if fixed := [name for name in _FIXED if name in given]:
        raise ConfigError(
            f"{', '.join(fixed)}: the suite {given['suite']!r} fixes that; leave it out."
        )
    defaults = {"tasks": LIBERO_TASKS, "seeds": INIT_STATES}
    return {
        **defaults,
        **given,
        "duration": horizon / CONTROL_HZ,
        "control_frequency": float(CONTROL_HZ),
    }


def libero_policy(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a policy that follow from the suite: a policy server's protocol.

    Raises:
        ConfigError: It speaks another one, whose columns are DROID's.
    """
    if given.get("backend") != "service":
        return {}
    if (dialect := given.get("dialect") or "libero") != "libero":
        raise ConfigError(
            f"dialect {dialect!r} carries DROID's columns; LIBERO's rows travel in dialect libero."
        )
    return {"dialect": dialect}


def require_libero(
    name: str, seeds: int, clips: int, backend: str, conditions: Sequence[Perturbation]
) -> None:
    """Raise ConfigError or UnknownNameError for settings that LIBERO does not have."""
    suite = get_suite(name).name
    if seeds > INIT_STATES:
        raise ConfigError(
            f"seeds={seeds}: each task of {suite} has {INIT_STATES} initial states; use at most "
            "that."
        )
    if clips:
        raise ConfigError(
            f"clips={clips}: dynamics are evaluated on our table; leave it out with {suite}."
        )
    if backend == "scripted" and not suite.startswith("libero_object"):
        raise ConfigError(
            f"the scripted expert solves libero_object and its variants, not {suite}; choose a "
            "policy."
        )
    for condition in conditions:
        if condition.text == "paraphrased":
            raise ConfigError(
                f"condition {condition.name!r}: other wordings are suites of their own, e.g. "
                "libero_object_lan."
            )
        if foreign := [
            key for key, value in condition.identity().items() if key not in _HERE and value
        ]:
            raise ConfigError(
                f"condition {condition.name!r}: {', '.join(foreign)} belongs to our table, not to "
                f"{suite}."
            )


def plan_libero(
    suite: str, names: Sequence[str], seeds: int, base: int, conditions: Sequence[Perturbation]
) -> tuple[Assignment, ...]:
    """Return every episode, by condition, task and initial state.

    Raises:
        MissingDependencyError, ConfigError: LIBERO is not installed; no other instruction can be
            judged in a task's scene.
    """
    tasks, plan = load_tasks(suite), []
    for condition in conditions:
        for name in names:
            task = tasks[int(name)]
            for index in range(seeds):
                seed = episode_seed(base, f"{suite}/{name}", index)
                told = _told(condition, task, tasks, seed)
                plan.append(Assignment(condition, name, index, seed, task.instruction, told, suite))
    return tuple(plan)


def _told(
    perturbation: Perturbation, task: LiberoTask, tasks: tuple[LiberoTask, ...], seed: int
) -> str:
    """Return the policy's instruction: for ``swapped`` that of another task whose goal can be
    fulfilled in this scene.
    """
    rng = np.random.default_rng([seed, zlib.crc32(perturbation.text.encode())])
    if perturbation.text not in ("swapped", "shuffled"):
        return perturbation.policy_instruction(task.instruction, rng)
    others = [other for other in tasks if other.goal != task.goal and task.can_judge(other.goal)]
    if not others:
        raise ConfigError(
            f"condition {perturbation.name!r}: no other instruction of {task.suite.name} can be "
            "judged in the scene of task "
            f"{task.number} ({task.instruction!r}); choose other tasks or another suite."
        )
    choices = others if perturbation.text == "swapped" else [task, *others]
    return choices[int(rng.integers(len(choices)))].instruction


def told_task(assignment: Assignment) -> LiberoTask:
    """Return the task of the policy's instruction, else (if that is the goal's, or means
    nothing) the episode's own.
    """
    tasks = load_tasks(assignment.suite)
    same = (task for task in tasks if task.instruction == assignment.policy_instruction)
    return (
        tasks[int(assignment.task)]
        if not assignment.goals_differ
        else next(same, tasks[int(assignment.task)])
    )
