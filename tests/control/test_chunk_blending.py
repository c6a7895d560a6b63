"""Joining a chunk late: rows that have passed are dropped, and the rest is entered without a
jump.
"""

import numpy as np
import pytest

from helpers.ideal_arm import DT, FPS, sway
from strands_cosmos3.control.chunk_blending import blend_chunk, drop_elapsed, seam_speed
from strands_cosmos3.control.executor import Executor
from strands_cosmos3.control.trajectory import JointState
from strands_cosmos3.robots.panda import FER, HOME_Q, dh_forward
from strands_cosmos3.types import JointTrajectory, PoseTrajectory


def chunk(from_s=0.0, n=32, first_at_once=False, poses=False):
    t_s = (np.arange(n) + (not first_at_once)) / FPS
    q = sway(from_s + t_s)
    anchor, gripper = dh_forward(sway([from_s]))[0], np.linspace(0, 1, n)
    hand = PoseTrajectory(dh_forward(q), t_s, "hand", anchor, gripper)
    limb_poses = {"arm": hand} if poses else {}
    return JointTrajectory(q, t_s, gripper, limb_poses, residual_m=np.arange(n, dtype=float))


def test_rows_that_have_passed_are_dropped_and_times_count_from_now():
    plan = chunk(poses=True)
    rest = drop_elapsed(plan, 0.8)
    assert len(rest.t_s) == 20  # 0.8 s are twelve rows
    np.testing.assert_allclose(rest.t_s, (np.arange(20) + 1) / FPS)
    np.testing.assert_array_equal(rest.q_rad, plan.q_rad[12:])
    np.testing.assert_array_equal(rest.gripper, plan.gripper[12:])
    np.testing.assert_array_equal(rest.residual_m, np.arange(12.0, 32.0))
    np.testing.assert_allclose(rest.poses.T_base_anchor, plan.poses.T_base_frame[11], atol=1e-12)
    np.testing.assert_allclose(drop_elapsed(plan, 0.79).t_s[0], 12 / FPS - 0.79)
    assert len(drop_elapsed(plan, 0.79).t_s) == 21
    assert drop_elapsed(plan, 32 / FPS) is None
    assert drop_elapsed(plan, 99.0) is None


def test_a_motion_that_agrees_is_left_alone():
    """An arm that is where the chunk says it is by now follows the chunk's own rows."""
    plan, elapsed_s = chunk(), 0.5
    now = JointState(
        sway([elapsed_s])[0],
        (sway([elapsed_s + 1e-5]) - sway([elapsed_s - 1e-5]))[0] / 2e-5,
        np.zeros(7),
    )
    late = blend_chunk(plan, sway([0.0])[0], elapsed_s, now, FER, 0.4)
    assert np.abs(late.q_rad - plan.q_rad[7:]).max() < 2e-4


def test_a_difference_fades_out_and_is_entered_without_a_jump():
    plan, elapsed_s = chunk(), 0.5
    away = np.array([0.03, -0.02, 0.01, 0.02, 0.0, -0.03, 0.02])
    here = JointState(sway([elapsed_s])[0] + away, np.zeros(7), np.zeros(7))
    late = blend_chunk(plan, sway([0.0])[0], elapsed_s, here, FER, 0.4)
    parted = late.q_rad - plan.q_rad[7:]
    assert np.abs(parted[late.t_s >= 0.4]).max() < 1e-12
    # 33 ms after the seam most of it is still there
    assert np.abs(parted[0] - away).max() < 0.25 * np.abs(away).max()
    executor = Executor(FER, DT, here.q_rad)
    motion = executor.accept(late)
    assert not motion.stretched.any()


def test_a_seam_is_the_fastest_joints_difference_in_velocity():
    """An angle beside the chunk's does not matter."""
    plan, elapsed_s = chunk(), 0.5
    speed = (sway([elapsed_s + 1e-5]) - sway([elapsed_s - 1e-5]))[0] / 2e-5
    slower = np.array([0.1, 0.0, 0.0, -0.3, 0.0, 0.0, 0.2])
    for difference, expected in ((np.zeros(7), 0.0), (slower, 0.3)):
        here = JointState(sway([elapsed_s])[0] + 0.05, speed + difference, np.zeros(7))
        assert seam_speed(plan, sway([0.0])[0], elapsed_s, here) == pytest.approx(
            expected, abs=0.01
        )


def test_a_chunk_in_time_stays_as_it_is():
    plan = chunk()
    assert blend_chunk(plan, HOME_Q, 0.0, JointState.at_rest(HOME_Q), FER, 0.4) is plan


def test_rows_stay_inside_the_joints_range():
    q = np.repeat((FER.q_max - 0.001)[None], 32, axis=0)
    plan = JointTrajectory(q, (np.arange(32) + 1) / FPS)
    here = JointState(FER.q_max - 1e-6, np.zeros(7), np.zeros(7))
    late = blend_chunk(plan, q[0] - 0.01, 0.05, here, FER, 0.4)
    assert (late.q_rad <= FER.q_max).all()


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("at_once", [False, True])
def test_short_chunks(n, at_once):
    plan = chunk(n=n, first_at_once=at_once)
    late = blend_chunk(plan, sway([0.0])[0], 0.04, JointState.at_rest(sway([0.04])[0]), FER, 0.4)
    left = int((plan.t_s > 0.04).sum())
    assert late is None if left == 0 else len(late.t_s) == left
