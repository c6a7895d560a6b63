"""Stops: how every joint is brought to rest within its limits, and the hand within its own.

A stop is time-optimal in each joint. If that would accelerate the hand too much, the joints brake
more gently, over a common time, but always hard enough to stay inside their range.

Legend: n joints, M states or times, C candidates, S times in a stop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64
from strands_cosmos3.robots.joints import JointLimits

__all__ = ["JointState", "StopProfile", "plan_stop"]

RANGE_TOLERANCE_RAD = 5e-10  # beyond a joint's end, for rounding: a row may lie at the end
_STOP_S = (0.0, 0.05, 0.065, 0.08, 0.1, 0.125, 0.16, 0.2, 0.25, 0.32, 0.4, 0.5, 0.65)
_FEW_STOPS_S = (0.25, 0.5, 0.125, 0.065, 0.0)
_GENTLEST = 0.02  # of a joint's acceleration limit
_FURTHER = 1.05  # margin on the way that a stop needs
_STOP_SHARE = 0.999  # of the hand's limits that a stop may use


@dataclass(frozen=True, eq=False)
class JointState:
    """Angles [n], velocities [n] and accelerations [n] of a reference at one moment."""

    q_rad: F64
    qd_rad_s: F64
    qdd_rad_s2: F64

    @classmethod
    def at_rest(cls, q_rad: F64) -> JointState:
        """Return the state of rest at angles [n]."""
        q = np.array(q_rad, dtype=np.float64)
        return cls(q, np.zeros(len(q)), np.zeros(len(q)))

    @property
    def batch(self) -> tuple[F64, F64, F64]:
        """The same, each [1, n]."""
        return self.q_rad[None], self.qd_rad_s[None], self.qdd_rad_s2[None]

    @property
    def rests(self) -> bool:
        """Whether nothing moves, nor is about to."""
        return not self.qd_rad_s.any() and not self.qdd_rad_s2.any()


@dataclass(frozen=True, eq=False)
class StopProfile:
    """A stop of every joint: three phases of constant jerk, [3, n] durations and jerks."""

    start: JointState
    phase_s: F64
    jerk_rad_s3: F64

    @property
    def end_s(self) -> float:
        """Time at which the last joint comes to rest."""
        return float(self.phase_s.sum(axis=0).max())

    def sample(self, at_s: F64) -> tuple[F64, F64, F64]:
        """Return angles, velocities and accelerations [M, n] at times [M]; at rest after the
        end.
        """
        return _braked(
            self.start.batch, self.phase_s[:, None], self.jerk_rad_s3[:, None], at_s[:, None]
        )


def plan_stop(start: JointState, limits: JointLimits) -> StopProfile:
    """Plan the quickest stop within the joints' limits and, where it can be done inside the joints'
    range, the hand's.

    If the acceleration a were first brought to zero with jerk J, the velocity would become ``v +
    a|a| / 2J``; its sign gives the direction of braking. The peak deceleration A follows from ``A^2
    = J v + a^2 / 2``, capped at the limit.
    """
    candidates_s = _STOP_S if limits.hands else (0.0,)
    strain, phase_s, jerk = _strain(start.batch, np.array(candidates_s), limits)
    good = strain[0] <= _STOP_SHARE
    chosen = int(np.argmax(good) if good.any() else np.argmin(strain[0]))
    return StopProfile(start, phase_s[:, 0, chosen], jerk[:, 0, chosen])


def stop_strain(q: F64, v: F64, a: F64, limits: JointLimits, enough: float) -> F64:
    """[M] share of the hand's limits that a stop from each state [M, n] uses; the first that
    uses ``enough`` or less.
    """
    if not limits.hands:
        return np.zeros(len(q))
    least = _strain_bound(q, v, a, limits, _FEW_STOPS_S[0])
    for stop_s in _FEW_STOPS_S:
        left = np.flatnonzero(least > enough)
        if not len(left):
            break
        least[left] = np.minimum(
            least[left], _strain((q[left], v[left], a[left]), np.array([stop_s]), limits)[0][:, 0]
        )
    return least


def braking_range(q: F64, v: F64, a: F64, limits: JointLimits) -> tuple[F64, F64]:
    """[..., n] least and greatest angles on the way to rest if the joints braked now, as hard as
    they may.
    """
    return _extent(q, v, a, *_phases(v, a, limits.acceleration, limits.jerk), limits.jerk)


def constant_jerk(q: F64, v: F64, a: F64, t: F64, jerk: F64) -> tuple[F64, F64, F64]:
    """Position, velocity and acceleration after ``t`` seconds of constant jerk."""
    change = t * jerk
    return q + t * (v + t * (a / 2 + change / 6)), v + t * (a + change / 2), a + change


def _strain_bound(q: F64, v: F64, a: F64, limits: JointLimits, stop_s: float) -> F64:
    """[M] upper bound of the share that a stop over ``stop_s`` uses where this is below one, else
    inf; cheap.

    With r_i the length of the arm beyond joint i, the hand's speed is at most ``sum r_i |v_i|``,
    and its acceleration at most ``sum r_i |a_i| + 2 (sum |v_i|) (sum r_i |v_i|)``. Where a joint
    may leave its range it is inf as well.
    """
    speed = fastest(v, a, limits)
    deceleration = _decelerations(q, v, a, np.array(stop_s), limits)
    travel = speed * (np.abs(a) + deceleration) / limits.jerk + speed * speed / (2 * deceleration)
    slowing = np.maximum(deceleration, np.abs(a))
    strain = np.zeros(len(q))
    for hand in limits.hands:
        reach = hand.chain.reach_m
        chain_speed = hand.of_chain(speed)
        fast = chain_speed @ reach
        hard = hand.of_chain(slowing) @ reach + 2 * chain_speed.sum(1) * fast
        strain = np.maximum(strain, np.maximum(fast / hand.velocity, hard / hand.acceleration))
    leaves = (
        (slowing >= limits.acceleration) | (q + travel > limits.q_max) | (q - travel < limits.q_min)
    )
    return np.where((strain > 0.95) | leaves.any(axis=1), np.inf, strain)


def fastest(v: F64, a: F64, limits: JointLimits) -> F64:
    """[..., n] speeds that the joints reach if their acceleration is taken away from now on, as
    fast as it may be.
    """
    return np.maximum(np.abs(v), np.abs(v + a * np.abs(a) / (2 * limits.jerk)))


def _strain(state: tuple[F64, F64, F64], stop_s: F64, limits: JointLimits) -> tuple[F64, F64, F64]:
    """Share [M, C] of the hand's limits that stops over ``stop_s`` [C] use (inf if they leave the
    range), and their phases.

    States are [M, n], phases and jerks [3, M, C, n].
    """
    q, v, a = (x[:, None] for x in state)
    decelerations = _decelerations(q, v, a, stop_s[:, None], limits)
    phase_s, jerk = _phases(v, a, decelerations, limits.jerk)
    if not limits.hands:
        return np.zeros(decelerations.shape[:2]), phase_s, jerk
    # [M, C, 3, n]; between them accelerations are linear in time
    ends = np.moveaxis(np.cumsum(phase_s, axis=0), 0, -2)
    # [M, C, S]
    at_s = np.concatenate(
        (ends.reshape(*ends.shape[:2], -1), ends[..., 2, :].max(-1)[..., None] * _BETWEEN), -1
    )
    along = _braked(
        (q[:, :, None], v[:, :, None], a[:, :, None]),
        phase_s[..., None, :],
        jerk[..., None, :],
        at_s[..., None],
    )
    flat = [x.reshape(-1, x.shape[-1]) for x in along]
    strain = np.zeros(at_s.shape[:2])
    for hand in limits.hands:
        _, speed, acceleration = hand.chain.motion(*map(hand.of_chain, flat))
        share = np.maximum(
            _length(speed) / hand.velocity, _length(acceleration) / hand.acceleration
        )
        strain = np.maximum(strain, share.reshape(at_s.shape).max(axis=-1))
    return (
        np.where(_leaves(q, v, a, phase_s, jerk, limits) & (stop_s > 0), np.inf, strain),
        phase_s,
        jerk,
    )


def _leaves(
    q: F64, v: F64, a: F64, phase_s: F64, jerk: F64, limits: JointLimits
) -> NDArray[np.bool_]:
    """[M, C] whether a stop leaves the joints' range where braking as hard as possible would
    not.
    """
    low, high = _extent(q, v, a, phase_s, jerk, limits.jerk)
    outside = (low < limits.q_min) | (high > limits.q_max)
    if outside.any():
        least, most = braking_range(q, v, a, limits)
        outside = outside & ((low < least) | (high > most))
    return np.asarray(outside.any(axis=-1), dtype=np.bool_)


_BETWEEN = np.array([0.15, 0.3, 0.5, 0.7, 0.9])


def _length(vectors: F64) -> F64:
    return np.sqrt(np.einsum("mi,mi->m", vectors, vectors))


def _decelerations(q: F64, v: F64, a: F64, stop_s: F64, limits: JointLimits) -> F64:
    """[..., n] decelerations that stop the joints in about ``stop_s``, or before their ends; the
    limits for ``stop_s`` = 0.

    With deceleration A a joint of speed v turns by ``v^2 / 2A + v A / 2J`` before it rests; the
    smaller root is the gentler.
    """
    speed = v + a * np.abs(a) / (2 * limits.jerk)
    room = np.maximum(np.where(speed > 0, limits.q_max - q, q - limits.q_min), 1e-9)
    fast = np.abs(speed)
    gentle = fast / np.maximum(stop_s, 1e-9)
    tight = room / _FURTHER
    spare = tight * tight - fast**3 / limits.jerk
    hard = np.where(
        spare > 0, fast * fast / (tight + np.sqrt(np.maximum(spare, 0.0))), limits.acceleration
    )
    deceleration = np.maximum(np.maximum(gentle, hard), _GENTLEST * limits.acceleration)
    return np.where(stop_s > 0, np.minimum(deceleration, limits.acceleration), limits.acceleration)


def _phases(v: F64, a: F64, A: F64, J: F64) -> tuple[F64, F64]:
    """[3, ..., n] durations and jerks that bring velocities and accelerations to zero,
    decelerating by at most A [..., n].
    """
    speed = v + a * np.abs(a) / (2 * J)
    sign = np.where(speed >= 0, 1.0, -1.0) * np.ones_like(A)
    v, a, speed = sign * v, sign * a, np.abs(speed)
    relax = -a > A  # a joint that decelerates harder than that already
    most = np.where(
        relax, A, np.maximum(np.minimum(np.sqrt(np.maximum(J * v + a * a / 2, 0.0)), A), -a)
    )
    left = np.where(relax, speed, v + (a * a - 2 * most * most) / (2 * J))
    durations = np.stack(
        [np.abs(a + most) / J, np.maximum(left, 0.0) / np.maximum(most, 1e-12), most / J]
    )
    jerk = sign * J
    return durations, np.stack([np.where(relax, jerk, -jerk), np.zeros_like(jerk), jerk])


def _extent(q: F64, v: F64, a: F64, phase_s: F64, jerk: F64, J: F64) -> tuple[F64, F64]:
    """[..., n] least and greatest angle in a stop. A joint that decelerates already may turn
    back before it rests.
    """
    sign = jerk[2] / J
    back = np.minimum(sign * v, 0.0)  # velocity against the direction of braking, at first
    a_back = sign * a
    t = np.where(
        back < 0, (a_back - np.sqrt(np.maximum(a_back * a_back + 2 * J * back, 0.0))) / J, 0.0
    )
    turn = constant_jerk(q, v, a, np.maximum(t, 0.0), jerk[0])[0]
    end = q
    for duration, j in zip(phase_s, jerk, strict=True):
        end, v, a = constant_jerk(end, v, a, duration, j)
    return np.minimum(np.minimum(q, turn), end), np.maximum(np.maximum(q, turn), end)


def _braked(
    state: tuple[F64, F64, F64], phase_s: F64, jerk: F64, at_s: F64
) -> tuple[F64, F64, F64]:
    """Angles, velocities and accelerations at times, for states, phases [3, ...] and times whose
    shapes broadcast.
    """
    shape = np.broadcast_shapes(state[0].shape, phase_s.shape[1:], at_s.shape)
    left = np.broadcast_to(at_s, shape)
    rests = left >= phase_s.sum(axis=0)
    q, v, a = state
    for duration, j in zip(phase_s, jerk, strict=True):
        t = np.clip(left, 0.0, duration)
        q, v, a = constant_jerk(q, v, a, t, j)
        left = left - t
    return q, np.where(rests, 0.0, v), np.where(rests, 0.0, a)
