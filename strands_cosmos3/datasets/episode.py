"""One episode on its way into a dataset: its values are checked as they come, its pictures encoded as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import image_array
from strands_cosmos3.datasets.spec import DatasetSpec, Feature
from strands_cosmos3.datasets.stats import PictureStats, Stats, sampled
from strands_cosmos3.datasets.video import EpisodeEncoder, VideoConfig
from strands_cosmos3.errors import ConfigError, InputError, NonFiniteError, ShapeError

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class FinishedEpisode:
    """An episode that waits for its commit."""

    columns: Columns
    videos: Mapping[str, bytes]
    stats: Mapping[str, Stats]
    length: int
    task: str
    note: Mapping[str, Any]


class CameraWriter:
    """One camera of one episode: its encoder, and its figures.

    Args:
        feature: The camera.
        fps: Frames a second.
        config: How it is encoded.
        n_frames: Frames to come, where that is known: figures are then taken from frames spread evenly.
    """

    def __init__(self, feature: Feature, fps: int, config: VideoConfig, n_frames: int | None):
        self._encoder = EpisodeEncoder((feature.shape[0], feature.shape[1]), fps, config)
        self._stats = PictureStats()
        self._sampled = None if n_frames is None else sampled(n_frames)
        self._seen = 0

    def add(self, frame: NDArray[np.uint8]) -> None:
        """Append [H, W, 3] uint8, already checked."""
        if self._seen in self._sampled if self._sampled is not None else self._seen % 16 == 0:
            self._stats.add(frame)
        self._encoder.add(frame)
        self._seen += 1

    def finish(self) -> tuple[bytes, Stats]:
        """The episode's mp4 and its figures."""
        return self._encoder.finish(), self._stats.result()

    @property
    def frames(self) -> int:
        """Frames so far."""
        return self._seen

    def abandon(self) -> None:
        """Keep nothing."""
        self._encoder.abandon()


Keep = Callable[[Columns, Mapping[str, CameraWriter], Mapping[str, Any]], int]


class EpisodeWriter:
    """One episode, frame by frame. As a context manager it is saved, or discarded where an exception passes.

    Made by :meth:`~strands_cosmos3.datasets.writer.DatasetWriter.episode`.

    Args:
        spec: What it must hold.
        video: How its pictures are encoded.
        keep: Called with columns, cameras and note when it is saved; answers its index.
        over: Called when it ends, saved or not.
    """

    def __init__(self, spec: DatasetSpec, video: VideoConfig, keep: Keep, over: Callable[[], None]):
        self._spec, self._keep, self._over = spec, keep, over
        self._columns: dict[str, list[NDArray[Any]]] = {key: [] for key in spec.columns}
        self._cameras = {key: CameraWriter(feature, spec.fps, video, None) for key, feature in spec.cameras.items()}
        self._open = True
        self.length = 0

    def add(self, frame: Mapping[str, Any]) -> None:
        """Append a frame.

        Args:
            frame: Every feature's value: [n] numbers (a number where n is 1), [H, W, 3] uint8 pictures.

        Raises:
            InputError, ShapeError, NonFiniteError: A feature is missing, unknown, misshapen or not finite; nothing was added.
            ConfigError: The episode is over.
        """
        if not self._open:
            raise ConfigError("this episode was saved or discarded; begin another one.")
        spec = self._spec
        require_features(set(frame), spec)
        numbers = {
            key: checked_column(np.asarray(frame[key])[None], key, feature, 1)[0] for key, feature in spec.columns.items()
        }
        pictures = {key: image_array(frame[key], key, feature.shape) for key, feature in spec.cameras.items()}
        for key, value in numbers.items():
            self._columns[key].append(value)
        for key, picture in pictures.items():
            self._cameras[key].add(picture)
        self.length += 1

    def replace_last(self, key: str, value: Any) -> None:
        """Set a numeric feature of the last frame anew, e.g. ``next.done`` when the end turns out to have come.

        Raises:
            InputError, ShapeError, NonFiniteError: No such feature, no frame yet, or a value that does not fit.
        """
        columns = self._spec.columns
        if key not in columns or not self.length:
            raise InputError(f"{key!r} is no numeric feature of a frame that is there; features: {', '.join(columns)}.")
        self._columns[key][-1] = checked_column(np.asarray(value)[None], key, columns[key], 1)[0]

    def save(self, note: Mapping[str, Any] | None = None) -> int:
        """Finish the episode; returns its index.

        Raises:
            InputError: It has no frame.
            DatasetError: It cannot be written.
        """
        if not self._open:
            raise ConfigError("this episode was saved or discarded; begin another one.")
        if not self.length:
            raise InputError("an episode needs at least one frame; discard it instead.")
        columns = {key: np.stack(values) for key, values in self._columns.items()}
        note = checked_note(note)
        self._leave()
        return self._keep(columns, self._cameras, note)

    def discard(self) -> None:
        """Give the episode up; nothing of it stays. Harmless when it is over."""
        if self._open:
            self._leave()
            for camera in self._cameras.values():
                camera.abandon()

    def _leave(self) -> None:
        self._open = False
        self._over()

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open and error is None:
            self.save()
        self.discard()


def checked_task(task: Any) -> str:
    """An instruction.

    Raises:
        InputError: It is no text, or empty.
    """
    if not isinstance(task, str) or not task.strip():
        raise InputError(f"an episode needs its instruction, a text that is not empty; got {task!r}.")
    return task


def checked_note(note: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What can be kept as JSON.

    Raises:
        InputError: It cannot.
    """
    note = {} if note is None else dict(note)
    try:
        json.dumps(note, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"an episode's note must be JSON-ready: {error}.") from None
    return note


def require_features(given: set[str], spec: DatasetSpec) -> None:
    """Raises InputError where an episode's features are not exactly the spec's."""
    missing, unknown = sorted(set(spec.features) - given), sorted(given - set(spec.features))
    if missing or unknown:
        words = [f"{word} {', '.join(keys)}" for word, keys in (("lacks", missing), ("has also", unknown)) if keys]
        raise InputError(f"the episode {' and '.join(words)}; its features are {', '.join(spec.features)}.")


def checked_column(value: Any, key: str, feature: Feature, n: int) -> NDArray[Any]:
    """[n, width] (or [n] where the width is 1) of the feature's type.

    Raises:
        InputError, ShapeError, NonFiniteError: It is of another kind or shape, empty, or not finite in that type.
    """
    array, width = np.asarray(value), feature.shape[0]
    kinds = {"f": "fiu", "i": "iu", "b": "b"}[np.dtype(feature.dtype).kind]
    if array.dtype.kind not in kinds:
        raise InputError(f"{key} must hold {feature.dtype} numbers, got {array.dtype}.")
    if array.shape != (n, width) and not (width == 1 and array.shape == (n,)):
        raise ShapeError(f"{key} must have shape [{n}, {width}], got {list(array.shape)}.")
    if n == 0:
        raise ShapeError("an episode needs at least one frame.")
    with np.errstate(over="ignore"):  # what overflows is infinite then, and refused
        typed = array.astype(feature.dtype)
    if not np.isfinite(typed).all():
        where = [int(i) for i in np.argwhere(~np.isfinite(typed))[0]]
        raise NonFiniteError(f"{key}{where} is {array[tuple(where)]}; every value of a dataset must be finite.")
    return typed.reshape(n) if width == 1 else typed
