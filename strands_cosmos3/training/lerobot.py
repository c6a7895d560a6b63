"""Demonstrations as a LeRobot v3 dataset, and back into what the trainer reads.

An episode holds what every arm's episode holds (joint angles, the measured pose of the Cosmos frame, raw ``midtrain`` rows
of what was done) and what only an expert can add: its clean answer for every goal from the very state, in the model's scale.
Random access into video costs an order of magnitude more than a training step may, so the trainer unpacks a dataset once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from strands_cosmos3.actions.decode import encode_pose_delta
from strands_cosmos3.actions.rotations import matrix_to_quaternion, quaternion_to_matrix, se3, se3_between
from strands_cosmos3.checks import F64
from strands_cosmos3.datasets import (
    ACTION,
    EE_POSE,
    STATE,
    Dataset,
    DatasetSpec,
    DatasetWriter,
    Feature,
    VideoConfig,
    arm_spec,
    camera_key,
)
from strands_cosmos3.datasets.spec import DONE, SUCCESS
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.training.demos import ROW_HZ, EpisodeRecord
from strands_cosmos3.training.phrases import GOALS, sentence
from strands_cosmos3.training.run_manifest import identity_of, keep_settings
from strands_cosmos3.training.shards import EPISODES_A_SHARD, pack, shard_path, write_shard
from strands_cosmos3.training.windows import RAW_WIDTH, ROWS

COMPOSITE = camera_key("composite")
EXPERT, LABELLED, BENT, GOAL = "expert.rows", "expert.labelled", "bent", "goal"
VIDEO = VideoConfig(crf=8, gop=8, pixel_format="yuv444p")
"""Nearly lossless and with colour at full resolution: a cube is a few pixels wide."""


def demo_spec(canvas_hw: tuple[int, int]) -> DatasetSpec:
    """The schema of demonstrations with composites of a size."""
    names = tuple(f"{verb}_{colour}" for verb, colour in GOALS)
    about = {"goals": list(names), "rows": ROWS, "width": RAW_WIDTH, "normalized": "droid_lerobot quantiles"}
    extra = {
        EXPERT: Feature("float32", (len(GOALS) * ROWS * RAW_WIDTH,), None, about),
        LABELLED: Feature("bool", (1,)),
        BENT: Feature("bool", (1,)),
        GOAL: Feature("int64", (1,), None, {"goals": list(names)}),
    }
    return arm_spec({"composite": canvas_hw}, fps=int(ROW_HZ), extra=extra)


def add_record(writer: DatasetWriter, record: EpisodeRecord, seed: int, episode: int) -> int:
    """Add an episode; its task is a sentence for its first goal.

    The last frame's action, which would lead to a frame that is not there, says to stay.
    """
    n = len(record.opening)
    rows = raw_rows(record.T_base_cosmos, record.told)
    labelled = np.zeros(n, bool)
    labelled[record.label_ticks] = True
    labels = np.zeros((n, len(GOALS) * ROWS * RAW_WIDTH), np.float32)
    labels[record.label_ticks] = record.labels.reshape(len(record.label_ticks), -1)
    done = np.zeros(n, bool)
    done[-1] = True
    columns: dict[str, Any] = {
        STATE: np.concatenate([record.q_rad, record.opening[:, None]], axis=1).astype(np.float32),
        EE_POSE: pose7(record.T_base_cosmos).astype(np.float32),
        ACTION: rows.astype(np.float32),
        DONE: done,
        SUCCESS: np.zeros(n, bool),
        EXPERT: labels,
        LABELLED: labelled,
        BENT: record.bent,
        GOAL: record.goal.astype(np.int64),
    }
    task = sentence(int(record.goal[0]), np.random.default_rng([seed, episode, 7]))
    return writer.add_episode(columns, {COMPOSITE: record.frames}, task, {"seed": seed, "episode": episode})


def raw_rows(T_base_cosmos: F64, told: F64) -> F64:
    """[n, 10] what was done after each tick: the measured delta and the gripper's order; after the last, staying."""
    poses = np.concatenate([T_base_cosmos, T_base_cosmos[-1:]])
    return np.concatenate([encode_pose_delta(se3_between(poses[:-1], poses[1:])), told[:, None]], axis=1)


def pose7(T: F64) -> F64:
    """[n, 7] position and quaternion xyzw of poses [n, 4, 4]."""
    return np.concatenate([T[:, :3, 3], matrix_to_quaternion(T[:, :3, :3])], axis=1)


def poses_of(columns: Any) -> F64:
    """[n, 4, 4] poses of positions and quaternions [n, 7]."""
    values = np.asarray(columns, dtype=np.float64)
    return se3(quaternion_to_matrix(values[:, 3:]), values[:, :3])


def unpack(root: Path, folder: Path, on_shard: Callable[[int, int], None] | None = None) -> None:
    """Turn a dataset of demonstrations into shards; those of the same dataset that are there are kept.

    Args:
        root: The dataset.
        folder: Where shards go.
        on_shard: Called with shards done and in all.

    Raises:
        ConfigError: It is a LeRobot dataset without an expert's labels, or the shards that are there are of another one.
    """
    with Dataset(root) as dataset:
        lacking = [key for key in (EXPERT, LABELLED, BENT, GOAL, COMPOSITE, EE_POSE) if key not in dataset.spec.features]
        if lacking:
            raise ConfigError(
                f"{root} lacks {', '.join(lacking)}: it holds no demonstrations of `strands-cosmos3 demos`. To post-train a "
                "checkpoint on any arm's episodes use --checkpoint."
            )
        count = -(-len(dataset) // EPISODES_A_SHARD)
        _require_same(dataset, folder)
        for index in range(count):
            if not shard_path(folder, index).exists():
                first = index * EPISODES_A_SHARD
                records = [_record(dataset[i]) for i in range(first, min(first + EPISODES_A_SHARD, len(dataset)))]
                write_shard(shard_path(folder, index), pack(records))
            if on_shard is not None:
                on_shard(index + 1, count)


def _require_same(dataset: Dataset, folder: Path) -> None:
    """Hold the shards of a folder against the dataset that it is to be unpacked from.

    A folder of an older version, which does not say what it was unpacked from, is compared by its episodes.
    """
    known = folder / "dataset.json"
    if not known.exists():
        for index, path in enumerate(sorted(folder.glob("shard-*.npz"))):
            first = index * EPISODES_A_SHARD
            with np.load(path) as shard:
                lengths, poses = np.diff(shard["starts"]), shard["T_base_cosmos"]
            there = dataset.lengths[first : first + EPISODES_A_SHARD]
            if not np.array_equal(lengths, there) or not np.allclose(poses_of(dataset[first][EE_POSE]), poses[: lengths[0]]):
                raise ConfigError(f"{path} was not unpacked from {dataset.root}; choose another --out.")
    try:
        keep_settings(known, identity_of(dataset))
    except ConfigError as error:
        raise ConfigError(f"the demonstrations in {folder} are of another dataset: {error}") from None


def _record(episode: Any) -> EpisodeRecord:
    labelled = np.flatnonzero(episode[LABELLED])
    state = np.asarray(episode[STATE], np.float64)
    return EpisodeRecord(
        frames=episode.frames(COMPOSITE),
        q_rad=state[:, :-1],
        T_base_cosmos=poses_of(episode[EE_POSE]),
        opening=state[:, -1],
        told=np.asarray(episode[ACTION], np.float64)[:, -1],
        goal=np.asarray(episode[GOAL]).astype(np.int8),
        bent=np.asarray(episode[BENT]).astype(bool),
        label_ticks=labelled.astype(np.int16),
        labels=np.asarray(episode[EXPERT])[labelled].reshape(-1, len(GOALS), ROWS, RAW_WIDTH),
    )
