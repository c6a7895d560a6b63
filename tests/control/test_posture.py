"""Redundant joints stay where they were over closed loops of the hand, and the pose pays nothing
for it.
"""

import itertools

import mujoco
import numpy as np
import pytest

from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.backends.replay import Recording
from strands_cosmos3.control.ik import METHODS, MinkIKBridge
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ShapeError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.model import load_panda
from strands_cosmos3.robots.panda import HOME_Q, dh_forward
from strands_cosmos3.types import ActionChunk, Observation
from strands_cosmos3.worlds.arms import Robot

MODEL = load_panda()
ASIDE_Q = HOME_Q + np.array([0.24, 0.15, 0.17, 0.25, -0.19, -0.13, 0.35])
"""Where an 8 cm loop turns the elbow by 0.05 rad each time if nothing draws it back."""


def full(q_arm):
    return np.concatenate([q_arm, [0.04, 0.04]])


def loop_of(q_start, turns, rows=60, radius_m=0.04):
    """[turns * rows, 4, 4] closed loops of 8 cm in the horizontal plane, from and to where the
    hand is.
    """
    a = np.arange(1, turns * rows + 1) / rows * 2 * np.pi
    T = np.repeat(dh_forward(q_start)[None], len(a), axis=0)
    T[:, 0, 3] += radius_m * (np.cos(a) - 1)
    T[:, 1, 3] += radius_m * np.sin(a)
    return T


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("q_start", [HOME_Q, ASIDE_Q], ids=["home", "aside"])
def test_twenty_closed_loops_leave_the_joints_where_they_were(method, q_start):
    bridge = MinkIKBridge(MODEL, posture_rad=q_start)
    solution = bridge.solve(loop_of(q_start, 20), full(q_start), 1 / 15, method)
    assert solution.converged.all()
    assert solution.residual_m.max() < 1e-8  # as without a posture
    assert solution.iterations.mean() < 2.05
    turns = solution.q_rad[59::60, :7] - q_start
    assert np.abs(solution.q_rad[:, :7] - q_start).max() < 0.35  # the loop itself
    assert np.abs(turns).max() < 0.03
    assert np.abs(turns[-1] - turns[9]).max() < 1e-3  # bounded, not slow


@pytest.mark.parametrize("method", METHODS)
def test_the_posture_is_approached_in_the_null_space_and_a_little_in_each_row(method):
    """From an elbow turned aside the hand follows its path exactly, while the joints go to the
    posture.
    """
    bend = np.array([0.6, 0.0, -0.6, 0.0, 0.0, 0.0, 0.0])
    elbow_aside = (
        MinkIKBridge(MODEL, posture_rad=HOME_Q + bend)
        .solve(loop_of(HOME_Q, 4), full(HOME_Q))
        .q_rad[-1, :7]
    )
    assert np.abs(elbow_aside - HOME_Q).max() > 0.2
    solution = MinkIKBridge(MODEL, posture_rad=HOME_Q).solve(
        loop_of(elbow_aside, 4), full(elbow_aside), 1 / 15, method
    )
    assert solution.residual_m.max() < 1e-6
    q = np.vstack((elbow_aside, solution.q_rad[:, :7]))
    assert np.abs(q[-1] - HOME_Q).max() < 0.2 * np.abs(elbow_aside - HOME_Q).max()
    least_norm = 0.0
    for before, after in itertools.pairwise(q[:11]):  # what the row moves beside its least motion
        data, J = mujoco.MjData(MODEL), np.zeros((6, MODEL.nv))
        data.qpos[:] = full(before)
        mujoco.mj_forward(MODEL, data)
        mujoco.mj_jacBody(MODEL, data, J[:3], J[3:], MODEL.body("hand").id)
        null = np.eye(7) - np.linalg.pinv(J[:, :7]) @ J[:, :7]
        self_motion = null @ (after - before)
        assert self_motion @ (HOME_Q - before) > 0
        least_norm = max(least_norm, np.abs(self_motion).max())
    assert 1e-3 < least_norm < 0.016


def test_the_default_posture_is_the_models_home_or_the_frankas():
    np.testing.assert_array_equal(MinkIKBridge(MODEL).posture_rad, HOME_Q)
    link = '<body><joint name="{}" range="-1 1" limited="true"/><geom size=".1"/>'
    bodies = (
        link.format("a")
        + link.format("b").replace("<body>", '<body name="tip">')
        + "</body></body>"
    )
    keys = '<keyframe><key name="home" qpos=".3 .6"/></keyframe>'
    two_joints = mujoco.MjModel.from_xml_string(
        f"<mujoco><worldbody>{bodies}</worldbody>{keys}</mujoco>"
    )
    rates = [np.ones(2)] * 4
    limits = JointLimits(-np.ones(2), np.ones(2), *rates)
    np.testing.assert_array_equal(
        MinkIKBridge(two_joints, "tip", limits=limits).posture_rad, [0.3, 0.6]
    )
    with pytest.raises(ShapeError, match="posture_rad"):
        MinkIKBridge(MODEL, posture_rad=np.zeros(6))


class Loops(Backend):
    """A closed loop of 8 cm from and to the measured pose."""

    info = BackendInfo(name="loops", requires_images=False)

    def infer(self, request):
        T = np.repeat(request.T_base_cosmos[None], request.n_rows + 1, axis=0)
        T[1:, :2, 3] += (loop_of(HOME_Q, 1, request.n_rows) - dh_forward(HOME_Q))[:, :2, 3]
        return ActionChunk(
            encode_chunk(T, np.ones(request.n_rows), request.embodiment),
            request.action_space,
            request.embodiment,
        )


def test_a_policys_posture_is_where_its_episode_began():
    with Cosmos3Policy(robot="panda", backend=Loops(), options={"chunk_rows": 60}) as policy:
        for q_start in (HOME_Q, ASIDE_Q):
            policy.reset()
            q = q_start
            for _ in range(20):
                q = policy.plan(Observation(q, 1.0), "").q_rad[-1]
            assert np.abs(q - q_start).max() < 0.05


def circling(q_start, turns, period_s=4.0):
    rows = round(period_s * 15)
    T = np.concatenate((dh_forward(q_start)[None], loop_of(q_start, turns, rows)))
    return Recording(
        T @ get_embodiment("droid").tool_frame.T_parent_cosmos, np.ones(len(T)), 15.0, q_start
    )


@pytest.mark.parametrize("turns", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_closed_loops_of_the_robot_leave_its_joints_where_they_were(turns):
    recording = circling(ASIDE_Q, turns)
    with Cosmos3Policy(robot="panda", backend="replay", model=recording) as policy:
        rollout = Robot().run_policy(policy=policy, duration=recording.duration_s + 1)
    q = rollout.arrays["q_achieved_rad"]
    assert np.abs(q[round(recording.duration_s * 600) - 1] - ASIDE_Q).max() < 0.05
    assert rollout.ik.max_mm < 1e-3
