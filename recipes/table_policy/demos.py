"""Demonstrations as the trainer reads them: episodes of a dataset one after another, with pictures
that are mapped from disk, because random access into video is far slower than a training step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.table_policy.record import (
    CONTINUED,
    LOOKS_CONTINUED,
    LOOKS_EXPERT,
    PREFIX_ROWS,
    LabelConfig,
    LabelledRecord,
)
from strands_cosmos3.datasets import ACTION, EE_POSE, STATE, Dataset
from strands_cosmos3.datasets.arm_rows import ArmClip, poses_of
from strands_cosmos3.datasets.spec import EXPERT, LABELLED, Feature, camera_key
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_folder
from strands_cosmos3.training.run_manifest import identity_of, keep_settings
from strands_cosmos3.training.windows import RAW_WIDTH, ROWS, latent_columns
from strands_cosmos3.worlds.table.demo_dataset import GOAL, PERTURBED
from strands_cosmos3.worlds.table.demonstrations import clip_of
from strands_cosmos3.worlds.table.phrases import GOALS

COMPOSITE, LOOKS = map(camera_key, LabelConfig().cameras)
_PICTURES = ("frames", "looks")
_ARRAYS = "arrays.npz"


@dataclass(eq=False, kw_only=True)
class Demos(LabelledRecord):
    """Arrays of all episodes, one after another; pictures are mapped from disk."""

    label_ticks: NDArray[np.int64]  # [L] among all ticks
    last: NDArray[np.int64]  # [T] the last tick of each tick's episode

    @classmethod
    def open(cls, folder: Path) -> Demos:
        """Open a folder that :func:`write_demos` wrote; raise ConfigError if it holds none."""
        if not is_unpacked(folder):
            raise ConfigError(
                f"{folder} lacks demonstrations; record some with `python -m "
                f"recipes.table_policy.record --out {folder}`."
            )
        with np.load(folder / _ARRAYS) as file:
            arrays = {name: file[name] for name in file.files}
        hw = tuple(arrays.pop("canvas_hw"))
        pictures = {
            name: np.memmap(folder / f"{name}.u8", np.uint8, "r").reshape(-1, *hw, 3)
            for name in _PICTURES
        }
        return cls(**pictures, **arrays)

    @property
    def canvas_hw(self) -> tuple[int, int]:
        """Height and width of the pictures."""
        height, width = self.frames.shape[1:3]
        return height, width

    @property
    def columns(self) -> int:
        """Latent columns that show pictures; the rest is padding."""
        return latent_columns(self.canvas_hw)

    def __len__(self) -> int:
        return len(self.goal)

    def clips(self, rows: int) -> NDArray[np.int64]:
        """Return the ticks that ``rows`` further ticks of the same episode follow: the first
        ticks of whole clips.
        """
        ticks = np.arange(len(self))
        return ticks[ticks + rows <= self.last]

    def arm_clips(self, ticks: NDArray[np.int64]) -> list[ArmClip]:
        """Return clips by their first ticks, for the measuring of dynamics."""
        return [clip_of(self, int(tick), ROWS) for tick in ticks]


def spread(count: int, most: int) -> NDArray[np.int64]:
    """Return indices of a sequence, evenly spread, at most so many."""
    return np.linspace(0, count - 1, min(most, count)).astype(np.int64)


def is_unpacked(folder: Path) -> bool:
    """Whether a folder holds demonstrations as the trainer reads them."""
    return (folder / _ARRAYS).exists()


def write_demos(folder: Path, records: Iterable[LabelledRecord]) -> None:
    """Write episodes as the trainer reads them. Of their pictures only one episode's are in
    memory.
    """
    parts: dict[str, list[NDArray[Any]]] = {
        declared.name: [] for declared in fields(Demos) if declared.name not in _PICTURES
    }
    first, hw = 0, (0, 0)
    with (folder / "frames.u8").open("wb") as frames, (folder / "looks.u8").open("wb") as looks:
        for record in records:
            record.frames.tofile(frames)
            record.looks.tofile(looks)
            hw, ticks = record.frames.shape[1:3], len(record.goal)
            placed = {
                "last": np.full(ticks, first + ticks - 1),
                "label_ticks": record.label_ticks.astype(np.int64) + first,
            }
            for name, values in {**vars(record), **placed}.items():
                if name not in _PICTURES:
                    parts[name].append(values)
            first += ticks
    arrays = {name: np.concatenate(values) for name, values in parts.items()}
    np.savez(folder / _ARRAYS, allow_pickle=False, **{**arrays, "canvas_hw": np.array(hw)})


def unpack(root: Path, folder: Path, on_episode: Callable[[int, int], None] | None = None) -> None:
    """Unpack a dataset into a folder, unless it was.

    Raises:
        ConfigError: The dataset has no expert's labels, or the folder holds those of another one.
    """
    with Dataset(root) as dataset:
        features, count = dataset.spec.features, len(dataset)
        missing = [
            key
            for key in (EXPERT, LABELLED, PERTURBED, GOAL, COMPOSITE, EE_POSE, LOOKS)
            if key not in features
        ]
        if missing:
            raise ConfigError(
                f"{root} lacks {', '.join(missing)}: it was not recorded by "
                "`python -m recipes.table_policy.record`."
            )
        keep_settings(folder.with_name(f"{folder.name}.json"), identity_of(dataset))
    if is_unpacked(folder):
        return

    def read(index: int) -> LabelledRecord:
        with Dataset(root) as dataset:  # a thread's own: readers keep files open
            return _record(dataset[index], features)

    def records() -> Iterable[LabelledRecord]:
        # decoding video releases the interpreter's lock
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for done, record in enumerate(pool.map(read, range(count)), start=1):
                if on_episode is not None:
                    on_episode(done, count)
                yield record

    write_folder(folder, lambda unfinished: write_demos(unfinished, records()))


def _record(episode: Any, features: Mapping[str, Feature]) -> LabelledRecord:
    labelled = np.flatnonzero(episode[LABELLED])
    state = np.asarray(episode[STATE], np.float64)

    def rows(*names: str) -> NDArray[np.float32]:
        """Return [L, goals, rows, 10] of the first of these features that the dataset has."""
        values = np.asarray(episode[next(name for name in names if name in features)])
        return values[labelled].reshape(-1, len(GOALS), ROWS, RAW_WIDTH)

    prefix_rows = np.zeros((len(labelled), len(GOALS)), np.int8)
    if PREFIX_ROWS in features:  # recorded with action prefixes
        prefix_rows = np.asarray(episode[PREFIX_ROWS])[labelled].astype(np.int8)
    return LabelledRecord(
        frames=episode.frames(COMPOSITE),
        looks=episode.frames(LOOKS, labelled.tolist()),
        q_rad=state[:, :-1],
        T_base_cosmos=poses_of(episode[EE_POSE]),
        gripper_opening=state[:, -1],
        gripper_command=np.asarray(episode[ACTION], np.float64)[:, -1],
        goal=np.asarray(episode[GOAL]).astype(np.int8),
        perturbed=np.asarray(episode[PERTURBED]).astype(bool),
        label_ticks=labelled.astype(np.int16),
        labels=rows(EXPERT),
        continued=rows(CONTINUED, EXPERT),
        prefix_rows=prefix_rows,
        looks_labels=rows(LOOKS_EXPERT),
        looks_continued=rows(LOOKS_CONTINUED, LOOKS_EXPERT),
    )
