"""Joining a chunk late: rows that have passed are dropped, and the rest is entered without a
jump.
"""

from functools import cache

import numpy as np
import pytest

from helpers.ideal_arm import DT, FPS, sway
from helpers.lines import line
from strands_cosmos3.control.chunk_blending import (
    Seam,
    blend_chunk,
    drop_elapsed,
    join_chunk,
    seam_speed,
)
from strands_cosmos3.control.executor import Executor
from strands_cosmos3.control.limb_ik import LimbIK
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
    prepared, seam = join_chunk(plan, HOME_Q, 0.0, Executor(FER, DT, HOME_Q).takeover(), 0.4)
    assert (prepared.trajectory is plan, seam) == (True, Seam.BLENDED)


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


@pytest.fixture(scope="module")
def ik():
    return LimbIK("panda", check_collisions=False)


def full(q):
    return np.r_[q, 0.04, 0.04]


@pytest.fixture(scope="module")
def along(ik):
    """The plan of a line of so many rows from angles (a tuple), solved once."""

    @cache
    def plan(velocity_m_s, q_rad, rows=16):
        return ik.follow(line(velocity_m_s, rows=rows), full(q_rad))

    return plan


def under_way(along, velocity_m_s, at_s):
    """An executor that has followed a line for so long."""
    executor = Executor(FER, DT, HOME_Q)
    executor.accept(along(velocity_m_s, tuple(HOME_Q), 32))
    executor.advance(round(at_s / DT))
    return executor


def fastest_m_s(q_rad):
    return np.linalg.norm(np.diff(dh_forward(q_rad)[:, :3, 3], axis=0), axis=1).max() / DT


@pytest.mark.parametrize("late_s", [0.1, 0.35, 0.7])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((0.0, 0.25, 0.0), (0.0, -0.25, 0.0)),
        ((0.15, 0.0, 0.1), (-0.1, 0.15, 0.0)),
        ((0.0, 0.0, -0.2), (0.3, 0.0, 0.0)),
    ],
)
def test_a_contradicting_chunk_does_not_throw_the_hand(along, before, after, late_s):
    executor = under_way(along, before, 1.0)
    departure = executor.reference.q_rad
    executor.advance(round(late_s / DT))
    chunk = along(after, tuple(departure))
    takeover = executor.takeover()
    most_m_s = max(np.linalg.norm(before), np.linalg.norm(after)) + 0.1
    blended = takeover.prepare(blend_chunk(chunk, departure, late_s, takeover.reference, FER, 0.4))
    assert late_s < 0.2 or fastest_m_s(blended.block.q_rad) > most_m_s  # this is what it is about
    prepared, seam = join_chunk(chunk, departure, late_s, takeover, 0.4, chunk.arm)
    assert fastest_m_s(prepared.block.q_rad) < most_m_s + 0.002
    assert seam is not Seam.BLENDED or late_s < 0.2
    executor.take_up(prepared)
    assert executor.state == ("hold" if seam is Seam.BRAKED else "running")
    executor.advance(3000)
    assert executor.reference.rests  # and every reference on the way was within limits


@pytest.mark.parametrize("velocity", [(0.0, 0.25, 0.0), (0.1, -0.1, 0.05), (0.0, 0.0, -0.3)])
@pytest.mark.parametrize("late_s", [0.02, 0.2, 0.6])
def test_a_chunk_that_agrees_is_blended_as_ever(along, velocity, late_s):
    executor = under_way(along, velocity, 0.8)
    departure = executor.reference.q_rad
    executor.advance(round(late_s / DT))
    chunk, takeover = along(velocity, tuple(departure)), executor.takeover()
    ever = takeover.prepare(blend_chunk(chunk, departure, late_s, takeover.reference, FER, 0.4))
    prepared, seam = join_chunk(chunk, departure, late_s, takeover, 0.4, chunk.arm)
    assert seam is Seam.BLENDED
    assert np.array_equal(prepared.block.q_rad, ever.block.q_rad)


def test_a_small_contradiction_takes_a_longer_blend(along):
    executor = under_way(along, (0.0, 0.1, 0.0), 0.8)
    departure = executor.reference.q_rad
    executor.advance(round(0.8 / DT))
    stay = along((0.0, 0.0, 0.0), tuple(departure), 32)
    chunk, takeover = stay, executor.takeover()
    prepared, seam = join_chunk(chunk, departure, 0.8, takeover, 0.4, chunk.arm)
    assert seam is Seam.SLOWED
    assert fastest_m_s(prepared.block.q_rad) < 0.202
    there = dh_forward(np.stack((departure, prepared.block.q_rad[-1])))[:, :3, 3]
    assert np.linalg.norm(there[1] - there[0]) < 0.01  # it goes where the chunk wants it


def test_a_late_turn_does_not_spin_the_hand(ik):
    executor = Executor(FER, DT, HOME_Q)
    executor.accept(ik.follow(line(turn_rad_s=(0, 0, 0.8), rows=32), full(HOME_Q)))
    executor.advance(600)
    departure = executor.reference.q_rad
    executor.advance(240)
    chunk, takeover = ik.follow(line(turn_rad_s=(0, 0, -0.8)), full(departure)), executor.takeover()
    prepared, seam = join_chunk(chunk, departure, 0.4, takeover, 0.4, chunk.arm)
    assert seam is not Seam.BLENDED
    assert np.abs(prepared.block.qd_rad_s).max() < 1.31
