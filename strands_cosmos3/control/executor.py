"""The executor: joint trajectories in, one reference for every physics step out.

It owns the reference, never the arm. A trajectory is planned from where the reference is and with the speed it has, laid
out on the physics clock, and followed by a stop: where no fresh trajectory arrives in time the arm brakes within its
limits and holds. Nothing leaves it that is not finite and inside the joints' limits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from strands_cosmos3.checks import F64, finite_array, instance_of, positive, whole_number
from strands_cosmos3.control.trajectory import (
    JointState,
    PlannedMotion,
    StopProfile,
    plan_motion,
    plan_stop,
)
from strands_cosmos3.errors import ActuatorGuardError, ControlError, InputError
from strands_cosmos3.robots.panda import JointLimits
from strands_cosmos3.types import JointTrajectory

_LIMIT_SLACK_RAD = 2e-6
_RATE_SLACK = 1.005


class ExecutorState(StrEnum):
    """What the reference is doing."""

    IDLE = "idle"
    RUNNING = "running"
    HOLD = "hold"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAULT = "fault"


@dataclass(frozen=True, eq=False)
class ReferenceBlock:
    """The reference at M consecutive physics steps.

    Args:
        q_rad: [M, n] angles.
        qd_rad_s: [M, n] velocities.
        qdd_rad_s2: [M, n] accelerations.
        gripper: [M] open fractions.
        nominal_s: [M] the chunk's own (unstretched) time at each step; NaN while braking or holding.
    """

    q_rad: F64
    qd_rad_s: F64
    qdd_rad_s2: F64
    gripper: F64
    nominal_s: F64

    def __len__(self) -> int:
        return len(self.q_rad)

    def rows(self, first: int, last: int) -> ReferenceBlock:
        """Steps ``first`` to ``last - 1``; past the end the last one stands still."""
        index = np.arange(first, last)
        over = index >= len(self)
        index = np.minimum(index, len(self) - 1)
        still = ~over[:, None]
        return ReferenceBlock(
            self.q_rad[index],
            self.qd_rad_s[index] * still,
            self.qdd_rad_s2[index] * still,
            self.gripper[index],
            np.where(over, np.nan, self.nominal_s[index]),
        )


class Executor:
    """Turns joint trajectories into references on the physics clock.

    Args:
        limits: What the joints may do.
        dt_s: Physics step.
        q_rad: [n] where the reference starts, at rest.
        gripper: Open fraction it starts with.

    Attributes:
        state: What the reference is doing.
        counters: Events by name: ``chunks`` accepted, ``holds`` (the motion ended), ``restarts`` (chunks that could only be
            followed after a stop), ``limited_by_joint_end`` (chunks whose acceleration jumps between rows, because rows lie
            at a joint's end), ``stops``, ``faults``.
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
        self._gripper = _open_fraction(gripper)
        self._knot_step = np.zeros(1, dtype=int)
        self._motion_from_s = 0.0
        self._plan, self._n_motion, self._cursor = _still(q, self._gripper), 0, 0
        self._before = 0, self._gripper  # where the steps handed out last began

    def _follow(self, plan: ReferenceBlock, n_motion: int = 0) -> None:
        """Hand out a new plan from its row 1 on; row 0 is the present reference."""
        self._motion_from_s += self._nominal_now_s()
        plan.q_rad[:] = self._without_rounding(plan.q_rad)
        self._plan, self._n_motion, self._cursor = plan, n_motion, 0
        self._before = 0, self._gripper

    def _without_rounding(self, q_rad: F64) -> F64:
        """Angles brought back inside the joints' range where rounding alone has left them beyond it.

        A stop planned to end at a joint's end may miss it by a micro-radian, and from beyond it no motion would be lawful. What
        is further out is left for the guard to see.
        """
        inside = np.clip(q_rad, self.limits.q_min, self.limits.q_max)
        return np.where(np.abs(q_rad - inside) <= _LIMIT_SLACK_RAD, inside, q_rad)

    @property
    def reference(self) -> JointState:
        """The reference at the last step handed out."""
        now = self._plan.rows(self._cursor, self._cursor + 1)
        return JointState(now.q_rad[0], now.qd_rad_s[0], now.qdd_rad_s2[0])

    @property
    def rows_begun(self) -> int:
        """Rows of the present trajectory that have been reached or are on their way."""
        return min(int(np.searchsorted(self._knot_step, self._cursor, side="left")), len(self._knot_step) - 1)

    @property
    def rows_reached(self) -> int:
        """Rows of the present trajectory that have been reached."""
        return int(np.searchsorted(self._knot_step[1:], self._cursor, side="right"))

    @property
    def motion_s(self) -> float:
        """How far the motion has come on its own clock, which stands still while time is stretched or the arm holds."""
        return self._motion_from_s + self._nominal_now_s()

    def _nominal_now_s(self) -> float:
        nominal_s = self._plan.nominal_s[: self._cursor + 1]
        known = nominal_s[np.isfinite(nominal_s)]
        return float(known[-1]) if len(known) else 0.0

    def steps_to_row(self, row: int) -> int:
        """Physics steps until the reference reaches a row (counted from 0) of the present trajectory; 0 if it has."""
        return max(int(self._knot_step[min(row + 1, len(self._knot_step) - 1)]) - self._cursor, 0)

    def accept(self, trajectory: JointTrajectory) -> PlannedMotion:
        """Follow a trajectory from the next step on, whatever was going on before.

        Raises:
            InputError: It is no :class:`JointTrajectory`.
            ControlError: The executor is in FAULT, or the trajectory cannot be followed within the limits even from rest;
                the former plan goes on.
        """
        if self.state is ExecutorState.FAULT:
            raise ControlError("the executor is in FAULT; reset the robot before it moves again.")
        trajectory = instance_of(trajectory, JointTrajectory, "trajectory")
        q, t_s = trajectory.q_rad, trajectory.t_s
        if q.shape[1] != len(self.limits.velocity):
            raise ControlError(f"the trajectory has {q.shape[1]} joints, the arm {len(self.limits.velocity)}.")
        outside = (q < self.limits.q_min) | (q > self.limits.q_max)
        if outside.any():
            row, joint = (int(i) for i in np.argwhere(outside)[0])
            raise ControlError(
                f"row {row} asks joint {joint} for {q[row, joint]:.4f} rad, outside "
                f"[{self.limits.q_min[joint]:.4f}, {self.limits.q_max[joint]:.4f}]; nothing was changed."
            )
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

    def stop(self) -> None:
        """Brake within the limits and stay; the gripper keeps what it was last told. A FAULT stays one."""
        profile = plan_stop(self.reference, self.limits)
        tail = _braking(profile, self._gripper, self.dt_s)
        self._knot_step = np.zeros(1, dtype=int)
        self._follow(tail)
        if self.state is not ExecutorState.FAULT:
            self.state = ExecutorState.STOPPING
        self.counters["stops"] += 1

    def fault(self, followed: bool = True) -> None:
        """Brake as :meth:`stop`, and refuse every trajectory from now on.

        Args:
            followed: Whether the steps handed out last were; where not, braking begins at the reference before them.
        """
        if not followed:
            self._cursor, self._gripper = self._before
        self.stop()
        self.state = ExecutorState.FAULT
        self.counters["faults"] += 1

    def advance(self, n_steps: int) -> ReferenceBlock:
        """The reference for the next ``n_steps`` physics steps.

        Raises:
            InputError: ``n_steps`` is no whole number of at least 1.
            ActuatorGuardError: The reference is not finite or leaves the limits; it was not handed out and the executor
                brakes from the last good one (FAULT).
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
                f"the reference left its limits or is not finite (q {block.q_rad[0]}, qd {block.qd_rad_s[0]}); it was "
                "withheld and the arm brakes from the last good reference."
            )

    def _lay_out(self, motion: PlannedMotion, gripper_rows: F64, lead: StopProfile | None) -> None:
        """Sample lead-in, motion and final stop on the physics clock. Row 0 is the present reference."""
        spline, dt_s = motion.spline, self.dt_s
        n_motion = int(np.ceil(spline.end_s / dt_s - 1e-9))
        at_s = np.arange(n_motion + 1, dtype=np.float64) * dt_s
        q, qd, qdd = spline.sample(at_s)
        if lead is None:
            qdd[0] = self.reference.qdd_rad_s2  # not the new motion's: it has not begun, and may yet be replaced
        segment = np.clip(np.searchsorted(spline.t_s, at_s, side="left") - 1, 0, len(gripper_rows) - 1)
        stop = plan_stop(JointState(q[-1], qd[-1], qdd[-1]), self.limits)
        into_s = float(at_s[-1]) - spline.end_s  # the last row seldom falls on a physics step: braking has begun by then
        tail = _braking(stop, float(gripper_rows[-1]), dt_s, into_s)
        q[-1], qd[-1], qdd[-1] = tail.q_rad[0], tail.qd_rad_s[0], tail.qdd_rad_s2[0]
        body = ReferenceBlock(q, qd, qdd, gripper_rows[segment], np.interp(at_s, spline.t_s, motion.nominal_s))
        head = [] if lead is None else [_braking(lead, self._gripper, dt_s)]
        n_head = len(head[0]) - 1 if head else 0
        self._knot_step = n_head + np.ceil(spline.t_s / dt_s - 1e-9).astype(int)
        self._follow(_joined([*head, body, tail]), n_head + n_motion)


def _braking(profile: StopProfile, gripper: float, dt_s: float, into_s: float = 0.0) -> ReferenceBlock:
    """A stop on the physics clock, row 0 lying ``into_s`` after its start; it has no time on any chunk's clock."""
    n = int(np.ceil(profile.end_s / dt_s)) + 1
    q, qd, qdd = profile.sample(np.arange(n + 1, dtype=np.float64) * dt_s + into_s)
    return ReferenceBlock(q, qd, qdd, np.full(n + 1, gripper), np.full(n + 1, np.nan))


def _open_fraction(value: float) -> float:
    fraction = float(finite_array(value, "gripper", ()))
    if not 0.0 <= fraction <= 1.0:
        raise InputError(f"gripper is an open fraction in [0, 1] (1 = open), got {fraction:g}.")
    return fraction


def _still(q: F64, gripper: float) -> ReferenceBlock:
    zeros = np.zeros((1, len(q)))
    return ReferenceBlock(q[None].copy(), zeros, zeros, np.array([gripper]), np.array([np.nan]))


def _joined(blocks: list[ReferenceBlock]) -> ReferenceBlock:
    """Blocks end to end; each one's first row is the last of the one before."""
    rest = [blocks[0], *(block.rows(1, len(block)) for block in blocks[1:])]
    return ReferenceBlock(
        np.concatenate([block.q_rad for block in rest]),
        np.concatenate([block.qd_rad_s for block in rest]),
        np.concatenate([block.qdd_rad_s2 for block in rest]),
        np.concatenate([block.gripper for block in rest]),
        np.concatenate([block.nominal_s for block in rest]),
    )
