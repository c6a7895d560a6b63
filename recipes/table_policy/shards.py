"""Demonstrations as the trainer reads them: shards of episodes, one after another, with pictures
that are mapped.

``starts`` holds the first tick of each episode; the other arrays are those of
:class:`EpisodeRecord`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.datasets.arm_rows import ArmClip
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_whole
from strands_cosmos3.training.windows import ROWS
from strands_cosmos3.worlds.table.demonstrations import EpisodeRecord
from strands_cosmos3.worlds.table.phrases import GOALS, plain

EPISODES_PER_SHARD = 20
_PER_TICK = ("frames", "T_base_cosmos", "gripper_opening", "gripper_command", "goal", "perturbed")
_PER_LABEL = ("labels", "continued", "prefix_rows", "looks_labels", "looks_continued")
_PICTURES = ("frames", "looks")


def shard_path(folder: Path, index: int) -> Path:
    """Return the path of a shard."""
    return folder / f"shard-{index:05d}.npz"


def shard_indices(folder: Path) -> list[int]:
    """Return the indices of the shards in a folder."""
    return sorted(int(path.stem.removeprefix("shard-")) for path in folder.glob("shard-*.npz"))


def write_shard(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a shard atomically and uncompressed, so that its pictures can be mapped."""
    write_whole(path, lambda hidden: np.savez(hidden, allow_pickle=False, **arrays))


def read_shard(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a shard, apart from its pictures."""
    with np.load(path) as file:
        return {str(name): file[name] for name in file.files if name not in _PICTURES}


def pack(records: Sequence[EpisodeRecord]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a shard, or raise ConfigError if there are no records."""
    if not records:
        raise ConfigError(
            "a shard without episodes: no start pose was reachable; check the demonstrations' "
            "configuration."
        )
    starts = np.concatenate([[0], np.cumsum([len(record.gripper_opening) for record in records])])
    arrays: dict[str, NDArray[Any]] = {
        name: np.concatenate([getattr(r, name) for r in records]) for name in _PER_TICK
    }
    ticks = [
        record.label_ticks.astype(np.int64) + start
        for record, start in zip(records, starts, strict=False)
    ]
    labels = {
        name: np.concatenate([getattr(record, name) for record in records])
        for name in (*_PER_LABEL, "looks")
    }
    return {**arrays, "starts": starts, "label_ticks": np.concatenate(ticks), **labels}


@dataclass(frozen=True, eq=False)
class Demos:
    """All shards of a folder: the arrays of :class:`EpisodeRecord`; frames stay on disk until
    they are read.
    """

    T_base_cosmos: NDArray[np.float64]
    gripper_opening: NDArray[np.float64]
    gripper_command: NDArray[np.float64]
    goal: NDArray[np.int8]
    perturbed: NDArray[np.bool_]
    last: NDArray[np.int64]  # [T] the last tick of each tick's episode
    label_ticks: NDArray[np.int64]
    labels: NDArray[np.float32]
    continued: NDArray[np.float32]
    prefix_rows: NDArray[np.int8]
    looks_labels: NDArray[np.float32]
    looks_continued: NDArray[np.float32]
    _frames: tuple[NDArray[np.uint8], ...]
    _looks: tuple[NDArray[np.uint8], ...]
    _first: NDArray[np.int64]

    @classmethod
    def open(cls, folder: Path, shards: Sequence[int] | None = None) -> Demos:
        """Open shards of a folder by index, or all of them; raise ConfigError if one is missing
        or there are none.
        """
        paths = [
            shard_path(folder, i) for i in (shard_indices(folder) if shards is None else shards)
        ]
        if not paths or not all(path.exists() for path in paths):
            raise ConfigError(
                f"{folder} lacks demonstrations; record some with `strands-cosmos3 demos --out "
                f"{folder}`."
            )
        parts: list[dict[str, NDArray[Any]]] = []
        first = [0]
        for path in paths:
            part = read_shard(path)
            if "continued" not in part:  # recorded without action prefixes
                part |= {
                    "continued": part["labels"],
                    "prefix_rows": np.zeros(part["labels"].shape[:2], np.int8),
                }
            if "looks_labels" not in part:  # recorded before cubes had other places there
                part |= {"looks_labels": part["labels"], "looks_continued": part["continued"]}
            part["last"] = np.repeat(part["starts"][1:] - 1, np.diff(part["starts"])) + first[-1]
            part["label_ticks"], part["first"] = (
                part["label_ticks"] + first[-1],
                np.array(first[-1]),
            )
            first.append(first[-1] + len(part["goal"]))
            parts.append(part)
        names = (*_PER_TICK[1:], "last", "label_ticks", *_PER_LABEL)
        joined = {name: np.concatenate([part[name] for part in parts]) for name in names}
        frames = tuple(_mapped(path, "frames") for path in paths)
        looks = tuple(_looks_of(*of_shard) for of_shard in zip(paths, frames, parts, strict=True))
        return cls(**joined, _frames=frames, _looks=looks, _first=np.array(first))

    @property
    def canvas_hw(self) -> tuple[int, int]:
        """Height and width of the pictures."""
        height, width = self._frames[0].shape[1:3]
        return height, width

    def __len__(self) -> int:
        return len(self.goal)

    def frame(self, tick: int) -> NDArray[np.uint8]:
        """[H, W, 3] picture of a tick."""
        shard = int(np.searchsorted(self._first, tick, side="right")) - 1
        return self._frames[shard][tick - self._first[shard]]

    def frames(self, ticks: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint8]:
        """[n, H, W, 3] pictures of ticks."""
        return np.stack([self.frame(int(tick)) for tick in ticks])

    def look(self, label: int) -> NDArray[np.uint8]:
        """[H, W, 3] picture of a labelled tick, given by its index, with other looks."""
        first = np.cumsum([0, *(len(part) for part in self._looks)])
        shard = int(np.searchsorted(first, label, side="right")) - 1
        return self._looks[shard][label - first[shard]]

    def clips(self, rows: int) -> NDArray[np.int64]:
        """Return the ticks that ``rows`` further ticks of the same episode follow: the first
        ticks of whole clips.
        """
        ticks = np.arange(len(self))
        return ticks[ticks + rows <= self.last]

    def dynamics_clips(self, ticks: NDArray[np.int64]) -> list[ArmClip]:
        """Return clips by their first ticks, for the measuring of dynamics."""
        clips = []
        for tick in map(int, ticks):
            goal, frames = int(self.goal[tick]), slice(tick, tick + ROWS + 1)
            clips.append(
                ArmClip(
                    self.frames(range(tick, tick + ROWS + 1)),
                    self.T_base_cosmos[frames],
                    self.gripper_command[tick : tick + ROWS],
                    float(self.gripper_opening[tick]),
                    plain(goal),
                    plain((goal + 1) % len(GOALS)),
                )
            )
        return clips


def _looks_of(
    path: Path, frames: NDArray[np.uint8], part: Mapping[str, NDArray[Any]]
) -> NDArray[np.uint8]:
    """Return the pictures with other looks; of 0.1's shards, which have none, those of the
    labelled ticks.
    """
    with np.load(path) as file:
        if "looks" in file.files:
            return _mapped(path, "looks")
    return frames[part["label_ticks"] - part["first"]]


def _mapped(path: Path, name: str) -> NDArray[Any]:
    """Map an array of an uncompressed .npz."""
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(member)
        header = member.tell()
        info = archive.getinfo(f"{name}.npy")
    # the local header repeats the name and may carry an extra field of its own length
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        name_length, extra = np.frombuffer(file.read(4), "<u2")
    return np.memmap(
        path, dtype, "r", info.header_offset + 30 + int(name_length) + int(extra) + header, shape
    )
