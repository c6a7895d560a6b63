"""A lift of two arms, recorded as a dataset and replayed in the closed loop; and robots that a
recording is not of.
"""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from helpers.small_episodes import columns, spec
from strands_cosmos3.actions.decode import decode_limbs
from strands_cosmos3.backends.replay import (
    LimbRecording,
    Recording,
    ReplayBackend,
    load_episode,
    load_recording,
    recording_at,
)
from strands_cosmos3.cli import main
from strands_cosmos3.commands.serve import _warm_up_message
from strands_cosmos3.datasets import ACTION, EE_POSE, STATE, DatasetWriter, arm_spec
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import BackendError, ConfigError, DatasetError, InputError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.sim.dataset import RolloutRecorder, rollout_spec
from strands_cosmos3.types import Request
from strands_cosmos3.worlds.arms import Robot

DUAL = get_embodiment("robomind-franka-dual")
ROBOT = Robot("dual_panda")


@pytest.fixture(scope="module")
def lifted(tmp_path_factory):
    """The folder of a recorded lift, and its rollout."""
    folder = tmp_path_factory.mktemp("lifted") / "set"
    with DatasetWriter(folder, rollout_spec(DUAL, ROBOT.scene.robot)) as writer:
        rollout = ROBOT.run_policy(
            task="lift_bar",
            policy_config={"backend": "scripted"},
            seed=3,
            recorder=RolloutRecorder(writer, DUAL),
        )
    rollout.save_npz(str(folder.parent / "lift.npz"))
    return folder, rollout


def request(recording, **changed):
    poses = {name: one.T_base_cosmos[0] for name, one in recording.by_limb.items()}
    fields = {
        "embodiment": DUAL,
        "action_space": DUAL.action_space(),
        "instruction": "",
        "n_rows": 16,
        "q_rad": None,
        "gripper": np.ones(2),
        "limb_poses": poses,
    }
    return Request(**{**fields, **changed})


def test_the_bar_is_lifted_again(lifted):
    folder, before = lifted
    rollout = ROBOT.run_policy(
        task="lift_bar", policy_config={"backend": "replay", "model": folder}, seed=3
    )
    assert rollout.success
    assert rollout.drift.mean_mm < 0.4
    assert rollout.drift.max_mm < 1.5
    assert rollout.between_hands.max_mm < 0.3
    for name in ("left", "right"):
        ends = [one.arrays[f"T_base_hand_achieved_{name}"][-1, :3, 3] for one in (before, rollout)]
        assert np.linalg.norm(ends[0] - ends[1]) < 1e-3


def test_the_command_replays_a_dataset(lifted, tmp_path, capsys):
    folder, before = lifted
    flags = ["rollout", "--robot", "dual_panda", "--backend", "replay", "--trajectory", str(folder)]
    flags += ["--seed", "3", "--duration", "2.5"]
    assert main([*flags, "--trajectory-episode", "0", "--npz", str(tmp_path / "again.npz")]) == 0
    with np.load(tmp_path / "again.npz") as again:
        q_rad = again["q_achieved_rad"]
    assert abs(q_rad - before.arrays["q_achieved_rad"][: len(q_rad)]).max() < 0.01
    assert abs(q_rad[-1] - q_rad[0]).max() > 0.5
    capsys.readouterr()
    assert main([*flags, "--trajectory-episode", "1"]) != 0
    assert "the episode" in capsys.readouterr().err
    assert main(["rollout", "--backend", "scripted", "--trajectory-episode", "1"]) != 0
    assert "--trajectory-episode 1 belongs to --backend replay" in capsys.readouterr().err


def test_a_chunk_leads_each_limb_along_its_own_recording(lifted):
    """Limbs are joined by name, in whatever order a request or a recording lists them."""
    recording = load_episode(lifted[0])
    assert list(recording.by_limb) == ["left", "right"]
    other = LimbRecording(dict(reversed(recording.by_limb.items())), recording.embodiment)
    anchors = {name: one.T_base_cosmos[0] for name, one in recording.by_limb.items()}
    for shown in (recording, other):
        chunk = ReplayBackend(shown).infer(request(shown))
        poses = decode_limbs(chunk, anchors)
        for name, one in recording.by_limb.items():
            np.testing.assert_allclose(
                poses.by_limb[name].T_base_frame, one.T_base_cosmos[1:17], atol=1e-9
            )
            np.testing.assert_array_equal(poses.by_limb[name].gripper, one.gripper[1:17])
    off = {name: T.copy() for name, T in anchors.items()}
    off["right"][0, 3] += 0.003
    # from the anchor
    poses = decode_limbs(ReplayBackend(recording).infer(request(recording, limb_anchors=off)), off)
    np.testing.assert_allclose(
        poses.by_limb["right"].T_base_frame[0],
        recording.by_limb["right"].T_base_cosmos[1],
        atol=1e-9,
    )


def test_each_limb_begins_where_its_own_recording_does():
    T, grip = np.tile(np.eye(4), (3, 1, 1)), np.ones(3)
    left, right = (Recording(T, grip, 10.0, np.full(7, start)) for start in (0.1, 0.2))
    for by_limb in ({"left": left, "right": right}, {"right": right, "left": left}):
        for order in ("left", "right"), ("right", "left"):
            found = LimbRecording(by_limb, DUAL.name).of_limbs(map(ROBOT.scene.robot.limb, order))
            assert list(found) == list(order)
            assert (found["left"], found["right"]) == (left, right)


def test_the_gripper_of_each_limb_is_its_own(lifted):
    recording = load_episode(lifted[0])
    left, right = recording.by_limb.values()
    half = Recording(
        left.T_base_cosmos, np.full(len(left.gripper), 0.5), left.fps, left.q_start_rad
    )
    chunk = ReplayBackend(LimbRecording({"left": half, "right": right}, DUAL.name)).infer(
        request(recording)
    )
    poses = decode_limbs(
        chunk, {name: one.T_base_cosmos[0] for name, one in recording.by_limb.items()}
    )
    np.testing.assert_allclose(poses.by_limb["left"].gripper, 0.5)
    np.testing.assert_allclose(poses.by_limb["right"].gripper, right.gripper[1:17])


def test_another_robot_is_refused(lifted):
    folder, _ = lifted
    moves = r"moves left \(7 joints\), right \(7 joints\), and the robot has arm \(7 joints\)"
    with pytest.raises(ConfigError, match=moves):
        Robot().run_policy(policy_config={"backend": "replay", "model": folder})
    recording = load_episode(folder)
    one = recording.by_limb["left"]
    short = LimbRecording(
        {"arm": Recording(one.T_base_cosmos, one.gripper, one.fps, one.q_start_rad[:6])}
    )
    with pytest.raises(
        ConfigError, match=r"moves arm \(6 joints\), and the robot has arm \(7 joints\)"
    ):
        Robot().run_policy(policy_config={"backend": "replay", "model": short})
    droid = get_embodiment("droid")
    with pytest.raises(BackendError, match="cannot be replayed for 'droid_lerobot'"):
        ReplayBackend(recording).infer(
            request(recording, embodiment=droid, action_space=droid.action_space("midtrain"))
        )
    with pytest.raises(BackendError, match="with the limbs of no robot"):
        ReplayBackend(recording).infer(request(recording, limb_poses={}))
    with pytest.raises(ConfigError, match="replayed by rollout, not served"):
        _warm_up_message(ReplayBackend(recording))


def test_what_is_no_recording_is_refused(lifted, tmp_path):
    folder, _ = lifted
    with pytest.raises(InputError, match="of several limbs; record a dataset"):
        load_recording(folder.parent / "lift.npz")
    with pytest.raises(InputError, match="no dataset's folder"):
        recording_at(folder.parent / "lift.npz", 0)
    with pytest.raises(InputError, match="the episode"):
        load_episode(folder, 1)
    with pytest.raises(DatasetError):
        recording_at(tmp_path)
    one = load_episode(folder).by_limb["left"]
    shorter = Recording(one.T_base_cosmos[:-1], one.gripper[:-1], one.fps, one.q_start_rad)
    for by_limb in ({}, {"left": one, "right": shorter}):
        with pytest.raises(InputError, match="the same times"):
            LimbRecording(by_limb, DUAL.name)


def test_an_arm_of_six_joints_is_replayed_from_its_dataset(tmp_path):
    """A single arm's recording too: the poses are of its embodiment's frame."""
    ur5e = get_embodiment("robomind-ur")
    with DatasetWriter(
        tmp_path / "set", arm_spec({}, ur5e, n_joints={"arm": 6}, robot_type="ur5e")
    ) as writer:
        given = columns(5)
        given |= {
            STATE: np.full((5, 7), 0.5),
            ACTION: np.tile([0.001, 0, 0, 1, 0, 0, 0, 1, 0, 1.0], (5, 1)),
        }
        writer.add_episode({key: given[key] for key in spec().columns}, {}, task="t")
    recording = recording_at(tmp_path / "set")
    assert recording.of_limbs(get_robot("ur5e").limbs)["arm"].T_base_cosmos.shape == (6, 4, 4)
    T = np.eye(4)
    T[:3, 3] = given[EE_POSE][0, :3]
    asked = request(
        recording,
        embodiment=ur5e,
        action_space=ur5e.action_space(),
        limb_poses={"arm": T},
        n_rows=4,
    )
    poses = decode_limbs(ReplayBackend(recording).infer(asked), {"arm": T})
    np.testing.assert_allclose(poses.by_limb["arm"].T_base_frame[-1, 0, 3], 0.504, atol=1e-6)


def test_a_recording_of_another_known_robot_is_refused_and_of_its_twin_reported(lifted):
    """Also where nothing compares the hand's pose, as in a host. An unknown robot, or none, says
    nothing.
    """
    recording = load_episode(lifted[0])
    assert recording.robot == "dual_panda"

    def made(kind, robot):
        return Cosmos3Policy(DUAL, robot, backend="replay", model=replace(recording, robot=kind))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("dual_panda", "bi_panda", None, "somebody's", "mine.toml"):
            made(kind, "dual_panda")
    one = LimbRecording({"arm": recording.by_limb["left"]}, "droid", "fr3")
    with pytest.warns(
        UserWarning, match=r"recording is of robot 'fr3', and the policy moves 'panda'; its limits"
    ):
        Cosmos3Policy("droid", "panda", backend="replay", model=one)
    with pytest.raises(
        ConfigError,
        match=r"recording is of robot 'xarm7', and the policy moves 'panda'.*robot='xarm7'",
    ):
        Cosmos3Policy("droid", "panda", backend="replay", model=replace(one, robot="xarm7"))


def test_a_recording_whose_poses_the_robot_does_not_have_at_its_angles_is_refused(lifted):
    """That of another robot with as many joints, or with another tool; it would lead somewhere
    else, without a word.
    """
    recording = load_episode(lifted[0])
    turned = np.diag([-1.0, -1.0, 1.0, 1.0])
    moved = np.eye(4)
    moved[2, 3] = 0.03
    left = recording.by_limb["left"]
    for T in (turned @ left.T_base_cosmos, left.T_base_cosmos @ moved):
        motions = {**recording.by_limb, "left": replace(left, T_base_cosmos=T)}
        with pytest.raises(
            ConfigError,
            match=r"the left of 'dual_panda' is .* from the recorded pose; replay it on",
        ):
            ROBOT.run_policy(
                policy_config={"backend": "replay", "model": LimbRecording(motions, DUAL.name)},
                duration=1.0,
            )
