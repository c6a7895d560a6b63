"""Rotations and rigid transforms: rot6d, quaternions, Euler angles, SO(3) and SE(3), interpolation.

Every function is vectorised over leading axes, computes in float64, and is safe at the identity and
at half turns. ``R`` is a rotation matrix [..., 3, 3], ``T`` a rigid transform [..., 4, 4], ``w`` a
rotation vector [..., 3] in rad.

Arguments are checked: ShapeError, NonFiniteError for NaN or infinity, InputError for a matrix that
is not a rotation. ``kernels.py`` has the same arithmetic unchecked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation  # pyright: ignore[reportMissingTypeStubs]

from strands_cosmos3.actions.arrays import rigid, trailing
from strands_cosmos3.actions.kernels import (
    assemble,
    broadcast,
    exp,
    from_scipy,
    invert,
    log,
    nearest_rotation,
    to_rot6d,
    to_scipy,
    writable,
)
from strands_cosmos3.checks import F64, finite_array, require_rigid
from strands_cosmos3.errors import InputError

_UNIT_TOLERANCE = 1e-2
_TIME_TOLERANCE_S = 1e-9


def rot6d_to_matrix(rot6d: Any) -> F64:
    """Return the rotation [..., 3, 3] nearest to two concatenated columns [..., 6].

    Raises:
        InputError: A column is zero, or the two are parallel.
    """
    return nearest_rotation(trailing(rot6d, "rot6d", (6,)))


def matrix_to_rot6d(R: Any) -> F64:
    """[..., 3, 3] -> [..., 6]: r00 r10 r20 r01 r11 r21, the first two columns."""
    return to_rot6d(_rotation(R, "R"))


def quaternion_to_matrix(xyzw: Any) -> F64:
    """[..., 4] quaternions, scalar last -> [..., 3, 3]; :class:`InputError` if a norm is off one
    by more than 0.01.
    """
    q = trailing(xyzw, "quaternion", (4,))
    norm = np.linalg.norm(q, axis=-1)
    if np.abs(norm - 1).max() > _UNIT_TOLERANCE:
        worst = norm.flat[np.abs(norm - 1).argmax()]
        raise InputError(
            f"quaternion has norm {worst:.4g}; a rotation is a unit quaternion, ordered x y z w."
        )
    return from_scipy(Rotation.from_quat(writable(q, 4)), q.shape[:-1])


def matrix_to_quaternion(R: Any) -> F64:
    """[..., 3, 3] -> [..., 4] unit quaternions, scalar last and not negative."""
    rotation = _rotation(R, "R")
    xyzw = np.asarray(to_scipy(rotation).as_quat(canonical=True), dtype=np.float64)
    return xyzw.reshape(*rotation.shape[:-2], 4)


def euler_xyz_to_matrix(angles_rad: Any) -> F64:
    """[..., 3] **extrinsic** x, y, z angles -> [..., 3, 3] = Rz(c) Ry(b) Rx(a), the convention
    of DROID's raw poses.
    """
    angles = trailing(angles_rad, "angles_rad", (3,))
    return from_scipy(Rotation.from_euler("xyz", writable(angles, 3)), angles.shape[:-1])


def so3_exp(w: Any) -> F64:
    """[..., 3] rotation vectors -> [..., 3, 3]."""
    return exp(trailing(w, "rotation vector", (3,)))


def so3_log(R: Any) -> F64:
    """[..., 3, 3] -> [..., 3] rotation vectors of length at most pi."""
    return log(_rotation(R, "R"))


def geodesic_angle(R_a: Any, R_b: Any) -> F64:
    """[...] angle [rad] of the rotation from ``R_a`` to ``R_b``, both [..., 3, 3] and broadcast."""
    R_a, R_b = _rotation(R_a, "R_a"), _rotation(R_b, "R_b")
    return np.linalg.norm(log(_broadcast_matmul(np.swapaxes(R_a, -1, -2), R_b)), axis=-1)


def se3(R: Any, p: Any) -> F64:
    """[..., 3, 3] and [..., 3] -> [..., 4, 4], leading axes broadcast."""
    return assemble(_rotation(R, "R"), trailing(p, "p", (3,)))


def se3_inverse(T: Any) -> F64:
    """[..., 4, 4] -> [..., 4, 4], by transposing the rotation."""
    return invert(rigid(T, "T"))


def se3_between(T_a: Any, T_b: Any) -> F64:
    """``T_a^-1 T_b``: the pose of b seen from a, [..., 4, 4], leading axes broadcast."""
    return _broadcast_matmul(invert(rigid(T_a, "T_a")), rigid(T_b, "T_b"))


def interpolate_poses(T: Any, t_s: Any, at_s: Any) -> F64:
    """[M, 4, 4] poses between knots: position linear, rotation at constant angular velocity
    (slerp).

    Args:
        T, t_s: [N, 4, 4] knots, all in one frame, and their [N] times, strictly increasing.
        at_s: [M] query times, within the knots' span: nothing is extrapolated.

    Raises:
        InputError: The knots' times do not increase, or a query time lies outside their span.
    """
    knots = rigid(T, "T", leading=1)
    t = finite_array(t_s, "t_s", (len(knots),))
    at = finite_array(at_s, "at_s", (None,))
    if (np.diff(t) <= 0).any():
        raise InputError("t_s must increase strictly.")
    if at.min() < t[0] - _TIME_TOLERANCE_S or at.max() > t[-1] + _TIME_TOLERANCE_S:
        raise InputError(
            f"at_s spans {at.min():g}..{at.max():g} s, the knots {t[0]:g}..{t[-1]:g} s; clip it "
            "first."
        )
    if len(knots) == 1:
        return np.repeat(knots, len(at), axis=0)
    at = np.clip(at, t[0], t[-1])
    i = np.clip(np.searchsorted(t, at, side="right") - 1, 0, len(t) - 2)
    u = ((at - t[i]) / (t[i + 1] - t[i]))[:, None]
    steps = log(np.swapaxes(knots[:-1, :3, :3], -1, -2) @ knots[1:, :3, :3])
    position = (1 - u) * knots[i, :3, 3] + u * knots[i + 1, :3, 3]
    return assemble(knots[i, :3, :3] @ exp(u * steps[i]), position)


def _rotation(value: Any, name: str) -> F64:
    R = trailing(value, name, (3, 3))
    require_rigid(assemble(R, np.zeros(3)), name)
    return R


def _broadcast_matmul(A: F64, B: F64) -> F64:
    broadcast(A.shape[:-2], B.shape[:-2])
    return A @ B
