"""What the benchmarks share: options from a function's signature, progress, and figures as JSON."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tyro

from strands_cosmos3.commands.files import versions
from strands_cosmos3.errors import Cosmos3Error


def run(measure: Callable[..., Mapping[str, Any]]) -> None:
    """Measure with the options of the command line; print the figures and the machine as JSON."""
    try:
        figures = tyro.cli(measure, description=sys.modules["__main__"].__doc__)
    except Cosmos3Error as error:
        sys.exit(str(error))
    print(with_machine(figures))


def with_machine(figures: Mapping[str, Any]) -> str:
    """Figures, the machine and its packages as JSON."""
    machine = {"platform": platform.platform(), "python": platform.python_version()}
    return json.dumps({**figures, "machine": machine, "versions": versions()}, indent=2)


def progress(text: str) -> None:
    """Say on standard error what is measured now."""
    print(text, file=sys.stderr, flush=True)


def alternate(
    sides: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Run all sides in turn, every other round in the opposite order; return the milliseconds of
    each run by name.
    """
    spent_ms: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(repeats):
        for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
            started_s = clock()
            sides[name]()
            spent_ms[name].append((clock() - started_s) * 1e3)
    return spent_ms


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 95 % quantile of some values."""
    p50, p95 = np.percentile(values, (50, 95)).tolist()
    return {"p50": p50, "p95": p95}


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each part of some runs."""
    return {part: statistics.median(run[part] for run in runs) for part in runs[0]}
