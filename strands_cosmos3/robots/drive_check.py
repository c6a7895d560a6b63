"""Drive each joint of a robot's model a little, and measure whether it follows."""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.robots.model import PHYSICS_HZ, load_robot, require_servos
from strands_cosmos3.robots.servo import NO_COMPENSATION, JointServo
from strands_cosmos3.robots.spec import RobotSpec

STEP_RAD = 0.05
STEP_M = 0.02
"""The commanded motion of a hinge and of a slide, within :data:`MOVE_S`."""
MOVE_S = 1.0
HOLD_S = 0.5
LARGEST_ERROR = 0.04
"""Distance from the reference, as a share of the commanded motion, up to which a joint follows."""


@dataclass(frozen=True)
class JointDrive:
    """What one joint did.

    Args:
        commanded, moved: The commanded motion, and the measured one at its end; rad or m.
        largest_error: The largest distance of any joint from its reference meanwhile.
        unit: ``"rad"``, or ``"m"`` of a slide.
    """

    joint: str
    commanded: float
    moved: float
    largest_error: float
    unit: str

    @property
    def follows(self) -> bool:
        """Whether the joint moved as commanded, and the others stayed."""
        return self.largest_error <= LARGEST_ERROR * abs(self.commanded)

    def __str__(self) -> str:
        return (
            f"{self.joint}: commanded {self.commanded:+.3f} {self.unit}, moved {self.moved:+.3f}, "
            f"at most {1e3 * self.largest_error:.2f} m{self.unit} off"
        )


def drive_joints(robot: RobotSpec) -> list[JointDrive]:
    """Move each joint in turn from home, by :data:`STEP_RAD` towards the middle of its range, and
    return what was measured.

    The model is the robot's own, without gravity, as a scene compensates it; its servos are
    commanded as in a scene.

    Raises:
        ConfigError: An actuator is not a position servo; further errors as ``load_robot``.
    """
    model = load_robot(robot)
    require_servos(model, robot)
    model.opt.timestep = 1.0 / PHYSICS_HZ
    model.opt.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    model.opt.gravity[:] = 0.0
    robot.require_independent("driving its joints")
    servo = JointServo(model, NO_COMPENSATION, *robot.limbs)
    return [
        _drive(model, servo, robot.home_rad, joint, name) for joint, name in enumerate(robot.joints)
    ]


def _drive(
    model: mujoco.MjModel, servo: JointServo, home: F64, joint: int, name: str
) -> JointDrive:
    j = model.joint(name).id
    slide = model.jnt_type[j] == mujoco.mjtJoint.mjJNT_SLIDE
    low, high = model.jnt_range[j] if model.jnt_limited[j] else (-np.inf, np.inf)
    step = STEP_M if slide else STEP_RAD
    commanded = step if high - home[joint] >= home[joint] - low else -step
    dt_s = model.opt.timestep
    t_s = np.arange(0.0, MOVE_S + HOLD_S + dt_s / 2, dt_s)
    # a cosine has bounded acceleration, and begins and ends at rest
    w = np.pi / MOVE_S
    moves = t_s < MOVE_S + dt_s / 2
    turn = w * np.minimum(t_s, MOVE_S)
    motion = np.zeros((3, len(t_s), servo.n))
    motion[:, :, joint] = 1 - np.cos(turn), moves * w * np.sin(turn), moves * w * w * np.cos(turn)
    motion *= commanded / 2
    q, qd, qdd = motion
    q += home
    data = mujoco.MjData(model)
    data.qpos[servo.q_address] = home
    servo.law.hold(data, servo.actuator_ids, home)
    targets = servo.velocity_feed_forward(q[:-1], qd[1:], qdd[:-1])
    ctrl, _, _ = servo.controls(targets, servo.law.ctrl(home))
    measured = np.empty_like(ctrl)
    for row, ctrl_of_step in enumerate(ctrl):
        data.ctrl[servo.actuator_ids] = ctrl_of_step
        mujoco.mj_step(model, data)
        measured[row] = data.qpos[servo.q_address]
    largest = float(np.nan_to_num(np.abs(measured - q[1:]), nan=np.inf).max())
    moved = float(measured[-1, joint] - home[joint])
    return JointDrive(name, commanded, moved, largest, "m" if slide else "rad")
