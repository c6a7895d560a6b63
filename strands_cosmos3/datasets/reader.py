"""Reading a LeRobot v3 dataset, this project's or another's: episodes by number, columns whole, frames at random."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from strands_cosmos3.checks import whole_number
from strands_cosmos3.datasets.files import HINT, STATS, file_of, read_info, read_table, read_tasks
from strands_cosmos3.datasets.index import EpisodeIndex
from strands_cosmos3.datasets.spec import BOOKKEEPING, DatasetSpec, Feature
from strands_cosmos3.datasets.stats import Stats, column_stats
from strands_cosmos3.datasets.video import FrameReader
from strands_cosmos3.errors import DatasetFormatError, NonFiniteError, UnknownNameError
from strands_cosmos3.resources import read_json

_KEPT_COLUMNS = 64


class Dataset:
    """A dataset, open for reading.

    Nothing is decoded before it is asked for; the last columns read and the last videos opened are kept. An object belongs
    to one thread; pickled into another process it opens its files there anew (start processes by spawn: Arrow's threads do
    not survive a fork).

    Args:
        root: The dataset's folder.

    Raises:
        DatasetFormatError: It is no LeRobot v3 dataset, or its files contradict each other.
    """

    def __init__(self, root: str | Path):
        self.root = Path(root).expanduser()
        self.info = read_info(self.root)
        self.tasks: tuple[str, ...] = read_tasks(self.root, self.info)
        self._index = EpisodeIndex(self.root, self.info)
        self._videos = FrameReader(self.info.spec.fps)
        self._columns: OrderedDict[tuple[int, int, str], NDArray[Any]] = OrderedDict()
        self._first_rows = self._first_row_of_files()

    def _first_row_of_files(self) -> dict[tuple[int, int], int]:
        """Number in the dataset of every data file's first row."""
        first: dict[tuple[int, int], int] = {}
        for (chunk, file), start in zip(self._index.data.tolist(), self._index.start.tolist(), strict=True):
            first.setdefault((chunk, file), start)
        return first

    @property
    def spec(self) -> DatasetSpec:
        """Rate, features, robot."""
        return self.info.spec

    @property
    def fps(self) -> int:
        """Frames a second."""
        return self.info.spec.fps

    @property
    def n_frames(self) -> int:
        """Frames of all episodes."""
        return self.info.total_frames

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[episodes] frames of each."""
        return self._index.length.copy()

    @property
    def starts(self) -> NDArray[np.int64]:
        """[episodes] number in the dataset of each one's first frame: where it begins in :meth:`column`."""
        return self._index.start.copy()

    @property
    def stats(self) -> dict[str, Stats]:
        """Figures by feature, as ``meta/stats.json`` has them; nothing where there is none.

        Raises:
            DatasetFormatError: It is malformed.
        """
        if not (self.root / STATS).exists():
            return {}
        raw = read_json(self.root / STATS, DatasetFormatError, HINT)
        try:
            return {key: {name: np.asarray(value, np.float64) for name, value in part.items()} for key, part in raw.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise DatasetFormatError(f"{self.root / STATS} is malformed: {error}.") from None

    def __len__(self) -> int:
        """Episodes."""
        return len(self._index)

    def __getitem__(self, episode: int) -> RecordedEpisode:
        """An episode by number; negative ones count from the end.

        Raises:
            IndexError: There is no such episode.
        """
        i = episode + len(self) if episode < 0 else episode
        if not 0 <= i < len(self):
            raise IndexError(f"episode {episode} of a dataset with {len(self)}")
        return RecordedEpisode(self, i)

    def __iter__(self) -> Iterator[RecordedEpisode]:
        return (self[i] for i in range(len(self)))

    def column(self, key: str) -> NDArray[Any]:
        """A numeric feature of all frames of all episodes: [n_frames, n] ([n_frames] where n is 1).

        Raises:
            UnknownNameError: No such numeric feature.
            DatasetFormatError, NonFiniteError: The files are damaged, or hold NaN.
        """
        feature = self._numeric(key)
        if not len(self):
            return np.empty((0,) if feature.shape == (1,) else (0, *feature.shape), feature.dtype)
        ends = [*list(self._first_rows.values())[1:], self.n_frames]
        parts = [
            self._file_column(number, key)[: end - first]
            for (number, first), end in zip(self._first_rows.items(), ends, strict=True)
        ]
        whole = np.concatenate(parts)
        if len(whole) != self.n_frames:
            raise DatasetFormatError(f"{self.root}: column {key} has {len(whole)} rows, meta/info.json {self.n_frames}.")
        return whole

    def exact_stats(self) -> dict[str, Stats]:
        """Statistics of every numeric column, computed from all rows; the quantiles are exact."""
        return {key: column_stats(self.column(key)) for key in (*self.spec.columns, *BOOKKEEPING)}

    def _numeric(self, key: str) -> Feature:
        columns = {**self.spec.columns, **BOOKKEEPING}
        if key not in columns:
            raise UnknownNameError("numeric feature", key, columns)
        return columns[key]

    def _rows(self, episode: int, key: str) -> NDArray[Any]:
        number = (int(self._index.data[episode, 0]), int(self._index.data[episode, 1]))
        values = self._file_column(number, key)
        first = int(self._index.start[episode]) - self._first_rows[number]
        rows = values[first : first + int(self._index.length[episode])]
        if len(rows) != self._index.length[episode]:
            raise DatasetFormatError(f"{self.root}: the data of episode {episode} ends after {len(rows)} frames.")
        return rows

    def _file_column(self, number: tuple[int, int], key: str) -> NDArray[Any]:
        """A column of one data file, read-only."""
        feature, at = self._numeric(key), (*number, key)
        if at in self._columns:
            self._columns.move_to_end(at)
            return self._columns[at]
        path = file_of(self.root, self.info.data_path, number)
        table = read_table(path, list(dict.fromkeys((key, "index"))))
        index = table.column("index").to_numpy()
        if len(index) and (index[0] != self._first_rows[number] or not (np.diff(index) == 1).all()):
            raise DatasetFormatError(
                f"{path} begins with frame {index[0]}, or has gaps; frame {self._first_rows[number]} belongs there."
            )
        values = _to_numpy(table.column(key), feature, f"{path}, {key}")
        values.setflags(write=False)
        self._columns[at] = values
        while len(self._columns) > _KEPT_COLUMNS:
            self._columns.popitem(last=False)
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self.root,)

    def close(self) -> None:
        """Close the videos. Harmless when repeated; reading opens them again."""
        self._videos.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _to_numpy(column: Any, feature: Feature, name: str) -> NDArray[Any]:
    """An arrow column as [rows, n], or [rows] where n is 1."""
    n_rows = len(column)
    if column.null_count:
        raise DatasetFormatError(f"{name} has empty entries.")
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type.value_type)
    while isinstance(array, pa.ExtensionArray | pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        array = array.storage if isinstance(array, pa.ExtensionArray) else array.flatten()
    flat = array.to_numpy(zero_copy_only=False)
    if flat.size != n_rows * feature.shape[0] or flat.dtype.kind not in "fiub":
        raise DatasetFormatError(f"{name} holds {flat.size} values in {n_rows} rows; its feature is {list(feature.shape)}.")
    values = flat.astype(feature.dtype).reshape((n_rows,) if feature.shape == (1,) else (n_rows, *feature.shape))
    if not np.isfinite(values).all():
        raise NonFiniteError(f"{name} holds NaN or infinity in row {int(np.argwhere(~np.isfinite(values))[0][0])}.")
    return values


@dataclass(frozen=True, eq=False)
class RecordedEpisode:
    """One episode of an open dataset.

    Args:
        dataset: Where it lies.
        index: Its number.
    """

    dataset: Dataset
    index: int

    def __len__(self) -> int:
        """Frames."""
        return int(self.dataset._index.length[self.index])

    @property
    def tasks(self) -> tuple[str, ...]:
        """Its instructions, as the index lists them."""
        return self.dataset._index.row(self.index).tasks

    @property
    def task(self) -> str:
        """The instruction of its first frame.

        Raises:
            DatasetFormatError: The frame's task index has no instruction.
        """
        number = int(self["task_index"][0])
        if not 0 <= number < len(self.dataset.tasks):
            raise DatasetFormatError(f"episode {self.index} names task {number}; there are {len(self.dataset.tasks)}.")
        return self.dataset.tasks[number]

    @property
    def note(self) -> Mapping[str, Any]:
        """What its writer noted, e.g. seed and outcome; nothing in another's dataset."""
        return self.dataset._index.row(self.index).note

    def __getitem__(self, key: str) -> NDArray[Any]:
        """A numeric feature, [N, n] ([N] where n is 1), read-only.

        Raises:
            UnknownNameError: No such numeric feature.
            DatasetFormatError, NonFiniteError: The file is damaged.
        """
        return self.dataset._rows(self.index, key)

    def frames(self, camera: str, rows: Sequence[int] | slice | None = None) -> NDArray[np.uint8]:
        """Pictures of a camera.

        Args:
            camera: Its feature key.
            rows: Which frames; all by default. Only these are kept, and decoding starts at the key frame before each.

        Returns:
            [n, H, W, 3] uint8

        Raises:
            UnknownNameError: No such camera.
            InputError: A frame outside the episode.
            DatasetFormatError: The video is damaged.
        """
        cameras = self.dataset.spec.cameras
        if camera not in cameras:
            raise UnknownNameError("camera", camera, cameras)
        n = len(self)
        wanted = range(n)[slice(None) if rows is None else rows] if rows is None or isinstance(rows, slice) else rows
        numbers = [whole_number(row, "row", 0, n - 1) for row in wanted]
        chunk, file, first = (int(value) for value in self.dataset._index.videos[camera][self.index])
        path = file_of(self.dataset.root, self.dataset.info.video_path, (chunk, file), camera)
        return self.dataset._videos.read(path, first, numbers, cameras[camera].shape)

    def frame(self, row: int, keys: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
        """One frame: the features asked for, or all of them, pictures [H, W, 3] included.

        Raises:
            InputError: No such row, or no such feature.
            DatasetFormatError: A file is damaged.
        """
        row = whole_number(row, "row", 0, len(self) - 1)
        features = self.dataset.spec.features
        wanted = tuple(features) if keys is None else keys
        return {
            key: self.frames(key, [row])[0] if key in features and features[key].is_video else np.asarray(self[key][row])
            for key in wanted
        }
