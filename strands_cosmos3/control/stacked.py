"""Damped least squares for limbs that share joints, e.g. a waist: the errors of all limbs at once,
over all joints.

Each iteration solves ``(J W J^T + lambda I) y = e``, ``dq = W J^T y``, with the limbs' errors e [6
L] and J [6 L, n] stacked. The metric W says how readily a joint turns: a shared one less than the
others, lest it turn for every motion of a hand.

Legend: L limbs, T rows, n joints of all limbs, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64, finite_array, instance_of
from strands_cosmos3.control.ik import posture_step
from strands_cosmos3.control.look_ahead import StepBounds
from strands_cosmos3.errors import InputError

_POSITION_TOLERANCE_M, _ROTATION_TOLERANCE_RAD = 0.9e-6, float(0.9 * np.deg2rad(1e-4))
_MAX_ITERATIONS = 50
_LAMBDA_MIN, _LAMBDA_MAX = 1e-9, 1e2


_Linearize = Callable[[F64, F64, F64], tuple[F64, F64]]


class StackedSolver:
    """Solver for the frames of several limbs.

    Args:
        linearize: Of each limb, :meth:`MinkIKBridge.linearize`.
        joints: Of each limb, the indices of its joints among all [n].
        weight: [n] W's diagonal; a joint of weight zero stays where it is.

    Raises InputError if the limbs' functions and joints differ in number, or the weights are no
    finite numbers.
    """

    def __init__(
        self, linearize: Sequence[_Linearize], joints: Sequence[NDArray[np.intp]], weight: F64
    ):
        instance_of(linearize, Sequence, "linearize")
        instance_of(joints, Sequence, "joints")
        if len(joints) != len(linearize):
            raise InputError(
                f"each of the {len(linearize)} limbs needs its joints; there are {len(joints)} "
                "lists of them."
            )
        self._limbs = list(zip(linearize, joints, strict=True))
        self._weight = finite_array(weight, "weight", (None,))

    def solve(
        self, targets: Sequence[F64], q: F64, angles: F64, bounds: StepBounds, posture: F64
    ) -> tuple[F64, NDArray[np.int_]]:
        """Return angles [T, n] and iterations [T] for each limb's poses [T, 4, 4], from angles [n]
        of a configuration [nq].

        The first iteration of a row also moves a little towards ``posture`` [n], as far as the
        poses allow.
        """
        rows: list[F64] = []
        iterations: list[int] = []
        for poses in zip(*targets, strict=True):
            angles, spent = self._row(poses, q, angles, bounds.around(angles), posture)
            rows.append(angles)
            iterations.append(spent)
        return np.array(rows), np.array(iterations)

    def _row(
        self, poses: Sequence[F64], q: F64, angles: F64, box: tuple[F64, F64], posture: F64
    ) -> tuple[F64, int]:
        damping, iteration = _LAMBDA_MIN, 0
        now = self._linearize(poses, q, angles)
        while not _reached(now[0]) and iteration < _MAX_ITERATIONS and damping <= _LAMBDA_MAX:
            iteration += 1
            wish = posture_step(posture, angles) if iteration == 1 else np.zeros_like(angles)
            trial = self._step(*now, angles, box, wish, damping)
            then = self._linearize(poses, q, trial)
            if then[0] @ then[0] < now[0] @ now[0]:
                angles, now = trial, then
                damping = max(damping * 0.1, _LAMBDA_MIN)
            else:
                damping *= 100.0
        return angles, iteration

    def _linearize(self, poses: Sequence[F64], q: F64, angles: F64) -> tuple[F64, F64]:
        """Errors [6 L] and Jacobian [6 L, n] at angles [n]."""
        errors, J = np.empty(6 * len(poses)), np.zeros((6 * len(poses), len(angles)))
        for limb, ((linearize, joints), pose) in enumerate(zip(self._limbs, poses, strict=True)):
            own = slice(6 * limb, 6 * limb + 6)
            errors[own], J[own, joints] = linearize(pose, q, angles[joints])
        return errors, J

    def _step(
        self, error: F64, J: F64, angles: F64, box: tuple[F64, F64], wish: F64, damping: float
    ) -> F64:
        """Angles [n] after a step inside the box; joints that it would take out stop there, and
        the others do without them.
        """
        (low, high), moved = box, np.zeros_like(angles)
        weight, change = self._weight.copy(), moved
        for _ in angles:
            free = weight > 0
            z = np.where(free, wish, moved)
            JW = J * weight
            change = (
                np.where(
                    free,
                    JW.T @ np.linalg.solve(JW @ J.T + damping * np.eye(len(J)), error - J @ z),
                    0.0,
                )
                + z
            )
            out = free & ((angles + change < low) | (angles + change > high))
            if not out.any():
                break
            moved = np.where(out, np.clip(angles + change, low, high) - angles, moved)
            weight = np.where(out, 0.0, weight)
        return np.clip(angles + change, low, high)


def _reached(error: F64) -> bool:
    position, rotation = (
        np.linalg.norm(part, axis=1) for part in np.split(error.reshape(-1, 6), 2, axis=1)
    )
    return bool(
        position.max() <= _POSITION_TOLERANCE_M and rotation.max() <= _ROTATION_TOLERANCE_RAD
    )


__all__ = ["StackedSolver"]
