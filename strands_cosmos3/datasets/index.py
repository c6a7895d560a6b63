"""The episode index, ``meta/episodes``: the data rows and video frames of each episode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from strands_cosmos3.datasets.files import NOTE, Info, Ints, read_table
from strands_cosmos3.datasets.spec import BOOKKEEPING, DatasetSpec
from strands_cosmos3.datasets.stats import Stats
from strands_cosmos3.errors import DatasetFormatError

_META = ("meta/episodes/chunk_index", "meta/episodes/file_index")


@dataclass(frozen=True)
class Row:
    """Index entry of one episode."""

    tasks: tuple[str, ...]
    length: int  # number of frames
    start: int  # index of the first frame in the dataset
    data: tuple[int, int]  # chunk and file of the data rows
    # camera key -> chunk, file, index of the first frame in that file
    videos: Mapping[str, tuple[int, int, int]]
    note: Mapping[str, Any]
    meta: tuple[int, int]  # chunk and file of this entry


def rows_to_table(
    rows: Sequence[Row], stats: Sequence[Mapping[str, Stats]], first: int, fps: int
) -> Any:
    """Return the parquet table of consecutive entries that start at episode ``first``."""

    def ints(values: Iterable[int]) -> Any:
        return pa.array(list(values), pa.int64())

    columns: dict[str, Any] = {
        "episode_index": ints(range(first, first + len(rows))),
        "tasks": pa.array([list(row.tasks) for row in rows], pa.list_(pa.string())),
        "length": ints(row.length for row in rows),
        "data/chunk_index": ints(row.data[0] for row in rows),
        "data/file_index": ints(row.data[1] for row in rows),
        "dataset_from_index": ints(row.start for row in rows),
        "dataset_to_index": ints(row.start + row.length for row in rows),
    }
    for key in rows[0].videos:
        columns[f"videos/{key}/chunk_index"] = ints(row.videos[key][0] for row in rows)
        columns[f"videos/{key}/file_index"] = ints(row.videos[key][1] for row in rows)
        first_frames = np.array([row.videos[key][2] for row in rows])
        columns[f"videos/{key}/from_timestamp"] = pa.array(first_frames / fps)
        columns[f"videos/{key}/to_timestamp"] = pa.array(
            (first_frames + [row.length for row in rows]) / fps
        )
    for key in stats[0]:
        for name in stats[0][key]:
            columns[f"stats/{key}/{name}"] = pa.array(
                [figures[key][name].tolist() for figures in stats]
            )
    columns[_META[0]] = ints(row.meta[0] for row in rows)
    columns[_META[1]] = ints(row.meta[1] for row in rows)
    columns[NOTE] = pa.array(
        [json.dumps(dict(row.note)) if row.note else None for row in rows], pa.string()
    )
    return pa.table(columns)


def episode_files(root: Path) -> list[Path]:
    """Return the files of the index in order."""
    return sorted((root / "meta/episodes").glob("chunk-*/file-*.parquet"))


class EpisodeIndex:
    """The entries that ``meta/info.json`` counts, as arrays.

    Raises:
        DatasetFormatError: Entries are missing, out of order, overlap, or do not add up to the
            totals.
    """

    def __init__(self, root: Path, info: Info):
        self.root = root
        names = [
            "episode_index",
            "length",
            "data/chunk_index",
            "data/file_index",
            "dataset_from_index",
            "dataset_to_index",
        ]
        for key in info.spec.cameras:
            names += [
                f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")
            ]
        n = info.total_episodes
        tables = (
            [read_table(path, names, ("tasks", NOTE, *_META)) for path in episode_files(root)]
            if n
            else []
        )
        if sum(table.num_rows for table in tables) < n:
            raise DatasetFormatError(
                f"{root}/meta/episodes lists fewer episodes than the {n} of meta/info.json."
            )
        table = (
            pa.concat_tables(tables, promote_options="permissive").slice(0, n).combine_chunks()
            if tables
            else None
        )
        self._table = table
        ints = {name: self._numbers(name) for name in names}
        self.length, self.start = ints["length"], ints["dataset_from_index"]
        self.data = np.stack([ints["data/chunk_index"], ints["data/file_index"]], axis=1)
        self.videos: dict[str, Ints] = {}
        for key in info.spec.cameras:
            first = np.round(ints[f"videos/{key}/from_timestamp"] * info.spec.fps).astype(np.int64)
            self.videos[key] = np.stack(
                [ints[f"videos/{key}/chunk_index"], ints[f"videos/{key}/file_index"], first], axis=1
            )
        self._check(ints, info)

    def _numbers(self, name: str) -> Any:
        dtype = np.float64 if name.endswith("timestamp") else np.int64
        if self._table is None:
            return np.zeros(0, dtype)
        column = self._table.column(name)
        if column.null_count:
            raise DatasetFormatError(f"{self.root}/meta/episodes: {name} has empty entries.")
        values = column.to_numpy()
        if (
            values.dtype.kind not in "iuf"
            or not np.isfinite(values).all()
            or (values < 0).any()
            or (values > 2**53).any()
        ):
            raise DatasetFormatError(
                f"{self.root}/meta/episodes: {name} must hold finite numbers of at least zero."
            )
        return values.astype(dtype)

    def _check(self, ints: Mapping[str, Any], info: Info) -> None:
        n = info.total_episodes
        ends = np.cumsum(self.length)
        if not np.array_equal(ints["episode_index"], np.arange(n)):
            raise DatasetFormatError(
                f"{self.root}/meta/episodes does not number its {n} episodes 0, 1, 2, ..."
            )
        ordered = np.array_equal(ints["dataset_to_index"], ends) and np.array_equal(
            self.start, ends - self.length
        )
        if (self.length < 1).any() or not ordered:
            raise DatasetFormatError(
                f"{self.root}/meta/episodes: the episodes' frames do not follow one another from 0."
            )
        if int(ends[-1] if n else 0) != info.total_frames:
            raise DatasetFormatError(
                f"{self.root}: the episodes have {ends[-1]} frames, meta/info.json "
                f"{info.total_frames}."
            )

    def __len__(self) -> int:
        return len(self.length)

    def row(self, i: int) -> Row:
        """Return the entry of one episode."""
        meta = [self._optional(name, i) for name in _META]
        tasks = self._optional("tasks", i)
        return Row(
            tuple(tasks) if isinstance(tasks, list) else (),
            int(self.length[i]),
            int(self.start[i]),
            (int(self.data[i, 0]), int(self.data[i, 1])),
            {key: (int(at[i, 0]), int(at[i, 1]), int(at[i, 2])) for key, at in self.videos.items()},
            self._note(i),
            (int(meta[0] or 0), int(meta[1] or 0)),
        )

    def _optional(self, name: str, i: int) -> Any:
        return (
            self._table.column(name)[i].as_py()
            if self._table is not None and name in self._table.column_names
            else None
        )

    def _note(self, i: int) -> Mapping[str, Any]:
        text = self._optional(NOTE, i)
        if text is None:
            return {}
        try:
            note = json.loads(text)
        except (TypeError, ValueError):
            raise DatasetFormatError(
                f"{self.root}/meta/episodes: the note of episode {i} is not JSON."
            ) from None
        return note if isinstance(note, dict) else {}

    def next_file(self, chunk_size: int) -> int:
        """Return the number of the first unused file, the same for data, videos and index."""
        used = [self.data, *self.videos.values()]
        if self._table is not None and set(_META) <= set(self._table.column_names):
            used.append(np.stack([self._numbers(name) for name in _META], axis=1))
        return (
            max(
                [int((at[:, 0] * chunk_size + at[:, 1]).max()) for at in used if len(at)],
                default=-1,
            )
            + 1
        )


def read_episode_stats(
    root: Path, index: EpisodeIndex, spec: DatasetSpec
) -> list[dict[str, Stats]]:
    """Return the statistics of each episode. Raises DatasetFormatError if an episode lacks them."""
    keys = {*spec.columns, *BOOKKEEPING, *spec.cameras}
    found: list[dict[str, Stats]] = []
    for path in episode_files(root):
        table = read_table(path)
        names = [name.split("/", 2) for name in table.column_names if name.startswith("stats/")]
        columns = {
            (key, name): table.column(f"stats/{key}/{name}").to_pylist()
            for _, key, name in names
            if key in keys
        }
        if {key for key, _ in columns} != keys:
            raise DatasetFormatError(f"{path} lacks the episodes' statistics of some features.")
        for i in range(table.num_rows):
            figures: dict[str, Stats] = {key: {} for key in keys}
            for (key, name), values in columns.items():
                figures[key][name] = np.asarray(values[i])
            found.append(figures)
    return found[: len(index)]
