"""CPU time of an episode of ``evaluate`` in two trees, and whether their records are equal.

    python benchmarks/evaluation.py --before TREE --episodes 21
    python benchmarks/evaluation.py --profile 30

A worker of each tree runs the same episodes of the bundled policy as a worker of ``evaluate``
would, one after the other, and they take turns.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import report
from strands_cosmos3.commands import evaluate
from strands_cosmos3.evaluation.folder import without_times
from strands_cosmos3.evaluation.runner import AssignmentRunner
from strands_cosmos3.evaluation.settings import make_settings

_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS"), "1"
)


def run(
    before: Path | None = None,
    task: str = "pick",
    episodes: int = 21,
    worker: bool = False,
    profile: int = 0,
    backend: str | None = None,
) -> dict[str, Any]:
    """Return the CPU seconds of an episode in both trees, and the ratio of episodes a CPU minute.

    Args:
        before: Another commit's working tree.
        task: The task.
        episodes: Episodes, after one that warms up.
        worker: Instead, be a tree's worker: run an episode for each line of standard input.
        profile: Instead, profile this tree, and show so many functions.
        backend: What infers; None is each tree's default. Records are equal to the bit with the
            same one only, e.g. ``native``.
    """
    if worker or before is None:
        return _work(task, episodes, profile, backend)
    spent: dict[str, list[float]] = {"before": [], "now": []}
    equal: list[bool] = []
    with ExitStack() as started:
        trees = {"before": before.resolve(), "now": Path(__file__).resolve().parents[1]}
        line = [sys.executable, __file__, "--worker", "--task", task, "--episodes", str(episodes)]
        line += [] if backend is None else ["--backend", backend]
        processes = {
            name: started.enter_context(
                subprocess.Popen(
                    line,
                    env={**os.environ, **_ONE_THREAD, "PYTHONPATH": str(tree)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for name, tree in trees.items()
        }
        for i in range(episodes + 1):
            records: dict[str, Any] = {}
            for name in list(trees)[:: 1 if i % 2 == 0 else -1]:
                process: Any = processes[name]
                print(file=process.stdin, flush=True)
                records[name] = json.loads(process.stdout.readline())
                spent[name].append(records[name]["times"]["cpu_s"])
            equal.append(without_times(records["before"]) == without_times(records["now"]))
            report.progress(f"{i}: {[times[-1] for times in spent.values()]} {equal[-1]}")
        for process in processes.values():
            process.communicate()  # its own report is not read
    warm = {name: times[1:] for name, times in spent.items()}
    return {
        "task": task,
        "episodes": episodes,
        "cpu_s": {name: statistics.median(times) for name, times in warm.items()},
        "ratio": sum(warm["before"]) / sum(warm["now"]),
        "ratio_of_medians": statistics.median(warm["before"]) / statistics.median(warm["now"]),
        "equal_records": equal.count(True),
    }


def _work(task: str, episodes: int, profile: int, backend: str | None) -> dict[str, Any]:
    """Print the record of an episode for each line of standard input, or profile all episodes."""
    options = {"tasks": task, "seeds": episodes + 1, "films": 0, "backend": backend}
    options = {name: value for name, value in options.items() if value is not None}
    evaluate._choose_checkpoint(options)
    settings = make_settings(options)
    runner = AssignmentRunner(settings)
    for assignment in settings.plan() if not profile else ():
        if not sys.stdin.readline():
            break
        print(json.dumps(runner.run(assignment)), flush=True)
    if profile:
        first, *others = settings.plan()
        runner.run(first)
        profiler = cProfile.Profile()
        for assignment in others:
            profiler.runcall(partial(runner.run, assignment))
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(profile)
    return {}


if __name__ == "__main__":
    report.run(run)
