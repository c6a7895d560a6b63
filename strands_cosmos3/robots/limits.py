"""Limits of an arm's joints in a MuJoCo model: ranges from the model, rates from the caller, a
table, or the named default.

MJCF has no field for velocity, acceleration or jerk, and joints' names say nothing about them:
``joint1`` to ``joint7`` are a Franka's, an xArm7's and an iiwa14's. An arm is taken for a Franka
only if its joints' axes are where a Franka's are.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, instance_of, typed
from strands_cosmos3.errors import ConfigError, InputError, UnknownNameError
from strands_cosmos3.robots.joints import HandLimits, JointLimits
from strands_cosmos3.robots.model import chain_to_body, joint_ids
from strands_cosmos3.robots.panda import FER, FRANKA_CHAIN, HOME_Q, LIMITS
from strands_cosmos3.robots.spec import RATES, Limb, RobotSpec

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


def limits_of(
    model: mujoco.MjModel, joints: Sequence[int], limits: JointLimits | str | None, body: int
) -> JointLimits:
    """Return the limits of a chain of joints (ids, base first).

    Args:
        limits: Rates and, within the model's, ranges; or the name of a table (``"fer"``,
            ``"fr3"``). None is the Panda's table for an arm with a Franka's kinematics; for any
            other arm the ``ASSUMED_`` rates are taken, with one :class:`LimitsAssumedWarning`. On
            another arm, a table's limits of the hand apply to ``body``.
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
        raise ConfigError(
            f"limits has {len(limits.velocity)} joints, but the chain has {len(joints)}."
        )
    low, high = np.maximum(low, low_given), np.minimum(high, high_given)
    if (low >= high).any():
        names = ", ".join(model.joint(joints[int(j)]).name for j in np.flatnonzero(low >= high))
        raise ConfigError(
            f"the limits leave nothing of the range that the model gives {names}; are they "
            "another robot's?"
        )
    if (hand := limits.hand) is not None and named and not is_franka(model, joints):
        hand = replace(hand, chain=chain_to_body(model, body, joints))
    return replace(limits, q_min=low, q_max=high, hand=hand)


@typed()
def robot_limits(model: mujoco.MjModel, robot: RobotSpec) -> dict[str, JointLimits]:
    """Return the limits of each of a robot's limbs, by name.

    Ranges are the model's, narrowed to the robot's. A rate that the robot does not state is assumed
    (``ASSUMED_``), with one :class:`LimitsAssumedWarning` that lists joints and figures; a torque
    limit is then the model's, if that has one.

    Raises:
        ConfigError, UnknownNameError: The limits exclude all of a joint's range, or the model lacks
            a joint or frame.
    """
    assumed: list[str] = []
    found = {limb.name: _limb_limits(model, limb, assumed) for limb in robot.limbs}
    if assumed:
        warnings.warn(
            f"robot {robot.name!r} does not state every limit, and these are assumed: "
            f"{'; '.join(assumed)}. State them in the "
            "robot's limits, with their source.",
            LimitsAssumedWarning,
            stacklevel=3,
        )
    return found


@typed()
def all_limits(model: mujoco.MjModel, robot: RobotSpec) -> JointLimits:
    """Return :func:`robot_limits` of all limbs as those of all their joints, limb by limb."""
    found = list(robot_limits(model, robot).values())
    return (
        found[0] if len(found) == 1 else joined_limits(found, [limb.joints for limb in robot.limbs])
    )


@typed()
def limits_of_arm(model: mujoco.MjModel, robot: RobotSpec) -> JointLimits | None:
    """Return the limits of a robot's only limb; None for a Franka's kinematics, whose table
    :func:`limits_of` knows.
    """
    limb = robot.limb()
    if is_franka(model, [_joint(model, name) for name in limb.joints]):
        return None
    return robot_limits(model, robot)[limb.name]


def _limb_limits(model: mujoco.MjModel, limb: Limb, assumed: list[str]) -> JointLimits:
    known, ids = len(assumed), [_joint(model, name) for name in limb.joints]
    low, high, unlimited = _ranges(model, ids)
    given = limb.limits
    if given.q_min is not None and given.q_max is not None:
        low, high = np.maximum(low, given.q_min.values), np.minimum(high, given.q_max.values)
    elif unlimited:
        assumed.append(f"{limb.name}: range +-{ASSUMED_RANGE_RAD:.2f} of {', '.join(unlimited)}")
    if (low >= high).any():
        raise ConfigError(
            f"the limits of limb {limb.name!r} leave nothing of a joint's range: {low} to {high}."
        )
    rates: dict[str, Any] = {}
    for name in RATES:
        figures = getattr(given, name)
        rates[name] = (
            _assumed_rate(model, ids, name, rates) if figures is None else np.array(figures.values)
        )
        if figures is None and (name != "torque" or (rates[name] == ASSUMED_TORQUE).any()):
            assumed.append(f"{limb.name}: {name} {rates[name].tolist()}")
    hand = None
    if given.hand is not None:
        body = (
            model.site_bodyid[model.site(limb.frame).id]
            if limb.frame_type == "site"
            else model.body(limb.frame).id
        )
        hand = HandLimits(
            chain_to_body(model, int(body), ids), given.hand.velocity, given.hand.acceleration
        )
    return JointLimits(low, high, **rates, hand=hand, assumed=len(assumed) > known)


def _joint(model: mujoco.MjModel, name: str) -> int:
    found = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_JOINT, name)
    if found < 0:
        raise UnknownNameError("joint", name, (model.joint(i).name for i in range(model.njnt)))
    return found


def _assumed_rate(
    model: mujoco.MjModel, ids: list[int], name: str, known: Mapping[str, F64]
) -> F64:
    slide = (model.jnt_type[ids] == int(mujoco.mjtJoint.mjJNT_SLIDE)).astype(int)
    if name == "torque":
        return np.array([joint_torque(model, joint) or ASSUMED_TORQUE for joint in ids])
    if name == "jerk":
        return known["acceleration"] * ASSUMED_JERK_RATIO
    return np.array(ASSUMED_VELOCITY if name == "velocity" else ASSUMED_ACCELERATION)[slide]


@typed()
def joint_torque(model: mujoco.MjModel, joint: int) -> float | None:
    """Return a joint's limit of torque or force: its own, or that of the actuator that drives it
    alone; None without one.
    """
    (joint,) = joint_ids(model, [joint])
    if model.jnt_actfrclimited[joint]:
        return float(model.jnt_actfrcrange[joint, 1])
    drives = (model.actuator_trntype == int(mujoco.mjtTrn.mjTRN_JOINT)) & (
        model.actuator_trnid[:, 0] == joint
    )
    limited = np.flatnonzero(drives & (model.actuator_forcelimited != 0))
    return float(model.actuator_forcerange[limited[0], 1]) if len(limited) else None


def joined_limits(
    limits: Sequence[JointLimits], joints: Sequence[Sequence[str]] | None = None
) -> JointLimits:
    """Return the limits of several limbs as those of all their joints, limb by limb; every limb's
    hand stays limited.

    ``joints`` are the names of each limb's joints, if limbs may share some: these then count once,
    with the first limb.
    """
    try:
        parts = [instance_of(one, JointLimits, "limits") for one in limits]
    except TypeError:
        raise InputError(
            f"limits must be a list of JointLimits, got {type(limits).__name__}."
        ) from None
    if not parts:
        raise InputError("limits must be those of at least one limb, got none.")
    hands: list[HandLimits] = []
    flat: list[object] = (
        [name for limb in joints for name in limb]
        if joints
        else list(range(sum(len(p.q_min) for p in parts)))
    )
    once = list(dict.fromkeys(flat))
    index = [once.index(name) for name in flat]
    kept = [flat.index(name) for name in once]
    first = 0
    for part in parts:
        n = len(part.q_min)
        for hand in part.hands:
            own = range(n) if hand.joints is None else hand.joints
            hands.append(replace(hand, joints=tuple(index[first + joint] for joint in own)))
        first += n
    names = ("q_min", "q_max", "velocity", "acceleration", "jerk", "torque")
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])[kept] for name in names
    }
    return JointLimits(
        **arrays, other_hands=tuple(hands), assumed=any(part.assumed for part in parts)
    )


def is_franka(model: mujoco.MjModel, joints: Sequence[int]) -> bool:
    """Whether joints (ids, base first) have a Franka's axes, relative to the world's origin,
    whatever they are called.
    """
    joints = joint_ids(model, joints)
    hinges = model.jnt_type[joints] == int(mujoco.mjtJoint.mjJNT_HINGE)
    if len(joints) != len(HOME_Q) or not hinges.all():
        return False
    data = mujoco.MjData(model)
    for q in _PROBES:
        data.qpos[model.jnt_qposadr[joints]] = q
        mujoco.mj_kinematics(model, data)
        T = np.eye(4)
        for joint, T_parent_joint, angle in zip(
            joints, FRANKA_CHAIN.T_parent_joint, q, strict=True
        ):
            T = T @ T_parent_joint
            aside = np.cross(data.xanchor[joint] - T[:3, 3], T[:3, 2])
            if max(np.abs(aside).max(), np.abs(data.xaxis[joint] - T[:3, 2]).max()) > _SAME_AXIS:
                return False
            c, s = np.cos(angle), np.sin(angle)
            T[:3, :2] = T[:3, :2] @ np.array([[c, -s], [s, c]])
    return True


def _ranges(model: mujoco.MjModel, ids: list[int]) -> tuple[F64, F64, list[str]]:
    """Least and greatest angles by the model, and the names of the joints that it does not
    limit.
    """
    limited = model.jnt_limited[ids].astype(bool)
    low, high = (
        np.where(limited, model.jnt_range[ids, end], sign * ASSUMED_RANGE_RAD)
        for end, sign in ((0, -1.0), (1, 1.0))
    )
    return low, high, [model.joint(j).name for j, has in zip(ids, limited, strict=True) if not has]


def _assumed(
    model: mujoco.MjModel, ids: list[int], low: F64, high: F64, unlimited: list[str]
) -> JointLimits:
    slide = (model.jnt_type[ids] == int(mujoco.mjtJoint.mjJNT_SLIDE)).astype(int)
    velocity, acceleration = (
        np.array(ASSUMED_VELOCITY)[slide],
        np.array(ASSUMED_ACCELERATION)[slide],
    )
    names = ", ".join(model.joint(j).name for j in ids)
    boundless = (
        f" The model gives {', '.join(unlimited)} no range: +-{ASSUMED_RANGE_RAD:.2f}."
        if unlimited
        else ""
    )
    warnings.warn(
        f"no rates are known for the joints {names}; ASSUMED_VELOCITY {ASSUMED_VELOCITY[0]:g} "
        "rad/s and ASSUMED_ACCELERATION "
        f"{ASSUMED_ACCELERATION[0]:g} rad/s^2 (slides {ASSUMED_VELOCITY[1]:g} m/s, "
        f"{ASSUMED_ACCELERATION[1]:g} m/s^2) are "
        f"taken.{boundless} Pass limits=JointLimits(...), or the name of a table: "
        f"{', '.join(LIMITS)}.",
        LimitsAssumedWarning,
        stacklevel=4,
    )
    torque = np.full(len(ids), ASSUMED_TORQUE)
    return JointLimits(
        low, high, velocity, acceleration, acceleration * ASSUMED_JERK_RATIO, torque, assumed=True
    )
