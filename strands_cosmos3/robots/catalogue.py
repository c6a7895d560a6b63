"""The robots of the default installation, as data, and robots from TOML files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from strands_cosmos3.action_columns import PANDA_FINGER, PANDA_TENDON, GripperConvention
from strands_cosmos3.checks import instance_of
from strands_cosmos3.errors import UnknownNameError
from strands_cosmos3.robots.fetched import FETCHED
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.panda import (
    ARM_ACTUATORS,
    ARM_JOINTS,
    FER,
    FINGER_JOINTS,
    FR3,
    GRIPPER_ACTUATOR,
    HAND_BODY,
    HOME_Q,
    TCP_SITE,
    T_hand_tcp,
)
from strands_cosmos3.robots.spec import (
    Figures,
    GripperSpec,
    HandRates,
    Limb,
    LimbLimits,
    ModelPart,
    RobotCamera,
    RobotSpec,
)
from strands_cosmos3.robots.spec_file import read_robot

_FCI = "Franka's FCI documentation and libfranka 0.9.2"
_FR3 = "Franka's FCI documentation; the hand's acceleration: libfranka 0.15.0"
_UR = "UniversalRobots/Universal_Robots_ROS2_Description config/ur5e/joint_limits.yaml"


def _published(table: JointLimits, source: str) -> LimbLimits:
    """A table of limits that are all published."""
    names = ("q_min", "q_max", "velocity", "acceleration", "jerk", "torque")
    figures = {name: Figures(tuple(getattr(table, name).tolist()), source) for name in names}
    assert table.hand is not None
    return LimbLimits(
        **figures, hand=HandRates(table.hand.velocity, table.hand.acceleration, source)
    )


PANDA = RobotSpec(
    "panda",
    "Franka Panda (FER) with the Franka hand",
    (ModelPart("panda.xml"),),
    (
        Limb(
            "arm",
            ARM_JOINTS,
            ARM_ACTUATORS,
            frame=HAND_BODY,
            base="link0",
            home=tuple(HOME_Q.tolist()),
            limits=_published(FER, _FCI),
            tool=TCP_SITE,
            tool_m=(0.0, 0.0, float(T_hand_tcp[2, 3])),
            gripper=GripperSpec(
                FINGER_JOINTS, GRIPPER_ACTUATOR, PANDA_FINGER, PANDA_TENDON, grip_gain=5.0
            ),
        ),
    ),
    (
        RobotCamera(
            "wrist", HAND_BODY, (0.072, 0.0, 0.012), (0.040, 0.0, 0.150), 68.0, (1.0, 0.0, 0.0)
        ),
    ),
    "Denavit-Hartenberg parameters of Franka's FCI documentation; link inertials of "
    "franka_description",
    "droid",
)
FR3_ROBOT = replace(
    PANDA,
    name="fr3",
    title="Franka Research 3 with the Franka hand: the Panda's kinematics and masses, its own "
    "limits",
    limbs=(replace(PANDA.limbs[0], limits=_published(FR3, _FR3)),),
)


def _prefixed(limb: Limb, name: str, prefix: str) -> Limb:
    """A limb of a part whose names have a prefix; embodiments keep calling its frames by the names
    without it.

    Its gripper keeps the model's own force, with which one hand cannot carry what two hands are to
    lift.
    """
    gripper = limb.gripper
    if gripper is not None:
        fingers = tuple(prefix + joint for joint in gripper.joints)
        gripper = replace(
            gripper, joints=fingers, actuator=prefix + gripper.actuator, grip_gain=1.0
        )
    return replace(
        limb,
        name=name,
        joints=tuple(prefix + joint for joint in limb.joints),
        actuators=tuple(prefix + actuator for actuator in limb.actuators),
        frame=prefix + limb.frame,
        base=prefix + limb.base,
        tool=None if limb.tool is None else prefix + limb.tool,
        gripper=gripper,
        frames={limb.frame: prefix + limb.frame},
    )


_APART_M = 0.30
DUAL_PANDA = RobotSpec(
    "dual_panda",
    "Two Pandas side by side, 0.6 m apart, both facing x",
    (
        ModelPart("panda.xml", "left_", (0.0, _APART_M, 0.0)),
        ModelPart("panda.xml", "right_", (0.0, -_APART_M, 0.0)),
    ),
    (_prefixed(PANDA.limbs[0], "left", "left_"), _prefixed(PANDA.limbs[0], "right", "right_")),
    tuple(
        replace(camera, name=f"{side}_{camera.name}", body=f"{side}_{camera.body}")
        for side in ("left", "right")
        for camera in PANDA.cameras
    ),
    PANDA.source,
    "robomind-franka-dual",
)
_PI = float(np.pi)
UR5E = RobotSpec(
    "ur5e",
    "Universal Robots UR5e with a two-finger gripper",
    (ModelPart("ur5e.xml"),),
    (
        Limb(
            "arm",
            (
                "shoulder_pan_joint",
                "shoulder_lift_joint",
                "elbow_joint",
                "wrist_1_joint",
                "wrist_2_joint",
                "wrist_3_joint",
            ),
            ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3"),
            frame="tool0",
            base="base",
            home=(_PI, -_PI / 2, _PI / 2, -_PI / 2, -_PI / 2, 0.0),
            limits=LimbLimits(
                q_min=Figures((-2 * _PI, -2 * _PI, -_PI, -2 * _PI, -2 * _PI, -2 * _PI), _UR),
                q_max=Figures((2 * _PI, 2 * _PI, _PI, 2 * _PI, 2 * _PI, 2 * _PI), _UR),
                velocity=Figures((_PI,) * 6, _UR),
                torque=Figures((150.0, 150.0, 150.0, 28.0, 28.0, 28.0), _UR),
            ),
            tool="tcp",
            tool_m=(0.0, 0.0, 0.1558),
            gripper=GripperSpec(
                ("finger_joint1", "finger_joint2"),
                "gripper",
                GripperConvention(0.0425, 0.0, "m"),
                GripperConvention(0.0425, 0.0, "ctrl"),
            ),
        ),
    ),
    cameras=(
        RobotCamera(
            "wrist", "tool0", (0.080, 0.0, 0.020), (0.030, 0.0, 0.200), 68.0, (1.0, 0.0, 0.0)
        ),
    ),
    source="UR's article 'DH parameters': kinematics, masses and centres of mass; inertias "
    "estimated from the links' shapes",
    embodiment="robomind-ur",
)

ROBOTS: Mapping[str, RobotSpec] = MappingProxyType(
    {robot.name: robot for robot in (PANDA, FR3_ROBOT, DUAL_PANDA, UR5E)}
)
"""The robots of the default installation."""
_CALLED: Mapping[str, tuple[str, ...]] = {
    "panda": (
        "bimanual_panda_gripper",
        "bimanual_panda_hand",
        "franka",
        "franka_emika_panda",
        "franka_panda",
        "libero_panda",
        "oxe_droid",
        "oxe_droid_rel",
        "oxe_droid_relative_eef_relative_joint",
        "single_panda_gripper",
    ),
    "fr3": ("franka_fr3",),
    "dual_panda": ("bi_panda",),
    "ur5e": ("universal_robots_ur5e",),
    "xarm7": ("ufactory_xarm7",),
    "iiwa14": ("iiwa", "kuka_iiwa", "kuka_iiwa_14"),
    "openarm": (
        "bi_openarm",
        "bi_openarm_follower",
        "dual_openarm",
        "enactic_openarm",
        "open_arm",
        "openarm_bimanual",
        "openarm_v1",
        "openarm_v10",
    ),
}
ALIASES: Mapping[str, str] = MappingProxyType(
    {alias: name for name, aliases in _CALLED.items() for alias in aliases}
)
"""Other names of robots, among them strands-robots 0.5.3's of those that are here -> name."""


def list_robots() -> tuple[str, ...]:
    """Return the names of the robots of the default installation."""
    return tuple(ROBOTS)


def get_robot(robot: str | Path | RobotSpec = "panda") -> RobotSpec:
    """Return a robot by name or alias (``"franka"``), or read its TOML file.

    Raises:
        UnknownNameError: No such robot; the message lists the names.
        InputError, ConfigError, ResourceNotFoundError: The file is missing, or does not describe a
            robot.
    """
    if isinstance(robot, RobotSpec):
        return robot
    if isinstance(robot, Path) or (isinstance(robot, str) and robot.lower().endswith(".toml")):
        return read_robot(Path(robot))
    name = instance_of(robot, str, "the name of a robot").strip().lower()
    name = ALIASES.get(name, name)
    if name in FETCHED:
        return FETCHED[name].robot
    if name not in ROBOTS:
        raise UnknownNameError(
            "robot", robot, (*ROBOTS, *FETCHED, *ALIASES, "a path ending in .toml")
        )
    return ROBOTS[name]


def recorded_robot(robot_type: str | None) -> RobotSpec | None:
    """Return the known robot that a dataset or a recording names; None if it names none, an unknown
    one, or a file.

    InputError: It is no name.
    """
    if robot_type is None or instance_of(robot_type, str, "robot_type").lower().endswith(".toml"):
        return None  # a dataset names no files of this machine
    with suppress(UnknownNameError):
        return get_robot(robot_type)
    return None


__all__ = [
    "ALIASES",
    "DUAL_PANDA",
    "FR3_ROBOT",
    "PANDA",
    "ROBOTS",
    "UR5E",
    "get_robot",
    "list_robots",
    "recorded_robot",
]
