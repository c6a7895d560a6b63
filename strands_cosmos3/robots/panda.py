"""The Franka Panda: frames, kinematics and limits. numpy only.

Figures are those of the robots ``panda`` and ``fr3`` in :mod:`strands_cosmos3.robots.catalogue`,
whose files name their sources.

Frames, from the wrist outwards: ``flange`` (also ``panda_link8``) lies .107 m along link7's z.
``hand`` shares its origin, yawed by -45 degrees; ``tcp`` lies .1034 m along the hand's z, between
the finger tips. Cosmos' DROID frame is ``hand`` yawed by +135 degrees
(:mod:`strands_cosmos3.embodiments`).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.errors import ShapeError
from strands_cosmos3.robots.catalogue import PANDA, get_robot
from strands_cosmos3.robots.joints import HandLimits, JointLimits, SerialChain
from strands_cosmos3.robots.spec import Limb


def _frozen(values: Any) -> F64:
    array = np.array(values, dtype=np.float64)
    array.setflags(write=False)
    return array


_ARM = PANDA.limb()
ARM_JOINTS = _ARM.joints
FINGER_JOINTS = () if _ARM.gripper is None else _ARM.gripper.joints
HOME_Q = _frozen(_ARM.home)  # DROID's

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
"""[7, 3] modified (Craig) Denavit-Hartenberg rows of Franka's FCI documentation: a [m], d [m],
alpha [rad].
"""


def _screw_z(angle_rad: float, z_m: float) -> F64:
    c = np.cos(angle_rad)
    s = np.sin(angle_rad)
    return _frozen([[c, -s, 0, 0], [s, c, 0, 0], [0, 0, 1, z_m], [0, 0, 0, 1]])


T_link7_flange = _screw_z(0.0, 0.107)
T_flange_hand = _screw_z(-np.pi / 4, 0.0)
T_hand_tcp = _screw_z(0.0, _ARM.tool_m[2])
T_hand_flange = _screw_z(np.pi / 4, 0.0)


def _franka_chain() -> SerialChain:
    T = np.tile(np.eye(4), (len(DH), 1, 1))
    for T_parent_joint, (a_m, d_m, alpha_rad) in zip(T, DH, strict=True):
        c = np.cos(alpha_rad)
        s = np.sin(alpha_rad)
        T_parent_joint[:3] = [[1, 0, 0, a_m], [0, c, -s, -d_m * s], [0, s, c, d_m * c]]
    return SerialChain(T, T_link7_flange[:3, 3], np.zeros(len(DH), dtype=bool))


FRANKA_CHAIN = _franka_chain()
"""The chain to the flange; the hand's origin is the same point."""


def _published_limits(limb: Limb) -> JointLimits:
    hand = limb.limits.hand
    assert hand is not None
    limits: Any = limb.limits.values
    hands = (HandLimits(FRANKA_CHAIN, hand.velocity, hand.acceleration),)
    return JointLimits(**limits, hands=hands)


FER = _published_limits(_ARM)
"""The Panda (Franka Emika Robot), whose model is bundled."""
FR3 = _published_limits(get_robot("fr3").limb())
"""The Franka Research 3: the same kinematics with other limits. Near a joint's end its speed is
limited further, not here.
"""
LIMITS = MappingProxyType({"fer": FER, "fr3": FR3})
"""Tables of limits by the names that callers give them."""


def dh_forward(q_rad: Any) -> F64:
    """Compute ``T_base_hand`` [..., 4, 4] from angles [..., 7] by the Denavit-Hartenberg product,
    without a model file.

    Each joint contributes ``Rx(alpha) Tx(a) Rz(q) Tz(d)`` (Craig, Introduction to Robotics,
    modified convention). ShapeError: The last axis is not 7.
    """
    q = np.asarray(q_rad, dtype=np.float64)
    if q.shape[-1:] != (7,):
        raise ShapeError(f"q_rad must have shape [..., 7], got {list(q.shape)}.")
    return FRANKA_CHAIN.frames(q) @ T_link7_flange @ T_flange_hand
