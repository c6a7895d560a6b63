"""A policy that drives the arm into itself or the table: the episode stops it, counts it, and
says what would have met.
"""

import json

import mujoco
import numpy as np
import pytest

from helpers.panda_oracle import PandaOracle
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.collision import Obstacle
from strands_cosmos3.control.ik import MinkIKBridge
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.model import load_model, load_panda, panda_path
from strands_cosmos3.robots.panda import HOME_Q, T_hand_tcp, dh_forward
from strands_cosmos3.types import ActionChunk, Observation
from strands_cosmos3.worlds.arms import Robot


def poses_into_the_arm(rows=32):
    T = np.repeat(dh_forward(HOME_Q)[None], rows, axis=0)
    T[:, 2, 3] -= np.linspace(0, 0.1, rows + 1)[1:]
    T[:, 0, 3] -= np.linspace(0, 0.4, rows + 1)[1:]
    return T


class IntoItself(Backend):
    def __init__(self, space, T=None):
        self.info = BackendInfo(name="into itself", requires_images=False, action_space=space)
        self.T = poses_into_the_arm() if T is None else T

    def infer(self, request):
        T, fingers = self.T, (0.04, 0.04)
        if self.info.action_space == "joint_pos":
            free = MinkIKBridge(load_panda(), check_collisions=False)
            rows = free.solve(T, np.r_[HOME_Q, fingers], 1 / 15).q_rad[:, :7]
        else:
            rows = []
            for pose in T @ request.embodiment.tool_frame.T_parent_cosmos:
                quat = np.zeros(4)
                mujoco.mju_mat2Quat(quat, pose[:3, :3].reshape(9))
                rows.append([*pose[:3, 3], *quat[1:], quat[0]])
        space = request.embodiment.action_space(self.info.action_space)
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
    rollout = Robot().run_policy(
        policy_config={"backend": "scripted"}, task="reach", duration=1.0, seed=1
    )
    assert not rollout.collisions
    assert not any(
        rollout.counters[f"collision_{outcome}"]
        for outcome in ("stopped", "avoided", "touching", "unchecked")
    )
    assert rollout.steps["off_pose"] == 0


class To(Backend):
    """Joint rows from a start to an end."""

    info = BackendInfo(name="to", requires_images=False, action_space="joint_pos")

    def __init__(self, q_start, q_end):
        self.rows = np.column_stack((np.linspace(q_start, q_end, 8), np.zeros(8)))

    def infer(self, request):
        return ActionChunk(
            self.rows, request.embodiment.action_space("joint_pos"), request.embodiment
        )


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


TIP_M = 0.0584 + 0.0443 + 0.0097 - T_hand_tcp[2, 3]  # the finger tips below the tool centre point


def away_from_home(xyz, rows=32):
    """Poses from home to an offset, in a straight line."""
    T = np.repeat(dh_forward(HOME_Q)[None], rows, axis=0)
    T[:, :3, 3] += np.linspace(0, 1, rows + 1)[1:, None] * xyz
    return T


INTO_TABLE = away_from_home([0.0, 0.0, -0.45])  # 6 cm below its top


def going(T, space="pose_abs", **options):
    return Cosmos3Policy(
        "droid", "panda", backend=IntoItself(space, T), action_space=space, **options
    )


@pytest.mark.parametrize("space", ["joint_pos", "pose_abs"])
def test_the_arm_stops_before_it_meets_the_table(space):
    robot, policy = Robot(), going(INTO_TABLE, space)
    rollout = robot.run_policy(policy=policy, duration=3.5)
    found = rollout.collisions[0]
    assert rollout.counters["collision_stopped"] >= 1
    assert found.bodies[1] == "table" or found.bodies[0] == "table"
    assert set(found.bodies) & {"left_finger", "right_finger"}
    tips_m = (dh_forward(rollout.arrays["q_achieved_rad"]) @ T_hand_tcp)[:, 2, 3] - TIP_M
    assert 0.0 < tips_m.min() < 0.02  # it comes close, as it must for a cube


def test_a_wall_of_the_bin_is_met_sideways():
    down = np.array([0.42, 0.22, 0.05]) - (dh_forward(HOME_Q) @ T_hand_tcp)[:3, 3]
    T = np.concatenate((away_from_home(down, 16), away_from_home(down, 1) + np.zeros((16, 1, 1))))
    T[16:, 1, 3] += np.linspace(0, 0.2, 17)[1:]
    rollout = Robot().run_policy(policy=going(T), duration=4.0)
    assert any("bin_right" in found.bodies for found in rollout.collisions)
    assert rollout.counters["collision_stopped"] + rollout.counters["collision_avoided"] >= 1


def test_obstacles_are_the_robots_unless_they_are_given():
    at_home = Observation(HOME_Q, gripper=1.0)
    assert going(INTO_TABLE).plan(at_home, "go").collision.outcome == "clear"  # no robot, no table
    policy = going(INTO_TABLE)
    policy.set_obstacles(Robot().scene.obstacles)
    assert "table" in policy.plan(at_home, "go").collision.bodies
    policy = going(INTO_TABLE, options={"obstacles": ()})
    assert Robot().run_policy(policy=policy, duration=0.5).counters["collision_stopped"] == 0
    assert policy.plan(at_home, "go").collision.outcome == "clear"


@pytest.mark.parametrize(("yaw_rad", "outcome"), [(0.0, "clear"), (np.pi / 2, "stopped")])
def test_an_obstacle_of_ones_own(yaw_rad, outcome):
    """A shelf beside the way down, which it reaches only if it is turned."""
    x, y, _ = (dh_forward(HOME_Q) @ T_hand_tcp)[:3, 3]
    shelf = Obstacle("shelf", (x, y - 0.3, 0.1), (0.8, 0.1, 0.1), yaw_rad)
    plan = going(away_from_home([0.0, 0.0, -0.3]), options={"obstacles": [shelf]}).plan(
        Observation(HOME_Q, gripper=1.0), "go"
    )
    assert plan.collision.outcome == outcome
    assert outcome == "clear" or "shelf" in plan.collision.bodies


def test_a_compiled_model_has_obstacles_of_its_own():
    slab = [Obstacle("slab", (0.4, 0.0, 0.1), (0.4, 0.4, 0.1))]
    with pytest.raises(ConfigError, match="compiled"):
        going(INTO_TABLE, options={"arm_model": load_panda(), "obstacles": slab})
    policy = going(INTO_TABLE, options={"arm_model": load_model(panda_path(), slab)})
    policy.set_obstacles(Robot().scene.obstacles)
    assert "slab" in policy.plan(Observation(HOME_Q, gripper=1.0), "go").collision.bodies


def test_the_scenes_obstacles_are_its_table_and_bin():
    found = {obstacle.name: obstacle for obstacle in Robot().scene.obstacles}
    assert set(found) == {"table", "bin_floor", "bin_front", "bin_back", "bin_left", "bin_right"}
    table = found["table"]
    assert table.center_m[2] + table.size_m[2] / 2 == 0.0
    assert found["bin_left"].center_m[1] > found["bin_right"].center_m[1]


@pytest.mark.parametrize(
    "wrong",
    [{"size_m": (0.1, 0.0, 0.1)}, {"center_m": (0.0, np.nan, 0.0)}, {"yaw_rad": "x"}, {"name": 3}],
)
def test_a_malformed_obstacle_is_refused(wrong):
    with pytest.raises(InputError):
        Obstacle(**{"name": "box", "center_m": (0.0, 0.0, 0.0), "size_m": (0.1, 0.1, 0.1), **wrong})
