"""Whether a robot's actuators drive the joints and grippers that it says they do."""

from __future__ import annotations

import mujoco
import numpy as np

from strands_cosmos3.action_columns import GripperConvention
from strands_cosmos3.checks import typed
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.spec import GripperSpec, Limb, RobotSpec

_ROUNDING = 0.02  # of a range: a gripper's value may lie this far outside
_JOINT = (mujoco.mjtTrn.mjTRN_JOINT, mujoco.mjtTrn.mjTRN_JOINTINPARENT)


@typed()
def require_drives(model: mujoco.MjModel, robot: RobotSpec) -> None:
    """Compare a robot's actuators and gripper values with its model, which must have every name.

    Raises:
        ConfigError: An actuator drives another joint, or has two tasks; or a gripper's value lies
            outside its range.
    """
    used: dict[str, str] = {}
    for limb in robot.limbs:
        for joint, actuator in zip(limb.joints, limb.actuators, strict=True):
            _claim(used, actuator, f"joint {joint!r}")
            if (driven := _joints_of(model, actuator)) != (joint,):
                raise ConfigError(
                    f"limb {limb.name!r} names the actuator {actuator!r} for joint {joint!r}, but "
                    "in the model it drives "
                    f"{' and '.join(map(repr, driven)) or 'no joint'}. Name the actuators in the "
                    "order of the joints."
                )
        if limb.gripper is not None:
            _claim(used, limb.gripper.actuator, f"the gripper of {limb.name!r}")
            _require_gripper(model, robot, limb, limb.gripper)


@typed()
def require_servos(model: mujoco.MjModel, robot: RobotSpec) -> None:
    """Raise ConfigError unless each joint's actuator is a position servo, as a simulation needs."""
    for limb in robot.limbs:
        ids = [model.actuator(name).id for name in limb.actuators]
        stiffness = model.actuator_gainprm[ids, 0]
        servos = (stiffness > 0) & np.isclose(model.actuator_biasprm[ids, 1], -stiffness)
        if not servos.all():
            wrong = ", ".join(
                name for name, good in zip(limb.actuators, servos, strict=True) if not good
            )
            raise ConfigError(
                f"the actuators {wrong} of limb {limb.name!r} are not position servos; give the "
                "limb gains (kp, kd), and they "
                "become such."
            )


def _claim(used: dict[str, str], actuator: str, task: str) -> None:
    if used.setdefault(actuator, task) != task:  # limbs may share a joint
        raise ConfigError(
            f"the actuator {actuator!r} is named for {used[actuator]} and for {task}; each needs "
            "its own."
        )


def _joints_of(model: mujoco.MjModel, actuator: str) -> tuple[str, ...]:
    """Names of the joints that an actuator drives, directly or by a tendon."""
    index = model.actuator(actuator).id
    kind, target = model.actuator_trntype[index], int(model.actuator_trnid[index, 0])
    if any(kind == one for one in _JOINT):
        return (model.joint(target).name,)
    if kind != mujoco.mjtTrn.mjTRN_TENDON:
        return ()
    wraps = range(model.tendon_adr[target], model.tendon_adr[target] + model.tendon_num[target])
    joints = [
        int(model.wrap_objid[i]) for i in wraps if model.wrap_type[i] == mujoco.mjtWrap.mjWRAP_JOINT
    ]
    return tuple(model.joint(joint).name for joint in joints)


def _require_gripper(
    model: mujoco.MjModel, robot: RobotSpec, limb: Limb, gripper: GripperSpec
) -> None:
    if taken := set(_joints_of(model, gripper.actuator)) & set(robot.joints):
        raise ConfigError(
            f"the gripper of limb {limb.name!r} names the actuator {gripper.actuator!r}, which "
            "drives the arm's joint "
            f"{', '.join(map(repr, sorted(taken)))}."
        )
    index = model.actuator(gripper.actuator).id
    if model.actuator_ctrllimited[index]:
        _require_within(
            gripper.command,
            model.actuator_ctrlrange[index],
            f"command of {gripper.actuator!r}",
            limb,
        )
    for name in gripper.joints:
        joint = model.joint(name).id
        if model.jnt_limited[joint]:
            _require_within(gripper.opening, model.jnt_range[joint], f"opening of {name!r}", limb)


def _require_within(
    values: GripperConvention, ends: tuple[float, float], what: str, limb: Limb
) -> None:
    low, high = map(float, ends)
    slack = _ROUNDING * (high - low)
    for name, value in (("open_value", values.open_value), ("closed_value", values.closed_value)):
        if not low - slack <= value <= high + slack:
            raise ConfigError(
                f"the gripper of limb {limb.name!r}: {name} {value:g} of the {what} is outside "
                "the model's range "
                f"{low:g} to {high:g}. Give it in the model's own unit."
            )
