"""The executor: joint trajectories in, one reference per physics step out.

It owns the reference, not the arm. It plans a trajectory from the present reference and velocity, samples it on the physics
clock and appends a stop: without a fresh trajectory in time, the arm brakes within its limits and holds. Every reference
that it hands out is finite and within the joints' limits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from enum import StrEnum

import numpy as np

from strands_cosmos3.checks import F64, finite_array, instance_of, positive, whole_number
from strands_cosmos3.control.trajectory import JointState, PlannedMotion, StopProfile, plan_motion, plan_stop
from strands_cosmos3.errors import ActuatorGuardError, ControlError, InputError
from strands_cosmos3.robots.panda import JointLimits
from strands_cosmos3.types import JointTrajectory

_LIMIT_SLACK_RAD = 2e-6
_RATE_SLACK = 1.005


class ExecutorState(StrEnum):
    """State of the reference."""

    IDLE = "idle"
    RUNNING = "running"
    HOLD = "hold"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAULT = "fault"


@dataclass(frozen=True, eq=False)
class ReferenceBlock:
    """The reference at M consecutive physics steps: angles, velocities, accelerations [M, n] and open fractions [M].

    ``nominal_s`` [M] is the unstretched time of the chunk at each step; NaN while braking or holding.
    """

    q_rad: F64
    qd_rad_s: F64
    qdd_rad_s2: F64
    gripper: F64
    nominal_s: F64

    def __len__(self) -> int:
        return len(self.q_rad)

    def rows(self, first: int, last: int) -> ReferenceBlock:
        """Return steps ``first`` to ``last - 1``; steps past the end rest at the last one."""
        index = np.arange(first, last)
        over = index >= len(self)
        index = np.minimum(index, len(self) - 1)
        still = ~over[:, None]
        q, qd, qdd = self.q_rad[index], self.qd_rad_s[index] * still, self.qdd_rad_s2[index] * still
        return ReferenceBlock(q, qd, qdd, self.gripper[index], np.where(over, np.nan, self.nominal_s[index]))


class Executor:
    """Turns joint trajectories into references on the physics clock.

    Args:
        limits, dt_s: Limits of the joints, and the physics step.
        q_rad, gripper: Initial reference [n], at rest, and open fraction.

    Attributes:
        state: State of the reference.
        counters: ``chunks`` accepted, ``holds`` (the motion ended), ``restarts`` (chunks that could only be followed after a
            stop), ``limited_by_joint_end`` (chunks whose acceleration jumps between rows that lie at a joint's end),
            ``stops``, ``faults``.
    """

    def __init__(self, limits: JointLimits, dt_s: float, q_rad: F64, gripper: float = 1.0):
        self.limits = instance_of(limits, JointLimits, "limits")
        self.dt_s = positive(dt_s, "dt_s")
        q = finite_array(q_rad, "q_rad", (len(limits.velocity),))
        if (q < limits.q_min).any() or (q > limits.q_max).any():
            joint = int(np.argmax((q < limits.q_min) | (q > limits.q_max)))
            raise InputError(
                f"q_rad[{joint}] = {q[joint]:.4f} rad lies outside the joint's range "
                f"[{limits.q_min[joint]:.4f}, {limits.q_max[joint]:.4f}]; start the arm inside it."
            )
        self.state = ExecutorState.IDLE
        self.counters: Counter[str] = Counter()
        self._gripper = float(finite_array(gripper, "gripper", ()))
        if not 0.0 <= self._gripper <= 1.0:
            raise InputError(f"gripper must be an open fraction in [0, 1] (1 = open), got {self._gripper:g}.")
        self._knot_step = np.zeros(1, dtype=int)
        self._motion_from_s = 0.0
        zeros = np.zeros((1, len(q)))
        still = ReferenceBlock(q[None].copy(), zeros, zeros, np.array([self._gripper]), np.array([np.nan]))
        self._plan, self._n_motion, self._cursor = still, 0, 0
        self._before = 0, self._gripper  # at the start of the steps handed out last

    def _follow(self, plan: ReferenceBlock, n_motion: int = 0) -> None:
        """Switch to a new plan, whose row 0 is the present reference."""
        self._motion_from_s += self._nominal_now_s()
        plan.q_rad[:] = self._without_rounding(plan.q_rad)
        self._plan, self._n_motion, self._cursor = plan, n_motion, 0
        self._before = 0, self._gripper

    def _without_rounding(self, q_rad: F64) -> F64:
        """Angles with rounding errors at the joints' ends removed; larger excesses are left to the guard.

        A stop planned to end at a joint's end may overshoot it by a micro-radian; no motion from there is within the limits.
        """
        inside = np.clip(q_rad, self.limits.q_min, self.limits.q_max)
        return np.where(np.abs(q_rad - inside) <= _LIMIT_SLACK_RAD, inside, q_rad)

    @property
    def reference(self) -> JointState:
        """Reference at the last step handed out."""
        now = self._plan.rows(self._cursor, self._cursor + 1)
        return JointState(now.q_rad[0], now.qd_rad_s[0], now.qdd_rad_s2[0])

    @property
    def rows_begun(self) -> int:
        """Number of rows of the present trajectory that have been reached or are under way."""
        return min(int(np.searchsorted(self._knot_step, self._cursor, side="left")), len(self._knot_step) - 1)

    @property
    def rows_reached(self) -> int:
        """Number of rows of the present trajectory that have been reached."""
        return int(np.searchsorted(self._knot_step[1:], self._cursor, side="right"))

    @property
    def motion_s(self) -> float:
        """Time on the motion's clock, which slows down while time is stretched and stops while the arm holds."""
        return self._motion_from_s + self._nominal_now_s()

    def _nominal_now_s(self) -> float:
        nominal_s = self._plan.nominal_s[: self._cursor + 1]
        moving = nominal_s[np.isfinite(nominal_s)]
        return float(moving[-1]) if len(moving) else 0.0

    def steps_to_row(self, row: int) -> int:
        """Physics steps until the reference reaches a row (from 0) of the present trajectory; 0 if it has already."""
        return max(int(self._knot_step[min(row + 1, len(self._knot_step) - 1)]) - self._cursor, 0)

    def accept(self, trajectory: JointTrajectory) -> PlannedMotion:
        """Follow a trajectory from the next step on, in place of the present motion, which continues after an error.

        Raises:
            InputError: It is not a :class:`JointTrajectory`.
            ControlError: The executor is in FAULT, or the trajectory cannot be followed within the limits even from rest.
        """
        if self.state is ExecutorState.FAULT:
            raise ControlError("the executor is in FAULT; reset the robot before it moves again.")
        trajectory = instance_of(trajectory, JointTrajectory, "trajectory")
        q, t_s = trajectory.q_rad, trajectory.t_s
        self._require_in_range(q)
        start, lead = self.reference, None
        try:
            motion = plan_motion(start, q, t_s, self.limits, self.dt_s)
        except ControlError:
            lead = plan_stop(start, self.limits)
            rest = JointState.at_rest(self._without_rounding(lead.sample(np.array([lead.end_s]))[0][0]))
            motion = plan_motion(rest, q, t_s, self.limits, self.dt_s)
            self.counters["restarts"] += 1
        n_rows = len(motion.nominal_s) - 1  # a first row due now is merged into the start
        gripper = np.full(n_rows, self._gripper) if trajectory.gripper is None else trajectory.gripper[-n_rows:]
        self._lay_out(motion, gripper, lead)
        self.state = ExecutorState.RUNNING
        self.counters["chunks"] += 1
        self.counters["limited_by_joint_end"] += not motion.smooth
        return motion

    def _require_in_range(self, q: F64) -> None:
        limits = self.limits
        if q.shape[1] != len(limits.velocity):
            raise ControlError(f"the trajectory has {q.shape[1]} joints, but the arm has {len(limits.velocity)}.")
        if (outside := np.argwhere((q < limits.q_min) | (q > limits.q_max))).size:
            row, joint = (int(i) for i in outside[0])
            raise ControlError(
                f"row {row} commands joint {joint} to {q[row, joint]:.4f} rad, outside its range "
                f"[{limits.q_min[joint]:.4f}, {limits.q_max[joint]:.4f}]; nothing was changed."
            )

    def stop(self) -> None:
        """Brake within the limits and stay at rest. The gripper keeps its last command; a FAULT remains one."""
        self._follow(_braking(plan_stop(self.reference, self.limits), self._gripper, self.dt_s))
        self._knot_step = np.zeros(1, dtype=int)
        if self.state is not ExecutorState.FAULT:
            self.state = ExecutorState.STOPPING
        self.counters["stops"] += 1

    def fault(self, followed: bool = True) -> None:
        """Brake as :meth:`stop`, and reject every later trajectory.

        If the arm has not ``followed`` the steps handed out last, braking begins at the reference before them.
        """
        if not followed:
            self._cursor, self._gripper = self._before
        self.stop()
        self.state = ExecutorState.FAULT
        self.counters["faults"] += 1

    def advance(self, n_steps: int) -> ReferenceBlock:
        """Return the reference for the next ``n_steps`` physics steps.

        Raises:
            InputError: ``n_steps`` is not a whole number of at least 1.
            ActuatorGuardError: The reference is not finite or exceeds a limit. It is withheld, and the executor brakes (FAULT).
        """
        n_steps = whole_number(n_steps, "n_steps", 1)
        block = self._plan.rows(self._cursor + 1, self._cursor + 1 + n_steps)
        try:
            self._guard(block)
        except ActuatorGuardError:
            self.fault()
            raise
        self._before = self._cursor, self._gripper
        self._cursor += n_steps
        self._gripper = float(block.gripper[-1])
        if self.state is ExecutorState.RUNNING and self._cursor > self._n_motion:
            self.state = ExecutorState.HOLD
            self.counters["holds"] += 1
        elif self.state is ExecutorState.STOPPING and self._cursor >= len(self._plan):
            self.state = ExecutorState.STOPPED
        return block

    def _guard(self, block: ReferenceBlock) -> None:
        limits = self.limits
        good = (
            (block.q_rad >= limits.q_min - _LIMIT_SLACK_RAD).all()
            and (block.q_rad <= limits.q_max + _LIMIT_SLACK_RAD).all()
            and (np.abs(block.qd_rad_s) <= limits.velocity * _RATE_SLACK).all()
            and (np.abs(block.qdd_rad_s2) <= limits.acceleration * _RATE_SLACK).all()
            and ((block.gripper >= 0) & (block.gripper <= 1)).all()
        )  # every comparison is false for NaN
        if not good:
            raise ActuatorGuardError(
                f"the reference exceeds its limits or is not finite (q {block.q_rad[0]}, qd {block.qd_rad_s[0]}); it was "
                "withheld, and the arm brakes from the last good reference."
            )

    def _lay_out(self, motion: PlannedMotion, gripper_rows: F64, lead: StopProfile | None) -> None:
        """Sample the lead-in, the motion and the final stop on the physics clock. Row 0 is the present reference."""
        spline, dt_s = motion.spline, self.dt_s
        n_motion = int(np.ceil(spline.end_s / dt_s - 1e-9))
        at_s = np.arange(n_motion + 1, dtype=np.float64) * dt_s
        q, qd, qdd = spline.sample(at_s)
        if lead is None:
            qdd[0] = self.reference.qdd_rad_s2  # the new motion has not begun, and may still be replaced
        segment = np.clip(np.searchsorted(spline.t_s, at_s, side="left") - 1, 0, len(gripper_rows) - 1)
        stop = plan_stop(JointState(q[-1], qd[-1], qdd[-1]), self.limits)
        into_s = float(at_s[-1]) - spline.end_s  # braking begins at the last row, seldom on a step
        tail = _braking(stop, float(gripper_rows[-1]), dt_s, into_s)
        q[-1], qd[-1], qdd[-1] = tail.q_rad[0], tail.qd_rad_s[0], tail.qdd_rad_s2[0]
        body = ReferenceBlock(q, qd, qdd, gripper_rows[segment], np.interp(at_s, spline.t_s, motion.nominal_s))
        head = [] if lead is None else [_braking(lead, self._gripper, dt_s)]
        n_head = len(head[0]) - 1 if head else 0
        self._knot_step = n_head + np.ceil(spline.t_s / dt_s - 1e-9).astype(int)
        self._follow(_joined([*head, body, tail]), n_head + n_motion)


def _braking(profile: StopProfile, gripper: float, dt_s: float, into_s: float = 0.0) -> ReferenceBlock:
    """A stop on the physics clock; row 0 is ``into_s`` after its start. Its nominal time is NaN."""
    n = int(np.ceil(profile.end_s / dt_s)) + 1
    q, qd, qdd = profile.sample(np.arange(n + 1, dtype=np.float64) * dt_s + into_s)
    return ReferenceBlock(q, qd, qdd, np.full(n + 1, gripper), np.full(n + 1, np.nan))


def _joined(blocks: list[ReferenceBlock]) -> ReferenceBlock:
    """Concatenate blocks; the first row of each is the last of the previous one."""
    rest = [blocks[0], *(block.rows(1, len(block)) for block in blocks[1:])]
    return ReferenceBlock(*(np.concatenate([vars(block)[field.name] for block in rest]) for field in fields(ReferenceBlock)))
