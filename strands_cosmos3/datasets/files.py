"""Files of a LeRobot v3 dataset: paths, ``meta/info.json``, tasks, the episode index, parquet.

::

    meta/info.json                                  frame rate, features, totals; replaced last
    meta/stats.json                                 statistics by feature
    meta/tasks.parquet                              instruction -> task_index
    meta/episodes/chunk-000/file-000.parquet        one row per episode: length, files, statistics
    data/chunk-000/file-000.parquet                 one row per frame
    videos/<camera key>/chunk-000/file-000.mp4      frames of consecutive episodes

Source: huggingface/lerobot 0.6.1, ``lerobot.datasets``. Input is untrusted: it is validated, and a
path outside the dataset raises an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from string import Formatter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from strands_cosmos3.checks import instance_of, whole_number
from strands_cosmos3.datasets.spec import BOOKKEEPING, VIDEO, DatasetSpec, Feature
from strands_cosmos3.datasets.stats import QUANTILES, STATISTICS, Stats
from strands_cosmos3.errors import DatasetError, DatasetFormatError, InputError
from strands_cosmos3.resources import contained, read_json, require_file, shown, write_whole

VERSION = "v3.0"
_READ = re.compile(r"v?3\.0(\.\d+)?", re.IGNORECASE)
_OLDER = re.compile(r"None|v?[0-2]\.\d+(\.\d+)?", re.IGNORECASE)
INFO = "meta/info.json"
STATS = "meta/stats.json"
TASKS = "meta/tasks.parquet"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
CHUNK_SIZE = 1000
_UNCOMMITTED = 10_000
"""More tasks or episodes than a commit, which a killed writer may have left, adds to a file."""
DATA_FILE_MB = 100
VIDEO_FILE_MB = 200
_UNPACKED_BYTES, _UNPACKED_RATIO = 16 << 20, 100
"""What the columns that are read of one parquet file may take when unpacked: so many bytes, or so
many times the file's size.
"""
HINT = "Is its folder a LeRobot v3 dataset?"
NOTE = "strands_cosmos3/note"
"""Column of the episode index with a free-form JSON object, e.g. seed and outcome."""
_WIDTH = re.compile("0?[1-9]?d?")
Ints = NDArray[np.int64]


def file_of(root: Path, template: str, number: tuple[int, int], key: str = "") -> Path:
    """Return a path from a template of ``meta/info.json``. Raises DatasetFormatError if
    malformed or outside the dataset.
    """
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
        if not {name for _, name, _, _ in parts} <= {"chunk_index", "file_index", "video_key"}:
            raise ValueError("the allowed fields are chunk_index, file_index, video_key")
        if not all(_WIDTH.fullmatch(width or "") for _, _, width, _ in parts):
            raise ValueError("a field's format is a width of at most 9 digits, such as 03d")
        path = PurePosixPath(
            template.format(chunk_index=int(number[0]), file_index=int(number[1]), video_key=key)
        )
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise DatasetFormatError(
            f"{root / INFO}: the path template {template!r} is malformed: {error}."
        ) from None
    if path.is_absolute() or ".." in path.parts or set("\\\0") & set(str(path)) or min(number) < 0:
        raise DatasetFormatError(
            f"{root / INFO}: the path template {template!r} gives "
            f"{str(path)!r}, outside the dataset."
        )
    return inside(root, root / path)


def inside(root: Path, path: Path) -> Path:
    """Return a path of a dataset. Raises DatasetFormatError if a link leads it out."""
    return contained(path, root, "dataset", DatasetFormatError)


@dataclass(frozen=True)
class Info:
    """Contents of ``meta/info.json``."""

    spec: DatasetSpec
    total_episodes: int = 0
    total_frames: int = 0
    total_tasks: int | None = 0  # None if info.json does not state it
    data_path: str = DATA_PATH  # template
    video_path: str = VIDEO_PATH  # template
    chunk_size: int = CHUNK_SIZE  # maximum number of files in a chunk's folder
    foreign: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why a feature of another program cannot be read, by key."""
    misnamed: frozenset[str] = frozenset()
    """Features whose names of columns are not as many as the columns, and therefore not used."""

    def to_json(self) -> dict[str, Any]:
        """Return the contents of ``meta/info.json``."""
        spec = self.spec
        features: dict[str, dict[str, Any]] = {}
        for key, feature in {**spec.features, **BOOKKEEPING}.items():
            names = (
                ["height", "width", "channels"]
                if feature.is_video
                else feature.names and list(feature.names)
            )
            info = {"info": dict(feature.info)} if feature.info else {}
            features[key] = {
                "dtype": feature.dtype,
                "shape": list(feature.shape),
                "names": names,
                **info,
            }
        return {
            "codebase_version": VERSION,
            "robot_type": spec.robot_type,
            "total_episodes": self.total_episodes,
            "total_frames": self.total_frames,
            "total_tasks": self.total_tasks,
            "chunks_size": self.chunk_size,
            "data_files_size_in_mb": DATA_FILE_MB,
            "video_files_size_in_mb": VIDEO_FILE_MB,
            "fps": spec.fps,
            "splits": {"train": f"0:{self.total_episodes}"},
            "data_path": self.data_path,
            "video_path": self.video_path if spec.cameras else None,
            "features": features,
        }


def read_info(root: Path) -> Info:
    """Read ``meta/info.json``. Raises DatasetFormatError if it is missing, not JSON, of another
    version, or invalid.
    """
    raw = read_meta(root, INFO)
    _require_version(root, raw.get("codebase_version"))
    try:
        fps: Any = raw.get("fps")
        parsed: dict[str, Feature] = {}
        foreign: dict[str, str] = {}
        misnamed: set[str] = set()
        for key, value in instance_of(raw.get("features"), dict, "features").items():
            if key not in BOOKKEEPING:
                try:
                    feature, fits = _feature_from(key, value)
                    parsed |= DatasetSpec(1, {key: feature}).features
                    misnamed |= set() if fits else {key}
                except InputError as error:
                    foreign[key] = str(error)
        spec = DatasetSpec(fps, parsed, raw.get("robot_type"))
        totals = {
            name: whole_number(raw.get(name), name, 0, 2**53)
            for name in ("total_episodes", "total_frames", "total_tasks")
            if name != "total_tasks" or raw.get(name) is not None
        }
        chunk_size = whole_number(raw.get("chunks_size") or 0, "chunks_size", 0) or CHUNK_SIZE
    except InputError as error:
        raise DatasetFormatError(f"{root / INFO}: {error}") from None
    data_path = raw.get("data_path")
    video_path = raw.get("video_path") or VIDEO_PATH
    if not isinstance(data_path, str) or not isinstance(video_path, str):
        raise DatasetFormatError(f"{root / INFO}: data_path and video_path must be text.")
    info = Info(
        spec,
        **{"total_tasks": None, **totals},
        data_path=data_path,
        video_path=video_path,
        chunk_size=chunk_size,
        foreign=foreign,
        misnamed=frozenset(misnamed),
    )
    file_of(root, data_path, (0, 0))
    for key in spec.cameras or {"camera": None}:
        file_of(root, video_path, (0, 0), key)
    return info


def _require_version(root: Path, version: Any) -> None:
    """Raise DatasetFormatError unless a dataset's version is ours."""
    if _READ.fullmatch(str(version)):
        return
    remedy = (
        " LeRobot converts v2.1 in its place: python -m lerobot.scripts.convert_dataset_v21_to_v30 "
        f"--repo-id=local/{root.name} --root={root} --push-to-hub=false"
    )
    raise DatasetFormatError(
        f"{root / INFO} has version {version!r}, but only {VERSION} is read."
        + remedy * bool(_OLDER.fullmatch(str(version)))
    )


def _feature_from(key: str, raw: Any) -> tuple[Feature, bool]:
    """Return a feature, and whether its names are usable or absent."""
    if (
        not isinstance(raw, dict)
        or not isinstance(raw.get("shape"), list)
        or not isinstance(raw.get("dtype"), str)
    ):
        raise InputError(f"feature {key!r} needs a dtype and a shape, got {str(raw)[:80]!r}.")
    shape = tuple(raw["shape"])
    if raw["dtype"] == VIDEO and len(shape) == 3 and shape[0] == 3 and shape[2] != 3:
        shape = (*shape[1:], 3)  # LeRobot writes [3, H, W] or [H, W, 3]
    names = () if raw["dtype"] == VIDEO else _column_names(raw.get("names"))
    fits = shape == (len(names),)
    info = raw.get("info")
    feature = Feature(
        raw["dtype"], shape, names if fits else None, info if isinstance(info, dict) else {}
    )
    return feature, fits or len(names) < 2  # a single one is a label of the whole


def _column_names(names: Any) -> tuple[str, ...]:
    """Return the names of columns as LeRobot's versions write them: a list, lists in a list or an
    object, or an object of each name's place. Return nothing for others.
    """
    if isinstance(names, dict):
        placed = {str(place): name for name, place in names.items()}
        in_order = [placed.get(str(i)) for i in range(len(names))]
        names = list(names.values()) if None in in_order else in_order
    parts = names if isinstance(names, list) else []
    flat = [name for part in parts for name in (part if isinstance(part, list) else [part])]
    return tuple(flat) if all(isinstance(name, str) for name in flat) else ()


def read_meta(root: Path, name: str) -> dict[str, Any]:
    """Read a JSON object of a dataset. Raises DatasetFormatError."""
    return read_json(inside(root, root / name), DatasetFormatError, HINT)


def read_table(
    root: Path,
    path: Path,
    most_rows: int,
    columns: Sequence[str] | None = None,
    optional: Sequence[str] = (),
    most_values: int | None = None,
) -> Any:
    """Read a parquet table: all columns, or ``columns`` and the existing ``optional`` ones.
    Texts come as Arrow dictionaries, each once, however often a row repeats it.

    Raises DatasetFormatError; before anything is read, if there are more than ``most_rows``, more
    than ``most_values`` in ``columns``, or more bytes than a file of its size may unpack to.
    """
    inside(root, path)
    require_file(path, DatasetFormatError, hint="The dataset refers to it.")
    try:
        footer = pq.read_metadata(path)
        texts = [column.path for column in footer.schema]  # of numbers it is ignored
        with pq.ParquetFile(path, metadata=footer, read_dictionary=texts) as file:
            names = file.schema_arrow.names
            if footer.num_rows > most_rows:
                raise DatasetFormatError(
                    f"{path} has {footer.num_rows} rows, but the dataset refers "
                    f"to {most_rows} of them."
                )
            if missing := [name for name in columns or () if name not in names]:
                raise DatasetFormatError(f"{path} lacks the columns {', '.join(missing)}.")
            if columns is not None:
                columns = [*columns, *(name for name in optional if name in names)]
            read = columns or names
            if twice := {name for name in read if names.count(name) > 1}:
                raise DatasetFormatError(f"{path} has two columns {', '.join(sorted(twice))}.")
            n_values, n_bytes = _unpacked(footer, names, read)
            if most_values is not None and n_values > most_values:
                raise DatasetFormatError(
                    f"{path} has more than the {most_values} values of {', '.join(read)} that "
                    "the dataset refers to."
                )
            most_bytes = max(_UNPACKED_BYTES, _UNPACKED_RATIO * path.stat().st_size)
            if n_bytes > most_bytes:
                raise DatasetFormatError(
                    f"{path} unpacks to {n_bytes} bytes of {shown(', '.join(read))}; at most "
                    f"{most_bytes} are read of a file of its size."
                )
            return file.read(columns)
    except (OSError, pa.ArrowException) as error:
        raise DatasetFormatError(f"{path} cannot be read as parquet: {error}.") from None


def _unpacked(footer: Any, names: Sequence[str], columns: Sequence[str]) -> tuple[int, int]:
    """Return how many values a file's footer states for columns, and how many bytes they take in
    memory; a path begins with its column.
    """
    n_values = n_bytes = 0
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    for j, column in enumerate(footer.schema):
        named = (name for name in names if f"{column.path}.".startswith(f"{name}."))
        if max(named, key=len, default="") not in columns:
            continue
        for chunk in (group.column(j) for group in groups):
            n_values += chunk.num_values
            n_bytes += max(chunk.num_values * max(8, column.length), chunk.total_uncompressed_size)
    return n_values, n_bytes


def shared_texts(column: Any) -> list[Any]:
    """Return an Arrow column as a list in which equal texts are one object."""
    coded = pa.chunked_array(column).combine_chunks().dictionary_encode()
    texts = [*coded.dictionary.to_pylist(), None]
    return [texts[i] for i in coded.indices.fill_null(-1).to_pylist()]


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Convert an OSError into :class:`DatasetError`."""
    try:
        yield
    except OSError as error:
        raise DatasetError(
            f"{error.filename or root} cannot be written: {error.strerror or error}."
        ) from error


def write_table(path: Path, table: Any, rows_per_group: int | None = None) -> None:
    """Write a parquet file atomically."""
    write_whole(
        path,
        lambda unfinished: pq.write_table(
            table, unfinished, compression="snappy", row_group_size=rows_per_group
        ),
    )


def columns_to_table(columns: Mapping[str, NDArray[Any]]) -> Any:
    """Return an Arrow table of numeric columns, each [rows] or [rows, n]."""

    def arrow(values: NDArray[Any]) -> Any:
        flat = pa.array(values.ravel())
        return (
            flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        )

    return pa.table({key: arrow(values) for key, values in columns.items()})


def write_tasks(root: Path, tasks: Sequence[str]) -> None:
    """Write ``meta/tasks.parquet`` in the format of a pandas DataFrame with the instruction as
    index.
    """
    columns = [
        {
            "name": name,
            "field_name": name,
            "pandas_type": kind,
            "numpy_type": numpy,
            "metadata": None,
        }
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": columns,
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0.0",
    }
    table = pa.table(
        {
            "task_index": pa.array(range(len(tasks)), pa.int64()),
            "task": pa.array(tasks, pa.string()),
        }
    )
    write_table(root / TASKS, table.replace_schema_metadata({"pandas": json.dumps(pandas)}))


def read_tasks(root: Path, info: Info) -> tuple[str, ...]:
    """Return the instructions in order of task index: as many as ``meta/info.json`` counts, or all
    if it does not. Raises DatasetFormatError unless the indices are 0, 1, 2, ...
    """
    total = info.total_tasks
    if total == 0 or not info.total_episodes:
        return ()
    most_rows = 2**53 if total is None else total + _UNCOMMITTED
    table = read_table(root, root / TASKS, most_rows, ["task_index"], _TASK_COLUMNS)
    named = [name for name in _TASK_COLUMNS if name in table.column_names]
    if not named:
        raise DatasetFormatError(f"{root / TASKS} needs a column {_TASK_COLUMNS[0]}.")
    numbers = table.column("task_index").to_pylist()
    texts = dict(zip(numbers, shared_texts(table.column(named[0])), strict=True))
    total = len(numbers) if total is None else total
    tasks: list[Any] = [texts.get(i) for i in range(min(total, len(texts)))]
    is_sound = len(texts) == len(numbers) and len(tasks) == total
    if not is_sound or not all(isinstance(text, str) for text in tasks):
        raise DatasetFormatError(f"{root / TASKS} does not number its {total} tasks 0, 1, 2, ...")
    return tuple(tasks)


_TASK_COLUMNS = ("task", "__index_level_0__")
_FILE_INDEX = ("chunk_index", "file_index")
_FILM = (*_FILE_INDEX, "from_timestamp")
_META = "meta/episodes"
"""Prefix of the columns that say which file of the index an entry is in."""


@dataclass(frozen=True, eq=False)
class IndexRow:
    """The index entry of an episode, to be written.

    Args:
        length: Number of frames.
        data: Chunk and file of the data rows.
        videos: Camera key -> chunk, file, and index of the first frame in that file.
    """

    tasks: Sequence[str]
    note: Mapping[str, Any]
    stats: Mapping[str, Stats]
    length: int
    data: Sequence[int] | Ints
    videos: Mapping[str, Sequence[int] | Ints]


def index_table(
    rows: Sequence[IndexRow], episode: int, frame: int, number: tuple[int, int], fps: float
) -> Any:
    """Return the parquet table for the index file of a chunk and file number; its first entry is
    the dataset's ``episode``, which begins at its ``frame``.
    """
    length = np.array([row.length for row in rows])
    ends = frame + np.cumsum(length)
    columns: dict[str, Any] = {
        "episode_index": np.arange(episode, episode + len(rows)),
        "tasks": pa.array([list(row.tasks) for row in rows], pa.list_(pa.string())),
        "length": length,
        **_file_columns("data", np.array([row.data for row in rows])),
        "dataset_from_index": ends - length,
        "dataset_to_index": ends,
    }
    for key in rows[0].videos:
        places = np.array([row.videos[key] for row in rows])
        columns |= _file_columns(f"videos/{key}", places)
        columns[f"videos/{key}/from_timestamp"] = places[:, 2] / fps
        columns[f"videos/{key}/to_timestamp"] = (places[:, 2] + length) / fps
    for key, figures in rows[0].stats.items():
        for name in figures:
            values = [row.stats[key][name].tolist() for row in rows]
            columns[f"stats/{key}/{name}"] = pa.array(values)
    columns |= _file_columns(_META, np.tile(number, (len(rows), 1)))
    notes = [json.dumps(dict(row.note)) if row.note else None for row in rows]
    return pa.table({**columns, NOTE: pa.array(notes, pa.string())})


def _file_columns(prefix: str, places: Ints) -> dict[str, Ints]:
    return {f"{prefix}/{name}": places[:, i] for i, name in enumerate(_FILE_INDEX)}


def episode_files(root: Path) -> list[Path]:
    """Return the files of the index in order."""
    return sorted((root / "meta/episodes").glob("chunk-*/file-*.parquet"))


class EpisodeIndex:
    """The entries that ``meta/info.json`` counts, as arrays. In an episode that a camera lacks, its
    place in ``videos`` is -1.

    Raises:
        DatasetFormatError: Entries are missing, out of order, overlap, or do not add up to the
            totals.
    """

    def __init__(self, root: Path, info: Info):
        self._path = f"{root}/{_META}"
        self._table = self._read(root, info)
        self.length = self._numbers("length")
        self.start = self._numbers("dataset_from_index")
        self.data = self._places("data")
        self.videos = {key: self._films(key, info.spec.fps) for key in info.spec.cameras}
        self._check(info)

    def _read(self, root: Path, info: Info) -> Any:
        """The table of the entries that count."""
        names = [
            *("episode_index", "length", "dataset_from_index", "dataset_to_index"),
            *(f"data/{name}" for name in _FILE_INDEX),
        ]
        films = [f"videos/{key}/{name}" for key in info.spec.cameras for name in _FILM]
        n = info.total_episodes
        if not n:
            return pa.table({name: pa.array([], pa.int64()) for name in names})
        optional = ("tasks", NOTE, *(f"{_META}/{name}" for name in _FILE_INDEX), *films)
        tables: list[Any] = []
        left = n
        for path in episode_files(root):
            if left > 0:
                tables.append(read_table(root, path, left, names, optional))
                left -= tables[-1].num_rows
        if left:
            raise DatasetFormatError(
                f"{self._path} lists fewer episodes than the {n} of meta/info.json."
            )
        try:
            whole = pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise DatasetFormatError(
                f"{self._path}: the files of the index differ in their columns' types: {error}."
            ) from None
        return whole.combine_chunks()

    def _numbers(self, name: str) -> Ints:
        column = self._table.column(name)
        if column.null_count:
            raise DatasetFormatError(f"{self._path}: {name} has empty entries.")
        values = column.to_numpy() if is_numeric(column.type) else np.array([-1])
        if not ((values >= 0) & (values <= 2**53)).all():
            raise DatasetFormatError(
                f"{self._path}: {name} must hold finite numbers of at least zero."
            )
        return values.astype(np.int64)

    def _films(self, key: str, fps: float) -> Ints:
        """[episodes, 3] chunk, file, and index of the first frame in that file; -1 where the index
        does not give them, which matters only to those who ask for this film.
        """
        places = np.full((len(self), 3), -1.0)
        for i, name in enumerate(f"videos/{key}/{name}" for name in _FILM):
            if name in self._table.column_names and is_numeric(self._table.column(name).type):
                places[:, i] = self._table.column(name)
        places[~((places >= 0) & (places <= 2**53)).all(axis=1)] = -1
        return np.round(places * [1, 1, fps]).clip(-1).astype(np.int64)

    def film_end(self, key: str, file: tuple[int, int]) -> int:
        """Return how many frames of a film its episodes refer to."""
        mine = (self.videos[key][:, :2] == file).all(axis=1)
        return int((self.videos[key][mine, 2] + self.length[mine]).max())

    def _places(self, prefix: str) -> Ints:
        return np.stack([self._numbers(f"{prefix}/{name}") for name in _FILE_INDEX], axis=1)

    def _check(self, info: Info) -> None:
        n = info.total_episodes
        ends = np.cumsum(self.length)
        if not np.array_equal(self._numbers("episode_index"), np.arange(n)):
            raise DatasetFormatError(f"{self._path} does not number its {n} episodes 0, 1, 2, ...")
        ordered = np.array_equal(self._numbers("dataset_to_index"), ends) and np.array_equal(
            self.start, ends - self.length
        )
        if (self.length < 1).any() or not ordered:
            raise DatasetFormatError(
                f"{self._path}: the episodes' frames do not follow one another from 0."
            )
        if (n_frames := int(self.length.sum())) != info.total_frames:
            raise DatasetFormatError(
                f"{self._path}: the episodes have {n_frames} frames, "
                f"meta/info.json {info.total_frames}."
            )

    def __len__(self) -> int:
        return len(self.length)

    def tasks(self, i: int) -> tuple[str, ...]:
        """Return the instructions of one episode."""
        texts = getattr(self._optional("tasks", i), "values", None)  # of a list
        return () if texts is None else tuple(shared_texts(texts))

    def note(self, i: int) -> Mapping[str, Any]:
        """Return the note of one episode."""
        text = self._optional(NOTE, i).as_py()
        try:
            note = {} if text is None else json.loads(text)
        except (TypeError, ValueError):
            raise DatasetFormatError(
                f"{self._path}: the note of episode {i} is not JSON."
            ) from None
        return note if isinstance(note, dict) else {}

    def _optional(self, name: str, i: int) -> Any:
        return self._table.column(name)[i] if name in self._table.column_names else pa.scalar(None)

    def next_file(self, chunk_size: int) -> int:
        """Return the number of the first unused file, the same for data, videos and index."""
        files = [self.data, *self.videos.values()]
        if {f"{_META}/{name}" for name in _FILE_INDEX} <= set(self._table.column_names):
            files.append(self._places(_META))
        numbers = [(places[:, 0] * chunk_size + places[:, 1]).max(initial=-1) for places in files]
        return int(max(numbers)) + 1


def read_episode_stats(
    root: Path, index: EpisodeIndex, spec: DatasetSpec
) -> list[dict[str, Stats]]:
    """Return the statistics of each episode. Raises DatasetFormatError if an episode lacks them."""
    features = {**spec.columns, **BOOKKEEPING, **spec.cameras}
    shapes = {key: (3, 1, 1) if f.is_video else f.shape for key, f in features.items()}
    columns = {f"stats/{key}/{name}": (key, name) for key in features for name in STATISTICS}
    exact = [column for column, (_, name) in columns.items() if name not in QUANTILES]
    others = [column for column in columns if column not in exact]
    episodes: list[dict[str, Stats]] = []
    for path in episode_files(root):
        table = read_table(root, path, len(index) + _UNCOMMITTED, exact, others)
        for row in table.to_pylist():
            episode: dict[str, Stats] = {key: {} for key in features}
            for column, values in row.items():
                key, name = columns[column]
                shape = (1,) if name == "count" else shapes[key]
                try:
                    figures = np.asarray(values, np.float64).reshape(shape)
                except (TypeError, ValueError):
                    figures = np.full(1, np.nan)
                if not np.isfinite(figures).all():
                    raise DatasetFormatError(
                        f"{path}, {column} must hold {list(shape)} finite numbers."
                    )
                episode[key][name] = figures
            episodes.append(episode)
    return episodes[: len(index)]


def is_numeric(kind: Any) -> bool:
    """Whether an Arrow type is of whole or real numbers."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)
