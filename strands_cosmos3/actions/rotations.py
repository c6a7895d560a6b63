"""Rotations and rigid transforms: rot6d, quaternions, Euler angles, SO(3) and SE(3), interpolation.

Every function is vectorised over leading axes, computes in float64, and is safe at the identity and
at half turns. ``R`` is a rotation matrix [..., 3, 3], ``T`` a rigid transform [..., 4, 4], ``w`` a
rotation vector [..., 3] in rad. Arguments are trusted, except for what a model or a peer may send:
rot6d and quaternions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation  # pyright: ignore[reportMissingTypeStubs]

from strands_cosmos3.checks import F64
from strands_cosmos3.errors import InputError

_DEGENERATE = 1e-6
_UNIT_TOLERANCE = 1e-2


def rot6d_to_matrix(rot6d: Any) -> F64:
    """Return the rotation [..., 3, 3] nearest to two concatenated columns [..., 6].

    With c0, c1 the columns, ``[c0, c1, c0 x c1]`` is projected on SO(3) by SVD, as in
    cosmos-framework's ``pose_utils``; its determinant ``|c0 x c1|^2`` is positive. Gram-Schmidt
    would put the whole error of noisy columns on c1: up to 3.6 degrees.

    Raises:
        InputError: A column is zero, or the two are parallel.
    """
    columns = np.asarray(rot6d, dtype=np.float64)
    c0 = columns[..., :3]
    c1 = columns[..., 3:]
    c2 = np.cross(c0, c1)
    lengths = np.linalg.norm(c0, axis=-1), np.linalg.norm(c1, axis=-1)
    sine = np.linalg.norm(c2, axis=-1) / np.maximum(lengths[0] * lengths[1], np.finfo(float).tiny)
    if min(lengths[0].min(), lengths[1].min(), sine.min()) < _DEGENERATE:
        raise InputError(
            "rot6d holds a zero column or two parallel ones, which define no rotation; it must be "
            "the first two columns of a rotation matrix, concatenated. Was the row de-normalised?"
        )
    U, _, Vt = np.linalg.svd(np.stack([c0, c1, c2], axis=-1))
    return U @ Vt


def matrix_to_rot6d(R: F64) -> F64:
    """[..., 3, 3] -> [..., 6]: r00 r10 r20 r01 r11 r21, the first two columns."""
    columns = np.swapaxes(R[..., :2], -1, -2)
    return columns.reshape(*columns.shape[:-2], 6)


def quaternion_to_matrix(xyzw: Any) -> F64:
    """[..., 4] quaternions, scalar last -> [..., 3, 3]; :class:`InputError` if a norm is off one
    by more than 0.01.
    """
    q = np.asarray(xyzw, dtype=np.float64)
    norm = np.linalg.norm(q, axis=-1)
    if not np.abs(norm - 1).max() <= _UNIT_TOLERANCE:
        worst = norm.flat[np.abs(norm - 1).argmax()]
        raise InputError(
            f"quaternion has norm {worst:.4g}; a rotation is a unit quaternion, ordered x y z w."
        )
    return _matrices(Rotation.from_quat(_writable(q, 4)), q.shape[:-1])


def matrix_to_quaternion(R: F64) -> F64:
    """[..., 3, 3] -> [..., 4] unit quaternions, scalar last and not negative."""
    xyzw = np.asarray(_rotations(R).as_quat(canonical=True), dtype=np.float64)
    return xyzw.reshape(*R.shape[:-2], 4)


def euler_xyz_to_matrix(angles_rad: Any) -> F64:
    """[..., 3] **extrinsic** x, y, z angles -> [..., 3, 3] = Rz(c) Ry(b) Rx(a), the convention
    of DROID's raw poses.
    """
    angles = np.asarray(angles_rad, dtype=np.float64)
    return _matrices(Rotation.from_euler("xyz", _writable(angles, 3)), angles.shape[:-1])


def so3_exp(w: Any) -> F64:
    """[..., 3] rotation vectors -> [..., 3, 3]."""
    w = np.asarray(w, dtype=np.float64)
    return _matrices(Rotation.from_rotvec(_writable(w, 3)), w.shape[:-1])


def so3_log(R: F64) -> F64:
    """[..., 3, 3] -> [..., 3] rotation vectors of length at most pi."""
    return np.asarray(_rotations(R).as_rotvec(), dtype=np.float64).reshape(*R.shape[:-2], 3)


def geodesic_angle(R_a: F64, R_b: F64) -> F64:
    """[...] angle [rad] of the rotation from ``R_a`` to ``R_b``, both [..., 3, 3] and broadcast."""
    return np.linalg.norm(so3_log(np.swapaxes(R_a, -1, -2) @ R_b), axis=-1)


def pose_distances(T_a: F64, T_b: F64) -> F64:
    """[2, ...] distances in metres and angles in radians between poses [..., 4, 4], broadcast."""
    distance_m = np.linalg.norm(T_a[..., :3, 3] - T_b[..., :3, 3], axis=-1)
    return np.stack((distance_m, geodesic_angle(T_a[..., :3, :3], T_b[..., :3, :3])))


def se3(R: F64, p: Any) -> F64:
    """[..., 3, 3] and [..., 3] -> [..., 4, 4], leading axes broadcast."""
    lead = np.broadcast_shapes(R.shape[:-2], np.shape(p)[:-1])
    T = np.zeros((*lead, 4, 4))
    T[..., :3, :3], T[..., :3, 3], T[..., 3, 3] = R, p, 1.0
    return T


def se3_inverse(T: F64) -> F64:
    """[..., 4, 4] -> [..., 4, 4], by transposing the rotation."""
    R_inverse = np.swapaxes(T[..., :3, :3], -1, -2)
    return se3(R_inverse, -np.einsum("...ij,...j->...i", R_inverse, T[..., :3, 3]))


def se3_between(T_a: F64, T_b: F64) -> F64:
    """``T_a^-1 T_b``: the pose of b seen from a, [..., 4, 4], leading axes broadcast."""
    return se3_inverse(T_a) @ T_b


def interpolate_poses(T: F64, t_s: Any, at_s: Any) -> F64:
    """[M, 4, 4] poses between knots: position linear, rotation at constant angular velocity
    (slerp).

    Args:
        T, t_s: [N, 4, 4] knots, all in one frame, and their [N] times, strictly increasing.
        at_s: [M] query times; beyond the knots' span the first or last knot is taken.
    """
    knots, t, at = (np.asarray(value, dtype=np.float64) for value in (T, t_s, at_s))
    if len(knots) == 1:
        return np.repeat(knots, len(at), axis=0)
    at = np.clip(at, t[0], t[-1])
    i = np.clip(np.searchsorted(t, at, side="right") - 1, 0, len(t) - 2)
    u = ((at - t[i]) / (t[i + 1] - t[i]))[:, None]
    steps = so3_log(np.swapaxes(knots[:-1, :3, :3], -1, -2) @ knots[1:, :3, :3])
    position = (1 - u) * knots[i, :3, 3] + u * knots[i + 1, :3, 3]
    return se3(knots[i, :3, :3] @ so3_exp(u * steps[i]), position)


def _writable(array: F64, *shape: int) -> F64:
    """A copy as [N, *shape]; some of scipy's constructors refuse read-only arrays."""
    return array.reshape(-1, *shape).copy()


def _rotations(R: F64) -> Rotation:
    """[..., 3, 3] matrices as N scipy rotations."""
    return Rotation.from_matrix(_writable(R, 3, 3))


def _matrices(rotation: Rotation, lead: tuple[int, ...]) -> F64:
    """N scipy rotations as matrices [*lead, 3, 3]."""
    return np.asarray(rotation.as_matrix(), dtype=np.float64).reshape(*lead, 3, 3)
