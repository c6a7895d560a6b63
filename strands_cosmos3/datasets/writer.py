"""Write LeRobot v3 datasets: episodes frame by frame or as a whole, in atomic commits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import image_array, typed, whole_number
from strands_cosmos3.datasets import files
from strands_cosmos3.datasets.files import EpisodeIndex, IndexRow, read_episode_stats
from strands_cosmos3.datasets.reader import write_stats
from strands_cosmos3.datasets.spec import DatasetSpec, Feature
from strands_cosmos3.datasets.stats import Stats, column_stats, merged_features, to_json
from strands_cosmos3.datasets.video import CameraWriter, VideoConfig, join_videos
from strands_cosmos3.errors import (
    ConfigError,
    DatasetBusyError,
    DatasetError,
    DatasetMismatchError,
    InputError,
    NonFiniteError,
    ShapeError,
)
from strands_cosmos3.resources import (
    UNFINISHED,
    Closeable,
    locked,
    write_json,
    write_whole,
)

Columns = Mapping[str, NDArray[Any]]
Cameras = Mapping[str, CameraWriter]
Note = Mapping[str, Any]


@dataclass(frozen=True)
class FinishedEpisode:
    """An episode that is not committed yet."""

    columns: Columns
    videos: Mapping[str, bytes]
    stats: Mapping[str, Stats]
    length: int
    task: str
    note: Note


class EpisodeWriter:
    """Records one episode frame by frame. As a context manager, saves it, or discards it on an
    exception.

    Created by :meth:`~strands_cosmos3.datasets.writer.DatasetWriter.episode`.

    To save the episode, it calls ``keep`` with columns, cameras, length and note, and returns its
    result, the episode's index.

    Attributes:
        is_open: Whether the episode is neither saved nor discarded.
        length: Number of frames so far.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        video: VideoConfig,
        keep: Callable[[Columns, Cameras, int, Note], int],
    ):
        self._spec = spec
        self._keep = keep
        self._columns: dict[str, list[NDArray[Any]]] = {key: [] for key in spec.columns}
        self._cameras = {
            key: CameraWriter(feature, spec.fps, video) for key, feature in spec.cameras.items()
        }
        self.is_open = True
        self.length = 0

    @typed()
    def add(self, frame: Mapping[str, Any]) -> None:
        """Append a frame: the value of every feature, [n] numbers (a scalar if n is 1) or [H, W, 3]
        uint8 pictures.

        Raises:
            InputError, ShapeError, NonFiniteError: A feature is missing, unknown, misshapen or not
                finite; nothing was added.
            ConfigError: The episode has ended.
        """
        self._require_open()
        values = {key: [value] for key, value in frame.items()}
        numbers, pictures = _checked(values, self._spec, 1)
        for key, value in numbers.items():
            self._columns[key].append(value)
        for key, (picture,) in pictures.items():
            self._cameras[key].add(picture)
        self.length += 1

    def replace_last(self, key: str, value: Any) -> None:
        """Replace a numeric value of the last frame, e.g. ``next.done``. Raises InputError if it
        cannot.
        """
        columns = self._spec.columns
        if key not in columns or not self.length:
            raise InputError(
                f"{key!r} is not numeric, or there is no frame yet; numeric "
                f"features: {', '.join(columns)}."
            )
        self._columns[key][-1] = _checked_column([value], key, columns[key], 1)

    def save(self, note: Note | None = None) -> int:
        """Save the episode and return its index. Raises InputError if it has no frame,
        DatasetError if it cannot be written.
        """
        self._require_open()
        if not self.length:
            raise InputError("an episode needs at least one frame; discard it instead.")
        columns = {key: np.concatenate(values) for key, values in self._columns.items()}
        note = _checked_note(note)
        self.is_open = False
        return self._keep(columns, self._cameras, self.length, note)

    def discard(self) -> None:
        """Discard the episode. No-op if it has ended."""
        if self.is_open:
            self.is_open = False
            for camera in self._cameras.values():
                camera.discard()

    def _require_open(self) -> None:
        if not self.is_open:
            raise ConfigError("this episode was saved or discarded; start another one.")

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.is_open and error is None:
            self.save()
        self.discard()


def _checked_task(task: Any) -> str:
    if not isinstance(task, str) or not task.strip():
        raise InputError(f"an episode needs an instruction, a non-empty text; got {task!r}.")
    return task


def _checked_note(note: Note | None) -> Note:
    note = {} if note is None else dict(note)
    try:
        json.dumps(note, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"an episode's note must be serializable as JSON: {error}.") from None
    return note


def _checked(
    values: Mapping[str, Any], spec: DatasetSpec, n: int
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.uint8]]]:
    """Return the columns and the pictures of n frames. Raises InputError unless these are exactly
    the spec's; errors of columns as :func:`_checked_column`, of pictures as :func:`image_array`.
    """
    missing = sorted(spec.features.keys() - values)
    unknown = sorted(values.keys() - spec.features)
    parts = [f"lacks {', '.join(missing)}"] * bool(missing)
    parts += [f"has also {', '.join(unknown)}"] * bool(unknown)
    if parts:
        raise InputError(
            f"the episode {' and '.join(parts)}; its features are {', '.join(spec.features)}."
        )
    columns = {
        key: _checked_column(values[key], key, feature, n) for key, feature in spec.columns.items()
    }
    pictures = {
        key: image_array(values[key], key, (n, *feature.shape))
        for key, feature in spec.cameras.items()
    }
    return columns, pictures


def _checked_column(value: Any, key: str, feature: Feature, n: int) -> NDArray[Any]:
    """Return a column as [n, width] ([n] if the width is 1) in the feature's dtype.

    Raises:
        InputError, ShapeError, NonFiniteError: It has another kind or shape, is empty, or is not
            finite in that dtype.
    """
    array = np.asarray(value)
    width = feature.shape[0]
    kinds = {"f": "fiu", "i": "iu", "b": "b"}[np.dtype(feature.dtype).kind]
    if array.dtype.kind not in kinds:
        raise InputError(f"{key} must hold {feature.dtype} numbers, got {array.dtype}.")
    if array.shape != (n, width) and not (width == 1 and array.shape == (n,)):
        raise ShapeError(f"{key} must have shape [{n}, {width}], got {list(array.shape)}.")
    if n == 0:
        raise ShapeError("an episode needs at least one frame.")
    with np.errstate(over="ignore"):  # an overflow becomes infinite and is refused below
        column = array.astype(feature.dtype)
    if not np.isfinite(column).all():
        place = np.argwhere(~np.isfinite(column))[0].tolist()
        raise NonFiniteError(
            f"{key}{place} is {array[tuple(place)]}; every value of a dataset must be finite."
        )
    return column.reshape(n) if width == 1 else column


class DatasetWriter(Closeable):
    """Adds episodes to a new or an existing dataset.

    Episodes become visible in commits of ``commit_every``. A commit writes one data file, one video
    for each camera and one index file, and replaces ``meta/info.json`` last: readers see all of a
    commit or nothing of it. If the process dies, the dataset is that of the last commit;
    uncommitted files are removed when the dataset is next opened for writing. Commit every episode
    when recording a few long ones, and hundreds at once when generating many short ones. Parallel
    producers write a dataset each, for :func:`~strands_cosmos3.datasets.merge_datasets`.

    As a context manager, it commits the finished episodes on exit, even after an exception.

    Args:
        root: The dataset's folder.
        spec: Features and frame rate.
        commit_every: Number of episodes in a commit.
        video: Encoding options.

    Raises:
        DatasetMismatchError: The folder holds a dataset with another spec.
        DatasetBusyError: Another process is writing to it.
        DatasetFormatError: The existing dataset is damaged.
        DatasetError: The folder holds something else, or cannot be written to.
    """

    @typed()
    def __init__(
        self,
        root: str | Path,
        spec: DatasetSpec,
        commit_every: int = 1,
        video: VideoConfig | None = None,
    ):
        self.root = Path(root).expanduser()
        self.commit_every = whole_number(commit_every, "commit_every", 1)
        whole_number(spec.fps, "fps of a dataset", 1)
        self.video = VideoConfig() if video is None else video
        self._pending: list[FinishedEpisode] = []
        self._recording: EpisodeWriter | None = None
        self._changed = False
        with ExitStack() as stack:
            stack.enter_context(_locked(self.root))
            self._info = self._open(spec)
            self._lock: ExitStack | None = stack.pop_all()

    def _open(self, spec: DatasetSpec) -> files.Info:
        if not (self.root / files.INFO).exists():
            with files.writing(self.root):
                empty = files.Info(_described(spec, self.video))
                write_json(self.root / files.INFO, empty.to_json())
        info = files.read_info(self.root)
        if differences := info.spec.differences(spec) + list(info.foreign):
            raise DatasetMismatchError(
                f"{self.root} has another kind of episodes: {'; '.join(differences)}. Choose "
                "another folder."
            )
        if (info.data_path, info.video_path) != (files.DATA_PATH, files.VIDEO_PATH):
            raise DatasetMismatchError(
                f"{self.root} has other file paths ({info.data_path}); merge it into a new dataset."
            )
        index = EpisodeIndex(self.root, info)
        self._tasks = list(files.read_tasks(self.root, info))
        self._next_file = index.next_file(info.chunk_size)
        self._stats = merged_features(read_episode_stats(self.root, index, info.spec))
        self._remove_leftovers(info)
        return info

    def _remove_leftovers(self, info: files.Info) -> None:
        """Delete the files of a commit that a killed writer did not complete."""
        for path in self.root.rglob(UNFINISHED):
            path.unlink()
        for pattern in ("data", "meta/episodes", "videos/*"):
            for path in self.root.glob(f"{pattern}/chunk-*/*"):
                number = re.fullmatch(r"chunk-(\d+)/file-(\d+)", f"{path.parent.name}/{path.stem}")
                if number is None:
                    continue
                if int(number[1]) * info.chunk_size + int(number[2]) >= self._next_file:
                    files.inside(self.root, path).unlink()

    @property
    def spec(self) -> DatasetSpec:
        """Features and frame rate."""
        return self._info.spec

    @property
    def n_episodes(self) -> int:
        """Number of episodes so far, including uncommitted ones."""
        return self._info.total_episodes + len(self._pending)

    @typed("task")
    def episode(self, task: str) -> EpisodeWriter:
        """Begin an episode that is recorded frame by frame; one at a time. ``task`` is its
        instruction.

        Raises:
            ConfigError: The writer is closed, or another episode is being recorded.
            InputError: The instruction is not text, or empty.
        """
        self._require_open()
        if self._recording is not None and self._recording.is_open:
            raise ConfigError("an episode is being recorded; save or discard it first.")
        self._recording = EpisodeWriter(
            self.spec, self.video, partial(self._finish, _checked_task(task))
        )
        return self._recording

    @typed("task")
    def add_episode(
        self,
        columns: Mapping[str, Any],
        videos: Mapping[str, Any] | None = None,
        task: str = "",
        note: Note | None = None,
    ) -> int:
        """Add a whole episode and return its index.

        Args:
            columns: Every numeric feature, [N, n] ([N] if n is 1).
            videos: Frames of every camera, [N, H, W, 3] uint8, by feature key.
            task: Its instruction.
            note: Data to store with it, serializable as JSON, e.g. seed and outcome.

        Raises:
            InputError, ShapeError, NonFiniteError: A feature is missing, unknown, misshapen or not
                finite; nothing was added.
            DatasetError: It cannot be written.
        """
        self._require_open()
        task = _checked_task(task)
        note = _checked_note(note)
        values = {**columns, **(videos or {})}
        n = len(np.atleast_1d(np.asarray(next(iter(values.values()), ()))))
        checked, pictures = _checked(values, self.spec, n)
        cameras = {
            key: CameraWriter(feature, self.spec.fps, self.video, n)
            for key, feature in self.spec.cameras.items()
        }
        for key, camera in cameras.items():
            for frame in pictures[key]:
                camera.add(frame)
        return self._finish(task, checked, cameras, n, note)

    def _finish(self, task: str, columns: Columns, cameras: Cameras, n: int, note: Note) -> int:
        index = self.n_episodes
        start = self._info.total_frames + sum(episode.length for episode in self._pending)
        if task not in self._tasks:
            self._tasks.append(task)
        full = {
            **columns,
            "timestamp": (np.arange(n) / self.spec.fps).astype(np.float32),
            "frame_index": np.arange(n),
            "episode_index": np.full(n, index),
            "index": np.arange(start, start + n),
            "task_index": np.full(n, self._tasks.index(task)),
        }
        stats = {key: column_stats(values) for key, values in full.items()}
        videos: dict[str, bytes] = {}
        for key, camera in cameras.items():
            videos[key], stats[key] = camera.finish()
        self._pending.append(FinishedEpisode(full, videos, stats, n, task, note))
        if len(self._pending) >= self.commit_every:
            self.commit()
        return index

    def commit(self) -> None:
        """Make the finished episodes visible. On a DatasetError, the dataset is unchanged and
        the next commit includes them.
        """
        self._require_open()
        if not self._pending:
            return
        info = self._info
        episodes = self._pending
        stats = merged_features(
            [*([self._stats] if self._stats else []), *(episode.stats for episode in episodes)]
        )
        counted = replace(
            info,
            total_episodes=info.total_episodes + len(episodes),
            total_frames=info.total_frames + sum(episode.length for episode in episodes),
            total_tasks=len(self._tasks),
        )
        with files.writing(self.root):
            self._write_files(episodes, divmod(self._next_file, info.chunk_size))
            files.write_tasks(self.root, self._tasks)
            write_json(self.root / files.STATS, to_json(stats))
            write_json(self.root / files.INFO, counted.to_json())
        self._info = counted
        self._stats = stats
        self._pending = []
        self._changed = True
        self._next_file += 1

    def _write_files(self, episodes: Sequence[FinishedEpisode], number: tuple[int, int]) -> None:
        """Write the videos, the data file and the index file of a commit."""
        info = self._info
        for key, camera in self.spec.cameras.items():
            parts = [(episode.videos[key], episode.length) for episode in episodes]
            path = files.file_of(self.root, info.video_path, number, key)
            write_whole(path, partial(join_videos, parts, self.spec.fps, shape=camera.shape))
        table = files.columns_to_table(
            {key: np.concatenate([e.columns[key] for e in episodes]) for key in episodes[0].columns}
        )
        files.write_table(
            files.file_of(self.root, info.data_path, number),
            table,
            max(1024, len(table) // len(episodes)),
        )
        rows: list[IndexRow] = []
        first_frame = 0
        for e in episodes:
            videos = dict.fromkeys(self.spec.cameras, (*number, first_frame))
            rows.append(IndexRow((e.task,), e.note, e.stats, e.length, number, videos))
            first_frame += e.length
        starts = info.total_episodes, info.total_frames
        index = files.index_table(rows, *starts, number, self.spec.fps)
        files.write_table(files.file_of(self.root, files.EPISODES_PATH, number), index)

    def close(self) -> None:
        """Commit finished episodes, discard an unfinished one, and write exact quantiles to
        ``meta/stats.json``. Idempotent.
        """
        if self._lock is None:
            return
        try:
            if self._recording is not None:
                self._recording.discard()
            self.commit()
            if self._changed:
                with files.writing(self.root):
                    write_stats(self.root, self._stats)
        finally:
            self._lock.close()
            self._lock = None

    def _require_open(self) -> None:
        if self._lock is None:
            raise ConfigError(f"the writer of {self.root} is closed.")


def _described(spec: DatasetSpec, video: VideoConfig) -> DatasetSpec:
    """Return the spec with LeRobot's description of each video stream."""
    cameras = {
        key: replace(
            feature,
            info={**video.info(feature.shape[0], feature.shape[1], spec.fps), **feature.info},
        )
        for key, feature in spec.cameras.items()
    }
    return DatasetSpec(spec.fps, {**spec.features, **cameras}, spec.robot_type)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Make the dataset's folder, and lock it for writing. The lock ends with the process and leaves
    no file.
    """
    if root.exists() and not root.is_dir():
        raise DatasetError(f"{root} is not a folder, which a dataset must be.")
    if root.is_dir() and not (root / files.INFO).exists():
        foreign = sorted(path.name for path in root.iterdir() if path.name != "meta")
        foreign += sorted(f"meta/{path.name}" for path in root.glob("meta/[!.]*"))
        if foreign:
            raise DatasetError(
                f"{root} contains other files ({', '.join(foreign[:5])}); choose an empty folder."
            )
    with ExitStack() as stack:
        with files.writing(root):
            (root / "meta").mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(locked(root, "folder"))
            except ConfigError:
                raise DatasetBusyError(
                    f"another process is writing to {root}; write a dataset per "
                    "process and merge them."
                ) from None
        yield
