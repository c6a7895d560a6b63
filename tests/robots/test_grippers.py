"""Grippers of models that nobody here built: their jaws, and which of their ends is open."""

from __future__ import annotations

import numpy as np
import pytest

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.catalogue import read_robot, write_robot
from strands_cosmos3.robots.inspection import inspect_model
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
    # hand, drive, more: open and closed, joints, distance of the open fingers
    "slides below zero": (
        slide("a", -0.05, -1, "-.04 0") + slide("b", 0.05, 1, "-.04 0"),
        servo("a", "-.04 0"),
        COUPLED.format(sign=1),
        (0.0, -0.04, 0.0, -0.04, ("a", "b"), 0.09),
    ),
    "mirrored hinges, open below": (
        hinge("a", 0.01, 1, "-.7 0") + hinge("b", -0.01, 1, "0 .7"),
        servo("a", "-.7 0"),
        COUPLED.format(sign=-1),
        (-0.7, 0.0, -0.7, 0.0, ("a",), 0.11),
    ),
    "a tendon that closes": (
        slide("a", 0.01, 1, "0 .03") + slide("b", -0.01, -1, "0 .03"),
        '<position name="g" tendon="t" kp="300" kv="20" ctrlrange="-.03 0" gear="-1"/>',
        '<tendon><fixed name="t"><joint joint="a" coef=".5"/><joint joint="b" coef=".5"/></fixed></tendon>'
        + COUPLED.format(sign=1),
        (0.03, 0.0, 0.0, 0.0, ("a", "b"), 0.07),
    ),
    "a single slide": (
        slide("a", 0.0, 1, "0 .05") + FIXED_JAW,
        servo("a", "0 .05"),
        "",
        (0.05, 0.0, 0.05, 0.0, ("a",), 0.06),
    ),
    "a hinge without a telling name": (
        hinge("q6", 0.0, -1, "-.1 1") + FIXED_JAW,
        servo("q6", "-.1 1"),
        "",
        (1.0, -0.1, 1.0, -0.1, ("q6",), 0.08),
    ),
}


@pytest.mark.parametrize("kind", GRIPPERS)
def test_the_end_with_the_fingers_apart_is_the_open_one(tmp_path, kind):
    hand, drive, more, (opened, closed, command, shut, joints, apart_m) = GRIPPERS[kind]
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
    if gripper.gap_m:
        assert gripper.gap_m[-1] == pytest.approx(apart_m, abs=0.02)
        assert np.all(np.diff(gripper.gap_m) > 0)
    assert ("whether 'q6' is a gripper's jaw" in " ".join(notes)) == ("telling" in kind)
    (tmp_path / "arm.toml").write_text(write_robot(robot))
    assert read_robot(tmp_path / "arm.toml").limb().tool_quat == limb.tool_quat
    z_out = limb.T_frame_tool[:3, 2]
    assert z_out[2] > 0.9
    assert abs(limb.T_frame_tool[1, 1]) > 0.85


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


def test_what_is_derived_is_complete_but_for_what_it_asks(tmp_path):
    hand, drive, more, _ = GRIPPERS["a hinge without a telling name"]
    camera = '<camera name="eye" pos=".05 0 0" xyaxes="0 -1 0 1 0 0"/>'
    (tmp_path / "arm.xml").write_text(arm(hand + camera, drive, more))
    robot, notes = inspect_model(tmp_path / "arm.xml")
    said = " ".join(notes)
    assert "home, as the model has no keyframe 'home': zero" in said
    assert robot.limb().frames == {"hand": "tcp"}
    scene = TableScene(robot=robot)
    assert scene.model.camera("wrist").pos == pytest.approx([0.05, 0, 0])
    assert scene.model.camera("wrist").quat == pytest.approx(
        scene.model.camera("eye").quat, abs=1e-6
    )
    (missed,) = out_of_reach(scene)
    assert missed.startswith("the hand does not reach the workspace from home")
    (tmp_path / "arm.xml").write_text(arm(hand, drive, more))
    robot, notes = inspect_model(tmp_path / "arm.xml")
    assert "cameras: none is named 'wrist'" in " ".join(notes)
    with pytest.raises(ConfigError, match="there is no camera 'wrist'"):
        TableScene(robot=robot)
