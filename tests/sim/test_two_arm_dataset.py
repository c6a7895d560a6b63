"""A bar lifted by two arms, recorded: every limb's columns against what that limb did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.small_episodes import columns, spec
from strands_cosmos3.actions.decode import decode_limbs
from strands_cosmos3.actions.stats import normalize_chunk
from strands_cosmos3.cli import main
from strands_cosmos3.datasets import (
    ACTION,
    EE_POSE,
    STATE,
    Dataset,
    DatasetWriter,
    arm_spec,
    recorded_limbs,
)
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError, DatasetFormatError
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.catalogue import PANDA, get_robot, write_robot
from strands_cosmos3.robots.spec import ModelPart
from strands_cosmos3.sim.dataset import RolloutRecorder, rollout_spec
from strands_cosmos3.training.arm_columns import ArmColumns, ArmKeys
from strands_cosmos3.types import ActionChunk, Request, Rollout
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.expert import ScriptedBackend

DUAL_PANDA = get_robot("dual_panda")

DUAL = get_embodiment("robomind-franka-dual")
T_HAND_COSMOS = DUAL.tool_frame.T_parent_cosmos
STEPS = 60  # physics steps of a frame: 600 Hz, 10 frames a second


class LeftHalfOpen(ScriptedBackend):
    """The expert, whose left hand is told to stay half open, so that the two hands differ."""

    def infer(self, request: Request) -> ActionChunk:
        chunk = super().infer(request)
        rows = chunk.action.copy()
        rows[:, DUAL.limbs[0].gripper_column] = 0.3  # normalised: open by 0.65
        return replace(chunk, action=rows)


def record(folder: Path, robot: Robot, backend: Any = "scripted", **options) -> Rollout:
    with DatasetWriter(folder, rollout_spec(DUAL, robot.scene.robot)) as writer:
        return robot.run_policy(
            task="lift_bar",
            policy_config={"embodiment": DUAL, "backend": backend},
            seed=3,
            recorder=RolloutRecorder(writer, DUAL),
            **options,
        )


@pytest.fixture(scope="module")
def lifted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rollout]:
    folder = tmp_path_factory.mktemp("lifted") / "set"
    rollout = record(folder, Robot("dual_panda"))
    assert rollout.success
    return folder, rollout


def against(folder: Path, rollout: Rollout, order: tuple[str, ...]) -> None:
    """Compare every limb's recorded motion with the log of a robot whose limbs have this order."""
    log = rollout.arrays
    with Dataset(folder) as dataset:
        limbs = recorded_limbs(dataset[0])
    assert tuple(limbs) == ("left", "right")  # the embodiment's, whatever the robot's is
    for name, limb in limbs.items():
        at, n = order.index(name), len(limb.q_rad)
        steps = STEPS * np.arange(1, n) - 1  # the log begins after the first physics step
        np.testing.assert_allclose(
            limb.q_rad[1:], log["q_achieved_rad"][steps, 7 * at : 7 * at + 7], atol=1e-6
        )
        np.testing.assert_allclose(limb.gripper[1:], log["gripper_achieved"][steps, at], atol=0.01)
        np.testing.assert_allclose(
            limb.T_base_cosmos[1:],
            log[f"T_base_hand_achieved_{name}"][steps] @ T_HAND_COSMOS,
            atol=1e-6,
        )
        ends = STEPS * np.arange(1, n + 1) - 1
        commanded = log[f"T_base_hand_commanded_{name}"][ends] @ T_HAND_COSMOS
        assert (
            np.linalg.norm((limb.T_base_commanded[1:] - commanded)[:, :3, 3], axis=1).max() < 1e-5
        )
        np.testing.assert_allclose(
            limb.T_base_commanded[1:, :3, :3], commanded[:, :3, :3], atol=1e-5
        )
        np.testing.assert_allclose(
            limb.gripper_commanded, log["gripper_commanded"][ends, at], atol=1e-6
        )
    apart = limbs["left"].T_base_cosmos[-1, :3, 3] - limbs["right"].T_base_cosmos[-1, :3, 3]
    assert np.linalg.norm(apart) > 0.02  # exchanged, they would not pass


def test_every_limb_s_columns_are_what_that_limb_did(lifted: tuple[Path, Rollout]):
    against(*lifted, ("left", "right"))


def test_columns_have_the_names_and_the_order_of_the_embodiment_s_limbs(
    lifted: tuple[Path, Rollout],
):
    folder, _ = lifted
    with Dataset(folder) as dataset:
        features, fps = dataset.spec.features, dataset.fps
        shown = dataset[0].frames("observation.images.front", [0, -1 + len(dataset[0])])
        note = dict(dataset[0].note)
    assert fps == 10
    assert features[STATE].names == (
        *(f"left_joint_{i}" for i in range(7)), "left_gripper", *(f"right_joint_{i}" for i in range(7)), "right_gripper",
    )  # fmt: skip
    assert features[EE_POSE].names is not None
    assert [name for name in features[EE_POSE].names if name.endswith("_x")] == [
        "left_x",
        "right_x",
    ]
    assert features[ACTION].names == DUAL.action_space().columns
    assert [key for key in features if key.startswith("observation.images.")] == [
        f"observation.images.{view}" for view in ("front", "left", "right")
    ]
    assert np.abs(shown[0].astype(int) - shown[1]).mean() > 1  # the arms have moved
    assert (note["task"], note["success"]) == ("lift_bar", True)


def test_rows_are_the_model_s_and_decode_to_the_same_poses(lifted: tuple[Path, Rollout]):
    """The first rows, normalised as a checkpoint's are, and decoded by limb."""
    with Dataset(lifted[0]) as dataset:
        rows, limbs = dataset[0][ACTION].astype(np.float64)[:16], recorded_limbs(dataset[0])
    chunk = ActionChunk(normalize_chunk(rows, DUAL), DUAL.action_space(), DUAL)
    poses = decode_limbs(chunk, {name: limb.T_base_commanded[0] for name, limb in limbs.items()})
    for name, limb in limbs.items():
        np.testing.assert_allclose(
            poses.by_limb[name].T_base_frame, limb.T_base_commanded[1:17], atol=1e-6
        )
        np.testing.assert_allclose(
            poses.by_limb[name].gripper, limb.gripper_commanded[:16], atol=1e-6
        )


def test_limbs_are_joined_by_name_and_not_by_their_place(tmp_path: Path):
    """A robot whose right arm comes first."""
    parts = tuple(
        replace(part, file=str(resource("assets/panda.xml"))) for part in DUAL_PANDA.model
    )
    assert all(isinstance(part, ModelPart) for part in parts)
    other = replace(DUAL_PANDA, name="right_first", model=parts, limbs=DUAL_PANDA.limbs[::-1])
    (tmp_path / "right_first.toml").write_text(write_robot(other))
    rollout = record(
        tmp_path / "set", Robot(str(tmp_path / "right_first.toml")), LeftHalfOpen(), duration=1.4
    )
    assert set(np.unique(rollout.arrays["gripper_commanded"][600:])) == {0.65, 1.0}
    against(tmp_path / "set", rollout, ("right", "left"))


def test_one_arm_is_recorded_as_before():
    given = {"fps": None, "robot_type": "dual_panda", "extra": None}
    assert arm_spec({}, DUAL, n_joints={"right": 7, "left": 7}, **given).features == arm_spec(
        {}, DUAL, n_joints={"left": 7, "right": 7}, **given
    ).features  # fmt: skip
    assert rollout_spec("droid", PANDA) == arm_spec(
        dict.fromkeys(("wrist", "exterior_1", "exterior_2"), (180, 320))
    )


def test_the_command_records_two_arms(lifted: tuple[Path, Rollout], tmp_path: Path):
    flags = [
        "--robot",
        "dual_panda",
        "--task",
        "lift_bar",
        "--backend",
        "scripted",
        "--duration",
        "0.4",
    ]
    # too short to succeed
    assert main(["rollout", *flags, "--dataset", str(tmp_path / "set")]) == 1
    with Dataset(tmp_path / "set") as dataset, Dataset(lifted[0]) as other:
        assert not dataset.spec.differences(other.spec)
        assert dataset[0].note["success"] is False


def test_other_limbs_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"'dual_panda' has the limbs left, right, but embodiment 'droid_lerobot' moves arm",
    ):
        rollout_spec("droid", DUAL_PANDA)
    with pytest.raises(ConfigError, match="tool frame of 'agibotworld'"):
        rollout_spec("agibotworld", DUAL_PANDA)
    with pytest.raises(ConfigError, match="limbs left, up; it moves left, right"):
        arm_spec({}, "robomind-franka-dual", n_joints={"left": 7, "up": 7})
    # fingers instead of grippers
    with pytest.raises(ConfigError, match=r"limbs right, left; it moves right, left"):
        arm_spec({}, "hand_pose", n_joints={"right": 7, "left": 7})


def test_post_training_refuses_two_arms(lifted: tuple[Path, Rollout]):
    with Dataset(lifted[0]) as dataset:
        columns = ArmColumns(dataset, DUAL, ArmKeys().resolved(dataset, DUAL))
        with pytest.raises(DatasetFormatError, match=r"no column x, y, .*it has left_x"):
            columns.rows(dataset[0], slice(None))
        with pytest.raises(ConfigError, match=r"one column of .* named as the gripper"):
            columns.state(dataset[0], slice(None))


def test_an_episode_without_names_or_embodiment_is_no_limb_s(tmp_path: Path):
    one = spec()
    bare = {
        key: replace(feature, info={}) if key == ACTION else feature
        for key, feature in one.features.items()
    }
    unnamed = {
        key: replace(feature, names=None) if key == STATE else feature
        for key, feature in one.features.items()
    }
    for name, features, says in (
        ("a", bare, "does not state the embodiment"),
        ("b", unnamed, "no column joint_0|no column"),
    ):
        used = {key: feature for key, feature in features.items() if not feature.is_video}
        with DatasetWriter(tmp_path / name, replace(one, features=used)) as writer:
            writer.add_episode(
                {key: value for key, value in columns(5, 0).items() if key in used}, {}, task="t"
            )
        with Dataset(tmp_path / name) as dataset, pytest.raises(DatasetFormatError, match=says):
            recorded_limbs(dataset[0])
