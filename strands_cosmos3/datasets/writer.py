"""Writing a LeRobot v3 dataset: whole episodes appear at once, whatever happens in between."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from strands_cosmos3.checks import image_array, instance_of, whole_number
from strands_cosmos3.datasets.episode import (
    CameraWriter,
    Columns,
    EpisodeWriter,
    FinishedEpisode,
    checked_column,
    checked_note,
    checked_task,
    require_features,
)
from strands_cosmos3.datasets.files import (
    DATA_PATH,
    EPISODES_PATH,
    INFO,
    STATS,
    VIDEO_PATH,
    Info,
    columns_to_table,
    file_of,
    number_of,
    read_info,
    read_tasks,
    write_table,
    write_tasks,
    writing,
)
from strands_cosmos3.datasets.index import EpisodeIndex, Row, read_episode_stats, rows_to_table
from strands_cosmos3.datasets.reader import Dataset
from strands_cosmos3.datasets.spec import DatasetSpec
from strands_cosmos3.datasets.stats import column_stats, merged_features, to_json
from strands_cosmos3.datasets.video import VideoConfig, join_videos
from strands_cosmos3.errors import ConfigError, DatasetBusyError, DatasetError, DatasetMismatchError, InputError
from strands_cosmos3.resources import UNFINISHED, write_json, write_whole


class DatasetWriter:
    """Adds episodes to a dataset, a new one or one that is there.

    Episodes become visible in commits of ``commit_every``; each commit writes one data file, one video for each camera and
    one index file, and replaces ``meta/info.json`` last. Whoever reads sees all of a commit or nothing of it, and a process
    that dies leaves the last commit's dataset; what it left half-done is removed when the dataset is next opened for
    writing. Recording a few long episodes, commit each; producing many short ones, commit hundreds at once, and let
    several producers write a dataset each for :func:`~strands_cosmos3.datasets.merge_datasets`.

    As a context manager it commits the finished episodes on the way out, also when an exception passes.

    Args:
        root: The dataset's folder.
        spec: What its episodes hold.
        commit_every: Episodes in a commit.
        video: How pictures are encoded.

    Raises:
        DatasetMismatchError: The folder holds a dataset of another spec.
        DatasetBusyError: Another writer has it open.
        DatasetFormatError: What is there is damaged.
        DatasetError: The folder holds something else, or cannot be written to.
    """

    def __init__(self, root: str | Path, spec: DatasetSpec, commit_every: int = 1, video: VideoConfig | None = None):
        self.root = Path(root).expanduser()
        self.commit_every = whole_number(commit_every, "commit_every", 1)
        self.video = VideoConfig() if video is None else video
        self._pending: list[FinishedEpisode] = []
        self._recording: EpisodeWriter | None = None
        self._changed = False
        instance_of(spec, DatasetSpec, "spec")
        self._lock = _lock(self.root)
        with ExitStack() as on_failure:
            on_failure.callback(self._unlock)
            self._info = self._open(spec)
            on_failure.pop_all()

    def _open(self, spec: DatasetSpec) -> Info:
        if not (self.root / INFO).exists():
            info = Info(_described(spec, self.video))
            with writing(self.root):
                write_json(self.root / INFO, info.to_json())
            self._tasks: list[str] = []
            self._next_file, self._stats = 0, {}
            return info
        info = read_info(self.root)
        if differences := info.spec.differences(spec):
            raise DatasetMismatchError(
                f"{self.root} holds another kind of episodes than those to be added: {'; '.join(differences)}. "
                "Choose another folder."
            )
        if (info.data_path, info.video_path) != (DATA_PATH, VIDEO_PATH):
            raise DatasetMismatchError(
                f"{self.root} keeps its files in other places ({info.data_path}); merge it into a new one."
            )
        index = EpisodeIndex(self.root, info)
        self._tasks = list(read_tasks(self.root, info))
        self._next_file = index.next_file(info.chunk_size)
        self._stats = merged_features(read_episode_stats(self.root, index, info.spec))
        self._remove_leftovers(info)
        return info

    def _remove_leftovers(self, info: Info) -> None:
        """Delete what a writer that died put in place without counting it."""
        for path in self.root.rglob(UNFINISHED):
            path.unlink()
        folders = [self.root / "data", self.root / "meta/episodes", *(self.root / "videos").glob("*")]
        for folder in folders:
            for path in folder.glob("chunk-*/*"):
                numbers = path.parent.name.removeprefix("chunk-"), path.stem.removeprefix("file-")
                if all(number.isdecimal() for number in numbers):
                    chunk, file = map(int, numbers)
                    if chunk * info.chunk_size + file >= self._next_file:
                        path.unlink()

    @property
    def spec(self) -> DatasetSpec:
        """What the episodes hold."""
        return self._info.spec

    @property
    def n_episodes(self) -> int:
        """Episodes so far, those that wait for their commit included."""
        return self._info.total_episodes + len(self._pending)

    def episode(self, task: str) -> EpisodeWriter:
        """Begin an episode, frame by frame; one at a time.

        Args:
            task: Its instruction.

        Raises:
            ConfigError: The writer is closed, or another episode is being recorded.
            InputError: The instruction is no text, or empty.
        """
        self._require_open()
        if self._recording is not None:
            raise ConfigError("an episode is being recorded; save or discard it first.")
        task = checked_task(task)

        def keep(columns: Columns, cameras: Mapping[str, CameraWriter], note: Mapping[str, Any]) -> int:
            n = len(next(iter(columns.values()))) if columns else next(iter(cameras.values())).frames
            return self._finish(columns, cameras, n, task, note)

        def over() -> None:
            self._recording = None

        self._recording = EpisodeWriter(self.spec, self.video, keep, over)
        return self._recording

    def add_episode(
        self,
        columns: Mapping[str, Any],
        videos: Mapping[str, Any] | None = None,
        task: str = "",
        note: Mapping[str, Any] | None = None,
    ) -> int:
        """Add a whole episode.

        Args:
            columns: Every numeric feature, [N, n] ([N] where n is 1).
            videos: Every camera's frames, [N, H, W, 3] uint8, by feature key.
            task: Its instruction.
            note: Anything JSON-ready to keep with it, e.g. seed and outcome.

        Returns:
            Its index.

        Raises:
            InputError, ShapeError, NonFiniteError: A feature is missing, unknown, misshapen or not finite; nothing was added.
            DatasetError: It cannot be written.
        """
        self._require_open()
        spec, videos = self.spec, videos or {}
        task, note = checked_task(task), checked_note(note)
        require_features({*columns, *videos}, spec)
        if set(columns) != set(spec.columns) or set(videos) != set(spec.cameras):
            raise InputError("pass numeric features in columns and cameras in videos.")
        n = len(np.atleast_1d(np.asarray(next(iter({**columns, **videos}.values())))))
        checked = {key: checked_column(columns[key], key, feature, n) for key, feature in spec.columns.items()}
        frames = {key: image_array(videos[key], key, (n, *feature.shape)) for key, feature in spec.cameras.items()}
        cameras = {key: CameraWriter(feature, spec.fps, self.video, n) for key, feature in spec.cameras.items()}
        for key, camera in cameras.items():
            for frame in frames[key]:
                camera.add(frame)
        return self._finish(checked, cameras, n, task, note)

    def _finish(
        self,
        columns: Columns,
        cameras: Mapping[str, CameraWriter],
        n: int,
        task: str,
        note: Mapping[str, Any],
    ) -> int:
        index, start = self.n_episodes, self._info.total_frames + sum(episode.length for episode in self._pending)
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
        finished = {key: camera.finish() for key, camera in cameras.items()}
        stats = {key: column_stats(values) for key, values in full.items()}
        stats |= {key: figures for key, (_, figures) in finished.items()}
        videos = {key: video for key, (video, _) in finished.items()}
        self._pending.append(FinishedEpisode(full, videos, stats, n, task, note))
        if len(self._pending) >= self.commit_every:
            self.commit()
        return index

    def commit(self) -> None:
        """Make the finished episodes visible.

        Raises:
            DatasetError: They cannot be written; the dataset is as it was, and they still wait.
        """
        self._require_open()
        if not self._pending:
            return
        info, episodes = self._info, self._pending
        stats = merged_features([*([self._stats] if self._stats else []), *(episode.stats for episode in episodes)])
        counted = replace(
            info,
            total_episodes=info.total_episodes + len(episodes),
            total_frames=info.total_frames + sum(episode.length for episode in episodes),
            total_tasks=len(self._tasks),
        )
        with writing(self.root):
            self._write_files(episodes, number_of(self._next_file, info.chunk_size))
            write_tasks(self.root, self._tasks)
            write_json(self.root / STATS, to_json(stats))
            write_json(self.root / INFO, counted.to_json())
        self._info, self._stats, self._pending, self._changed = counted, stats, [], True
        self._next_file += 1

    def _write_files(self, episodes: Sequence[FinishedEpisode], number: tuple[int, int]) -> None:
        """Write the videos, the data file and the index file of a commit."""
        info = self._info
        for key in self.spec.cameras:
            parts = [(episode.videos[key], episode.length) for episode in episodes]
            path = file_of(self.root, info.video_path, number, key)
            write_whole(path, lambda hidden, parts=parts: join_videos(parts, self.spec.fps, hidden))
        write_table(file_of(self.root, info.data_path, number), _data_table(episodes), _rows_per_group(episodes))
        stats = [episode.stats for episode in episodes]
        index = rows_to_table(self._rows(number), stats, info.total_episodes, self.spec.fps)
        write_table(file_of(self.root, EPISODES_PATH, number), index)

    def _rows(self, number: tuple[int, int]) -> list[Row]:
        rows, start, frame = [], self._info.total_frames, 0
        for episode in self._pending:
            videos = dict.fromkeys(self.spec.cameras, (*number, frame))
            rows.append(Row((episode.task,), episode.length, start, number, videos, episode.note, number))
            start, frame = start + episode.length, frame + episode.length
        return rows

    def close(self) -> None:
        """Commit what is finished, give up what is not, and put exact quantiles into ``meta/stats.json``."""
        if self._lock is None:
            return
        try:
            if self._recording is not None:
                self._recording.discard()
            self.commit()
            if self._changed:
                self._exact_stats()
        finally:
            self._unlock()

    def _exact_stats(self) -> None:
        with Dataset(self.root) as dataset, writing(self.root):
            write_json(self.root / STATS, to_json({**self._stats, **dataset.exact_stats()}))

    def _require_open(self) -> None:
        if self._lock is None:
            raise ConfigError(f"the writer of {self.root} is closed.")

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _described(spec: DatasetSpec, video: VideoConfig) -> DatasetSpec:
    """The spec with what LeRobot states about each video stream."""
    cameras = {
        key: replace(feature, info={**video.info(feature.shape[0], feature.shape[1], spec.fps), **feature.info})
        for key, feature in spec.cameras.items()
    }
    return DatasetSpec(spec.fps, {**spec.features, **cameras}, spec.robot_type)


def _lock(root: Path) -> int | None:
    """Hold the dataset's folder for writing; the lock goes with the process, and leaves no file."""
    if root.exists() and not root.is_dir():
        raise DatasetError(f"{root} is no folder; a dataset is one.")
    if root.is_dir() and not (root / INFO).exists():
        strange = sorted(path.name for path in root.iterdir() if path.name != "meta")
        strange += sorted(f"meta/{path.name}" for path in root.glob("meta/*") if not path.name.startswith("."))
        if strange:
            raise DatasetError(f"{root} holds something that is no dataset ({', '.join(strange[:5])}); choose an empty folder.")
    try:
        (root / "meta").mkdir(parents=True, exist_ok=True)
        handle = os.open(root, os.O_RDONLY)
    except OSError as error:
        raise DatasetError(f"{root} cannot be written to: {error.strerror}.") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise DatasetBusyError(f"another process is writing to {root}; let each write its own and merge them.") from None
    return handle


def _data_table(episodes: Sequence[FinishedEpisode]) -> Any:
    return columns_to_table({key: np.concatenate([e.columns[key] for e in episodes]) for key in episodes[0].columns})


def _rows_per_group(episodes: Sequence[FinishedEpisode]) -> int:
    """Rows of a parquet row group: about an episode, never tiny."""
    return max(1024, sum(episode.length for episode in episodes) // len(episodes))
