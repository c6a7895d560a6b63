"""The scene: a robot on a table, three cubes and an open bin, or for two hands a bar, and the
cameras of the robot's rig.

The world's origin is the robot's base, or halfway between those of two arms; z = 0 is the table's
top. x points away from the robot, y to its left. Lengths are in metres, angles in radians. A
:class:`Scene` is a model and the indices into it; it holds no state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64, finite_array, require_type, typed
from strands_cosmos3.collision import Obstacle
from strands_cosmos3.errors import ConfigError, Cosmos3Error, UnknownNameError
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.model import (
    LimbKinematics,
    base_pose,
    frame_body,
    kinematics_of,
    narrow_ranges,
    require_drives,
    require_servos,
)
from strands_cosmos3.robots.spec import GripperSpec, Limb, RobotSpec
from strands_cosmos3.sim.appearance import Appearance
from strands_cosmos3.sim.scene_builder import (
    BAR,
    BIN,
    LIGHT_BAR,
    VIEWS,
    Bar,
    Bin,
    Cube,
    bin_of,
    build,
    nominal,
    view_names_of,
)

DEFAULT_CUBES = (
    Cube("cube_red", (0.83, 0.12, 0.11)),
    Cube("cube_green", (0.13, 0.58, 0.22)),
    Cube("cube_blue", (0.10, 0.32, 0.82)),
)
DISTRACTORS = (
    Cube("other_yellow", (0.90, 0.78, 0.12), 0.032, 0.03),
    Cube("other_violet", (0.50, 0.18, 0.62), 0.048, 0.09),
)
"""Cubes that no instruction names."""
SPAWN_X_M, SPAWN_Y_M = PANDA.workspace.x_m, PANDA.workspace.y_m
BAR_X_M, BAR_Y_M, BAR_YAW_RAD = (0.44, 0.54), (-0.04, 0.04), (-0.15, 0.15)
"""Where a bar may lie, so that two arms reach both of its ends."""
SEPARATION_M = 0.10
"""Least distance between the centres of two cubes: an open finger fits beside a cube at any yaw
of both.
"""
_MAX_DRAWS, _FRESH_START = 10_000, 1_000


@dataclass(frozen=True, eq=False)
class Layout:
    """Poses of the named cubes, or of the bar, on the table; ShapeError or NonFiniteError if an
    array does not fit.
    """

    names: tuple[str, ...]
    xy_m: F64  # [n, 2] centres in the world
    yaw_rad: F64  # [n] rotation about z

    def __post_init__(self) -> None:
        require_type(self.names, Sequence[str], "names")
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "xy_m", finite_array(self.xy_m, "xy_m", (len(self.names), 2)))
        object.__setattr__(
            self, "yaw_rad", finite_array(self.yaw_rad, "yaw_rad", (len(self.names),))
        )


@dataclass(frozen=True, eq=False)
class SceneLimb:
    """A limb with a gripper, and the indices of its parts in a scene's model.

    Args:
        prefix: Of its cameras and of its entries in ``Observation.privileged``: empty, or
            ``<name>_`` of one limb of several.
        columns: Its joints among all of the robot's.
        kinematics, T_world_base: Its kinematics, and the pose [4, 4] of its base.
        frame_body, tcp_site, gripper_actuator: Ids.
        finger_qpos, finger_joints, finger_bodies: Addresses and ids of its fingers.
    """

    limb: Limb
    gripper: GripperSpec
    prefix: str
    columns: slice
    kinematics: LimbKinematics
    T_world_base: F64
    frame_body: int
    tcp_site: int
    gripper_actuator: int
    finger_qpos: NDArray[np.intp]
    finger_joints: tuple[int, ...]
    finger_bodies: tuple[int, ...]

    @typed()
    def opening_direction(self, data: mujoco.MjData, finger: int) -> F64:
        """Return the direction [3] in which a finger (index of ``finger_bodies``) opens, in the
        world.
        """
        if not self.gripper.fingers:
            return data.xaxis[self.finger_joints[finger]].copy()
        bodies = list(self.finger_bodies)
        away = data.xpos[bodies[finger]] - np.mean(
            data.xpos[bodies[:finger] + bodies[finger + 1 :]], axis=0
        )
        return away / np.linalg.norm(away)

    @property
    def gap_m(self) -> F64:
        """Gap between the open fingers; [K] at evenly spaced open fractions from closed to open,
        if the robot states them.
        """
        if self.gripper.gap_m:
            return np.array(self.gripper.gap_m)
        return np.array(len(self.finger_qpos) * self.gripper.opening.open_value)


def _limbs_of(model: mujoco.MjModel, robot: RobotSpec) -> dict[str, SceneLimb]:
    require_drives(model, robot)
    require_servos(model, robot)
    found: dict[str, SceneLimb] = {}
    first = 0
    for limb in robot.limbs:
        gripper = limb.gripper
        if gripper is None or limb.tool is None:
            raise ConfigError(
                f"the scene needs arms with a gripper and a tool centre point; {robot.name!r} has "
                f"none on {limb.name!r}."
            )
        if not gripper.gap_m and gripper.opening.open_value <= gripper.opening.closed_value:
            raise ConfigError(
                f"the gripper of limb {limb.name!r} opens from {gripper.opening.closed_value:g} to "
                f"{gripper.opening.open_value:g}; state gap_m, the gap between its fingers, "
                "unless they are slides that open "
                "upwards."
            )
        fingers = tuple(int(model.joint(name).id) for name in gripper.joints)
        found[limb.name] = SceneLimb(
            limb,
            gripper,
            "" if len(robot.limbs) == 1 else f"{limb.name}_",
            slice(first, first + len(limb.joints)),
            kinematics_of(model, limb),
            base_pose(model, limb),
            frame_body(model, limb),
            int(model.site(limb.tool).id),
            int(model.actuator(gripper.actuator).id),
            model.jnt_qposadr[list(fingers)].astype(np.intp),
            fingers,
            tuple(int(model.body(name).id) for name in gripper.fingers)
            or tuple(model.jnt_bodyid[list(fingers)].tolist()),
        )
        first += len(limb.joints)
    return found


def _compiled(
    cubes: tuple[Cube, ...],
    arm: str | Path | None,
    appearance: Appearance,
    robot: RobotSpec,
    bar: Bar | None,
) -> mujoco.MjModel:
    try:
        model = build(cubes, arm, appearance, robot, bar).compile()
    except ValueError as error:  # MuJoCo's, e.g. of a robot's file with a table of its own
        if isinstance(error, Cosmos3Error):
            raise
        raise ConfigError(
            f"MuJoCo cannot build the scene of robot {robot.name!r}: {error}"
        ) from error
    for limb in robot.limbs if arm is None else ():
        narrow_ranges(model, limb)
    return model


class Scene:
    """A compiled scene and the indices into it.

    Attributes:
        model: 600 Hz, ``implicitfast``.
        view_names: The observation cameras, in the order of the robot's rig.
        robot, limbs: The robot, and its limbs by name.
        arm_qpos, arm_dof: [n] addresses of all limbs' joints in ``qpos`` and ``qvel``.
        finger_qpos, finger_dof: All fingers'.
        arm_actuators, gripper_actuators: [n] and [G] indices into ``ctrl``.
        obstacles: The table and the bin's walls, for the arm's controller.
        robot_roots: Ids of the bodies that carry the limbs.
        bar: The bar, or None; bar_qpos, bar_dof, bar_body: As of a cube.
        limb, gripper, kinematics, hand_body, tcp_site, finger_joints, finger_bodies,
            gripper_actuator: Those of the only limb; of several limbs a ConfigError.
        cube_qpos, cube_dof, cube_body: By cube: address of its 7 ``qpos`` entries (x y z,
            quaternion wxyz), of its 6 ``qvel`` entries, index of its body.
    """

    @typed()
    def __init__(
        self,
        cubes: tuple[Cube, ...] | None = None,
        arm: str | Path | None = None,
        appearance: Appearance | None = None,
        robot: RobotSpec = PANDA,
        bar: Bar | None = None,
    ):
        """Compile the scene; ConfigError if two cubes share a name, or a limb has no gripper.

        Without cubes and a bar, it has three cubes for one limb, and a bar for several. ``arm`` is
        None (the robot's own model), the path of an ``.xml`` with its names, or ``"menagerie"`` (a
        Panda, over the network).
        """
        bar = Bar() if bar is None and cubes is None and len(robot.limbs) > 1 else bar
        cubes = (DEFAULT_CUBES if bar is None else ()) if cubes is None else cubes
        if len({cube.name for cube in cubes}) != len(cubes):
            raise ConfigError(
                f"every cube needs its own name, got {[cube.name for cube in cubes]}."
            )
        self.cubes: dict[str, Cube] = {cube.name: cube for cube in cubes}
        self.robot, self.bar = robot, bar
        self.bin: Bin = bin_of(robot)
        self.appearance = appearance = appearance or nominal(robot)
        with robot.named_in_errors():
            robot.require_independent("a scene")
            self.view_names: tuple[str, ...] = view_names_of(robot)
            self.model: mujoco.MjModel = _compiled(cubes, arm, appearance, robot, bar)
            self.limbs = _limbs_of(model := self.model, robot)
        self.arm_qpos = np.array([model.joint(name).qposadr[0] for name in robot.joints])
        self.arm_dof = np.array([model.joint(name).dofadr[0] for name in robot.joints])
        fingers = [joint for one in self.limbs.values() for joint in one.finger_joints]
        self.finger_qpos, self.finger_dof = (
            model.jnt_qposadr[fingers].astype(int),
            model.jnt_dofadr[fingers].astype(int),
        )
        self.arm_actuators = np.array(
            [model.actuator(name).id for limb in robot.limbs for name in limb.actuators]
        )
        self.gripper_actuators = np.array([one.gripper_actuator for one in self.limbs.values()])
        self.robot_roots = frozenset(
            int(model.body_rootid[one.frame_body]) for one in self.limbs.values()
        )
        self.obstacles = _standing_boxes(model, self.robot_roots)
        if bar is not None:
            self.bar_qpos, self.bar_dof = (
                int(model.joint(BAR).qposadr[0]),
                int(model.joint(BAR).dofadr[0]),
            )
            self.bar_body = int(model.body(BAR).id)
        self.cube_qpos = {name: int(model.joint(name).qposadr[0]) for name in self.cubes}
        self.cube_dof = {name: int(model.joint(name).dofadr[0]) for name in self.cubes}
        self.cube_body = {name: int(model.body(name).id) for name in self.cubes}

    @property
    def only(self) -> SceneLimb:
        """The only limb; of several limbs a ConfigError."""
        return self.limbs[self.robot.limb().name]

    @property
    def limb(self) -> Limb:
        return self.only.limb

    @property
    def gripper(self) -> GripperSpec:
        return self.only.gripper

    @property
    def kinematics(self) -> LimbKinematics:
        return self.only.kinematics

    @property
    def hand_body(self) -> int:
        return self.only.frame_body

    @property
    def tcp_site(self) -> int:
        return self.only.tcp_site

    @property
    def finger_joints(self) -> tuple[int, ...]:
        return self.only.finger_joints

    @property
    def finger_bodies(self) -> tuple[int, ...]:
        return self.only.finger_bodies

    @property
    def gripper_actuator(self) -> int:
        return self.only.gripper_actuator

    @typed()
    def sample_layout(self, rng: np.random.Generator, separation_m: float = SEPARATION_M) -> Layout:
        """Return a layout uniform in the spawn region, at any yaw, ``separation_m`` apart;
        ConfigError if it cannot fit.

        A bar lies where both of its ends can be reached, and no cubes lie beside it.
        """
        if self.bar is not None:
            xy = np.array([[rng.uniform(*BAR_X_M), rng.uniform(*BAR_Y_M)]])
            return Layout((BAR,), xy, np.array([rng.uniform(*BAR_YAW_RAD)]))
        placed: list[F64] = []
        for draw in range(_MAX_DRAWS):
            # the cubes that lie may leave no room for another
            if draw % _FRESH_START == _FRESH_START - 1:
                placed.clear()
            xy = np.array(
                [rng.uniform(*self.robot.workspace.x_m), rng.uniform(*self.robot.workspace.y_m)]
            )
            if all(np.linalg.norm(xy - other) >= separation_m for other in placed):
                placed.append(xy)
            if len(placed) == len(self.cubes):
                return Layout(
                    tuple(self.cubes), np.array(placed), rng.uniform(-np.pi, np.pi, len(placed))
                )
        raise ConfigError(
            f"{len(self.cubes)} cubes do not fit {separation_m:g} m apart into the spawn region."
        )

    @typed()
    def reset(
        self,
        data: mujoco.MjData,
        layout: Layout,
        q_arm_rad: F64 | None = None,
        gripper_open: bool = True,
    ) -> None:
        """Place the arm and the cubes, at rest, with the servos commanded to hold.

        ``data`` is overwritten, then forwarded (``mj_forward``); ``q_arm_rad`` [n] is the robot's
        home by default.

        Raises:
            UnknownNameError, ConfigError: The layout does not place exactly this scene's cubes, or
                its bar.
            ShapeError, NonFiniteError: The configuration is not one finite number a joint.
        """
        q = finite_array(
            self.robot.home_rad if q_arm_rad is None else q_arm_rad,
            "q_arm_rad",
            (len(self.arm_qpos),),
        )
        heights = {name: cube.edge_m for name, cube in self.cubes.items()}
        places = dict(self.cube_qpos)
        if self.bar is not None:
            heights[BAR], places[BAR] = self.bar.size_m[2], self.bar_qpos
        for name in layout.names:
            if name not in places:
                raise UnknownNameError("cube", name, places)
        if set(layout.names) != set(places):
            raise ConfigError(
                f"the layout places {list(layout.names)}, the scene has {list(places)}."
            )
        mujoco.mj_resetData(self.model, data)
        data.qpos[self.arm_qpos] = q
        data.ctrl[self.arm_actuators] = q
        for one in self.limbs.values():
            data.qpos[one.finger_qpos] = one.gripper.opening.from_fraction(float(gripper_open))
            data.ctrl[one.gripper_actuator] = one.gripper.command.from_fraction(float(gripper_open))
        for name, (x_m, y_m), yaw_rad in zip(
            layout.names, layout.xy_m, layout.yaw_rad, strict=True
        ):
            lay(data, places[name], (x_m, y_m, heights[name] / 2), yaw_rad)
        mujoco.mj_forward(self.model, data)

    def rearranged(
        self, data: mujoco.MjData, cubes: Mapping[str, tuple[F64, float]]
    ) -> mujoco.MjData:
        """Return a copy of a state with some cubes elsewhere on the table, given by name: centre
        [2] and yaw.
        """
        moved = mujoco.MjData(self.model)
        mujoco.mj_copyData(moved, self.model, data)
        for name, (xy_m, yaw_rad) in cubes.items():
            lay(moved, self.cube_qpos[name], (*xy_m, self.cubes[name].edge_m / 2), yaw_rad)
        mujoco.mj_forward(self.model, moved)
        return moved

    @typed()
    def T_world_body(self, data: mujoco.MjData, name: str) -> F64:
        """Return the pose [4, 4] of a body, e.g. ``"hand"``, as of the last step;
        UnknownNameError if there is none.
        """
        index = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_BODY, name)
        if index < 0:
            raise UnknownNameError(
                "body", name, (self.model.body(i).name for i in range(self.model.nbody))
            )
        T = np.eye(4)
        T[:3, :3] = data.xmat[index].reshape(3, 3)
        T[:3, 3] = data.xpos[index]
        return T

    def in_bin(self, position_m: F64) -> bool:
        """Return whether a world position [3] lies inside the bin's walls and below their rim."""
        return self.bin.contains(finite_array(position_m, "position_m", (3,)))


def lay(data: mujoco.MjData, address: int, center_m: Sequence[float], yaw_rad: float) -> None:
    """Write the pose of a body that lies flat to the 7 ``qpos`` entries of its free joint."""
    data.qpos[address : address + 3] = center_m
    data.qpos[address + 3 : address + 7] = np.cos(yaw_rad / 2), 0.0, 0.0, np.sin(yaw_rad / 2)


def _standing_boxes(model: mujoco.MjModel, robot: Collection[int]) -> tuple[Obstacle, ...]:
    """The solid boxes of a model that neither move nor belong to the robot."""
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    of_robot = np.isin(model.body_rootid[model.geom_bodyid], list(robot))
    standing = (model.body_weldid[model.geom_bodyid] == 0) & ~of_robot
    solid_box = (model.geom_type == mujoco.mjtGeom.mjGEOM_BOX) & (
        (model.geom_contype | model.geom_conaffinity) != 0
    )
    found: list[Obstacle] = []
    for geom in np.flatnonzero(standing & solid_box).tolist():
        yaw_rad = float(np.arctan2(data.geom_xmat[geom, 3], data.geom_xmat[geom, 0]))
        x, y, z = data.geom_xpos[geom].tolist()
        a, b, c = (2 * model.geom_size[geom]).tolist()
        found.append(Obstacle(model.geom(geom).name, (x, y, z), (a, b, c), yaw_rad))
    return tuple(found)


__all__ = [
    "BAR",
    "BIN",
    "DEFAULT_CUBES",
    "DISTRACTORS",
    "LIGHT_BAR",
    "SEPARATION_M",
    "SPAWN_X_M",
    "SPAWN_Y_M",
    "VIEWS",
    "Bar",
    "Bin",
    "Cube",
    "Layout",
    "Scene",
    "SceneLimb",
]
