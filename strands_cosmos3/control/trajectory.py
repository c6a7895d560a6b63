"""Plan a smooth joint motion within the arm's limits through the rows of a chunk.

The motion passes every row, begins in the state of the present reference, and consists of pieces of
constant jerk, so that the acceleration is continuous, across chunks as well. Its velocities at the
rows are those of a cubic spline. If that would overshoot a joint's end, a monotone spline takes its
place or, as a last resort, straight lines that halt at every row. Where the rows exceed a limit of
the joints or of the hand, or reach a state from which the arm could not be stopped within them,
time is stretched: the path stays nearly the same, the clock slows down.

Legend: K knots (the start, then the rows), n joints, p pieces of a segment, M sampled times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator  # pyright: ignore[reportMissingTypeStubs]
from scipy.linalg import solve_banded  # pyright: ignore

from strands_cosmos3.checks import F64
from strands_cosmos3.control.stops import (
    RANGE_TOLERANCE_RAD,
    JointState,
    StopProfile,
    braking_range,
    constant_jerk,
    fastest,
    plan_stop,
    stop_strain,
)
from strands_cosmos3.errors import ControlError, InputError, MotionBoundsError
from strands_cosmos3.robots.joints import JointLimits

__all__ = [
    "JointSpline",
    "JointState",
    "PlannedMotion",
    "StopProfile",
    "plan_motion",
    "plan_stop",
]

MAX_ROWS = 1000
MAX_DURATION_S = 60.0
MAX_STRETCH_S = 40.0
LEAST_PERIOD_S = 1e-4  # of references
START_TOLERANCE_RAD = 0.02  # a measured start may lie a little outside the range that targets keep
_SLOWEST = 2.0  # times as long as straight lines with halts; these are better then
_MAX_PASSES = 60  # of a law: each stretches time by what the one before exceeds the limits
_NEARLY_FACTOR = 1.0002  # of a joint's limit, for which passes aim
_EXACTLY_FACTOR = 1 + 1e-9  # of it, for rounding: no plan is taken that uses more
_ROUNDING_RAD = 8e-15  # beyond a joint's end, likewise
_RAMP = 1.5
_START_RAMP = 3.0  # times the shortest in which the start's acceleration can become the spline's
_OVERSHOOT = 1.01  # each pass stretches slightly more than needed, so that the passes end
# of the hand's limits that a plan may use: it is checked at times _SAMPLE_S apart
_HAND_SHARE = 0.997
_STOP_SHARE = 0.97  # of them that a stop may use
_SAMPLE_S = 0.005
_SAMPLES = 32  # of a piece
_STOP_EVERY = 5  # samples


@dataclass(frozen=True, eq=False)
class JointSpline:
    """A motion through angles [K, n] at increasing times [K], in pieces of constant jerk.

    The P pieces begin at ``piece_s`` [P] in the states ``pieces`` (angles, velocities,
    accelerations, jerks), each [P, n].
    """

    t_s: F64
    q_rad: F64
    piece_s: F64
    pieces: tuple[F64, F64, F64, F64]

    @property
    def end_s(self) -> float:
        """Time of the last knot."""
        return float(self.t_s[-1])

    def sample(self, at_s: F64) -> tuple[F64, F64, F64]:
        """Return angles, velocities and accelerations [M, n] at times [M], clipped to the knots'
        span.
        """
        at_s = np.clip(at_s, self.t_s[0], self.t_s[-1])
        k = np.maximum(np.searchsorted(self.piece_s, at_s, side="right") - 1, 0)
        q, v, a, jerk = (x[k] for x in self.pieces)
        return constant_jerk(q, v, a, (at_s - self.piece_s[k])[:, None], jerk)

    def segment(self, at_s: F64) -> NDArray[np.intp]:
        """Return the segments [M], from 0 to K - 2, that end at or after times [M]."""
        return np.clip(np.searchsorted(self.t_s, at_s) - 1, 0, len(self.t_s) - 2)


@dataclass(frozen=True, eq=False)
class PlannedMotion:
    """A spline, and how its timing differs from the chunk's.

    Args:
        spline: The motion; its first knot is the reference that it starts from.
        nominal_s: [K] times of the knots at the chunk's own rate.
        stretched: [K - 1] whether the segment to a row takes longer than at the chunk's rate.
        smooth: Whether it is the smooth spline; False if rows lie so near a joint's end that this
            would overshoot it.
    """

    spline: JointSpline
    nominal_s: F64
    stretched: NDArray[np.bool_]
    smooth: bool = True


def plan_motion(
    start: JointState, q_rad: F64, t_s: F64, limits: JointLimits, dt_s: float
) -> PlannedMotion:
    """Plan a motion from ``start``, the reference at time zero, through rows of joint angles,
    within limits.

    Args:
        q_rad, t_s: [T, n] rows and [T] increasing times; a first row at zero is merged into the
            start.
        dt_s: Period of the references, at least :data:`LEAST_PERIOD_S`; a stop may begin at any of
            them.

    Raises:
        MotionBoundsError: There are more than :data:`MAX_ROWS` rows, they take longer than
            :data:`MAX_DURATION_S`, or the limits would delay the last by more than
            :data:`MAX_STRETCH_S`.
        ControlError: The start lies outside the joints' range by more than
            :data:`START_TOLERANCE_RAD`, or is too fast for the rows, however far time is stretched;
            the latter never happens from rest.
    """
    limits.require_start(start.q_rad, START_TOLERANCE_RAD, ControlError)
    _require_bounded(start.q_rad, q_rad, t_s, limits)
    if t_s[0] < dt_s:
        q_rad, t_s = q_rad[1:], t_s[1:]
    if len(t_s) == 0:
        q_rad = start.q_rad[None]
        t_s = np.array([dt_s])
    knots = np.vstack((start.q_rad, q_rad))
    nominal_s = np.concatenate(([0.0], t_s))
    requested = np.diff(nominal_s)
    allowed = _Allowed.at(start, limits)
    for law in (_smooth, _monotone, *((_straight,) if start.rests else ())):
        spline = _stretch(law, knots, requested, start, allowed, limits, dt_s)
        if spline is not None:
            return PlannedMotion(
                spline, nominal_s, np.diff(spline.t_s) > requested * 1.0001, law is _smooth
            )
    if start.rests:
        raise _too_long(t_s, _straight_s(knots, limits).sum())
    raise ControlError(
        "no time law within the joint limits was found for this chunk: it starts at "
        f"{np.abs(start.qd_rad_s).max():.2f} rad/s "
        "and its rows cannot be met from there. Stop the arm first."
    )


def reference_period(dt_s: float) -> float:
    """Return the period of references; InputError unless it is :data:`LEAST_PERIOD_S` to 1 s."""
    if not LEAST_PERIOD_S * (1 - 1e-9) <= dt_s <= 1:
        raise InputError(
            f"dt_s must be at least {LEAST_PERIOD_S:g} s and at most 1 s, got {dt_s!r}."
        )
    return float(dt_s)


def _require_bounded(q_start: F64, q_rad: F64, t_s: F64, limits: JointLimits) -> None:
    """Raise MotionBoundsError if a motion would need too many rows or too much time, before
    anything is computed from it.
    """
    if len(t_s) > MAX_ROWS or t_s[-1] > MAX_DURATION_S:
        raise MotionBoundsError(
            f"the chunk has {len(t_s)} rows in {t_s[-1]:.1f} s; at most {MAX_ROWS} rows and "
            f"{MAX_DURATION_S:g} s are "
            "accepted. Send it in shorter chunks."
        )
    least_s = _fastest_s(np.vstack((q_start, q_rad)), limits).sum()
    if least_s > t_s[-1] + MAX_STRETCH_S:
        raise _too_long(t_s, least_s)


def _fastest_s(knots: F64, limits: JointLimits) -> F64:
    """[K - 1] lower bound of each segment's duration."""
    return np.abs(np.diff(knots, axis=0) / limits.velocity).max(axis=1)


def _too_long(t_s: F64, least_s: float) -> MotionBoundsError:
    return MotionBoundsError(
        f"the chunk's {len(t_s)} rows are due in {t_s[-1]:.1f} s, but within the limits they take "
        f"{least_s:.1f} s; at most "
        f"{MAX_STRETCH_S:g} s more than asked are accepted. Send rows that lie closer together."
    )


_Law = Callable[[F64, F64, JointState, JointLimits], JointSpline]


def _stretch(
    law: _Law,
    knots: F64,
    wanted_s: F64,
    start: JointState,
    allowed: _Allowed,
    limits: JointLimits,
    dt_s: float,
) -> JointSpline | None:
    """The law's motion, slowed down until it is within limits, or None if slowing down does not
    help.
    """
    least_s = np.maximum(wanted_s, _straight_s(knots, limits))
    slowest = 1.0 if law is _monotone else _SLOWEST
    longest_s = min(slowest * least_s.sum(), wanted_s.sum() + MAX_STRETCH_S)
    independent = law is _straight
    stretch = np.maximum((least_s if independent else _fastest_s(knots, limits)) / wanted_s, 1.0)
    for _ in range(_MAX_PASSES):
        h = wanted_s * (stretch if independent else _ramped(stretch))
        if h.sum() > longest_s:
            return None
        spline = law(knots, h, start, limits)
        excess = _excess(spline, allowed, limits, dt_s, in_range=independent)
        if excess.max() <= 1.0:
            return spline
        stretch = h / wanted_s * np.where(excess > 1.0, np.minimum(excess * _OVERSHOOT, 2.0), 1.0)
    return None


def _ramped(stretch: F64) -> F64:
    """[K - 1] the least stretch >= the given one with a bounded ratio between rows, so that the
    spline does not swing out.
    """
    for direction in (stretch, stretch[::-1]):
        for k in range(1, len(stretch)):
            direction[k] = max(direction[k], direction[k - 1] / _RAMP)
    return stretch


def _smooth(knots: F64, h: F64, start: JointState, limits: JointLimits) -> JointSpline:
    """The cubic spline through the knots; its first segment takes over the start's acceleration."""
    velocity = _smooth_velocities(knots, h, start.qd_rad_s)
    first, last = _cubic_ends(knots, velocity, h)
    acceleration = np.vstack((start.qdd_rad_s2, first[1:]))
    jerk = np.repeat(((last - first) / h[:, None])[:, None], 3, axis=1)
    change = start.qdd_rad_s2 - first[0]
    # share of the segment
    ramp = float(np.clip(_START_RAMP * (np.abs(change) / limits.jerk).max() / h[0], 0.02, 1 / 3))
    share = np.tile(np.full(3, 1 / 3), (len(h), 1))
    share[0] = ramp, (1 - ramp) / 2, (1 - ramp) / 2
    jerk[0] += np.outer(_blend(share[0]), change / h[0])
    return _in_pieces(knots, velocity, acceleration, h, share * h[:, None], jerk)


def _blend(share: F64) -> F64:
    """[3] jerks, in pieces of these shares of a segment of 1 s, that take away an acceleration of 1
    at its beginning.

    At its end they have changed neither angle nor velocity.
    """
    after = 1.0 - np.cumsum(share)
    of_velocity = share * (after + share / 2)
    of_angle = share * (after**2 / 2 + after * share / 2 + share**2 / 6)
    return np.linalg.solve(
        np.stack((share, of_velocity, of_angle)), np.array([-1.0, -1.0, -0.5])
    ).astype(np.float64)


_START_BLEND = np.array([-11.0, 7.0, -2.0])[:, None] / 6
_END_BLEND = np.array([2.0, -7.0, 11.0])[:, None] / 6


def _monotone(knots: F64, h: F64, start: JointState, limits: JointLimits) -> JointSpline:
    """A motion that stays between each segment's knots, or nearly; it ends at rest (velocities:
    Fritsch and Butland 1984).
    """
    t = np.concatenate(([0.0], np.cumsum(h)))
    velocity = np.asarray(PchipInterpolator(t, knots)(t, 1))
    velocity[0] = start.qd_rad_s
    velocity[-1] = 0.0
    first, last = _cubic_ends(knots, velocity, h)
    inner = np.where(
        first[1:] * last[:-1] > 0,
        np.sign(first[1:]) * np.minimum(np.abs(first[1:]), np.abs(last[:-1])),
        0.0,
    )
    acceleration = np.vstack((start.qdd_rad_s2, inner, np.zeros_like(first[:1])))
    # three equal pieces: the cubic where that has these accelerations; otherwise each difference
    # adds jerks that take it away within the segment and move neither angle nor velocity at its
    # ends
    third = h / 3
    before = (acceleration[:-1] - first) / third[:, None]
    after = (acceleration[1:] - last) / third[:, None]
    jerk = (
        ((last - first) / h[:, None])[:, None]
        + _START_BLEND * before[:, None]
        + _END_BLEND * after[:, None]
    )
    pieces_s = np.repeat(third[:, None], 3, axis=1)
    return _in_pieces(knots, velocity, acceleration[:-1], h, pieces_s, jerk)


def _straight(knots: F64, h: F64, start: JointState, limits: JointLimits) -> JointSpline:
    """Straight lines between knots with rest at each: seven pieces of constant jerk, within the
    joints' limits.
    """
    ramp, acceleration, cruise = _profile(knots, limits)
    speeding = ramp, acceleration - 2 * ramp, ramp
    share = np.stack((*speeding, cruise, *speeding), axis=1)
    share = np.where(share.sum(axis=1, keepdims=True) > 0, share, 1.0)
    piece_s = np.maximum(share, 0.0) / share.sum(axis=1, keepdims=True) * h[:, None]  # [K - 1, 7]
    ramp = piece_s[:, 0]
    acceleration = piece_s[:, :3].sum(axis=1)
    cruise = piece_s[:, 3]
    # jerk that covers a distance of 1
    unit = 1.0 / (ramp * (acceleration - ramp) * (acceleration + cruise))
    jerk = (unit[:, None] * np.array([1, 0, -1, 0, -1, 0, 1]))[..., None] * np.diff(knots, axis=0)[
        :, None
    ]
    still = np.zeros_like(knots)
    return _in_pieces(knots, still, still[:-1], h, piece_s, jerk)


def _straight_s(knots: F64, limits: JointLimits) -> F64:
    """[K - 1] least duration of each segment as a straight line from rest to rest."""
    _, acceleration, cruise = _profile(knots, limits)
    return 2 * acceleration + cruise


def _profile(knots: F64, limits: JointLimits) -> F64:
    """[3, K - 1] durations of a jerk ramp, of an acceleration and of cruising on straight lines;
    zero where nothing moves.
    """
    distance = np.maximum(np.abs(np.diff(knots, axis=0)), 1e-12)
    V: F64 = (limits.velocity / distance).min(axis=1)
    A: F64 = (limits.acceleration / distance).min(axis=1)
    J: F64 = (limits.jerk / distance).min(axis=1)
    ramp = np.minimum(A / J, np.sqrt(V / J))
    acceleration = V / (J * ramp) + ramp
    reached = V * acceleration <= 1.0
    short_ramp = np.minimum(A / J, np.cbrt(0.5 / J))
    short = np.maximum(
        short_ramp / 2 + np.sqrt(short_ramp * short_ramp / 4 + 1.0 / (J * short_ramp)),
        2 * short_ramp,
    )
    moves = distance.max(axis=1) > 1e-12
    to_speed = ramp, acceleration, 1.0 / V - acceleration
    too_short = short_ramp, short, np.zeros_like(short)
    return np.where(moves, np.where(reached, to_speed, too_short), 0.0)


def _smooth_velocities(knots: F64, h: F64, v_start: F64) -> F64:
    """[K, n] velocities that make the acceleration continuous; the last segment ends without
    acceleration.

    At an inner knot both segments' accelerations agree: ``v- / h- + 2 v (1 / h- + 1 / h+) + v+ / h+
    = 3 (s- / h- + s+ / h+)`` with slopes s; at the end ``v- + 2 v = 3 s-``. One tridiagonal system
    serves all joints.
    """
    inverse, n = 1.0 / h, len(knots)
    pull = 3.0 * np.diff(knots, axis=0) * (inverse * inverse)[:, None]
    bands = np.zeros((3, n))
    right_side = np.empty_like(knots)
    bands[0, 2:] = inverse[1:]
    bands[2, : n - 2] = inverse[:-1]
    bands[1, 1:-1] = 2.0 * (inverse[:-1] + inverse[1:])
    bands[1, 0] = 1.0
    bands[1, -1] = 2.0 * inverse[-1]
    bands[2, n - 2] = inverse[-1]
    right_side[0] = v_start
    right_side[1:-1] = pull[:-1] + pull[1:]
    right_side[-1] = pull[-1]
    solved = solve_banded((1, 1), bands, right_side, check_finite=False)  # pyright: ignore
    return np.asarray(solved, dtype=np.float64)  # pyright: ignore[reportUnknownArgumentType]


def _cubic_ends(knots: F64, velocity: F64, h: F64) -> tuple[F64, F64]:
    """[K - 1, n] accelerations at the beginning and at the end of each segment's cubic."""
    span = h[:, None]
    slope = np.diff(knots, axis=0) / h[:, None]
    v0, v1 = velocity[:-1], velocity[1:]
    return (6 * slope - 4 * v0 - 2 * v1) / span, (-6 * slope + 2 * v0 + 4 * v1) / span


def _in_pieces(
    knots: F64, velocity: F64, acceleration: F64, h: F64, piece_s: F64, jerk: F64
) -> JointSpline:
    """Put a motion together from durations [K - 1, p] and jerks [K - 1, p, n], and accelerations
    [K - 1, n] at the knots.
    """
    states: list[tuple[F64, F64, F64]] = []
    state = knots[:-1], velocity[:-1], acceleration
    for i in range(jerk.shape[1]):
        states.append(state)
        state = constant_jerk(*state, piece_s[:, i, None], jerk[:, i])
    t = np.concatenate(([0.0], np.cumsum(h)))
    begins = t[:-1, None] + np.cumsum(piece_s, axis=1) - piece_s
    q, v, a = np.stack(states, axis=2).reshape(3, -1, knots.shape[1])
    return JointSpline(t, knots, begins.ravel(), (q, v, a, jerk.reshape(q.shape)))


@dataclass(frozen=True, eq=False)
class _Bounds:
    """What the joints may use of their limits [n]; the start's own values are given and cannot
    be slowed down.
    """

    velocity: F64
    acceleration: F64
    jerk: F64
    q_min: F64
    q_max: F64

    @classmethod
    def at(
        cls,
        start: JointState,
        limits: JointLimits,
        tolerance: float,
        beyond_rad: float,
        start_rad: float,
    ) -> _Bounds:
        q, v, a = start.q_rad, start.qd_rad_s, start.qdd_rad_s2
        low, high = braking_range(q, v, a, limits)
        return cls(
            tolerance * np.maximum(limits.velocity, fastest(v, a, limits)),
            np.maximum(tolerance * limits.acceleration, np.abs(a) * _EXACTLY_FACTOR),
            tolerance * limits.jerk,
            np.minimum(limits.q_min - beyond_rad, low - start_rad),
            np.maximum(limits.q_max + beyond_rad, high + start_rad),
        )


@dataclass(frozen=True, eq=False)
class _Allowed:
    """What a plan may use of the limits: passes stretch it until it is ``nearly`` within them,
    then until it is ``exactly``.
    """

    nearly: _Bounds
    exactly: _Bounds
    hand: float
    hand_squared: float
    stop: float

    @classmethod
    def at(cls, start: JointState, limits: JointLimits) -> _Allowed:
        speed = hand = stop = 0.0
        if limits.hands and not start.rests:
            speed, hand = (float(x[0]) for x in _hand_strain(*start.batch, limits))
            stop = float(stop_strain(*start.batch, limits, _STOP_SHARE)[0])
        return cls(
            _Bounds.at(start, limits, _NEARLY_FACTOR, RANGE_TOLERANCE_RAD, 1e-12),
            _Bounds.at(start, limits, _EXACTLY_FACTOR, _ROUNDING_RAD, _ROUNDING_RAD),
            min(max(_HAND_SHARE, speed * _EXACTLY_FACTOR), _NEARLY_FACTOR),
            min(max(_HAND_SHARE, hand * _EXACTLY_FACTOR), _NEARLY_FACTOR),
            min(max(_STOP_SHARE, stop * 1.001), 1.0),
        )


def _hand_strain(q: F64, v: F64, a: F64, limits: JointLimits) -> F64:
    """[2, M] greatest speed and acceleration of a hand in joint states [M, n], as shares of their
    limits.
    """
    shares: list[tuple[F64, F64]] = []
    for hand in limits.hands:
        _, speed, acceleration = hand.chain.motion(
            hand.of_chain(q), hand.of_chain(v), hand.of_chain(a)
        )
        speed = np.linalg.norm(speed, axis=1) / hand.velocity
        shares.append((speed, np.linalg.norm(acceleration, axis=1) / hand.acceleration))
    return np.max(shares, axis=0)


def _excess(
    spline: JointSpline, allowed: _Allowed, limits: JointLimits, dt_s: float, in_range: bool
) -> F64:
    """[K - 1] factor by which each segment must be slower (1 = not at all), over joints and limits.

    A motion is ``in_range``, and can be stopped there, if it halts between knots that are.
    """
    # the other checks are dearer, and slower motions pass more of them
    excess = _rates(spline, allowed.nearly)
    if excess.max() <= 1.0:
        excess = _along(spline, allowed, limits, dt_s, in_range)
    if excess.max() <= 1.0:
        excess = _rates(spline, allowed.exactly)
        if not in_range:
            at_s = np.append(_references_s(spline, dt_s), spline.end_s)
            excess = np.maximum(
                excess,
                _slower(spline, at_s, _overrun(*spline.sample(at_s), allowed.exactly, limits)),
            )
    return excess


def _rates(spline: JointSpline, allowed: _Bounds) -> F64:
    """[K - 1] factors on time by which velocity, acceleration and jerk exceed those. Exact, as jerk
    is constant.

    A stop reaches no greater velocity: it takes an acceleration away as fast as may be, and the
    motion ends without one.
    """
    _, v0, a0, jerk = spline.pieces
    span = np.diff(spline.piece_s, append=spline.end_s)[:, None]
    a1 = a0 + jerk * span
    v1 = v0 + span * (a0 + jerk * span / 2)
    turns = a0 * a1 < 0  # the velocity has an extreme inside the piece
    inside = v0 - np.divide(a0 * a0, 2 * jerk, out=np.zeros_like(jerk), where=turns)
    speed = (
        np.maximum(np.maximum(np.abs(v0), np.abs(v1)), np.where(turns, np.abs(inside), 0.0))
        / allowed.velocity
    )
    hardest = np.maximum(np.abs(a0), np.abs(a1)) / allowed.acceleration
    factor = np.maximum(np.maximum(speed, np.sqrt(hardest)), np.cbrt(np.abs(jerk) / allowed.jerk))
    return np.maximum(factor.max(axis=1).reshape(len(spline.t_s) - 1, -1).max(axis=1), 1.0)


def _along(
    spline: JointSpline, allowed: _Allowed, limits: JointLimits, dt_s: float, in_range: bool
) -> F64:
    """[K - 1] factor by which each segment must be slower, for the hand's limits, and for stops
    within all of them.
    """
    at_s = _between(spline)
    q, v, a = spline.sample(at_s)
    factor = np.ones(len(at_s)) if in_range else _overrun(q, v, a, allowed.nearly, limits)
    if limits.hands:
        speed, acceleration = _hand_strain(q, v, a, limits)
        factor = np.maximum(
            factor, np.maximum(speed / allowed.hand, np.sqrt(acceleration / allowed.hand_squared))
        )
    if factor.max() > 1.0:
        return _slower(spline, at_s, factor)
    slower = np.ones(len(spline.t_s) - 1)
    if not in_range:
        grid_s = _references_s(spline, dt_s)
        slower = _slower(spline, grid_s, _overrun(*spline.sample(grid_s), allowed.nearly, limits))
    ends = np.searchsorted(at_s, np.append(spline.piece_s[1:], spline.end_s) - 1e-12)
    some = np.unique(
        np.concatenate((np.arange(0, len(at_s), _STOP_EVERY), np.minimum(ends, len(at_s) - 1)))
    )
    strain = stop_strain(q[some], v[some], a[some], limits, allowed.stop) / allowed.stop
    return np.maximum(slower, _slower(spline, at_s[some], np.sqrt(strain)))


def _slower(spline: JointSpline, at_s: F64, factor: F64) -> F64:
    """[K - 1] factor by which each segment must be slower, for factors [M] at times [M]."""
    slower = np.ones(len(spline.t_s) - 1)
    np.maximum.at(
        slower, spline.segment(at_s), np.where(factor > 1.0, np.clip(factor, 1.002, 2.0), 1.0)
    )
    return slower


def _references_s(spline: JointSpline, dt_s: float) -> F64:
    """Times of the references, at which a stop may begin."""
    return np.arange(1, int(spline.end_s / dt_s) + 1, dtype=np.float64) * dt_s


def _between(spline: JointSpline) -> F64:
    """[M] times in every piece: its end, and others ``_SAMPLE_S`` apart, or further in a long
    one.
    """
    span = np.diff(spline.piece_s, append=spline.end_s)
    count = np.ceil(span / _SAMPLE_S).clip(max=_SAMPLES).astype(int)
    first = np.repeat(np.cumsum(count) - count, count)
    part = (np.arange(len(first)) - first + 1) / np.repeat(count, count)
    return np.repeat(spline.piece_s, count) + part * np.repeat(span, count)


def _overrun(q: F64, v: F64, a: F64, allowed: _Bounds, limits: JointLimits) -> F64:
    """[M] factor by which the motion must be slower for the joints to stay, and be stoppable,
    inside their range and speed.
    """
    speed = fastest(v, a, limits)
    factor = (speed / allowed.velocity).max(axis=1)
    far = speed * (np.abs(a) + limits.acceleration) / limits.jerk + speed * speed / (
        2 * limits.acceleration
    )
    # joints that may come near an end
    near = np.asarray(((q + far > limits.q_max) | (q - far < limits.q_min)).any(axis=0))
    if near.any():
        few = limits.only(near)
        q, v, a = q[:, near], v[:, near], a[:, near]
        low, high = braking_range(q, v, a, few)
        room = np.maximum(np.where(v > 0, few.q_max - q, q - few.q_min), 1e-4)
        beyond = (high > allowed.q_max[near]) | (low < allowed.q_min[near])
        brake = np.sqrt(np.maximum(np.maximum(high - q, q - low) / room, 1.1))
        factor = np.maximum(factor, np.where(beyond, brake, 1.0).max(axis=1))
    return factor
