"""Drive each joint of a robot's model, and measure whether it follows.

A small motion shows what an actuator's control means. A larger one, as fast as a task's, shows what
is small near home: a tendon's end, a weak servo, too little force. A motion of all joints at once
shows with either feed-forward how they disturb each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from math import inf, pi
from pathlib import Path

import mujoco
import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.actuators import control_address
from strands_cosmos3.robots.catalogue import packaged_robots
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.limits import LimitsAssumedWarning, all_limits
from strands_cosmos3.robots.model import (
    data_at,
    frame_body,
    joint_ids,
    load_robot,
    require_servos,
)
from strands_cosmos3.robots.servo import NO_COMPENSATION, FeedForward, JointServo
from strands_cosmos3.robots.spec import RobotSpec

STEP_RAD = 0.05
STEP_M = 0.02
"""The commanded small motion of a hinge and of a slide, within :data:`MOVE_S`."""
MOVE_S = 0.5
HOLD_S = 0.5
LARGEST_ERROR = 0.04
"""Distance from the reference, as a share of the small motion, up to which a joint follows."""
FAR_RAD = 1.5
FAR_M = 0.3
"""The larger motion to both sides, as far as the range allows."""
FAR_S = 3.0
HAND_M_S = 0.2
"""The larger motion takes :data:`FAR_S` each way, or longer, so that the hand's mean speed is at
most this, which is a task's.
"""
LARGEST_HAND_ERROR_M = 5e-4
"""Mean distance of the hand from its reference, up to which an arm follows: the sum over its
joints' larger motions. A task, in which they move together, may double it.
"""
GRIP_S = 1.5
LEAST_GRIP = 0.5
"""Share of a gripper's way that the fingers cover when it closes for :data:`GRIP_S`."""
_ROOM = 0.9  # share of the way to a joint's end
_DIVERGED = 1e3  # rad or m off
_REMEDY = "Raise its gains (kp, kd) or its range of force, or remove from the model what holds it."


@dataclass(frozen=True)
class JointDrive:
    """What one joint did.

    Args:
        commanded, moved: The commanded small motion, and the measured one at its end; rad or m.
        largest_error: The largest distance of any joint from its reference meanwhile.
        farthest_off: The joint that was that far off, not always the one that is moved.
        hand_error_m: Mean distance of the hand from its reference in the larger motion, at most.
        allowed_error_m: What this may be: anything, unless the sum over the joints is too large.
        unit: ``"rad"``, or ``"m"`` of a slide.
    """

    joint: str
    commanded: float
    moved: float
    largest_error: float
    farthest_off: str
    hand_error_m: float
    allowed_error_m: float
    unit: str

    @property
    def follows(self) -> bool:
        """Whether the joint moved as commanded, the others stayed, and so did the hand follow."""
        near = self.largest_error <= LARGEST_ERROR * abs(self.commanded)
        return near and self.hand_error_m <= self.allowed_error_m

    def __str__(self) -> str:
        verdict = "" if self.follows else " does not follow"
        return (
            f"{self.joint}{verdict}: commanded {self.commanded:+.3f} {self.unit}, moved "
            f"{self.moved:+.3f}, {self.farthest_off} at most {1e3 * self.largest_error:.2f} "
            f"m{self.unit} off; in a larger motion the hand was "
            f"{1e3 * self.hand_error_m:.2f} mm off"
        )


_found: dict[str, list[str]] = {}  # faults by a robot's and its model's digest


def require_following(robot: RobotSpec, arm: str | Path | None = None) -> None:
    """Drive a robot that is not of this package, and raise ConfigError unless all joints and
    grippers follow. What was found of a model is remembered while the process lives.

    Args:
        arm: Another model of the robot, as for :func:`~strands_cosmos3.robots.model.load_robot`.
    """
    if arm is None and packaged_robots().get(robot.name) == robot:
        return
    with robot.named_in_errors():
        model = load_robot(robot, simulated=True, arm=arm)
        compiled = np.empty(mujoco.mj_sizeModel(model), np.uint8)
        mujoco.mj_saveModel(model, None, compiled)
        key = sha256(compiled.tobytes() + repr(robot).encode()).hexdigest()
        if key not in _found:
            drives = drive_joints(robot, arm)
            _found[key] = drive_faults(robot, drives, arm)
        if faults := _found[key]:
            raise ConfigError(
                f"robot {robot.name!r} does not move as commanded. {' '.join(faults)}"
            )


def drive_faults(
    robot: RobotSpec, drives: list[JointDrive], arm: str | Path | None = None
) -> list[str]:
    """Return a sentence on each joint that does not follow, alone or with the others, and on each
    gripper.
    """
    faults = [f"{drive}. {_REMEDY}" for drive in drives if not drive.follows]
    model = load_robot(robot, simulated=True, arm=arm)
    servo = JointServo(model, NO_COMPENSATION, *robot.limbs)
    for feed_forward in (FeedForward.VELOCITY, FeedForward.COMPUTED_TORQUE):
        if fault := _drive_together(model, servo, robot, feed_forward):
            faults.append(f"{fault}. {_REMEDY}")
    return faults + gripper_faults(robot, arm)


def drive_joints(robot: RobotSpec, arm: str | Path | None = None) -> list[JointDrive]:
    """Move each joint in turn from home, by :data:`STEP_RAD` towards the middle of its range, then
    by :data:`FAR_RAD` to both sides, and return what was measured.

    The model is the robot's own, with a scene's physics; its servos are commanded as in a scene. In
    the larger motion nothing touches. ``arm`` is another model, as for ``load_robot``.

    Raises:
        ConfigError: An actuator is not a position servo; further errors as ``load_robot``.
    """
    model = load_robot(robot, simulated=True, arm=arm)
    require_servos(model, robot)
    robot.require_independent("driving its joints")
    servo = JointServo(model, NO_COMPENSATION, *robot.limbs)
    limits = _limits(model, robot)
    drives = [_drive(model, servo, robot, limits, joint) for joint in range(servo.n)]
    sum_m = sum(drive.hand_error_m for drive in drives)
    # else those are named that have more than half of the mean
    allowed_m = inf if sum_m <= LARGEST_HAND_ERROR_M else sum_m / (2 * servo.n)
    return [replace(drive, allowed_error_m=allowed_m) for drive in drives]


def _limits(model: mujoco.MjModel, robot: RobotSpec) -> JointLimits:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        return all_limits(model, robot)


@contextmanager
def _without_contacts(model: mujoco.MjModel) -> Iterator[None]:
    flags = model.opt.disableflags
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONTACT
    yield
    model.opt.disableflags = flags


def gripper_faults(robot: RobotSpec, arm: str | Path | None = None) -> list[str]:
    """Command each gripper to open and to close, with the arm at home, and return a sentence on
    each whose fingers do not cover :data:`LEAST_GRIP` of the way.
    """
    model = load_robot(robot, simulated=True, arm=arm)
    servo = JointServo(model, NO_COMPENSATION, *robot.limbs)
    steps = round(GRIP_S / model.opt.timestep)
    faults: list[str] = []
    for limb in robot.limbs:
        if (gripper := limb.gripper) is None:
            continue
        data = mujoco.MjData(model)
        data.qpos[servo.q_address] = robot.home_rad
        servo.hold(data, robot.home_rad)
        address = control_address(model, [model.actuator(gripper.actuator).id])
        fingers = model.jnt_qposadr[joint_ids(model, gripper.joints)]
        data.qpos[fingers] = gripper.opening.open_value
        ends: list[float] = []
        for fraction in (1.0, 0.0):
            data.ctrl[address] = gripper.command.from_fraction(fraction)
            mujoco.mj_step(model, data, steps)
            ends.append(float(gripper.opening.to_fraction(data.qpos[fingers]).mean()))
        opened, closed = ends
        if not opened - closed >= LEAST_GRIP:
            faults.append(
                f"the gripper of limb {limb.name!r} does not follow: commanded to open and to "
                f"close, its fingers were {opened:.0%} and {closed:.0%} open. Correct its opening "
                "and command, or make its actuator a position servo."
            )
    return faults


def _drive(
    model: mujoco.MjModel, servo: JointServo, robot: RobotSpec, limits: JointLimits, joint: int
) -> JointDrive:
    name, home = robot.joints[joint], robot.home_rad
    lever_m = _levers(model, robot)
    alone = np.eye(servo.n)[joint]
    unit, step, far = "rad", STEP_RAD, FAR_RAD
    if model.joint(name).type[0] == mujoco.mjtJoint.mjJNT_SLIDE:
        unit, step, far = "m", STEP_M, FAR_M
    below = home[joint] - limits.q_min[joint]
    above = limits.q_max[joint] - home[joint]
    commanded = step if above >= below else -step
    near = _motion(home, np.outer([commanded], alone), MOVE_S, model.opt.timestep)
    measured = _follow(model, servo, near, FeedForward.VELOCITY)
    error = _errors(measured, near)
    ends = [min(far, _ROOM * above), -min(far, _ROOM * below), 0.0]
    longest = ends[0] - ends[1]
    move_s = max(
        FAR_S * longest / (2 * far),
        lever_m[joint] * longest / HAND_M_S,
        pi / 2 * longest / limits.velocity[joint],
    )
    wide = _motion(home, np.outer(ends, alone), move_s, model.opt.timestep)
    with _without_contacts(model):
        far_error = _errors(_follow(model, servo, wide, FeedForward.VELOCITY), wide)
    hand_m = float((far_error @ lever_m).mean())
    worst = robot.joints[int(error.max(axis=0).argmax())]
    moved = float(measured[-1, joint] - home[joint])
    return JointDrive(name, commanded, moved, float(error.max()), worst, hand_m, 0.0, unit)


def _drive_together(
    model: mujoco.MjModel,
    servo: JointServo,
    robot: RobotSpec,
    feed_forward: FeedForward,
) -> str | None:
    """Move all joints at once, as a task does, and say whether the hands do not follow."""
    limits = _limits(model, robot)
    home = robot.home_rad
    lever_m = _levers(model, robot)
    slides = model.jnt_type[joint_ids(model, robot.joints)] == mujoco.mjtJoint.mjJNT_SLIDE
    most = np.where(slides, FAR_M, FAR_RAD) / 4
    above = np.minimum(most, _ROOM * (limits.q_max - home))
    below = -np.minimum(most, _ROOM * (home - limits.q_min))
    # neighbours go the same way, then opposite ways
    odd = np.arange(servo.n) % 2 == 1
    at_home = np.zeros(servo.n)
    ends = np.stack(
        (above, np.where(odd, above, below), below, np.where(odd, below, above), at_home)
    )
    legs = np.abs(np.diff(ends, axis=0, prepend=at_home[None]))
    move_s = max(
        float((legs @ lever_m).max()) / (len(robot.limbs) * HAND_M_S),
        float((pi / 2 * legs / limits.velocity).max()),
    )
    motion = _motion(home, ends, move_s, model.opt.timestep)
    with _without_contacts(model):
        error = _errors(_follow(model, servo, motion, feed_forward), motion)
    by_joint_m = error.mean(axis=0) * lever_m
    hand_m = float(by_joint_m.sum())
    if hand_m <= LARGEST_HAND_ERROR_M:
        return None
    worst = int(by_joint_m.argmax())
    return (
        f"{robot.joints[worst]} does not follow with the feed-forward {feed_forward.value!r}: the "
        f"hand was {1e3 * hand_m:.2f} mm off its reference while all joints moved, "
        f"{1e3 * by_joint_m[worst]:.2f} mm by this joint"
    )


def _levers(model: mujoco.MjModel, robot: RobotSpec) -> F64:
    """How far each joint [n] moves its limb's hand at home, in m/rad; 1 of a slide."""
    data = data_at(model, joint_ids(model, robot.joints), robot.home_rad)
    levers_m = []
    for limb in robot.limbs:
        ids = joint_ids(model, limb.joints)
        arm_m = data.xpos[frame_body(model, limb)] - data.xanchor[ids]
        lever_m = np.linalg.norm(np.cross(data.xaxis[ids], arm_m), axis=1)
        slides = model.jnt_type[ids] == mujoco.mjtJoint.mjJNT_SLIDE
        levers_m.append(np.where(slides, 1.0, lever_m))
    return np.concatenate(levers_m)


def _motion(home: F64, ends: F64, move_s: float, dt_s: float) -> F64:
    """Angles, velocities and accelerations [3, M, n] from home to each of ``ends`` [L, n] beside
    it, one after the other, and at rest there.
    """
    motion_s = len(ends) * move_s
    t_s = np.arange(0.0, motion_s + HOLD_S + dt_s / 2, dt_s)
    leg = np.minimum((t_s / move_s).astype(int), len(ends) - 1)
    begin = np.vstack((np.zeros_like(home), ends))
    half_way = np.diff(begin, axis=0)[leg] / 2
    # a cosine has bounded acceleration, and begins and ends at rest
    w = pi / move_s
    turn = (w * np.minimum(t_s - leg * move_s, move_s))[:, None]
    moving = half_way * w * (t_s < motion_s + dt_s / 2)[:, None]
    q = home + begin[leg] + half_way * (1 - np.cos(turn))
    return np.stack((q, moving * np.sin(turn), moving * w * np.cos(turn)))


def _follow(
    model: mujoco.MjModel, servo: JointServo, motion: F64, feed_forward: FeedForward
) -> F64:
    """Command references [3, M, n] from rest; return the angles [M - 1, n] after each step."""
    q, qd, qdd = motion
    data = mujoco.MjData(model)
    data.qpos[servo.q_address] = q[0]
    servo.hold(data, q[0])
    load_nm = servo.load_torque(q[:-1], qd[1:])
    activation = data.ctrl[servo.law.address].copy()
    measured = np.empty_like(q[1:])
    if feed_forward is FeedForward.VELOCITY:
        ctrl, _, _ = servo.controls(servo.targets(q, qd, qdd, load_nm), activation)
    for row in range(len(measured)):
        if feed_forward is FeedForward.VELOCITY:
            data.ctrl[servo.law.address] = ctrl[row]
            mujoco.mj_step(model, data)
        else:
            mujoco.mj_step1(model, data)
            target = servo.computed_torque(data, q[row], qd[row], qdd[row], load_nm[row])
            ctrl, activation, _ = servo.controls(target[None], activation)
            data.ctrl[servo.law.address] = ctrl[0]
            mujoco.mj_step2(model, data)
        measured[row] = data.qpos[servo.q_address]
    return measured


def _errors(measured: F64, motion: F64) -> F64:
    return np.nan_to_num(np.abs(measured - motion[0, 1:]), nan=_DIVERGED)
