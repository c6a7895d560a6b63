"""What a policy's arm refuses to follow, whichever backend answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.spy import Spy, flat
from strands_cosmos3.backends.base import WrappedBackend
from strands_cosmos3.errors import BackendError, ServiceChunkError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.panda import FER, HOME_Q


@pytest.mark.parametrize("robot", ["panda", "fr3"])
@pytest.mark.parametrize(("joint", "rate_rad_s"), [(0, 2.0), (3, 2.2), (5, -1.6)])
def test_a_backend_s_rows_outside_the_joints_ranges_are_refused(robot, joint, rate_rad_s):
    """Rows that run on evenly, and leave the range within two seconds."""
    rates = np.zeros(7)
    rates[joint] = rate_rad_s
    backend = Spy(joints_rad_s=rates)
    policy = Cosmos3Policy(robot=robot, backend=backend, action_space="joint_pos")
    policy.set_control_frequency(30)
    with pytest.raises(BackendError, match=f"joint {joint + 1} of 7 is at .*robot '{robot}'"):
        policy.get_actions_sync(flat(), "go")
    backend.joints_rad_s = -rates / 16
    assert len(policy.get_actions_sync(flat(), "go")) == policy.execution_horizon


def test_narrower_limits_that_are_given_decide():
    policy = Cosmos3Policy(
        robot="panda",
        backend=Spy(joints_rad_s=np.full(7, 0.1)),
        action_space="joint_pos",
        options={"limits": replace(FER, q_max=HOME_Q + 0.15)},
    )
    with pytest.raises(BackendError, match=r"row 23: joint \d of 7"):
        policy.get_actions_sync(flat(), "go")


def test_the_error_is_the_one_of_the_backend_within():
    backend = Spy(joints_rad_s=np.full(7, 9.0))
    backend.answer_error = ServiceChunkError
    wrapped = WrappedBackend(backend)
    policy = Cosmos3Policy(robot="panda", backend=wrapped, action_space="joint_pos")
    with pytest.raises(ServiceChunkError, match="not executed"):
        policy.get_actions_sync(flat(), "go")
