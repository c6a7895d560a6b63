"""The tests' own groups of ranks: one death is one failure."""

import pytest


def test_a_rank_that_dies_is_named_and_others_take_its_place(harness):
    with pytest.raises(AssertionError, match="rank 1 died in kill: SIGKILL"):
        harness.group(2, joined=False).run("kill", rank=1)
    assert harness.group(2, joined=False).run("kill", rank=None) == [0, 1]
