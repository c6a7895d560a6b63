"""The comparison of ``benchmarks/golden.py``."""

from __future__ import annotations

import json

import numpy as np
import pytest

from golden_results import ABSENT, Difference, compare, read_results

ANGLES = np.linspace(0, 1, 6).reshape(3, 2)
RESULTS = {"q_rad": ANGLES, "outcome": "success", "chunks": 4, "mean_mm": np.nan}


def changed(**values) -> dict:
    """The same results with arrays of their own and some values replaced."""
    return {**RESULTS, "q_rad": RESULTS["q_rad"].copy(), **values}


def moved(by_rad: float) -> dict:
    """The same results with one angle moved."""
    results = changed()
    results["q_rad"][1, 0] += by_rad
    return results


def test_equal_results_have_no_difference():
    assert compare(RESULTS, changed()) is None


def test_the_first_difference_has_its_index_both_values_and_the_largest_difference():
    results = moved(0.25)
    results["q_rad"][2, 1] -= 0.5
    assert compare(RESULTS, results) == Difference("q_rad", (1, 0), 0.4, 0.65, 0.5)
    assert str(compare(RESULTS, results)) == "q_rad[1, 0]: 0.4 and 0.65, largest difference 0.5"


@pytest.mark.parametrize(("by_rad", "equal"), [(0.9e-9, True), (1.1e-9, False)])
def test_a_tolerance_is_for_angles(by_rad: float, equal: bool):
    assert compare(RESULTS, moved(by_rad))
    assert (compare(RESULTS, moved(by_rad), 1e-9) is None) == equal


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"outcome": "timeout"}, "outcome"),
        ({"chunks": 5}, "chunks"),
        ({"chunks": 4.0}, "chunks (type)"),
        ({"mean_mm": 0.0}, "mean_mm"),
        ({"q_rad": np.zeros((3, 3))}, "q_rad (shape)"),
    ],
)
def test_no_tolerance_is_for_what_is_discrete(values: dict, name: str):
    difference = compare(RESULTS, changed(**values), 0.1)
    assert difference is not None
    assert difference.name == name


def test_a_missing_key_is_a_difference_of_either_side():
    more = changed(new=1)
    assert compare(RESULTS, more) == Difference("new", (), ABSENT, 1)
    assert compare(more, RESULTS) == Difference("new", (), 1, ABSENT)


def test_results_leave_out_clock_and_paths(tmp_path):
    report = {"outcome": "success", "times": {"wall_s": 1.5}, "model": f"{tmp_path}/a"}
    report |= {"rows": [[0.5, 1.5]], "none": {}}
    (tmp_path / "figures.json").write_text(json.dumps(report))
    np.savez(tmp_path / "arrays.npz", q_rad=RESULTS["q_rad"])
    results = read_results(tmp_path, {str(tmp_path): "TREE"})
    assert list(results) == [
        "arrays.npz:q_rad",
        "figures.json.outcome",
        "figures.json.model",
        "figures.json.rows (length)",
        "figures.json.rows.0",
        "figures.json.none",
    ]
    assert results["figures.json.model"] == "TREE/a"
