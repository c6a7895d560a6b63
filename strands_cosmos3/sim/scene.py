"""The scene: an arm on a table, three cubes, an open bin, and the cameras of the DROID rig.

The world's origin is the robot's base; z = 0 is the table's top. x points away from the robot, y to its left. Lengths
are in metres, angles in radians. A :class:`Scene` is a model and the indices into it; it holds no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, finite_array, require_type, typed
from strands_cosmos3.collision import Obstacle
from strands_cosmos3.embodiments import DROID_RIG
from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.robots.assembly import narrow_ranges
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.kinematics import kinematics_of
from strands_cosmos3.robots.spec import GripperSpec, RobotSpec
from strands_cosmos3.sim.appearance import NOMINAL, Appearance
from strands_cosmos3.sim.scene_builder import BIN, VIEWS, Bin, Cube, build

DEFAULT_CUBES = (
    Cube("cube_red", (0.83, 0.12, 0.11)),
    Cube("cube_green", (0.13, 0.58, 0.22)),
    Cube("cube_blue", (0.10, 0.32, 0.82)),
)
DISTRACTORS = (Cube("other_yellow", (0.90, 0.78, 0.12), 0.032, 0.03), Cube("other_violet", (0.50, 0.18, 0.62), 0.048, 0.09))
"""Cubes that no instruction names."""
SPAWN_X_M = (0.35, 0.65)
SPAWN_Y_M = (-0.20, 0.20)
SEPARATION_M = 0.10
"""Least distance between the centres of two cubes: an open finger fits beside a cube at any yaw of both."""
_MAX_DRAWS = 10_000


@dataclass(frozen=True, eq=False)
class Layout:
    """Poses of the named cubes on the table; ShapeError or NonFiniteError if an array does not fit."""

    names: tuple[str, ...]
    xy_m: F64  # [n, 2] centres in the world
    yaw_rad: F64  # [n] rotation about z

    def __post_init__(self) -> None:
        require_type(self.names, Sequence[str], "names")
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "xy_m", finite_array(self.xy_m, "xy_m", (len(self.names), 2)))
        object.__setattr__(self, "yaw_rad", finite_array(self.yaw_rad, "yaw_rad", (len(self.names),)))


class Scene:
    """A compiled scene and the indices into it.

    Attributes:
        model: 600 Hz, ``implicitfast``.
        view_names: The observation cameras, in the order of the DROID rig.
        robot, limb, gripper: The robot, its only limb and its gripper; kinematics: The limb's.
        arm_qpos, arm_dof: [n] addresses of the arm's joints in ``qpos`` and ``qvel``.
        finger_qpos, finger_dof: [2] the fingers'; finger_joints: Indices of their joints.
        arm_actuators: [n] indices into ``ctrl``; gripper_actuator: the gripper's.
        obstacles: The table and the bin's walls, for the arm's controller.
        hand_body, tcp_site: Indices of the hand's body and of the tool centre point.
        cube_qpos, cube_dof, cube_body: By cube: address of its 7 ``qpos`` entries (x y z, quaternion wxyz), of its 6
            ``qvel`` entries, index of its body.
    """

    @typed()
    def __init__(
        self,
        cubes: tuple[Cube, ...] = DEFAULT_CUBES,
        arm: str | Path | None = None,
        appearance: Appearance = NOMINAL,
        robot: RobotSpec = PANDA,
    ):
        """Compile the scene; ConfigError if two cubes share a name, or the robot is not one limb with a gripper.

        ``arm`` is None (the robot's own model), the path of an ``.xml`` with its names, or ``"menagerie"`` (a Panda, over the
        network).
        """
        if len({cube.name for cube in cubes}) != len(cubes):
            raise ConfigError(f"every cube needs its own name, got {[cube.name for cube in cubes]}.")
        self.cubes: dict[str, Cube] = {cube.name: cube for cube in cubes}
        self.robot, self.limb = robot, robot.limb()
        self.gripper = gripper = _gripper_of(robot)
        self.bin: Bin = BIN
        self.appearance = appearance
        self.view_names: tuple[str, ...] = DROID_RIG.views
        self.model: mujoco.MjModel = build(cubes, arm, appearance, robot).compile()
        model, limb = self.model, self.limb
        if arm is None:
            narrow_ranges(model, limb)
        self.arm_qpos = np.array([model.joint(name).qposadr[0] for name in limb.joints])
        self.arm_dof = np.array([model.joint(name).dofadr[0] for name in limb.joints])
        self.finger_qpos = np.array([model.joint(name).qposadr[0] for name in gripper.joints])
        self.finger_dof = np.array([model.joint(name).dofadr[0] for name in gripper.joints])
        self.finger_joints = tuple(int(model.joint(name).id) for name in gripper.joints)
        self.arm_actuators = np.array([model.actuator(name).id for name in limb.actuators])
        self.gripper_actuator = int(model.actuator(gripper.actuator).id)
        self.hand_body = int(model.body(limb.frame).id)
        self.tcp_site = int(model.site(self.limb.tool).id)
        self.obstacles = _standing_boxes(model, self.hand_body)
        self.kinematics = kinematics_of(model, limb)
        self.cube_qpos = {name: int(model.joint(name).qposadr[0]) for name in self.cubes}
        self.cube_dof = {name: int(model.joint(name).dofadr[0]) for name in self.cubes}
        self.cube_body = {name: int(model.body(name).id) for name in self.cubes}

    @typed()
    def sample_layout(self, rng: np.random.Generator, separation_m: float = SEPARATION_M) -> Layout:
        """Return a layout uniform in the spawn region, at any yaw, ``separation_m`` apart; ConfigError if it cannot fit."""
        placed: list[F64] = []
        for _ in range(_MAX_DRAWS):
            xy = np.array([rng.uniform(*SPAWN_X_M), rng.uniform(*SPAWN_Y_M)])
            if all(np.linalg.norm(xy - other) >= separation_m for other in placed):
                placed.append(xy)
            if len(placed) == len(self.cubes):
                return Layout(tuple(self.cubes), np.array(placed), rng.uniform(-np.pi, np.pi, len(placed)))
        raise ConfigError(f"{len(self.cubes)} cubes do not fit {separation_m:g} m apart into the spawn region.")

    @typed()
    def reset(self, data: mujoco.MjData, layout: Layout, q_arm_rad: F64 | None = None, gripper_open: bool = True) -> None:
        """Place the arm and the cubes, at rest, with the servos commanded to hold.

        ``data`` is overwritten, then forwarded (``mj_forward``); ``q_arm_rad`` [n] is the robot's home by default.

        Raises:
            UnknownNameError, ConfigError: The layout does not place exactly this scene's cubes.
            ShapeError, NonFiniteError: The configuration is not one finite number a joint.
        """
        q = finite_array(self.limb.home if q_arm_rad is None else q_arm_rad, "q_arm_rad", (len(self.limb.joints),))
        for name in layout.names:
            if name not in self.cubes:
                raise UnknownNameError("cube", name, self.cubes)
        if set(layout.names) != set(self.cubes):
            raise ConfigError(f"the layout places {list(layout.names)}, the scene has {list(self.cubes)}.")
        mujoco.mj_resetData(self.model, data)
        data.qpos[self.arm_qpos] = q
        data.ctrl[self.arm_actuators] = q
        data.qpos[self.finger_qpos] = self.gripper.opening.from_fraction(float(gripper_open))
        data.ctrl[self.gripper_actuator] = self.gripper.command.from_fraction(float(gripper_open))
        for name, (x_m, y_m), yaw_rad in zip(layout.names, layout.xy_m, layout.yaw_rad, strict=True):
            at = self.cube_qpos[name]
            data.qpos[at : at + 3] = x_m, y_m, self.cubes[name].edge_m / 2
            data.qpos[at + 3 : at + 7] = np.cos(yaw_rad / 2), 0.0, 0.0, np.sin(yaw_rad / 2)
        mujoco.mj_forward(self.model, data)

    @typed()
    def T_world_body(self, data: mujoco.MjData, name: str) -> F64:
        """Return the pose [4, 4] of a body, e.g. ``"hand"``, as of the last step; UnknownNameError if there is none."""
        index = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_BODY, name)
        if index < 0:
            raise UnknownNameError("body", name, (self.model.body(i).name for i in range(self.model.nbody)))
        T = np.eye(4)
        T[:3, :3] = data.xmat[index].reshape(3, 3)
        T[:3, 3] = data.xpos[index]
        return T

    def in_bin(self, position_m: F64) -> bool:
        """Return whether a world position [3] lies inside the bin's walls and below their rim."""
        return self.bin.contains(finite_array(position_m, "position_m", (3,)))


def _gripper_of(robot: RobotSpec) -> GripperSpec:
    limb = robot.limb()
    if limb.gripper is None or limb.tool is None:
        raise ConfigError(f"the scene needs an arm with a gripper and a tool centre point; {robot.name!r} has none.")
    return limb.gripper


def _standing_boxes(model: mujoco.MjModel, hand: int) -> tuple[Obstacle, ...]:
    """The solid boxes of a model that neither move nor belong to the arm."""
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    arm = model.body_rootid[hand]
    standing = (model.body_weldid[model.geom_bodyid] == 0) & (model.body_rootid[model.geom_bodyid] != arm)
    solid_box = (model.geom_type == mujoco.mjtGeom.mjGEOM_BOX) & ((model.geom_contype | model.geom_conaffinity) != 0)
    found: list[Obstacle] = []
    for geom in np.flatnonzero(standing & solid_box).tolist():
        yaw_rad = float(np.arctan2(data.geom_xmat[geom, 3], data.geom_xmat[geom, 0]))
        x, y, z = data.geom_xpos[geom].tolist()
        a, b, c = (2 * model.geom_size[geom]).tolist()
        found.append(Obstacle(model.geom(geom).name, (x, y, z), (a, b, c), yaw_rad))
    return tuple(found)


__all__ = [
    "BIN",
    "DEFAULT_CUBES",
    "DISTRACTORS",
    "SEPARATION_M",
    "SPAWN_X_M",
    "SPAWN_Y_M",
    "VIEWS",
    "Bin",
    "Cube",
    "Layout",
    "Scene",
]
