"""Solve all rows of a chunk at once: the second pass for chunks that a row-by-row solution misses.

Row by row the arm may run into a joint's end or fall behind where it should have turned its elbow
earlier, as near straight elbows. Here damped least squares (Gauss-Newton) minimise the sum over all
rows of the squared errors, in metres and radians, within the bounds of every row and step. Each
quadratic program is solved by a primal-dual interior point method (Mehrotra 1992); its matrix is
banded, since only neighbouring rows are coupled: a millisecond or two for 32 rows, against 30 by a
dense solver.

Legend: T rows, n joints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack  # pyright: ignore[reportMissingTypeStubs]

from strands_cosmos3.checks import F64
from strands_cosmos3.control.levenberg_marquardt import LevenbergMarquardt
from strands_cosmos3.control.trajectory import START_TOLERANCE_RAD
from strands_cosmos3.robots.joints import JointLimits

LIMIT_MARGIN_RAD = 0.01
_PASSES = 20
_DAMPING, _LEAST_DAMPING, _MOST_DAMPING = 1e-4, 1e-9, 1.0
_SMOOTHING = 1e-6  # weight of the squared steps: it keeps the redundant joint quiet
_STALL = 1e-3  # least gain of a pass
_ITERATIONS = 40
_GAP = 1e-12  # of the quadratic program
_cholesky_banded: Any = getattr(lapack, "dpbtrf")  # noqa: B009 - scipy creates the names at import
_solve_banded: Any = getattr(lapack, "dpbtrs")  # noqa: B009
_AT_BOUND_RAD = 1e-9
_SNAP_RAD = 2e-7  # an interior point method ends just inside a bound


@dataclass(frozen=True, eq=False)
class StepBounds:
    """Bounds of each row's angles [n], and of the step from the row before (None: unbounded)."""

    lower: F64
    upper: F64
    reach_rad: F64 | None

    @classmethod
    def of(cls, limits: JointLimits, start_rad: F64, dt_s: float | None) -> StepBounds:
        """Return the bounds of rows that follow angles [n], ``dt_s`` apart (None: at any speed).

        Targets keep :data:`LIMIT_MARGIN_RAD` from a joint's end; a start within it is not pushed
        out.

        Raises:
            InputError: The start lies outside the range by more than :data:`START_TOLERANCE_RAD`.
        """
        limits.require_start(start_rad, START_TOLERANCE_RAD)
        return cls(
            np.minimum(limits.q_min + LIMIT_MARGIN_RAD, start_rad),
            np.maximum(limits.q_max - LIMIT_MARGIN_RAD, start_rad),
            None if dt_s is None else limits.velocity * dt_s,
        )

    def around(self, angles_rad: F64) -> tuple[F64, F64]:
        """Bounds of the row after ``angles_rad`` [n]."""
        if self.reach_rad is None:
            return self.lower, self.upper
        return np.maximum(self.lower, angles_rad - self.reach_rad), np.minimum(
            self.upper, angles_rad + self.reach_rad
        )

    def active(self, start_rad: F64, angles_rad: F64) -> NDArray[np.bool_]:
        """[T, n] whether angles [T, n] lie at a bound of their row."""
        ends = [self.around(before) for before in (start_rad, *angles_rad[:-1])]
        return np.array([at_bound(row, *end) for row, end in zip(angles_rad, ends, strict=True)])


def at_bound(angles_rad: F64, lower: F64, upper: F64) -> NDArray[np.bool_]:
    """[n] whether angles lie at a bound."""
    return (angles_rad <= lower + _AT_BOUND_RAD) | (angles_rad >= upper - _AT_BOUND_RAD)


def look_ahead(
    solver: LevenbergMarquardt,
    targets: F64,
    q_start: F64,
    start_rad: F64,
    seeds: list[F64],
    bounds: StepBounds,
) -> F64:
    """Return the angles [T, n] within bounds that come nearest to target poses [T, 4, 4],
    descending from each seed [T, n].

    Args:
        q_start: [nq] configuration at the start; joints off the chain keep its values.
        start_rad: [n] the chain's angles in it.
    """

    def linearize(angles_rad: F64) -> tuple[F64, F64]:
        """[T, 6] errors and [T, 6, n] Jacobians at angles [T, n]."""
        rows = [solver.linearize([T], q_start, q) for T, q in zip(targets, angles_rad, strict=True)]
        errors, jacobians = zip(*rows, strict=True)
        return np.stack(errors), np.stack(jacobians)

    solutions = [_descend(linearize, start_rad, seed, bounds) for seed in seeds]
    return min(solutions, key=lambda solution: solution[1])[0]


def _descend(
    linearize: Callable[[F64], tuple[F64, F64]], start: F64, seed: F64, bounds: StepBounds
) -> tuple[F64, float]:
    """Angles [T, n], and the greatest error of a row in metres and radians."""
    reach = bounds.upper - bounds.lower if bounds.reach_rad is None else bounds.reach_rad
    angles = seed
    error, jacobian = linearize(angles)
    cost = float(np.sum(error * error))
    damping = _DAMPING
    for _ in range(_PASSES):
        blocks = np.einsum("tki,tkj->tij", jacobian, jacobian) + damping * np.eye(len(start))
        step = solve_banded_program(
            blocks, -np.einsum("tki,tk->ti", jacobian, error), angles, start, bounds, reach
        )
        trial = _inside(angles + step, start, bounds)
        trial_error, trial_jacobian = linearize(trial)
        trial_cost = float(np.sum(trial_error * trial_error))
        if trial_cost >= cost:
            damping *= 100
            if damping > _MOST_DAMPING:
                break
            continue
        stalled = trial_cost > (1 - _STALL) * cost
        angles, error, jacobian, cost = trial, trial_error, trial_jacobian, trial_cost
        damping = max(damping / 10, _LEAST_DAMPING)
        if stalled:
            break
    return angles, float(np.sqrt(np.sum(error * error, axis=1).max()))


def _inside(angles: F64, start: F64, bounds: StepBounds) -> F64:
    """Remove what the program's tolerance leaves outside of bounds, and put angles that all but
    reach a bound on it.
    """
    inside = np.empty_like(angles)
    before = start
    for row, target in enumerate(angles):
        lower, upper = bounds.around(before)
        snapped = np.where(target < lower + _SNAP_RAD, lower, target)
        inside[row] = before = np.where(target > upper - _SNAP_RAD, upper, snapped)
    return inside


def solve_banded_program(
    blocks: F64, gradient: F64, angles: F64, start: F64, bounds: StepBounds, reach: F64
) -> F64:
    """Return the change d [T, n] of angles [T, n] that minimises a quadratic cost within bounds.

    The cost is ``sum_i d_i' B_i d_i / 2 + g_i' d_i``, with ``blocks`` B [T, n, n] and ``gradient``
    g [T, n], and the squared steps from row to row times their weight. Slacks s and multipliers y
    are [4, T, n]: step up, step down, upper, lower.
    """
    steps = np.diff(np.vstack((start, angles)), axis=0)
    room = np.stack((reach - steps, reach + steps, bounds.upper - angles, angles - bounds.lower))
    gradient = gradient + _SMOOTHING * _differences_transposed(steps)
    d = np.zeros_like(angles)
    s = np.maximum(room, 1e-3 * reach)
    y = np.full_like(s, 0.1 * np.abs(gradient).max() + 1e-12)
    for _ in range(_ITERATIONS):
        gap = float(np.mean(s * y))
        if gap < _GAP:
            break
        curvature = np.einsum("tij,tj->ti", blocks, d) + _SMOOTHING * _differences_transposed(
            _differences(d)
        )
        dual = curvature + gradient + _forces(y)
        primal = _sides(d) + s - room
        factor, failed = _factorize(blocks, y / s)
        if failed:  # as near to the solution as the precision allows
            break
        _, ds, dy = _newton(factor, s, y, dual, primal, s * y)
        share = min(_longest(s, ds), _longest(y, dy))
        expected = float(np.mean((s + share * ds) * (y + share * dy)))
        dd, ds, dy = _newton(
            factor, s, y, dual, primal, s * y + ds * dy - (expected / gap) ** 3 * gap
        )
        share = 0.99 * min(_longest(s, ds), _longest(y, dy))
        d, s, y = d + share * dd, s + share * ds, y + share * dy
    return d


def _newton(
    factor: Any, s: F64, y: F64, dual: F64, primal: F64, products: F64
) -> tuple[F64, F64, F64]:
    """Newton step of d, s and y that removes the residuals and reduces s * y by ``products``."""
    target = -dual - _forces((y * primal - products) / s)
    dd: F64 = _solve_banded(factor, target.ravel(), lower=1)[0].reshape(dual.shape)
    ds = -primal - _sides(dd)
    return dd, ds, -(products + y * ds) / s


def _differences(d: F64) -> F64:
    return np.diff(d, axis=0, prepend=np.zeros((1, d.shape[1])))


def _differences_transposed(y: F64) -> F64:
    differences = y.copy()
    differences[:-1] -= y[1:]
    return differences


def _sides(d: F64) -> F64:
    """[4, T, n] what a change adds to the left side of each bound."""
    steps = _differences(d)
    return np.stack((steps, -steps, d, -d))


def _forces(y: F64) -> F64:
    """[T, n] the transpose of :func:`_sides`."""
    return _differences_transposed(y[0] - y[1]) + y[2] - y[3]


def _longest(value: F64, change: F64) -> float:
    """Greatest share, at most 1, of a change after which positive values stay so."""
    falling = change < 0
    return min(1.0, float((-value[falling] / change[falling]).min())) if falling.any() else 1.0


def _factorize(blocks: F64, weights: F64) -> tuple[F64, bool]:
    """Cholesky factor of the program's matrix, whose lower band is as wide as a row has joints,
    and whether there is none.
    """
    T, n, _ = blocks.shape
    band = np.zeros((n + 1, T, n))
    for k in range(n):
        band[k, :, : n - k] = blocks[:, np.arange(k, n), np.arange(n - k)]
    coupling = weights[0] + weights[1] + _SMOOTHING
    band[0] += coupling + weights[2] + weights[3]
    band[0, :-1] += coupling[1:]
    band[n, :-1] -= coupling[1:]
    factor, info = _cholesky_banded(band.reshape(n + 1, T * n), lower=1)
    return factor, info != 0
