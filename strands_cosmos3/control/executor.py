"""The executor: joint trajectories in, one reference per physics step out.

It owns the reference, not the arm. It plans a trajectory from the present reference, samples it on
the physics clock and appends a stop: without a fresh trajectory in time, the arm brakes within its
limits and holds. Every reference that it hands out is finite and within the limits of the joints
and of the hand.

Planning (:meth:`Takeover.prepare`) reads nothing that changes, so that it can run on another
thread; :meth:`Executor.take_up` switches to the result. Where the arm's geometry is known, the
references that may be executed are what is checked for collisions, their final stop included.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64, finite_array, open_fractions, typed, whole_number
from strands_cosmos3.collision import CollisionOutcome, CollisionReport
from strands_cosmos3.control.holding import hold_rows
from strands_cosmos3.control.stops import JointState, plan_stop
from strands_cosmos3.control.trajectory import PlannedMotion, plan_motion, reference_period
from strands_cosmos3.errors import ActuatorGuardError, ControlError, MotionBoundsError
from strands_cosmos3.robots.joints import HandLimits, JointLimits
from strands_cosmos3.snapshots import Restorable
from strands_cosmos3.types import JointTrajectory

_LIMIT_SLACK_RAD = 1e-6
_RATE_SLACK = 1.001
_ROUNDING_RAD = 1e-14
_SAMPLE_S = 0.01  # between references whose geometry is computed


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
    """The reference at M consecutive physics steps: angles, velocities, accelerations [M, n] and
    open fractions [M].

    Of a robot with another number of grippers than one, open fractions are [M, G]. ``nominal_s``
    [M] is the unstretched time of the chunk at each step; NaN while braking or holding.
    """

    q_rad: F64
    qd_rad_s: F64
    qdd_rad_s2: F64
    gripper: F64
    nominal_s: F64

    def __len__(self) -> int:
        return len(self.q_rad)

    def at(self, step: int) -> JointState:
        """Return the reference at a step; past the end it rests at the last one."""
        row, moves = min(step, len(self) - 1), step < len(self)
        return JointState(self.q_rad[row], self.qd_rad_s[row] * moves, self.qdd_rad_s2[row] * moves)

    def rows(self, first: int, last: int) -> ReferenceBlock:
        """Return steps ``first`` to ``last - 1``; steps past the end rest at the last one."""
        if last <= len(self):
            return ReferenceBlock(*(values[first:last] for values in vars(self).values()))
        index = np.arange(first, last)
        over = index >= len(self)
        index = np.minimum(index, len(self) - 1)
        still = ~over[:, None]
        q = self.q_rad[index]
        qd = self.qd_rad_s[index] * still
        qdd = self.qdd_rad_s2[index] * still
        return ReferenceBlock(
            q, qd, qdd, self.gripper[index], np.where(over, np.nan, self.nominal_s[index])
        )


@dataclass(frozen=True, eq=False)
class ReferencePlan:
    """References on the physics clock until the arm rests.

    Steps ``head_end`` to ``motion_end`` of ``block`` follow rows, which are reached at the steps
    ``knot_step``; a stop comes before, if the rows could only be followed from rest, and after.
    """

    block: ReferenceBlock
    head_end: int = 0
    motion_end: int = 0
    knot_step: NDArray[np.int_] = field(default_factory=lambda: np.zeros(1, dtype=int))


@dataclass(frozen=True, eq=False)
class PreparedMotion:
    """A motion through the rows of ``trajectory``, and the reference that it continues: step
    ``step`` of the plan ``of``. Without a ``motion`` it follows no row: it brakes and holds.
    """

    of: ReferencePlan
    step: int
    plan: ReferencePlan
    trajectory: JointTrajectory
    motion: PlannedMotion | None = None

    @property
    def block(self) -> ReferenceBlock:
        """The references until the arm rests."""
        return self.plan.block

    def sampled(self, dt_s: float) -> NDArray[np.int_]:
        """[M] steps about 10 ms apart, the first and the last included."""
        stride = max(1, round(_SAMPLE_S / dt_s))
        return np.append(np.arange(0, len(self.block) - 1, stride), len(self.block) - 1)

    def examine(self, dt_s: float) -> CollisionReport:
        """Report the first reference that comes too close to something, by the row that it is on
        the way to; T is the stop after the last row.
        """
        assert self.trajectory.arm is not None
        steps = self.sampled(dt_s)
        report = self.trajectory.arm.examine(self.block.q_rad[steps])
        if report.row is None:
            return report
        # a first row due now is merged into the start
        row_step = self.plan.knot_step[1:]
        merged = len(self.trajectory.t_s) - len(row_step)
        reached = int(np.searchsorted(row_step, int(steps[report.row + 1])))
        return replace(report, row=reached + merged)


@dataclass(frozen=True, eq=False)
class Takeover:
    """A reference in the near future, from which a trajectory can be planned on any thread.

    Args:
        plan, step: The plan that is being followed, and the step at which the next one is to begin.
        motion_s: Time on the motion's clock at that step.
        gripper: Open fraction at that step, [] or [G].
    """

    limits: JointLimits
    dt_s: float
    plan: ReferencePlan
    step: int
    motion_s: float
    gripper: F64

    @property
    def reference(self) -> JointState:
        """The reference at that step."""
        return self.plan.block.at(self.step)

    def prepare(self, trajectory: JointTrajectory) -> PreparedMotion:
        """Plan a trajectory from this reference, as :meth:`motion_through`, and
        :meth:`without_collision`.
        """
        return self.without_collision(self.motion_through(trajectory))

    def without_collision(self, prepared: PreparedMotion) -> PreparedMotion:
        """Return a motion; where it or its stop would collide, one whose rows from an earlier one
        on hold the arm, as its trajectory's ``collision`` says.

        Raises:
            ControlError: Even braking now would collide.
        """
        trajectory = prepared.trajectory
        if trajectory.arm is None:
            return prepared
        first = found = prepared.examine(self.dt_s)
        held_from = len(trajectory.t_s)
        fewer = 1
        while found.row is not None:
            if held_from == 0 or prepared.motion is None:
                raise ControlError(f"no stop before a collision was found: {first}.")
            held_from = max(min(found.row, held_from - fewer), 0)
            fewer = 2 * fewer
            report = replace(first, outcome=CollisionOutcome.STOPPED, held_from_row=held_from)
            held = hold_rows(trajectory, held_from, self.braking().q_rad[-1])
            prepared = self.motion_through(replace(held, collision=report))
            found = prepared.examine(self.dt_s)
        return prepared

    def motion_through(self, trajectory: JointTrajectory) -> PreparedMotion:
        """Plan a motion through the rows of a trajectory.

        Raises:
            MotionBoundsError: It has too many rows, or would take too long.
            ControlError: It cannot be followed within the limits, even from rest.
        """
        self.limits.require_rows(trajectory.q_rad, ControlError, "nothing was changed.")
        self._require_grippers(trajectory.gripper)
        head = None
        how = (trajectory.q_rad, trajectory.t_s, self.limits, self.dt_s)
        try:
            motion = plan_motion(self.reference, *how)
        except MotionBoundsError:
            raise
        except ControlError:
            head = self.braking()
            motion = plan_motion(JointState.at_rest(head.q_rad[-1]), *how)
        return self._on_the_clock(motion, trajectory, head)

    def brake(self, trajectory: JointTrajectory) -> PreparedMotion:
        """Return the stop from this reference as a motion, in place of a trajectory's."""
        return PreparedMotion(self.plan, self.step, ReferencePlan(self.braking()), trajectory)

    def braking(self) -> ReferenceBlock:
        """Return the stop from this reference, which is row 0. A plan that brakes already goes
        on.
        """
        plan = self.plan
        if plan.head_end <= self.step < plan.motion_end:
            return _braking(self.reference, self.limits, self.gripper, self.dt_s)
        last = len(plan.block) - 1 if self.step >= plan.motion_end else plan.head_end
        block = plan.block.rows(min(self.step, last), last + 1)
        return replace(
            block, gripper=_held(self.gripper, len(block)), nominal_s=np.full(len(block), np.nan)
        )

    def _require_grippers(self, gripper: F64 | None) -> None:
        if gripper is not None and gripper.shape[1:] != self.gripper.shape:
            of_arm, of_row = (
                "a number" if shape == () else list(shape)
                for shape in (self.gripper.shape, gripper.shape[1:])
            )
            raise ControlError(
                f"a row's grippers are {of_row}, but the arm's are {of_arm}; nothing was changed."
            )

    def _on_the_clock(
        self, motion: PlannedMotion, trajectory: JointTrajectory, head: ReferenceBlock | None
    ) -> PreparedMotion:
        """Sample the lead-in, the motion and the final stop on the physics clock. Row 0 is this
        reference.
        """
        spline = motion.spline
        dt_s = self.dt_s
        gripper = trajectory.gripper
        n_rows = len(motion.nominal_s) - 1  # a first row due now is merged into the start
        gripper_rows = _held(self.gripper, n_rows) if gripper is None else gripper[-n_rows:]
        n_motion = int(np.ceil(spline.end_s / dt_s - 1e-9))
        at_s = np.arange(n_motion + 1, dtype=np.float64) * dt_s
        q, qd, qdd = spline.sample(at_s)
        end = JointState(q[-1], qd[-1], qdd[-1])
        into_s = float(at_s[-1]) - spline.end_s  # braking begins at the last row, seldom on a step
        tail = _braking(end, self.limits, gripper_rows[-1], dt_s, into_s)
        q[-1] = tail.q_rad[0]
        qd[-1] = tail.qd_rad_s[0]
        qdd[-1] = tail.qdd_rad_s2[0]
        body = ReferenceBlock(
            q,
            qd,
            qdd,
            gripper_rows[spline.segment(at_s)],
            np.interp(at_s, spline.t_s, motion.nominal_s),
        )
        n_head = 0 if head is None else len(head) - 1
        block = _joined([body, tail] if head is None else [head, body, tail])
        knot_step = n_head + np.ceil(spline.t_s / dt_s - 1e-9).astype(int)
        plan = ReferencePlan(block, n_head, n_head + n_motion, knot_step)
        return PreparedMotion(self.plan, self.step, plan, trajectory, motion)


class Executor(Restorable):
    """Turns joint trajectories into references on the physics clock.

    Args:
        limits, dt_s: Limits of the joints and of the hand, and the physics step, at least 0.1 ms.
        q_rad, gripper: Initial reference [n], at rest, and open fraction, or [G] of another number
            of grippers than one.

    Attributes:
        state: State of the reference.
        counters: ``chunks`` accepted, ``holds`` (the motion ended, or one that only brakes was
            taken up), ``restarts`` (chunks that could only be followed after a stop),
            ``limited_by_joint_end`` (chunks whose rows lie so near a joint's end that no spline
            through them would stay inside its range), ``stops``, ``faults``.
    """

    STATE = (
        "state",
        "counters",
        "_gripper",
        "_motion_from_s",
        "_plan",
        "_cursor",
        "_history",
        "_before",
    )

    @typed()
    def __init__(self, limits: JointLimits, dt_s: float, q_rad: F64, gripper: float | F64 = 1.0):
        self.limits = limits
        self.dt_s = reference_period(dt_s)
        q = finite_array(q_rad, "q_rad", limits.velocity.shape)
        limits.require_start(q, 0.0)
        self.state = ExecutorState.IDLE
        self.counters: Counter[str] = Counter()
        self._gripper = open_fractions(gripper)
        self._motion_from_s = 0.0
        zeros = np.zeros((1, len(q)))
        still = ReferenceBlock(q[None], zeros, zeros, self._gripper[None], np.array([np.nan]))
        self._plan = ReferencePlan(still)
        self._cursor = 0
        self._history = np.repeat(q[None], 3, axis=0)  # the angles handed out last
        self._before = 0, self._gripper, self._history  # at the start of the steps handed out last

    def _follow(self, plan: ReferencePlan) -> None:
        """Switch to a new plan, whose row 0 is the present reference."""
        self._motion_from_s += self._nominal_now_s()
        self._plan, self._cursor = plan, 0
        self._before = 0, self._gripper, self._history

    @property
    def reference(self) -> JointState:
        """Reference at the last step handed out."""
        return self._plan.block.at(self._cursor)

    @property
    def rows_begun(self) -> int:
        """Number of rows of the present trajectory that have been reached or are under way."""
        knot_step = self._plan.knot_step
        return min(int(np.searchsorted(knot_step, self._cursor)), len(knot_step) - 1)

    @property
    def rows_reached(self) -> int:
        """Number of rows of the present trajectory that have been reached."""
        return int(np.searchsorted(self._plan.knot_step[1:], self._cursor, side="right"))

    @property
    def motion_s(self) -> float:
        """Time on the motion's clock, which slows down while time is stretched and stops while
        the arm holds.
        """
        return self._motion_from_s + self._nominal_now_s()

    def _nominal_now_s(self, steps: int = 0) -> float:
        nominal_s = self._plan.block.nominal_s[: self._cursor + steps + 1]
        moving = nominal_s[np.isfinite(nominal_s)]
        return float(moving[-1]) if len(moving) else 0.0

    def steps_to_row(self, row: int) -> int:
        """Physics steps until the reference reaches a row (from 0) of the present trajectory; 0
        if it has already.
        """
        knot_step = self._plan.knot_step
        return max(int(knot_step[min(row + 1, len(knot_step) - 1)]) - self._cursor, 0)

    @property
    def steps_to_rest(self) -> int:
        """Physics steps until the arm rests, if nothing else is taken up before."""
        return max(len(self._plan.block) - 1 - self._cursor, 0)

    def takeover(self, steps: int = 0) -> Takeover:
        """Return the reference ``steps`` from now, if nothing else is taken up before, to plan
        from.
        """
        step = self._cursor + steps
        block = self._plan.block
        motion_s = self._motion_from_s + self._nominal_now_s(steps)
        gripper = block.gripper[min(step, len(block) - 1)] if steps else self._gripper
        return Takeover(self.limits, self.dt_s, self._plan, step, motion_s, gripper)

    def steps_until(self, prepared: PreparedMotion) -> int:
        """Physics steps until the reference that a prepared motion continues; negative once that
        has passed.
        """
        if prepared.of is not self._plan:
            return -1
        rests = len(self._plan.block) - 1
        return min(prepared.step, rests) - min(self._cursor, rests)

    def take_up(self, prepared: PreparedMotion) -> PlannedMotion | None:
        """Follow a prepared motion from the next step on, in place of the present one, which
        continues after an error. None if it only brakes: HOLD.

        Raises:
            ControlError: The executor is in FAULT, or the motion does not continue the present
                reference.
        """
        self._require_no_fault()
        if self.steps_until(prepared) != 0:
            raise ControlError(
                "the motion was planned from another reference than the present one; plan it again."
            )
        self._follow(prepared.plan)
        if prepared.motion is None:
            self.state = ExecutorState.HOLD
            self.counters["holds"] += 1
            return None
        self.state = ExecutorState.RUNNING
        self.counters["chunks"] += 1
        self.counters["restarts"] += prepared.plan.head_end > 0
        self.counters["limited_by_joint_end"] += not prepared.motion.smooth
        return prepared.motion

    @typed()
    def accept(self, trajectory: JointTrajectory) -> PlannedMotion:
        """Plan a trajectory here and now, and follow it; errors as :meth:`Takeover.prepare` and
        :meth:`take_up`.
        """
        self._require_no_fault()
        motion = self.take_up(self.takeover().prepare(trajectory))
        assert motion is not None  # it follows rows
        return motion

    def _require_no_fault(self) -> None:
        if self.state is ExecutorState.FAULT:
            raise ControlError("the executor is in FAULT; reset the robot before it moves again.")

    def stop(self) -> None:
        """Brake within the limits and stay at rest. The gripper keeps its last command; a FAULT
        remains one.
        """
        self._brake(self.takeover().braking())
        if self.state is not ExecutorState.FAULT:
            self.state = ExecutorState.STOPPING

    def _brake(self, block: ReferenceBlock) -> None:
        self._follow(ReferencePlan(block))
        self.counters["stops"] += 1

    def fault(self, followed: bool = True) -> None:
        """Brake as :meth:`stop`, and reject every later trajectory.

        If the arm has not ``followed`` the steps handed out last, braking begins at the reference
        before them.
        """
        if not followed:
            self._cursor, self._gripper, self._history = self._before
        self._brake(_braking(self.reference, self.limits, self._gripper, self.dt_s))
        self.state = ExecutorState.FAULT
        self.counters["faults"] += 1

    def advance(self, n_steps: int) -> ReferenceBlock:
        """Return the reference for the next ``n_steps`` physics steps.

        Raises:
            InputError: ``n_steps`` is no whole number of at least 1.
            ActuatorGuardError: The reference is not finite or exceeds a limit. It is withheld, and
                the executor brakes (FAULT).
        """
        whole_number(n_steps, "n_steps", 1)
        block = self._plan.block.rows(self._cursor + 1, self._cursor + 1 + n_steps)
        try:
            self._guard(block)
        except ActuatorGuardError:
            self.fault()
            raise
        self._before = self._cursor, self._gripper, self._history
        self._history = np.concatenate((self._history, block.q_rad))[-3:]
        self._cursor += n_steps
        self._gripper = block.gripper[-1]
        if self.state is ExecutorState.RUNNING and self._cursor > self._plan.motion_end:
            self.state = ExecutorState.HOLD
            self.counters["holds"] += 1
        elif self.state is ExecutorState.STOPPING and self._cursor >= len(self._plan.block):
            self.state = ExecutorState.STOPPED
        return block

    def _guard(self, block: ReferenceBlock) -> None:
        """Check references against every limit, by differences of the angles too: the rates need
        not be their derivatives.
        """
        limits, slack, dt_s = self.limits, _RATE_SLACK, self.dt_s
        path = np.concatenate((self._history, block.q_rad))
        speed = path[1:] - path[:-1]
        change = speed[1:] - speed[:-1]
        jolt = change[1:] - change[:-1]
        beyond = path[3:] - np.clip(path[3:], limits.q_min, limits.q_max)
        exceeded = [
            name
            for name, values, most in (
                ("angle", beyond, _LIMIT_SLACK_RAD),
                ("velocity", block.qd_rad_s, limits.velocity * slack),
                ("velocity", speed[2:], limits.velocity * (slack * dt_s) + _ROUNDING_RAD),
                ("acceleration", block.qdd_rad_s2, limits.acceleration * slack),
                (
                    "acceleration",
                    change[1:],
                    limits.acceleration * (slack * dt_s**2) + _ROUNDING_RAD,
                ),
                ("jerk", jolt, limits.jerk * (slack * dt_s**3) + _ROUNDING_RAD),
                ("gripper", block.gripper - 0.5, 0.5),
            )
            if not (np.abs(values) <= most).all()  # every comparison is false for NaN
        ]
        if not exceeded and self.state is not ExecutorState.FAULT:
            for hand in limits.hands:
                exceeded += self._hand_exceeds(
                    hand, *(hand.of_chain(x) for x in (path, np.abs(speed[1:]), np.abs(change[1:])))
                )
        if exceeded:
            raise ActuatorGuardError(
                f"the reference exceeds its limit of {', '.join(dict.fromkeys(exceeded))}, or is "
                "not finite (q "
                f"{block.q_rad[0]}, qd {block.qd_rad_s[0]}); it was withheld, and the arm brakes "
                "from the last good reference."
            )

    def _hand_exceeds(self, hand: HandLimits, path: F64, speed: F64, change: F64) -> list[str]:
        """The hand's limits that the angles exceed; its pose is computed only if the joints
        could move it so fast.
        """
        most_v = hand.velocity * _RATE_SLACK * self.dt_s
        most_a = hand.acceleration * _RATE_SLACK * self.dt_s**2
        reach_m = hand.chain.reach_m
        bound = float((speed @ reach_m).max())
        if (
            bound <= most_v
            and float((change @ reach_m).max() + 4 * speed.sum(axis=1).max() * bound) <= most_a
        ):
            return []
        step_m = np.diff(hand.chain.position(path[1:]), axis=0)
        within_v = np.linalg.norm(step_m[1:], axis=1) <= most_v
        within_a = np.linalg.norm(np.diff(step_m, axis=0), axis=1) <= most_a
        limits = ("the hand's velocity", within_v), ("the hand's acceleration", within_a)
        return [name for name, within in limits if not within.all()]


def _held(gripper: F64, n: int) -> F64:
    """[n] or [n, G] of the same open fractions."""
    return np.repeat(gripper[None], n, axis=0)


def _braking(
    state: JointState, limits: JointLimits, gripper: F64, dt_s: float, into_s: float = 0.0
) -> ReferenceBlock:
    """A stop from a state, on the physics clock; row 0 is ``into_s`` after its start. Its nominal
    time is NaN.
    """
    profile = plan_stop(state, limits)
    n = int(np.ceil(profile.end_s / dt_s)) + 1
    q, qd, qdd = profile.sample(np.arange(n + 1, dtype=np.float64) * dt_s + into_s)
    return ReferenceBlock(q, qd, qdd, _held(gripper, n + 1), np.full(n + 1, np.nan))


def _joined(blocks: list[ReferenceBlock]) -> ReferenceBlock:
    """Concatenate blocks; the first row of each is the last of the previous one."""
    rest = [blocks[0], *(block.rows(1, len(block)) for block in blocks[1:])]
    columns = zip(*(vars(block).values() for block in rest), strict=True)
    return ReferenceBlock(*map(np.concatenate, columns))
