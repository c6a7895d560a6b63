"""Drive each joint of a robot's model, and measure whether it follows.

A small motion shows what an actuator's control means. A larger one, as fast as a task's, shows what
is small near home: a spring, a tendon's end, a weak servo, too little force.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from math import inf, pi

import mujoco
import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.limits import LimitsAssumedWarning, all_limits
from strands_cosmos3.robots.model import (
    data_at,
    frame_body,
    joint_ids,
    load_robot,
    require_servos,
)
from strands_cosmos3.robots.servo import NO_COMPENSATION, JointServo
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


@dataclass(frozen=True)
class JointDrive:
    """What one joint did.

    Args:
        commanded, moved: The commanded small motion, and the measured one at its end; rad or m.
        largest_error: The largest distance of any joint from its reference meanwhile.
        hand_error_m: Mean distance of the hand from its reference in the larger motion, at most.
        allowed_error_m: What this may be: anything, unless the sum over the joints is too large.
        unit: ``"rad"``, or ``"m"`` of a slide.
    """

    joint: str
    commanded: float
    moved: float
    largest_error: float
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
            f"{self.moved:+.3f}, at most {1e3 * self.largest_error:.2f} m{self.unit} off; in a "
            f"larger motion the hand was {1e3 * self.hand_error_m:.2f} mm off"
        )


def drive_joints(robot: RobotSpec) -> list[JointDrive]:
    """Move each joint in turn from home, by :data:`STEP_RAD` towards the middle of its range, then
    by :data:`FAR_RAD` to both sides, and return what was measured.

    The model is the robot's own, with a scene's physics; its servos are commanded as in a scene. In
    the larger motion nothing touches.

    Raises:
        ConfigError: An actuator is not a position servo; further errors as ``load_robot``.
    """
    model = load_robot(robot, simulated=True)
    require_servos(model, robot)
    robot.require_independent("driving its joints")
    servo = JointServo(model, NO_COMPENSATION, *robot.limbs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        limits = all_limits(model, robot)
    drives = [_drive(model, servo, robot, limits, joint) for joint in range(servo.n)]
    sum_m = sum(drive.hand_error_m for drive in drives)
    # else those are named that have more than half of the mean
    allowed_m = inf if sum_m <= LARGEST_HAND_ERROR_M else sum_m / (2 * servo.n)
    return [replace(drive, allowed_error_m=allowed_m) for drive in drives]


def gripper_faults(robot: RobotSpec) -> list[str]:
    """Command each gripper to open and to close, with the arm at home, and return a sentence on
    each whose fingers do not cover :data:`LEAST_GRIP` of the way.
    """
    model = load_robot(robot, simulated=True)
    servo = JointServo(model, NO_COMPENSATION, *robot.limbs)
    steps = round(GRIP_S / model.opt.timestep)
    faults: list[str] = []
    for limb in robot.limbs:
        if (gripper := limb.gripper) is None:
            continue
        data = mujoco.MjData(model)
        data.qpos[servo.q_address] = robot.home_rad
        servo.law.hold(data, servo.actuator_ids, robot.home_rad)
        fingers = model.jnt_qposadr[joint_ids(model, gripper.joints)]
        data.qpos[fingers] = gripper.opening.open_value
        ends: list[float] = []
        for fraction in (1.0, 0.0):
            data.actuator(gripper.actuator).ctrl = gripper.command.from_fraction(fraction)
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
    unit, step, far = "rad", STEP_RAD, FAR_RAD
    if model.joint(name).type[0] == mujoco.mjtJoint.mjJNT_SLIDE:
        unit, step, far = "m", STEP_M, FAR_M
    below = home[joint] - limits.q_min[joint]
    above = limits.q_max[joint] - home[joint]
    commanded = step if above >= below else -step
    error, moved = _follow(model, servo, home, joint, [commanded], MOVE_S)
    ends = [min(far, _ROOM * above), -min(far, _ROOM * below), 0.0]
    longest = ends[0] - ends[1]
    move_s = max(
        FAR_S * longest / (2 * far),
        lever_m[joint] * longest / HAND_M_S,
        pi / 2 * longest / limits.velocity[joint],
    )
    model.opt.disableflags ^= mujoco.mjtDisableBit.mjDSBL_CONTACT
    far_error, _ = _follow(model, servo, home, joint, ends, move_s)
    model.opt.disableflags ^= mujoco.mjtDisableBit.mjDSBL_CONTACT
    hand_m = float((far_error @ lever_m).mean())
    return JointDrive(name, commanded, moved, float(error.max()), hand_m, 0.0, unit)


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


def _follow(
    model: mujoco.MjModel,
    servo: JointServo,
    home: F64,
    joint: int,
    ends: list[float],
    move_s: float,
) -> tuple[F64, float]:
    """Command a joint from home to ``ends`` beside it, one after the other, and rest there; return
    all joints' distances [M, n] from their references, and how far the joint is at last.
    """
    dt_s = model.opt.timestep
    motion_s = len(ends) * move_s
    t_s = np.arange(0.0, motion_s + HOLD_S + dt_s / 2, dt_s)
    leg = np.minimum((t_s / move_s).astype(int), len(ends) - 1)
    begin = np.array([0.0, *ends])
    half_way = np.diff(begin)[leg] / 2
    # a cosine has bounded acceleration, and begins and ends at rest
    w = pi / move_s
    turn = w * np.minimum(t_s - leg * move_s, move_s)
    moving = half_way * w * (t_s < motion_s + dt_s / 2)
    motion = np.zeros((3, len(t_s), servo.n))
    motion[0, :, joint] = begin[leg] + half_way * (1 - np.cos(turn))
    motion[1, :, joint] = moving * np.sin(turn)
    motion[2, :, joint] = moving * w * np.cos(turn)
    q, qd, qdd = motion
    q += home
    data = mujoco.MjData(model)
    data.qpos[servo.q_address] = home
    servo.law.hold(data, servo.actuator_ids, home)
    targets = servo.targets(q, qd, qdd, servo.load_torque(q[:-1], qd[1:]))
    ctrl, _, _ = servo.controls(targets, servo.law.ctrl(home))
    measured = np.empty_like(ctrl)
    for row, ctrl_of_step in enumerate(ctrl):
        data.ctrl[servo.actuator_ids] = ctrl_of_step
        mujoco.mj_step(model, data)
        measured[row] = data.qpos[servo.q_address]
    error = np.nan_to_num(np.abs(measured - q[1:]), nan=_DIVERGED)
    return error, float(measured[-1, joint] - home[joint])
