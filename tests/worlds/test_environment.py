"""Our table behind Gymnasium: its own check, the same seeds, and success as the judge of
evaluations sees it.
"""

import warnings

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="pip install 'strands-cosmos3[gym]'")
pytest.importorskip("mujoco")

import gymnasium
from gymnasium.utils.env_checker import check_env

import strands_cosmos3.environments  # noqa: F401 - registers
from strands_cosmos3.control.ik import MinkIKBridge
from strands_cosmos3.errors import ConfigError, InputError, RenderError, UnknownNameError
from strands_cosmos3.robots.model import load_panda
from strands_cosmos3.robots.panda import T_hand_tcp
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.environment import WorldEnv

TABLE = "strands_cosmos3/Table-v0"


@pytest.fixture(scope="module")
def robot():
    return Robot("panda")


@pytest.fixture
def env(robot):
    with WorldEnv("reach", pictures=False, robot=robot) as env:
        yield env


def test_gymnasiums_check_passes():
    env = gymnasium.make(TABLE, task="reach", pictures=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*(Box|box).*")  # joints are not in -1 .. 1
        check_env(env.unwrapped, skip_render_check=True)
    env.close()


def test_pictures_are_the_policys_views():
    with WorldEnv("reach", render_mode="rgb_array") as env:
        observation, _ = env.reset(seed=1)
        assert env.observation_space.contains(observation)
        assert env.render().shape == (180, 960, 3)
        assert (env.render()[:, :320] == observation[env.robot.scene.view_names[0]]).all()


def test_several_processes_draw_unless_they_were_forked_after_a_picture():
    with WorldEnv("reach") as drawn:
        drawn.reset(seed=1)
    blind = gymnasium.make_vec(TABLE, 2, "async", task="reach", pictures=False)
    assert blind.reset(seed=1)[0]["joint_pos"].shape == (2, 7)
    blind.close()
    seeing = gymnasium.make_vec(TABLE, 2, "async", task="reach")
    seeing.reset_async(seed=1)
    with pytest.raises(RenderError, match=r"vector_kwargs=\{'context': 'spawn'\}"):
        seeing.reset_wait(timeout=20)  # the fault is to wait for ever
    seeing.close(terminate=True)


@pytest.mark.slow
def test_spawned_processes_draw_whatever_their_parent_drew():
    with WorldEnv("reach") as drawn:
        picture = drawn.reset(seed=1)[0]["wrist"]
    envs = gymnasium.make_vec(TABLE, 2, "async", {"context": "spawn"}, task="reach")
    assert (envs.reset(seed=[1, 1])[0]["wrist"] == picture).all()
    envs.close()


def test_an_action_is_where_the_joints_go(env):
    start = env.reset(seed=2)[0]["joint_pos"]
    target = start + np.array([0.1, 0, 0, 0, 0, 0, -0.1])
    for _ in range(15):
        observation, reward, terminated, truncated, info = env.step(np.append(target, 0.5))
    assert np.abs(observation["joint_pos"] - target).max() < 2e-3
    assert observation["gripper"][0] == pytest.approx(0.5, abs=0.02)
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, False, False)


def test_a_far_target_is_approached_within_the_limits(env):
    start = env.reset(seed=2)[0]["joint_pos"]
    observation = env.step(np.append(env.action_space.high[:7], 1.0))[0]
    moved = np.abs(observation["joint_pos"] - start)
    assert 0 < moved.max() < (env.robot.limits.velocity / env.hz).max()


def test_success_ends_the_episode(env):
    """Onto the red cube, by inverse kinematics."""
    env.reset(seed=0)
    bridge = MinkIKBridge(load_panda(), ee_frame_name="hand", ee_frame_type="body")
    q = env.robot.joint_state()[0]
    pose = bridge.ee_pose(np.append(q, [0.04, 0.04]))
    tcp = pose @ T_hand_tcp
    tcp[:3, 3] = env.robot.scene.T_world_body(env.robot.data, "cube_red")[:3, 3] + [0, 0, 0.015]
    goal = tcp @ np.linalg.inv(T_hand_tcp)
    steps = np.linspace(pose[:3, 3], goal[:3, 3], 40)
    path = np.repeat(pose[None], 40, axis=0)
    path[:, :3, 3] = steps
    solved = bridge.solve(path, np.append(q, [0.04, 0.04]), dt_s=1 / 15)
    for row in [*solved.q_rad, *[solved.q_rad[-1]] * 20]:
        _, reward, terminated, _, info = env.step(np.append(row[:7], 1.0))
        if terminated:
            break
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_time_truncates(robot):
    with WorldEnv("reach", duration=0.2, pictures=False, robot=robot) as env:
        q = env.reset(seed=0)[0]["joint_pos"]
        ends = [env.step(np.append(q, 1.0))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_an_instruction_chooses_the_cube(env):
    assert (
        env.reset(seed=0, options={"instruction": "reach the blue cube"})[1]["instruction"]
        == "reach the blue cube"
    )
    assert env.reset(seed=0)[1]["instruction"] == "reach the red cube", "for one episode"
    with pytest.raises(InputError):
        env.reset(options={"instruction": "sing"})


def test_bad_arguments_raise():
    with pytest.raises(UnknownNameError, match="stack"):
        WorldEnv("dance")
    with pytest.raises(ConfigError, match="rgb_array"):
        WorldEnv("reach", render_mode="human")
