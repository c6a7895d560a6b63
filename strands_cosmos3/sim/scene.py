"""A scene: a robot, what stands around it and what lies before it, and the cameras of its rig.

The world's origin is the robot's base, or halfway between those of two arms; z = 0 is the table's
top. x points away from the robot, y to its left. Lengths are in metres, angles in radians. A
:class:`Scene` is a model and the indices into it; it holds no state.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64, finite_array, known_name
from strands_cosmos3.collision import Obstacle
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.actuators import control_address
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.model import (
    LimbKinematics,
    base_pose,
    data_at,
    frame_body,
    joint_ids,
    kinematics_of,
    mujoco_errors,
    narrow_ranges,
    pose_of,
    quaternion_about,
    require_drives,
    require_servos,
)
from strands_cosmos3.robots.servo import NO_COMPENSATION, JointServo
from strands_cosmos3.robots.spec import Camera, GripperSpec, Limb, RobotSpec
from strands_cosmos3.sim.scene_builder import (
    add_camera,
    add_lights,
    add_tabletop,
    cameras,
    robot_spec,
    scene_gaps,
    view_names_of,
)

_MAX_DRAWS = 10_000
_FRESH_START = 1_000
_NO_FORCE = np.zeros(3)


@dataclass(frozen=True, eq=False)
class Layout:
    """Poses of named bodies that lie on the table; ShapeError or NonFiniteError if an array does
    not fit.
    """

    names: tuple[str, ...]
    xy_m: F64  # [n, 2] centres in the world
    yaw_rad: F64  # [n] rotation about z

    def __post_init__(self) -> None:
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
        frame_body, tcp_site: Ids.
        gripper_actuator: Index of its gripper's control in ``ctrl``.
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
    finger_qpos: NDArray[np.int32]
    finger_joints: tuple[int, ...]
    finger_bodies: tuple[int, ...]

    def opening_direction(self, data: mujoco.MjData, finger: int) -> F64:
        """Return the direction [3] in which a finger (index of ``finger_bodies``) opens, in the
        world.
        """
        if not self.gripper.fingers:
            return data.xaxis[self.finger_joints[finger]].copy()
        at = data.xpos[list(self.finger_bodies)]
        away = at[finger] - np.delete(at, finger, axis=0).mean(axis=0)
        return away / np.linalg.norm(away)

    def grips(self, data: mujoco.MjData, force_n: Mapping[int, F64], least_n: float) -> bool:
        """Whether every finger presses on a body against the direction in which it opens.

        Args:
            force_n: Force [3] on the body by each body that touches it (:meth:`Scene.forces_on`).
            least_n: Force of each finger from which it presses.
        """
        return all(
            -self.opening_direction(data, i) @ force_n.get(body, _NO_FORCE) > least_n
            for i, body in enumerate(self.finger_bodies)
        )

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
    limbs: dict[str, SceneLimb] = {}
    first = 0
    for limb in robot.limbs:
        gripper = limb.gripper
        assert gripper is not None
        assert limb.tool is not None
        fingers = joint_ids(model, gripper.joints)
        limbs[limb.name] = SceneLimb(
            limb,
            gripper,
            "" if len(robot.limbs) == 1 else f"{limb.name}_",
            slice(first, first + len(limb.joints)),
            kinematics_of(model, limb),
            base_pose(model, limb),
            frame_body(model, limb),
            model.site(limb.tool).id,
            int(control_address(model, [model.actuator(gripper.actuator).id])[0]),
            model.jnt_qposadr[fingers],
            tuple(fingers),
            tuple(model.body(name).id for name in gripper.fingers)
            or tuple(model.jnt_bodyid[fingers].tolist()),
        )
        first += len(limb.joints)
    return limbs


@dataclass(frozen=True)
class RestingBody:
    """A free body that lies on the table at an episode's beginning.

    Args:
        height_m: Its height as it lies; its origin is in the middle.
        qpos, dof, id: Addresses of its 7 ``qpos`` entries (x y z, quaternion wxyz) and its 6
            ``qvel`` entries; index of the body.
    """

    height_m: float
    qpos: int
    dof: int
    id: int


class Scene:
    """A compiled scene and the indices into it: a robot at a table.

    A subclass adds what stands on it in :meth:`furnish`. It names the bodies that episodes place as
    ``resting``, and may override :meth:`cameras`, :meth:`sample_layout` and :meth:`privileged`.

    Attributes:
        model: 600 Hz, ``implicitfast``.
        view_names: The observation cameras, in the order of the robot's rig.
        robot, limbs: The robot, and its limbs by name.
        arm: Another model of the robot, or None.
        servo: The arm's servos, without compensation.
        bodies: The resting bodies by name.
        arm_qpos, arm_dof: [n] addresses of all limbs' joints in ``qpos`` and ``qvel``.
        finger_qpos, finger_dof: All fingers'.
        arm_actuators, gripper_actuators: [n] and [G] indices into ``ctrl``.
        obstacles: The boxes that stand, such as the table, for the arm's controller; without those
            of the robot's own model, which it has.
        robot_roots: Ids of the bodies that carry the limbs.
    """

    def __init__(
        self,
        robot: RobotSpec = PANDA,
        arm: str | Path | None = None,
        resting: Mapping[str, float] | None = None,
    ):
        """Compile the scene; ConfigError if the robot's model cannot be used, or a limb has no
        gripper.

        Args:
            arm: None is the robot's own model; or the path of an ``.xml`` with its names, or
                ``"menagerie"`` (a Panda, over the network).
            resting: Name of each resting body -> its height [m].
        """
        self.robot = robot
        self.arm = arm
        with robot.named_in_errors():
            robot.require_independent("a scene")
            if gaps := scene_gaps(robot):
                raise ConfigError(f"a scene of robot {robot.name!r} needs: {'; '.join(gaps)}.")
            self.view_names: tuple[str, ...] = view_names_of(robot)
            self.model: mujoco.MjModel
            self.model, geoms_of_robot = self._compiled(arm)
            self.limbs = _limbs_of(model := self.model, robot)
        joints = joint_ids(model, robot.joints)
        self.arm_qpos = model.jnt_qposadr[joints]
        self.arm_dof = model.jnt_dofadr[joints]
        fingers = [joint for limb in self.limbs.values() for joint in limb.finger_joints]
        self.finger_qpos = model.jnt_qposadr[fingers]
        self.finger_dof = model.jnt_dofadr[fingers]
        self.servo = JointServo(model, NO_COMPENSATION, *robot.limbs)
        self.arm_actuators = self.servo.law.address
        self.gripper_actuators = np.array([limb.gripper_actuator for limb in self.limbs.values()])
        self.robot_roots = frozenset(
            int(model.body_rootid[limb.frame_body]) for limb in self.limbs.values()
        )
        self.obstacles = _standing_boxes(model, geoms_of_robot)
        self.bodies: dict[str, RestingBody] = {}
        for name, height_m in (resting or {}).items():
            joint = model.joint(name)
            qpos = int(joint.qposadr[0])
            self.bodies[name] = RestingBody(
                height_m, qpos, int(joint.dofadr[0]), model.body(name).id
            )

    def furnish(self, spec: mujoco.MjSpec) -> None:
        """Add lights, a table, and what stands and lies on it, to the robot's specification. A
        resting body has a free joint of its name.
        """
        add_lights(spec)
        add_tabletop(spec)

    def cameras(self) -> Mapping[str, Camera]:
        """Return the cameras by name; ConfigError if the rig needs one that there is not."""
        return cameras(self.robot)

    def _compiled(self, arm: str | Path | None) -> tuple[mujoco.MjModel, list[int]]:
        """The model, and the ids of the geoms that the robot brings."""
        action = f"build the scene of robot {self.robot.name!r}"
        with mujoco_errors(action):
            spec = robot_spec(self.robot, arm)
        geoms_of_robot = list(spec.geoms)
        with _no_name_twice(self.robot), mujoco_errors(action):
            self.furnish(spec)
            for camera in self.cameras().values():
                add_camera(spec, camera)
            model = spec.compile()
        for limb in self.robot.limbs if arm is None else ():
            narrow_ranges(model, limb)
        return model, [geom.id for geom in geoms_of_robot]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it holds no state

    @property
    def only(self) -> SceneLimb:
        """The only limb; of several limbs a ConfigError."""
        return self.limbs[self.robot.limb().name]

    def sample_layout(self, rng: np.random.Generator, separation_m: float = 0.0) -> Layout:
        """Return a layout uniform in the robot's workspace, at any yaw, with the centres
        ``separation_m`` apart; ConfigError if it cannot fit.
        """
        if not self.bodies:
            return Layout((), np.zeros((0, 2)), np.zeros(0))
        placed: list[F64] = []
        for draw in range(_MAX_DRAWS):
            # the bodies that lie may leave no room for another
            if draw % _FRESH_START == _FRESH_START - 1:
                placed.clear()
            xy = np.array(
                [rng.uniform(*self.robot.workspace.x_m), rng.uniform(*self.robot.workspace.y_m)]
            )
            if all(np.linalg.norm(xy - other) >= separation_m for other in placed):
                placed.append(xy)
            if len(placed) == len(self.bodies):
                return Layout(
                    tuple(self.bodies), np.array(placed), rng.uniform(-np.pi, np.pi, len(placed))
                )
        raise ConfigError(
            f"{len(self.bodies)} bodies do not fit {separation_m:g} m apart into the workspace "
            f"of {self.robot.name!r}."
        )

    def reset(
        self,
        data: mujoco.MjData,
        layout: Layout,
        q_arm_rad: F64 | None = None,
    ) -> None:
        """Place the arm, its grippers open, and the resting bodies, at rest; servos are commanded
        to hold.

        ``data`` is overwritten, then forwarded (``mj_forward``); ``q_arm_rad`` [n] is the robot's
        home by default.

        Raises:
            UnknownNameError, ConfigError: The layout does not place exactly this scene's bodies.
            ShapeError, NonFiniteError: The configuration is not one finite number a joint.
        """
        q = finite_array(
            self.robot.home_rad if q_arm_rad is None else q_arm_rad,
            "q_arm_rad",
            (len(self.arm_qpos),),
        )
        for name in layout.names:
            known_name(name, "body", self.bodies)
        if set(layout.names) != set(self.bodies):
            raise ConfigError(
                f"the layout places {list(layout.names)}, the scene has {list(self.bodies)}."
            )
        mujoco.mj_resetData(self.model, data)
        data.qpos[self.arm_qpos] = q
        self.servo.hold(data, q)
        for limb in self.limbs.values():
            data.qpos[limb.finger_qpos] = limb.gripper.opening.from_fraction(1.0)
            data.ctrl[limb.gripper_actuator] = limb.gripper.command.from_fraction(1.0)
        for name, xy_m, yaw_rad in zip(layout.names, layout.xy_m, layout.yaw_rad, strict=True):
            self.lay(data, name, xy_m, yaw_rad)
        mujoco.mj_forward(self.model, data)

    def lay(
        self, data: mujoco.MjData, name: str, xy_m: Sequence[float] | F64, yaw_rad: float
    ) -> None:
        """Write the pose of a resting body that lies at [2] with a yaw."""
        body = self.bodies[name]
        data.qpos[body.qpos : body.qpos + 7] = (
            *(*xy_m, body.height_m / 2),
            *quaternion_about(2, yaw_rad),
        )

    def privileged(self, data: mujoco.MjData) -> dict[str, F64]:
        """Return what only the simulation knows: the pose [4, 4] of each resting body, and of each
        limb ``tcp`` [4, 4], ``tcp_twist`` [6] (m/s and rad/s, world axes), ``base`` [4, 4] and
        ``gap_m`` between its open fingers, after its prefix.
        """
        state: dict[str, F64] = {name: self.T_world_body(data, name) for name in self.bodies}
        for limb in self.limbs.values():
            twist = np.zeros(6)
            site = mujoco.mjtObj.mjOBJ_SITE
            mujoco.mj_objectVelocity(self.model, data, site, limb.tcp_site, twist, 0)
            of_limb = {
                "tcp": pose_of(data.site(limb.tcp_site)),
                "tcp_twist": np.roll(twist, 3),  # MuJoCo puts rotation first
                "base": limb.T_world_base,
                "gap_m": limb.gap_m,
            }
            state |= {f"{limb.prefix}{key}": value for key, value in of_limb.items()}
        return state

    def forces_on(self, data: mujoco.MjData, body: int) -> dict[int, F64]:
        """Return the force [3] on a body, in the world, by each body that touches it."""
        contact = data.contact
        bodies = self.model.geom_bodyid[contact.geom]  # [contacts, 2]
        frames = contact.frame
        forces: dict[int, F64] = {}
        wrench = np.zeros(6)
        for i in np.flatnonzero((bodies == body).any(axis=1)):
            mujoco.mj_contactForce(self.model, data, int(i), wrench)
            # MuJoCo's normal points from the first geom to the second
            on_second = wrench[:3] @ frames[i].reshape(3, 3)
            first, second = bodies[i].tolist()
            other, force = (first, on_second) if second == body else (second, -on_second)
            forces[other] = forces.get(other, np.zeros(3)) + force
        return forces

    def T_world_body(self, data: mujoco.MjData, name: str) -> F64:
        """Return the pose [4, 4] of a body, e.g. ``"hand"``, as of the last step."""
        return pose_of(data.body(name))


@contextmanager
def _no_name_twice(robot: RobotSpec) -> Iterator[None]:
    """Say how to mend a name that a robot's model and what a scene adds to it have both."""
    try:
        yield
    except ConfigError as error:
        if (clash := re.search(r"repeated name '(.*)' in (\w+)", str(error))) is None:
            raise
        name, kind = clash.groups()
        leave_out = f', or leave it out: without = ["{name}"] in the table [[model]]'
        raise ConfigError(
            f"MuJoCo cannot build the scene of robot {robot.name!r}: its model has a {kind} "
            f"{name!r}, and so has the scene. Rename it in the model's file"
            f"{leave_out if kind == 'body' else ''}."
        ) from error


def _standing_boxes(model: mujoco.MjModel, of_robot: Sequence[int]) -> tuple[Obstacle, ...]:
    """The solid boxes of a scene that do not move, without the robot's geoms (ids): its own model
    has them.
    """
    data = data_at(model)
    standing = model.body_weldid[model.geom_bodyid] == 0
    standing[of_robot] = False
    solid_box = (model.geom_type == mujoco.mjtGeom.mjGEOM_BOX) & (
        (model.geom_contype | model.geom_conaffinity) != 0
    )
    boxes: list[Obstacle] = []
    for geom in np.flatnonzero(standing & solid_box).tolist():
        yaw_rad = float(np.arctan2(data.geom_xmat[geom, 3], data.geom_xmat[geom, 0]))
        center_m = tuple(data.geom_xpos[geom].tolist())
        size_m = tuple((2 * model.geom_size[geom]).tolist())
        boxes.append(Obstacle(model.geom(geom).name, center_m, size_m, yaw_rad))
    return tuple(boxes)
