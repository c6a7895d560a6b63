"""Chunks of several limbs: which columns are whose, by name. Every test fails if left and right
are exchanged.
"""

import numpy as np
import pytest

from helpers.twists import se3_exp
from strands_cosmos3.actions.decode import decode_chunk, decode_limbs, encode_chunk, encode_limbs
from strands_cosmos3.embodiments import get_embodiment, list_embodiments
from strands_cosmos3.errors import ActionSpaceError, InputError, UnknownNameError
from strands_cosmos3.types import ActionChunk

# cosmos-framework 5eee9ed: robomind_franka_dual :52-60, agibotworld :149-159, human_hand_pose
# :38-43; limb -> first column
FIRST = {
    "robomind-ur": {"arm": 0},
    "robomind-franka": {"arm": 0},
    "robomind-franka-dual": {"left": 0, "right": 10},
    "agibotworld": {"head": 0, "right": 9, "left": 19},
    "agibot_gear_gripper": {"head": 0, "right": 9, "left": 19},
    "hand_pose": {"camera": 0, "right": 9, "left": 33},
}
QUARTER = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])  # Rz(+90)


def walk(seed, rows=5, metres=0.01, radians=0.03):
    steps = se3_exp(
        np.random.default_rng(seed).normal(size=(rows, 6)) * np.repeat((metres, radians), 3)
    )
    poses = [se3_exp(np.full(6, 0.3))]
    for step in steps:
        poses.append(poses[-1] @ step)
    return np.stack(poses)


@pytest.mark.parametrize("name", FIRST)
def test_columns_belong_to_the_limb_of_their_name(name):
    row = get_embodiment(name)
    columns = row.action_space("midtrain").columns
    assert {limb.name: limb.pose.start for limb in row.limbs} == FIRST[name]
    for limb in row.limbs:
        own = columns[limb.pose]
        assert len(own) == 9
        assert len(row.limbs) == 1 or all(column.startswith(f"{limb.name}_") for column in own)
        assert own[0].endswith("tx")
        assert own[8].endswith("r5")
        if limb.gripper_column is not None:
            assert columns[limb.gripper_column] == columns[limb.pose.start].replace("tx", "grasp")
        if limb.finger_tips is not None:
            assert columns[limb.finger_tips] == tuple(f"{limb.name}_hand_{i}" for i in range(15))


def test_every_delta_column_of_a_domain_with_limbs_has_an_owner():
    for name in list_embodiments():
        row = get_embodiment(name)
        owned = [
            i
            for limb in row.limbs
            for part in (limb.pose, limb.finger_tips)
            if part
            for i in range(part.start, part.stop)
        ]
        owned += [limb.gripper_column for limb in row.limbs if limb.gripper_column is not None]
        assert len(set(owned)) == len(owned)
        assert not owned or sorted(owned) == list(range(row.action_space("midtrain").width)), name


@pytest.mark.parametrize("name", ["robomind-ur", "robomind-franka-dual", "agibotworld"])
def test_poses_and_grippers_survive_the_round_trip_by_name(name):
    row, rng = get_embodiment(name), np.random.default_rng(1)
    arms = [limb.name for limb in row.limbs if not limb.is_camera]
    T = {limb: walk(seed) for seed, limb in enumerate(sorted(arms))}
    grippers = {limb: rng.uniform(0.1, 0.9, 5) for limb in arms}
    chunk = ActionChunk(encode_limbs(T, grippers, name), row.action_space(), row)
    found = decode_limbs(chunk, {limb: poses[0] for limb, poses in T.items()})
    assert list(found.by_limb) == arms
    assert found.grippers.shape == (5, len(arms))
    assert found.gripper_limbs == tuple(arms)
    for limb in arms:
        np.testing.assert_allclose(found.by_limb[limb].T_base_frame, T[limb][1:], atol=1e-12)
        np.testing.assert_allclose(
            found.grippers[:, found.gripper_limbs.index(limb)], grippers[limb], atol=1e-12
        )


@pytest.mark.parametrize(
    ("name", "moved"), [("robomind-franka-dual", 10), ("agibotworld", 9), ("hand_pose", 9)]
)
def test_the_right_limb_alone_moves_with_its_columns(name, moved):
    """Row by row at the statistics' origin, the right limb's first translation changed by hand."""
    row = get_embodiment(name)
    still = {limb.name: np.eye(4) for limb in row.limbs}
    z = np.zeros((4, row.action_space().width))
    before = decode_limbs(ActionChunk(z, row.action_space(), row), still)
    z[:, moved] += 0.5
    after = decode_limbs(ActionChunk(z, row.action_space(), row), still)
    for limb in row.limbs:
        change = np.abs(
            after.by_limb[limb.name].T_base_frame - before.by_limb[limb.name].T_base_frame
        ).max()
        assert (change > 1e-3) == (limb.name == "right"), limb.name


def test_finger_tips_are_their_own_hand_s():
    row = get_embodiment("hand_pose")
    z = np.zeros((2, 57))
    z[:, 42] = 1.0  # left_hand_0
    tips = decode_limbs(
        ActionChunk(z, row.action_space(), row), {"left": np.eye(4), "right": np.eye(4)}
    ).finger_tips_m
    rest = decode_limbs(
        ActionChunk(z * 0, row.action_space(), row), {"left": np.eye(4), "right": np.eye(4)}
    ).finger_tips_m
    assert tips["left"].shape == (2, 5, 3)
    assert np.argwhere(tips["left"][0] != rest["left"][0]).tolist() == [[0, 0]]
    np.testing.assert_array_equal(tips["right"], rest["right"])
    with pytest.raises(ActionSpaceError, match="finger tips"):
        encode_limbs({"left": walk(0), "right": walk(1)}, {}, "hand_pose")


def test_the_tool_frames_of_agibot_s_grippers_turn_opposite_ways():
    """cosmos-framework agibot_fk.py:51-70: the right gripper's frame Rz(+90), the left one's
    Rz(-90), the head's as it is.
    """
    frames = {limb.name: limb.tool_frame for limb in get_embodiment("agibotworld").limbs}
    np.testing.assert_allclose(frames["right"].T_parent_cosmos[:3, :3], QUARTER, atol=1e-15)
    np.testing.assert_allclose(frames["left"].T_parent_cosmos[:3, :3], QUARTER.T, atol=1e-15)
    np.testing.assert_array_equal(frames["head"].T_parent_cosmos, np.eye(4))
    assert (frames["right"].parent, frames["left"].parent) == (
        "gripper_r_base_link",
        "gripper_l_base_link",
    )


def test_a_single_arm_decodes_as_before_bit_for_bit():
    droid, T = get_embodiment("droid"), walk(3)
    chunk = ActionChunk(encode_chunk(T, np.linspace(0, 1, 5), "droid"), droid.action_space(), droid)
    one, limbs = decode_chunk(chunk, T[0]), decode_limbs(chunk, {"arm": T[0]})
    np.testing.assert_array_equal(one.T_base_frame, limbs.by_limb["arm"].T_base_frame)
    np.testing.assert_array_equal(one.gripper, limbs.grippers[:, 0])


def test_what_is_missing_or_unknown_is_named():
    dual = get_embodiment("robomind-franka-dual")
    chunk = ActionChunk(np.zeros((2, 20)), dual.action_space(), dual)
    with pytest.raises(InputError, match="those of right are missing"):
        decode_limbs(chunk, {"left": np.eye(4)})
    with pytest.raises(UnknownNameError, match="left, right"):
        decode_limbs(chunk, {"left": np.eye(4), "right": np.eye(4), "arm": np.eye(4)})
    yam = get_embodiment("xdof_yam")
    with pytest.raises(ActionSpaceError, match="not stated by its source"):
        decode_limbs(
            ActionChunk(np.zeros((2, 20)), yam.action_space(), yam, fps=10),
            {"left": np.eye(4), "right": np.eye(4)},
        )
    with pytest.raises(ActionSpaceError, match="decode_limbs"):
        decode_chunk(chunk, np.eye(4))
