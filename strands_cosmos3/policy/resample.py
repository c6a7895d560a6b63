"""Resample a chunk into steps at the caller's control frequency, by time and not by row.

A step's time is when its target is due: the k-th of a run of steps at ``hz`` is due ``(k + 1) /
hz`` after the observation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.errors import ControlError, InputError
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.types import ActionChunk, JointTrajectory, Observation

_MOST_STEPS = 100_000


@dataclass(frozen=True, eq=False)
class StepTimeline:
    """Motion time at the end of each step of a chunk.

    Args:
        start_s: Motion time of the observation.
        ends_s: [K] the steps', after it. Where the joints' limits stretch time they lie closer than
            the steps themselves.
    """

    start_s: float
    ends_s: F64

    def skip(self, n: int) -> StepTimeline:
        """The same without the first ``n`` steps, which are over already."""
        return (
            StepTimeline(
                self.start_s + float(self.ends_s[n - 1]), self.ends_s[n:] - self.ends_s[n - 1]
            )
            if n
            else self
        )

    def first(self, n: int) -> StepTimeline:
        """The same with the first ``n`` steps only."""
        return StepTimeline(self.start_s, self.ends_s[:n])

    def before_the_last(self, n: int) -> float:
        """Motion time when all but the last ``n`` steps have been executed."""
        return (
            float(np.concatenate(([0.0], self.ends_s))[max(0, len(self.ends_s) - n)]) + self.start_s
        )


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
    try:
        motion = plan_motion(start, plan.q_rad, plan.t_s, limits, 1.0 / hz)
    except ControlError:  # the rows cannot be met from that speed; from rest they always can
        motion = plan_motion(
            JointState.at_rest(observation.q_rad), plan.q_rad, plan.t_s, limits, 1.0 / hz
        )
    at_s = _ticks(motion.spline.end_s, hz)
    if lead_s is None:
        q, _, _ = motion.spline.sample(at_s)
    else:
        q, qd, _ = motion.spline.sample(at_s - 0.5 / hz)
        q = np.clip(q + lead_s * qd, limits.q_min, limits.q_max)
    row = np.clip(np.searchsorted(motion.spline.t_s[1:], at_s - 1e-9), 0, len(motion.nominal_s) - 2)
    gripper = None if plan.gripper is None else plan.gripper[-(len(motion.nominal_s) - 1) :][row]
    steps = JointTrajectory(q, at_s, gripper, t_capture_s=plan.t_capture_s)
    return steps, np.interp(at_s, motion.spline.t_s, motion.nominal_s)


def resample_rows(chunk: ActionChunk, hz: float) -> tuple[F64, F64]:
    """A chunk's raw rows at another rate, where they can be: joint angles are interpolated, the
    gripper is held.

    Other rows stay as they are: a delta says what happens in one period of the chunk's own rate.

    Returns:
        The rows [K, D], and when each is due after the observation [K].
    """
    due_s, rows = chunk.row_times_s, chunk.action
    if chunk.action_space.meaning != "joint_position" or due_s[-1] <= 0:
        return rows, due_s
    at_s = _ticks(due_s[-1], hz)
    joints = np.stack(
        [np.interp(at_s, due_s, rows[:, i]) for i in range(rows.shape[1] - 1)], axis=1
    )
    next_row = np.minimum(np.searchsorted(due_s, at_s - 1e-9), len(rows) - 1)
    return np.column_stack((joints, rows[next_row, -1])), at_s


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
