"""The unchecked arithmetic behind ``rotations.py``, for finite arrays. Leading axes are free."""

from __future__ import annotations

import numpy as np
from scipy.spatial.transform import Rotation  # pyright: ignore[reportMissingTypeStubs]

from strands_cosmos3.checks import F64
from strands_cosmos3.errors import InputError, ShapeError

_DEGENERATE = 1e-6


def to_rot6d(R: F64) -> F64:
    """As ``matrix_to_rot6d``."""
    columns = np.swapaxes(R[..., :2], -1, -2)
    return columns.reshape(*columns.shape[:-2], 6)


def nearest_rotation(rot6d: F64) -> F64:
    """As ``rot6d_to_matrix``.

    With c0, c1 the columns, ``[c0, c1, c0 x c1]`` is projected on SO(3) by SVD, as in
    cosmos-framework's ``pose_utils``; its determinant ``|c0 x c1|^2`` is positive. Gram-Schmidt
    would put the whole error of noisy columns on c1: up to 3.6 degrees.
    """
    c0, c1 = rot6d[..., :3], rot6d[..., 3:]
    c2 = np.cross(c0, c1)
    lengths = np.linalg.norm(c0, axis=-1), np.linalg.norm(c1, axis=-1)
    sine = np.linalg.norm(c2, axis=-1) / np.maximum(lengths[0] * lengths[1], np.finfo(float).tiny)
    if min(lengths[0].min(), lengths[1].min(), sine.min()) < _DEGENERATE:
        raise InputError(
            "rot6d holds a zero column or two parallel ones, which define no rotation; it must be "
            "the first two columns "
            "of a rotation matrix, concatenated. Was the row de-normalised?"
        )
    U, _, Vt = np.linalg.svd(np.stack([c0, c1, c2], axis=-1))
    return U @ Vt


def writable(array: F64, *shape: int) -> F64:
    """A copy as [N, *shape]; some of scipy's constructors refuse read-only arrays."""
    return array.reshape(-1, *shape).copy()


def to_scipy(R: F64) -> Rotation:
    """[..., 3, 3] matrices as N scipy rotations."""
    return Rotation.from_matrix(writable(R, 3, 3))


def from_scipy(rotation: Rotation, lead: tuple[int, ...]) -> F64:
    """N scipy rotations as matrices [*lead, 3, 3]."""
    return np.asarray(rotation.as_matrix(), dtype=np.float64).reshape(*lead, 3, 3)


def exp(w: F64) -> F64:
    """As ``so3_exp``."""
    return from_scipy(Rotation.from_rotvec(writable(w, 3)), w.shape[:-1])


def log(R: F64) -> F64:
    """As ``so3_log``."""
    return np.asarray(to_scipy(R).as_rotvec(), dtype=np.float64).reshape(*R.shape[:-2], 3)


def invert(T: F64) -> F64:
    """As ``se3_inverse``."""
    R_inverse = np.swapaxes(T[..., :3, :3], -1, -2)
    return assemble(R_inverse, -np.einsum("...ij,...j->...i", R_inverse, T[..., :3, 3]))


def assemble(R: F64, p: F64) -> F64:
    """As ``se3``."""
    lead = broadcast(R.shape[:-2], p.shape[:-1])
    T = np.zeros((*lead, 4, 4))
    T[..., :3, :3], T[..., :3, 3], T[..., 3, 3] = R, p, 1.0
    return T


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of two broadcast shapes, or a :class:`ShapeError`."""
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise ShapeError(f"leading axes {list(a)} and {list(b)} do not broadcast.") from None
