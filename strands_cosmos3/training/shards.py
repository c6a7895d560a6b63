"""Demonstrations on disk as the trainer reads them: some episodes a file, written whole or not at all.

A shard holds the arrays of :class:`~strands_cosmos3.training.demos.EpisodeRecord`, episode after episode, with ``starts``
saying where each begins. What is there is not recorded again, so that a killed collection goes on where it was.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_whole
from strands_cosmos3.training.demos import DemoCollector, DemoConfig, EpisodeRecord

EPISODES_A_SHARD = 20
_PER_TICK = ("frames", "T_base_cosmos", "opening", "told", "goal", "bent")


def shard_path(folder: Path, index: int) -> Path:
    """Where a shard lies."""
    return folder / f"shard-{index:05d}.npz"


def collect(
    folder: Path,
    seed: int,
    shards: Sequence[int],
    config: DemoConfig | None = None,
    on_shard: Callable[[int, int], None] | None = None,
) -> None:
    """Record shards that are not there yet.

    Args:
        folder: Where; made if need be.
        seed: Of the collection.
        shards: Their numbers.
        config: What demonstrations look like.
        on_shard: Called after each with its number and its ticks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [index for index in shards if not shard_path(folder, index).exists()]
    if not wanted:
        return
    with DemoCollector(config) as studio:
        for index in wanted:
            first = index * EPISODES_A_SHARD
            drawn = (studio.record(seed, episode) for episode in range(first, first + EPISODES_A_SHARD))
            arrays = pack([record for record in drawn if record is not None])
            write_shard(shard_path(folder, index), arrays)
            if on_shard is not None:
                on_shard(index, len(arrays["opening"]))


def write_shard(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a shard whole or not at all, uncompressed, so that its pictures can be mapped."""
    write_whole(path, lambda hidden: np.savez(hidden, allow_pickle=False, **arrays))


def pack(records: Sequence[EpisodeRecord]) -> dict[str, NDArray[Any]]:
    """The arrays of a shard."""
    if not records:
        raise ConfigError("a shard without a single episode: no start could be taken; check the demonstrations' configuration.")
    lengths = [len(record.opening) for record in records]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    arrays: dict[str, NDArray[Any]] = {name: np.concatenate([getattr(r, name) for r in records]) for name in _PER_TICK}
    ticks = [record.label_ticks.astype(np.int64) + start for record, start in zip(records, starts, strict=False)]
    return {
        **arrays,
        "starts": starts,
        "label_ticks": np.concatenate(ticks),
        "labels": np.concatenate([record.labels for record in records]),
    }


@dataclass(frozen=True, eq=False)
class Demos:
    """Every shard of a folder, tick after tick; frames stay on disk until they are asked for.

    Attributes:
        T_base_cosmos: [n, 4, 4]. opening, told, goal, bent: [n].
        last: [n] the last tick of each tick's episode.
        label_ticks: [L] ticks with labels. labels: [L, goals, rows, 10].
    """

    T_base_cosmos: NDArray[np.float64]
    opening: NDArray[np.float64]
    told: NDArray[np.float64]
    goal: NDArray[np.int8]
    bent: NDArray[np.bool_]
    last: NDArray[np.int64]
    label_ticks: NDArray[np.int64]
    labels: NDArray[np.float32]
    _frames: tuple[NDArray[np.uint8], ...]
    _first: NDArray[np.int64]

    @classmethod
    def open(cls, folder: Path, shards: Sequence[int] | None = None) -> Demos:
        """Open a collection.

        Args:
            folder: Where :func:`collect` wrote.
            shards: Which of them; None is all that are there.

        Raises:
            ConfigError: There is none.
        """
        paths = sorted(folder.glob("shard-*.npz")) if shards is None else [shard_path(folder, i) for i in shards]
        if not paths or not all(path.exists() for path in paths):
            raise ConfigError(f"{folder} lacks demonstrations; record some with `strands-cosmos3 demos --out {folder}`.")
        parts: list[dict[str, NDArray[Any]]] = []
        first = [0]
        for path in paths:
            with np.load(path) as file:
                part = {name: file[name] for name in file.files if name != "frames"}
            lengths = np.diff(part["starts"])
            part["last"] = np.repeat(part["starts"][1:] - 1, lengths) + first[-1]
            part["label_ticks"] = part["label_ticks"] + first[-1]
            first.append(first[-1] + len(part["opening"]))
            parts.append(part)
        names = ("T_base_cosmos", "opening", "told", "goal", "bent", "last", "label_ticks", "labels")
        joined = {name: np.concatenate([part[name] for part in parts]) for name in names}
        return cls(**joined, _frames=tuple(_mapped(path, "frames") for path in paths), _first=np.array(first))

    def __len__(self) -> int:
        return len(self.opening)

    def frame(self, tick: int) -> NDArray[np.uint8]:
        """[H, W, 3] the picture of a tick."""
        shard = int(np.searchsorted(self._first, tick, side="right")) - 1
        return self._frames[shard][tick - self._first[shard]]

    def frames(self, ticks: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint8]:
        """[n, H, W, 3] the pictures of some ticks."""
        return np.stack([self.frame(int(tick)) for tick in ticks])

    def clips(self, rows: int) -> NDArray[np.int64]:
        """Ticks after which ``rows`` further ticks follow in the same episode: whole clips begin there."""
        ticks = np.arange(len(self))
        return ticks[ticks + rows <= self.last]


def _mapped(path: Path, name: str) -> NDArray[Any]:
    """An array of an uncompressed .npz, mapped and not read."""
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
        header = member.tell()
        info = archive.getinfo(f"{name}.npy")
    with path.open("rb") as file:  # the local header repeats the name and may carry an extra field of its own length
        file.seek(info.header_offset + 26)
        name_length, extra = np.frombuffer(file.read(4), "<u2")
    return np.memmap(path, dtype, "r", info.header_offset + 30 + int(name_length) + int(extra) + header, shape)
