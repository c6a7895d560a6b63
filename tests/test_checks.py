"""Checks of values that enter the package."""

import numpy as np
import pytest

from strands_cosmos3.checks import finite_array, whole_number
from strands_cosmos3.errors import InputError, NonFiniteError


def test_the_first_value_that_is_not_finite_is_named():
    values = np.zeros((2, 3))
    values[0, 2], values[1, 1] = np.nan, np.inf
    with pytest.raises(NonFiniteError, match=r"rows\[0, 2\] is nan"):
        finite_array(values, "rows", (None, 3))


def test_whole_numbers_include_both_bounds_and_are_no_booleans():
    assert [whole_number(value, "rows", 1, 4) for value in (1, np.int64(4))] == [1, 4]
    for wrong in (0, 5, 2.0, True, "2", None):
        with pytest.raises(InputError, match="rows must be a whole number from 1 to 4, got"):
            whole_number(wrong, "rows", 1, 4)
    with pytest.raises(InputError, match="of at least 1"):
        whole_number(0, "rows", 1)


@pytest.mark.parametrize(
    "value",
    [
        True,
        np.False_,
        [True, 0.5],
        (0.5, np.True_),
        [[0.1, 0.2], [0.3, False]],
        np.array([True, False]),
        [np.array([0.1, 0.2]), [True, 1]],
    ],
    ids=str,
)
def test_truth_values_are_no_numbers(value):
    with pytest.raises(InputError, match="must be an array of real numbers"):
        finite_array(value, "rows", None)
