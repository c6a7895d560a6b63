"""Levenberg-Marquardt on MuJoCo's Jacobians: the fast path of inverse kinematics, for steps without
an active limit.

Each iteration solves ``(J J^T + lambda I) y = e``, ``dq = J^T y`` (Wampler 1986), a 6 x 6 system
whatever the number of joints. lambda falls after a step that reduced the error and grows otherwise.
numpy's call overhead dominates the cost: buffers are therefore reused, and scalars are Python
floats.
"""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack  # pyright: ignore[reportMissingTypeStubs]

from strands_cosmos3.checks import F64

# Slightly tighter than the convergence tolerances in ik.py.
_POSITION_TOLERANCE_SQ = 0.9e-6**2
_ROTATION_TOLERANCE_SQ = float(0.9 * np.deg2rad(1e-4)) ** 2
_MAX_ITERATIONS = 30
_LAMBDA_MIN = 1e-9
_LAMBDA_MAX = 1e2
_cholesky_solve: Any = getattr(lapack, "dposv")  # noqa: B009 - scipy creates the name at import


class LevenbergMarquardt:
    """Solver for one frame (body, site or geom) of a model; the addresses [n] of its joints
    index qpos and qvel.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        frame_id: int,
        frame_type: str,
        q_address: NDArray[np.intp],
        dof_address: NDArray[np.intp],
    ):
        self.model = model
        self.data = mujoco.MjData(model)
        self._frame_id = frame_id
        self._q_indices = _as_slice(q_address)
        self._dof_indices = _as_slice(dof_address)
        self._jacobian = {
            "body": mujoco.mj_jacBody,
            "site": mujoco.mj_jacSite,
            "geom": mujoco.mj_jacGeom,
        }[frame_type]
        prefix = {"body": "", "site": "site_", "geom": "geom_"}[frame_type]
        self._position = getattr(self.data, f"{prefix}xpos")[frame_id]
        self._rotation = getattr(self.data, f"{prefix}xmat")[frame_id]
        self._J = np.zeros((6, model.nv))
        self._J_position, self._J_rotation = self._J[:3], self._J[3:]
        self._quat, self._target_quat, self._local_rotation = np.zeros(4), np.zeros(4), np.zeros(3)
        self._error = np.zeros(6)
        self._error_position, self._error_rotation = self._error[:3], self._error[3:]
        self._identity = np.eye(6)

    def pose(self, q_rad: F64) -> F64:
        """Return the pose [4, 4] of the frame in the world at a configuration [nq]."""
        self.data.qpos[:] = q_rad
        mujoco.mj_kinematics(self.model, self.data)
        T = np.eye(4)
        T[:3, :3], T[:3, 3] = self._rotation.reshape(3, 3), self._position
        return T

    def residual(self, T_world_ee: F64, q_rad: F64) -> tuple[float, float]:
        """Return the distance [m] and angle [rad] between a target pose [4, 4] and the frame at
        a configuration [nq].
        """
        self.data.qpos[:] = q_rad
        mujoco.mju_mat2Quat(self._target_quat, T_world_ee[:3, :3].reshape(9))
        position_sq, rotation_sq = self._evaluate(q_rad[self._q_indices], T_world_ee[:3, 3])
        return position_sq**0.5, rotation_sq**0.5

    def solve(
        self, T_world_ee: F64, angles_rad: F64, self_motion_rad: F64
    ) -> tuple[F64, float, float, int]:
        """Solve for a pose [4, 4] from initial angles [n], without limits; other joints keep their
        values in ``data.qpos``.

        The first step also moves by the part of ``self_motion_rad`` [n] that leaves the pose as it
        is.

        Returns the angles, the residuals in metres and radians, and the number of iterations.
        """
        target_position = T_world_ee[:3, 3]
        mujoco.mju_mat2Quat(self._target_quat, T_world_ee[:3, :3].reshape(9))
        position_sq, rotation_sq = self._evaluate(angles_rad, target_position)
        damping, iteration = _LAMBDA_MIN, 0
        while position_sq > _POSITION_TOLERANCE_SQ or rotation_sq > _ROTATION_TOLERANCE_SQ:
            if iteration == _MAX_ITERATIONS or damping > _LAMBDA_MAX:
                break
            iteration += 1
            trial = angles_rad + self._step(damping, self_motion_rad if iteration == 1 else None)
            trial_position_sq, trial_rotation_sq = self._evaluate(trial, target_position)
            if trial_position_sq + trial_rotation_sq < position_sq + rotation_sq:
                angles_rad, position_sq, rotation_sq = trial, trial_position_sq, trial_rotation_sq
                damping = max(damping * 0.1, _LAMBDA_MIN)
            else:
                self._evaluate(angles_rad, target_position)  # restore the state before the trial
                damping *= 100.0
        return angles_rad, position_sq**0.5, rotation_sq**0.5, iteration

    def linearize(self, T_world_ee: F64, q_rad: F64, angles_rad: F64) -> tuple[F64, F64]:
        """Return the error [6] (m, rad, in world axes) of angles [n] and its Jacobian [6, n];
        other joints as in ``q_rad``.
        """
        self.data.qpos[:] = q_rad
        mujoco.mju_mat2Quat(self._target_quat, T_world_ee[:3, :3].reshape(9))
        self._evaluate(angles_rad, T_world_ee[:3, 3])
        return self._error.copy(), self._update_jacobian().copy()

    def _evaluate(self, angles_rad: F64, target_position: F64) -> tuple[float, float]:
        """Return the squared position [m^2] and rotation [rad^2] errors; store the error vector
        (world axes) in ``_error``.
        """
        self.data.qpos[self._q_indices] = angles_rad
        mujoco.mj_kinematics(self.model, self.data)
        np.subtract(target_position, self._position, out=self._error_position)
        mujoco.mju_mat2Quat(self._quat, self._rotation)
        # rotation vector in the frame's own axes
        mujoco.mju_subQuat(self._local_rotation, self._target_quat, self._quat)
        mujoco.mju_rotVecQuat(self._error_rotation, self._local_rotation, self._quat)
        x, y, z, u, v, w = self._error.tolist()
        return x * x + y * y + z * z, u * u + v * v + w * w

    def _update_jacobian(self) -> F64:
        """Return the Jacobian [6, n] at the current kinematics."""
        mujoco.mj_comPos(self.model, self.data)
        self._jacobian(self.model, self.data, self._J_position, self._J_rotation, self._frame_id)
        return self._J[:, self._dof_indices]

    def _step(self, damping: float, self_motion_rad: F64 | None) -> F64:
        """Return the damped least-squares step [n] for ``_error`` at the current kinematics.

        With a self-motion z it is ``z + J^T (J J^T + lambda I)^-1 (e - J z)``, which adds z's
        projection on the null space.
        """
        J = self._update_jacobian()
        JJt = J @ J.T
        JJt += damping * self._identity
        error = self._error if self_motion_rad is None else self._error - J @ self_motion_rad
        _, y, info = _cholesky_solve(JJt, error)
        if info != 0:  # singular to working precision
            y = np.linalg.solve(JJt + 1e-6 * self._identity, error)
        return y @ J if self_motion_rad is None else y @ J + self_motion_rad


def _as_slice(address: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """Return consecutive indices as a slice, which numpy does not copy, and others unchanged."""
    first, n = int(address[0]), len(address)
    return (
        slice(first, first + n) if np.array_equal(address, np.arange(first, first + n)) else address
    )
