"""The arms of a policy: measured poses, joint targets, the model of a simulator that drives them,
and steps at the caller's control frequency.

Chunks are resampled by time and not by row. A step's time is when its target is due: the k-th of a
run of steps at ``hz`` is due ``(k + 1) / hz`` after the observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.collision import Obstacle
from strands_cosmos3.embodiments import Embodiment, GripperConvention
from strands_cosmos3.errors import (
    BackendError,
    ConfigError,
    ControlError,
    InputError,
    ObservationError,
)
from strands_cosmos3.extras import needed_by
from strands_cosmos3.observe.mapping import RobotMapping
from strands_cosmos3.policy.options import ArmOptions
from strands_cosmos3.robots.catalogue import get_robot, packaged_robots
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.spec import RobotSpec
from strands_cosmos3.types import OFF_POSE_M, ActionChunk, JointTrajectory, Observation

_START_TOLERANCE_RAD = 0.02
_MOST_STEPS = 100_000
_ROUNDING_RAD = 1e-6
_NOT_EXECUTED = "the chunk is not executed. Rows must be joint angles in rad of the robot"


class PolicyArm:
    """Kinematics and limits of the limbs that a policy answers targets for, joined with the
    embodiment's columns by name.

    Args:
        robot: The robot.
        options: Its model, limits, obstacles, lead and bound. Without obstacles, they are what
            :meth:`surround` tells.

    Raises:
        ConfigError, UnknownNameError, EnvironmentalError: The model cannot be used.
    """

    def __init__(self, robot: str | RobotSpec, options: ArmOptions):
        self._options = options
        self._robot = get_robot(robot)
        self._robot.require_independent("a policy")
        self._build(tuple(options.obstacles or ()))
        self._lead_s: F64 | None = None
        self._foreign: ConfigError | None = None
        self._begun = False

    def _build(self, obstacles: tuple[Obstacle, ...]) -> None:
        with needed_by("inverse kinematics"):
            from strands_cosmos3.control.limb_ik import LimbIK
            from strands_cosmos3.robots.limits import limits_of_arm
            from strands_cosmos3.robots.model import load_model, load_with_obstacles
        self._obstacles, robot, limits = obstacles, self._robot, self._options.limits
        alone = len(robot.limbs) == 1
        arm_model = self._options.arm_model
        if alone and arm_model is not None:
            model = load_model(arm_model, obstacles)
        elif arm_model is None and robot is packaged_robots().get(robot.name):
            model = _packaged_model(robot.name, obstacles)
        else:
            model = load_with_obstacles(arm_model, robot, obstacles)
        if alone:
            of_limb = limits_of_arm(model, robot) if limits is None else limits
            limbs = {robot.limbs[0].name: of_limb}
        else:
            limbs = None
        bound_m = self._options.off_pose_bound_m
        self._ik = LimbIK(robot, model=model, limits=limbs, off_pose_bound_m=bound_m)
        self._all_limits = self._ik.limits if alone or limits is None else limits

    def surround(self, obstacles: Sequence[Obstacle]) -> None:
        """Take what a robot knows of its surroundings, unless obstacles were given or the model
        is compiled and has its own.
        """
        from strands_cosmos3.robots.model import is_compiled

        if (
            self._options.obstacles is None
            and not is_compiled(self._options.arm_model)
            and tuple(obstacles) != self._obstacles
        ):
            state = self.snapshot()
            self._build(tuple(obstacles))
            self.restore(state)

    def reset(self) -> None:
        """Start a new episode: its first configuration becomes the posture that redundant joints
        are drawn to.
        """
        self._begun = False

    def snapshot(self) -> tuple[bool, dict[str, F64]]:
        """Return what it remembers of the episode."""
        postures = {name: bridge.posture_rad for name, bridge in self._ik.bridges.items()}
        return self._begun, postures

    def restore(self, state: tuple[bool, dict[str, F64]]) -> None:
        """Return to a snapshot."""
        self._begun, postures = state
        for name, posture_rad in postures.items():
            self._ik.bridges[name].posture_rad = posture_rad

    def in_column_order(self, gripper: float | F64, embodiment: Embodiment) -> float | F64:
        """Return the grippers' open fractions, given in the order of the limbs, in that of the
        columns.
        """
        if not isinstance(gripper, np.ndarray):
            return gripper
        owners = [limb.name for limb in self._robot.limbs if limb.gripper is not None]
        names = {columns.name: limb.name for limb, columns in self._ik.join(embodiment)}
        return gripper[
            [
                owners.index(names[columns.name])
                for columns in embodiment.limbs
                if names.get(columns.name) in owners
            ]
        ]

    def T_base_cosmos(self, q_rad: F64, embodiment: Embodiment) -> dict[str, F64]:
        """Return the poses [4, 4] of the frames whose deltas the model predicts, by the name of
        their columns, at joint angles [n].
        """
        q = self._configuration(q_rad)
        T_base_frame = self._ik.forward(q)
        return {
            columns.name: T_base_frame[limb.name] @ self._ik.tool_frame(limb, columns, q)
            for limb, columns in self._ik.join(embodiment)
        }

    def solve(
        self,
        chunk: ActionChunk,
        observation: Observation,
        answer_error: type[BackendError] = BackendError,
    ) -> JointTrajectory:
        """Joint angles that follow a chunk from the observation's anchor, at the chunk's own row
        times. Rows of joint angles outside the joints' ranges raise ``answer_error``.
        """
        chunk = self._in_range(chunk, answer_error)
        anchor = observation.q_rad if observation.q_anchor_rad is None else observation.q_anchor_rad
        q = self._configuration(anchor)
        if not self._begun:
            self._begun = True
            for bridge in self._ik.bridges.values():
                bridge.posture_rad = q[bridge.q_address]
        return self._ik.follow(chunk, q, observation.t_capture_s)

    def _in_range(self, chunk: ActionChunk, answer_error: type[BackendError]) -> ActionChunk:
        """A chunk whose joint angles, if it has any, are inside their ranges; a limit that float32
        rounded up is the limit.
        """
        if chunk.action_space.meaning != "joint_position":
            return chunk
        limits = self._all_limits
        rows = chunk.action.copy()
        q_rad = rows[:, :-1]
        remedy = f"{_NOT_EXECUTED} {self._robot.name!r}."
        limits.require_rows(q_rad, answer_error, remedy, _ROUNDING_RAD)
        q_rad.clip(limits.q_min, limits.q_max, out=q_rad)
        return replace(chunk, action=rows)

    @staticmethod
    def account(plan: JointTrajectory) -> dict[str, Any]:
        """For ``last_rollout``: ``collision``, the report of the check, ``off_pose_mm``, row -> mm
        where over 1 mm off, and ``off_pose_held``, the number of rows that hold the arm for it.
        """
        off_pose_mm = {
            int(row): float(plan.residual_m[row] * 1e3)
            for row in np.flatnonzero(plan.residual_m > OFF_POSE_M)
        }
        return {
            "collision": plan.collision.to_dict(),
            "off_pose_mm": off_pose_mm,
            "off_pose_held": int(plan.held.sum()),
        }

    def steps(
        self, plan: JointTrajectory, observation: Observation, hz: float | None
    ) -> tuple[JointTrajectory, F64]:
        """A plan at the caller's rate (None: its own), and the motion's own time at the end of
        each step.
        """
        return (
            (plan, plan.t_s)
            if hz is None
            else resample(plan, observation, hz, self._all_limits, self._lead_s)
        )

    def bind_model(
        self, model: Any, namespace: str, mapping: RobotMapping
    ) -> list[GripperConvention | None]:
        """Bind the arms that a simulator drives; return the grippers' units, limb by limb, or None
        to keep the present one.

        Raises:
            ConfigError: It lacks a joint or a gripper's actuator, is another robot, or the mapping
                commands another joint than it observes; :meth:`require_known` raises it again.
        """
        from strands_cosmos3.robots.hosted import (
            driven_gripper,
            require_actuators,
            require_robot,
            servo_lead_of,
        )

        self._foreign = None
        joints = mapping.joint_keys
        grippers = mapping.gripper_keys
        try:
            require_robot(model, namespace, joints, self._robot)
            require_actuators(
                model, namespace, joints, mapping.joint_commands, grippers, self._robot
            )
        except ConfigError as error:
            self._foreign = error
            raise
        self._lead_s = servo_lead_of(model, namespace, joints) if self._options.servo_lead else None
        specs = [limb.gripper for limb in self._robot.limbs]
        return [
            driven_gripper(model, namespace, key, gripper)
            for key, gripper in zip(grippers, specs, strict=True)
        ]

    def require_known(self) -> None:
        """Raise the error with which :meth:`bind_model` refused the simulator's arm, if it did."""
        if self._foreign is not None:
            raise self._foreign

    def _configuration(self, q_rad: F64) -> F64:
        """[nq] of the model, from angles [n] in range, to a tolerance. Fingers are open, as wide as
        they can meet things.
        """
        q = self._ik.home.copy()
        limits = self._all_limits
        if len(q_rad) != len(self._ik.q_address):
            raise InputError(f"{len(q_rad)} joint angles for an arm of {len(self._ik.q_address)}.")
        limits.require_start(q_rad, _START_TOLERANCE_RAD, ObservationError)
        q[self._ik.q_address] = q_rad
        return q


def resample(
    plan: JointTrajectory,
    observation: Observation,
    hz: float,
    limits: JointLimits,
    lead_s: F64 | None = None,
) -> tuple[JointTrajectory, F64]:
    """The same motion at another rate, from the measured state, within the joints' limits.

    Args:
        plan: Rows of joint angles.
        observation: Where the arm is, and how fast.
        hz: Steps a second.
        limits: Joint limits.
        lead_s: [n] lag of the position servos that each step is for. Such a servo is ``lead_s``
            behind a target that moves, so it is given ``q + lead_s qd``, in the middle of the
            period for which it is given it.

    Returns:
        The steps [K], and the motion's own time at the end of each [K].
    """
    from strands_cosmos3.control.trajectory import JointState, plan_motion

    assert observation.qd_rad_s is not None  # Observation fills it
    # measured, so it may lie a little beyond
    speed = np.clip(observation.qd_rad_s, -limits.velocity, limits.velocity)
    start = JointState(observation.q_rad, speed, np.zeros_like(observation.q_rad))
    _require_few(plan.t_s[-1], hz)
    rows = plan.q_rad, plan.t_s, limits, 1.0 / hz
    try:
        motion = plan_motion(start, *rows)
    except ControlError:  # the rows cannot be met from that speed; from rest they always can
        motion = plan_motion(JointState.at_rest(observation.q_rad), *rows)
    at_s = _ticks(motion.spline.end_s, hz)
    if lead_s is None:
        q, _, _ = motion.spline.sample(at_s)
    else:
        q, qd, _ = motion.spline.sample(at_s - 0.5 / hz)
        q = np.clip(q + lead_s * qd, limits.q_min, limits.q_max)
    gripper = plan.gripper
    if gripper is not None:  # a first row due now is merged into the start
        gripper = gripper[-(len(motion.nominal_s) - 1) :][motion.spline.segment(at_s - 1e-9)]
    steps = JointTrajectory(q, at_s, gripper, t_capture_s=plan.t_capture_s)
    return steps, np.interp(at_s, motion.spline.t_s, motion.nominal_s)


def resample_rows(chunk: ActionChunk, hz: float) -> tuple[F64, F64]:
    """A chunk's raw rows at another rate, where they can be: joint angles are interpolated, the
    gripper is held.

    Other rows stay as they are: a delta says what happens in one period of the chunk's own rate.

    Returns:
        The rows [K, D], and when each is due after the observation [K].
    """
    due_s = chunk.row_times_s
    rows = chunk.action
    if chunk.action_space.meaning != "joint_position" or due_s[-1] <= 0:
        return rows, due_s
    at_s = _ticks(due_s[-1], hz)
    joints: list[F64] = [np.interp(at_s, due_s, angles_rad) for angles_rad in rows.T[:-1]]
    next_row = np.minimum(np.searchsorted(due_s, at_s - 1e-9), len(rows) - 1)
    return np.column_stack((*joints, rows[next_row, -1])), at_s


@lru_cache(maxsize=4)
def _packaged_model(robot: str, obstacles: tuple[Obstacle, ...]) -> Any:
    """The model of a robot of this package among obstacles, which policies of a process share, as
    those of an evaluation's episodes: none writes to it.
    """
    from strands_cosmos3.robots.model import load_with_obstacles

    return load_with_obstacles(None, get_robot(robot), obstacles)


def _ticks(end_s: float, hz: float) -> F64:
    """[K] ends of the control periods until ``end_s``, at least one."""
    _require_few(end_s, hz)
    return np.arange(1, max(1, int(np.ceil(end_s * hz - 1e-9))) + 1) / hz


def _require_few(end_s: float, hz: float) -> None:
    if end_s * hz > _MOST_STEPS:
        raise InputError(
            f"{end_s:g} s at {hz:g} Hz are more than {_MOST_STEPS} steps; give a lower rate."
        )


def steps_of_rows(rows: int, fps: float | None, hz: float | None, lead: int = 1) -> int:
    """Return the control steps that rows take where limits do not ask for more time; without a
    rate, a row is a step.

    ``lead`` 0 ends where the last one is due of those whose first is due at once, 1 a period after
    that.
    """
    if hz is None or fps is None:
        return max(1, rows)
    steps = (rows - 1 + lead) / fps * hz - 1e-9
    return max(1, int(np.ceil(min(steps, _MOST_STEPS))))
