"""What episodes come to: successes with their intervals, differences between rows, latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strands_cosmos3.evaluation.folder import Record
from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.evaluation.plan import Assignment

CONFIDENCE = 0.95


def wilson(successes: int, of: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The Wilson score interval of a success rate, (lower, upper), both in [0, 1].

    ``(p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)`` (E. B. Wilson 1927, J. Am. Stat. Assoc. 22, 209-212, without
    continuity correction), computed by scipy. No episodes say nothing: (0, 1).
    """
    from scipy.stats import binomtest

    if of == 0:
        return 0.0, 1.0
    interval = binomtest(successes, of).proportion_ci(confidence, "wilson")
    return float(interval.low), float(interval.high)


@dataclass(frozen=True)
class Rate:
    """Successes of so many, with their Wilson interval."""

    successes: int
    of: int

    @property
    def rate(self) -> float | None:
        """The share, or None of nothing."""
        return self.successes / self.of if self.of else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        low, high = wilson(self.successes, self.of)
        return {"successes": self.successes, "of": self.of, "rate": self.rate, "low": low, "high": high}


def summarise(plan: Sequence[Assignment], records: dict[tuple[str, str, int], Record]) -> list[dict[str, Any]]:
    """A row for each condition and task, and where there are several tasks one for the condition as a whole (task None).

    See :func:`row_of` for what a row holds. ``delta_points`` compares a row with the first condition's row of the same task:
    percentage points, over the episodes that both have.
    """
    rows = []
    conditions = list({a.condition.name: a.condition for a in plan}.values())
    for condition in conditions:
        tasks = list(dict.fromkeys(a.task for a in plan if a.condition == condition))
        for task in [*tasks, *([None] if len(tasks) > 1 else [])]:
            mine = [a for a in plan if a.condition == condition and task in (None, a.task)]
            row = row_of(condition, task, mine, records)
            if condition != conditions[0]:
                row["delta_points"] = _delta(mine, conditions[0], records)
            rows.append(row)
    return rows


def row_of(
    condition: Perturbation, task: str | None, plan: Sequence[Assignment], records: dict[tuple[str, str, int], Record]
) -> dict[str, Any]:
    """One row of the report.

    ``success`` is judged by the instruction that was asked. Where the text was swapped or shuffled: ``told`` counts how often
    what was told came about, ``reads`` how often of all episodes that did either, and ``chance`` is the share of episodes in
    which both were the same by chance.
    """
    pairs = [(a, records[a.key]) for a in plan if a.key in records]
    found = [record for _, record in pairs]
    answers = np.array([ms for record in found for ms in record["times"].get("answer_ms", [])])
    row: dict[str, Any] = {
        "condition": condition.name,
        "task": task,
        "episodes": len(found),
        "missing": len(plan) - len(found),
        "success": Rate(sum(bool(record["success"]) for record in found), len(found)).to_dict(),
        "outcomes": _counted(record["outcome"] for record in found),
        "seconds_to_success": _mean([record["duration_s"] for record in found if record["success"]]),
        "tracking_mean_mm": _mean([record["tracking"]["mean_mm"] for record in found if "tracking" in record]),
        "tracking_max_mm": max((record["tracking"]["max_mm"] for record in found if "tracking" in record), default=None),
        "answer_ms": percentiles(answers),
        "cpu_s_mean": _mean([record["times"]["cpu_s"] for record in found if "cpu_s" in record["times"]]),
    }
    if condition.text in ("swapped", "shuffled"):
        told = [bool(record["success_told"]) for record in found]
        other = [(record["success"], record["success_told"]) for a, record in pairs if a.goals[0] != a.goals[1]]
        row["told"] = Rate(sum(told), len(told)).to_dict()
        row["reads"] = Rate(sum(bool(t) for _, t in other), sum(bool(s or t) for s, t in other)).to_dict()
        row["chance"] = 1 - len(other) / len(pairs) if pairs else None
    return row


def percentiles(values: np.ndarray) -> dict[str, float] | None:
    """p50, p95, p99, max and how many there were; None of nothing."""
    if not len(values):
        return None
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "max": float(values.max()), "of": len(values)}


def _delta(mine: Sequence[Assignment], base: Perturbation, records: dict[tuple[str, str, int], Record]) -> float | None:
    """Percentage points that a row lies above (positive) or below the base row, episode by episode."""
    pairs = [(records.get(a.key), records.get((base.name, a.task, a.index))) for a in mine]
    both = [(int(bool(a["success"])), int(bool(b["success"]))) for a, b in pairs if a is not None and b is not None]
    return 100.0 * float(np.mean([a - b for a, b in both])) if both else None


def _counted(outcomes: Any) -> dict[str, int]:
    counted: dict[str, int] = {}
    for outcome in outcomes:
        counted[outcome] = counted.get(outcome, 0) + 1
    return dict(sorted(counted.items()))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
