"""Robots from files are driven before their first motion: what `robot inspect` refuses, no rollout
accepts, and what it approves follows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.generated_arms import FEATURES, FEED_FORWARDS, generated_arm, judged
from strands_cosmos3 import Robot
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import resource
from strands_cosmos3.robots import drive_check
from strands_cosmos3.robots.catalogue import get_robot, write_robot
from strands_cosmos3.robots.drive_check import drive_joints
from strands_cosmos3.robots.spec import ModelPart, RobotSpec
from strands_cosmos3.sim.simulated_arm import SimulatedArm
from strands_cosmos3.worlds.arms import ControlConfig
from strands_cosmos3.worlds.table.scene import TableScene

UR5E = get_robot("ur5e")
ARMS = 150
SEEDS = {98: True, 107: True, 92: False}
"""Of arms for every run, and whether each is approved; they have every feature."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_generated_arm_follows_or_is_refused_by_name(tmp_path, seed):
    """One of the three has damping that takes more than its torques."""
    arm = generated_arm(tmp_path, seed)
    verdict = judged(arm)
    assert verdict.silent() is None
    assert verdict.approved == SEEDS[seed]


@pytest.mark.slow
def test_generated_arms_follow_or_are_refused_by_name(tmp_path):
    """About 20 minutes."""
    arms = [generated_arm(tmp_path, seed) for seed in range(ARMS)]
    for feature in FEATURES:
        assert sum(feature in arm.features for arm in arms) >= 0.15 * ARMS, feature
    verdicts = [judged(arm) for arm in arms]
    silent = {arm.file.stem: verdict.silent() for arm, verdict in zip(arms, verdicts, strict=True)}
    assert not {name: fault for name, fault in silent.items() if fault is not None}
    assert sum(verdict.approved for verdict in verdicts) >= 0.6 * ARMS


def altered(folder: Path, place: str, text: str) -> RobotSpec:
    """A UR5e in whose model a text stands in front of a place that is there once."""
    model = resource("assets/ur5e.xml").read_text()
    assert model.count(place) == 1
    path = folder / "arm.xml"
    path.write_text(model.replace(place, text + place))
    return replace(UR5E, name="altered", model=(ModelPart(str(path)),))


REFUSED = {
    "a spring beyond the torque": (
        "</mujoco>",
        '<tendon><spatial name="rope" stiffness="3000" springlength="0"><site site="tcp"/>'
        '<site site="hook"/></spatial></tendon>'
        '<worldbody><site name="hook" pos="0 0.8 0.8"/></worldbody>',
        "does not follow",
    ),
    "a belt's servo": (
        "</mujoco>",
        '<tendon><fixed name="belt"><joint joint="elbow_joint" coef="2"/></fixed></tendon>'
        '<actuator><position name="winch" tendon="belt" kp="20"/></actuator>',
        "'winch' pulls at the same joint",
    ),
    "a wrist that is tied to the world": (
        "</mujoco>",
        '<equality><connect body1="wrist_3_link" anchor="0 0 0"/></equality>',
        "does not follow",
    ),
    "a belt with a spring between a wrist and a finger": (
        "</mujoco>",
        '<tendon><fixed name="belt" stiffness="4000" springlength="-1.5708">'
        '<joint joint="wrist_1_joint" coef="1"/><joint joint="{finger}" coef="30"/>'
        "</fixed></tendon>",
        "wrist_1_joint",
    ),
}


@pytest.mark.parametrize(("name", "feed_forward"), [*zip(REFUSED, 2 * FEED_FORWARDS, strict=True)])
def test_a_rollout_refuses_what_inspect_refuses(tmp_path, name, feed_forward):
    place, text, says = REFUSED[name]
    finger = UR5E.limbs[0].gripper.joints[0]
    path = tmp_path / "arm.toml"
    path.write_text(write_robot(altered(tmp_path, place, text.format(finger=finger))))
    with pytest.raises(ConfigError, match=says):
        Robot(str(path), ControlConfig(feed_forward=feed_forward))


def test_another_model_of_a_packaged_robot_is_driven_too(tmp_path):
    text = resource("assets/panda.xml").read_text()
    path = tmp_path / "arm.xml"
    weld = '<equality><connect body1="link4" anchor="0 0 0"/></equality></mujoco>'
    path.write_text(text.replace("</mujoco>", weld))
    with pytest.raises(ConfigError, match="'panda' does not move as commanded"):
        SimulatedArm(TableScene(arm=path))


def test_the_joint_that_is_off_is_named_and_not_the_one_that_is_moved(tmp_path):
    """The wrist's motor is switched off by its range of force, whatever joint moves."""
    robot = altered(
        tmp_path,
        "</mujoco>",
        '<worldbody><site name="hook" pos="0.4 0.13 -3"/></worldbody><tendon><spatial name="rope" '
        'stiffness="30" springlength="0"><site site="tcp"/><site site="hook"/></spatial></tendon>',
    )
    text = Path(robot.model[0].file).read_text()
    Path(robot.model[0].file).write_text(
        text.replace('name="wrist_1" joint="wrist_1_joint" kp="500" kv="100" forcerange="-28 28"',
                     'name="wrist_1" joint="wrist_1_joint" kp="500" kv="100" forcerange="-0.2 0.2"')
    )  # fmt: skip
    drives = drive_joints(robot)
    pan = drives[0]
    assert pan.joint == "shoulder_pan_joint"
    assert pan.farthest_off == "wrist_1_joint"
    assert "shoulder_pan_joint does not follow: " in str(pan)
    assert "wrist_1_joint at most" in str(pan)


def test_what_was_measured_of_a_model_is_remembered_until_it_changes(tmp_path, monkeypatch):
    driven = []
    monkeypatch.setattr(
        drive_check._Check, "drive_all", lambda check: driven.append(check.robot.name) or []
    )
    robot = altered(tmp_path, "</mujoco>", "")
    for _ in range(2):
        drive_check.require_following(robot)
    assert driven == ["altered"]
    body = '<worldbody><body name="post"><geom size="0.01" pos="2 2 2"/></body></worldbody>'
    drive_check.require_following(altered(tmp_path, "</mujoco>", body))
    assert driven == ["altered", "altered"]
    drive_check.require_following(UR5E)
    assert driven == ["altered", "altered"]
