"""Decoding and encoding: round trips, the tool frame, the conventions, and what each decoder
refuses.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.twists import se3_exp
from strands_cosmos3.actions.decode import (
    decode_chunk,
    decode_joint_chunk,
    decode_pose_delta,
    decode_pose_trajectory,
    encode_chunk,
    encode_pose_delta,
    encode_pose_trajectory,
    to_frame,
)
from strands_cosmos3.actions.rotations import (
    euler_xyz_to_matrix,
    matrix_to_quaternion,
    se3,
    se3_inverse,
    so3_exp,
)
from strands_cosmos3.actions.stats import denormalize_chunk, load_action_stats
from strands_cosmos3.embodiments import POSE_ABS, WIRE_GRIPPER, get_embodiment
from strands_cosmos3.errors import (
    ActionOutOfRangeError,
    ActionSpaceError,
    InputError,
    StatisticsError,
    UnknownNameError,
)
from strands_cosmos3.types import ActionChunk, PoseTrajectory

TOL = 1e-9
DROID = get_embodiment("droid")
GOLDEN = json.loads((Path(__file__).parents[1] / "assets" / "droid_golden_rows.json").read_text())
EPISODE = Path(__file__).parents[1] / "assets/droid_episode_48330.json"
check = settings(max_examples=60)

T_ANCHOR = se3(euler_xyz_to_matrix([2.9, -0.1, 0.4]), [0.4, -0.1, 0.3])


def turn_z(degrees):
    return se3(so3_exp([0, 0, np.deg2rad(degrees)]), [0, 0, 0])


def cosmos_poses(raw):
    raw = np.asarray(raw)
    return se3(euler_xyz_to_matrix(raw[:, 3:6]), raw[:, :3]) @ turn_z(90)


def droid_chunk(rows, space="midtrain"):
    return ActionChunk(rows, DROID.action_space(space), DROID)


twists = st.lists(
    st.lists(st.floats(-3, 3, allow_nan=False), min_size=6, max_size=6), min_size=2, max_size=33
)
small_twists = twists.map(lambda xi: np.array(xi) * 0.005)


@check
@given(twists)
def test_pose_delta_round_trip(xi):
    T = se3_exp(xi)
    np.testing.assert_allclose(decode_pose_delta(encode_pose_delta(T)), T, atol=TOL)


def test_pose_delta_is_translation_then_two_columns():
    T = se3(euler_xyz_to_matrix([0.3, -0.7, 1.1]), [1, 2, 3])
    np.testing.assert_array_equal(encode_pose_delta(T), [1, 2, 3, *T[:3, 0], *T[:3, 1]])
    assert decode_pose_delta(np.tile(encode_pose_delta(T), (2, 5, 1))).shape == (2, 5, 4, 4)


@check
@given(twists, st.sampled_from(["framewise", "anchored"]))
def test_trajectory_round_trip(xi, convention):
    T = T_ANCHOR @ se3_exp(xi)
    deltas = encode_pose_trajectory(T, convention)
    assert deltas.shape == (len(T) - 1, 9)
    back = decode_pose_trajectory(deltas, T[0], convention)
    np.testing.assert_allclose(back, T, atol=TOL)


def test_framewise_departs_from_the_pose_before_and_anchored_from_the_anchor():
    step = se3(so3_exp([0, 0, np.pi / 2]), [1, 0, 0])
    rows = encode_pose_delta(np.stack([step, step]))
    framewise = decode_pose_trajectory(rows, np.eye(4))
    anchored = decode_pose_trajectory(rows, np.eye(4), "anchored")
    np.testing.assert_allclose(framewise[:, :3, 3], [[0, 0, 0], [1, 0, 0], [1, 1, 0]], atol=1e-15)
    np.testing.assert_allclose(anchored[:, :3, 3], [[0, 0, 0], [1, 0, 0], [1, 0, 0]], atol=1e-15)
    with pytest.raises(UnknownNameError, match="anchored"):
        decode_pose_trajectory(rows, np.eye(4), "backwards")


def test_a_delta_moves_along_the_body_s_own_axes():
    facing_y = turn_z(90)
    forward = encode_pose_delta(se3(np.eye(3), [0.1, 0, 0]))[None]
    np.testing.assert_allclose(
        decode_pose_trajectory(forward, facing_y)[1, :3, 3], [0, 0.1, 0], atol=1e-15
    )


def test_golden_rows_of_a_recorded_episode():
    T = cosmos_poses(GOLDEN["raw_poses"])
    fraction = WIRE_GRIPPER.to_fraction(np.array(GOLDEN["wire_gripper"]))
    rows = encode_chunk(T, fraction, "droid")
    np.testing.assert_allclose(rows, GOLDEN["rows"], atol=TOL)
    motion = decode_chunk(droid_chunk(GOLDEN["rows"]), T[0])
    np.testing.assert_allclose(motion.T_base_frame, T[1:], atol=TOL)
    np.testing.assert_allclose(motion.gripper, fraction, atol=TOL)
    assert motion.gripper[4] == pytest.approx(1 - 0.2077113687992096)


def test_golden_rows_need_the_tool_frame():
    T = cosmos_poses(GOLDEN["raw_poses"])
    fraction = WIRE_GRIPPER.to_fraction(np.array(GOLDEN["wire_gripper"]))
    # link8, hand, and the wrong sign
    for without in (T @ turn_z(-90), T @ turn_z(-135), T @ turn_z(-270)):
        rows = encode_chunk(without, fraction, "droid")
        assert np.abs(rows - GOLDEN["rows"]).max() > 0.2


def test_golden_rows_need_extrinsic_angles():
    raw = np.array(GOLDEN["raw_poses"])
    intrinsic = (
        so3_exp(raw[:, 3:4] * [1, 0, 0])
        @ so3_exp(raw[:, 4:5] * [0, 1, 0])
        @ so3_exp(raw[:, 5:6] * [0, 0, 1])
    )
    rows = encode_pose_trajectory(se3(intrinsic, raw[:, :3]) @ turn_z(90))
    assert np.abs(rows[:, :3] - denormalize_chunk(GOLDEN["rows"], DROID)[:, :3]).max() > 1e-3


@pytest.fixture(scope="module")
def episode():
    return json.loads(EPISODE.read_text())


def test_a_whole_episode_survives_encoding_and_decoding(episode):
    T = cosmos_poses(episode["cartesian_position_xyz_eulerxyz"])
    assert len(T) == 65
    fraction = WIRE_GRIPPER.to_fraction(np.array(episode["gripper_action"][:-1]))
    motion = decode_chunk(droid_chunk(encode_chunk(T, fraction, DROID)), T[0])
    np.testing.assert_allclose(motion.T_base_frame, T[1:], atol=TOL)
    np.testing.assert_array_equal(motion.T_base_anchor, T[0])
    np.testing.assert_allclose(motion.t_s, np.arange(1, 65) / 15)
    np.testing.assert_allclose(motion.gripper, fraction, atol=TOL)


def test_deltas_composed_on_the_hand_end_far_off(episode):
    T_hand = cosmos_poses(episode["cartesian_position_xyz_eulerxyz"]) @ turn_z(-135)
    T = T_hand @ DROID.tool_frame.T_parent_cosmos
    deltas = encode_pose_trajectory(T)
    wrong = decode_pose_trajectory(deltas, T_hand[0])
    right = decode_pose_trajectory(deltas, T[0]) @ se3_inverse(DROID.tool_frame.T_parent_cosmos)
    assert np.linalg.norm(wrong[-1, :3, 3] - T_hand[-1, :3, 3]) > 0.05
    np.testing.assert_allclose(right, T_hand, atol=TOL)


@check
@given(small_twists, st.data())
def test_decode_chunk_inverts_encode_chunk(xi, data):
    T = T_ANCHOR @ se3_exp(np.cumsum(xi, axis=0))
    gripper = data.draw(st.lists(st.floats(0, 1), min_size=len(T) - 1, max_size=len(T) - 1))
    for name in ("bridge", "umi"):
        embodiment = get_embodiment(name)
        chunk = ActionChunk(
            encode_chunk(T, gripper, embodiment), embodiment.action_space(), embodiment
        )
        motion = decode_chunk(chunk, T[0])
        np.testing.assert_allclose(motion.T_base_frame, T[1:], atol=TOL)
        np.testing.assert_allclose(motion.gripper, gripper, atol=TOL)
        assert motion.frame == "cosmos"


def test_grippers_by_embodiment():
    T = np.repeat(T_ANCHOR[None], 2, axis=0)
    droid, umi = encode_chunk(T, [0.2], "droid"), encode_chunk(T, [0.2], "umi")
    assert droid[0, 9] == pytest.approx(-0.6)  # 1 = open, q01 0, q99 1
    assert denormalize_chunk(umi, "umi")[0, 9] == pytest.approx(0.2 * 0.0967)  # metres
    shut = decode_chunk(droid_chunk(np.where(np.arange(10) == 9, -1.4, droid)), T_ANCHOR)
    assert shut.gripper[0] == 0


@pytest.mark.parametrize(("column", "fraction"), [(2.0, 1.0), (1.02, 1.0), (-0.5, 0.0), (0.3, 0.3)])
def test_a_gripper_is_commanded_no_further_than_open_or_closed(column, fraction):
    """Models overshoot; in every action space the column is clipped, and only a normalised one
    beyond |z| = 10 is refused.
    """
    droid, q = get_embodiment("droid"), np.zeros((2, 8))
    q[:, 7] = column
    assert decode_joint_chunk(ActionChunk(q, droid.action_space("joint_pos"), droid)).gripper[
        0
    ] == pytest.approx(fraction)
    poses = np.tile([0.4, 0.0, 0.3, 0.0, 0.0, 0.0, 1.0, column], (2, 1))
    assert decode_chunk(ActionChunk(poses, POSE_ABS, droid), T_ANCHOR).gripper[0] == pytest.approx(
        fraction
    )
    still = encode_chunk(np.repeat(T_ANCHOR[None], 2, axis=0), [0.5], "droid")
    still[0, 9] = 2 * column - 1
    assert decode_chunk(droid_chunk(still), T_ANCHOR).gripper[0] == pytest.approx(fraction)
    still[0, 9] = 10.5
    with pytest.raises(ActionOutOfRangeError):
        decode_chunk(droid_chunk(still), T_ANCHOR)


def test_unnormalised_rows_are_scaled_to_metres():
    T = np.stack([T_ANCHOR, T_ANCHOR @ se3(so3_exp([0, 0.1, 0]), [0.27, 0, 0])])
    av = get_embodiment("av")
    rows = encode_chunk(T, None, av)
    assert rows[0, 0] == pytest.approx(0.27 / 1.35)
    motion = decode_chunk(ActionChunk(rows, av.action_space(), av), T[0])
    np.testing.assert_allclose(motion.T_base_frame, T[1:], atol=TOL)
    assert motion.gripper is None


def test_clip_is_for_training_only():
    T = np.stack([T_ANCHOR, T_ANCHOR @ se3(np.eye(3), [0.05, 0, 0])])
    assert encode_chunk(T, [1.0], "droid")[0, 0] > 3
    assert encode_chunk(T, [1.0], "droid", clip=True)[0, 0] == 1
    with pytest.raises(ActionOutOfRangeError, match="tx"):
        encode_chunk(np.stack([T_ANCHOR, T_ANCHOR @ se3(np.eye(3), [0.5, 0, 0])]), [1.0], "droid")


def test_absolute_poses_are_not_integrated():
    T = T_ANCHOR @ se3_exp([[0.1, 0, 0, 0, 0, 0.2], [0, 0.2, 0, 0.3, 0, 0]])
    rows = np.concatenate([T[:, :3, 3], matrix_to_quaternion(T[:, :3, :3]), [[0.2], [1.0]]], axis=1)
    motion = decode_chunk(droid_chunk(rows, "pose_abs"), T_ANCHOR)
    np.testing.assert_allclose(motion.T_base_frame, T, atol=TOL)
    np.testing.assert_allclose(motion.gripper, [0.2, 1.0])
    np.testing.assert_allclose(motion.t_s, [1 / 15, 2 / 15])
    np.testing.assert_array_equal(motion.T_base_anchor, T_ANCHOR)
    wxyz = rows[:, [0, 1, 2, 6, 3, 4, 5, 7]]
    assert (
        np.abs(decode_chunk(droid_chunk(wxyz, "pose_abs"), T_ANCHOR).T_base_frame - T).max() > 0.1
    )


def test_joint_rows_are_commands_for_now():
    rows = np.array(
        [[0.1, -0.6, 0.2, -2.4, 0, 2.0, 0.6, 0.2], [0.2, -0.6, 0.2, -2.4, 0, 2.0, 0.6, 1.1]]
    )
    motion = decode_joint_chunk(droid_chunk(rows, "joint_pos"))
    np.testing.assert_array_equal(motion.q_rad, rows[:, :7])
    np.testing.assert_allclose(motion.gripper, [0.2, 1.0])
    np.testing.assert_allclose(motion.t_s, [0, 1 / 15])
    assert motion.poses is None


def test_rows_of_one_space_are_refused_by_the_decoder_of_another():
    joints = droid_chunk(np.zeros((2, 8)), "joint_pos")
    deltas = droid_chunk(GOLDEN["rows"])
    with pytest.raises(ActionSpaceError, match=r"(?s)midtrain.*joint_pos.*decode_joint_chunk"):
        decode_chunk(joints, T_ANCHOR)
    with pytest.raises(ActionSpaceError, match=r"(?s)joint_pos.*midtrain.*decode_chunk"):
        decode_joint_chunk(deltas)
    with pytest.raises(ActionSpaceError, match="pose_abs"):
        decode_joint_chunk(droid_chunk([[0, 0, 0, 0, 0, 0, 1, 0.5]], "pose_abs"))
    with pytest.raises(InputError, match="norm"):  # joint angles, said to be poses
        decode_chunk(droid_chunk([[0.1, -0.6, 0.2, -2.4, 0, 2.0, 0.6, 0.2]], "pose_abs"), T_ANCHOR)


@pytest.mark.parametrize("name", ["hand_pose", "agibotworld", "robomind-franka-dual", "xdof_yam"])
def test_layouts_of_more_than_one_arm_are_refused(name):
    embodiment = get_embodiment(name)
    chunk = ActionChunk(
        np.zeros((2, embodiment.action_space().width)),
        embodiment.action_space(),
        embodiment,
        fps=10,
    )
    with pytest.raises(ActionSpaceError, match=name):
        decode_chunk(chunk, T_ANCHOR)


def test_the_method_is_the_caller_s():
    # the packaged one is refused, see below
    metric_libero = replace(get_embodiment("libero"), translation_scale=1.0)
    space = metric_libero.action_space()
    T = T_ANCHOR @ se3_exp(np.outer([0, 1, 2], [0.1, 0.2, 0.1, 0.1, 0.05, -0.1]))
    for method in ("quantile", "quantile_rot", "minmax", "meanstd"):
        chunk = ActionChunk(
            encode_chunk(T, [0.2, 0.3], metric_libero, method=method), space, metric_libero
        )
        np.testing.assert_allclose(
            decode_chunk(chunk, T[0], method=method).T_base_frame, T[1:], atol=TOL
        )
    assert (
        np.abs(decode_chunk(chunk, T[0], method="quantile_rot").T_base_frame - T[1:]).max() > 0.01
    )


def test_translations_that_are_not_metres_are_refused():
    libero = get_embodiment("libero")
    with pytest.raises(ActionSpaceError, match="not in metres"):
        decode_chunk(ActionChunk(np.zeros((1, 10)), libero.action_space(), libero), T_ANCHOR)
    with pytest.raises(ActionSpaceError, match="not in metres"):
        encode_chunk(np.stack([T_ANCHOR, T_ANCHOR]), [0.2], libero)


def test_raw_rows_are_refused():
    pusht = get_embodiment("pusht")
    with pytest.raises(ActionSpaceError, match="undecoded"):
        decode_chunk(ActionChunk(np.zeros((1, 2)), pusht.action_space(), pusht, fps=10), T_ANCHOR)


def test_statistics_must_be_the_embodiment_s():
    with pytest.raises(StatisticsError, match="bridge"):
        decode_chunk(droid_chunk(GOLDEN["rows"]), T_ANCHOR, load_action_stats("bridge"))
    own = replace(DROID, stats=None)
    with pytest.raises(StatisticsError, match="no action statistics"):
        decode_chunk(ActionChunk(GOLDEN["rows"], own.action_space(), own), T_ANCHOR)


def test_to_frame_crosses_over_to_the_driven_body():
    motion = decode_chunk(droid_chunk(GOLDEN["rows"]), T_ANCHOR)
    hand = to_frame(motion, se3_inverse(DROID.tool_frame.T_parent_cosmos), "hand")
    assert isinstance(hand, PoseTrajectory)
    assert hand.frame == "hand"
    np.testing.assert_allclose(
        hand.T_base_frame @ DROID.tool_frame.T_parent_cosmos, motion.T_base_frame, atol=TOL
    )
    np.testing.assert_allclose(hand.T_base_anchor, T_ANCHOR @ turn_z(-135), atol=TOL)
    np.testing.assert_array_equal(hand.t_s, motion.t_s)
    np.testing.assert_array_equal(hand.gripper, motion.gripper)


def test_grippers_must_be_there_or_not():
    T = np.repeat(T_ANCHOR[None], 3, axis=0)
    for gripper, embodiment in (
        (None, "droid"),
        ([0.5, 0.5], "av"),
        ([0.5], "droid"),
        ([0.5, 1.2], "droid"),
    ):
        with pytest.raises(InputError, match="gripper"):
            encode_chunk(T, gripper, embodiment)


def test_absolute_poses_keep_their_departure_to_the_anchor():
    """What a server integrated from the pose it was sent is done from the anchor: in the hand's
    own axes, not the base's.
    """
    rng = np.random.default_rng(5)
    sent, anchor, goal = (
        se3(so3_exp(rng.normal(0, 0.5, 3)), rng.normal(0, 0.3, 3)) for _ in range(3)
    )
    rows = np.concatenate([goal[:3, 3], matrix_to_quaternion(goal[:3, :3]), [1.0]])[None]
    droid = get_embodiment("droid")
    goals = ActionChunk(rows, droid.spaces["pose_abs"], droid)
    moved = ActionChunk(rows, droid.spaces["pose_abs"], droid, T_base_departure=sent)
    np.testing.assert_allclose(decode_chunk(goals, anchor).T_base_frame[0], goal, atol=1e-12)
    want = anchor @ np.linalg.inv(sent) @ goal
    np.testing.assert_allclose(decode_chunk(moved, anchor).T_base_frame[0], want, atol=1e-9)
    np.testing.assert_allclose(decode_chunk(moved, sent).T_base_frame[0], goal, atol=1e-9)
