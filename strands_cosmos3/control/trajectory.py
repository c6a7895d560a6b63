"""Plan a smooth joint motion within the arm's limits through the rows of a chunk.

The motion is a cubic Hermite spline through every row, from the velocity of the present reference, with continuous
acceleration. If it would overshoot a joint's end, a monotone spline takes its place, whose acceleration jumps at knots, or,
as a last resort, one that halts at every row. Where the rows exceed a velocity, acceleration or jerk limit, or reach a
speed that could not be braked before a joint's end, time is stretched: the path stays the same, the clock slows down.

Legend: K knots, n joints, S samples in a segment, M sampled times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator  # pyright: ignore[reportMissingTypeStubs]
from scipy.linalg import solve_banded  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

from strands_cosmos3.checks import F64
from strands_cosmos3.errors import ControlError
from strands_cosmos3.robots.panda import JointLimits

_SAMPLES = 8
_SLOWEST = 20.0
_MAX_PASSES = 60
_TOLERANCE = 1.001
_RAMP = 1.5
_OVERSHOOT = 1.01  # each pass stretches slightly more than needed, so that the passes end


@dataclass(frozen=True, eq=False)
class JointSpline:
    """A cubic Hermite motion through angles and velocities [K, n] at increasing times [K]."""

    t_s: F64
    q_rad: F64
    qd_rad_s: F64

    @property
    def end_s(self) -> float:
        """Time of the last knot."""
        return float(self.t_s[-1])

    def sample(self, at_s: F64) -> tuple[F64, F64, F64]:
        """Return angles, velocities and accelerations [M, n] at times [M], clipped to the knots' span."""
        at_s = np.clip(at_s, self.t_s[0], self.t_s[-1])
        k = np.clip(np.searchsorted(self.t_s, at_s, side="right") - 1, 0, len(self.t_s) - 2)
        h = self.t_s[k + 1] - self.t_s[k]
        return _hermite(
            self.q_rad[k], self.q_rad[k + 1], self.qd_rad_s[k], self.qd_rad_s[k + 1], h[:, None], (at_s - self.t_s[k])[:, None]
        )


def _hermite(q0: F64, q1: F64, v0: F64, v1: F64, h: F64, t: F64) -> tuple[F64, F64, F64]:
    """Position, velocity, acceleration of the cubic with these end states, ``t`` seconds into a segment of ``h`` seconds."""
    slope = (q1 - q0) / h
    a0 = (6 * slope - 4 * v0 - 2 * v1) / h
    jerk = (6 * (v0 + v1) - 12 * slope) / (h * h)
    return _constant_jerk(q0, v0, a0, t, jerk)


def _constant_jerk(q: F64, v: F64, a: F64, t: F64, jerk: F64) -> tuple[F64, F64, F64]:
    return q + t * (v + t * (a / 2 + t * jerk / 6)), v + t * (a + t * jerk / 2), a + t * jerk


@dataclass(frozen=True, eq=False)
class PlannedMotion:
    """A spline, and how its timing differs from the chunk's.

    Args:
        spline: The motion; its first knot is the reference that it starts from.
        nominal_s: [K] times of the knots at the chunk's own rate.
        stretched: [K - 1] whether the segment to a row takes longer than at the chunk's rate.
        smooth: Whether the acceleration is continuous between rows. It is not if rows lie so near a joint's end that a smooth
            motion would overshoot it; it then jumps by no more than the jerk limit allows in a physics step.
    """

    spline: JointSpline
    nominal_s: F64
    stretched: NDArray[np.bool_]
    smooth: bool = True


@dataclass(frozen=True, eq=False)
class JointState:
    """Angles [n], velocities [n] and accelerations [n] of a reference at one moment."""

    q_rad: F64
    qd_rad_s: F64
    qdd_rad_s2: F64

    @classmethod
    def at_rest(cls, q_rad: F64) -> JointState:
        """Return the state of rest at angles [n]."""
        return cls(np.array(q_rad, dtype=np.float64), np.zeros(len(q_rad)), np.zeros(len(q_rad)))


def plan_motion(start: JointState, q_rad: F64, t_s: F64, limits: JointLimits, dt_s: float) -> PlannedMotion:
    """Plan a motion from ``start``, the reference at time zero, through rows of joint angles, within limits.

    Args:
        q_rad, t_s: [T, n] rows and [T] increasing times; a first row at zero is merged into the start.
        dt_s: Physics step; a jump in acceleration counts as jerk over one step.

    Raises:
        ControlError: The start is too fast for the rows, however far time is stretched. It never happens from rest.
    """
    if t_s[0] < dt_s:
        q_rad, t_s = q_rad[1:], t_s[1:]
    if len(t_s) == 0:
        q_rad, t_s = start.q_rad[None], np.array([dt_s])
    knots = np.vstack((start.q_rad, q_rad))
    nominal_s = np.concatenate(([0.0], t_s))
    requested = np.diff(nominal_s)
    for law in (_smooth_velocities, _monotone_velocities, _halting_velocities):
        timed = _stretch(law, knots, requested, start, limits, dt_s)
        if timed is not None:
            h, velocity = timed
            t = np.concatenate(([0.0], np.cumsum(h)))
            smooth = law is _smooth_velocities
            return PlannedMotion(JointSpline(t, knots, velocity), nominal_s, h > requested * 1.0001, smooth)
    raise ControlError(
        f"no time law within the joint limits was found for this chunk: it starts at {np.abs(start.qd_rad_s).max():.2f} rad/s "
        "and its rows cannot be met from there. Stop the arm first."
    )


_Law = Callable[[F64, F64, F64], F64]


def _stretch(
    law: _Law, knots: F64, wanted_s: F64, start: JointState, limits: JointLimits, dt_s: float
) -> tuple[F64, F64] | None:
    """Durations [K - 1] and knot velocities [K, n] within limits, or None if slowing down does not help."""
    longest_s = _SLOWEST * np.maximum(wanted_s, _rest_to_rest_s(knots, limits, dt_s)).sum()
    fastest = np.abs(np.diff(knots, axis=0) / limits.velocity).max(axis=1)  # lower bound of any time law
    h = wanted_s * _ramped(np.maximum(fastest / wanted_s, 1.0))
    for _ in range(_MAX_PASSES):
        velocity = law(knots, h, start.qd_rad_s)
        excess = _excess(knots, velocity, h, start, limits, dt_s)
        if excess.max() <= _TOLERANCE:
            return h, velocity
        stretch = h / wanted_s * np.where(excess > _TOLERANCE, np.minimum(excess * _OVERSHOOT, 2.0), 1.0)
        h = wanted_s * _ramped(stretch)
        if h.sum() > longest_s:
            return None
    return None


def _ramped(stretch: F64) -> F64:
    """[K - 1] the least stretch >= the given one with a bounded ratio between rows, so that the spline does not swing out."""
    for order in (range(1, len(stretch)), range(len(stretch) - 2, -1, -1)):
        towards = -1 if order.step > 0 else 1
        for k in order:
            stretch[k] = max(stretch[k], stretch[k + towards] / _RAMP)
    return stretch


def _rest_to_rest_s(knots: F64, limits: JointLimits, dt_s: float) -> F64:
    """[K - 1] duration of each segment as a cubic that starts and ends at rest."""
    distance = np.abs(np.diff(knots, axis=0))
    start_jump = np.minimum(limits.acceleration, limits.jerk * dt_s)
    return np.maximum(1.5 * distance / limits.velocity, np.sqrt(6 * distance / start_jump)).max(axis=1)


def _smooth_velocities(knots: F64, h: F64, v_start: F64) -> F64:
    """[K, n] velocities that make the acceleration continuous; the last segment ends without acceleration.

    At an inner knot both segments' accelerations agree: ``v- / h- + 2 v (1 / h- + 1 / h+) + v+ / h+ = 3 (s- / h- + s+ / h+)``
    with slopes s; at the end ``v- + 2 v = 3 s-``. One tridiagonal system serves all joints.
    """
    inverse, n = 1.0 / h, len(knots)
    pull = 3.0 * np.diff(knots, axis=0) * (inverse * inverse)[:, None]
    bands, wanted = np.zeros((3, n)), np.empty_like(knots)
    bands[0, 2:], bands[2, : n - 2] = inverse[1:], inverse[:-1]
    bands[1, 1:-1] = 2.0 * (inverse[:-1] + inverse[1:])
    bands[1, 0], bands[1, -1], bands[2, n - 2] = 1.0, 2.0 * inverse[-1], inverse[-1]
    wanted[0], wanted[1:-1], wanted[-1] = v_start, pull[:-1] + pull[1:], pull[-1]
    solved = solve_banded((1, 1), bands, wanted, check_finite=False)  # pyright: ignore[reportUnknownVariableType]
    return np.asarray(solved, dtype=np.float64)  # pyright: ignore[reportUnknownArgumentType]


def _monotone_velocities(knots: F64, h: F64, v_start: F64) -> F64:
    """[K, n] velocities that keep each segment between its knots; zero at the end (Fritsch and Butland 1984)."""
    t = np.concatenate(([0.0], np.cumsum(h)))
    velocity = np.asarray(PchipInterpolator(t, knots)(t, 1))
    velocity[0], velocity[-1] = v_start, 0.0
    return velocity


def _halting_velocities(knots: F64, h: F64, v_start: F64) -> F64:
    """[K, n] rest at every knot. Segments are independent then, and any limit is met if they are slow enough."""
    velocity = np.zeros_like(knots)
    velocity[0] = v_start
    return velocity


def _excess(knots: F64, velocity: F64, h: F64, start: JointState, limits: JointLimits, dt_s: float) -> F64:
    """[K - 1] factor by which each segment must be slower (1 = not at all), over joints and limits."""
    excess = _rates(knots, velocity, h, start, limits, dt_s)  # braking is dearer, and slower motions brake sooner
    return excess if excess.max() > _TOLERANCE else np.maximum(excess, _overrun(knots, velocity, h, limits))


def _rates(knots: F64, velocity: F64, h: F64, start: JointState, limits: JointLimits, dt_s: float) -> F64:
    """[K - 1] factors on time by which velocity, acceleration and jerk exceed their limits. Exact, as these are cubics."""
    v0, v1, span = velocity[:-1], velocity[1:], h[:, None]
    slope = np.diff(knots, axis=0) / span
    first, last = (6 * slope - 4 * v0 - 2 * v1) / span, (-6 * slope + 2 * v0 + 4 * v1) / span  # accelerations [K - 1, n]
    jerk = (last - first) / span
    turns = first * last < 0  # the velocity has an extreme inside the segment
    inside = v0 - np.divide(first * first, 2 * jerk, out=np.zeros_like(jerk), where=turns)
    fastest = np.maximum(np.maximum(np.abs(v0), np.abs(v1)), np.where(turns, np.abs(inside), 0.0))
    before = np.vstack((start.qdd_rad_s2, last[:-1]))
    jump = np.abs(first - before) / dt_s  # within one physics step, on top of the jerk in it
    worst = np.maximum(np.abs(jerk), np.vstack((np.zeros_like(jerk[:1]), np.abs(jerk[:-1]))))
    strain = np.maximum(np.abs(first), np.abs(last)) / limits.acceleration
    jolt = np.where(jump > 1e-6 / dt_s, jump + worst, 0.0) / limits.jerk
    jolt[:-1] = np.maximum(jolt[:-1], jolt[1:])  # both segments cause the jump
    of_second_order = np.sqrt(np.maximum(strain, jolt).max(axis=1))
    of_third_order = np.cbrt((np.abs(jerk) / limits.jerk).max(axis=1))
    return np.maximum(np.maximum((fastest / limits.velocity).max(axis=1), of_second_order), np.maximum(of_third_order, 1.0))


def _overrun(knots: F64, velocity: F64, h: F64, limits: JointLimits) -> F64:
    """[K - 1] factor by which each segment must be slower for the joints to stay, and be stoppable, inside their range."""
    span = h[:, None, None]
    ends = knots[:-1, None], knots[1:, None], velocity[:-1, None], velocity[1:, None], span  # [K - 1, 1, n]
    t = _moments(*_hermite(*ends, np.zeros(1))[1:], _hermite(*ends, span)[2], span)
    q, v, a = _hermite(*ends, t)  # [K - 1, S, n]
    braked = braking_position(q, v, a, limits)
    room = np.where(v > 0, limits.q_max - q, q - limits.q_min)
    beyond = np.maximum(np.maximum(braked, q) - limits.q_max, limits.q_min - np.minimum(braked, q))
    brake = np.where(beyond > 1e-9, np.maximum(np.abs(braked - q) / np.maximum(room, 1e-4), 1.1), 1.0)
    return np.sqrt(brake).max(axis=(1, 2))


def _moments(v0: F64, a0: F64, a1: F64, h: F64) -> F64:
    """[K - 1, S, n] times in each segment: evenly spaced, and at the extremes of velocity and angle."""
    even = np.broadcast_to(np.linspace(0.0, 1.0, _SAMPLES)[None, :, None] * h, (len(h), _SAMPLES, v0.shape[2]))
    jerk = (a1 - a0) / h
    with np.errstate(divide="ignore", invalid="ignore"):
        fastest = -a0 / jerk
        root = np.sqrt(a0 * a0 - 2 * v0 * jerk)
        turns = -2 * v0 / (a0 + np.where(a0 >= 0, root, -root)), (-a0 - np.where(a0 >= 0, root, -root)) / jerk
    extremes = np.nan_to_num(np.concatenate((fastest, *turns), axis=1), nan=0.0, posinf=0.0, neginf=0.0)
    return np.concatenate((even, np.clip(extremes, 0.0, h)), axis=1)


@dataclass(frozen=True, eq=False)
class StopProfile:
    """A time-optimal stop of every joint: three phases of constant jerk, [3, n] durations and jerks."""

    start: JointState
    phase_s: F64
    jerk_rad_s3: F64

    @property
    def end_s(self) -> float:
        """Time at which the last joint comes to rest."""
        return float(self.phase_s.sum(axis=0).max())

    def sample(self, at_s: F64) -> tuple[F64, F64, F64]:
        """Return angles, velocities and accelerations [M, n] at times [M]; at rest after the end."""
        q = np.broadcast_to(self.start.q_rad, (len(at_s), len(self.start.q_rad))).copy()
        v = np.broadcast_to(self.start.qd_rad_s, q.shape).copy()
        a = np.broadcast_to(self.start.qdd_rad_s2, q.shape).copy()
        left = np.broadcast_to(at_s[:, None], q.shape).copy()
        for duration, jerk in zip(self.phase_s, self.jerk_rad_s3, strict=True):
            t = np.clip(left, 0.0, duration)
            q, v, a = _constant_jerk(q, v, a, t, jerk)
            left = left - t
        rested = at_s[:, None] >= self.phase_s.sum(axis=0)
        return q, np.where(rested, 0.0, v), np.where(rested, 0.0, a)


def plan_stop(start: JointState, limits: JointLimits) -> StopProfile:
    """Plan the time-optimal stop of every joint under acceleration and jerk limits.

    If the acceleration a were first brought to zero with jerk J, the velocity would become ``v + a|a| / 2J``; its sign gives
    the direction of braking. The peak deceleration A follows from ``A^2 = J v + a^2 / 2``, capped at the limit.
    """
    return StopProfile(start, *_stop_phases(start.qd_rad_s, start.qdd_rad_s2, limits))


def _stop_phases(v: F64, a: F64, limits: JointLimits) -> tuple[F64, F64]:
    """[3, ..., n] durations and jerks that bring velocities and accelerations [..., n] to zero."""
    J = limits.jerk
    sign = np.where(v + a * np.abs(a) / (2 * J) >= 0, 1.0, -1.0)
    v, a = sign * v, sign * a
    peak = np.sqrt(np.maximum(J * v + a * a / 2, 0.0))
    A = np.maximum(np.minimum(peak, limits.acceleration), -a)
    hold = np.where(peak > A, (v + (a * a - 2 * A * A) / (2 * J)) / np.maximum(A, 1e-12), 0.0)
    durations = np.stack([np.maximum((a + A) / J, 0.0), np.maximum(hold, 0.0), A / J])
    jerk = sign * J
    return durations, np.stack([-jerk, np.zeros_like(jerk), jerk])


def braking_position(q: F64, v: F64, a: F64, limits: JointLimits) -> F64:
    """[..., n] angles at which the joints would come to rest if they braked now."""
    for t, jerk in zip(*_stop_phases(v, a, limits), strict=True):
        q, v, a = _constant_jerk(q, v, a, t, jerk)
    return q
