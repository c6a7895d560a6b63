"""Grippers of models that nobody here built: their jaws, and which of their ends is open."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from strands_cosmos3 import Robot
from strands_cosmos3.cli import main
from strands_cosmos3.robots.catalogue import get_robot, read_robot, write_robot
from strands_cosmos3.robots.inspection import inspect_model
from strands_cosmos3.robots.spec import Camera, Figures, ServoGains
from strands_cosmos3.sim.scene_builder import scene_gaps
from strands_cosmos3.worlds.table.reach import out_of_reach
from strands_cosmos3.worlds.table.scene import TableScene

AXES = ("0 0 1", "0 1 0", "0 1 0", "0 1 0", "0 0 1")
ARM = """<mujoco><compiler angle="radian"/><worldbody><body name="foot"><geom size=".05" pos="0 0 .05"/>
{links}</body></worldbody><actuator>{servos}{drive}</actuator>{more}</mujoco>"""


def arm(hand: str, drive: str, more: str = "") -> str:
    """An arm of five joints whose hand is what is given."""
    links = f'<geom type="box" size=".02 .03 .01"/>{hand}'
    for i, axis in reversed(list(enumerate(AXES))):
        links = (
            f'<body name="link{i}" pos="0 0 .15"><joint name="q{i}" axis="{axis}" range="-2.5 2.5"/>'
            f'<geom type="capsule" size=".03" fromto="0 0 -.05 0 0 0"/>{links}</body>'
        )
    servos = "".join(
        f'<position name="m{i}" joint="q{i}" kp="800" kv="80"/>' for i in range(len(AXES))
    )
    return ARM.format(links=links, servos=servos, drive=drive, more=more)


def slide(name: str, y: float, axis: int, ends: str) -> str:
    return (
        f'<body name="{name}" pos="0 {y} .03"><joint name="{name}" type="slide" axis="0 {axis} 0" range="{ends}"/>'
        '<geom type="box" size=".01 .005 .03" pos="0 0 .03"/></body>'
    )


def hinge(name: str, y: float, axis: int, ends: str) -> str:
    return (
        f'<body name="{name}" pos="0 {y} .02"><joint name="{name}" axis="{axis} 0 0" range="{ends}"/>'
        '<geom type="box" size=".01 .004 .04" pos="0 0 .04"/></body>'
    )


def servo(joint: str, ends: str) -> str:
    return f'<position name="g" joint="{joint}" kp="40" kv="4" ctrlrange="{ends}"/>'


FIXED_JAW = '<geom type="box" size=".01 .004 .045" pos="0 -.02 .055"/>'
COUPLED = '<equality><joint joint1="b" joint2="a" polycoef="0 {sign} 0 0 0"/></equality>'
GRIPPERS = {
    # hand, drive, more: open and closed positions and controls, joints
    "slides below zero": (
        slide("a", -0.05, -1, "-.04 0") + slide("b", 0.05, 1, "-.04 0"),
        servo("a", "-.04 0"),
        COUPLED.format(sign=1),
        (0.0, -0.04, 0.0, -0.04, ("a", "b")),
    ),
    "coupled slides that begin open": (
        slide("a", 0.01, 1, "0 .04") + slide("b", -0.01, -1, "0 .04"),
        servo("a", "0 .04"),
        COUPLED.format(sign=1)
        + '<keyframe><key name="home" qpos="0 .5 1 1 0 .04 .04"/></keyframe>',
        (0.04, 0.0, 0.04, 0.0, ("a", "b")),
    ),
    "mirrored hinges, open below": (
        hinge("a", 0.01, 1, "-.7 0") + hinge("b", -0.01, 1, "0 .7"),
        servo("a", "-.7 0"),
        COUPLED.format(sign=-1),
        (-0.7, 0.0, -0.7, 0.0, ("a",)),
    ),
    "a tendon that closes": (
        slide("a", 0.01, 1, "0 .03") + slide("b", -0.01, -1, "0 .03"),
        '<position name="g" tendon="t" kp="300" kv="20" ctrlrange="-.03 0" gear="-1"/>',
        '<tendon><fixed name="t"><joint joint="a" coef=".5"/><joint joint="b" coef=".5"/></fixed></tendon>'
        + COUPLED.format(sign=1),
        (0.03, 0.0, 0.0, 0.0, ("a", "b")),
    ),
    "a single slide": (
        slide("a", 0.0, 1, "0 .05") + FIXED_JAW,
        servo("a", "0 .05"),
        "",
        (0.05, 0.0, 0.05, 0.0, ("a",)),
    ),
    "a jaw beside a fixed one": (
        hinge("Jaw", 0.0, -1, "-.1 1") + FIXED_JAW,
        servo("Jaw", "-.1 1"),
        "",
        (1.0, -0.1, 1.0, -0.1, ("Jaw",)),
    ),
    "a thumb that opens below, by a geared servo": (
        hinge("thumb", 0.0, 1, "-1 .1") + FIXED_JAW,
        servo("thumb", "-.2 2").replace("/>", ' gear="-2"/>'),
        "",
        (-1.0, 0.1, 2.0, -0.2, ("thumb",)),
    ),
}


@pytest.mark.parametrize("kind", GRIPPERS)
def test_the_end_with_the_fingers_apart_is_the_open_one(tmp_path, kind):
    hand, drive, more, (opened, closed, command, shut, joints) = GRIPPERS[kind]
    (tmp_path / "arm.xml").write_text(arm(hand, drive, more))
    robot, notes = inspect_model(tmp_path / "arm.xml")
    limb = robot.limb()
    gripper = limb.gripper
    assert limb.joints == ("q0", "q1", "q2", "q3", "q4")
    assert gripper is not None
    assert gripper.joints == joints
    found = (gripper.opening.open_value, gripper.opening.closed_value)
    assert found == pytest.approx((opened, closed), abs=2e-3)
    if "tendon" not in kind:
        found = (gripper.command.open_value, gripper.command.closed_value)
        assert found == pytest.approx((command, shut))
    else:
        assert gripper.command.open_value < gripper.command.closed_value
    assert "where its tips were measured to be farther apart" in " ".join(notes)
    (tmp_path / "arm.toml").write_text(write_robot(robot))
    assert read_robot(tmp_path / "arm.toml").limb() == limb


def test_a_wrist_that_rolls_is_no_jaw_and_several_actuators_are_told(tmp_path):
    roll = '<body name="flange" pos="0 0 .05"><joint name="q5" axis="0 0 1" range="-3 3"/><geom type="cylinder" size=".03 .02"/></body>'
    (tmp_path / "roll.xml").write_text(arm(roll, servo("q5", "-3 3")))
    robot, notes = inspect_model(tmp_path / "roll.xml")
    assert robot.limb().joints[-1] == "q5"
    assert "no gripper was found" in " ".join(notes)
    two = slide("a", 0.01, 1, "0 .03") + slide("b", -0.01, -1, "0 .03")
    drives = servo("a", "0 .03") + servo("b", "0 .03").replace('"g"', '"h"')
    (tmp_path / "two.xml").write_text(arm(two, drives))
    robot, notes = inspect_model(tmp_path / "two.xml")
    assert robot.limb().gripper is None
    assert "several actuators (g, h)" in " ".join(notes)


@pytest.mark.parametrize("name", ["q6", "last", "joint_6"])
def test_whether_a_last_hinge_without_a_telling_name_is_a_jaw_is_asked(tmp_path, name):
    hand = hinge(name, 0.0, -1, "-.1 1") + FIXED_JAW
    (tmp_path / "arm.xml").write_text(arm(hand, servo(name, "-.1 1")))
    robot, notes = inspect_model(tmp_path / "arm.xml")
    assert robot.limb().gripper is None
    said = " ".join(notes)
    assert "If the last joint is a jaw, it is no joint of the limb: give it a name with" in said
    assert any("has no gripper" in gap for gap in scene_gaps(robot))


PULLED = '<tendon><fixed name="t"><joint joint="{0}" coef="{1}"/></fixed></tendon>'


@pytest.mark.parametrize(("name", "coef"), [("q6", 1), ("last", 0.5), ("joint_6", -1)])
def test_gains_are_asked_for_where_a_servo_is_to_be_added(tmp_path, capsys, name, coef):
    hand = hinge(name, 0.0, -1, "-.1 1") + FIXED_JAW
    drive = '<position name="g" tendon="t" kp="40" kv="4" ctrlrange="-.1 1"/>'
    (tmp_path / "arm.xml").write_text(arm(hand, drive, PULLED.format(name, coef)))
    file = tmp_path / "arm.toml"
    assert main(["robot", "inspect", str(tmp_path / "arm.xml"), "--out", str(file)]) == 0
    assert f"no actuator drives {name}; give gains (kp, kd)" in file.read_text()
    assert main(["robot", "inspect", str(file)]) == 2
    refusal = capsys.readouterr().err
    assert f"the actuator {name}_servo, which its model does not have" in refusal
    assert "Give a limb gains (kp, kd), and the servos that its joints lack are added" in refusal
    robot = read_robot(file)
    gains = ServoGains(Figures((800.0,) * 6, "tuned"), Figures((80.0,) * 6, "tuned"))
    file.write_text(write_robot(replace(robot, limbs=(replace(robot.limb(), gains=gains),))))
    assert main(["robot", "inspect", str(file)]) == 1
    assert "has no gripper" in capsys.readouterr().out


def test_the_upper_end_is_assumed_to_be_open_where_nothing_shows_it(tmp_path):
    bare = hinge("jaw", 0.0, -1, "-.1 1")
    bare = re.sub("<geom[^>]*>", '<inertial pos="0 0 .04" mass=".1" diaginertia="1 1 1"/>', bare)
    (tmp_path / "arm.xml").write_text(arm(bare, servo("jaw", "-.1 1")))
    robot, notes = inspect_model(tmp_path / "arm.xml")
    assert robot.limb().gripper.opening.open_value == 1.0
    assert "arm: whether the gripper is open at 1 (1), as assumed." in notes


def test_an_arm_that_is_completed_as_asked_runs(tmp_path):
    hand, drive, more, _ = GRIPPERS["a jaw beside a fixed one"]
    (tmp_path / "arm.xml").write_text(arm(hand, drive, more))
    robot, notes = inspect_model(tmp_path / "arm.xml")
    said = " ".join(notes)
    for asked in ("frames, such as {hand = ", "tool and tool_m", "fingers, the bodies", "gap_m"):
        assert asked in said, asked
    for asked in ("[[cameras]]", "home, as the model has no keyframe 'home': zero"):
        assert asked in said, asked
    assert len(scene_gaps(robot)) == 3
    limb = robot.limb()
    gripper = replace(limb.gripper, fingers=("Jaw", "link4"), gap_m=(0.0, 0.06))
    limb = replace(
        limb, gripper=gripper, tool="tcp", tool_m=(0, 0, 0.08), frames={"hand": "link4"},
        home=(0.0, 0.6, 1.3, 1.2, 0.0),
    )  # fmt: skip
    wrist = Camera("wrist", "link4", (0.05, 0.0, 0.0), (0.0, 0.0, 0.1), 60.0)
    robot = replace(robot, limbs=(limb,), cameras=(wrist,))
    assert scene_gaps(robot) == []
    (missed,) = out_of_reach(TableScene(robot=robot))
    assert missed.startswith("the hand does not reach the workspace from home")
    (tmp_path / "arm.toml").write_text(write_robot(robot))
    rollout = Robot(str(tmp_path / "arm.toml")).run_policy(
        policy_config={"backend": "scripted"}, task="reach", duration=0.5
    )
    assert rollout.tracking.max_mm < 5


def test_a_home_whose_hand_points_upwards_is_refused():
    """Its hand would have to turn over before it can reach anything."""
    (limb,) = (robot := get_robot("ur5e")).limbs
    up = replace(limb, home=(0.0, -np.pi / 2, 0.0, 0.0, np.pi / 2, 0.0))
    for wrist, refused in ((limb, False), (up, True)):
        said = out_of_reach(TableScene(robot=replace(robot, name="mine", limbs=(wrist,))))
        assert any("points upwards" in sentence for sentence in said) == refused
