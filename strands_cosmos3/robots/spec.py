"""A robot as data: its model, joints, limits with their sources, servos, home, cameras and limbs. numpy only.

A robot's limbs are joined to an embodiment's columns by name, never by position: DROID and UR arms are called ``"arm"``, and of
two arms one is ``"left"`` and the other ``"right"``, whichever comes first in a model or in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from strands_cosmos3.action_columns import GripperConvention, LimbColumns
from strands_cosmos3.checks import F64, finite_array, positive, typed, typed_fields
from strands_cosmos3.embodiments import Embodiment, get_embodiment
from strands_cosmos3.errors import ConfigError, InputError, UnknownNameError

RATES = ("velocity", "acceleration", "jerk", "torque")
"""Limits that no MJCF states; a missing one takes the default ``ASSUMED`` of :mod:`strands_cosmos3.robots.limits`."""
FRAME_TYPES = ("body", "site")


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
    """Speed [m/s] and acceleration [m/s^2] that the origin of a limb's frame may reach, and where they come from."""

    velocity: float
    acceleration: float
    source: str

    def __post_init__(self) -> None:
        _text(self.source, "the source of the hand's rates")
        positive(self.velocity, "the hand's velocity")
        positive(self.acceleration, "the hand's acceleration")


@dataclass(frozen=True)
class LimbLimits:
    """Limits of a limb's joints, base first. None is the model's own range, or a rate that has to be assumed.

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
        for name in RATES:
            figures: Figures | None = getattr(self, name)
            if figures is not None and min(figures.values) <= 0:
                raise ConfigError(f"{name} limits must be above zero, got {list(figures.values)}.")


@dataclass(frozen=True)
class GripperSpec:
    """A gripper with one opening.

    Args:
        joints: Its joints in the model.
        actuator: Its actuator in the model.
        opening: A joint's position when it is open and closed.
        command: The actuator's control when it is open and closed.
        grip_gain: Factor on the actuator's stiffness in a scene, where its own is too weak to hold a cube.
    """

    joints: tuple[str, ...]
    actuator: str
    opening: GripperConvention
    command: GripperConvention
    grip_gain: float = 1.0

    def __post_init__(self) -> None:
        typed_fields(self)
        _names(self.joints, "the gripper's joints")
        _text(self.actuator, "the gripper's actuator")
        positive(self.grip_gain, "grip_gain")


@dataclass(frozen=True)
class Limb:
    """A chain of joints that moves one frame, and the gripper on it. Names are those of the assembled model.

    Args:
        name: ``"arm"``, ``"left"``, ``"right"`` or ``"head"``; embodiments call their limbs so.
        joints: Its joints, base first.
        actuators: The actuator of each joint.
        frame, frame_type: The frame that inverse kinematics drives: a ``"body"`` or a ``"site"``.
        tool, tool_m: Site between the finger tips, and its position in the frame; a scene adds a site that the model lacks.
        base: Body at the limb's base, in whose frame its poses are.
        home: Angles [rad] at which an episode begins.
        limits: Limits of its joints.
        gripper: None if it has none.
        frames: Names that embodiments use for its frames, with the model's names, e.g. ``{"hand": "left_hand"}``.
        gains: Stiffness and damping of its position servos, kp [N m/rad] and kd [N m s/rad], to be set in the model; None
            keeps the model's.
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
    gripper: GripperSpec | None = None
    frames: Mapping[str, str] = field(default_factory=dict)
    gains: tuple[Figures, Figures] | None = None

    def __post_init__(self) -> None:
        typed_fields(self)
        for name in ("name", "frame", "base"):
            _text(getattr(self, name), f"a limb's {name}")
        if self.frame_type not in FRAME_TYPES:
            raise UnknownNameError(f"frame type of limb {self.name!r}", self.frame_type, FRAME_TYPES)
        _names(self.joints, f"the joints of limb {self.name!r}")
        home = finite_array(self.home, f"the home of limb {self.name!r}", (None,))
        lengths = {"actuators": len(self.actuators), "home": len(home)}
        lengths |= {key: len(one.values) for key, one in vars(self.limits).items() if isinstance(one, Figures)}
        lengths |= {f"gains {k}": len(one.values) for k, one in zip(("kp", "kd"), self.gains or (), strict=False)}
        if wrong := {key: n for key, n in lengths.items() if n != len(self.joints)}:
            said = ", ".join(f"{key} has {n}" for key, n in wrong.items())
            raise ConfigError(f"limb {self.name!r} has {len(self.joints)} joints, but its {said}; give one for each joint.")
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
        T[:3, 3] = self.tool_m
        return T

    def frame_called(self, name: str) -> str:
        """Return the model's name of a frame that an embodiment calls ``name``; InputError unless that is a string."""
        _text(name, "the name of a frame")
        return self.frames.get(name, name)


@dataclass(frozen=True)
class ModelPart:
    """A model file, once, at a pose in the world.

    Args:
        file: An ``.xml`` file: a path, or the name of a packaged one (``"panda.xml"``).
        prefix: Put before every name of the file, so that the same file can be attached several times.
        position_m: Origin of the part.
        yaw_deg: Turn about the world's z axis.
    """

    file: str
    prefix: str = ""
    position_m: tuple[float, float, float] = (0.0, 0.0, 0.0)
    yaw_deg: float = 0.0

    def __post_init__(self) -> None:
        typed_fields(self)
        _text(self.file, "a model's file")
        finite_array((*self.position_m, self.yaw_deg), "a part's pose", (4,))


@dataclass(frozen=True)
class RobotCamera:
    """A camera that is fixed to a body of the robot; positions and directions are in the body's frame."""

    name: str
    body: str
    position_m: tuple[float, float, float]
    target_m: tuple[float, float, float]
    fovy_deg: float
    up: tuple[float, float, float] = (0.0, 0.0, 1.0)

    def __post_init__(self) -> None:
        typed_fields(self)
        positive(self.fovy_deg, "fovy_deg")


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
        embodiment: Embodiment whose rows move it if none is named; None is the policy's default, ``droid``.

    Raises:
        InputError, ConfigError, UnknownNameError: A value has another type, is missing, or contradicts another.
    """

    name: str
    title: str
    model: tuple[ModelPart, ...]
    limbs: tuple[Limb, ...]
    cameras: tuple[RobotCamera, ...] = ()
    source: str = ""
    embodiment: str | None = None

    def __post_init__(self) -> None:
        typed_fields(self)
        _text(self.name, "a robot's name")
        if self.embodiment is not None:
            get_embodiment(self.embodiment)
        if not self.model or not self.limbs:
            raise ConfigError(f"robot {self.name!r} needs at least one model and one limb.")
        _names(tuple(limb.name for limb in self.limbs), f"the limbs of {self.name!r}")
        _names(tuple(part.prefix for part in self.model), f"the prefixes of {self.name!r}'s models", empty=True)
        if shared := _shared([joint for limb in self.limbs for joint in limb.joints]):
            raise ConfigError(
                f"limbs of {self.name!r} share the joints {', '.join(shared)}; limbs must be independent chains. Give a shared "
                "joint, such as a waist, to none of them: it then stays where it is."
            )

    def limb(self, name: str | None = None) -> Limb:
        """Return a limb by name; None is the only one. UnknownNameError, or ConfigError if there are several."""
        if name is None:
            first, *others = self.limbs
            if others:
                names = ", ".join(limb.name for limb in self.limbs)
                raise ConfigError(f"robot {self.name!r} has the limbs {names}; name one.")
            return first
        found = {limb.name: limb for limb in self.limbs}
        if not isinstance(name, str) or name not in found:
            raise UnknownNameError(f"limb of robot {self.name!r}", name, found)
        return found[name]

    @property
    def joints(self) -> tuple[str, ...]:
        """The joints of all limbs, limb by limb."""
        return tuple(joint for limb in self.limbs for joint in limb.joints)

    @property
    def home_rad(self) -> F64:
        """[n] home angles of :attr:`joints`."""
        return np.concatenate([limb.home_rad for limb in self.limbs])


@typed()
def join_limbs(robot: RobotSpec, embodiment: Embodiment) -> tuple[tuple[Limb, LimbColumns], ...]:
    """Join a robot's limbs with an embodiment's columns by name, in the robot's order.

    A limb of the embodiment that carries only a camera may have no counterpart; every other must, on both sides.

    Raises:
        ConfigError: A limb is missing on either side, or only one of the two has a gripper.
    """
    columns = {limb.name: limb for limb in embodiment.limbs}
    have, needed = {limb.name for limb in robot.limbs}, {name for name, limb in columns.items() if not limb.is_camera}
    if not columns or needed - have or have - set(columns):
        raise ConfigError(
            f"robot {robot.name!r} has the limbs {', '.join(sorted(have))}, but embodiment {embodiment.name!r} moves "
            f"{', '.join(columns) or 'none that its source states'}; choose an embodiment with the robot's limbs, by name."
        )
    for limb in robot.limbs:
        if limb.gripper is None and columns[limb.name].gripper is not None:
            raise ConfigError(f"{embodiment.name!r} moves a gripper of {limb.name!r}, and robot {robot.name!r} has none there.")
    return tuple((limb, columns[limb.name]) for limb in robot.limbs)


def _text(value: object, name: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name} must be a string that is not empty, got {value!r}.")


def _names(values: tuple[str, ...], name: str, empty: bool = False) -> None:
    if not values or _shared(list(values)) or not (empty or all(values)):
        raise ConfigError(f"{name} must be one or more different names, got {list(values)}.")


def _shared(values: list[str]) -> list[str]:
    return sorted({value for value in values if values.count(value) > 1})


__all__ = [
    "FRAME_TYPES",
    "RATES",
    "Figures",
    "GripperSpec",
    "HandRates",
    "Limb",
    "LimbLimits",
    "ModelPart",
    "RobotCamera",
    "RobotSpec",
    "join_limbs",
]
