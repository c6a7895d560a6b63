"""From rows at the chunk's rate to a smooth joint motion that keeps the arm's limits.

The motion is a cubic Hermite spline: it passes every row, starts with the velocity that the arm's reference has (so that
speed is carried over the seam between chunks) and its knot velocities make the acceleration continuous. Rows that such a
spline would overshoot a joint's end at are joined by a monotone one, whose acceleration jumps, or, as a last resort, by
one that halts at each. Where the rows ask
for more velocity, acceleration or jerk than the joints have, or for a speed that could not be braked before a joint's end,
time is stretched there: the path stays, the clock slows down, and the rows concerned are reported.

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
_OVERSHOOT = 1.01  # a pass corrects a little more than asked, so that passes end


@dataclass(frozen=True, eq=False)
class JointSpline:
    """A cubic Hermite motion through knots.

    Args:
        t_s: [K] knot times, increasing.
        q_rad: [K, n] angles.
        qd_rad_s: [K, n] velocities.
    """

    t_s: F64
    q_rad: F64
    qd_rad_s: F64

    @property
    def end_s(self) -> float:
        """Time of the last knot."""
        return float(self.t_s[-1])

    def sample(self, at_s: F64) -> tuple[F64, F64, F64]:
        """Angles, velocities and accelerations [M, n] at times [M], which are clipped to the knots' span."""
        at_s = np.clip(at_s, self.t_s[0], self.t_s[-1])
        k = np.clip(np.searchsorted(self.t_s, at_s, side="right") - 1, 0, len(self.t_s) - 2)
        h = self.t_s[k + 1] - self.t_s[k]
        return _hermite(
            self.q_rad[k],
            self.q_rad[k + 1],
            self.qd_rad_s[k],
            self.qd_rad_s[k + 1],
            h[:, None],
            (at_s - self.t_s[k])[:, None],
        )


def _hermite(q0: F64, q1: F64, v0: F64, v1: F64, h: F64, t: F64) -> tuple[F64, F64, F64]:
    """Position, velocity, acceleration of the cubic with these ends, ``t`` seconds into a segment of ``h`` seconds."""
    slope = (q1 - q0) / h
    a0 = (6 * slope - 4 * v0 - 2 * v1) / h
    jerk = (6 * (v0 + v1) - 12 * slope) / (h * h)
    return q0 + t * (v0 + t * (a0 / 2 + t * jerk / 6)), v0 + t * (a0 + t * jerk / 2), a0 + t * jerk


@dataclass(frozen=True, eq=False)
class PlannedMotion:
    """A spline with an account of what became of the rows.

    Args:
        spline: The motion; its first knot is the reference it departs from.
        nominal_s: [K] when the knots would have been due at the chunk's own rate.
        stretched: [K - 1] whether the segment to a row takes longer than the chunk asked.
        smooth: Whether the acceleration is continuous between rows. Where rows lie so near a joint's end that such a
            motion would overshoot it, it is not, and jumps no further than the joints' jerk allows in a physics step.
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
        """Standing still."""
        return cls(np.array(q_rad, dtype=np.float64), np.zeros(len(q_rad)), np.zeros(len(q_rad)))


def plan_motion(start: JointState, q_rad: F64, t_s: F64, limits: JointLimits, dt_s: float) -> PlannedMotion:
    """A motion from ``start`` through rows of joint angles, within limits.

    Args:
        start: The reference at time zero.
        q_rad: [T, n] rows.
        t_s: [T] when the rows are due, increasing; a first row at zero is merged into the start.
        limits: What the joints may do.
        dt_s: The physics step: over one such step a jump in acceleration counts as jerk.

    Raises:
        ControlError: No amount of stretching brings the motion within limits (the start itself is too fast for the rows).
            It never happens from rest.
    """
    if t_s[0] < dt_s:
        q_rad, t_s = q_rad[1:], t_s[1:]
    if len(t_s) == 0:
        q_rad, t_s = start.q_rad[None], np.array([dt_s])
    knots = np.vstack((start.q_rad, q_rad))
    nominal_s = np.concatenate(([0.0], t_s))
    asked = np.diff(nominal_s)
    for law in (_smooth_velocities, _monotone_velocities, _halting_velocities):
        timed = _stretch(law, knots, asked, start, limits, dt_s)
        if timed is not None:
            h, velocity = timed
            t = np.concatenate(([0.0], np.cumsum(h)))
            smooth = law is _smooth_velocities
            return PlannedMotion(JointSpline(t, knots, velocity), nominal_s, h > asked * 1.0001, smooth)
    raise ControlError(
        f"no time law within the joint limits was found for this chunk: it starts at {np.abs(start.qd_rad_s).max():.2f} rad/s "
        "and its rows cannot be met from there. Stop the arm first."
    )


_Law = Callable[[F64, F64, F64], F64]


def _stretch(law: _Law, knots: F64, asked: F64, start: JointState, limits: JointLimits, dt_s: float) -> tuple[F64, F64] | None:
    """Durations [K - 1] and knot velocities [K, n] within limits, or None where slowing down leads nowhere."""
    longest_s = _SLOWEST * np.maximum(asked, _rest_to_rest_s(knots, limits, dt_s)).sum()
    fastest = np.abs(np.diff(knots, axis=0) / limits.velocity).max(axis=1)  # no time law is quicker from row to row
    h = asked * _ramped(np.maximum(fastest / asked, 1.0))
    for _ in range(_MAX_PASSES):
        velocity = law(knots, h, start.qd_rad_s)
        excess = _excess(knots, velocity, h, start, limits, dt_s)
        if excess.max() <= _TOLERANCE:
            return h, velocity
        stretch = h / asked * np.where(excess > _TOLERANCE, np.minimum(excess * _OVERSHOOT, 2.0), 1.0)
        h = asked * _ramped(stretch)
        if h.sum() > longest_s:
            return None
    return None


def _ramped(stretch: F64) -> F64:
    """[K - 1] the least stretch that is no less than asked and changes by no more than a factor from row to row.

    A slow row beside a fast one would make the spline swing out: the joint would back up to gather speed.
    """
    for order in (range(1, len(stretch)), range(len(stretch) - 2, -1, -1)):
        towards = -1 if order.step > 0 else 1
        for k in order:
            stretch[k] = max(stretch[k], stretch[k + towards] / _RAMP)
    return stretch


def _rest_to_rest_s(knots: F64, limits: JointLimits, dt_s: float) -> F64:
    """[K - 1] how long each segment takes as a cubic that starts and ends at rest: no motion need be slower for long."""
    way = np.abs(np.diff(knots, axis=0))
    start_jump = np.minimum(limits.acceleration, limits.jerk * dt_s)
    return np.maximum(1.5 * way / limits.velocity, np.sqrt(6 * way / start_jump)).max(axis=1)


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
    """[K, n] velocities that keep each segment between its knots, so that rows at a joint's end can be met; rest at the end.

    The acceleration jumps at knots then, and :func:`_excess` counts the jumps. Fritsch and Butland 1984.
    """
    t = np.concatenate(([0.0], np.cumsum(h)))
    velocity = np.asarray(PchipInterpolator(t, knots)(t, 1))
    velocity[0], velocity[-1] = v_start, 0.0
    return velocity


def _halting_velocities(knots: F64, h: F64, v_start: F64) -> F64:
    """[K, n] rest at every knot: each segment is on its own then, and slow enough it keeps every limit."""
    velocity = np.zeros_like(knots)
    velocity[0] = v_start
    return velocity


def _excess(knots: F64, velocity: F64, h: F64, start: JointState, limits: JointLimits, dt_s: float) -> F64:
    """[K - 1] by how much each segment must be slower (1 = not at all), over joints and limits.

    Braking is looked at only where nothing else is exceeded: it costs most, and slower motions brake better.
    """
    excess = _rates(knots, velocity, h, start, limits, dt_s)
    return excess if excess.max() > _TOLERANCE else np.maximum(excess, _overrun(knots, velocity, h, limits))


def _rates(knots: F64, velocity: F64, h: F64, start: JointState, limits: JointLimits, dt_s: float) -> F64:
    """[K - 1] what velocity, acceleration and jerk exceed their limits by, as factors on time. Exact: these are cubics."""
    v0, v1, span = velocity[:-1], velocity[1:], h[:, None]
    slope = np.diff(knots, axis=0) / span
    first, last = (6 * slope - 4 * v0 - 2 * v1) / span, (-6 * slope + 2 * v0 + 4 * v1) / span  # accelerations [K - 1, n]
    jerk = (last - first) / span
    turns = first * last < 0  # the velocity has its extreme inside
    inside = v0 - np.divide(first * first, 2 * jerk, out=np.zeros_like(jerk), where=turns)
    fastest = np.maximum(np.maximum(np.abs(v0), np.abs(v1)), np.where(turns, np.abs(inside), 0.0))
    before = np.vstack((start.qdd_rad_s2, last[:-1]))
    jump = np.abs(first - before) / dt_s  # within one physics step, on top of the jerk in it
    worst = np.maximum(np.abs(jerk), np.vstack((np.zeros_like(jerk[:1]), np.abs(jerk[:-1]))))
    strain = np.maximum(np.abs(first), np.abs(last)) / limits.acceleration
    jolt = np.where(jump > 1e-6 / dt_s, jump + worst, 0.0) / limits.jerk
    jolt[:-1] = np.maximum(jolt[:-1], jolt[1:])  # a jump is the doing of both segments
    of_second_order = np.sqrt(np.maximum(strain, jolt).max(axis=1))
    of_third_order = np.cbrt((np.abs(jerk) / limits.jerk).max(axis=1))
    return np.maximum(np.maximum((fastest / limits.velocity).max(axis=1), of_second_order), np.maximum(of_third_order, 1.0))


def _overrun(knots: F64, velocity: F64, h: F64, limits: JointLimits) -> F64:
    """[K - 1] by how much each segment must be slower for the joints to stay, and to be stopped, inside their range."""
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
    """[K - 1, S, n] times in each segment: evenly spaced ones, and those at which velocity or angle has its extremes."""
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
    """Each joint brought to rest as fast as its acceleration and jerk limits allow: three phases of constant jerk.

    Args:
        start: The state it departs from.
        phase_s: [3, n] durations.
        jerk_rad_s3: [3, n] jerks.
    """

    start: JointState
    phase_s: F64
    jerk_rad_s3: F64

    @property
    def end_s(self) -> float:
        """When the slowest joint rests."""
        return float(self.phase_s.sum(axis=0).max())

    def sample(self, at_s: F64) -> tuple[F64, F64, F64]:
        """Angles, velocities and accelerations [M, n] at times [M]; at rest after the end."""
        q = np.broadcast_to(self.start.q_rad, (len(at_s), len(self.start.q_rad))).copy()
        v = np.broadcast_to(self.start.qd_rad_s, q.shape).copy()
        a = np.broadcast_to(self.start.qdd_rad_s2, q.shape).copy()
        left = np.broadcast_to(at_s[:, None], q.shape).copy()
        for duration, jerk in zip(self.phase_s, self.jerk_rad_s3, strict=True):
            t = np.clip(left, 0.0, duration)
            q = q + t * (v + t * (a / 2 + t * jerk / 6))
            v = v + t * (a + t * jerk / 2)
            a = a + t * jerk
            left = left - t
        rested = at_s[:, None] >= self.phase_s.sum(axis=0)
        return q, np.where(rested, 0.0, v), np.where(rested, 0.0, a)


def plan_stop(start: JointState, limits: JointLimits) -> StopProfile:
    """The time-optimal stop of every joint under acceleration and jerk limits.

    With jerk J and the acceleration a first brought to zero, the velocity would become ``v + a|a| / 2J``; its sign says
    which way to brake. The peak deceleration A then follows from ``A^2 = J v + a^2 / 2``, cut at the limit.
    """
    phases, jerks = _stop_phases(start.qd_rad_s, start.qdd_rad_s2, limits)
    return StopProfile(start, phases, jerks)


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
    """[..., n] where each joint would come to rest if it braked now."""
    durations, jerks = _stop_phases(v, a, limits)
    for t, jerk in zip(durations, jerks, strict=True):
        q = q + t * (v + t * (a / 2 + t * jerk / 6))
        v = v + t * (a + t * jerk / 2)
        a = a + t * jerk
    return q
