"""Robots as data: model, joints, limits with their sources, servos, home, cameras and limbs. numpy
only.

A robot's limbs are joined to an embodiment's columns by name, never by position: DROID and UR arms
are called ``"arm"``, and of two arms one is ``"left"`` and the other ``"right"``, whichever comes
first in a model or in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from strands_cosmos3.checks import F64, finite_array, known_name, positive, typed_fields, within
from strands_cosmos3.embodiments import Embodiment, GripperConvention, LimbColumns, get_embodiment
from strands_cosmos3.errors import ConfigError, InputError, ResourceNotFoundError

RATES = ("velocity", "acceleration", "jerk", "torque")
"""Limits that no MJCF states; a missing one takes the default ``ASSUMED`` of
:mod:`strands_cosmos3.robots.limits`.
"""
FRAME_TYPES = ("body", "site")
_PLAUSIBLE = {
    "q_min": 1e3,
    "q_max": 1e3,
    "velocity": 1e3,
    "acceleration": 1e5,
    "jerk": 1e8,
    "torque": 1e5,
}
"""Greatest plausible limits, in rad or m, s, N m or N."""
ROTATION_WEIGHT_M = 0.05
"""Default of :attr:`Limb.rotation_weight_m`, measured with a Panda: a turn beyond its range takes
the hand 10 mm away; with 0.1 m 23 mm, and with less, straight elbows tilt it more.
"""
POSITION_FIRST_M = 0.01
"""The same of fewer than six joints, which cannot meet both: a radian that stays off costs less
than a millimetre.
"""
IMPRATIO = 20.0
"""Default of :attr:`RobotSpec.impratio`: a grasped cube does not slip in seconds."""
_PART_M = 10.0
_REACH_M = 3.0
"""Greatest plausible distance of a robot's part, and reach of an arm."""


@dataclass(frozen=True)
class Figures:
    """One figure for each joint of a limb, and where they come from."""

    values: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        _text(self.source, "the source of figures")
        values = finite_array(self.values, f"figures of {self.source!r}", (None,))
        object.__setattr__(self, "values", tuple(values.tolist()))


@dataclass(frozen=True)
class HandRates:
    """Speed [m/s] and acceleration [m/s^2] that the origin of a limb's frame may reach, and
    where they come from.
    """

    velocity: float
    acceleration: float
    source: str

    def __post_init__(self) -> None:
        _text(self.source, "the source of the hand's rates")
        for name in ("velocity", "acceleration"):
            rate = positive(getattr(self, name), f"the hand's {name}")
            within(rate, f"the hand's {name}", 0.0, _PLAUSIBLE[name])


@dataclass(frozen=True)
class LimbLimits:
    """Limits of a limb's joints, base first. None is the model's own range, or a rate that has to
    be assumed.

    Args:
        q_min, q_max: Range [rad]. It never exceeds the model's.
        velocity, acceleration, jerk: In rad/s, rad/s^2, rad/s^3, or metres for slides.
        torque: In N m, or N.
        hand: Limits of the limb's frame, if its maker states any.
    """

    q_min: Figures | None = None
    q_max: Figures | None = None
    velocity: Figures | None = None
    acceleration: Figures | None = None
    jerk: Figures | None = None
    torque: Figures | None = None
    hand: HandRates | None = None

    def __post_init__(self) -> None:
        typed_fields(self)
        if (self.q_min is None) != (self.q_max is None):
            raise ConfigError("limits need both q_min and q_max, or neither.")
        for name, values in self.values.items():
            if name in RATES and min(values) <= 0:
                raise ConfigError(f"{name} limits must be above zero, got {list(values)}.")
            within(values, f"{name} limits", -_PLAUSIBLE[name], _PLAUSIBLE[name])

    @property
    def values(self) -> dict[str, tuple[float, ...]]:
        """The limits of joints that are stated, by name."""
        limits = {name: getattr(self, name) for name in _PLAUSIBLE}
        return {name: figures.values for name, figures in limits.items() if figures is not None}

    @property
    def assumed(self) -> tuple[str, ...]:
        """The rates that are not stated; a torque limit may be the model's."""
        return tuple(name for name in RATES if name != "torque" and name not in self.values)


@dataclass(frozen=True)
class GripperSpec:
    """A gripper with one opening.

    Args:
        joints: Its joints in the model.
        actuator: Its actuator in the model.
        opening: A joint's position when it is open and closed.
        command: The actuator's control when it is open and closed.
        grip_gain: Factor on the actuator's stiffness in a scene, where its own is too weak to hold
            a cube.
        fingers: The bodies that hold things, one for each finger; by default those that the joints
            move.
        gap_m: Gap between the fingers at evenly spaced open fractions, from closed to open. Empty
            for slides, whose openings add up to it.
    """

    joints: tuple[str, ...]
    actuator: str
    opening: GripperConvention
    command: GripperConvention
    grip_gain: float = 1.0
    fingers: tuple[str, ...] = ()
    gap_m: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        typed_fields(self)
        _names(self.joints, "the gripper's joints")
        if self.fingers:
            _names(self.fingers, "the gripper's fingers")
        within(self.gap_m or (0.0, 1.0), "gap_m", 0.0, 1.0)
        if len(self.gap_m) == 1 or (np.diff(self.gap_m) <= 0).any():
            raise ConfigError(
                "gap_m must grow from closed to open, and have two values or more; "
                f"got {list(self.gap_m)}."
            )
        _text(self.actuator, "the gripper's actuator")
        within(positive(self.grip_gain, "grip_gain"), "grip_gain", 0.0, 1e3)


@dataclass(frozen=True)
class ServoGains:
    """Stiffness kp [N m/rad] and damping kd [N m s/rad] of position servos, joint by joint."""

    kp: Figures
    kd: Figures


@dataclass(frozen=True)
class Limb:
    """A chain of joints that moves one frame, and the gripper on it. Names are those of the
    assembled model.

    Args:
        name: ``"arm"``, ``"left"``, ``"right"`` or ``"head"``; embodiments call their limbs so.
        joints: Its joints, base first.
        actuators: The actuator of each joint.
        frame, frame_type: The frame that inverse kinematics drives: a ``"body"`` or a ``"site"``.
        tool, tool_m: Site between the finger tips, and its position in the frame; a scene adds a
            site that the model lacks. Its z axis points out of the hand, and the fingers open along
            y.
        tool_roll_deg: Turn of an added site about the frame's x axis.
        base: Body at the limb's base, in whose frame its poses are.
        home: Angles [rad] at which an episode begins.
        limits: Limits of its joints.
        gripper: None if it has none.
        frames: Names that embodiments use for its frames, with the model's names, e.g. ``{"hand":
            "left_hand"}``.
        gains: Gains of its position servos, to be set in the model; None keeps the model's.
        rotation_weight_m: Distance that weighs as much as a radian where inverse kinematics cannot
            meet both the position and the rotation of a pose; None is :data:`ROTATION_WEIGHT_M`, or
            :data:`POSITION_FIRST_M` for fewer than six joints.
    """

    name: str
    joints: tuple[str, ...]
    actuators: tuple[str, ...]
    frame: str
    base: str
    home: tuple[float, ...]
    limits: LimbLimits = LimbLimits()
    frame_type: str = "body"
    tool: str | None = None
    tool_m: tuple[float, float, float] = (0.0, 0.0, 0.0)
    tool_roll_deg: float = 0.0
    gripper: GripperSpec | None = None
    frames: Mapping[str, str] = field(default_factory=dict)
    gains: ServoGains | None = None
    rotation_weight_m: float | None = None

    def __post_init__(self) -> None:
        typed_fields(self)
        for name in ("name", "frame", "base"):
            _text(getattr(self, name), f"a limb's {name}")
        known_name(self.frame_type, f"frame type of limb {self.name!r}", FRAME_TYPES)
        _names(self.joints, f"the joints of limb {self.name!r}")
        home = finite_array(self.home, f"the home of limb {self.name!r}", (None,))
        within(self.tool_m, f"tool_m of limb {self.name!r}", -_PART_M, _PART_M)
        within(self.tool_roll_deg, f"tool_roll_deg of limb {self.name!r}", -360.0, 360.0)
        if self.rotation_weight_m is not None:
            name = f"rotation_weight_m of limb {self.name!r}"
            within(self.rotation_weight_m, name, 1e-3, _PART_M)
        by_joint = {"actuators": self.actuators, "home": self.home, **self.limits.values}
        if self.gains is not None:
            kp = self.gains.kp.values
            kd = self.gains.kd.values
            within(kp, f"gains kp of limb {self.name!r}", 1e-6, 1e6)
            within(kd, f"gains kd of limb {self.name!r}", 0.0, 1e6)
            by_joint |= {"gains kp": kp, "gains kd": kd}
        lengths = {name: len(values) for name, values in by_joint.items()}
        if wrong := {name: n for name, n in lengths.items() if n != len(self.joints)}:
            counts = ", ".join(f"{name} has {n}" for name, n in wrong.items())
            raise ConfigError(
                f"limb {self.name!r} has {len(self.joints)} joints, but its {counts}; give one for "
                "each joint."
            )
        object.__setattr__(self, "home", tuple(home.tolist()))
        object.__setattr__(self, "frames", MappingProxyType(dict(self.frames)))

    @property
    def home_rad(self) -> F64:
        """[n] the angles of :attr:`home`."""
        return np.array(self.home)

    @property
    def T_frame_tool(self) -> F64:
        """[4, 4] pose of the tool centre point in the frame."""
        T = np.eye(4)
        roll_rad = np.deg2rad(self.tool_roll_deg)
        c = np.cos(roll_rad)
        s = np.sin(roll_rad)
        T[1:3, 1:3] = [[c, -s], [s, c]]
        T[:3, 3] = self.tool_m
        return T

    def frame_called(self, name: str) -> str:
        """Return the model's name of a frame that an embodiment calls ``name``."""
        return self.frames.get(name, name)

    def of_joint(self, i: int) -> dict[str, object]:
        """Return what the limb states of its i-th joint, and the joints before that."""
        limits = {name: values[i] for name, values in self.limits.values.items()}
        own: dict[str, object] = {
            "joints": self.joints[: i + 1],
            "actuator": self.actuators[i],
            "home": self.home[i],
        }
        if self.gains is not None:
            own |= {"kp": self.gains.kp.values[i], "kd": self.gains.kd.values[i]}
        return own | limits


@dataclass(frozen=True)
class ModelPart:
    """A model file, once, at a pose in the world or on a body of an earlier part.

    Args:
        file: An ``.xml`` or ``.urdf`` file: a path, or the name of a packaged one
            (``"panda.xml"``).
        prefix: Put before every name of the file, so that the same file can be attached several
            times.
        position_m: Origin of the part.
        yaw_deg: Turn about the z axis.
        mount: Body of an earlier part that it is fixed to, with its prefix; None is the world.
        without: Bodies that are removed from it, with everything on them.
        exclude: Pairs of bodies that cannot collide, e.g. because the convex hulls of their meshes
            overlap.
    """

    file: str
    prefix: str = ""
    position_m: tuple[float, float, float] = (0.0, 0.0, 0.0)
    yaw_deg: float = 0.0
    mount: str | None = None
    without: tuple[str, ...] = ()
    exclude: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        typed_fields(self)
        _text(self.file, "a model's file")
        within(self.position_m, "a part's position_m", -_PART_M, _PART_M)
        within(self.yaw_deg, "a part's yaw_deg", -360.0, 360.0)


@dataclass(frozen=True)
class Camera:
    """A camera that is fixed to a body, of the robot or ``world``; positions and directions are in
    the body's frame.

    Args:
        target_m: A point it looks at.
        fovy_deg: Vertical field of view.
        up: Up in the picture.
    """

    name: str
    body: str
    position_m: tuple[float, float, float]
    target_m: tuple[float, float, float]
    fovy_deg: float
    up: tuple[float, float, float] = (0.0, 0.0, 1.0)

    def __post_init__(self) -> None:
        typed_fields(self)
        if positive(self.fovy_deg, "fovy_deg") >= 180.0:
            raise ConfigError(
                f"fovy_deg of camera {self.name!r} must be below 180, got {self.fovy_deg:g}."
            )
        position, target, up = (
            finite_array(getattr(self, name), name, (3,))
            for name in ("position_m", "target_m", "up")
        )
        if np.linalg.norm(np.cross(up, target - position)) < 1e-9:
            raise ConfigError(
                f"camera {self.name!r} must look at a point other than its position, and not "
                "along up; got position_m "
                f"{list(self.position_m)}, target_m {list(self.target_m)}, up {list(self.up)}."
            )


@dataclass(frozen=True)
class Workspace:
    """Places of a scene's objects, in metres in the world; the defaults suit a Panda.

    Args:
        x_m, y_m: Ranges of the cubes' centres.
        bin_m: Centre of the bin.
        grasp_yaw_deg: Yaw of the tool site's x axis from which the scripted expert turns least.
        carry_m: Height at which the expert carries a cube.
    """

    x_m: tuple[float, float] = (0.35, 0.65)
    y_m: tuple[float, float] = (-0.20, 0.20)
    bin_m: tuple[float, float] = (0.42, 0.41)
    grasp_yaw_deg: float = 45.0
    carry_m: float = 0.20

    def __post_init__(self) -> None:
        typed_fields(self)
        for name in ("x_m", "y_m", "bin_m"):
            within(getattr(self, name), f"a workspace's {name}", -_REACH_M, _REACH_M)
        within(self.grasp_yaw_deg, "a workspace's grasp_yaw_deg", -360.0, 360.0)
        within(self.carry_m, "a workspace's carry_m", 0.0, _REACH_M)
        if self.x_m[0] >= self.x_m[1] or self.y_m[0] >= self.y_m[1]:
            raise ConfigError(
                f"a workspace's ranges must grow, got x_m {self.x_m} and y_m {self.y_m}."
            )


@dataclass(frozen=True)
class RobotSpec:
    """A robot.

    Args:
        name: Its name, e.g. ``"ur5e"``.
        title: What it is, in a few words.
        model: The parts of its model, one for most robots.
        limbs: Its limbs, with different names.
        cameras: Cameras on it.
        source: Where its kinematics and masses come from.
        embodiment: Embodiment whose rows move it if none is named. None: Cosmos 3 has no domain for
            it, and a model borrows one.
        workspace: Where a scene puts cubes and the bin.
        aliases: Other names of it, under which a packaged robot is found.
        impratio: MuJoCo's ratio of friction's impedance to the normal's, of all contacts in its
            scene. What its model's file states of a simulation is not taken over.

    Attributes:
        file: The file that it was read from, or None; not part of what it is.

    Raises:
        InputError, ConfigError, UnknownNameError: A value has another type, is missing, or
            contradicts another.
    """

    name: str
    title: str
    model: tuple[ModelPart, ...]
    limbs: tuple[Limb, ...]
    cameras: tuple[Camera, ...] = ()
    source: str = ""
    embodiment: str | None = None
    workspace: Workspace = Workspace()
    aliases: tuple[str, ...] = ()
    impratio: float = IMPRATIO
    file: str | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        typed_fields(self)
        _text(self.name, "a robot's name")
        if self.name.startswith(".") or set("/\\") & set(self.name):
            raise InputError(
                "a robot's name must not be a path, contain a slash or begin with a "
                f"dot, got {self.name!r}."
            )
        if not (self.name + self.title).isprintable():
            raise InputError(
                "a robot's name and title are one line of text each, got "
                f"{self.name!r} and {self.title!r}."
            )
        within(self.impratio, "impratio", 1e-2, 1e4)
        if self.embodiment is not None:
            get_embodiment(self.embodiment)
        if not self.model or not self.limbs:
            raise ConfigError(f"robot {self.name!r} needs at least one model and one limb.")
        if (mount := self.model[0].mount) is not None:
            raise ConfigError(
                f"the first part of {self.name!r} is mounted on {mount!r}, but no part precedes "
                "it; leave it out."
            )
        _names(tuple(limb.name for limb in self.limbs), f"the limbs of {self.name!r}")
        _names(
            tuple(part.prefix for part in self.model),
            f"the prefixes of {self.name!r}'s models",
            empty=True,
        )
        if self.cameras:
            _names(tuple(camera.name for camera in self.cameras), f"the cameras of {self.name!r}")
        for joint in self.shared_joints:
            limbs = [limb for limb in self.limbs if joint in limb.joints]
            first, *further = (limb.of_joint(limb.joints.index(joint)) for limb in limbs)
            if any(figures != first for figures in further):
                raise ConfigError(
                    f"limbs of {self.name!r} share the joints {', '.join(self.shared_joints)}, "
                    f"but state different things of {joint!r}; its actuator, home, limits and "
                    "gains must be the same in each, and so the joints before it."
                )

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Name the robot's file, if it has one, in errors about it that are raised in the block."""
        try:
            yield
        except (ConfigError, InputError, ResourceNotFoundError) as error:
            if self.file is not None and self.file not in str(error):
                error.args = (f"{self.file}: {error}",)
            raise

    def limb(self, name: str | None = None) -> Limb:
        """Return a limb by name; None is the only one. UnknownNameError, or ConfigError if there
        are several.
        """
        if name is None:
            first, *further = self.limbs
            if further:
                names = ", ".join(limb.name for limb in self.limbs)
                raise ConfigError(f"robot {self.name!r} has the limbs {names}; name one.")
            return first
        limbs = {limb.name: limb for limb in self.limbs}
        return limbs[known_name(name, f"limb of robot {self.name!r}", limbs)]

    @property
    def joints(self) -> tuple[str, ...]:
        """The joints of all limbs, limb by limb; one that limbs share stands with the first of
        them.
        """
        return tuple(dict.fromkeys(joint for limb in self.limbs for joint in limb.joints))

    @property
    def shared_joints(self) -> tuple[str, ...]:
        """The joints, such as a waist, that belong to several limbs."""
        return tuple(_repeated([joint for limb in self.limbs for joint in limb.joints]))

    def require_independent(self, user: str) -> None:
        """Raise ConfigError if limbs share joints, which ``user`` cannot have."""
        if self.shared_joints:
            raise ConfigError(
                f"{user} needs independent limbs, but those of {self.name!r} share "
                f"{', '.join(self.shared_joints)}. Plan with "
                "control.limb_ik.LimbIK, or fix the shared joint in the model."
            )

    @property
    def home_rad(self) -> F64:
        """[n] home angles of :attr:`joints`."""
        home: dict[str, float] = {}
        for limb in self.limbs:
            home |= zip(limb.joints, limb.home, strict=True)
        return np.array([home[joint] for joint in self.joints])


def rotation_weight_m(
    stated: float | None, joints: int, default: float = ROTATION_WEIGHT_M
) -> float:
    """Return a weight of rotation that may be stated, or the default for a number of joints."""
    if stated is not None:
        return stated
    return POSITION_FIRST_M if joints < 6 else default


def join_limbs(robot: RobotSpec, embodiment: Embodiment) -> tuple[tuple[Limb, LimbColumns], ...]:
    """Join a robot's limbs with an embodiment's columns by name, in the robot's order.

    A limb of the embodiment that carries only a camera may have no counterpart; every other must,
    on both sides.

    Raises:
        ConfigError: A limb is missing on either side, or only one of the two has a gripper.
    """
    columns = {limb.name: limb for limb in embodiment.limbs}
    limbs = {limb.name for limb in robot.limbs}
    moved = {name for name, limb in columns.items() if not limb.is_camera}
    if not columns or moved - limbs or limbs - set(columns):
        raise ConfigError(
            f"robot {robot.name!r} has the limbs {', '.join(sorted(limbs))}, but embodiment "
            f"{embodiment.name!r} moves "
            f"{', '.join(columns) or 'none that its source states'}; choose an embodiment with "
            "the robot's limbs, by name."
        )
    for limb in robot.limbs:
        if limb.gripper is None and columns[limb.name].gripper is not None:
            raise ConfigError(
                f"{embodiment.name!r} moves a gripper of {limb.name!r}, and robot {robot.name!r} "
                "has none there."
            )
    return tuple((limb, columns[limb.name]) for limb in robot.limbs)


def join_arms(robot: RobotSpec, embodiment: Embodiment) -> tuple[tuple[Limb, LimbColumns], ...]:
    """As :func:`join_limbs`, but a single limb is joined with a single one whatever they are
    called.
    """
    moved = [columns for columns in embodiment.limbs if not columns.is_camera]
    if len(moved) == len(robot.limbs) == 1:
        return ((robot.limbs[0], moved[0]),)
    return join_limbs(robot, embodiment)


def _text(value: object, name: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name} must be a string that is not empty, got {value!r}.")


def _names(values: tuple[str, ...], name: str, empty: bool = False) -> None:
    if not values or _repeated(list(values)) or not (empty or all(values)):
        raise ConfigError(f"{name} must be one or more different names, got {list(values)}.")


def _repeated(values: list[str]) -> list[str]:
    return sorted({value for value in values if values.count(value) > 1})
