"""Levenberg-Marquardt on MuJoCo's Jacobians, for the frames of one or several limbs.

Each iteration solves ``(J W J^T + lambda I) y = e``, ``dq = W J^T y`` (Wampler 1986) with the
frames' errors e [6 L] and Jacobians J [6 L, n] stacked. The system is 6 L wide, whatever the number
of joints. lambda falls after a step that reduced the error and grows otherwise. The metric W says
how readily a joint turns. Within bounds, where a pose may be out of reach, a radian counts as so
many metres as the limb says. Numpy's call overhead dominates the cost for a single frame: buffers
are reused, and scalars are Python floats.

Legend: L frames, n joints of all limbs (each once), nq the model's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
from mujoco import (
    mj_comPos,
    mj_kinematics,
    mju_mat2Quat,
    mju_rotVecQuat,
    mju_subQuat,
)
from numpy.typing import NDArray
from scipy.linalg import lapack  # pyright: ignore[reportMissingTypeStubs]

from strands_cosmos3.checks import F64
from strands_cosmos3.robots.model import pose_of

# Slightly tighter than the convergence tolerances in ik.py.
_POSITION_TOLERANCE_SQ = 0.9e-6**2
_ROTATION_TOLERANCE_SQ = float(0.9 * np.deg2rad(1e-4)) ** 2
_MAX_ITERATIONS, _MAX_ITERATIONS_IN_BOX = 30, 50  # convergence is slower along active bounds
_LAMBDA_MIN = 1e-9
_LAMBDA_MAX = 1e2
_cholesky_solve: Any = getattr(lapack, "dposv")  # noqa: B009 - scipy creates the name at import


class _Frame:
    """A driven frame: its pose in MuJoCo's data, its target, and its rows of error and Jacobian.

    Attributes:
        view: MuJoCo's view of the frame.
        squares: Squared distance [m^2] and angle [rad^2] from the target, as of :meth:`update`.
    """

    def __init__(
        self, model: mujoco.MjModel, data: mujoco.MjData, kind: str, index: int, error: F64, J: F64
    ):
        self._model, self._data, self._id = model, data, index
        self._jacobian: Any = getattr(mujoco, f"mj_jac{kind.capitalize()}")
        self.view: Any = getattr(data, kind)(index)
        self._position: F64 = self.view.xpos
        self._rotation: F64 = self.view.xmat
        self._error = error
        self._error_m = error[:3]
        self._error_rad = error[3:]
        self._J_position = J[:3]
        self._J_rotation = J[3:]
        self._quat = np.zeros(4)
        self._target_quat = np.zeros(4)
        self._local_rad = np.zeros(3)
        self._target_m = np.zeros(3)
        self.squares = 0.0, 0.0

    def aim(self, T_world_frame: F64) -> None:
        """Set the target [4, 4]."""
        self._target_m = T_world_frame[:3, 3]
        mju_mat2Quat(self._target_quat, T_world_frame[:3, :3].reshape(9))

    def update(self) -> tuple[float, float]:
        """Write the error (m, rad, in world axes) at the present kinematics, and return its
        :attr:`squares`.
        """
        np.subtract(self._target_m, self._position, out=self._error_m)
        mju_mat2Quat(self._quat, self._rotation)
        # rotation vector in the frame's own axes
        mju_subQuat(self._local_rad, self._target_quat, self._quat)
        mju_rotVecQuat(self._error_rad, self._local_rad, self._quat)
        x, y, z, u, v, w = self._error.tolist()
        self.squares = squares = x * x + y * y + z * z, u * u + v * v + w * w
        return squares

    def update_jacobian(self) -> None:
        """Write the Jacobian at the present kinematics."""
        self._jacobian(self._model, self._data, self._J_position, self._J_rotation, self._id)


class LevenbergMarquardt:
    """Solver for frames that are solved together.

    Args:
        frames: Of each frame its kind (``"body"``, ``"site"`` or ``"geom"``) and its id.
        q_address, dof_address: [n] addresses of the joints in qpos and qvel.
        rotation_m: Of each frame, the metres that weigh as much as a radian in a box; a pose that
            is met has no error to weigh.
        weight: [n] diagonal of W in a box; a joint of weight zero stays where it is. None is the
            identity.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        frames: Sequence[tuple[str, int]],
        q_address: NDArray[np.intp],
        dof_address: NDArray[np.intp],
        rotation_m: Sequence[float],
        weight: F64 | None = None,
    ):
        self.model = model
        self.data = mujoco.MjData(model)
        self._qpos: F64 = self.data.qpos  # a view, which takes long to make
        self._q_indices = _as_slice(q_address)
        self._dof_indices = _as_slice(dof_address)
        self._weight = np.ones(len(q_address)) if weight is None else weight
        self._metric = np.repeat([[1.0, metres] for metres in rotation_m], 3)
        size = 6 * len(frames)
        self._error = np.zeros(size)
        self._identity = np.eye(size)
        self._J = np.zeros((size, model.nv))
        self._frames = [
            _Frame(model, self.data, kind, index, error, J)
            for (kind, index), error, J in zip(
                frames, self._error.reshape(-1, 6), self._J.reshape(-1, 6, model.nv), strict=True
            )
        ]

    def pose(self, q_rad: F64) -> F64:
        """Return the pose [4, 4] of the first frame in the world at a configuration [nq]."""
        self.data.qpos[:] = q_rad
        mj_kinematics(self.model, self.data)
        return pose_of(self._frames[0].view)

    def residual(self, T_world_frame: Sequence[F64], q_rad: F64) -> list[tuple[float, float]]:
        """Return each frame's distance [m] and angle [rad] from its target [4, 4] at a
        configuration [nq].
        """
        self._start(T_world_frame, q_rad)
        self._evaluate(q_rad[self._q_indices])
        return self._residuals()

    def solve(
        self,
        T_world_frame: Sequence[F64],
        q_rad: F64,
        self_motion_rad: F64,
        box: tuple[F64, F64] | None = None,
    ) -> tuple[F64, list[tuple[float, float]], int]:
        """Solve for the frames' targets [4, 4] from a configuration [nq]; other joints keep their
        values.

        The first step also moves by the part of ``self_motion_rad`` [n] that leaves the poses as
        they are. With a ``box``, no step leaves these bounds [n], and the start must lie inside;
        without, there are none.

        Returns:
            The angles [n], each frame's residual in metres and radians, and the number of
            iterations. ``data.qpos`` holds the configuration.
        """
        self._start(T_world_frame, q_rad)
        angles_rad = q_rad[self._q_indices]
        metric = None if box is None else self._metric
        cost, reached = self._evaluate(angles_rad, metric)
        damping, iteration = _LAMBDA_MIN, 0
        last = _MAX_ITERATIONS if box is None else _MAX_ITERATIONS_IN_BOX
        while not (reached or iteration == last or damping > _LAMBDA_MAX):
            iteration += 1
            self_motion = self_motion_rad if iteration == 1 else None
            trial = (
                angles_rad + self._step(self._error, self._update_jacobian(), damping, self_motion)
                if box is None
                else self._step_inside(damping, self_motion, angles_rad, box)
            )
            trial_cost, trial_reached = self._evaluate(trial, metric)
            if trial_cost < cost:
                angles_rad = trial
                cost = trial_cost
                reached = trial_reached
                damping = max(damping * 0.1, _LAMBDA_MIN)
            else:
                self._evaluate(angles_rad)  # restore the state before the trial
                damping *= 100.0
        return angles_rad, self._residuals(), iteration

    def linearize(
        self, T_world_frame: Sequence[F64], q_rad: F64, angles_rad: F64
    ) -> tuple[F64, F64]:
        """Return the weighted error [6 L] (m, in world axes) of angles [n] and its Jacobian [6 L,
        n]; other joints as in ``q_rad``.
        """
        self._start(T_world_frame, q_rad)
        self._evaluate(angles_rad)
        return self._metric * self._error, self._metric[:, None] * self._update_jacobian()

    def _start(self, T_world_frame: Sequence[F64], q_rad: F64) -> None:
        self._qpos[:] = q_rad
        for frame, target in zip(self._frames, T_world_frame, strict=True):
            frame.aim(target)

    def _evaluate(self, angles_rad: F64, metric: F64 | None = None) -> tuple[float, bool]:
        """Update the error at angles [n]; return its square, weighted by a metric [6 L] if any, and
        whether every frame has reached its target.
        """
        self._qpos[self._q_indices] = angles_rad
        mj_kinematics(self.model, self.data)
        cost, reached = 0.0, True
        for frame in self._frames:
            position_sq, rotation_sq = frame.update()
            cost += position_sq + rotation_sq
            if position_sq > _POSITION_TOLERANCE_SQ or rotation_sq > _ROTATION_TOLERANCE_SQ:
                reached = False
        return cost if metric is None else float(np.sum((metric * self._error) ** 2)), reached

    def _residuals(self) -> list[tuple[float, float]]:
        squares = [frame.squares for frame in self._frames]
        return [(position_sq**0.5, rotation_sq**0.5) for position_sq, rotation_sq in squares]

    def _update_jacobian(self) -> F64:
        """Return the Jacobian [6 L, n] at the current kinematics."""
        mj_comPos(self.model, self.data)
        for frame in self._frames:
            frame.update_jacobian()
        return self._J[:, self._dof_indices]

    def _step(
        self,
        error: F64,
        J: F64,
        damping: float,
        self_motion_rad: F64 | None,
        weight: F64 | None = None,
    ) -> F64:
        """Return the damped least-squares step [n] for an error [6 L] and its Jacobian.

        With a self-motion z it is ``z + W J^T (J W J^T + lambda I)^-1 (e - J z)``, which adds z's
        projection on the null space.
        """
        JW = J if weight is None else J * weight
        system = JW @ J.T
        system += damping * self._identity
        error = error if self_motion_rad is None else error - J @ self_motion_rad
        _, y, info = _cholesky_solve(system, error)
        if info != 0:  # singular to working precision
            y = np.linalg.solve(system + 1e-6 * self._identity, error)
        return y @ JW if self_motion_rad is None else y @ JW + self_motion_rad

    def _step_inside(
        self, damping: float, self_motion_rad: F64 | None, angles_rad: F64, box: tuple[F64, F64]
    ) -> F64:
        """Return the angles [n] after a step inside the box; joints that it would take out stop
        there, and the others do without them.
        """
        low, high = box
        error = self._metric * self._error
        J = self._metric[:, None] * self._update_jacobian()
        stopped = np.zeros_like(angles_rad)  # steps of the joints that have weight zero
        weight = self._weight
        step = stopped
        for _ in angles_rad:
            free = weight > 0
            motion = 0.0 if self_motion_rad is None else self_motion_rad
            step = self._step(error, J, damping, np.where(free, motion, stopped), weight)
            outside = free & ((angles_rad + step < low) | (angles_rad + step > high))
            if not outside.any():
                break
            stopped = np.where(outside, np.clip(angles_rad + step, low, high) - angles_rad, stopped)
            weight = np.where(outside, 0.0, weight)
        return np.clip(angles_rad + step, low, high)


def _as_slice(address: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """Return consecutive indices as a slice, which numpy does not copy, and others unchanged."""
    first = int(address[0])
    n = len(address)
    return (
        slice(first, first + n) if np.array_equal(address, np.arange(first, first + n)) else address
    )
