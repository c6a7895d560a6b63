"""Inspect the arms in a host's MuJoCo model: whether they are the robot, its servo lag, and its
gripper's unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mujoco
import numpy as np

from strands_cosmos3.checks import F64, instance_of, typed
from strands_cosmos3.embodiments import MODEL_GRIPPER, WIRE_GRIPPER, GripperConvention
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.robots.model import frame_body, load_robot
from strands_cosmos3.robots.servo import servo_lead_s
from strands_cosmos3.robots.spec import GripperSpec, Limb, RobotSpec

_JOINT, _BODY, _ACTUATOR = (
    mujoco.mjtObj.mjOBJ_JOINT,
    mujoco.mjtObj.mjOBJ_BODY,
    mujoco.mjtObj.mjOBJ_ACTUATOR,
)
_TOLERANCE_M, _TOLERANCE_RAD = 1e-3, 2e-3
_PROBES = np.array([0.0, 0.3, -0.4])[:, None]


def require_franka(model: mujoco.MjModel, namespace: str, joints: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` unless a model's arm is a Franka; as :func:`require_robot`."""
    require_robot(model, namespace, joints)


@typed()
def require_robot(
    model: mujoco.MjModel, namespace: str, joints: Sequence[str], robot: RobotSpec = PANDA
) -> None:
    """Raise a :class:`ConfigError` unless a model's arms are the robot, which inverse kinematics is
    solved for.

    Every hand's pose is compared with the robot's own kinematics at three configurations, and so is
    where the bases of several limbs stand. A model without the robot's hands is accepted by its
    joints' names. ``joints`` are those of all limbs, base first, limb by limb. ``namespace``
    prefixes the robot's names, e.g. ``"panda/"``.
    """
    instance_of(model, mujoco.MjModel, "model")
    if len(robot.limbs) > 1 and len(joints) != len(robot.joints):
        raise ConfigError(
            f"{robot.title} has {len(robot.joints)} joints, and {len(joints)} are named."
        )
    ids = _joint_ids(model, namespace, joints)
    hands = [_find(model, _BODY, namespace, limb.frame) for limb in robot.limbs]
    if min(hands) < 0:
        return
    if len(ids) != len(robot.joints):
        raise ConfigError(
            f"{robot.title} has {len(robot.joints)} joints, and {len(ids)} are named."
        )
    own, bases, first = load_robot(robot), [], 0
    for limb, hand in zip(robot.limbs, hands, strict=True):
        chain = ids[first : first + len(limb.joints)]
        own_chain = [own.joint(name).id for name in limb.joints]
        pair = (_Chain(model, chain, hand), _Chain(own, own_chain, frame_body(own, limb)))
        _require_hand(
            *pair, limb, "hand" if len(robot.limbs) == 1 else f"{limb.name} hand", robot.title
        )
        bases.append(pair)
        first += len(limb.joints)
    limbs = list(robot.limbs)
    for limb, (hosts, ours) in zip(limbs[1:], bases[1:], strict=True):
        error = np.linalg.inv(_between(bases[0][1], ours)) @ _between(bases[0][0], hosts)
        if (off := _off(error)) is not None:
            raise ConfigError(
                f"the base of the simulated robot's {limb.name} arm stands {off} from where that "
                f"of {robot.title} does, seen "
                f"from the {limbs[0].name} one; its arms could meet unseen. Describe them in a "
                "robot of your own."
            )


@typed()
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
    ids = _joint_ids(instance_of(model, mujoco.MjModel, "model"), namespace, joints)
    limbs = [limb for limb in robot.limbs if limb.gripper is not None]
    if len(commands) != len(ids) or len(grippers) != len(limbs):
        raise InputError(
            f"{len(ids)} joints and {len(limbs)} grippers need as many commands, got "
            f"{len(commands)} and {len(grippers)}."
        )
    for name, key, joint in zip(joints, commands, ids, strict=True):
        driven = _commanded(model, namespace, key)
        direct = driven >= 0 and model.actuator_trntype[driven] == mujoco.mjtTrn.mjTRN_JOINT
        if direct and (moved := _moved_joints(model, driven)) != [joint]:
            raise ConfigError(
                f"{key!r} is commanded where {name!r} is observed, and in the simulated robot it "
                "moves "
                f"{model.joint(moved[0]).name.removeprefix(namespace)!r}; map every joint to its "
                "own in action_mapping."
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
    if (driven := _commanded(model, namespace, key)) < 0:
        raise ConfigError(_no_gripper(model, namespace, key, limb))
    found = {
        tip
        for joint in _moved_joints(model, driven)
        if (tip := _carrier(model, joint, tips)) is not None
    }
    if found - {limb.name}:
        raise ConfigError(
            f"{key!r}, which is commanded for the gripper of {limb.name!r}, is on the "
            f"{' and '.join(sorted(found))} arm of "
            "the simulated robot; map each gripper to its own in action_mapping."
        )


def _no_gripper(model: mujoco.MjModel, namespace: str, key: str, limb: Limb) -> str:
    own = "" if limb.gripper is None else f" (the robot's own is {limb.gripper.actuator!r})"
    have = (
        ", ".join(
            filter(None, (model.actuator(i).name.removeprefix(namespace) for i in range(model.nu)))
        )
        or "none by name"
    )
    return (
        f"the simulated robot has no actuator {key!r}, and none that moves a joint of that name, "
        "for the gripper of "
        f"{limb.name!r}{own}: it would never move. Its actuators: {have}. Add one to the model, "
        "or name one in action_mapping, "
        "e.g. {'gripper': '<its actuator>'}."
    )


def _carrier(model: mujoco.MjModel, joint: int, tips: Mapping[int, str]) -> str | None:
    """The limb whose last joint carries a joint's body, by name; None if none does."""
    body = int(model.jnt_bodyid[joint])
    while body and body not in tips:
        body = int(model.body_parentid[body])
    return tips.get(body)


@dataclass(frozen=True)
class _Chain:
    """Joints of a model, base first, and the body of their hand, by id."""

    model: mujoco.MjModel
    joints: list[int]
    hand: int

    @property
    def base(self) -> int:
        return int(self.model.body_parentid[self.model.jnt_bodyid[self.joints[0]]])

    def T_base_hand(self, q_rad: F64) -> F64:
        data = mujoco.MjData(self.model)
        data.qpos[self.model.jnt_qposadr[self.joints]] = q_rad
        mujoco.mj_kinematics(self.model, data)
        return np.linalg.inv(_pose(data, self.base)) @ _pose(data, self.hand)


def _joint_ids(model: mujoco.MjModel, namespace: str, joints: Sequence[str]) -> list[int]:
    """Ids of joints by name; ConfigError if one is missing, or two names are one joint."""
    ids = [_find(model, _JOINT, namespace, name) for name in joints]
    have = [model.joint(i).name for i in range(model.njnt)]
    if missing := [name for name, found in zip(joints, ids, strict=True) if found < 0]:
        alike = [name for name in have if name.endswith(missing[0])]
        where = (
            f" With namespace {namespace!r}, {missing[0]!r} is ambiguous: {' or '.join(alike)}."
            if alike[1:]
            else ""
        )
        raise ConfigError(
            f"the simulated robot has no joint {', '.join(missing)}; it has: "
            f"{', '.join(name.removeprefix(namespace) for name in have) or 'none'}.{where}"
        )
    if twice := [name for name, found in zip(joints, ids, strict=True) if ids.count(found) > 1]:
        raise ConfigError(
            f"{' and '.join(twice)} are one joint of the simulated robot; every joint needs its "
            "own name."
        )
    return ids


def _require_hand(host: _Chain, own: _Chain, limb: Limb, hand: str, title: str) -> None:
    for q in limb.home_rad + _PROBES:
        if (off := _off(np.linalg.inv(own.T_base_hand(q)) @ host.T_base_hand(q))) is not None:
            raise ConfigError(
                f"the simulated robot's {hand} is {off} from where a {title}'s is at the same "
                "joint angles; targets solved for "
                "that do not fit it. Use such a robot."
            )


def _between(first: _Chain, other: _Chain) -> F64:
    """Pose [4, 4] of the other chain's base in the first one's."""
    data = mujoco.MjData(first.model)
    mujoco.mj_kinematics(first.model, data)
    return np.linalg.inv(_pose(data, first.base)) @ _pose(data, other.base)


def _off(error: F64) -> str | None:
    """A pose's distance from the identity in words; None within tolerance."""
    away_m = float(np.linalg.norm(error[:3, 3]))
    turned = float(np.arccos(np.clip((np.trace(error[:3, :3]) - 1) / 2, -1, 1)))
    if away_m <= _TOLERANCE_M and turned <= _TOLERANCE_RAD:
        return None
    return f"{away_m * 1e3:.1f} mm and {np.rad2deg(turned):.1f} degrees"


@typed()
def servo_lead_of(model: mujoco.MjModel, namespace: str, joints: Sequence[str]) -> F64 | None:
    """[n] lag in s of the position servos that drive these joints one to one; None if they are
    driven in another way.
    """
    ids = [_find(model, _JOINT, namespace, name) for name in joints]
    actuators = np.array([_actuator_of(model, joint) for joint in ids], dtype=np.intp)
    if (actuators < 0).any() or (
        model.actuator_trntype[actuators] != mujoco.mjtTrn.mjTRN_JOINT
    ).any():
        return None
    if (model.actuator_gear[actuators, 0] != 1).any():
        return None
    return servo_lead_s(model, actuators, model.jnt_dofadr[ids].astype(np.intp))


@typed()
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
    ranged = model.actuator_ctrllimited[actuator] and model.actuator_ctrlrange[actuator, 0] >= 0
    if not ranged:
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
    """The actuator that drives a joint, directly or through a tendon; -1 if there is none."""
    found = [actuator for actuator in range(model.nu) if joint in _moved_joints(model, actuator)]
    direct = [
        actuator
        for actuator in found
        if model.actuator_trntype[actuator] == mujoco.mjtTrn.mjTRN_JOINT
    ]
    return (direct[:1] or found[-1:] or [-1])[0]


def _moved_joints(model: mujoco.MjModel, actuator: int) -> list[int]:
    """The joints, by id, that an actuator drives, directly or through a tendon."""
    kind, target = model.actuator_trntype[actuator], int(model.actuator_trnid[actuator, 0])
    if kind == mujoco.mjtTrn.mjTRN_JOINT:
        return [target]
    if kind != mujoco.mjtTrn.mjTRN_TENDON:
        return []
    path = slice(model.tendon_adr[target], model.tendon_adr[target] + model.tendon_num[target])
    of_joints = model.wrap_type[path] == mujoco.mjtWrap.mjWRAP_JOINT  # sites and geoms have ids too
    return model.wrap_objid[path][of_joints].tolist()


def _find(model: mujoco.MjModel, kind: mujoco.mjtObj, namespace: str, name: str) -> int:
    found = mujoco.mj_name2id(model, kind, namespace + name)
    return found if found >= 0 else mujoco.mj_name2id(model, kind, name)


def _pose(data: mujoco.MjData, body: int) -> F64:
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = data.xmat[body].reshape(3, 3), data.xpos[body]
    return T
