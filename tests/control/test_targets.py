"""From chunks to joint targets: the tool frame, row times, polarity, and errors recomputed by
MuJoCo.
"""

import json
from pathlib import Path

import mujoco
import numpy as np
import pytest

from motions import feasible_chunk
from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.backends.replay import load_recording
from strands_cosmos3.control.ik import MinkIKBridge
from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.control.targets import (
    decode_cosmos_chunk_to_targets,
    tool_frame_in_ee,
)
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ActionSpaceError, FrameError
from strands_cosmos3.robots.model import load_panda, panda_path
from strands_cosmos3.robots.panda import FER, HOME_Q, dh_forward
from strands_cosmos3.types import ActionChunk

DROID = get_embodiment("droid")
MODEL = load_panda()
BRIDGE = MinkIKBridge(MODEL)
PANDA = LimbIK("panda")
EPISODE = Path(__file__).parents[1] / "assets/droid_episode_48330.json"
# written out: not the project's own
YAW_135 = np.array([[-1, -1, 0], [1, -1, 0], [0, 0, np.sqrt(2)]]) / np.sqrt(2)


def cosmos(T_hand):
    """The Cosmos frame from the hand's pose, by hand."""
    T = np.array(T_hand)
    T[..., :3, :3] = T[..., :3, :3] @ YAW_135
    return T


def full(q):
    return np.r_[q, 0.04, 0.04]


def hand_by_mujoco(qpos):
    data, out = mujoco.MjData(MODEL), []
    for q in qpos:
        data.qpos[:] = q
        mujoco.mj_forward(MODEL, data)
        T = np.eye(4)
        T[:3, :3], T[:3, 3] = data.body("hand").xmat.reshape(3, 3), data.body("hand").xpos
        out.append(T)
    return np.stack(out)


def synthetic(seed=0, rows=32):
    """Start, the hand's true poses after each row, and the raw chunk that says so."""
    q, T_hand = feasible_chunk(np.random.default_rng(seed), rows, (0.005, 0.012), (0.5, 3.0))
    T = cosmos(np.concatenate((dh_forward(q)[None], T_hand)))
    gripper = np.where(np.arange(rows) < rows // 2, 0.2, 1.0)
    return q, T_hand, encode_chunk(T, gripper, DROID), gripper


def without_tool(raw, q):
    """What composing the deltas on the hand itself would command: the error the tool frame is
    there to prevent.
    """
    from strands_cosmos3.actions.decode import decode_chunk

    return decode_chunk(ActionChunk(raw, DROID.action_space(), DROID), dh_forward(q)).T_base_frame


def test_a_synthetic_chunk_lands_where_it_says():
    off = []
    for seed in range(6):
        q, T_hand, raw, gripper = synthetic(seed)
        out = decode_cosmos_chunk_to_targets(raw, DROID, BRIDGE, full(q))
        assert out["qpos"].shape == (32, 9)
        reached = hand_by_mujoco(out["qpos"])
        assert np.abs(reached[:, :3, 3] - T_hand[:, :3, 3]).max() < 2e-6  # row i after delta i
        assert np.abs(out["poses"] - cosmos(T_hand)).max() < 1e-9
        np.testing.assert_allclose(out["gripper"], gripper, atol=1e-12)
        np.testing.assert_allclose(out["t_s"], np.arange(1, 33) / 15)
        assert out["converged"].all()
        assert not out["clamped"].any()
        off.append(np.linalg.norm(without_tool(raw, q)[-1, :3, 3] - T_hand[-1, :3, 3]))
    assert min(off) > 0.05


def test_the_droid_episode_with_and_without_the_tool_frame():
    recording = load_recording(EPISODE)
    q = recording.q_start_rad
    raw = encode_chunk(recording.T_base_cosmos, recording.gripper[1:], DROID)
    out = decode_cosmos_chunk_to_targets(raw, DROID, BRIDGE, full(q))
    reached = cosmos(hand_by_mujoco(out["qpos"]))
    error = np.linalg.norm(reached[:, :3, 3] - recording.T_base_cosmos[1:, :3, 3], axis=1)
    # frame 0's own joints and pose differ by a tenth of a millimetre at most
    assert error.max() < 2e-4
    end = np.array(json.loads(EPISODE.read_text())["cartesian_position_xyz_eulerxyz"][-1][:3])
    assert np.linalg.norm(reached[-1, :3, 3] - end) < 2e-4
    assert np.linalg.norm(without_tool(raw, q)[-1, :3, 3] - end) > 0.05


def test_the_tool_frame_is_that_yaw():
    T = tool_frame_in_ee(DROID.tool_frame, BRIDGE, full(HOME_Q))
    assert np.abs(T[:3, :3] - YAW_135).max() < 1e-12
    assert np.abs(T[:3, 3]).max() < 1e-12
    from_link7 = MinkIKBridge(MODEL, "link7", "body")
    T = from_link7.ee_pose(full(HOME_Q)) @ tool_frame_in_ee(
        DROID.tool_frame, from_link7, full(HOME_Q)
    )
    assert np.abs(T - cosmos(dh_forward(HOME_Q))).max() < 1e-12
    with pytest.raises(FrameError):
        tool_frame_in_ee(get_embodiment("umi").tool_frame, BRIDGE, full(HOME_Q))


def test_driving_another_frame_gives_the_same_motion():
    q, T_hand, raw, _ = synthetic(3)
    for name, kind in (("tcp", "site"), ("link7", "body")):
        out = decode_cosmos_chunk_to_targets(raw, DROID, MinkIKBridge(MODEL, name, kind), full(q))
        assert np.abs(hand_by_mujoco(out["qpos"])[:, :3, 3] - T_hand[:, :3, 3]).max() < 3e-6


def test_tracking_error_is_the_residual_against_the_poses():
    q, _, raw, _ = synthetic(1)
    for fps in (15.0, 200.0):  # the second is too fast for the joints: held back, and said so
        out = decode_cosmos_chunk_to_targets(raw, DROID, BRIDGE, full(q), fps=fps)
        reached = cosmos(hand_by_mujoco(out["qpos"]))
        mm = np.linalg.norm(reached[:, :3, 3] - out["poses"][:, :3, 3], axis=1) * 1e3
        chord = np.linalg.norm(reached[:, :3, :3] - out["poses"][:, :3, :3], axis=(1, 2)) / np.sqrt(
            8
        )
        deg = np.rad2deg(2 * np.arcsin(np.minimum(chord, 1)))
        said = out["tracking_error"]
        assert said["mean_mm"] == pytest.approx(mm.mean(), rel=1e-6, abs=1e-9)
        assert said["max_mm"] == pytest.approx(mm.max(), rel=1e-6, abs=1e-9)
        assert said["mean_deg"] == pytest.approx(deg.mean(), rel=1e-6, abs=1e-8)
        assert said["max_deg"] == pytest.approx(deg.max(), rel=1e-6, abs=1e-8)
        step = np.abs(np.diff(np.vstack([full(q), out["qpos"]]), axis=0))[:, :7]
        assert (step <= FER.velocity / fps * 1.001).all()
    assert out["clamped"].any()
    assert said["max_mm"] > 5


def test_poses_are_integrated_open_loop():
    """A held-back arm does not drag the command after it."""
    q, _, raw, _ = synthetic(2)
    out = decode_cosmos_chunk_to_targets(raw, DROID, BRIDGE, full(q), fps=200.0)
    # time enough for every row
    ghost = decode_cosmos_chunk_to_targets(raw, DROID, BRIDGE, full(q), fps=1.0)
    assert np.abs(out["poses"] - ghost["poses"]).max() < 1e-12
    assert out["tracking_error"]["max_mm"] > 5
    assert ghost["tracking_error"]["max_mm"] < 1e-3


def test_absolute_poses_are_not_integrated():
    q, T_hand, _, _ = synthetic(4, 16)
    T = cosmos(T_hand)
    rows = []
    for pose in T:
        quat = np.zeros(4)
        mujoco.mju_mat2Quat(quat, pose[:3, :3].reshape(9))
        rows.append([*pose[:3, 3], *quat[1:], quat[0], 0.2])
    out = decode_cosmos_chunk_to_targets(rows, DROID, BRIDGE, full(q), action_space="pose_abs")
    assert np.abs(out["poses"] - T).max() < 1e-9
    assert (out["gripper"] == 0.2).all()
    assert np.abs(hand_by_mujoco(out["qpos"])[:, :3, 3] - T_hand[:, :3, 3]).max() < 2e-6


def test_joint_angles_are_refused_and_both_names_said():
    rows = np.tile(np.r_[HOME_Q, 0.2], (4, 1))
    with pytest.raises(ActionSpaceError, match=r"joint_pos.*midtrain"):
        decode_cosmos_chunk_to_targets(rows, DROID, BRIDGE, full(HOME_Q), action_space="joint_pos")
    with pytest.raises(ActionSpaceError, match="midtrain"):
        decode_cosmos_chunk_to_targets(rows, DROID, BRIDGE, full(HOME_Q))


def test_joint_angles_pass_the_policys_path_as_they_are():
    rows = (
        np.tile(np.r_[HOME_Q, 0.2], (4, 1)) + np.arange(4)[:, None] * np.r_[np.full(7, 0.01), 0.0]
    )
    plan = PANDA.follow(ActionChunk(rows, DROID.action_space("joint_pos"), DROID), full(HOME_Q))
    assert np.array_equal(plan.q_rad, rows[:, :7])
    assert (plan.gripper == 0.2).all()
    np.testing.assert_allclose(plan.t_s, np.arange(4) / 15)  # row 0 is the command for now
    assert plan.poses is None


def test_the_policys_path_keeps_rows_that_are_only_too_fast():
    q, T_hand, raw, gripper = synthetic(5)
    chunk = ActionChunk(raw, DROID.action_space(), DROID, fps=45.0)
    assert decode_cosmos_chunk_to_targets(raw, DROID, BRIDGE, full(q), fps=60.0)["clamped"].any()
    plan = PANDA.follow(chunk, full(q), t_capture_s=3.5)
    assert plan.converged.all()
    assert plan.t_capture_s == 3.5
    assert np.abs(dh_forward(plan.q_rad)[:, :3, 3] - T_hand[:, :3, 3]).max() < 2e-6
    np.testing.assert_allclose(plan.gripper, gripper, atol=1e-12)
    np.testing.assert_allclose(plan.t_s, np.arange(1, 33) / 45)


@pytest.mark.parametrize("name", ["panda_hand", "flange_tool", "gripper_base"])
def test_a_frame_has_another_name_in_the_model(name):
    """The embodiment's ``hand`` is the model's body of any name; without the mapping it is named."""
    q, _, raw, _ = synthetic(3)
    spec = mujoco.MjSpec.from_file(str(panda_path()))
    spec.body("hand").name = name
    for pair in spec.excludes:
        pair.bodyname1 = pair.bodyname1.replace("hand", name)
        pair.bodyname2 = pair.bodyname2.replace("hand", name)
    renamed = MinkIKBridge(spec.compile(), name, "body")
    expected = decode_cosmos_chunk_to_targets(raw, DROID, BRIDGE, full(q))
    out = decode_cosmos_chunk_to_targets(raw, DROID, renamed, full(q), frames={"hand": name})
    np.testing.assert_array_equal(out["qpos"], expected["qpos"])
    with pytest.raises(FrameError, match="no body 'hand'"):
        decode_cosmos_chunk_to_targets(raw, DROID, renamed, full(q))
