"""Merge datasets without re-encoding videos."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from strands_cosmos3.checks import typed, whole_number
from strands_cosmos3.datasets import files
from strands_cosmos3.datasets.files import IndexRow, read_episode_stats
from strands_cosmos3.datasets.reader import Dataset, write_stats
from strands_cosmos3.datasets.spec import BOOKKEEPING
from strands_cosmos3.datasets.stats import merged_features
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
        progress: Called after each source with the number of episodes done and the total.

    Raises:
        ConfigError: ``sources`` is empty.
        DatasetMismatchError: The sources have different specs.
        DatasetError: The folder is not empty or cannot be written.
        DatasetFormatError: A source is damaged.
    """
    root = Path(root).expanduser()
    whole_number(data_file_mb, "data_file_mb", 1)
    whole_number(video_file_mb, "video_file_mb", 1)
    if not sources:
        raise ConfigError("there is nothing to merge; name at least one dataset.")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise DatasetError(f"{root} is not empty; merge into a new folder.")
    with ExitStack() as stack:
        parts = [stack.enter_context(Dataset(source)) for source in sources]
        for part in parts:
            if part.info.foreign:
                raise DatasetMismatchError(
                    f"{part.root} has features that are not read and would be lost: "
                    f"{', '.join(part.info.foreign)}; merge it with LeRobot."
                )
            part.require_films(part.spec.cameras)
            if differences := parts[0].spec.differences(part.spec):
                raise DatasetMismatchError(
                    f"{parts[0].root} and {part.root} differ: {'; '.join(differences)}."
                )
        merge = _Merge(parts, data_file_mb * 2**20, video_file_mb * 2**20)
        with files.writing(root):
            write_folder(root, lambda unfinished: merge.run(unfinished, progress))
    return Dataset(root)


@dataclass(frozen=True)
class _Piece:
    """The contents of one file of a source.

    Args:
        content: A table of data rows, or the path of a video.
        episodes: Indices in the merged dataset of the episodes in it.
        layout: Of a video; only those with the same can be joined.
    """

    content: Any
    n_bytes: int
    episodes: NDArray[np.int64]
    n_frames: int = 0
    layout: tuple[Any, ...] = ()


def _grouped(pieces: Iterable[_Piece], most_bytes: int) -> Iterator[list[_Piece]]:
    """Yield the pieces of each new file: as many as its size and their layouts allow."""
    group: list[_Piece] = []
    n_bytes = 0
    for piece in pieces:
        if group and (n_bytes + piece.n_bytes > most_bytes or piece.layout != group[0].layout):
            yield group
            group = []
            n_bytes = 0
        group.append(piece)
        n_bytes += piece.n_bytes
    if group:
        yield group


class _Merge:
    """Concatenates the sources' files."""

    root: Path

    def __init__(self, parts: Sequence[Dataset], data_bytes: int, video_bytes: int):
        self.parts = parts
        self.data_bytes = data_bytes
        self.video_bytes = video_bytes
        self.info = files.Info(parts[0].spec)
        self.tasks = list(dict.fromkeys(task for part in parts for task in part.tasks))

    def run(self, root: Path, progress: Callable[[int, int], None] | None) -> None:
        """Write the merged dataset into an empty folder."""
        self.root = root
        fps = self.info.spec.fps
        data = self._copy("", self.data_bytes)
        videos = {key: self._copy(key, self.video_bytes) for key in self.info.spec.cameras}
        rows: list[IndexRow] = []
        for part in self.parts:
            index = part._index
            for i, stats in enumerate(read_episode_stats(part.root, index, part.spec)):
                filmed = {key: places[len(rows)] for key, places in videos.items()}
                about = index.tasks(i), index.note(i), stats, int(index.length[i])
                rows.append(IndexRow(*about, data[len(rows)], filmed))
            if progress is not None:
                progress(len(rows), len(data))
        frame = 0
        for first in range(0, len(rows), _EPISODES_PER_FILE):
            number = divmod(first // _EPISODES_PER_FILE, files.CHUNK_SIZE)
            batch = rows[first : first + _EPISODES_PER_FILE]
            table = files.index_table(batch, first, frame, number, fps)
            files.write_table(files.file_of(root, files.EPISODES_PATH, number), table)
            frame += sum(row.length for row in batch)
        if rows:
            files.write_tasks(root, self.tasks)
        info = replace(
            self.info,
            total_episodes=len(rows),
            total_frames=frame,
            total_tasks=len(self.tasks),
        )
        write_json(root / files.INFO, info.to_json())
        write_stats(root, merged_features([row.stats for row in rows]))

    def _copy(self, key: str, most_bytes: int) -> NDArray[np.int64]:
        """Copy the data rows, or a camera's videos; return the new chunk and file of each episode,
        and of a video its first frame there: [episodes, 2] or [episodes, 3].
        """
        pieces = self._recordings(key) if key else self._tables()
        template = self.info.video_path if key else self.info.data_path
        indexes = [part._index for part in self.parts]
        places = np.concatenate([index.videos[key] if key else index.data for index in indexes])
        for number, group in enumerate(_grouped(pieces, most_bytes)):
            place = divmod(number, files.CHUNK_SIZE)
            first_frame = 0
            path = files.file_of(self.root, template, place, key)
            contents = [piece.content for piece in group]
            if key:
                videos = zip(contents, (piece.n_frames for piece in group), strict=True)
                spec = self.info.spec
                shape = spec.cameras[key].shape
                write_whole(path, partial(join_videos, videos, spec.fps, shape=shape))
            else:
                files.write_table(path, pa.concat_tables(contents))
            for piece in group:
                places[piece.episodes, :2] = place
                places[piece.episodes, 2:] += first_frame
                first_frame += piece.n_frames
        return places

    def _tables(self) -> Iterator[_Piece]:
        first_episode = 0
        first_row = 0
        for part in self.parts:
            remap = np.array([self.tasks.index(task) for task in part.tasks], np.int64)
            for file in part._files:
                columns = {
                    key: part._file_column(file, key) for key in (*part.spec.columns, *BOOKKEEPING)
                }
                tasks = columns["task_index"]
                if len(tasks) and not (tasks.min() >= 0 and tasks.max() < len(remap)):
                    raise DatasetFormatError(
                        f"{part.root}: a frame has a task index without an instruction."
                    )
                columns["episode_index"] = columns["episode_index"] + first_episode
                columns["index"] = columns["index"] + first_row
                columns["task_index"] = remap[tasks]
                table = files.columns_to_table(columns)
                episodes = first_episode + np.flatnonzero((part._index.data == file).all(axis=1))
                yield _Piece(table, table.nbytes, episodes)
            first_episode += len(part)
            first_row += part.n_frames

    def _recordings(self, key: str) -> Iterator[_Piece]:
        first_episode = 0
        for part in self.parts:
            videos = part._index.videos[key]
            for number in dict.fromkeys(map(tuple, videos[:, :2].tolist())):
                mine = np.flatnonzero((videos[:, :2] == number).all(axis=1))
                path = files.file_of(part.root, part.info.video_path, number, key)
                n_frames = part._index.film_end(key, number)
                layout = video_layout(path, part.spec.cameras[key].shape)
                n_bytes = path.stat().st_size
                yield _Piece(path, n_bytes, first_episode + mine, n_frames, layout)
            first_episode += len(part)
