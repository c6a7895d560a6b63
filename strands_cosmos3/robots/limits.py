"""Limits of an arm's joints in a MuJoCo model: ranges from the model, rates from the caller, a table, or the named default.

MJCF has no field for velocity, acceleration or jerk, and joints' names say nothing about them: ``joint1`` to ``joint7`` are a
Franka's, an xArm7's and an iiwa14's. An arm is taken for a Franka only if its joints' axes are where a Franka's are.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, instance_of
from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.robots.model import chain_to_body, joint_ids
from strands_cosmos3.robots.panda import FER, HAND_LIMITS, HOME_Q, LIMITS, JointLimits

ASSUMED_VELOCITY = 1.3, 0.1
"""Rates assumed where none are known, of a hinge [rad/s, rad/s^2] and of a slide [m/s, m/s^2]."""
ASSUMED_ACCELERATION = 3.14, 0.5
ASSUMED_JERK_RATIO = 500.0  # jerk over acceleration, as Franka publishes it for both of its arms
ASSUMED_TORQUE = 1e3
ASSUMED_RANGE_RAD = 2 * np.pi
_SAME_AXIS = 2e-3
_PROBES = HOME_Q + np.array([0.0, 0.3, -0.4])[:, None]


class LimitsAssumedWarning(UserWarning):
    """Rates of an arm's joints are not known, and the named default was taken."""


def limits_of(model: mujoco.MjModel, joints: Sequence[int], limits: JointLimits | str | None, body: int) -> JointLimits:
    """Return the limits of a chain of joints (ids, base first).

    Args:
        limits: Rates and, within the model's, ranges; or the name of a table (``"fer"``, ``"fr3"``). None is the Panda's
            table for an arm with a Franka's kinematics; for any other arm the ``ASSUMED_`` rates are taken, with one
            :class:`LimitsAssumedWarning`. On another arm, a table's limits of the hand apply to ``body``.
        body: Id of the body that the chain moves.

    Raises:
        InputError: An argument is malformed.
        UnknownNameError: There is no such table.
        ConfigError: The limits have another number of joints, or exclude all of a joint's range.
    """
    joints = joint_ids(model, joints)
    low, high, unlimited = _ranges(model, joints)
    named = isinstance(limits, str)
    if isinstance(limits, str):
        if limits not in LIMITS:
            raise UnknownNameError("limits", limits, LIMITS)
        limits, low_given, high_given = LIMITS[limits], low, high
    elif limits is None and is_franka(model, joints):
        limits, low_given, high_given = FER, low, high
    elif limits is None:
        return _assumed(model, joints, low, high, unlimited)
    else:
        low_given, high_given = instance_of(limits, JointLimits, "limits").q_min, limits.q_max
    if len(limits.velocity) != len(joints):
        raise ConfigError(f"limits has {len(limits.velocity)} joints, but the chain has {len(joints)}.")
    low, high = np.maximum(low, low_given), np.minimum(high, high_given)
    if (low >= high).any():
        names = ", ".join(model.joint(joints[int(j)]).name for j in np.flatnonzero(low >= high))
        raise ConfigError(f"the limits leave nothing of the range that the model gives {names}; are they another robot's?")
    if (hand := limits.hand) is not None and named and not is_franka(model, joints):
        hand = replace(hand, chain=chain_to_body(model, body, joints))
    return replace(limits, q_min=low, q_max=high, hand=hand)


def is_franka(model: mujoco.MjModel, joints: Sequence[int]) -> bool:
    """Whether joints (ids, base first) have a Franka's axes, relative to the world's origin, whatever they are called."""
    joints = joint_ids(model, joints)
    hinges = model.jnt_type[joints] == int(mujoco.mjtJoint.mjJNT_HINGE)
    if len(joints) != len(HOME_Q) or not hinges.all():
        return False
    data = mujoco.MjData(model)
    for q in _PROBES:
        data.qpos[model.jnt_qposadr[joints]] = q
        mujoco.mj_kinematics(model, data)
        T = np.eye(4)
        for joint, T_parent_joint, angle in zip(joints, HAND_LIMITS.chain.T_parent_joint, q, strict=True):
            T = T @ T_parent_joint
            aside = np.cross(data.xanchor[joint] - T[:3, 3], T[:3, 2])
            if max(np.abs(aside).max(), np.abs(data.xaxis[joint] - T[:3, 2]).max()) > _SAME_AXIS:
                return False
            c, s = np.cos(angle), np.sin(angle)
            T[:3, :2] = T[:3, :2] @ np.array([[c, -s], [s, c]])
    return True


def _ranges(model: mujoco.MjModel, ids: list[int]) -> tuple[F64, F64, list[str]]:
    """Least and greatest angles by the model, and the names of the joints that it does not limit."""
    limited = model.jnt_limited[ids].astype(bool)
    low, high = (np.where(limited, model.jnt_range[ids, end], sign * ASSUMED_RANGE_RAD) for end, sign in ((0, -1.0), (1, 1.0)))
    return low, high, [model.joint(j).name for j, has in zip(ids, limited, strict=True) if not has]


def _assumed(model: mujoco.MjModel, ids: list[int], low: F64, high: F64, unlimited: list[str]) -> JointLimits:
    slide = (model.jnt_type[ids] == int(mujoco.mjtJoint.mjJNT_SLIDE)).astype(int)
    velocity, acceleration = np.array(ASSUMED_VELOCITY)[slide], np.array(ASSUMED_ACCELERATION)[slide]
    names = ", ".join(model.joint(j).name for j in ids)
    boundless = f" The model gives {', '.join(unlimited)} no range: +-{ASSUMED_RANGE_RAD:.2f}." if unlimited else ""
    warnings.warn(
        f"no rates are known for the joints {names}; ASSUMED_VELOCITY {ASSUMED_VELOCITY[0]:g} rad/s and ASSUMED_ACCELERATION "
        f"{ASSUMED_ACCELERATION[0]:g} rad/s^2 (slides {ASSUMED_VELOCITY[1]:g} m/s, {ASSUMED_ACCELERATION[1]:g} m/s^2) are "
        f"taken.{boundless} Pass limits=JointLimits(...), or the name of a table: {', '.join(LIMITS)}.",
        LimitsAssumedWarning,
        stacklevel=4,
    )
    torque = np.full(len(ids), ASSUMED_TORQUE)
    return JointLimits(low, high, velocity, acceleration, acceleration * ASSUMED_JERK_RATIO, torque)
