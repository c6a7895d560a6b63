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

from strands_cosmos3.checks import F64, instance_of, known_name
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.actuators import direct_actuators, position_servos, servo_faults
from strands_cosmos3.robots.joints import LIMIT_NAMES, HandLimits, JointLimits
from strands_cosmos3.robots.model import (
    chain_to_body,
    data_at,
    frame_body,
    joint_ids,
    joint_names,
)
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
    model: mujoco.MjModel, ids: list[int], limits: JointLimits | str | None, body: int
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
    if limits is None and not is_franka(model, ids):
        assumed: list[str] = []
        arm = _complete(model, ids, {}, ", ".join(joint_names(model, ids)), assumed)
        _warn(
            "no limits are known for an arm's joints",
            assumed,
            f"Pass limits=JointLimits(...), or the name of a table: {', '.join(LIMITS)}.",
        )
        return arm
    if isinstance(limits, str):
        table = LIMITS[known_name(limits, "limits", LIMITS)]
    else:
        table = FER if limits is None else limits
    if len(instance_of(table, JointLimits, "limits").velocity) != len(ids):
        raise ConfigError(f"limits has {len(table.velocity)} joints, but the chain has {len(ids)}.")
    if isinstance(limits, JointLimits):
        low, high = _narrowed(model, ids, limits.q_min, limits.q_max)
        return replace(limits, q_min=low, q_max=high)
    low, high, _ = _ranges(model, ids)
    hands = table.hands
    if limits is not None and not is_franka(model, ids):
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
        _warn(
            f"robot {robot.name!r} does not state every limit",
            assumed,
            "State them in the robot's limits, with their source.",
        )
    return limits


def _warn(reason: str, assumed: list[str], remedy: str) -> None:
    warnings.warn(
        f"{reason}, and these are assumed: {'; '.join(assumed)}. {remedy}",
        LimitsAssumedWarning,
        stacklevel=4,
    )


def all_limits(model: mujoco.MjModel, robot: RobotSpec) -> JointLimits:
    """Return :func:`robot_limits` of all limbs as those of all their joints, limb by limb."""
    limits = list(robot_limits(model, robot).values())
    return joined_limits(limits, [limb.joints for limb in robot.limbs])


def limits_of_arm(model: mujoco.MjModel, robot: RobotSpec) -> JointLimits | None:
    """Return the limits of a robot's only limb; None for a Franka's kinematics, whose table
    :func:`limits_of` knows.
    """
    limb = robot.limb()
    if is_franka(model, joint_ids(model, limb.joints)):
        return None
    return robot_limits(model, robot)[limb.name]


def _limb_limits(model: mujoco.MjModel, limb: Limb, assumed: list[str]) -> JointLimits:
    ids = joint_ids(model, limb.joints)
    stated = {name: np.array(values) for name, values in limb.limits.values.items()}
    limits = _complete(model, ids, stated, limb.name, assumed)
    hand = limb.limits.hand
    actuators = [model.actuator(name).id for name in limb.actuators]
    if not servo_faults(model, actuators):  # controls may not reach all of the joints' range
        low, high = position_servos(model, actuators).reach()
        q_min = np.maximum(low, limits.q_min)
        q_max = np.minimum(high, limits.q_max)
        limits = replace(limits, q_min=q_min, q_max=q_max)
    if hand is None:
        return limits
    chain = chain_to_body(model, frame_body(model, limb), ids)
    return replace(limits, hands=(HandLimits(chain, hand.velocity, hand.acceleration),))


def _complete(
    model: mujoco.MjModel, ids: list[int], stated: dict[str, F64], owner: str, assumed: list[str]
) -> JointLimits:
    """The stated limits, and others by the model or assumed; ``assumed`` gets a line for each of
    these.
    """
    n_assumed = len(assumed)
    low, high, unlimited = _ranges(model, ids)
    if "q_min" in stated:
        low, high = _narrowed(model, ids, stated["q_min"], stated["q_max"])
    elif unlimited:
        assumed.append(f"{owner}: range +-{ASSUMED_RANGE_RAD:.2f} of {', '.join(unlimited)}")
    slides = (model.jnt_type[ids] == mujoco.mjtJoint.mjJNT_SLIDE).astype(int)
    rates: dict[str, Any] = {
        "velocity": np.array(ASSUMED_VELOCITY)[slides],
        "acceleration": np.array(ASSUMED_ACCELERATION)[slides],
        "torque": np.array([joint_torque(model, joint) or ASSUMED_TORQUE for joint in ids]),
        **stated,
    }
    rates.setdefault("jerk", rates["acceleration"] * ASSUMED_JERK_RATIO)
    for name in RATES:
        if name not in stated and (name != "torque" or (rates[name] == ASSUMED_TORQUE).any()):
            assumed.append(f"{owner}: {name} {rates[name].tolist()}")
    return JointLimits(**{**rates, "q_min": low, "q_max": high}, assumed=len(assumed) > n_assumed)


def _narrowed(model: mujoco.MjModel, ids: list[int], q_min: F64, q_max: F64) -> tuple[F64, F64]:
    """The model's ranges within other ones; ConfigError if nothing is left of one."""
    low, high, _ = _ranges(model, ids)
    low = np.maximum(low, q_min)
    high = np.minimum(high, q_max)
    if (low >= high).any():
        names = ", ".join(joint_names(model, np.array(ids)[low >= high].tolist()))
        raise ConfigError(
            f"the limits leave nothing of the range that the model gives {names}; are they "
            "another robot's?"
        )
    return low, high


def joint_torque(model: mujoco.MjModel, joint: int) -> float | None:
    """Return the limit of torque or force of a joint, by id: its own, or that of the actuator that
    drives it alone; None without one.
    """
    if model.jnt_actfrclimited[joint]:
        return float(model.jnt_actfrcrange[joint, 1])
    forces = (
        abs(float(model.actuator_gear[actuator, 0])) * float(model.actuator_forcerange[actuator, 1])
        for actuator in direct_actuators(model, joint)
        if model.actuator_forcelimited[actuator]
    )
    return next(forces, None)


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
        index = np.array([unique.index(name) for name in limb])
        for hand in part.hands:
            hands.append(replace(hand, joints=tuple(hand.of_chain(index).tolist())))
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in limits])[first_of]
        for name in LIMIT_NAMES
    }
    assumed = any(part.assumed for part in limits)
    return JointLimits(**arrays, hands=tuple(hands), assumed=assumed)


def is_franka(model: mujoco.MjModel, ids: list[int]) -> bool:
    """Whether joints (ids, base first) have a Franka's axes, relative to the world's origin,
    whatever they are called.
    """
    hinges = model.jnt_type[ids] == mujoco.mjtJoint.mjJNT_HINGE
    if len(ids) != len(HOME_Q) or not hinges.all():
        return False
    for q in _PROBES:
        data = data_at(model, ids, q)
        T = np.stack(FRANKA_CHAIN.joint_frames(q))
        axis = T[:, :3, 2]
        axis_offset_m = np.cross(data.xanchor[ids] - T[:, :3, 3], axis)
        if max(np.abs(axis_offset_m).max(), np.abs(data.xaxis[ids] - axis).max()) > _SAME_AXIS:
            return False
    return True


def _ranges(model: mujoco.MjModel, ids: list[int]) -> tuple[F64, F64, tuple[str, ...]]:
    """Least and greatest angles by the model, and the names of the joints that it does not
    limit.
    """
    limited = model.jnt_limited[ids].astype(bool)
    assumed = -ASSUMED_RANGE_RAD, ASSUMED_RANGE_RAD
    low, high = np.where(limited[:, None], model.jnt_range[ids], assumed).T
    return low, high, joint_names(model, np.array(ids)[~limited].tolist())
