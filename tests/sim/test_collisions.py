"""A policy that drives the arm into itself: the episode stops it, counts it, and says what would have met."""

import json

import mujoco
import numpy as np
import pytest

from helpers.panda_oracle import PandaOracle
from strands_cosmos3.backends.base import Backend
from strands_cosmos3.control.ik import MinkIKBridge
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.model import load_panda
from strands_cosmos3.robots.panda import HOME_Q, dh_forward
from strands_cosmos3.sim.robot import Robot
from strands_cosmos3.types import ActionChunk, Observation


def poses_into_the_arm(rows=32):
    T = np.repeat(dh_forward(HOME_Q)[None], rows, axis=0)
    T[:, 2, 3] -= np.linspace(0, 0.1, rows + 1)[1:]
    T[:, 0, 3] -= np.linspace(0, 0.4, rows + 1)[1:]
    return T


class IntoItself(Backend):
    name = "into itself"
    requires_images = False

    def __init__(self, space):
        self.action_space = space

    def infer(self, request):
        T, fingers = poses_into_the_arm(), (0.04, 0.04)
        if self.action_space == "joint_pos":
            free = MinkIKBridge(load_panda(), check_collisions=False)
            rows = free.solve(T, np.r_[HOME_Q, fingers], 1 / 15).q_rad[:, :7]
        else:
            rows = []
            for pose in T @ request.embodiment.tool_frame.T_parent_cosmos:
                quat = np.zeros(4)
                mujoco.mju_mat2Quat(quat, pose[:3, :3].reshape(9))
                rows.append([*pose[:3, 3], *quat[1:], quat[0]])
        space = request.embodiment.action_space(self.action_space)
        return ActionChunk(np.column_stack((rows, np.full(32, 0.2))), space, request.embodiment)


@pytest.mark.parametrize("space", ["joint_pos", "pose_abs"])
def test_the_arm_stops_before_it_meets_itself(space):
    policy = Cosmos3Policy("droid", "panda", backend=IntoItself(space), action_space=space)
    rollout = Robot().run_policy(policy=policy, duration=2.0, policy_provider="cosmos3")
    assert rollout.counters["collision_stopped"] == 1
    assert rollout.counters["collision_avoided"] == rollout.counters["collision_unchecked"] == 0
    (found,) = json.loads(json.dumps(rollout.to_dict()))["collisions"]
    assert found["outcome"] == "stopped"
    assert "hand" in found["bodies"]
    assert found["depth_mm"] > -1
    assert policy.last_rollout["collision"] == found
    off_pose = policy.last_rollout["off_pose_mm"]
    if space == "pose_abs":
        assert min(off_pose.values()) > 1
        assert max(off_pose) == 31
        assert rollout.steps["off_pose"] > 0
    oracle = PandaOracle()
    assert oracle.deepest_m(rollout.arrays["q_achieved_rad"][::10]).max() == 0
    assert np.abs(rollout.arrays["q_achieved_rad"][-1] - HOME_Q).max() > 0.1  # it did move


def test_ordinary_episodes_count_none():
    rollout = Robot().run_policy(policy_config={"backend": "scripted"}, task="reach", duration=1.0, seed=1)
    assert not rollout.collisions
    assert not any(rollout.counters[f"collision_{outcome}"] for outcome in ("stopped", "avoided", "touching", "unchecked"))
    assert rollout.steps["off_pose"] == 0


class To(Backend):
    """Joint rows from a start to an end."""

    name, requires_images, action_space = "to", False, "joint_pos"

    def __init__(self, q_start, q_end):
        self.rows = np.column_stack((np.linspace(q_start, q_end, 8), np.zeros(8)))

    def infer(self, request):
        return ActionChunk(self.rows, request.embodiment.action_space("joint_pos"), request.embodiment)


def test_fingers_count_as_open():
    """An open finger meets link 2 where a closed one does not."""
    q_start = np.array([-1.22, -1.53, 1.53, -2.61, 0.42, 0.92, -0.84])
    q_end = np.array([-0.98, -1.39, 1.68, -2.74, 0.21, 1.05, -0.98])
    oracle = PandaOracle()
    assert not oracle.contacts(q_start, 0.04)
    assert not oracle.contacts(q_end, 0.0)
    assert oracle.contacts(q_end, 0.04)
    policy = Cosmos3Policy("droid", "panda", backend=To(q_start, q_end), action_space="joint_pos")
    plan = policy.plan(Observation(q_start, gripper=0.0), "go")
    assert plan.collision.outcome == "stopped"
    assert set(plan.collision.bodies) == {"link2", "right_finger"}
