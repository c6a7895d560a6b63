"""``bench loop`` with other robots: their own number of joints and grippers, within their own
limits.
"""

from __future__ import annotations

import pytest

from strands_cosmos3.bench import loop
from strands_cosmos3.robots.catalogue import get_robot


@pytest.mark.filterwarnings("ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning")
@pytest.mark.parametrize(
    ("robot", "joints", "grippers"), [("ur5e", 6, ()), ("dual_panda", 14, (2,))]
)
def test_the_loop_of_another_robot_is_timed(robot, joints, grippers):
    limits, home, opening = loop._of(robot)
    assert (limits.velocity.shape, home.shape) == ((joints,), (joints,))
    assert getattr(opening, "shape", ()) == grippers
    assert (home == get_robot(robot).home_rad).all()
    figures = loop.run(2, 0, lambda text: None, robot)
    assert (figures["robot"], figures["chunks"], figures["counters"]["rejected"]) == (robot, 2, 0)
    assert "robot" not in loop.run(1, 0, lambda text: None)
