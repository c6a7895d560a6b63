"""Demonstrations as a LeRobot v3 dataset, and back into the shards that the trainer reads.

An episode has the columns of any arm's episode and the expert's labels. The trainer unpacks a
dataset once, because random access into video is far slower than a training step.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.datasets import ACTION, EE_POSE, STATE, Dataset, DatasetWriter, VideoConfig
from strands_cosmos3.datasets.spec import DONE, SUCCESS, DatasetSpec, Feature, arm_spec, camera_key
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.training.bundled.demos import DemoConfig, EpisodeRecord
from strands_cosmos3.training.bundled.phrases import GOALS, plain, sentence
from strands_cosmos3.training.bundled.shards import (
    EPISODES_PER_SHARD,
    pack,
    read_shard,
    shard_indices,
    shard_path,
    write_shard,
)
from strands_cosmos3.training.run_manifest import identity_of, keep_settings
from strands_cosmos3.training.windows import (
    EXPERT,
    INSTRUCTIONS,
    LABELLED,
    RAW_WIDTH,
    ROWS,
    pose7,
    poses_of,
    raw_rows,
)

COMPOSITE, LOOKS = camera_key("composite"), camera_key("composite_looks")
PERTURBED, GOAL = "perturbed", "goal"
CONTINUED, PREFIX_ROWS = "expert.continued", "expert.prefix_rows"
LOOKS_EXPERT, LOOKS_CONTINUED = "expert.looks_rows", "expert.looks_continued"
_OLD_PERTURBED = "bent"  # of 0.1.0
VIDEO = VideoConfig(crf=8, gop=8, pixel_format="yuv444p")
"""Nearly lossless and with full colour resolution: a cube is a few pixels wide."""


def demo_spec(picture_hw: tuple[int, int], config: DemoConfig | None = None) -> DatasetSpec:
    """Return the schema of demonstrations with pictures of a size: composites, or those of the
    embodiment's only camera.
    """
    config = config or DemoConfig()
    robot, embodiment = config.spec, config.embodiment
    names = [f"{verb}_{colour}" for verb, colour in GOALS]
    labels: dict[str, Any] = {
        "goals": [names[goal] for goal in config.labelled],
        "rows": ROWS,
        "width": RAW_WIDTH,
    }
    labels |= {"normalized": f"{embodiment.stats} quantiles"}
    if embodiment.rig is None:
        labels[INSTRUCTIONS] = [plain(goal) for goal in config.labelled]
    answers, lengths = (
        Feature("float32", (len(config.labelled) * ROWS * RAW_WIDTH,), None, labels),
        Feature("int64", (len(GOALS),)),
    )
    of_rig = {LOOKS_EXPERT: answers}
    if config.prefix_rows:
        of_rig |= {CONTINUED: answers, PREFIX_ROWS: lengths, LOOKS_CONTINUED: answers}
    extra = {
        EXPERT: answers,
        **(of_rig if embodiment.rig is not None else {}),
        LABELLED: Feature("bool", (1,)),
        PERTURBED: Feature("bool", (1,)),
        GOAL: Feature("int64", (1,), None, {"goals": names}),
    }
    cameras = (
        ("composite", "composite_looks")
        if embodiment.rig is not None
        else embodiment.view_names[:1]
    )
    return arm_spec(
        dict.fromkeys(cameras, picture_hw),
        embodiment,
        None,
        len(robot.limb().joints),
        robot.name,
        extra,
    )


def add_record(writer: DatasetWriter, record: EpisodeRecord, seed: int, episode: int) -> int:
    """Add an episode, with a sentence for its first goal as its task. The last frame's action is
    to stay.
    """
    n = len(record.gripper_opening)
    labelled, done = np.zeros(n, bool), np.zeros(n, bool)
    labelled[record.label_ticks] = True
    done[-1] = True
    given: dict[str, NDArray[Any]] = {
        EXPERT: record.labels,
        CONTINUED: record.continued,
        PREFIX_ROWS: record.prefix_rows,
    }
    given |= {LOOKS_EXPERT: record.looks_labels, LOOKS_CONTINUED: record.looks_continued}
    given = {
        name: _at_ticks(values, record.label_ticks, n)
        for name, values in given.items()
        if name in writer.spec.features
    }
    columns: dict[str, Any] = {
        STATE: np.concatenate([record.q_rad, record.gripper_opening[:, None]], axis=1).astype(
            np.float32
        ),
        EE_POSE: pose7(record.T_base_cosmos).astype(np.float32),
        ACTION: raw_rows(record.T_base_cosmos, record.gripper_command).astype(np.float32),
        DONE: done,
        SUCCESS: np.zeros(n, bool),
        **given,
        LABELLED: labelled,
        PERTURBED: record.perturbed,
        GOAL: record.goal.astype(np.int64),
    }
    task = sentence(int(record.goal[0]), np.random.default_rng([seed, episode, 7]))
    shown = record.looks[
        np.maximum(np.searchsorted(record.label_ticks, np.arange(n), side="right") - 1, 0)
    ]
    # a robot's only camera has no other looks
    videos = dict(zip(writer.spec.cameras, (record.frames, shown), strict=False))
    return writer.add_episode(columns, videos, task, {"seed": seed, "episode": episode})


def _at_ticks(values: NDArray[Any], ticks: NDArray[np.int16], n: int) -> NDArray[Any]:
    """Return [n, numbers] with the values [L, ...] of some ticks, and zeros at the others."""
    flat = values.reshape(len(ticks), -1)
    out = np.zeros((n, flat.shape[1]), np.float32 if flat.dtype == np.float32 else np.int64)
    out[ticks] = flat
    return out


def unpack(root: Path, folder: Path, on_shard: Callable[[int, int], None] | None = None) -> None:
    """Turn a dataset into shards in a folder; existing shards of the same dataset are kept.

    Raises:
        ConfigError: The dataset has no expert's labels, or the existing shards are of another
            dataset.
    """
    with Dataset(root) as dataset:
        features = dataset.spec.features
        perturbed = (
            _OLD_PERTURBED
            if _OLD_PERTURBED in features and PERTURBED not in features
            else PERTURBED
        )
        if perturbed == _OLD_PERTURBED:
            warnings.warn(
                f"{root}: the feature 'bent' is renamed to 'perturbed'.",
                DeprecationWarning,
                stacklevel=2,
            )
        missing = [
            key
            for key in (EXPERT, LABELLED, perturbed, GOAL, COMPOSITE, EE_POSE)
            if key not in features
        ]
        if missing:
            raise ConfigError(
                f"{root} lacks {', '.join(missing)}: it was not recorded by `strands-cosmos3 "
                "demos`. To post-train a "
                "checkpoint on any arm's episodes use --checkpoint."
            )
        count = -(-len(dataset) // EPISODES_PER_SHARD)
        _require_same(dataset, folder)

    def unpack_shard(index: int) -> None:
        first = index * EPISODES_PER_SHARD
        if not shard_path(folder, index).exists():
            with Dataset(root) as own:  # a thread's own: readers keep files open
                episodes = range(first, min(first + EPISODES_PER_SHARD, len(own)))
                write_shard(
                    shard_path(folder, index),
                    pack([_record(own[i], perturbed, features) for i in episodes]),
                )

    # decoding video releases the interpreter's lock
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for done, _ in enumerate(pool.map(unpack_shard, range(count)), start=1):
                if on_shard is not None:
                    on_shard(done, count)
        finally:
            pool.shutdown(cancel_futures=True)


def _require_same(dataset: Dataset, folder: Path) -> None:
    """Require that existing shards are of a dataset; without a record of their dataset, episodes
    are compared.
    """
    record = folder / "dataset.json"
    for index in [] if record.exists() else shard_indices(folder):
        first = index * EPISODES_PER_SHARD
        shard = read_shard(shard_path(folder, index))
        lengths = np.diff(shard["starts"])
        same = np.array_equal(lengths, dataset.lengths[first : first + EPISODES_PER_SHARD])
        if not same or not np.allclose(
            poses_of(dataset[first][EE_POSE]), shard["T_base_cosmos"][: lengths[0]]
        ):
            raise ConfigError(
                f"{shard_path(folder, index)} was not unpacked from {dataset.root}; choose "
                "another --out."
            )
    try:
        keep_settings(record, identity_of(dataset))
    except ConfigError as error:
        raise ConfigError(
            f"the demonstrations in {folder} are of another dataset: {error}"
        ) from None


def _record(episode: Any, perturbed: str, features: Mapping[str, Feature]) -> EpisodeRecord:
    labelled = np.flatnonzero(episode[LABELLED])
    state = np.asarray(episode[STATE], np.float64)

    def answers(*names: str) -> NDArray[Any]:
        """Return [L, goals, rows, 10] of a feature, or of the next one that the dataset has."""
        values = np.asarray(episode[next(name for name in names if name in features)])
        return values[labelled].reshape(-1, len(GOALS), ROWS, RAW_WIDTH)

    known = PREFIX_ROWS in features  # recorded with action prefixes
    prefix_rows = (
        np.asarray(episode[PREFIX_ROWS])[labelled]
        if known
        else np.zeros((len(labelled), len(GOALS)))
    )
    return EpisodeRecord(
        frames=episode.frames(COMPOSITE),
        looks=episode.frames(LOOKS if LOOKS in features else COMPOSITE, labelled.tolist()),
        q_rad=state[:, :-1],
        T_base_cosmos=poses_of(episode[EE_POSE]),
        gripper_opening=state[:, -1],
        gripper_command=np.asarray(episode[ACTION], np.float64)[:, -1],
        goal=np.asarray(episode[GOAL]).astype(np.int8),
        perturbed=np.asarray(episode[perturbed]).astype(bool),
        label_ticks=labelled.astype(np.int16),
        labels=answers(EXPERT),
        continued=answers(CONTINUED, EXPERT),
        prefix_rows=prefix_rows.astype(np.int8),
        looks_labels=answers(LOOKS_EXPERT, EXPERT),
        looks_continued=answers(LOOKS_CONTINUED, CONTINUED, LOOKS_EXPERT, EXPERT),
    )
