"""Recording of one episode: values are checked and pictures encoded frame by frame."""

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
from strands_cosmos3.datasets.stats import Stats
from strands_cosmos3.datasets.video import CameraWriter, VideoConfig
from strands_cosmos3.errors import ConfigError, InputError, NonFiniteError, ShapeError

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
        self._spec, self._keep = spec, keep
        self._columns: dict[str, list[NDArray[Any]]] = {key: [] for key in spec.columns}
        self._cameras = {
            key: CameraWriter(feature, spec.fps, video) for key, feature in spec.cameras.items()
        }
        self.is_open = True
        self.length = 0

    def add(self, frame: Mapping[str, Any]) -> None:
        """Append a frame: the value of every feature, [n] numbers (a scalar if n is 1) or [H, W, 3]
        uint8 pictures.

        Raises:
            InputError, ShapeError, NonFiniteError: A feature is missing, unknown, misshapen or not
                finite; nothing was added.
            ConfigError: The episode has ended.
        """
        self._require_open()
        spec = self._spec
        require_features(set(frame), spec)
        numbers = {
            key: _checked_value(frame[key], key, feature) for key, feature in spec.columns.items()
        }
        pictures = {
            key: image_array(frame[key], key, feature.shape)
            for key, feature in spec.cameras.items()
        }
        for key, value in numbers.items():
            self._columns[key].append(value)
        for key, picture in pictures.items():
            self._cameras[key].add(picture)
        self.length += 1

    def replace_last(self, key: str, value: Any) -> None:
        """Replace a numeric value of the last frame, e.g. ``next.done``. Raises InputError if it
        cannot.
        """
        columns = self._spec.columns
        if key not in columns or not self.length:
            raise InputError(
                f"{key!r} is not numeric, or there is no frame yet; numeric features: "
                f"{', '.join(columns)}."
            )
        self._columns[key][-1] = _checked_value(value, key, columns[key])

    def save(self, note: Note | None = None) -> int:
        """Save the episode and return its index. Raises InputError if it has no frame,
        DatasetError if it cannot be written.
        """
        self._require_open()
        if not self.length:
            raise InputError("an episode needs at least one frame; discard it instead.")
        columns = {key: np.stack(values) for key, values in self._columns.items()}
        note = checked_note(note)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_open and error is None:
            self.save()
        self.discard()


def checked_task(task: Any) -> str:
    """Return an instruction. Raises InputError if it is not text, or empty."""
    if not isinstance(task, str) or not task.strip():
        raise InputError(f"an episode needs an instruction, a non-empty text; got {task!r}.")
    return task


def checked_note(note: Note | None) -> Note:
    """Return a copy of a note. Raises InputError if it cannot be written as JSON."""
    note = {} if note is None else dict(note)
    try:
        json.dumps(note, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"an episode's note must be serializable as JSON: {error}.") from None
    return note


def require_features(given: set[str], spec: DatasetSpec) -> None:
    """Raise InputError unless an episode's features are exactly the spec's."""
    missing, unknown = sorted(set(spec.features) - given), sorted(given - set(spec.features))
    if missing or unknown:
        words = [
            f"{word} {', '.join(keys)}"
            for word, keys in (("lacks", missing), ("has also", unknown))
            if keys
        ]
        raise InputError(
            f"the episode {' and '.join(words)}; its features are {', '.join(spec.features)}."
        )


def _checked_value(value: Any, key: str, feature: Feature) -> NDArray[Any]:
    return checked_column(np.asarray(value)[None], key, feature, 1)[0]


def checked_column(value: Any, key: str, feature: Feature, n: int) -> NDArray[Any]:
    """Return a column as [n, width] ([n] if the width is 1) in the feature's dtype.

    Raises:
        InputError, ShapeError, NonFiniteError: It has another kind or shape, is empty, or is not
            finite in that dtype.
    """
    array, width = np.asarray(value), feature.shape[0]
    kinds = {"f": "fiu", "i": "iu", "b": "b"}[np.dtype(feature.dtype).kind]
    if array.dtype.kind not in kinds:
        raise InputError(f"{key} must hold {feature.dtype} numbers, got {array.dtype}.")
    if array.shape != (n, width) and not (width == 1 and array.shape == (n,)):
        raise ShapeError(f"{key} must have shape [{n}, {width}], got {list(array.shape)}.")
    if n == 0:
        raise ShapeError("an episode needs at least one frame.")
    with np.errstate(over="ignore"):  # an overflow becomes infinite and is refused below
        typed = array.astype(feature.dtype)
    if not np.isfinite(typed).all():
        where = [int(i) for i in np.argwhere(~np.isfinite(typed))[0]]
        raise NonFiniteError(
            f"{key}{where} is {array[tuple(where)]}; every value of a dataset must be finite."
        )
    return typed.reshape(n) if width == 1 else typed
