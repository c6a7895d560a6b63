"""Statistics of episodes: success rates with intervals, differences between rows, latencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strands_cosmos3.evaluation.folder import Record
from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.evaluation.plan import TABLE, Assignment
from strands_cosmos3.worlds.table.grammar import COLOURS

CONFIDENCE = 0.95


def wilson(successes: int, of: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the Wilson score interval (lower, upper) of a success rate, both in [0, 1].

    ``(p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)`` (E. B. Wilson 1927, J. Am. Stat. Assoc.
    22, 209-212, without continuity correction), computed by scipy. (0, 1) without episodes.
    """
    from scipy.stats import binomtest

    if of == 0:
        return 0.0, 1.0
    interval = binomtest(successes, of).proportion_ci(confidence, "wilson")
    return float(interval.low), float(interval.high)


@dataclass(frozen=True)
class Rate:
    """A number of successes, with its Wilson interval."""

    successes: int
    of: int

    @property
    def rate(self) -> float | None:
        """The success rate; None without episodes."""
        return self.successes / self.of if self.of else None

    def to_dict(self) -> dict[str, Any]:
        """Return the rate and its interval for JSON."""
        low, high = wilson(self.successes, self.of)
        return {
            "successes": self.successes,
            "of": self.of,
            "rate": self.rate,
            "low": low,
            "high": high,
        }


def summarise(
    plan: Sequence[Assignment], records: dict[tuple[str, str, int], Record]
) -> list[dict[str, Any]]:
    """Return a row for each perturbation and task, and one for all tasks together (task None) if
    there are several.

    See :func:`row_of` for the contents of a row. ``delta_points`` compares a row with the first
    perturbation's row of the same task, in percentage points, over the episodes that both have.
    """
    rows = []
    perturbations = list({a.perturbation.name: a.perturbation for a in plan}.values())
    for perturbation in perturbations:
        tasks = list(dict.fromkeys(a.task for a in plan if a.perturbation == perturbation))
        for task in [*tasks, *([None] if len(tasks) > 1 else [])]:
            mine = [a for a in plan if a.perturbation == perturbation and task in (None, a.task)]
            row = row_of(perturbation, task, mine, records)
            if perturbation != perturbations[0]:
                row["delta_points"] = _delta(mine, perturbations[0], records)
            rows.append(row)
    return rows


def row_of(
    perturbation: Perturbation,
    task: str | None,
    plan: Sequence[Assignment],
    records: dict[tuple[str, str, int], Record],
) -> dict[str, Any]:
    """Return one row of the report.

    ``success`` is judged by the goal instruction; ``by_colour`` is the same for each colour of the
    goal's cube. If the text was swapped or shuffled, ``told`` is the rate at which the policy's
    instruction was fulfilled, ``reads`` the same among the episodes that fulfilled either
    instruction, and ``chance`` the share of episodes in which both are equal by chance.
    ``waited_s_mean`` is how long the arm had no motion to follow, in simulated seconds per episode.
    ``seam_rad_s`` is how much the fastest joint's velocity changes where a chunk joins the motion:
    percentiles of episodes' medians.
    """
    pairs = [(a, records[a.key]) for a in plan if a.key in records]
    found = [record for _, record in pairs]
    answers = np.array([ms for record in found for ms in record["times"].get("answer_ms", [])])
    row: dict[str, Any] = {
        "condition": perturbation.name,
        "task": task,
        "episodes": len(found),
        "missing": len(plan) - len(found),
        "success": Rate(sum(bool(record["success"]) for record in found), len(found)).to_dict(),
        "outcomes": dict(sorted(Counter(record["outcome"] for record in found).items())),
        "seconds_to_success": _mean(
            [record["duration_s"] for record in found if record["success"]]
        ),
        "tracking_mean_mm": _mean(
            [record["tracking"]["mean_mm"] for record in found if "tracking" in record]
        ),
        "tracking_max_mm": max(
            (record["tracking"]["max_mm"] for record in found if "tracking" in record), default=None
        ),
        "waited_s_mean": _mean(
            [_waited_s(record) for record in found if record.get("counters", {}).get("ticks")]
        ),
        "seam_rad_s": percentiles(
            np.array([record["seam_rad_s"]["p50"] for record in found if record.get("seam_rad_s")])
        ),
        "answer_ms": percentiles(answers),
        "cpu_s_mean": _mean(
            [record["times"]["cpu_s"] for record in found if "cpu_s" in record["times"]]
        ),
    }
    if plan[0].suite == TABLE and (colours := _by_colour(pairs)):
        row["by_colour"] = colours
    instructions = {a.goal_instruction for a in plan}
    if len(instructions) == 1 and plan[0].suite != TABLE:
        row["instruction"] = instructions.pop()
    if perturbation.text in ("swapped", "shuffled"):
        told = [bool(record["success_told"]) for record in found]
        other = [
            (record["success"], record["success_told"]) for a, record in pairs if a.goals_differ
        ]
        row["told"] = Rate(sum(told), len(told)).to_dict()
        row["reads"] = Rate(
            sum(bool(t) for _, t in other), sum(bool(s or t) for s, t in other)
        ).to_dict()
        row["chance"] = 1 - len(other) / len(pairs) if pairs else None
    return row


def _waited_s(record: Record) -> float:
    counters = record["counters"]
    return record["duration_s"] * counters["idle_ticks"] / counters["ticks"]


def _by_colour(pairs: Sequence[tuple[Assignment, Record]]) -> dict[str, Any]:
    """Return the success rate for each colour of the goal's cube."""
    found: dict[str, list[bool]] = {colour: [] for colour in COLOURS}
    for assignment, record in pairs:
        colour = assignment.goals[0].cube.removeprefix("cube_")
        if colour in found:
            found[colour].append(bool(record["success"]))
    return {colour: Rate(sum(good), len(good)).to_dict() for colour, good in found.items() if good}


def percentiles(values: np.ndarray) -> dict[str, float] | None:
    """Return p50, p95, p99, max and the count; None without values."""
    if not len(values):
        return None
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return {
        "p50": float(p50),
        "p95": float(p95),
        "p99": float(p99),
        "max": float(values.max()),
        "of": len(values),
    }


def _delta(
    mine: Sequence[Assignment], base: Perturbation, records: dict[tuple[str, str, int], Record]
) -> float | None:
    """Return the difference to the base row in percentage points, over common episodes."""
    pairs = [(records.get(a.key), records.get((base.name, a.task, a.index))) for a in mine]
    both = [
        (int(bool(a["success"])), int(bool(b["success"])))
        for a, b in pairs
        if a is not None and b is not None
    ]
    return 100.0 * float(np.mean([a - b for a, b in both])) if both else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
