"""Windows that are drawn while a GPU computes."""

import threading

import pytest

from recipes.table_policy.prefetch import Prefetcher


def test_each_step_has_its_own_value_and_the_next_one_is_made_in_another_thread():
    made: list[tuple[int, bool]] = []

    def draw(step: int) -> int:
        made.append((step, threading.current_thread() is threading.main_thread()))
        return step * step

    drawn = Prefetcher(draw)
    assert [drawn(step) for step in (3, 4, 5)] == [9, 16, 25]
    assert made[0] == (3, True)  # nobody could know where a run resumes
    assert dict(made[1:3]) == {4: False, 5: False}
    assert drawn(9) == 81  # a step out of turn


def test_an_error_of_a_draw_reaches_its_step():
    def draw(step: int) -> int:
        if step == 1:
            raise ValueError("no windows")
        return step

    drawn = Prefetcher(draw)
    assert drawn(0) == 0
    with pytest.raises(ValueError, match="no windows"):
        drawn(1)
