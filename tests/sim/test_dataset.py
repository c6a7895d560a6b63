"""Recorded rollouts against what happened: the film's pictures, the log's physics steps, the
commanded path.
"""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from strands_cosmos3.actions.decode import decode_pose_trajectory
from strands_cosmos3.actions.rotations import quaternion_to_matrix
from strands_cosmos3.cli import main
from strands_cosmos3.datasets import ACTION, EE_POSE, STATE, Dataset, DatasetWriter, arm_spec
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.sim.dataset import RolloutRecorder, rollout_spec
from strands_cosmos3.types import Rollout
from strands_cosmos3.worlds.arms import Robot

T_HAND_COSMOS = get_embodiment("droid").tool_frame.T_parent_cosmos
VIEWS = ("wrist", "exterior_1", "exterior_2")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rollout]:
    """A pick at a control rate that the frames' times are no multiple of, replanned after 5
    rows.
    """
    folder = tmp_path_factory.mktemp("recorded")
    robot = Robot()
    with DatasetWriter(folder / "set", rollout_spec()) as writer:
        rollout = robot.run_policy(
            instruction="pick up the green cube",
            policy_config={"embodiment": "droid", "backend": "scripted", "actions_per_step": 5},
            task="pick",
            seed=3,
            recorder=RolloutRecorder(writer),
        )
    assert rollout.success
    return folder, rollout


def rows_of(root: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(root / "data")
    return {name: np.array(table.column(name).to_pylist()) for name in table.column_names}


def test_every_frame_is_a_physics_step_at_its_time(recorded: tuple[Path, Rollout]):
    folder, rollout = recorded
    rows, log = rows_of(folder / "set"), rollout.arrays
    n = len(rows["index"])
    assert n == int(rollout.duration_s * 15 + 1e-9)  # the last moment begins no row
    np.testing.assert_allclose(rows["timestamp"], np.arange(n) / 15, atol=1e-5)
    steps = 40 * np.arange(1, n) - 1  # the log begins after the first physics step
    np.testing.assert_allclose(log["t_s"][steps], rows["timestamp"][1:], atol=1e-5)
    T = log["T_base_hand_achieved"][steps] @ T_HAND_COSMOS
    np.testing.assert_allclose(rows[EE_POSE][1:, :3], T[:, :3, 3], atol=1e-6)
    np.testing.assert_allclose(quaternion_to_matrix(rows[EE_POSE][1:, 3:]), T[:, :3, :3], atol=1e-6)
    np.testing.assert_allclose(rows[STATE][1:, :7], log["q_achieved_rad"][steps], atol=1e-6)
    assert rows[STATE][0, 7] == pytest.approx(1.0, abs=1e-3)  # the gripper is open at the start
    assert rows[STATE][-1, 7] < 0.7  # and around a cube at the end


def test_actions_integrate_to_the_commanded_path(recorded: tuple[Path, Rollout]):
    folder, rollout = recorded
    rows, log = rows_of(folder / "set"), rollout.arrays
    start = np.eye(4)
    start[:3, :3], start[:3, 3] = quaternion_to_matrix(rows[EE_POSE][0, 3:]), rows[EE_POSE][0, :3]
    T = decode_pose_trajectory(rows[ACTION][:, :9], start)[1:]
    commanded = log["T_base_hand_commanded"][40 * np.arange(1, len(T) + 1) - 1] @ T_HAND_COSMOS
    off_mm = 1e3 * np.linalg.norm(T[:, :3, 3] - commanded[:, :3, 3], axis=1)
    assert off_mm.max() < 0.01
    np.testing.assert_allclose(T[:, :3, :3], commanded[:, :3, :3], atol=1e-5)
    # composed on the hand
    wrong = decode_pose_trajectory(rows[ACTION][:, :9], start @ np.linalg.inv(T_HAND_COSMOS))[1:]
    assert np.linalg.norm((wrong @ T_HAND_COSMOS)[-1, :3, 3] - commanded[-1, :3, 3]) > 0.02
    assert set(np.unique(rows[ACTION][:, 9])) == {0.0, 1.0}  # the expert's commands, 1 = open
    assert rows[ACTION][0, 9] == 1.0
    assert rows[ACTION][-1, 9] == 0.0


def test_pictures_are_those_of_the_film(tmp_path: Path):
    """Ticked at the dataset's own rate, page k of the film is taken at the very step of frame k
    + 1.
    """
    with DatasetWriter(tmp_path / "set", rollout_spec()) as writer:
        Robot().run_policy(
            policy_config={"embodiment": "droid", "backend": "scripted"},
            instruction="reach the red cube",
            duration=0.6,
            control_frequency=15.0,
            video=tmp_path / "film.mp4",
            film_layout="views",
            recorder=RolloutRecorder(writer),
        )
    with av.open(str(tmp_path / "film.mp4")) as film:
        pages = [frame.to_ndarray(format="rgb24").astype(int) for frame in film.decode(video=0)]
    with Dataset(tmp_path / "set") as dataset:
        seen = np.concatenate(
            [dataset[0].frames(f"observation.images.{view}").astype(int) for view in VIEWS], axis=2
        )
    for k in range(len(seen) - 1):
        off = [float(np.abs(frame - pages[k]).mean()) for frame in seen]
        assert off[k + 1] < 2.0  # both are compressed
        assert int(np.argmin(off)) == k + 1
    # the views are not each other's
    assert np.abs(seen[5] - np.roll(pages[4], 320, axis=1)).mean() > 10


def test_what_was_noted(recorded: tuple[Path, Rollout]):
    folder, _ = recorded
    rows = rows_of(folder / "set")
    assert rows["next.done"].sum() == rows["next.success"].sum() == 1
    assert rows["next.success"][-1]
    with Dataset(folder / "set") as dataset:
        assert dataset[0].task == "pick up the green cube"
        assert dict(dataset[0].note) == {
            "seed": 3, "task": "pick", "outcome": "success", "success": True, "model_sha256": None,
        }  # fmt: skip


def test_recording_changes_nothing_else(recorded: tuple[Path, Rollout]):
    _, rollout = recorded
    again = Robot().run_policy(
        instruction="pick up the green cube",
        policy_config={"embodiment": "droid", "backend": "scripted", "actions_per_step": 5},
        task="pick",
        seed=3,
        duration=2.0,
    )
    q_rad, q_recorded_rad = (r.arrays["q_achieved_rad"][:1200] for r in (again, rollout))
    np.testing.assert_array_equal(q_rad, q_recorded_rad)


def test_the_command_adds_to_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    reach = ["rollout", "--backend", "scripted", "--task", "reach", "--duration", "0.4"]
    for seed in (16, 22):  # too short to succeed
        assert main([*reach, "--seed", str(seed), "--dataset", str(tmp_path / "set")]) == 1
    assert "wrote" in capsys.readouterr().out
    with Dataset(tmp_path / "set") as dataset:
        assert [episode.note["seed"] for episode in dataset] == [16, 22]
        assert dataset.spec == rollout_spec()
    assert not rows_of(tmp_path / "set")["next.success"].any()
    with DatasetWriter(tmp_path / "other", arm_spec({"wrist": (48, 64)})):
        pass
    assert main([*reach, "--dataset", str(tmp_path / "other")]) == 2
    assert "another kind of episodes" in capsys.readouterr().err


def test_a_failing_policy_leaves_no_episode(tmp_path: Path):
    class Broken(Cosmos3Policy):
        def plan(self, *_: object, **__: object):
            raise RuntimeError("broken")

    robot = Robot()
    with DatasetWriter(tmp_path / "set", rollout_spec()) as writer:
        recorder = RolloutRecorder(writer)
        with (
            pytest.raises(RuntimeError, match="broken"),
            Broken(robot="panda", backend="scripted") as policy,
        ):
            robot.run_policy(policy=policy, instruction="reach the red cube", recorder=recorder)
        assert robot.on_step is None
        robot.run_policy(
            policy_config={"backend": "scripted"},
            instruction="reach the red cube",
            task="reach",
            duration=0.5,
            recorder=recorder,
        )
    assert json.loads((tmp_path / "set/meta/info.json").read_text())["total_episodes"] == 1


def test_other_embodiments_are_refused():
    with pytest.raises(ConfigError, match="tool frame"):
        rollout_spec("umi")


def test_a_dataset_takes_the_episodes_of_one_robot(tmp_path: Path):
    moved: list[int] = []
    refused = pytest.raises(
        ConfigError, match="episodes of robot 'panda', not 'fr3'; record into another folder"
    )
    with DatasetWriter(tmp_path / "set", rollout_spec()) as writer, refused:
        Robot("fr3").run_policy(
            policy_config={"backend": "scripted"},
            task="reach",
            recorder=RolloutRecorder(writer),
            on_tick=lambda _: moved.append(1),
        )
    assert not moved


@pytest.mark.parametrize(
    ("callback", "name"),
    [({"on_tick": lambda: None}, "on_tick"), ({"progress": lambda _: None}, "progress")],
)
def test_callbacks_that_cannot_be_called_are_refused(callback, name):
    with pytest.raises(InputError, match=rf"{name} must be (Callable|Progress)"):
        Robot().run_policy(policy_config={"backend": "scripted"}, task="reach", **callback)
