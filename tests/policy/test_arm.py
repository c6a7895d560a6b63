"""What a policy's arm refuses to follow, whichever backend answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.spy import Spy, flat
from strands_cosmos3.backends.base import WrappedBackend
from strands_cosmos3.collision import Obstacle
from strands_cosmos3.errors import BackendError, ServiceChunkError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.policy.arm import PolicyArm
from strands_cosmos3.policy.options import ArmOptions
from strands_cosmos3.robots.catalogue import get_robot
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


def test_policies_of_a_robot_share_its_model_among_the_same_obstacles_only():
    box = Obstacle("box", (0.5, 0.0, 0.1), (0.1, 0.1, 0.2))
    models = [
        PolicyArm("panda", ArmOptions(obstacles=obstacles))._ik.model
        for obstacles in ((), (box,), (), (box,), (replace(box, yaw_rad=0.5),))
    ]
    assert models[0] is models[2]
    assert models[1] is models[3]
    assert len({id(model) for model in models}) == 3
    assert [model.ngeom - models[0].ngeom for model in models] == [0, 1, 0, 1, 1]
    other = replace(get_robot("panda"), title="another robot of that name")
    assert PolicyArm(other, ArmOptions())._ik.model not in models
