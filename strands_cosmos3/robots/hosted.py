"""The arms in a host's MuJoCo model: whether they are the robot, the lag of their servos, and their
grippers' unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, instance_of
from strands_cosmos3.embodiments import MODEL_GRIPPER, WIRE_GRIPPER, GripperConvention
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.actuators import (
    actuators_of,
    control_address,
    direct_actuators,
    driven_joints,
    position_servos,
    servo_faults,
)
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.model import (
    bodies_up_from,
    data_at,
    frame_body,
    joint_ids,
    joint_names,
    load_robot,
    pose_of,
)
from strands_cosmos3.robots.spec import GripperSpec, Limb, RobotSpec

_OBJECTS = mujoco.mjtObj
_JOINT = _OBJECTS.mjOBJ_JOINT
_BODY = _OBJECTS.mjOBJ_BODY
_ACTUATOR = _OBJECTS.mjOBJ_ACTUATOR
_TOLERANCE_M = 1e-3
_TOLERANCE_RAD = 2e-3
_PROBES = np.array([0.0, 0.3, -0.4])[:, None]


def require_robot(
    model: mujoco.MjModel, namespace: str, joints: Sequence[str], robot: RobotSpec = PANDA
) -> None:
    """Raise a :class:`ConfigError` unless a model's arms are the robot, which inverse kinematics is
    solved for, and InputError unless it is a model.

    Every hand's pose is compared with the robot's own kinematics at three configurations, and so is
    where the bases of several limbs stand. A model without the robot's hands is accepted by its
    joints' names. ``joints`` are those of all limbs, base first, limb by limb. ``namespace``
    prefixes the robot's names, e.g. ``"panda/"``.
    """
    instance_of(model, mujoco.MjModel, "model")
    instance_of(namespace, str, "namespace")
    ids = _joint_ids(model, namespace, joints)
    hands = [_find(model, _BODY, namespace, limb.frame) for limb in robot.limbs]
    several = len(robot.limbs) > 1
    if min(hands) < 0:
        return
    own = load_robot(robot)
    bases: list[tuple[F64, F64]] = []
    for limb, hand in zip(robot.limbs, hands, strict=True):
        ids_of_limb = ids[: len(limb.joints)]
        ids = ids[len(limb.joints) :]
        T_world_base, T_base_hand = _poses(model, ids_of_limb, hand, limb)
        in_own = own, joint_ids(own, limb.joints), frame_body(own, limb)
        T_robot_base, T_expected = _poses(*in_own, limb)
        if distance := next(filter(None, map(_distance, T_expected, T_base_hand)), None):
            name = f"{limb.name} hand" if several else "hand"
            raise ConfigError(
                f"the simulated robot's {name} is {distance} from where a {robot.title}'s is at "
                "the same joint angles; targets solved for that do not fit it. Use such a robot."
            )
        bases.append((T_world_base, T_robot_base))
    T_world_first, T_robot_first = bases[0]
    for limb, (T_world_base, T_robot_base) in zip(robot.limbs, bases, strict=True):
        T_first_base = np.linalg.inv(T_robot_first) @ T_robot_base
        distance = _distance(T_first_base, np.linalg.inv(T_world_first) @ T_world_base)
        if distance is not None:
            raise ConfigError(
                f"the base of the simulated robot's {limb.name} arm stands {distance} from where "
                f"that of {robot.title} does, seen from the {robot.limbs[0].name} one; its arms "
                "could meet unseen. Describe them in a robot of your own."
            )


def require_actuators(
    model: mujoco.MjModel,
    namespace: str,
    joints: Sequence[str],
    commands: Sequence[str],
    grippers: Sequence[str],
    robot: RobotSpec = PANDA,
) -> None:
    """Raise a :class:`ConfigError` if a command moves another joint than its name says, or a
    gripper's command moves nothing.

    An actuator may have any name. A joint that is driven through a tendon, or that nothing drives,
    is not checked.

    Args:
        model: The host's model; :func:`require_robot` accepts it.
        namespace: Prefix of the robot's names in it.
        joints: The joints that are observed, base first, limb by limb.
        commands: What is commanded for each: a joint or its actuator.
        grippers: What is commanded for the gripper of each limb that has one: its actuator, or a
            joint that it moves.
        robot: The robot.
    """
    ids = _joint_ids(model, namespace, joints)
    limbs = [limb for limb in robot.limbs if limb.gripper is not None]
    for name, key, joint in zip(joints, commands, ids, strict=True):
        actuator = _commanded(model, namespace, key)
        if actuator >= 0 and model.actuator_trntype[actuator] == mujoco.mjtTrn.mjTRN_JOINT:
            (moved,) = driven_joints(model, actuator)
            if moved != joint:
                raise ConfigError(
                    f"{key!r} is commanded where {name!r} is observed, and in the simulated robot "
                    f"it moves {model.joint(moved).name.removeprefix(namespace)!r}; map every "
                    "joint to its own in action_mapping."
                )
    last = np.cumsum([len(limb.joints) for limb in robot.limbs]) - 1
    tips = {
        int(model.jnt_bodyid[ids[i]]): limb.name
        for i, limb in zip(last, robot.limbs, strict=True)
        if i < len(ids)
    }
    for limb, key in zip(limbs, grippers, strict=True):
        _require_gripper(model, namespace, key, limb, tips)


def _require_gripper(
    model: mujoco.MjModel, namespace: str, key: str, limb: Limb, tips: Mapping[int, str]
) -> None:
    """Refuse a gripper's command that moves nothing, or something on another of the limbs, by
    their last bodies.
    """
    assert limb.gripper is not None
    if (actuator := _commanded(model, namespace, key)) < 0:
        names = (model.actuator(i).name.removeprefix(namespace) for i in actuators_of(model))
        raise ConfigError(
            f"the simulated robot has no actuator {key!r}, and none that moves a joint of that "
            f"name, for the gripper of {limb.name!r} (the robot's own is "
            f"{limb.gripper.actuator!r}): it would never move. Its actuators: "
            f"{', '.join(filter(None, names)) or 'none by name'}. Add one to the model, or name "
            "one in action_mapping, e.g. {'gripper': '<its actuator>'}."
        )
    carriers: set[str] = set()
    for joint in driven_joints(model, actuator):
        bodies = bodies_up_from(model, int(model.jnt_bodyid[joint]))
        carriers |= set([tips[body] for body in bodies if body in tips][:1])
    if carriers - {limb.name}:
        raise ConfigError(
            f"{key!r}, which is commanded for the gripper of {limb.name!r}, is on the "
            f"{' and '.join(sorted(carriers))} arm of the simulated robot; map each gripper to its "
            "own in action_mapping."
        )


def _poses(
    model: mujoco.MjModel, joints: list[int], hand: int, limb: Limb
) -> tuple[F64, list[F64]]:
    """Poses [4, 4] of a chain's base in the world, and of its hand (a body) in the base with the
    joints (ids, base first) at home and two configurations near it.
    """
    base = model.body_parentid[model.jnt_bodyid[joints[0]]]
    probes = [data_at(model, joints, q_rad) for q_rad in limb.home_rad + _PROBES]
    T_world_base = pose_of(probes[0].body(base))
    T_base_world = np.linalg.inv(T_world_base)
    return T_world_base, [T_base_world @ pose_of(data.body(hand)) for data in probes]


def _joint_ids(model: mujoco.MjModel, namespace: str, joints: Sequence[str]) -> list[int]:
    """Ids of joints by name; ConfigError if one is missing, or two names are one joint."""
    ids = [_find(model, _JOINT, namespace, name) for name in joints]
    in_model = joint_names(model, range(model.njnt))
    if missing := [name for name, joint in zip(joints, ids, strict=True) if joint < 0]:
        similar = [name for name in in_model if name.endswith(missing[0])]
        ambiguity = (
            f" With namespace {namespace!r}, {missing[0]!r} is ambiguous: {' or '.join(similar)}."
            if similar[1:]
            else ""
        )
        raise ConfigError(
            f"the simulated robot has no joint {', '.join(missing)}; it has: "
            f"{', '.join(name.removeprefix(namespace) for name in in_model) or 'none'}.{ambiguity}"
        )
    if twice := [name for name, joint in zip(joints, ids, strict=True) if ids.count(joint) > 1]:
        raise ConfigError(
            f"{' and '.join(twice)} are one joint of the simulated robot; every joint needs its "
            "own name."
        )
    return ids


def _distance(T_expected: F64, T: F64) -> str | None:
    """The distance of two poses in words; None within tolerance."""
    error = np.linalg.inv(T_expected) @ T
    length_m = float(np.linalg.norm(error[:3, 3]))
    angle_rad = float(np.arccos(np.clip((np.trace(error[:3, :3]) - 1) / 2, -1, 1)))
    if length_m <= _TOLERANCE_M and angle_rad <= _TOLERANCE_RAD:
        return None
    return f"{length_m * 1e3:.1f} mm and {np.rad2deg(angle_rad):.1f} degrees"


def servo_lead_of(model: mujoco.MjModel, namespace: str, joints: Sequence[str]) -> F64 | None:
    """[n] lag in s of the position servos whose controls are these joints' angles; None if they
    are driven in another way.
    """
    ids = [_find(model, _JOINT, namespace, name) for name in joints]
    actuators = [actuator for joint in ids for actuator in direct_actuators(model, joint)[:1]]
    if len(actuators) < len(ids) or servo_faults(model, actuators):
        return None
    law = position_servos(model, actuators)
    if law.filtered.any() or (law.ctrl_per_rad != 1).any() or law.ctrl_at_zero.any():
        return None
    return law.lag_s(model.dof_damping[model.jnt_dofadr[ids]])


def driven_gripper(
    model: mujoco.MjModel, namespace: str, key: str, gripper: GripperSpec | None = None
) -> GripperConvention | None:
    """Return the unit in which strands-robots' MuJoCo engine reads a number under ``key``; None for
    the joint's own unit.

    The engine commands a tendon's actuator with the open fraction, under the actuator's name or a
    finger joint's: it maps [0, 1] to the actuator's range (``_scale_ctrl_for_actuator``,
    strands-robots 0.5.3). If the robot's ``gripper`` is closed at the upper end, as a 2F-85 is,
    that is the closed fraction.
    """
    actuator = _commanded(model, namespace, key)
    if actuator < 0 or model.actuator_trntype[actuator] != mujoco.mjtTrn.mjTRN_TENDON:
        return None
    (address,) = control_address(model, [actuator])
    if not model.actuator_ctrllimited[address] or model.actuator_ctrlrange[address, 0] < 0:
        return None
    closes = gripper is not None and gripper.command.closed_value > gripper.command.open_value
    return WIRE_GRIPPER if closes else MODEL_GRIPPER


def _commanded(model: mujoco.MjModel, namespace: str, key: str) -> int:
    """The actuator that a host writes a number under ``key`` to: of that name, or of the joint
    of that name; -1 if none.
    """
    actuator = _find(model, _ACTUATOR, namespace, key)
    return actuator if actuator >= 0 else _actuator_of(model, _find(model, _JOINT, namespace, key))


def _actuator_of(model: mujoco.MjModel, joint: int) -> int:
    """The actuator that drives a joint, directly or else through a tendon; -1 if there is none."""
    through_tendon = [a for a in actuators_of(model) if joint in driven_joints(model, a)]
    return next(iter((*direct_actuators(model, joint), *through_tendon[-1:], -1)))


def _find(model: mujoco.MjModel, kind: mujoco.mjtObj, namespace: str, name: str) -> int:
    prefixed = mujoco.mj_name2id(model, kind, namespace + name)
    return prefixed if prefixed >= 0 else mujoco.mj_name2id(model, kind, name)
