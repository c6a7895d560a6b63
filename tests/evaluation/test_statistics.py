"""Figures of the report, against figures published by others and against counting by hand."""

import numpy as np
import pytest

from strands_cosmos3.evaluation.plan import Condition, make_plan
from strands_cosmos3.evaluation.statistics import percentiles, rate_of, summarise, wilson
from strands_cosmos3.worlds import get_world


@pytest.mark.parametrize(
    ("successes", "of", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_intervals_are_those_published(successes, of, low, high):
    """R. G. Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3."""
    assert wilson(successes, of) == pytest.approx((low, high), abs=5e-5)


def test_wilson_at_the_ends():
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(20, 20)
    assert high == 1.0
    assert 0.8 < low < 0.9
    assert rate_of([])["rate"] is None


def record(success, followed=None, ms=(10.0,), duration=2.0):
    tracking = {"mean_mm": 0.1, "max_mm": 1.0, "mean_deg": 0.0, "max_deg": 0.0}
    return {
        "success": success,
        **({} if followed is None else {"followed": followed}),
        "outcome": "success" if success else "timeout",
        "duration_s": duration,
        "tracking": tracking,
        "times": {"answer_ms": list(ms), "cpu_s": 0.5},
    }


def rows_of(conditions, tasks, seeds, outcome):
    parsed = [Condition.parse(text) for text in conditions]
    plan = make_plan(get_world("table"), tasks, seeds, 0, parsed)
    records = {a.key: outcome(a) for a in plan if outcome(a) is not None}
    return {(row["condition"], row["task"]): row for row in summarise(plan, records)}


def test_success_is_judged_by_the_goal():
    """A policy that reads: swapped, it never reaches the goal, and always follows."""
    rows = rows_of(
        ["plain", "swapped"],
        ["reach"],
        30,
        lambda a: record(not a.goals_differ, followed=True),
    )
    assert rows["plain", "reach"]["success"]["successes"] == 30
    swapped = rows["swapped", "reach"]
    assert swapped["success"]["successes"] == 0
    assert swapped["followed"]["rate"] == 1.0
    assert swapped["followed_share"]["rate"] == 1.0
    assert swapped["same_goal"] == 0.0
    assert swapped["change_pp"] == -100.0


def test_a_policy_that_ignores_the_text_is_seen():
    """It reaches the goal, by habit, whatever it is asked: none of its successes follows."""
    rows = rows_of(
        ["plain", "swapped"],
        ["reach"],
        30,
        lambda a: record(True, followed=not a.goals_differ),
    )
    assert rows["swapped", "reach"]["success"]["rate"] == 1.0
    assert rows["swapped", "reach"]["followed_share"]["rate"] == 0.0
    assert rows["swapped", "reach"]["followed_share"]["of"] == 30


def test_shuffled_states_how_much_is_chance():
    rows = rows_of(
        ["shuffled"],
        ["reach"],
        60,
        lambda a: record(not a.goals_differ, followed=True),
    )
    row = rows["shuffled", "reach"]
    assert row["same_goal"] == row["success"]["rate"]
    assert 0.15 < row["same_goal"] < 0.55
    assert row["followed_share"]["of"] == 60 - row["success"]["successes"], "only where both differ"


def test_missing_episodes_are_missing_and_not_failures():
    rows = rows_of(["plain"], ["reach"], 10, lambda a: record(True) if a.index < 4 else None)
    row = rows["plain", "reach"]
    assert (row["episodes"], row["missing"], row["success"]["of"], row["success"]["rate"]) == (
        4,
        6,
        4,
        1.0,
    )


def test_a_row_for_all_tasks_counts_every_episode_once():
    rows = rows_of(["plain"], ["reach", "pick"], 10, lambda a: record(a.task == "reach"))
    assert rows["plain", None]["success"]["of"] == 20
    assert rows["plain", None]["success"]["successes"] == 10
    assert (("plain", None) in rows_of(["plain"], ["reach"], 2, lambda a: record(True))) is False


def test_differences_compare_the_same_episodes():
    """Five points of difference where only common episodes are counted, not where each side
    brings its own.
    """

    def outcome(a):
        if a.condition.name == "plain":
            return record(a.index < 10)
        return record(a.index < 9) if a.index < 20 else None

    row = rows_of(["plain", "paraphrased"], ["reach"], 40, outcome)["paraphrased", "reach"]
    assert row["change_pp"] == pytest.approx(-5.0)


def test_latency_is_over_every_chunk_of_every_episode():
    rows = rows_of(
        ["plain"], ["reach"], 2, lambda a: record(True, ms=np.arange(50.0) + 50 * a.index)
    )
    answer = rows["plain", "reach"]["answer_ms"]
    assert answer["of"] == 100
    assert answer["p50"] == pytest.approx(49.5)
    assert answer["p99"] == pytest.approx(98.01)
    assert answer["p50"] < answer["p95"] < answer["p99"] < answer["max"] == 99.0
    assert percentiles(np.array([])) is None


def test_waiting_and_jumps_are_those_of_episodes():
    """A tenth of two seconds is 0.2 s; of episodes' medians, the median; an episode of one chunk
    has no seam.
    """
    jumps = {0: {"p50": 0.1, "p95": 9.0}, 1: {"p50": 0.3, "p95": 9.0}, 2: {}}

    def outcome(assignment):
        moved = {
            "counters": {"idle_ticks": 10 * (assignment.index > 0), "ticks": 100},
            "seam_rad_s": jumps[assignment.index],
        }
        return record(True) | moved

    row = rows_of(["plain"], ["reach"], 3, outcome)["plain", "reach"]
    assert row["waited_s_mean"] == pytest.approx((0 + 0.2 + 0.2) / 3)
    assert row["seam_rad_s"]["p50"] == pytest.approx(0.2)
    assert row["seam_rad_s"]["of"] == 2


def test_episodes_without_a_control_loop_have_neither():
    row = rows_of(["plain"], ["reach"], 1, lambda a: record(True))["plain", "reach"]
    assert row["waited_s_mean"] is None
    assert row["seam_rad_s"] is None


def test_success_is_counted_by_category():
    """Red are 0 and 3, green 1 and 4, blue 2; of two cubes to stack the upper one counts."""
    good = {("pick", 0), ("pick", 4), ("stack", 2)}
    rows = rows_of(
        ["swapped"], ["pick", "stack"], 5, lambda a: record((a.task, a.index) in good, False)
    )
    pick, stack, both = (
        {name: (rate["successes"], rate["of"]) for name, rate in row["by_category"].items()}
        for row in rows.values()
    )
    assert pick == {"red": (1, 2), "green": (1, 2), "blue": (0, 1)}
    assert stack == {"red": (0, 2), "green": (0, 2), "blue": (1, 1)}
    assert both == {"red": (1, 4), "green": (1, 4), "blue": (1, 2)}
