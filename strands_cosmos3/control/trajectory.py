"""From rows at the chunk's rate to a smooth joint motion that keeps the arm's limits.

The motion is a cubic Hermite spline: it passes every row, starts with the velocity that the arm's reference has (so that
speed is carried over the seam between chunks) and its knot velocities make the acceleration continuous. Where the rows ask
for more velocity, acceleration or jerk than the joints have, or for a speed that could not be braked before a joint's end,
time is stretched there: the path stays, the clock slows down, and the rows concerned are reported.

Legend: K knots, n joints, S samples in a segment, M sampled times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline

from strands_cosmos3.arm.panda import JointLimits
from strands_cosmos3.checks import F64
from strands_cosmos3.errors import ControlError

_SAMPLES = 6
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
    """

    spline: JointSpline
    nominal_s: F64
    stretched: NDArray[np.bool_]


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
    """
    if t_s[0] < dt_s:
        q_rad, t_s = q_rad[1:], t_s[1:]
    if len(t_s) == 0:
        q_rad, t_s = start.q_rad[None], np.array([dt_s])
    knots = np.vstack((start.q_rad, q_rad))
    nominal_s = np.concatenate(([0.0], t_s))
    asked = np.diff(nominal_s)
    h = asked.copy()
    for _ in range(_MAX_PASSES):
        velocity = _knot_velocities(knots, h, start.qd_rad_s)
        excess = _excess(knots, velocity, h, start, limits, dt_s)
        if excess.max() <= _TOLERANCE:
            t = np.concatenate(([0.0], np.cumsum(h)))
            return PlannedMotion(JointSpline(t, knots, velocity), nominal_s, h > asked * 1.0001)
        stretch = h / asked * np.where(excess > _TOLERANCE, np.minimum(excess * _OVERSHOOT, 2.0), 1.0)
        h = asked * _ramped(stretch)
    raise ControlError(
        f"no time law within the joint limits was found for this chunk: it starts at "
        f"{np.abs(start.qd_rad_s).max():.2f} rad/s and still exceeds its limits {excess.max():.2f}-fold. Stop the arm first."
    )


def _ramped(stretch: F64) -> F64:
    """[K - 1] the least stretch that is no less than asked and changes by no more than a factor from row to row.

    A slow row beside a fast one would make the spline swing out: the joint would back up to gather speed.
    """
    for order in (range(1, len(stretch)), range(len(stretch) - 2, -1, -1)):
        towards = -1 if order.step > 0 else 1
        for k in order:
            stretch[k] = max(stretch[k], stretch[k + towards] / _RAMP)
    return stretch


def _knot_velocities(knots: F64, h: F64, v_start: F64) -> F64:
    """[K, n] velocities that make the acceleration continuous; the last segment ends without acceleration."""
    if len(knots) == 2:
        v_end = 1.5 * (knots[1] - knots[0]) / h[0] - 0.5 * v_start  # a cubic whose end has no acceleration
        return np.vstack((v_start, v_end))
    t = np.concatenate(([0.0], np.cumsum(h)))
    spline = CubicSpline(t, knots, bc_type=((1, v_start), (2, np.zeros_like(v_start))))
    return spline(t, 1)


def _excess(knots: F64, velocity: F64, h: F64, start: JointState, limits: JointLimits, dt_s: float) -> F64:
    """[K - 1] by how much each segment must be slower (1 = not at all), over joints and limits."""
    s = np.linspace(0.0, 1.0, _SAMPLES)[None, :, None]  # [1, S, 1]
    span = h[:, None, None]
    q, v, a = _hermite(
        knots[:-1, None], knots[1:, None], velocity[:-1, None], velocity[1:, None], span, s * span
    )  # [K - 1, S, n]
    jerk = np.abs(a[:, -1] - a[:, 0]) / h[:, None]
    jump = np.abs(a[0, 0] - start.qdd_rad_s2) / dt_s
    braked = braking_position(q, v, a, limits)
    room = np.where(v > 0, limits.q_max - q, q - limits.q_min)
    beyond = np.maximum(braked - limits.q_max, limits.q_min - braked)
    brake = np.where(beyond > 1e-9, np.abs(braked - q) / np.maximum(room, 1e-4), 1.0)
    ratios = np.stack(
        [
            (np.abs(v) / limits.velocity).max(axis=(1, 2)),
            np.sqrt(np.abs(a) / limits.acceleration).max(axis=(1, 2)),
            np.cbrt(jerk / limits.jerk).max(axis=1),
            np.sqrt(brake).max(axis=(1, 2)),
        ]
    ).max(axis=0)
    ratios[0] = max(ratios[0], float(np.sqrt(jump / limits.jerk).max()))
    return np.maximum(ratios, 1.0)


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
