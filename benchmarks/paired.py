"""Whether two evaluations of the same scenes differ in success: an exact paired test of each task.

    strands-cosmos3 evaluate --seeds 200 --out run/float32
    strands-cosmos3 evaluate --seeds 200 --quantize int8 --out run/int8
    python benchmarks/paired.py --first run/float32 --second run/int8

Scenes and noise follow from the seed, the task and the index, so that episodes form pairs. Of those
that differ, as many should be won by either side (McNemar's test, exact: a sign test).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scipy.stats import binomtest

import report
from strands_cosmos3.errors import EvaluationError
from strands_cosmos3.resources import read_json


def measure(first: Path, second: Path) -> dict[str, Any]:
    """Compare the episodes that both folders have.

    Args:
        first: Folder of the evaluation to compare with.
        second: Folder of the other.
    """
    tasks: dict[str, list[tuple[bool, bool]]] = {}
    for path in sorted(first.glob("episodes/*/*/*.json")):
        episode = path.relative_to(first)
        if (second / episode).exists():
            before, after = (_success(folder / episode) for folder in (first, second))
            tasks.setdefault("/".join(episode.parts[1:-1]), []).append((before, after))
    return {"first": str(first), "second": str(second), "tasks": _tested(tasks)}


def _success(path: Path) -> bool:
    return bool(read_json(path, EvaluationError, "")["success"])


def _tested(tasks: dict[str, list[tuple[bool, bool]]]) -> dict[str, Any]:
    figures = {}
    for task, pairs in tasks.items():
        lost, won = pairs.count((True, False)), pairs.count((False, True))
        figures[task] = {
            "pairs": len(pairs),
            "first_percent": 100 * sum(before for before, _ in pairs) / len(pairs),
            "second_percent": 100 * sum(after for _, after in pairs) / len(pairs),
            "lost": lost,
            "won": won,
            "p": binomtest(lost, lost + won).pvalue if lost + won else 1.0,
        }
    return figures


if __name__ == "__main__":
    report.run(measure)
