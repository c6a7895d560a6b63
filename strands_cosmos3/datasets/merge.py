"""Merge datasets without re-encoding videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from strands_cosmos3.checks import typed, whole_number
from strands_cosmos3.datasets import files
from strands_cosmos3.datasets.files import Row, read_episode_stats, rows_to_table
from strands_cosmos3.datasets.reader import Dataset
from strands_cosmos3.datasets.spec import BOOKKEEPING
from strands_cosmos3.datasets.stats import Stats, merged_features, to_json
from strands_cosmos3.datasets.video import join_videos, video_layout
from strands_cosmos3.errors import (
    ConfigError,
    DatasetError,
    DatasetFormatError,
    DatasetMismatchError,
)
from strands_cosmos3.resources import write_folder, write_json, write_whole

_EPISODES_PER_FILE = 5000


@typed()
def merge_datasets(
    sources: Sequence[str | Path],
    root: str | Path,
    data_file_mb: int = files.DATA_FILE_MB,
    video_file_mb: int = files.VIDEO_FILE_MB,
    progress: Callable[[int, int], None] | None = None,
) -> Dataset:
    """Merge datasets into a new one and return it open. Its folder appears only when complete; the
    sources do not change.

    Args:
        sources: Datasets with the same spec.
        root: Folder of the new dataset; it must be empty or not exist.
        data_file_mb, video_file_mb: Maximum size of a data file and of a video file, in MiB.
        progress: Called with the number of episodes done and the total.

    Raises:
        ConfigError: ``sources`` is empty.
        DatasetMismatchError: The sources have different specs.
        DatasetError: The folder is not empty or cannot be written.
        DatasetFormatError: A source is damaged.
    """
    root = Path(root).expanduser()
    for name, value in (("data_file_mb", data_file_mb), ("video_file_mb", video_file_mb)):
        whole_number(value, name, 1)
    if not sources:
        raise ConfigError("there is nothing to merge; name at least one dataset.")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise DatasetError(f"{root} is not empty; merge into a new folder.")
    parts = [Dataset(source) for source in sources]
    for part in parts[1:]:
        if differences := parts[0].spec.differences(part.spec):
            raise DatasetMismatchError(
                f"{parts[0].root} and {part.root} differ: {'; '.join(differences)}."
            )
    try:
        with files.writing(root):
            merge = _Merge(parts, data_file_mb * 2**20, video_file_mb * 2**20)
            write_folder(root, lambda hidden: merge.run(hidden, progress))
    finally:
        for part in parts:
            part.close()
    return Dataset(root)


class _Merge:
    """Concatenates the sources' files, starting a new file at the size limit or when the video
    format changes.
    """

    root: Path

    def __init__(self, parts: Sequence[Dataset], data_bytes: int, video_bytes: int):
        self.parts, self.data_bytes, self.video_bytes = parts, data_bytes, video_bytes
        self.info = files.Info(parts[0].spec)
        self.tasks = list(dict.fromkeys(task for part in parts for task in part.tasks))

    def run(self, root: Path, progress: Callable[[int, int], None] | None) -> None:
        """Write the merged dataset into an empty folder."""
        self.root = root
        episodes = [(part, i) for part in self.parts for i in range(len(part))]
        data = self._data()
        videos = {key: self._videos(key) for key in self.info.spec.cameras}
        rows: list[Row] = []
        stats: list[dict[str, Stats]] = []
        start = 0
        for part in self.parts:
            stats += read_episode_stats(part.root, part._index, part.spec) if len(part) else []
        for n, (part, i) in enumerate(episodes):
            row = part._index.row(i)
            at = {key: videos[key][id(part), i] for key in videos}
            meta = divmod(n // _EPISODES_PER_FILE, files.CHUNK_SIZE)
            rows.append(
                replace(row, start=start, data=data[id(part), row.data], videos=at, meta=meta)
            )
            start += row.length
            if progress is not None:
                progress(n + 1, len(episodes))
        self._write_meta(rows, stats, start)

    def _data(self) -> dict[tuple[int, tuple[int, int]], tuple[int, int]]:
        """Copy the data rows; return the new (chunk, file) of each source file."""
        locations: dict[tuple[int, tuple[int, int]], tuple[int, int]] = {}
        tables: list[Any] = []
        number, first_episode, first_row = 0, 0, 0
        for part in self.parts:
            remap = np.array([self.tasks.index(task) for task in part.tasks], np.int64)
            for file in part._files:
                columns = {
                    key: part._file_column(file, key) for key in (*part.spec.columns, *BOOKKEEPING)
                }
                table = _renumbered(columns, part, first_episode, first_row, remap)
                if tables and sum(t.nbytes for t in tables) + table.nbytes > self.data_bytes:
                    self._flush(tables, number)
                    tables, number = [], number + 1
                tables.append(table)
                locations[id(part), file] = divmod(number, files.CHUNK_SIZE)
            first_episode, first_row = first_episode + len(part), first_row + part.n_frames
        self._flush(tables, number)
        return locations

    def _flush(self, tables: Sequence[Any], number: int) -> None:
        if tables:
            path = files.file_of(self.root, self.info.data_path, divmod(number, files.CHUNK_SIZE))
            files.write_table(path, pa.concat_tables(tables))

    def _videos(self, key: str) -> dict[tuple[int, int], tuple[int, int, int]]:
        """Copy a camera's videos; return the chunk, file and first frame of each episode."""
        locations: dict[tuple[int, int], tuple[int, int, int]] = {}
        group: list[tuple[Path, int]] = []
        size, frames, number, layout = 0, 0, 0, None
        for part in self.parts:
            videos, lengths = part._index.videos[key], part._index.length
            for path, episodes in _video_files(part, key):
                # end of the last episode, in frames
                n = max(int(videos[i, 2] + lengths[i]) for i in episodes)
                file_size, file_layout = path.stat().st_size, video_layout(path)
                if group and (size + file_size > self.video_bytes or file_layout != layout):
                    self._join(key, group, number)
                    group, size, frames, number = [], 0, 0, number + 1
                for i in episodes:
                    locations[id(part), i] = (
                        *divmod(number, files.CHUNK_SIZE),
                        frames + int(videos[i, 2]),
                    )
                group.append((path, n))
                size, frames, layout = size + file_size, frames + n, file_layout
        if group:
            self._join(key, group, number)
        return locations

    def _join(self, key: str, group: list[tuple[Path, int]], number: int) -> None:
        path = files.file_of(self.root, self.info.video_path, divmod(number, files.CHUNK_SIZE), key)
        write_whole(path, lambda hidden: join_videos(group, self.info.spec.fps, hidden))

    def _write_meta(self, rows: list[Row], stats: list[dict[str, Stats]], n_frames: int) -> None:
        for first in range(0, len(rows), _EPISODES_PER_FILE):
            batch = slice(first, first + _EPISODES_PER_FILE)
            table = rows_to_table(rows[batch], stats[batch], first, self.info.spec.fps)
            files.write_table(
                files.file_of(self.root, files.EPISODES_PATH, rows[first].meta), table
            )
        if rows:
            files.write_tasks(self.root, self.tasks)
        info = replace(
            self.info, total_episodes=len(rows), total_frames=n_frames, total_tasks=len(self.tasks)
        )
        write_json(self.root / files.INFO, info.to_json())
        with Dataset(self.root) as merged:
            write_json(
                self.root / files.STATS,
                to_json({**merged_features(stats), **(merged.exact_stats() if rows else {})}),
            )


def _renumbered(
    columns: dict[str, Any], part: Dataset, first_episode: int, first_row: int, remap: Any
) -> Any:
    tasks = columns["task_index"]
    if len(tasks) and not (tasks.min() >= 0 and tasks.max() < len(remap)):
        raise DatasetFormatError(f"{part.root}: a frame has a task index without an instruction.")
    changed = {
        "episode_index": columns["episode_index"] + first_episode,
        "index": columns["index"] + first_row,
        "task_index": remap[tasks],
    }
    return files.columns_to_table({**columns, **changed})


def _video_files(part: Dataset, key: str) -> list[tuple[Path, list[int]]]:
    """Return a camera's video files in order, each with its episode indices."""
    episodes: dict[tuple[int, int], list[int]] = {}
    for i, (chunk, file, _) in enumerate(part._index.videos[key].tolist()):
        episodes.setdefault((chunk, file), []).append(i)
    return [
        (files.file_of(part.root, part.info.video_path, number, key), indices)
        for number, indices in episodes.items()
    ]
