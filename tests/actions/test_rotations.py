"""Group laws, near the identity and near half turns included; rot6d by SVD; conventions, told by
asymmetric values.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_cosmos3.actions.rotations import (
    euler_xyz_to_matrix,
    geodesic_angle,
    interpolate_poses,
    matrix_to_quaternion,
    matrix_to_rot6d,
    quaternion_to_matrix,
    rot6d_to_matrix,
    se3,
    se3_between,
    se3_inverse,
    so3_exp,
    so3_log,
)
from strands_cosmos3.errors import InputError

TOL = 1e-9
check = settings(max_examples=60)

unit = st.floats(-1, 1, allow_nan=False)
axes = (
    st.tuples(unit, unit, unit)
    .filter(lambda a: np.linalg.norm(a) > 0.1)
    .map(lambda a: a / np.linalg.norm(a))
)
angles = st.one_of(
    st.just(0.0),
    st.floats(0, np.pi - 1e-3),
    st.sampled_from([1e-15, 1e-12, 1e-9, 1e-8, 1e-6, 1e-4, 0.0999999, 0.1, 0.1000001]),
    st.sampled_from([1e-15, 1e-12, 1e-9, 1e-7, 1e-5, 1e-3]).map(lambda gap: np.pi - gap),
    st.just(np.pi),
)
rotvecs = st.builds(lambda axis, angle: axis * angle, axes, angles)
positions = st.tuples(*[st.floats(-2, 2, allow_nan=False)] * 3).map(np.array)
rotations = rotvecs.map(so3_exp)
poses = st.builds(lambda R, p: se3(R, p), rotations, positions)

R_ASYMMETRIC = euler_xyz_to_matrix([0.3, -0.7, 1.1])


def assert_rotation(R):
    np.testing.assert_allclose(
        R @ np.swapaxes(R, -1, -2), np.broadcast_to(np.eye(3), R.shape), atol=1e-12
    )
    assert (np.linalg.det(R) > 0).all()


@check
@given(rotations, rotations, rotations)
def test_so3_group_laws(A, B, C):
    assert_rotation(A @ B)
    np.testing.assert_allclose(A @ np.eye(3), A, atol=0)
    np.testing.assert_allclose(A @ A.T, np.eye(3), atol=TOL)
    np.testing.assert_allclose((A @ B) @ C, A @ (B @ C), atol=TOL)


@check
@given(poses, poses, poses)
def test_se3_group_laws(A, B, C):
    product = A @ B
    assert_rotation(product[:3, :3])
    np.testing.assert_array_equal(product[3], [0, 0, 0, 1])
    np.testing.assert_allclose(A @ se3_inverse(A), np.eye(4), atol=TOL)
    np.testing.assert_allclose(se3_inverse(A) @ A, np.eye(4), atol=TOL)
    np.testing.assert_allclose(se3_between(product, product @ C), C, atol=TOL)
    np.testing.assert_allclose(se3_inverse(product), se3_inverse(B) @ se3_inverse(A), atol=TOL)
    np.testing.assert_allclose(A @ se3_between(A, B), B, atol=TOL)


@check
@given(rotvecs)
def test_so3_exp_and_log_are_inverse(w):
    R = so3_exp(w)
    assert_rotation(R)
    back = so3_log(R)
    np.testing.assert_allclose(so3_exp(back), R, atol=TOL)
    if np.linalg.norm(w) < np.pi - 1e-6:  # beyond, the axis may flip
        np.testing.assert_allclose(back, w, atol=TOL)
    assert geodesic_angle(np.eye(3), R) == pytest.approx(np.linalg.norm(w), abs=TOL)


def test_so3_exp_turns_counter_clockwise():
    np.testing.assert_allclose(so3_exp([0, 0, np.pi / 2]) @ [1, 0, 0], [0, 1, 0], atol=1e-15)


@check
@given(rotations)
def test_rot6d_round_trip(R):
    np.testing.assert_allclose(rot6d_to_matrix(matrix_to_rot6d(R)), R, atol=TOL)


def test_rot6d_is_two_columns_concatenated_not_rows_and_not_interleaved():
    R = R_ASYMMETRIC
    expected = [R[0, 0], R[1, 0], R[2, 0], R[0, 1], R[1, 1], R[2, 1]]
    np.testing.assert_array_equal(matrix_to_rot6d(R), expected)
    np.testing.assert_allclose(rot6d_to_matrix(expected), R, atol=1e-14)
    flipped = np.concatenate([R[0], R[1]])
    assert geodesic_angle(rot6d_to_matrix(flipped), R) > 0.5
    assert geodesic_angle(rot6d_to_matrix(R[:, :2].reshape(6)), R) > 0.3


def gram_schmidt(rot6d):
    c0 = rot6d[:3] / np.linalg.norm(rot6d[:3])
    c1 = rot6d[3:] - c0 * (c0 @ rot6d[3:])
    c1 = c1 / np.linalg.norm(c1)
    return np.stack([c0, c1, np.cross(c0, c1)], axis=-1)


@check
@given(rotations, st.lists(st.floats(-0.05, 0.05), min_size=6, max_size=6))
def test_noisy_rot6d_becomes_the_nearest_rotation(R, noise):
    rot6d = matrix_to_rot6d(R) + noise
    decoded = rot6d_to_matrix(rot6d)
    assert_rotation(decoded)
    M = np.stack([rot6d[:3], rot6d[3:], np.cross(rot6d[:3], rot6d[3:])], axis=-1)
    assert np.linalg.norm(decoded - M) <= np.linalg.norm(gram_schmidt(rot6d) - M) + 1e-12
    assert geodesic_angle(decoded, R) < 0.15


def test_svd_and_gram_schmidt_differ_by_degrees_and_svd_is_nearer():
    rng = np.random.default_rng(0)
    truth = so3_exp(rng.normal(size=(2000, 3)))
    noisy = matrix_to_rot6d(truth) + rng.normal(scale=0.03, size=(2000, 6))
    by_svd, by_gs = rot6d_to_matrix(noisy), np.stack([gram_schmidt(row) for row in noisy])
    assert np.rad2deg(geodesic_angle(by_svd, by_gs).max()) > 3
    assert geodesic_angle(by_svd, truth).mean() < 0.95 * geodesic_angle(by_gs, truth).mean()


@pytest.mark.parametrize(
    "bad",
    [[0] * 6, [1, 0, 0, 0, 0, 0], [1, 2, 3, 2, 4, 6], [1, 0, 0, -1, 0, 0], [1, 0, 0, 1, 1e-9, 0]],
)
def test_degenerate_rot6d_is_refused(bad):
    with pytest.raises(InputError, match="rot6d"):
        rot6d_to_matrix(bad)
    with pytest.raises(InputError, match="rot6d"):
        rot6d_to_matrix([[1, 0, 0, 0, 1, 0], bad])


@check
@given(rotations)
def test_quaternion_round_trip(R):
    q = matrix_to_quaternion(R)
    assert np.linalg.norm(q) == pytest.approx(1)
    assert q[3] >= 0
    np.testing.assert_allclose(quaternion_to_matrix(q), R, atol=TOL)
    np.testing.assert_allclose(quaternion_to_matrix(-q), R, atol=TOL)


def test_quaternions_are_scalar_last_and_of_unit_length():
    half = np.sqrt(0.5)
    np.testing.assert_allclose(
        quaternion_to_matrix([0, 0, half, half]), so3_exp([0, 0, np.pi / 2]), atol=1e-15
    )
    np.testing.assert_allclose(
        matrix_to_quaternion(so3_exp([0.2, 0, 0])), [np.sin(0.1), 0, 0, np.cos(0.1)]
    )
    for bad in ([0, 0, 0, 0], [0, 0, 0, 1.1], [0.1, -0.6, 0.3, -2.4]):
        with pytest.raises(InputError, match="norm"):
            quaternion_to_matrix(bad)


def test_euler_angles_are_extrinsic_xyz():
    a, b, c = 0.3, -0.7, 1.1
    Rx, Ry, Rz = so3_exp([a, 0, 0]), so3_exp([0, b, 0]), so3_exp([0, 0, c])
    np.testing.assert_allclose(euler_xyz_to_matrix([a, b, c]), Rz @ Ry @ Rx, atol=1e-15)
    assert geodesic_angle(euler_xyz_to_matrix([a, b, c]), Rx @ Ry @ Rz) > 0.3


def test_leading_axes():
    rng = np.random.default_rng(1)
    w, p = rng.normal(size=(2, 2, 3, 3))
    T = se3(so3_exp(w), p)
    assert T.shape == (2, 3, 4, 4)
    np.testing.assert_allclose(T[1, 2], se3(so3_exp(w[1, 2]), p[1, 2]), atol=1e-15)
    np.testing.assert_allclose(so3_log(T[..., :3, :3])[1, 2], so3_log(T[1, 2, :3, :3]), atol=1e-15)
    assert matrix_to_rot6d(T[..., :3, :3]).shape == (2, 3, 6)
    assert rot6d_to_matrix(matrix_to_rot6d(T[..., :3, :3])).shape == (2, 3, 3, 3)
    assert matrix_to_quaternion(T[..., :3, :3]).shape == (2, 3, 4)
    assert geodesic_angle(T[..., :3, :3], np.eye(3)).shape == (2, 3)
    assert se3_between(T, np.eye(4)).shape == (2, 3, 4, 4)
    assert T.dtype == np.float64


def test_interpolation_is_linear_in_position_and_uniform_in_rotation():
    T = se3(so3_exp([[0, 0, 0], [0, 0, 1.0], [0, 0.5, 1.0]]), [[0, 0, 0], [1, 0, 0], [1, 2, 0]])
    between = interpolate_poses(T, [0, 1, 3], [0, 0.25, 1, 2, 3])
    assert between.shape == (5, 4, 4)
    np.testing.assert_allclose(between[[0, 2, 4]], T, atol=1e-14)
    np.testing.assert_allclose(between[1], se3(so3_exp([0, 0, 0.25]), [0.25, 0, 0]), atol=1e-14)
    np.testing.assert_allclose(between[3, :3, 3], [1, 1, 0], atol=1e-14)
    whole = geodesic_angle(T[1, :3, :3], T[2, :3, :3])
    assert geodesic_angle(T[1, :3, :3], between[3, :3, :3]) == pytest.approx(whole / 2)
    assert geodesic_angle(between[3, :3, :3], T[2, :3, :3]) == pytest.approx(whole / 2)


@check
@given(poses, poses, st.floats(0, 1))
def test_interpolation_stays_between(A, B, u):
    T = interpolate_poses([A, B], [0, 1], [u])[0]
    assert_rotation(T[:3, :3])
    whole = geodesic_angle(A[:3, :3], B[:3, :3])
    assert geodesic_angle(A[:3, :3], T[:3, :3]) == pytest.approx(u * whole, abs=1e-7)


def test_interpolation_does_not_extrapolate():
    T = se3(so3_exp([[0, 0, 0], [0, 0, 1.0]]), np.zeros((2, 3)))
    np.testing.assert_allclose(interpolate_poses(T, [0, 0.3], [0.1 + 0.2])[0], T[1], atol=1e-14)
    np.testing.assert_array_equal(interpolate_poses(T, [0, 0.3], [-0.01]), T[:1])
    np.testing.assert_array_equal(interpolate_poses(T[:1], [0.3], [0.3, 0.3]), T[[0, 0]])
