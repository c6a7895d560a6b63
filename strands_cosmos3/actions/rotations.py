"""Rotations and rigid transforms: rot6d, quaternions, Euler angles, SO(3) and SE(3), interpolation.

Every function is vectorised over leading axes, computes in float64, and is safe at the identity and at half turns.
``R`` is a rotation matrix [..., 3, 3], ``T`` a rigid transform [..., 4, 4], ``w`` a rotation vector [..., 3] in rad and
``xi`` a twist [..., 6]: three of translation [m], then three of rotation [rad].

Arguments are checked: :class:`~strands_cosmos3.errors.ShapeError`, :class:`~strands_cosmos3.errors.NonFiniteError` or
:class:`~strands_cosmos3.errors.InputError` refuse a wrong shape, NaN or infinity, and what is no rotation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation  # pyright: ignore[reportMissingTypeStubs]

from strands_cosmos3.actions.arrays import rigid, trailing
from strands_cosmos3.checks import F64, finite_array
from strands_cosmos3.errors import InputError, ShapeError

_DEGENERATE = 1e-6
_UNIT_TOLERANCE = 1e-2
_SERIES_BELOW_RAD = 0.1
_TIME_TOLERANCE_S = 1e-9


def rot6d_to_matrix(rot6d: Any) -> F64:
    """[..., 6] two columns, concatenated -> [..., 3, 3], the rotation nearest to them.

    With c0, c1 the columns, ``[c0, c1, c0 x c1]`` is projected on SO(3) by SVD, as cosmos-framework's ``pose_utils``
    does. Gram-Schmidt would put the whole error of noisy columns on c1: up to 3.6 degrees off. The determinant is
    ``|c0 x c1|^2 > 0``, so the projection is never a reflection.

    Raises:
        InputError: A column is zero, or the two are parallel.
    """
    columns = trailing(rot6d, "rot6d", (6,))
    c0, c1 = columns[..., :3], columns[..., 3:]
    c2 = np.cross(c0, c1)
    lengths = np.linalg.norm(c0, axis=-1), np.linalg.norm(c1, axis=-1)
    sine = np.linalg.norm(c2, axis=-1) / np.maximum(lengths[0] * lengths[1], np.finfo(float).tiny)
    if min(lengths[0].min(), lengths[1].min(), sine.min()) < _DEGENERATE:
        raise InputError(
            "rot6d holds a zero column or two parallel ones, which span no rotation; it is the first two columns of "
            "a rotation matrix, concatenated. Was the row de-normalised?"
        )
    U, _, Vt = np.linalg.svd(np.stack([c0, c1, c2], axis=-1))
    return U @ Vt


def matrix_to_rot6d(R: Any) -> F64:
    """[..., 3, 3] -> [..., 6]: r00 r10 r20 r01 r11 r21, the first two columns."""
    columns = np.swapaxes(_rotation(R, "R")[..., :2], -1, -2)
    return columns.reshape(*columns.shape[:-2], 6)


def quaternion_to_matrix(xyzw: Any) -> F64:
    """[..., 4] unit quaternions, scalar last -> [..., 3, 3].

    Raises:
        InputError: A norm is off one by more than 0.01: whatever that is (joint angles?), it is no quaternion.
    """
    q = trailing(xyzw, "quaternion", (4,))
    norm = np.linalg.norm(q, axis=-1)
    if np.abs(norm - 1).max() > _UNIT_TOLERANCE:
        worst = norm.flat[np.abs(norm - 1).argmax()]
        raise InputError(f"quaternion has norm {worst:.4g}; a rotation is a unit quaternion, ordered x y z w.")
    return _from_scipy(Rotation.from_quat(_writable(q, 4)), q.shape[:-1])


def matrix_to_quaternion(R: Any) -> F64:
    """[..., 3, 3] -> [..., 4] unit quaternions, scalar last and not negative."""
    rotation = _rotation(R, "R")
    xyzw = np.asarray(_to_scipy(rotation).as_quat(canonical=True), dtype=np.float64)
    return xyzw.reshape(*rotation.shape[:-2], 4)


def euler_xyz_to_matrix(angles_rad: Any) -> F64:
    """[..., 3] **extrinsic** x, y, z angles -> [..., 3, 3] = Rz(c) Ry(b) Rx(a); DROID's raw poses are written so."""
    angles = trailing(angles_rad, "angles_rad", (3,))
    return _from_scipy(Rotation.from_euler("xyz", _writable(angles, 3)), angles.shape[:-1])


def so3_exp(w: Any) -> F64:
    """[..., 3] rotation vectors -> [..., 3, 3]."""
    w = trailing(w, "rotation vector", (3,))
    return _from_scipy(Rotation.from_rotvec(_writable(w, 3)), w.shape[:-1])


def so3_log(R: Any) -> F64:
    """[..., 3, 3] -> [..., 3] rotation vectors of length at most pi."""
    return _log(_rotation(R, "R"))


def geodesic_angle(R_a: Any, R_b: Any) -> F64:
    """[...] angle [rad] of the rotation from ``R_a`` to ``R_b``, both [..., 3, 3] and broadcast."""
    R_a, R_b = _rotation(R_a, "R_a"), _rotation(R_b, "R_b")
    return np.linalg.norm(_log(_broadcast_matmul(np.swapaxes(R_a, -1, -2), R_b)), axis=-1)


def se3(R: Any, p: Any) -> F64:
    """[..., 3, 3] and [..., 3] -> [..., 4, 4], leading axes broadcast."""
    return _assemble(_rotation(R, "R"), trailing(p, "p", (3,)))


def se3_inverse(T: Any) -> F64:
    """[..., 4, 4] -> [..., 4, 4], by transposing the rotation."""
    return _inverse(rigid(T, "T"))


def se3_compose(*T: Any) -> F64:
    """The product of transforms [..., 4, 4], left to right, leading axes broadcast; of none, the identity [4, 4]."""
    product: F64 = np.eye(4)
    for i, factor in enumerate(T):
        product = _broadcast_matmul(product, rigid(factor, f"T[{i}]"))
    return product


def se3_between(T_a: Any, T_b: Any) -> F64:
    """``T_a^-1 T_b``: the pose of b seen from a, [..., 4, 4], leading axes broadcast."""
    return _broadcast_matmul(_inverse(rigid(T_a, "T_a")), rigid(T_b, "T_b"))


def se3_exp(xi: Any) -> F64:
    """[..., 6] twists (translation, rotation) -> [..., 4, 4].

    ``p = V rho`` with ``V = I + B W + C W^2``, ``B = (1 - cos t)/t^2``, ``C = (t - sin t)/t^3`` (Barfoot, State
    Estimation for Robotics, 7.1).
    """
    xi = trailing(xi, "xi", (6,))
    w = xi[..., 3:]
    angle = np.linalg.norm(w, axis=-1)
    W = _skew(w)
    B = 0.5 * np.sinc(angle / (2 * np.pi)) ** 2  # as 2 sin^2(t/2)/t^2, which does not cancel
    V = np.eye(3) + B[..., None, None] * W + _sine_term(angle)[..., None, None] * (W @ W)
    return _assemble(so3_exp(w), np.einsum("...ij,...j->...i", V, xi[..., :3]))


def se3_log(T: Any) -> F64:
    """[..., 4, 4] -> [..., 6] twists (translation, rotation), the rotation of length at most pi."""
    pose = rigid(T, "T")
    w = _log(pose[..., :3, :3])
    W = _skew(w)
    D = _cotangent_term(np.linalg.norm(w, axis=-1))[..., None, None]
    V_inverse = np.eye(3) - 0.5 * W + D * (W @ W)
    return np.concatenate([np.einsum("...ij,...j->...i", V_inverse, pose[..., :3, 3]), w], axis=-1)


def interpolate_poses(T: Any, t_s: Any, at_s: Any) -> F64:
    """Poses between knots: position linear, rotation at constant angular velocity (slerp).

    Args:
        T: [N, 4, 4] knots, all in one frame.
        t_s: [N] their times, strictly increasing.
        at_s: [M] times asked for, within the knots'.

    Returns:
        [M, 4, 4]

    Raises:
        InputError: The knots' times do not increase, or a time lies outside them (it is not extrapolated).
    """
    knots = rigid(finite_array(T, "T", (None, 4, 4)), "T")
    t = finite_array(t_s, "t_s", (len(knots),))
    at = finite_array(at_s, "at_s", (None,))
    if (np.diff(t) <= 0).any():
        raise InputError("t_s must increase strictly.")
    if at.min() < t[0] - _TIME_TOLERANCE_S or at.max() > t[-1] + _TIME_TOLERANCE_S:
        raise InputError(f"at_s spans {at.min():g}..{at.max():g} s, the knots {t[0]:g}..{t[-1]:g} s; clip it first.")
    if len(knots) == 1:
        return np.repeat(knots, len(at), axis=0)
    at = np.clip(at, t[0], t[-1])
    i = np.clip(np.searchsorted(t, at, side="right") - 1, 0, len(t) - 2)
    u = ((at - t[i]) / (t[i + 1] - t[i]))[:, None]
    steps = _log(np.swapaxes(knots[:-1, :3, :3], -1, -2) @ knots[1:, :3, :3])
    position = (1 - u) * knots[i, :3, 3] + u * knots[i + 1, :3, 3]
    return _assemble(knots[i, :3, :3] @ so3_exp(u * steps[i]), position)


def _rotation(value: Any, name: str) -> F64:
    R = trailing(value, name, (3, 3))
    rigid(_assemble(R, np.zeros(3)), name)
    return R


def _writable(array: F64, *shape: int) -> F64:
    """A copy as [N, *shape]; some of scipy's constructors take no read-only array."""
    return array.reshape(-1, *shape).copy()


def _to_scipy(R: F64) -> Rotation:
    return Rotation.from_matrix(_writable(R, 3, 3))


def _from_scipy(rotation: Rotation, lead: tuple[int, ...]) -> F64:
    return np.asarray(rotation.as_matrix(), dtype=np.float64).reshape(*lead, 3, 3)


def _log(R: F64) -> F64:
    return np.asarray(_to_scipy(R).as_rotvec(), dtype=np.float64).reshape(*R.shape[:-2], 3)


def _inverse(T: F64) -> F64:
    R_inverse = np.swapaxes(T[..., :3, :3], -1, -2)
    return _assemble(R_inverse, -np.einsum("...ij,...j->...i", R_inverse, T[..., :3, 3]))


def _assemble(R: F64, p: F64) -> F64:
    lead = _broadcast(R.shape[:-2], p.shape[:-1])
    T = np.zeros((*lead, 4, 4))
    T[..., :3, :3], T[..., :3, 3], T[..., 3, 3] = R, p, 1.0
    return T


def _broadcast_matmul(A: F64, B: F64) -> F64:
    _broadcast(A.shape[:-2], B.shape[:-2])
    return A @ B


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise ShapeError(f"leading axes {list(a)} and {list(b)} do not broadcast.") from None


def _skew(w: F64) -> F64:
    W = np.zeros((*w.shape[:-1], 3, 3))
    W[..., 0, 1], W[..., 0, 2], W[..., 1, 2] = -w[..., 2], w[..., 1], -w[..., 0]
    W[..., 1, 0], W[..., 2, 0], W[..., 2, 1] = w[..., 2], -w[..., 1], w[..., 0]
    return W


def _sine_term(angle: F64) -> F64:
    """(t - sin t)/t^3; the series where the difference would cancel."""
    s = angle**2
    series = 1 / 6 - s / 120 + s**2 / 5040 - s**3 / 362880
    t = np.maximum(angle, _SERIES_BELOW_RAD)
    return np.where(angle < _SERIES_BELOW_RAD, series, (t - np.sin(t)) / t**3)


def _cotangent_term(angle: F64) -> F64:
    """1/t^2 - cot(t/2)/(2 t), the weight of W^2 in V^-1; the series where the difference would cancel."""
    s = angle**2
    series = 1 / 12 + s / 720 + s**2 / 30240 + s**3 / 1209600
    t = np.maximum(angle, _SERIES_BELOW_RAD)
    return np.where(angle < _SERIES_BELOW_RAD, series, 1 / t**2 - 1 / (2 * t * np.tan(t / 2)))
