"""Inspect the arm in a host's MuJoCo model: whether it is the robot, its servo lag, and its gripper's unit."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, instance_of, typed
from strands_cosmos3.embodiments import MODEL_GRIPPER, WIRE_GRIPPER, GripperConvention
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.assembly import frame_body, load_robot
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.servo import servo_lead_s
from strands_cosmos3.robots.spec import GripperSpec, RobotSpec

_JOINT, _BODY, _ACTUATOR = mujoco.mjtObj.mjOBJ_JOINT, mujoco.mjtObj.mjOBJ_BODY, mujoco.mjtObj.mjOBJ_ACTUATOR
_TOLERANCE_M, _TOLERANCE_RAD = 1e-3, 2e-3
_PROBES = np.array([0.0, 0.3, -0.4])[:, None]


def require_franka(model: mujoco.MjModel, namespace: str, joints: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` unless a model's arm is a Franka; as :func:`require_robot`."""
    require_robot(model, namespace, joints)


@typed()
def require_robot(model: mujoco.MjModel, namespace: str, joints: Sequence[str], robot: RobotSpec = PANDA) -> None:
    """Raise a :class:`ConfigError` unless a model's arm is the robot, which inverse kinematics is solved for.

    The hand's pose is compared with the robot's own kinematics at three configurations. A model without the robot's hand is
    accepted by its joints' names, base first. ``namespace`` prefixes the robot's names, e.g. ``"panda/"``.
    """
    instance_of(model, mujoco.MjModel, "model")
    ids = [_find(model, _JOINT, namespace, name) for name in joints]
    if missing := [name for name, found in zip(joints, ids, strict=True) if found < 0]:
        have = [model.joint(i).name.removeprefix(namespace) for i in range(model.njnt)]
        raise ConfigError(f"the simulated robot has no joint {', '.join(missing)}; it has: {', '.join(have) or 'none'}.")
    limb = robot.limb()
    hand = _find(model, _BODY, namespace, limb.frame)
    if hand < 0:
        return
    base = model.body_parentid[model.jnt_bodyid[ids[0]]]
    data = mujoco.MjData(model)
    if len(ids) != len(limb.joints):
        raise ConfigError(f"{robot.title} has {len(limb.joints)} joints, and {len(ids)} are named.")
    own = load_robot(robot)
    own_data, own_ids = mujoco.MjData(own), [own.joint(name).id for name in limb.joints]
    own_base, own_hand = own.body_parentid[own.jnt_bodyid[own_ids[0]]], frame_body(own, limb)
    for q in limb.home_rad + _PROBES:
        data.qpos[model.jnt_qposadr[ids]] = q
        mujoco.mj_kinematics(model, data)
        T_base_hand = np.linalg.inv(_pose(data, base)) @ _pose(data, hand)
        own_data.qpos[own.jnt_qposadr[own_ids]] = q
        mujoco.mj_kinematics(own, own_data)
        error = np.linalg.inv(_pose(own_data, own_hand)) @ _pose(own_data, own_base) @ T_base_hand
        away_m = float(np.linalg.norm(error[:3, 3]))
        turned = float(np.arccos(np.clip((np.trace(error[:3, :3]) - 1) / 2, -1, 1)))
        if away_m > _TOLERANCE_M or turned > _TOLERANCE_RAD:
            raise ConfigError(
                f"the simulated robot's hand is {away_m * 1e3:.1f} mm and {np.rad2deg(turned):.1f} degrees from where a "
                f"{robot.title}'s is at the same joint angles; targets solved for that do not fit it. Use such a robot."
            )


@typed()
def servo_lead_of(model: mujoco.MjModel, namespace: str, joints: Sequence[str]) -> F64 | None:
    """[n] lag in s of the position servos that drive these joints one to one; None if they are driven in another way."""
    ids = [_find(model, _JOINT, namespace, name) for name in joints]
    actuators = np.array([_actuator_of(model, joint) for joint in ids], dtype=np.intp)
    if (actuators < 0).any() or (model.actuator_trntype[actuators] != mujoco.mjtTrn.mjTRN_JOINT).any():
        return None
    if (model.actuator_gear[actuators, 0] != 1).any():
        return None
    return servo_lead_s(model, actuators, model.jnt_dofadr[ids].astype(np.intp))


@typed()
def driven_gripper(
    model: mujoco.MjModel, namespace: str, key: str, gripper: GripperSpec | None = None
) -> GripperConvention | None:
    """Return the unit in which strands-robots' MuJoCo engine reads a number under ``key``; None for the joint's own unit.

    The engine commands a tendon's actuator with the open fraction, under the actuator's name or a finger joint's: it maps
    [0, 1] to the actuator's range (``_scale_ctrl_for_actuator``, strands-robots 0.5.3). If the robot's ``gripper`` is closed at
    the upper end, as a 2F-85 is, that is the closed fraction.
    """
    actuator = _find(model, _ACTUATOR, namespace, key)
    if actuator < 0:
        actuator = _actuator_of(model, _find(model, _JOINT, namespace, key))
    if actuator < 0 or model.actuator_trntype[actuator] != mujoco.mjtTrn.mjTRN_TENDON:
        return None
    ranged = model.actuator_ctrllimited[actuator] and model.actuator_ctrlrange[actuator, 0] >= 0
    if not ranged:
        return None
    closes = gripper is not None and gripper.command.closed_value > gripper.command.open_value
    return WIRE_GRIPPER if closes else MODEL_GRIPPER


def _actuator_of(model: mujoco.MjModel, joint: int) -> int:
    """The actuator that drives a joint, directly or through a tendon; -1 if there is none."""
    if joint < 0:
        return -1
    through_tendon = -1
    for actuator, (kind, target) in enumerate(zip(model.actuator_trntype, model.actuator_trnid[:, 0], strict=True)):
        if kind == mujoco.mjtTrn.mjTRN_JOINT and target == joint:
            return actuator
        if kind == mujoco.mjtTrn.mjTRN_TENDON:
            path = slice(model.tendon_adr[target], model.tendon_adr[target] + model.tendon_num[target])
            of_joints = model.wrap_type[path] == mujoco.mjtWrap.mjWRAP_JOINT  # sites and geoms have ids too
            if joint in model.wrap_objid[path][of_joints]:
                through_tendon = actuator
    return through_tendon


def _find(model: mujoco.MjModel, kind: mujoco.mjtObj, namespace: str, name: str) -> int:
    found = mujoco.mj_name2id(model, kind, namespace + name)
    return found if found >= 0 else mujoco.mj_name2id(model, kind, name)


def _pose(data: mujoco.MjData, body: int) -> F64:
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = data.xmat[body].reshape(3, 3), data.xpos[body]
    return T
