"""The Franka Panda: kinematics, limits, frames. numpy only.

Sources: Franka's FCI documentation and the rate limits of libfranka 0.9.2; the FR3's from its own
page there, and its hand's acceleration from libfranka 0.15.0 (``kMaxTranslationalAcceleration`` in
``include/franka/rate_limiting.h``).

Frames, from the wrist outwards: ``flange`` (also ``panda_link8``) lies .107 m along link7's z.
``hand`` shares its origin, yawed by -45 degrees; ``tcp`` lies .1034 m along the hand's z, between
the finger tips. Cosmos' DROID frame is ``hand`` yawed by +135 degrees
(:mod:`strands_cosmos3.embodiments`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import (
    F64,
    finite_array,
    instance_of,
    mask_array,
    positive,
    require_type,
)
from strands_cosmos3.errors import InputError, ShapeError
from strands_cosmos3.robots.chain import SerialChain


def _frozen(values: Any) -> F64:
    array = np.array(values, dtype=np.float64)
    array.setflags(write=False)
    return array


ARM_JOINTS = tuple(f"joint{i}" for i in range(1, 8))
FINGER_JOINTS = ("finger_joint1", "finger_joint2")
ARM_ACTUATORS = tuple(f"actuator{i}" for i in range(1, 8))
GRIPPER_ACTUATOR = "actuator8"
ACTUATORS = (*ARM_ACTUATORS, GRIPPER_ACTUATOR)
HAND_BODY = "hand"
TCP_SITE = "tcp"

DH = _frozen(
    [
        (0.0, 0.333, 0.0),
        (0.0, 0.0, -np.pi / 2),
        (0.0, 0.316, np.pi / 2),
        (0.0825, 0.0, np.pi / 2),
        (-0.0825, 0.384, -np.pi / 2),
        (0.0, 0.0, np.pi / 2),
        (0.088, 0.0, np.pi / 2),
    ]
)
"""[7, 3] modified (Craig) Denavit-Hartenberg rows: a [m], d [m], alpha [rad]."""

HOME_Q = _frozen([0.0, -np.pi / 5, 0.0, -4 * np.pi / 5, 0.0, 3 * np.pi / 5, 0.0])  # DROID's
FINGER_TRAVEL_M = 0.04  # of each finger; the gap between them is twice that


def _screw_z(angle_rad: float, z_m: float) -> F64:
    c, s = np.cos(angle_rad), np.sin(angle_rad)
    return _frozen([[c, -s, 0, 0], [s, c, 0, 0], [0, 0, 1, z_m], [0, 0, 0, 1]])


T_link7_flange = _screw_z(0.0, 0.107)
T_flange_hand = _screw_z(-np.pi / 4, 0.0)
T_hand_tcp = _screw_z(0.0, 0.1034)
T_hand_flange = _screw_z(np.pi / 4, 0.0)


@dataclass(frozen=True)
class CartesianLimits:
    """Limits of the Panda's flange: translation in m/s, m/s^2, m/s^3, rotation in rad/s,
    rad/s^2, rad/s^3.
    """

    velocity: float = 1.7
    acceleration: float = 13.0
    jerk: float = 6500.0
    angular_velocity: float = 2.5
    angular_acceleration: float = 25.0
    angular_jerk: float = 12500.0


CARTESIAN_LIMITS = CartesianLimits()


@dataclass(frozen=True, eq=False)
class HandLimits:
    """Speed [m/s] and acceleration [m/s^2] that one point of the arm may reach, and the chain of
    joints that moves it.

    ``joints`` are the indices of the chain's joints among those of the limits, e.g. of the second
    of two arms; None is all.
    """

    chain: SerialChain
    velocity: float = CARTESIAN_LIMITS.velocity
    acceleration: float = CARTESIAN_LIMITS.acceleration
    joints: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        n = len(instance_of(self.chain, SerialChain, "the hand's chain").slides)
        for name in ("velocity", "acceleration"):
            positive(getattr(self, name), f"the hand's {name}")
        if self.joints is not None:
            require_type(self.joints, tuple[int, ...], "the hand's joints")
            if len(set(self.joints)) != n or min(self.joints) < 0:
                raise InputError(
                    f"the hand's joints must be {n} different indices, one for each of its chain, "
                    f"got {self.joints}."
                )

    def own(self, values: F64) -> F64:
        """Return the columns of the chain's joints from values [..., n] of all the limits'
        joints; ShapeError if n is less.
        """
        shape = instance_of(values, np.ndarray, "values").shape
        if self.joints is None:
            return values
        if not shape or shape[-1] <= max(self.joints):
            raise ShapeError(
                f"values must be of more than {max(self.joints)} joints, got {list(shape)}."
            )
        return values[..., list(self.joints)]


def _franka_chain() -> SerialChain:
    """The chain to the flange; the hand's origin is the same point."""
    T = np.tile(np.eye(4), (len(DH), 1, 1))
    for T_parent_joint, (a_m, d_m, alpha_rad) in zip(T, DH, strict=True):
        c, s = np.cos(alpha_rad), np.sin(alpha_rad)
        T_parent_joint[:3] = [[1, 0, 0, a_m], [0, c, -s, -d_m * s], [0, s, c, d_m * c]]
    return SerialChain(T, T_link7_flange[:3, 3], np.zeros(len(DH), dtype=bool))


HAND_LIMITS = HandLimits(_franka_chain())
FR3_HAND_LIMITS = replace(HAND_LIMITS, acceleration=9.0)


_BY_JOINT = ("q_min", "q_max", "velocity", "acceleration", "jerk", "torque")


@dataclass(frozen=True, eq=False)
class JointLimits:
    """Limits of an arm's joints: angles in rad, velocity in rad/s, acceleration in rad/s^2, jerk in
    rad/s^3, torque in N m.

    Every array is [n] and read-only. ``hand`` limits a point of the arm as well, if it is given,
    and ``other_hands`` those of further arms. ``assumed`` says that nobody states some of the
    rates, and the default was taken.

    Raises:
        ShapeError, NonFiniteError: An array is not n finite numbers, n being the first one's
            length.
        InputError: A lower limit is not below its upper one, another is not above zero, or the
            hand's chain has other joints.
    """

    q_min: F64
    q_max: F64
    velocity: F64
    acceleration: F64
    jerk: F64
    torque: F64
    hand: HandLimits | None = None
    other_hands: tuple[HandLimits, ...] = ()
    assumed: bool = False

    def __post_init__(self) -> None:
        for name in _BY_JOINT:
            joints = None if name == "q_min" else len(self.q_min)
            object.__setattr__(self, name, finite_array(getattr(self, name), name, (joints,)))
        if not (self.q_min < self.q_max).all():
            raise InputError(
                f"q_min {self.q_min} must lie below q_max {self.q_max} in every joint."
            )
        for name in ("velocity", "acceleration", "jerk", "torque"):
            if not (getattr(self, name) > 0).all():
                raise InputError(f"{name} limits must be above zero, got {getattr(self, name)}.")
        require_type(self.other_hands, tuple[HandLimits, ...], "other_hands")
        for hand in self.hands:
            chained = len(instance_of(hand, HandLimits, "hand").chain.slides)
            fits = (
                chained == len(self.q_min)
                if hand.joints is None
                else max(hand.joints) < len(self.q_min)
            )
            if not fits:
                raise InputError(
                    f"the hand's chain has {chained} joints, but the limits {len(self.q_min)}."
                )

    @property
    def hands(self) -> tuple[HandLimits, ...]:
        """Every limited point."""
        return self.other_hands if self.hand is None else (self.hand, *self.other_hands)

    def outside(self, q_rad: F64, tolerance_rad: float = 0.0) -> str | None:
        """Say which joint of a configuration [n] lies outside its range by more than a
        tolerance; None if all are inside.
        """
        q_rad = finite_array(q_rad, "q_rad", self.q_min.shape)
        tolerance_rad = float(finite_array(tolerance_rad, "tolerance_rad", ()))
        beyond = np.maximum(self.q_min - q_rad, q_rad - self.q_max)
        joint = int(np.argmax(beyond))
        if beyond[joint] <= tolerance_rad:
            return None
        where = f"[{self.q_min[joint]:.4f}, {self.q_max[joint]:.4f}]"
        return f"joint {joint + 1} of {len(q_rad)} is at {q_rad[joint]:.4f} rad, outside its range {where}"

    def only(self, joints: NDArray[np.bool_]) -> JointLimits:
        """Return the limits of some of the joints, without the hand's."""
        joints = mask_array(joints, "joints", len(self.q_min))
        return JointLimits(*(getattr(self, name)[joints] for name in _BY_JOINT))

    def derated(self, factor: float) -> JointLimits:
        """Return these limits with velocity, acceleration and jerk times ``factor``, the hand's as
        well.

        An :class:`InputError` says that the factor lies outside (0, 1].
        """
        if not positive(factor, "a derating factor") <= 1.0:
            raise InputError(f"a derating factor must lie in (0, 1], got {factor!r}.")
        slower = [
            replace(hand, velocity=hand.velocity * factor, acceleration=hand.acceleration * factor)
            for hand in self.hands
        ]
        hand = slower.pop(0) if self.hand is not None else None
        hands = {"hand": hand, "other_hands": tuple(slower)}
        return replace(
            self,
            **hands,
            **{name: getattr(self, name) * factor for name in ("velocity", "acceleration", "jerk")},
        )


FER = JointLimits(
    q_min=_frozen([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973]),
    q_max=_frozen([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973]),
    velocity=_frozen([2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61]),
    acceleration=_frozen([15.0, 7.5, 10.0, 12.5, 15.0, 20.0, 20.0]),
    jerk=_frozen([7500.0, 3750.0, 5000.0, 6250.0, 7500.0, 10000.0, 10000.0]),
    torque=_frozen([87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0]),
    hand=HAND_LIMITS,
)
"""The Panda (Franka Emika Robot), whose model is bundled."""

FR3 = JointLimits(
    q_min=_frozen([-2.7437, -1.7837, -2.9007, -3.0421, -2.8065, 0.5445, -3.0159]),
    q_max=_frozen([2.7437, 1.7837, 2.9007, -0.1518, 2.8065, 4.5169, 3.0159]),
    velocity=_frozen([2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26]),
    acceleration=_frozen([10.0] * 7),
    jerk=_frozen([5000.0] * 7),
    torque=_frozen([87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0]),
    hand=FR3_HAND_LIMITS,
)
"""The Franka Research 3: the same kinematics with other limits. Near a joint's end its speed is
limited further, not here.
"""

LIMITS = MappingProxyType({"fer": FER, "fr3": FR3})


def dh_forward(q_rad: Any) -> F64:
    """Compute ``T_base_hand`` [..., 4, 4] from angles [..., 7] by the Denavit-Hartenberg product,
    without a model file.

    Each joint contributes ``Rx(alpha) Tx(a) Rz(q) Tz(d)`` (Craig, Introduction to Robotics,
    modified convention).

    Raises:
        InputError, ShapeError: They are not numbers; the last axis is not 7.
    """
    try:
        q = np.asarray(q_rad, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"q_rad must be an array of real numbers, got {type(q_rad).__name__} ({error})."
        ) from None
    if q.ndim == 0 or q.shape[-1] != 7:
        raise ShapeError(f"q_rad must have shape [..., 7], got {list(q.shape)}.")
    T = np.broadcast_to(np.eye(4), (*q.shape[:-1], 4, 4))
    for joint, (a_m, d_m, alpha_rad) in enumerate(DH):
        c, s = np.cos(q[..., joint]), np.sin(q[..., joint])
        ca, sa = np.cos(alpha_rad), np.sin(alpha_rad)
        step = np.zeros((*q.shape[:-1], 4, 4))
        step[..., 0, 0], step[..., 0, 1], step[..., 0, 3] = c, -s, a_m
        step[..., 1, 0], step[..., 1, 1], step[..., 1, 2], step[..., 1, 3] = (
            s * ca,
            c * ca,
            -sa,
            -d_m * sa,
        )
        step[..., 2, 0], step[..., 2, 1], step[..., 2, 2], step[..., 2, 3] = (
            s * sa,
            c * sa,
            ca,
            d_m * ca,
        )
        step[..., 3, 3] = 1.0
        T = T @ step
    return T @ T_link7_flange @ T_flange_hand
