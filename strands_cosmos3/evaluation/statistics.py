"""Statistics of episodes: success rates with intervals, differences between rows, latencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from strands_cosmos3.evaluation.plan import Assignment, Condition

CONFIDENCE = 0.95
Record = dict[str, Any]
Key = tuple[str, str, int]


def wilson(successes: int, of: int) -> tuple[float, float]:
    """Return the Wilson score interval (lower, upper) of a success rate, both in [0, 1].

    ``(p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)`` (E. B. Wilson 1927, J. Am. Stat. Assoc.
    22, 209-212, without continuity correction), computed by scipy. (0, 1) without episodes.
    """
    from scipy.stats import binomtest

    if of == 0:
        return 0.0, 1.0
    interval = binomtest(successes, of).proportion_ci(CONFIDENCE, "wilson")
    return float(interval.low), float(interval.high)


def rate_of(outcomes: Sequence[bool]) -> dict[str, Any]:
    """Return ``successes``, ``of``, ``rate`` (None without episodes) and its interval ``low``,
    ``high``.
    """
    successes = sum(outcomes)
    of = len(outcomes)
    low, high = wilson(successes, of)
    rate = successes / of if of else None
    return {"successes": successes, "of": of, "rate": rate, "low": low, "high": high}


def summarise(plan: Sequence[Assignment], records: Mapping[Key, Record]) -> list[dict[str, Any]]:
    """Return a row for each condition and task, and one for all tasks together (task None) if
    there are several.

    See :func:`row_of` for the contents of a row. ``change_pp`` compares a row with the first
    condition's row of the same task, in percentage points, over the episodes that both have.
    """
    rows = []
    conditions = list({a.condition.name: a.condition for a in plan}.values())
    for condition in conditions:
        of_condition = [a for a in plan if a.condition == condition]
        tasks = list(dict.fromkeys(a.task for a in of_condition))
        for task in [*tasks, *([None] if len(tasks) > 1 else [])]:
            assignments = [a for a in of_condition if task in (None, a.task)]
            row = row_of(condition, task, assignments, records)
            if condition != conditions[0]:
                row["change_pp"] = _change_pp(assignments, conditions[0], records)
            rows.append(row)
    return rows


def row_of(
    condition: Condition,
    task: str | None,
    plan: Sequence[Assignment],
    records: Mapping[Key, Record],
) -> dict[str, Any]:
    """Return one row of the report.

    ``success`` is judged by the goal instruction; ``by_category`` is the same for each category of
    the assignments. If the policy's instruction is another goal's, ``followed`` is the rate at
    which that was achieved, ``followed_share`` the same among the episodes that achieved either
    goal, and ``same_goal`` the share of episodes in which both are equal by chance.
    ``waited_s_mean`` is how long the arm had no motion to follow, in simulated seconds per episode.
    ``seam_rad_s`` is how much the fastest joint's velocity changes where a chunk joins the motion:
    percentiles of episodes' medians. ``judged`` is how a judge agrees (:func:`judgement_of`).
    """
    pairs = [(a, records[a.key]) for a in plan if a.key in records]
    episodes = [record for _, record in pairs]
    row: dict[str, Any] = {
        "condition": condition.name,
        "task": task,
        "episodes": len(episodes),
        "missing": len(plan) - len(episodes),
        "success": rate_of([bool(record["success"]) for record in episodes]),
        **figures_of(episodes),
    }
    if by_category := _by_category(pairs):
        row["by_category"] = by_category
    if judged := [record for record in episodes if "judged" in record]:
        row["judged"] = judgement_of(judged)
    if len(instructions := {a.goal_instruction for a in plan}) == 1:
        row["instruction"] = instructions.pop()
    if condition.policy.text in ("swapped", "shuffled"):
        differing = [record for a, record in pairs if a.goals_differ]
        row["followed"] = rate_of([followed(record) for record in episodes])
        row["followed_share"] = rate_of(
            [followed(record) for record in differing if achieved(record)]
        )
        row["same_goal"] = 1 - len(differing) / len(pairs) if pairs else None
    return row


def figures_of(episodes: Sequence[Record]) -> dict[str, Any]:
    """Return a row's figures other than rates."""
    tracking = [record["tracking"] for record in episodes if record.get("tracking")]
    times = [record["times"] for record in episodes]
    return {
        "outcomes": dict(sorted(Counter(record["outcome"] for record in episodes).items())),
        "seconds_to_success": _mean(
            [record["duration_s"] for record in episodes if record["success"]]
        ),
        "tracking_mean_mm": _mean([errors["mean_mm"] for errors in tracking]),
        "tracking_max_mm": max((float(errors["max_mm"]) for errors in tracking), default=None),
        "waited_s_mean": _mean(
            [_waited_s(record) for record in episodes if record.get("counters", {}).get("ticks")]
        ),
        "seam_rad_s": percentiles(
            [record["seam_rad_s"]["p50"] for record in episodes if record.get("seam_rad_s")]
        ),
        "answer_ms": percentiles([ms for each in times for ms in each.get("answer_ms", [])]),
        "cpu_s_mean": _mean([each["cpu_s"] for each in times if "cpu_s" in each]),
    }


def judgement_of(judged: Sequence[Record]) -> dict[str, Any]:
    """Return how a judge's answers agree with the simulator: ``agreement``, in which an unclear
    answer is none; ``table``, the episodes by what was said (yes, no, unclear) and what was
    (success, failure); and ``likelier``, the agreement of one who always says what is more
    frequent.
    """
    outcomes = ("failure", "success")
    count = Counter((each["judged"]["said"], outcomes[bool(each["success"])]) for each in judged)
    successes = sum(bool(record["success"]) for record in judged)
    return {
        "agreement": rate_of([not disagrees(record) for record in judged]),
        "table": {
            said: {outcome: count[said, outcome] for outcome in outcomes}
            for said in ("yes", "no", "unclear")
        },
        "likelier": max(successes, len(judged) - successes) / len(judged),
    }


def disagrees(record: Record) -> bool:
    """Whether a judge was asked, and did not say what the simulator does."""
    expected = "yes" if record["success"] else "no"
    return record.get("judged", {}).get("said", expected) != expected


def followed(record: Record) -> bool:
    """Whether the policy achieved the goal of its own instruction, which may be the episode's."""
    return bool(record.get("followed", record["success"]))


def achieved(record: Record) -> bool:
    """Whether the episode's goal or that of the policy's instruction was achieved."""
    return bool(record["success"]) or followed(record)


def _waited_s(record: Record) -> float:
    counters = record["counters"]
    return record["duration_s"] * counters["idle_ticks"] / counters["ticks"]


def loop_latency(records: Iterable[Record]) -> dict[str, Any] | None:
    """Return the largest latency of any control loop, and its clock. The rows' ``answer_ms`` is
    wall-clock time.
    """
    loops = (record for record in records if record.get("latency_ms"))
    slowest = max(loops, key=lambda record: float(record["latency_ms"]["max"]), default=None)
    if slowest is None:
        return None
    return {"max_ms": slowest["latency_ms"]["max"], "clock": slowest["latency_clock"]}


def _by_category(pairs: Sequence[tuple[Assignment, Record]]) -> dict[str, Any]:
    """Return the success rate for each category of the assignments."""
    names = dict.fromkeys(a.category for a, _ in pairs if a.category is not None)
    return {
        name: rate_of([bool(record["success"]) for a, record in pairs if a.category == name])
        for name in names
    }


def percentiles(values: Sequence[float]) -> dict[str, Any] | None:
    """Return p50, p95, p99, max and the count; None without values."""
    if not len(values):
        return None
    figures = np.percentile(values, [50, 95, 99, 100]).tolist()
    return dict(zip(("p50", "p95", "p99", "max"), figures, strict=True)) | {"of": len(values)}


def _change_pp(
    plan: Sequence[Assignment], base: Condition, records: Mapping[Key, Record]
) -> float | None:
    """Return the difference to the base row in percentage points, over common episodes."""
    pairs = [(records.get(a.key), records.get((base.name, a.task, a.index))) for a in plan]
    change = _mean([bool(a["success"]) - bool(b["success"]) for a, b in pairs if a and b])
    return None if change is None else 100.0 * change


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
