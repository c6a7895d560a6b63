"""The scene, the scripted expert and the judges with other arms than the Panda."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.catalogue import get_robot, write_robot
from strands_cosmos3.robots.limits import LimitsAssumedWarning
from strands_cosmos3.robots.model import load_with_obstacles
from strands_cosmos3.robots.panda import FER, FR3
from strands_cosmos3.robots.spec import Figures, ModelPart, ServoGains
from strands_cosmos3.sim.dataset import rollout_spec
from strands_cosmos3.sim.simulated_arm import ControlConfig
from strands_cosmos3.worlds.arms import ROBOTS, Robot
from strands_cosmos3.worlds.table.expert import ScriptedBackend
from strands_cosmos3.worlds.table.scene import TableScene

UR5E = get_robot("ur5e")


class Heard(ScriptedBackend):
    """The expert, and what it was asked."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def infer(self, request):
        self.heard.append(request)
        return super().infer(request)


@pytest.fixture(scope="module")
def ur5e():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        return Robot("ur5e")


@pytest.mark.filterwarnings("ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning")
@pytest.mark.parametrize(
    ("task", "instruction"), [("reach", "reach the red cube"), ("pick", "pick up the red cube")]
)
def test_a_ur5e_reaches_and_picks(ur5e, task, instruction):
    rollout = ur5e.run_policy(
        instruction=instruction,
        policy_config={"backend": "scripted"},
        task=task,
        seed=1,
        duration=20.0,
        control_frequency=20.0,
    )
    assert rollout.success, rollout
    assert rollout.tracking.mean_mm < 0.2
    assert rollout.ik.max_mm < 0.01
    assert rollout.arrays["q_achieved_rad"].shape[1] == 6
    speed = np.abs(np.diff(rollout.arrays["q_commanded_rad"], axis=0)) * 600
    assert (speed / ur5e.limits.velocity).max() <= 1.001


def test_a_robot_keeps_its_own_limits(ur5e):
    fr3, panda = Robot("fr3"), Robot()
    np.testing.assert_array_equal(fr3.limits.velocity, FR3.velocity)
    np.testing.assert_array_equal(fr3.limits.q_max, np.minimum(FR3.q_max, FER.q_max))
    for name in ("q_min", "q_max", "velocity", "acceleration", "jerk", "torque"):
        np.testing.assert_array_equal(getattr(panda.limits, name), getattr(FER, name), name)
    assert fr3.limits.hands[0].acceleration == 9.0
    np.testing.assert_array_equal(ur5e.limits.velocity, np.full(6, np.pi))
    with pytest.raises(ConfigError, match="Franka"):
        Robot("ur5e", ControlConfig("fer"), ur5e.scene)


def test_other_robots_are_refused_where_they_do_not_fit(ur5e, tmp_path):
    with pytest.raises(UnknownNameError, match=r"unknown simulated robot 'openarm'.*ur5e"):
        Robot("openarm")
    with pytest.raises(ConfigError, match="another robot"):
        ur5e.run_policy("panda", "reach the red cube", policy_config={"backend": "scripted"})
    with pytest.raises(ConfigError, match="built around robot 'ur5e'"):
        Robot("panda", scene=ur5e.scene)
    with pytest.raises(ConfigError, match="gripper"):
        TableScene(robot=replace(UR5E, limbs=(replace(UR5E.limbs[0], gripper=None),)))
    with pytest.raises(ConfigError, match="fixed to 'hand'"):
        rollout_spec("droid", UR5E)
    assert rollout_spec("robomind-ur", UR5E).features["observation.state"].shape == (7,)


@pytest.mark.parametrize("name", [name for name in ROBOTS if len(get_robot(name).limbs) == 1])
def test_the_documentation_names_the_robots_whose_rollouts_are_recorded(name):
    page = (Path(__file__).parents[2] / "docs" / "robots.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| datasets of rollouts |"))
    taken, refused = row.split("your own", 1)
    robot = get_robot(name)
    if f"`{robot.name}`" in taken:
        rollout_spec(robot.embodiment or "droid", robot)
        return
    assert f"`{robot.name}`" in refused
    with pytest.raises(ConfigError, match="fixed to 'hand'"):
        rollout_spec("droid", robot)


@pytest.mark.filterwarnings("ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning")
def test_a_robot_from_a_file_is_simulated(tmp_path):
    """Its frame, gains and ranges are its own: motors become servos, and the embodiment's name
    of the frame is translated.
    """
    model = resource("assets/ur5e.xml").read_text()
    for place in ("name", "body1", "body2"):
        model = model.replace(f'{place}="tool0"', f'{place}="flange"')
    (tmp_path / "mine.xml").write_text(model)
    path, arm = tmp_path / "mine.toml", UR5E.limbs[0]
    limits = replace(
        arm.limits, q_max=Figures((4.0,) * 6, "test"), q_min=Figures((-4.0,) * 6, "test")
    )
    gains = ServoGains(Figures((3000.0,) * 6, "test"), Figures((300.0,) * 6, "test"))
    arm = replace(arm, frame="flange", frames={"tool0": "flange"}, gains=gains, limits=limits)
    cameras = (replace(UR5E.cameras[0], body="flange"),)
    mine = replace(
        UR5E,
        name="mine",
        title="my arm",
        model=(ModelPart("mine.xml"),),
        limbs=(arm,),
        cameras=cameras,
    )
    path.write_text(write_robot(mine))
    robot = Robot(str(path))
    np.testing.assert_array_equal(robot.servo.kp, 3000)
    np.testing.assert_array_equal(robot.limits.q_max, [4, 4, np.pi, 4, 4, 4])
    rollout = robot.run_policy(
        instruction="reach the red cube",
        policy_config={"backend": "scripted"},
        task="reach",
        duration=0.3,
        seed=1,
    )
    assert rollout.fault is None
    assert rollout.ik.max_mm < 0.01
    assert np.ptp(rollout.arrays["q_achieved_rad"], axis=0).max() > 0.01


def test_what_a_scene_lacks_of_a_robot_names_its_file(tmp_path):
    path, arm = tmp_path / "mine.toml", UR5E.limbs[0]
    for changed, says in (
        ({"gripper": None}, "limb 'arm' has no gripper"),
        ({"actuators": ("a", *arm.actuators[1:])}, "names the actuator a,"),
    ):
        path.write_text(write_robot(replace(UR5E, name="mine", limbs=(replace(arm, **changed),))))
        with pytest.raises(ConfigError, match=f"^{path}: .*{says}"):
            TableScene(robot=get_robot(path))
    with pytest.raises(ConfigError, match=f"^{path}: .*names the actuator a,"):
        load_with_obstacles(None, get_robot(path), ())


@pytest.mark.filterwarnings("ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning")
def test_poses_are_in_the_base_wherever_it_stands(tmp_path):
    """Requests, plans and metrics of a robot on a turned pedestal speak of its base, not of the
    world.
    """
    path = tmp_path / "raised.toml"
    part = replace(UR5E.model[0], position_m=(-0.05, 0.02, 0.1), yaw_deg=10.0)
    path.write_text(write_robot(replace(UR5E, name="raised", model=(part,))))
    robot, expert = Robot(str(path)), Heard()
    policy = Cosmos3Policy("robomind-ur", str(path), backend=expert)
    rollout = robot.run_policy(
        instruction="reach the red cube", policy=policy, task="reach", duration=1.5, seed=1
    )
    (first, *_), (limb,) = expert.heard, robot.scene.limbs.values()
    assert np.linalg.norm(limb.T_world_base[:3, 3] - [-0.05, 0.02, 0.1]) < 1e-9
    np.testing.assert_allclose(first.T_base_cosmos, limb.kinematics.forward(first.q_rad), atol=1e-6)
    assert rollout.loop_drift.max_mm < 1
    assert np.ptp(rollout.arrays["q_achieved_rad"], axis=0).max() > 0.1
    plan = policy.plan(robot.observation(), "reach the red cube")
    np.testing.assert_allclose(
        limb.kinematics.forward(plan.q_rad), plan.poses.T_base_frame, atol=1e-5
    )
