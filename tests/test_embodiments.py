"""The domain table against policy-contract sections 1, 5, 7 and 8, and gripper polarity in both
directions.
"""

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from strands_cosmos3.embodiments import (
    GRIPPERS,
    MODEL_GRIPPER,
    PANDA_FINGER,
    POSE9,
    WIRE_GRIPPER,
    Sampling,
    get_embodiment,
    list_embodiments,
    raw_embodiment,
)
from strands_cosmos3.errors import ActionSpaceError, Cosmos3Error, InputError, UnknownNameError

# name: domain id, width, fps, chunk, view
TABLE = {
    "no_action": (0, 0, None, 16, None),
    "av": (1, 9, 10, 60, "ego"),
    "camera_pose": (2, 9, 30, 60, "ego"),
    "hand_pose": (3, 57, 15, 16, "ego"),
    "pusht": (4, 2, None, 16, None),
    "libero": (5, 10, 20, 16, "concat"),
    "umi": (6, 10, 20, 16, "wrist"),
    "bridge_orig_lerobot": (7, 10, 5, 16, "ego"),
    "droid_lerobot": (8, 10, 15, 16, "concat"),
    "robomind-franka": (8, 10, 10, 16, "concat"),
    "galbot": (9, 30, None, 16, None),
    "robomind-franka-dual": (12, 20, 10, 16, "concat"),
    "robomind-ur": (13, 10, 10, 16, "third_person"),
    "agibotworld": (15, 29, 10, 16, "concat"),
    "agibot_gear_gripper": (15, 29, 10, 16, "concat"),
    "agibot_gear_gripper_ext": (15, 29, 10, 16, "concat"),
    "xdof_yam": (16, 20, None, 16, None),
    "molmoact2_yam": (16, 20, None, 16, None),
    "abc_yam": (16, 20, None, 16, None),
    "robotwin": (17, 14, None, 16, None),
    "fractal": (20, 10, 3, 16, "ego"),
    "drawanything": (21, 3, None, 16, None),
    "behavior1k_lerobot": (22, 23, None, 16, None),
    "maniparena": (23, 20, None, 16, None),
}


def test_the_table_is_complete():
    assert set(list_embodiments()) == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_domain_row(name):
    row = get_embodiment(name)
    space = row.action_space("midtrain")
    have = (row.domain_id, space.width, row.fps, row.chunk_rows("midtrain"), row.view_point)
    assert have == TABLE[name]
    assert row.raw_action_layout == row.action_space().columns
    assert len(set(space.columns)) == space.width


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("droid", "droid_lerobot"),
        ("PANDA ", "droid_lerobot"),
        ("bridge", "bridge_orig_lerobot"),
        ("agibot", "agibotworld"),
    ],
)
def test_aliases(alias, name):
    assert get_embodiment(alias).name == name
    assert get_embodiment(get_embodiment(alias)) is get_embodiment(name)


def test_unknown_names_are_refused_with_the_valid_ones():
    with pytest.raises(UnknownNameError, match="droid_lerobot"):
        get_embodiment("driod")
    for junk in (None, 8, ["droid"], b"droid"):
        with pytest.raises(Cosmos3Error):
            get_embodiment(junk)


def test_droid_speaks_three_action_spaces():
    droid = get_embodiment("droid")
    midtrain, joint_pos, pose_abs = (
        droid.action_space(name) for name in ("midtrain", "joint_pos", "pose_abs")
    )
    assert droid.action_space() is midtrain
    assert (midtrain.width, midtrain.normalized, midtrain.state_row, midtrain.mrope_offset) == (
        10,
        True,
        False,
        1,
    )
    assert (joint_pos.width, joint_pos.normalized, joint_pos.state_row, joint_pos.mrope_offset) == (
        8,
        False,
        True,
        0,
    )
    assert pose_abs.columns == ("x", "y", "z", "qx", "qy", "qz", "qw", "gripper")
    assert not pose_abs.normalized
    assert droid.chunk_rows("joint_pos") == 32
    with pytest.raises(ActionSpaceError, match="joint_pos"):
        droid.action_space("joints")


def test_row_times_are_reached_or_commanded():
    droid = get_embodiment("droid")
    np.testing.assert_allclose(
        droid.action_space("midtrain").row_times_s(3, 15), [1 / 15, 2 / 15, 3 / 15]
    )
    np.testing.assert_allclose(
        droid.action_space("joint_pos").row_times_s(3, 15), [0, 1 / 15, 2 / 15]
    )


def test_sampling_presets():
    droid = get_embodiment("droid")
    policy, midtrain = droid.preset("joint_pos"), droid.preset("midtrain")
    assert (policy.num_steps, policy.guidance_scale, policy.flow_shift) == (4, 3.0, 5.0)
    assert (midtrain.num_steps, midtrain.guidance_scale, midtrain.flow_shift) == (30, 1.0, 10.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"guidance_scale": float("nan")},
        {"guidance_scale": -1.0},
        {"guidance_scale": 1e30},
        {"guidance_interval": (5.0, 1.0)},
        {"guidance_interval": (400.0, 400.0)},
        {"guidance_interval": (0.0, float("nan"))},
    ],
)
def test_guidance_that_means_nothing_is_refused_by_name(fields):
    with pytest.raises(InputError, match=next(iter(fields))):
        Sampling(**fields)


def test_droid_s_tool_frame_is_the_hand_turned_by_plus_135_degrees():
    tool = get_embodiment("droid").tool_frame
    assert tool.parent == "hand"
    assert tool.checked
    h = np.sqrt(0.5)
    # x turns towards -x and +y
    expected = [[-h, -h, 0, 0], [h, -h, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_allclose(tool.T_parent_cosmos, expected, atol=1e-15)
    assert not tool.T_parent_cosmos.flags.writeable


def pose(rotation=((1, 0, 0), (0, 1, 0), (0, 0, 1)), xyz=(0.0, 0.0, 0.0)):
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = rotation, xyz
    return T


def recorded_states(n=20):
    rng = np.random.default_rng(7)
    return [pose(Rotation.random(rng=rng).as_matrix(), rng.uniform(-0.5, 0.5, 3)) for _ in range(n)]


def test_bridge_s_tool_frame_is_that_of_the_framework_s_dataset():
    """cosmos-framework 5eee9ed, bridge_orig_lerobot_dataset.py:31-51, 146-148, from the recorded
    state to the Cosmos frame.
    """
    default_rotation = pose([[0, 0, 1], [0, 1, 0], [-1, 0, 0]])
    tcp_to_flange = pose(xyz=(-0.093575, 0, 0))
    to_opencv = pose([[0, 0, 1], [-1, 0, 0], [0, -1, 0]])
    tool = get_embodiment("bridge").tool_frame
    assert (tool.parent, tool.checked) == ("gripper_link", False)
    for T_state in recorded_states():
        T_base_gripper_link = T_state @ default_rotation @ tcp_to_flange
        T_base_cosmos = T_state @ default_rotation @ tcp_to_flange @ to_opencv
        np.testing.assert_allclose(
            T_base_gripper_link @ tool.T_parent_cosmos, T_base_cosmos, atol=1e-12
        )
    # The WidowX reaches along gripper_link's x, which is the Cosmos frame's z; its y, to the left,
    # is the Cosmos frame's -x.
    np.testing.assert_allclose(tool.T_parent_cosmos[:3, 2], [1, 0, 0], atol=1e-12)
    np.testing.assert_allclose(tool.T_parent_cosmos[:3, 0], [0, -1, 0], atol=1e-12)


def test_fractal_s_tool_frame_is_that_of_the_framework_s_dataset():
    """cosmos-framework 5eee9ed, fractal_lerobot_dataset.py:43-62, 177-180, from the recorded
    state to the Cosmos frame.
    """
    tcp_to_flange = np.array(
        [
            [+0.9999897671, -0.0008686425, +0.0044397163, -0.0050618476],
            [+0.0008745501, +0.9999987346, -0.0013288658, -0.0016717725],
            [-0.0044385564, +0.0013327349, +0.9999892615, -0.1635144743],
            [0, 0, 0, 1],
        ]
    )
    to_opencv = pose([[0, 1, 0], [-1, 0, 0], [0, 0, 1]])
    tool = get_embodiment("fractal").tool_frame
    assert (tool.parent, tool.checked) == ("link_gripper_tcp", False)
    for T_base_tcp in recorded_states():  # the state is the pose of link_gripper_tcp
        np.testing.assert_allclose(
            T_base_tcp @ tool.T_parent_cosmos, T_base_tcp @ tcp_to_flange @ to_opencv, atol=1e-8
        )


@pytest.mark.parametrize("name", TABLE)
def test_tool_frames_are_rigid(name):
    T = get_embodiment(name).tool_frame.T_parent_cosmos
    np.testing.assert_allclose(T[:3, :3].T @ T[:3, :3], np.eye(3), atol=1e-12)
    assert np.linalg.det(T[:3, :3]) > 0


def test_av_has_a_translation_scale_and_no_statistics():
    av = get_embodiment("av")
    assert (av.translation_scale, av.stats, av.action_space().normalized) == (1.35, None, False)
    assert av.action_space().columns == POSE9


def test_composite_domains_put_their_arms_where_the_contract_says():
    agibot = get_embodiment("agibotworld").action_space().columns
    assert (agibot[0], agibot[9], agibot[18], agibot[19], agibot[28]) == (
        "head_tx",
        "right_tx",
        "right_grasp",
        "left_tx",
        "left_grasp",
    )
    hand = get_embodiment("hand_pose").action_space().columns
    assert (hand[0], hand[9], hand[18], hand[33], hand[42]) == (
        "camera_tx",
        "right_wrist_tx",
        "right_hand_0",
        "left_wrist_tx",
        "left_hand_0",
    )


@pytest.mark.parametrize(
    ("convention", "number_at_a_fifth_open"),
    [
        (MODEL_GRIPPER, 0.2),
        (WIRE_GRIPPER, 0.8),
        (PANDA_FINGER, 0.008),
        (GRIPPERS["tendon"], 51.0),
        (get_embodiment("umi").gripper, 0.01934),
    ],
)
def test_gripper_polarity_both_ways(convention, number_at_a_fifth_open):
    assert convention.from_fraction(0.2) == pytest.approx(number_at_a_fifth_open, rel=1e-12)
    assert convention.to_fraction(number_at_a_fifth_open) == pytest.approx(0.2, rel=1e-12)
    assert convention.to_fraction(convention.open_value) == 1.0
    assert convention.to_fraction(convention.closed_value) == 0.0


def test_gripper_fraction_is_clipped():
    np.testing.assert_array_equal(WIRE_GRIPPER.to_fraction(np.array([-0.1, 1.3])), [1.0, 0.0])


def test_raw_embodiment():
    row = raw_embodiment(30, 12)
    assert (row.domain_id, row.action_space().width, row.action_space().meaning) == (30, 12, "raw")
    for bad in ((-1, 4), (32, 4), (3, 0), (3, 65)):
        with pytest.raises(InputError):
            raw_embodiment(*bad)
