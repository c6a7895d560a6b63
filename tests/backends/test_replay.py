"""Recordings are read, kept and replayed; a file that is no recording raises an error that names
it.
"""

import json
import shutil

import numpy as np
import pytest

from helpers.edited_datasets import ACTION, EE_POSE, STATE, gripper, sound, told
from motions import feasible_chunk
from strands_cosmos3.actions.decode import decode_chunk
from strands_cosmos3.backends.replay import (
    Recording,
    ReplayBackend,
    load_episode,
    load_recording,
)
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import (
    ActionOutOfRangeError,
    BackendError,
    Cosmos3Error,
    DatasetFormatError,
    InputError,
    ResourceNotFoundError,
)
from strands_cosmos3.robots.panda import HOME_Q, dh_forward
from strands_cosmos3.types import Request

DROID = get_embodiment("droid")


@pytest.fixture
def recording():
    q, T = feasible_chunk(np.random.default_rng(0), 40, (0.004, 0.01), (0.3, 2.0))
    T = np.concatenate((dh_forward(q)[None], T)) @ DROID.tool_frame.T_parent_cosmos
    return Recording(T, np.where(np.arange(41) < 20, 1.0, 0.2), 15.0, q, "synthetic")


def request(recording, at_s=0.0, **changed):
    fields = {
        "embodiment": DROID,
        "action_space": DROID.action_space("midtrain"),
        "instruction": "",
        "n_rows": 16,
        "q_rad": HOME_Q,
        "gripper": 1.0,
        "limb_poses": {"arm": recording.at(np.array([at_s]))[0][0]},
        "t_motion_s": at_s,
    }
    return Request(**{**fields, **changed})


def test_a_chunk_leads_along_the_recording(recording):
    backend = ReplayBackend(recording)
    for at_s, first in ((0.0, 1), (0.4, 7)):
        asked = request(recording, at_s)
        poses = decode_chunk(backend.infer(asked), asked.T_base_cosmos)
        assert np.abs(poses.T_base_frame - recording.T_base_cosmos[first : first + 16]).max() < 1e-9
        assert np.array_equal(poses.gripper, recording.gripper[first : first + 16])


def test_a_chunk_corrects_where_the_arm_is_not(recording):
    backend = ReplayBackend(recording)
    off = recording.T_base_cosmos[0].copy()
    off[:3, 3] += [0.002, -0.001, 0.003]
    poses = decode_chunk(backend.infer(request(recording, limb_poses={"arm": off})), off)
    assert np.abs(poses.T_base_frame - recording.T_base_cosmos[1:17]).max() < 1e-9
    far = off.copy()
    far[0, 3] += 1.0
    with pytest.raises(ActionOutOfRangeError):
        backend.infer(request(recording, limb_poses={"arm": far}))


def test_the_end_holds(recording):
    poses, gripper = recording.at(np.array([-1.0, 0.0, recording.duration_s, 1e6]))
    assert np.array_equal(poses[0], poses[1])
    assert np.abs(poses[3] - recording.T_base_cosmos[-1]).max() < 1e-12
    assert gripper[3] == recording.gripper[-1]


def test_round_trip(recording, tmp_path):
    recording.save_npz(tmp_path / "r.npz")
    again = load_recording(tmp_path / "r.npz")
    for name in ("T_base_cosmos", "gripper", "q_start_rad"):
        assert np.array_equal(getattr(again, name), getattr(recording, name))
    assert (again.fps, again.source) == (recording.fps, recording.source)


def test_replay_needs_a_measured_pose(recording):
    backend = ReplayBackend(recording)
    with pytest.raises(BackendError, match="panda"):
        backend.infer(request(recording, limb_poses={}))
    with pytest.raises(BackendError, match="midtrain"):
        backend.infer(request(recording, action_space=DROID.action_space("joint_pos")))


DROID_JSON = {
    "cartesian_position_xyz_eulerxyz": [
        [0.4, 0.0, 0.4, 3.1, 0.0, 0.1],
        [0.4, 0.01, 0.4, 3.1, 0.0, 0.1],
    ],
    "gripper_action": [0.8, 0.0],
    "joint_position_frame0": HOME_Q.tolist(),
}


def test_a_droid_episode_is_link8_euler_and_closed_is_one(tmp_path):
    path = tmp_path / "e.json"
    path.write_text(json.dumps(DROID_JSON))
    recording = load_recording(path)
    # the wire's 0.8 closed is 0.2 open
    assert recording.gripper.tolist() == pytest.approx([0.2, 1.0])
    c, s = np.cos([3.1, 0.0, 0.1]), np.sin([3.1, 0.0, 0.1])
    Rx = np.array([[1, 0, 0], [0, c[0], -s[0]], [0, s[0], c[0]]])
    Rz = np.array([[c[2], -s[2], 0], [s[2], c[2], 0], [0, 0, 1]])
    quarter = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    assert np.abs(recording.T_base_cosmos[0, :3, :3] - Rz @ Rx @ quarter).max() < 1e-12
    assert recording.T_base_cosmos[1, :3, 3].tolist() == [0.4, 0.01, 0.4]


def _without(key):
    return {name: value for name, value in DROID_JSON.items() if name != key}


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "3", "null", "{}", '"text"',
        *(json.dumps(_without(key)) for key in DROID_JSON),
        json.dumps({**DROID_JSON, "gripper_action": [0.0]}),
        json.dumps({**DROID_JSON, "gripper_action": None}),
        json.dumps({**DROID_JSON, "cartesian_position_xyz_eulerxyz": [[0.4] * 5] * 2}),
        json.dumps({**DROID_JSON, "cartesian_position_xyz_eulerxyz": [["a"] * 6] * 2}),
        json.dumps({**DROID_JSON, "cartesian_position_xyz_eulerxyz": [[0.4] * 6]}),
        json.dumps({**DROID_JSON, "joint_position_frame0": [float("nan")] * 7}),
        json.dumps({**DROID_JSON, "joint_position_frame0": [0.0] * 6}),
    ],
)  # fmt: skip
def test_a_malformed_episode_is_refused(content, tmp_path):
    path = tmp_path / "e.json"
    path.write_text(content)
    with pytest.raises(InputError):
        load_recording(path)


@pytest.mark.parametrize("kind", ["empty", "text", "zip", "npy", "truncated", "fps", "fields"])
def test_a_malformed_npz_is_refused(kind, recording, tmp_path):
    path = tmp_path / "r.npz"
    recording.save_npz(path)
    whole = path.read_bytes()
    if kind in ("empty", "text", "zip", "truncated"):
        path.write_bytes(
            {"empty": b"", "text": b"hello", "zip": b"PK\x03\x04junk", "truncated": whole[:-200]}[
                kind
            ]
        )
    elif kind == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif kind == "fps":
        np.savez(
            path,
            T_base_cosmos=recording.T_base_cosmos,
            gripper=recording.gripper,
            fps=[1, 2],
            q_start_rad=HOME_Q,
        )
    else:
        np.savez(path, gripper=recording.gripper)
    with pytest.raises(InputError):
        load_recording(path)


def test_there_must_be_a_file(tmp_path):
    with pytest.raises(ResourceNotFoundError, match="nowhere"):
        load_recording(tmp_path / "nowhere.npz")
    with pytest.raises(Cosmos3Error):
        load_recording(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"fps": 0.0}, {"fps": np.nan}, {"fps": "x"}, {"gripper": np.full(41, 1.2)}, {"gripper": np.ones(3)},
        {"q_start_rad": np.zeros((1, 7))}, {"T_base_cosmos": np.eye(4)[None]}, {"T_base_cosmos": np.ones((41, 4, 4))},
    ],
)  # fmt: skip
def test_a_malformed_recording_is_refused(changed, recording):
    fields = {
        name: getattr(recording, name)
        for name in ("T_base_cosmos", "gripper", "fps", "q_start_rad")
    }
    with pytest.raises(InputError):
        Recording(**{**fields, **changed})


def test_a_chunk_departs_from_the_anchor_and_not_from_the_measurement(recording):
    measured = (
        recording.T_base_cosmos[0] @ dh_forward(HOME_Q) @ np.linalg.inv(dh_forward(HOME_Q + 0.003))
    )
    anchor = recording.T_base_cosmos[0]
    chunk = ReplayBackend(recording).infer(
        request(recording, limb_poses={"arm": measured}, limb_anchors={"arm": anchor})
    )
    assert (
        np.abs(decode_chunk(chunk, anchor).T_base_frame - recording.T_base_cosmos[1:17]).max()
        < 1e-9
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sound(tmp_path_factory.mktemp("replayed") / "set")


@pytest.fixture
def edited(dataset, tmp_path):
    return shutil.copytree(dataset, tmp_path / "edited")


@pytest.mark.parametrize(
    ("key", "stated", "needed"),
    [
        (EE_POSE, {"frame": "wrist_3_link"}, "wrist_3_link.*'cosmos' is needed"),
        (EE_POSE, {"parent": "torso"}, "torso.*'base' is needed"),
        (EE_POSE, {"unit": "cm"}, "cm.*'m' is needed"),
        (STATE, {"unit": "deg"}, "deg.*'rad' is needed"),
        (STATE, {"gripper_open": 0.0}, "0.0.*1.0 is needed"),
    ],
)
def test_an_episode_that_states_another_meaning_is_not_replayed(edited, key, stated, needed):
    assert load_episode(edited).fps == 15
    told(key, **stated)(edited)
    with pytest.raises(DatasetFormatError, match=needed):
        load_episode(edited)


@pytest.mark.parametrize("key", [STATE, ACTION])
@pytest.mark.parametrize(
    ("scale", "offset", "told"),
    [(1000, 0, "from 0 to 1000; "), (255, 0, "from 0 to 255; "), (-90, 0, "from -90 to -?0; ")],
)
def test_an_episode_with_a_gripper_of_another_unit_is_not_replayed(
    edited, key, scale, offset, told
):
    gripper(key, lambda v: scale * v + offset)(edited)
    with pytest.raises(DatasetFormatError, match=told):
        load_episode(edited)


@pytest.mark.parametrize(
    ("scale", "offset", "told"), [(-2, 1, "from -1 to 1; "), (-1, 0, "from -1 to -?0; ")]
)
def test_commands_of_another_polarity_are_warned_of(edited, scale, offset, told):
    """They are clipped, as those of a server."""
    gripper(ACTION, lambda v: scale * v + offset)(edited)
    with pytest.warns(UserWarning, match=told):
        load_episode(edited)


def test_a_gripper_that_opens_as_little_as_a_width_in_metres_is_warned_of(edited, recwarn):
    gripper(ACTION, lambda v: 1.1 * v)(edited)  # a model's commands overshoot
    load_episode(edited)
    assert not recwarn
    gripper(ACTION, lambda v: 0.085 / 1.1 * v)(edited)
    with pytest.warns(UserWarning, match="from 0 to 0.085; .*widths in metres"):
        load_episode(edited)
    gripper(ACTION, lambda v: 0 * v + 0.04)(edited)
    with pytest.warns(UserWarning, match="from 0.04 to 0.04; .*widths in metres"):
        load_episode(edited)
