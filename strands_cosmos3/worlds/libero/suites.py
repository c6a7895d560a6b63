"""LIBERO's suites and their tasks: names, horizons, and what each task's files say.

Suites are data; only :func:`load_tasks` and :func:`load_init_states` import LIBERO (the extra
``libero``).
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from strands_cosmos3.checks import F64, known_name
from strands_cosmos3.extras import needed_by

Goal = tuple[tuple[str, ...], ...]
"""Predicates that must all hold, e.g. ``(("in", "milk_1", "basket_1_contain_region"),)``."""
INIT_STATES = 50
"""Official initial states of each task."""


@dataclass(frozen=True)
class Suite:
    """A suite of ten tasks.

    Args:
        horizon: Most steps of an episode, waiting steps not counted.
        instruction: Where a task's instruction stands: in its ``title`` (the file's name), or in
            the ``problem`` file. Titles are what policies are trained on. In the ``_task`` and
            ``_lan`` variants they are still the base suite's, and only the problem says what is
            asked.
    """

    name: str
    horizon: int
    instruction: Literal["title", "problem"]


_HORIZONS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520}
"""openpi @15a9616a ``examples/libero/main.py`` 61-69, cosmos-framework @5eee9ed5
``closed_loop_eval.py`` 66-72.
"""
_VARIANTS: Mapping[str, Literal["title", "problem"]] = {
    "": "title",
    "_swap": "title",  # objects have changed places
    "_object": "title",  # objects look different
    "_task": "problem",  # another goal in the same scene
    "_lan": "problem",  # the same goal in other words
}
"""LIBERO-PRO's perturbations (Zxy-MLlab/LIBERO-PRO @2b910b5b), after the suite itself."""

SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        f"{name}{variant}": Suite(f"{name}{variant}", horizon, source)
        for variant, source in _VARIANTS.items()
        for name, horizon in _HORIZONS.items()
    }
)
"""The suites by name."""


def get_suite(name: str) -> Suite:
    """Return the suite of that name; UnknownNameError lists the suites."""
    return SUITES[known_name(name, "LIBERO suite", SUITES)]


@dataclass(frozen=True)
class LiberoTask:
    """One task of a suite.

    Args:
        problem_file: Path of its BDDL file.
        goal: When it is fulfilled.
        things: Names of the objects and the fixtures in its scene.
    """

    suite: Suite
    number: int
    instruction: str
    problem_file: Path
    goal: Goal
    things: frozenset[str]

    def can_judge(self, goal: Goal) -> bool:
        """Whether everything that a goal names, or the thing that a region belongs to, is in
        this task's scene.
        """
        return all(
            any(name.startswith(thing) for thing in self.things)
            for _, *names in goal
            for name in names
        )


@cache
def load_tasks(suite: str) -> tuple[LiberoTask, ...]:
    """Return the tasks of a suite, in the order of the benchmark.

    Raises:
        UnknownNameError, MissingDependencyError: No such suite; LIBERO is not installed.
    """
    chosen = get_suite(suite)
    benchmark, get_path = _libero()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the order of the tasks
        registered = benchmark.get_benchmark_dict()[suite]()
    tasks = []
    for number in range(registered.n_tasks):
        entry = registered.get_task(number)
        problem_file = Path(get_path("bddl_files"), entry.problem_folder, entry.bddl_file)
        text = problem_file.read_text(encoding="utf-8")
        instruction = entry.language
        if chosen.instruction == "problem":
            instruction = _section(text, "language").strip()
        things = frozenset(
            name
            for section in ("objects", "fixtures")
            for line in _section(text, section).splitlines()
            for name in line.partition(" - ")[0].split()
        )
        predicates = re.findall(r"\(([^()]+)\)", _section(text, "goal"))
        goal = tuple(tuple(predicate.lower().split()) for predicate in predicates)
        tasks.append(LiberoTask(chosen, number, instruction, problem_file, goal, things))
    return tuple(tasks)


@cache
def load_init_states(suite: str, number: int) -> F64:
    """Return the official initial states [50, n] of a task: time, ``qpos``, ``qvel``."""
    benchmark, _ = _libero()
    with contextlib.redirect_stdout(io.StringIO()):
        return benchmark.get_benchmark_dict()[suite]().get_task_init_states(number)


def _libero() -> tuple[Any, Any]:
    with needed_by("LIBERO"), contextlib.redirect_stdout(io.StringIO()):
        from libero.libero import benchmark, get_libero_path  # pyright: ignore
    return benchmark, get_libero_path


def _section(problem: str, name: str) -> str:
    """Return the contents of ``(:name ...)`` in a BDDL file."""
    start = problem.index(f"(:{name}") + len(name) + 2
    depth = 1
    for end in range(start, len(problem)):
        depth += {"(": 1, ")": -1}.get(problem[end], 0)
        if not depth:
            return problem[start:end]
    raise ValueError(f"(:{name} is not closed")
