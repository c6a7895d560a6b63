"""Limits of an arm's joints in a MuJoCo model: ranges from the model, rates from the caller, a
table, or the named default.

MJCF has no field for velocity, acceleration or jerk, and joints' names say nothing about them:
``joint1`` to ``joint7`` are a Franka's, an xArm7's and an iiwa14's. An arm is taken for a Franka
only if its joints' axes are where a Franka's are.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, instance_of
from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.robots.joints import LIMIT_NAMES, HandLimits, JointLimits
from strands_cosmos3.robots.model import chain_to_body, frame_body
from strands_cosmos3.robots.panda import FER, FRANKA_CHAIN, HOME_Q, LIMITS
from strands_cosmos3.robots.spec import Limb, RobotSpec

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
        InputError: ``limits`` is none of these.
        UnknownNameError: There is no such table.
        ConfigError: The limits have another number of joints, or exclude all of a joint's range.
    """
    ids = list(joints)
    low, high, unlimited = _ranges(model, ids)
    if limits is None and not is_franka(model, ids):
        return _assumed(model, ids, low, high, unlimited)
    if isinstance(limits, str) and limits not in LIMITS:
        raise UnknownNameError("limits", limits, LIMITS)
    table = LIMITS[limits] if isinstance(limits, str) else FER if limits is None else limits
    if len(instance_of(table, JointLimits, "limits").velocity) != len(ids):
        raise ConfigError(f"limits has {len(table.velocity)} joints, but the chain has {len(ids)}.")
    hands = table.hands
    if isinstance(limits, JointLimits):
        low, high = np.maximum(low, table.q_min), np.minimum(high, table.q_max)
        if (low >= high).any():
            names = ", ".join(model.joint(ids[int(j)]).name for j in np.flatnonzero(low >= high))
            raise ConfigError(
                f"the limits leave nothing of the range that the model gives {names}; are they "
                "another robot's?"
            )
    elif limits is not None and not is_franka(model, ids):
        hands = tuple(replace(hand, chain=chain_to_body(model, body, ids)) for hand in hands)
    return replace(table, q_min=low, q_max=high, hands=hands)


def robot_limits(model: mujoco.MjModel, robot: RobotSpec) -> dict[str, JointLimits]:
    """Return the limits of each of a robot's limbs, by name.

    Ranges are the model's, narrowed to the robot's. A rate that the robot does not state is assumed
    (``ASSUMED_``), with one :class:`LimitsAssumedWarning` that lists joints and figures; a torque
    limit is then the model's, if that has one.

    Raises:
        ConfigError: The limits exclude all of a joint's range.
    """
    assumed: list[str] = []
    limits = {limb.name: _limb_limits(model, limb, assumed) for limb in robot.limbs}
    if assumed:
        warnings.warn(
            f"robot {robot.name!r} does not state every limit, and these are assumed: "
            f"{'; '.join(assumed)}. State them in the robot's limits, with their source.",
            LimitsAssumedWarning,
            stacklevel=3,
        )
    return limits


def all_limits(model: mujoco.MjModel, robot: RobotSpec) -> JointLimits:
    """Return :func:`robot_limits` of all limbs as those of all their joints, limb by limb."""
    limits = list(robot_limits(model, robot).values())
    return joined_limits(limits, [limb.joints for limb in robot.limbs])


def limits_of_arm(model: mujoco.MjModel, robot: RobotSpec) -> JointLimits | None:
    """Return the limits of a robot's only limb; None for a Franka's kinematics, whose table
    :func:`limits_of` knows.
    """
    limb = robot.limb()
    if is_franka(model, _joint_ids(model, limb)):
        return None
    return robot_limits(model, robot)[limb.name]


def _limb_limits(model: mujoco.MjModel, limb: Limb, assumed: list[str]) -> JointLimits:
    n_assumed, ids = len(assumed), _joint_ids(model, limb)
    low, high, unlimited = _ranges(model, ids)
    of_robot = {name: np.array(values) for name, values in limb.limits.values.items()}
    if "q_min" in of_robot:
        low, high = np.maximum(low, of_robot["q_min"]), np.minimum(high, of_robot["q_max"])
    elif unlimited:
        assumed.append(f"{limb.name}: range +-{ASSUMED_RANGE_RAD:.2f} of {', '.join(unlimited)}")
    if (low >= high).any():
        raise ConfigError(
            f"the limits of limb {limb.name!r} leave nothing of a joint's range: {low} to {high}."
        )
    rates: dict[str, Any] = {**_assumed_rates(model, ids), **of_robot, "q_min": low, "q_max": high}
    if "acceleration" in of_robot and "jerk" not in of_robot:
        rates["jerk"] = of_robot["acceleration"] * ASSUMED_JERK_RATIO
    for name, values in rates.items():
        if name not in (*of_robot, "q_min", "q_max") and (
            name != "torque" or (values == ASSUMED_TORQUE).any()
        ):
            assumed.append(f"{limb.name}: {name} {values.tolist()}")
    hand = limb.limits.hand
    hands = ()
    if hand is not None:
        chain = chain_to_body(model, frame_body(model, limb), ids)
        hands = (HandLimits(chain, hand.velocity, hand.acceleration),)
    return JointLimits(**rates, hands=hands, assumed=len(assumed) > n_assumed)


def _joint_ids(model: mujoco.MjModel, limb: Limb) -> list[int]:
    return [model.joint(name).id for name in limb.joints]


def _assumed_rates(model: mujoco.MjModel, ids: list[int]) -> dict[str, Any]:
    slides = (model.jnt_type[ids] == int(mujoco.mjtJoint.mjJNT_SLIDE)).astype(int)
    acceleration = np.array(ASSUMED_ACCELERATION)[slides]
    return {
        "velocity": np.array(ASSUMED_VELOCITY)[slides],
        "acceleration": acceleration,
        "jerk": acceleration * ASSUMED_JERK_RATIO,
        "torque": np.array([joint_torque(model, joint) or ASSUMED_TORQUE for joint in ids]),
    }


def joint_torque(model: mujoco.MjModel, joint: int) -> float | None:
    """Return the limit of torque or force of a joint, by id: its own, or that of the actuator that
    drives it alone; None without one.
    """
    if model.jnt_actfrclimited[joint]:
        return float(model.jnt_actfrcrange[joint, 1])
    drives = (model.actuator_trntype == int(mujoco.mjtTrn.mjTRN_JOINT)) & (
        model.actuator_trnid[:, 0] == joint
    )
    limited = np.flatnonzero(drives & (model.actuator_forcelimited != 0))
    return float(model.actuator_forcerange[limited[0], 1]) if len(limited) else None


def joined_limits(limits: Sequence[JointLimits], joints: Sequence[Sequence[str]]) -> JointLimits:
    """Return the limits of several limbs as those of all their joints, limb by limb; every limb's
    hand stays limited.

    ``joints`` are the names of each limb's joints; one that limbs share counts once, with the first
    of them.
    """
    if len(limits) == 1:
        return limits[0]
    names = [name for limb in joints for name in limb]
    unique = list(dict.fromkeys(names))
    first_of = [names.index(name) for name in unique]
    hands: list[HandLimits] = []
    for limb, part in zip(joints, limits, strict=True):
        index = [unique.index(name) for name in limb]
        for hand in part.hands:
            chain = range(len(limb)) if hand.joints is None else hand.joints
            hands.append(replace(hand, joints=tuple(index[joint] for joint in chain)))
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in limits])[first_of]
        for name in LIMIT_NAMES
    }
    assumed = any(part.assumed for part in limits)
    return JointLimits(**arrays, hands=tuple(hands), assumed=assumed)


def is_franka(model: mujoco.MjModel, joints: Sequence[int]) -> bool:
    """Whether joints (ids, base first) have a Franka's axes, relative to the world's origin,
    whatever they are called.
    """
    ids = list(joints)
    hinges = model.jnt_type[ids] == int(mujoco.mjtJoint.mjJNT_HINGE)
    if len(ids) != len(HOME_Q) or not hinges.all():
        return False
    data = mujoco.MjData(model)
    for q in _PROBES:
        data.qpos[model.jnt_qposadr[ids]] = q
        mujoco.mj_kinematics(model, data)
        T = np.eye(4)
        for joint, T_parent_joint, angle in zip(ids, FRANKA_CHAIN.T_parent_joint, q, strict=True):
            T = T @ T_parent_joint
            off_axis = np.cross(data.xanchor[joint] - T[:3, 3], T[:3, 2])
            turned = data.xaxis[joint] - T[:3, 2]
            if max(np.abs(off_axis).max(), np.abs(turned).max()) > _SAME_AXIS:
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
    names = ", ".join(model.joint(j).name for j in ids)
    boundless = (
        f" The model gives {', '.join(unlimited)} no range: +-{ASSUMED_RANGE_RAD:.2f}."
        if unlimited
        else ""
    )
    warnings.warn(
        f"no rates are known for the joints {names}; ASSUMED_VELOCITY {ASSUMED_VELOCITY[0]:g} "
        f"rad/s and ASSUMED_ACCELERATION {ASSUMED_ACCELERATION[0]:g} rad/s^2 (slides "
        f"{ASSUMED_VELOCITY[1]:g} m/s, {ASSUMED_ACCELERATION[1]:g} m/s^2) are taken.{boundless} "
        f"Pass limits=JointLimits(...), or the name of a table: {', '.join(LIMITS)}.",
        LimitsAssumedWarning,
        stacklevel=4,
    )
    return JointLimits(low, high, **_assumed_rates(model, ids), assumed=True)
