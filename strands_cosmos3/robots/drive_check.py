"""Drive each joint of a robot's model, and measure whether it follows.

A small motion shows what an actuator's control means. A larger one, as fast as a task's, shows what
is small near home: a tendon's end, a weak servo, too little force. A motion of all joints at once
shows with either feed-forward how they disturb each other.
"""

from __future__ import annotations

import warnings
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
_TOGETHER = 0.25  # share of a joint's motions, when all move
_REMEDY = (
    "Raise the gains (kp, kd) or the ranges of force of what does not follow, or remove from the "
    "model what holds it."
)


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


_driven: dict[str, list[JointDrive]] = {}  # by the digest of a robot and its compiled model


def require_following(robot: RobotSpec, arm: str | Path | None = None) -> None:
    """Drive a robot, unless it is one of this package, and raise ConfigError if a joint or a
    gripper does not follow.

    Args:
        arm: Another model of the robot, as for :func:`~strands_cosmos3.robots.model.load_robot`.
    """
    if arm is None and packaged_robots().get(robot.name) == robot:
        return
    with robot.named_in_errors():
        if faults := drive_faults(drive_joints(robot, arm)) + gripper_faults(robot, arm):
            raise ConfigError(
                f"robot {robot.name!r} does not move as commanded. {' '.join(faults)}"
            )


def drive_faults(drives: list[JointDrive]) -> list[str]:
    """Return a sentence on each drive that does not follow, and what to do about them."""
    faults = [f"{drive}." for drive in drives if not drive.follows]
    return [*faults, _REMEDY] if faults else []


def drive_joints(robot: RobotSpec, arm: str | Path | None = None) -> list[JointDrive]:
    """Move each joint in turn from home, by :data:`STEP_RAD` towards the middle of its range, then
    by :data:`FAR_RAD` to both sides; then all joints at once, with either feed-forward, a quarter
    as far; and return what was measured.

    The model is the robot's own, with a scene's physics; its servos are commanded as in a scene. In
    the larger motion nothing touches. ``arm`` is another model, as for ``load_robot``. What was
    measured of a model is remembered while the process lives.

    Raises:
        ConfigError: An actuator is not a position servo; further errors as ``load_robot``.
    """
    model = load_robot(robot, simulated=True, arm=arm)
    require_servos(model, robot)
    robot.require_independent("driving its joints")
    servo = JointServo(model, NO_COMPENSATION, *robot.limbs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        limits = all_limits(model, robot)
    compiled = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, compiled)
    key = sha256(compiled.tobytes() + repr(robot).encode()).hexdigest()
    if key not in _driven:
        _driven[key] = _Check(model, servo, robot, limits).drive_all()
    return _driven[key]


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
        data = _at_home(model, servo, robot)
        address = control_address(model, [model.actuator(gripper.actuator).id])
        fingers = model.jnt_qposadr[joint_ids(model, gripper.joints)]
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


def _at_home(model: mujoco.MjModel, servo: JointServo, robot: RobotSpec) -> mujoco.MjData:
    """The state in which an episode begins: at home, with open grippers."""
    data = mujoco.MjData(model)
    data.qpos[servo.q_address] = robot.home_rad
    servo.hold(data, robot.home_rad)
    for gripper in filter(None, (limb.gripper for limb in robot.limbs)):
        data.qpos[model.jnt_qposadr[joint_ids(model, gripper.joints)]] = gripper.opening.open_value
        address = control_address(model, [model.actuator(gripper.actuator).id])
        data.ctrl[address] = gripper.command.open_value
    return data


@dataclass(frozen=True, eq=False)
class _Check:
    model: mujoco.MjModel
    servo: JointServo
    robot: RobotSpec
    limits: JointLimits

    def drive_all(self) -> list[JointDrive]:
        """Each joint in turn, then all together with either feed-forward."""
        n = self.servo.n
        alone = [self.drive(*named) for named in zip(self.robot.joints, np.eye(n), strict=True)]
        sum_m = sum(drive.hand_error_m for drive in alone)
        # else those are named that have more than half of the mean
        allowed_m = inf if sum_m <= LARGEST_HAND_ERROR_M else sum_m / (2 * n)
        together = [
            self.drive(f"all joints, {feed_forward.value}", np.full(n, _TOGETHER), feed_forward)
            for feed_forward in (FeedForward.VELOCITY, FeedForward.COMPUTED_TORQUE)
        ]
        return [replace(drive, allowed_error_m=allowed_m) for drive in alone] + together

    def drive(
        self, name: str, moving: F64, feed_forward: FeedForward = FeedForward.VELOCITY
    ) -> JointDrive:
        """Move joints, each by its share ``moving`` [n] of a joint's motions."""
        model, home = self.model, self.robot.home_rad
        lever_m = _levers(model, self.robot)
        slides = model.jnt_type[joint_ids(model, self.robot.joints)] == mujoco.mjtJoint.mjJNT_SLIDE
        below = home - self.limits.q_min
        above = self.limits.q_max - home
        towards = np.where(above >= below, 1.0, -1.0) * (moving > 0)
        step = np.where(slides, STEP_M, STEP_RAD) * towards
        error, moved = self._follow(step[None], MOVE_S, feed_forward)
        far = np.where(slides, FAR_M, FAR_RAD)
        up = moving * np.minimum(far, _ROOM * above)
        down = moving * -np.minimum(far, _ROOM * below)
        longest = up - down
        move_s = max(
            (FAR_S * longest / (2 * far)).max(),
            (lever_m @ longest) / HAND_M_S,
            (pi / 2 * longest / self.limits.velocity).max(),
        )
        model.opt.disableflags ^= mujoco.mjtDisableBit.mjDSBL_CONTACT
        ends = np.stack((up, down, np.zeros_like(up)))
        far_error, _ = self._follow(ends, move_s, feed_forward)
        model.opt.disableflags ^= mujoco.mjtDisableBit.mjDSBL_CONTACT
        hand_m = float((far_error @ lever_m).mean())
        worst = int(error.max(axis=0).argmax())
        shown = int(moving.argmax()) if moving.max() == 1 else worst
        return JointDrive(
            name,
            float(step[shown]),
            float(moved[shown]),
            float(error.max()),
            self.robot.joints[worst],
            hand_m,
            LARGEST_HAND_ERROR_M,
            "m" if slides[shown] else "rad",
        )

    def _follow(self, ends: F64, move_s: float, feed_forward: FeedForward) -> tuple[F64, F64]:
        """Command joints from home to ``ends`` [L, n] beside it, one after the other, and rest
        there; return their distances [M, n] from their references, and how far they are at last.
        """
        servo = self.servo
        q, qd, qdd = _motion(ends, move_s, self.model.opt.timestep)
        q += self.robot.home_rad
        data = _at_home(self.model, servo, self.robot)
        activation = data.ctrl[servo.law.address].copy()
        load_nm = servo.load_torque(q[:-1], qd[1:])
        by_state = feed_forward is FeedForward.COMPUTED_TORQUE
        ahead = servo.targets(q, qd, qdd, load_nm)
        measured = np.empty_like(ahead)
        for row, target in enumerate(ahead):
            if by_state:
                mujoco.mj_step1(self.model, data)
                target = servo.computed_torque(data, q[row], qd[row], qdd[row], load_nm[row])
            ctrl, activation, _ = servo.controls(target[None], activation)
            data.ctrl[servo.law.address] = ctrl[0]
            (mujoco.mj_step2 if by_state else mujoco.mj_step)(self.model, data)
            measured[row] = data.qpos[servo.q_address]
        error = np.nan_to_num(np.abs(measured - q[1:]), nan=_DIVERGED)
        return error, measured[-1] - self.robot.home_rad


def _motion(ends: F64, move_s: float, dt_s: float) -> tuple[F64, F64, F64]:
    """Ways, velocities and accelerations [M, n] from zero to each of ``ends`` [L, n] and a rest."""
    motion_s = len(ends) * move_s
    t_s = np.arange(0.0, motion_s + HOLD_S + dt_s / 2, dt_s)
    leg = np.minimum((t_s / move_s).astype(int), len(ends) - 1)
    begin = np.vstack((np.zeros_like(ends[0]), ends))
    half_way = np.diff(begin, axis=0)[leg] / 2
    # a cosine has bounded acceleration, and begins and ends at rest
    w = pi / move_s
    turn = (w * np.minimum(t_s - leg * move_s, move_s))[:, None]
    moving = half_way * w * (t_s < motion_s + dt_s / 2)[:, None]
    way = begin[leg] + half_way * (1 - np.cos(turn))
    return way, moving * np.sin(turn), moving * w * np.cos(turn)


def _levers(model: mujoco.MjModel, robot: RobotSpec) -> F64:
    """How far each joint [n] moves its limb's hand at home, in m/rad; 1 of a slide."""
    data = data_at(model, joint_ids(model, robot.joints), robot.home_rad)
    mujoco.mj_comPos(model, data)
    levers_m: list[F64] = []
    for limb in robot.limbs:
        jacobian = np.empty((3, model.nv))
        mujoco.mj_jacBody(model, data, jacobian, None, frame_body(model, limb))
        dofs = model.jnt_dofadr[joint_ids(model, limb.joints)]
        levers_m.append(np.linalg.norm(jacobian[:, dofs], axis=0))
    return np.concatenate(levers_m)
