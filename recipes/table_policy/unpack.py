"""Demonstrations of a LeRobot v3 dataset as the shards that the trainer reads.

The trainer unpacks a dataset once, because random access into video is far slower than a training
step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.table_policy.shards import (
    EPISODES_PER_SHARD,
    pack,
    read_shard,
    shard_indices,
    shard_path,
    write_shard,
)
from strands_cosmos3.datasets import ACTION, EE_POSE, STATE, Dataset
from strands_cosmos3.datasets.arm_rows import poses_of
from strands_cosmos3.datasets.spec import EXPERT, LABELLED, Feature
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.training.run_manifest import identity_of, keep_settings
from strands_cosmos3.training.windows import RAW_WIDTH, ROWS
from strands_cosmos3.worlds.table.demo_dataset import (
    COMPOSITE,
    CONTINUED,
    GOAL,
    LOOKS,
    LOOKS_CONTINUED,
    LOOKS_EXPERT,
    PERTURBED,
    PREFIX_ROWS,
)
from strands_cosmos3.worlds.table.demonstrations import EpisodeRecord
from strands_cosmos3.worlds.table.phrases import GOALS


def unpack(root: Path, folder: Path, on_shard: Callable[[int, int], None] | None = None) -> None:
    """Turn a dataset into shards in a folder; existing shards of the same dataset are kept.

    Raises:
        ConfigError: The dataset has no expert's labels, or the existing shards are of another
            dataset.
    """
    with Dataset(root) as dataset:
        features = dataset.spec.features
        missing = [
            key
            for key in (EXPERT, LABELLED, PERTURBED, GOAL, COMPOSITE, EE_POSE)
            if key not in features
        ]
        if missing:
            raise ConfigError(
                f"{root} lacks {', '.join(missing)}: it was not recorded by `strands-cosmos3 "
                "demos`."
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
                    pack([_record(own[i], features) for i in episodes]),
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


def _record(episode: Any, features: Mapping[str, Feature]) -> EpisodeRecord:
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
        perturbed=np.asarray(episode[PERTURBED]).astype(bool),
        label_ticks=labelled.astype(np.int16),
        labels=answers(EXPERT),
        continued=answers(CONTINUED, EXPERT),
        prefix_rows=prefix_rows.astype(np.int8),
        looks_labels=answers(LOOKS_EXPERT, EXPERT),
        looks_continued=answers(LOOKS_CONTINUED, CONTINUED, LOOKS_EXPERT, EXPERT),
    )
