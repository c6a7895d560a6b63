"""A robot's actuators and gripper values fit its model, or an error says what does not, before anything moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strands_cosmos3.action_columns import GripperConvention
from strands_cosmos3.errors import ConfigError, NonFiniteError
from strands_cosmos3.robots.assembly import load_robot
from strands_cosmos3.robots.catalogue import ROBOTS, get_robot
from strands_cosmos3.robots.spec import RobotSpec
from strands_cosmos3.sim.scene import Scene

UR5E, DUAL = get_robot("ur5e"), get_robot("dual_panda")
ARM = UR5E.limb()
assert ARM.gripper is not None


def with_limb(**changes: object) -> RobotSpec:
    return replace(UR5E, limbs=(replace(ARM, **changes),))


def with_gripper(**changes: object) -> RobotSpec:
    return with_limb(gripper=replace(ARM.gripper, **changes))


@pytest.mark.parametrize("name", sorted(ROBOTS))
def test_installed_robots_drive_their_own_joints(name):
    assert load_robot(get_robot(name)).nu == sum(
        len(limb.joints) + (limb.gripper is not None) for limb in get_robot(name).limbs
    )


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (
            (1, 0, 2, 3, 4, 5),
            "'shoulder_lift' for joint 'shoulder_pan_joint', but .* it drives 'shoulder_lift_joint'",
        ),
        ((0, 1, 2, 3, 4, 4), "'wrist_2' is named for joint 'wrist_2_joint' and for joint 'wrist_3_joint'"),
    ],
)
def test_an_actuator_of_another_joint_is_refused(order, said):
    robot = with_limb(actuators=tuple(ARM.actuators[i] for i in order))
    for load in (load_robot, lambda spec: Scene(robot=spec)):
        with pytest.raises(ConfigError, match=said):
            load(robot)


def test_a_gripper_cannot_be_a_joint_of_the_arm_or_another_arms():
    with pytest.raises(ConfigError, match="'wrist_3' is named for joint 'wrist_3_joint' and for the gripper of 'arm'"):
        load_robot(with_gripper(actuator="wrist_3"))
    left, right = DUAL.limbs
    shared = replace(right, gripper=replace(right.gripper, actuator=left.gripper.actuator))
    with pytest.raises(ConfigError, match="for the gripper of 'left' and for the gripper of 'right'"):
        load_robot(replace(DUAL, limbs=(left, shared)))
    exchanged = (replace(left, actuators=right.actuators), replace(right, actuators=left.actuators))
    with pytest.raises(ConfigError, match="it drives 'right_joint1'"):
        load_robot(replace(DUAL, limbs=exchanged))


def test_a_tendon_is_not_a_joint():
    panda = get_robot("panda")
    arm = panda.limb()
    by_tendon = replace(arm, actuators=(*arm.actuators[:-1], arm.gripper.actuator), gripper=None)
    with pytest.raises(ConfigError, match="'joint7', but in the model it drives 'finger_joint1' and 'finger_joint2'"):
        load_robot(replace(panda, limbs=(by_tendon,)))


def test_a_grippers_values_are_in_the_models_unit():
    opening, command = ARM.gripper.opening, ARM.gripper.command
    for changes in (
        {"opening": GripperConvention(1000 * opening.open_value, opening.closed_value, "mm")},
        {"command": replace(command, open_value=2 * command.open_value + 1.0)},
        {"command": replace(command, closed_value=command.closed_value - 1.0)},
    ):
        with pytest.raises(ConfigError, match=r"the gripper of limb 'arm': .*_value .* is outside the model's range"):
            load_robot(with_gripper(**changes))


def test_slides_that_close_where_they_should_open_are_refused_by_the_scene():
    opening = ARM.gripper.opening
    inverted = replace(opening, open_value=opening.closed_value, closed_value=opening.open_value)
    with pytest.raises(ConfigError, match="state gap_m"):
        Scene(robot=with_gripper(opening=inverted))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fovy_deg": 180.0}, "below 180"),
        ({"target_m": (0.0, 0.0, 0.1), "position_m": (0.0, 0.0, 0.1)}, "other than its position"),
        ({"up": (0.0, 0.0, 0.0)}, "not along up"),
        ({"position_m": (0.0, float("nan"), 0.0)}, "finite"),
    ],
)
def test_a_camera_looks_somewhere(changes, said):
    with pytest.raises((ConfigError, NonFiniteError), match=said):
        replace(UR5E.cameras[0], **changes)
    with pytest.raises(ConfigError, match="cameras of 'ur5e'"):
        replace(UR5E, cameras=UR5E.cameras * 2)


def test_a_tool_is_finite():
    with pytest.raises(NonFiniteError, match="the tool of limb 'arm'"):
        with_limb(tool_m=(0.0, 0.0, float("nan")))
