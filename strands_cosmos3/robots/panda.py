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

from strands_cosmos3.checks import (
    F64,
)
from strands_cosmos3.errors import InputError, ShapeError
from strands_cosmos3.robots.joints import HandLimits, JointLimits, SerialChain


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


def _franka_chain() -> SerialChain:
    """The chain to the flange; the hand's origin is the same point."""
    T = np.tile(np.eye(4), (len(DH), 1, 1))
    for T_parent_joint, (a_m, d_m, alpha_rad) in zip(T, DH, strict=True):
        c, s = np.cos(alpha_rad), np.sin(alpha_rad)
        T_parent_joint[:3] = [[1, 0, 0, a_m], [0, c, -s, -d_m * s], [0, s, c, d_m * c]]
    return SerialChain(T, T_link7_flange[:3, 3], np.zeros(len(DH), dtype=bool))


HAND_LIMITS = HandLimits(_franka_chain())
FR3_HAND_LIMITS = replace(HAND_LIMITS, acceleration=9.0)


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
