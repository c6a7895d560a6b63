"""Read LeRobot v3 datasets: episodes by index, whole columns, single frames, and the motion of each
limb. Columns belong to a limb by their names, never by their position.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
from numpy.typing import NDArray

from strands_cosmos3.actions.decode import decode_pose_trajectory
from strands_cosmos3.checks import F64, known_name, typed, whole_number
from strands_cosmos3.datasets.arm_rows import poses_of
from strands_cosmos3.datasets.files import (
    STATS,
    EpisodeIndex,
    file_of,
    is_numeric,
    read_info,
    read_meta,
    read_table,
    read_tasks,
)
from strands_cosmos3.datasets.spec import (
    ACTION,
    BOOKKEEPING,
    EE_POSE,
    GRIPPER,
    POSE_COLUMNS,
    POSE_MEANING,
    STATE,
    STATE_MEANING,
    DatasetSpec,
    Feature,
    limb_prefix,
)
from strands_cosmos3.datasets.stats import Stats, column_stats, to_json
from strands_cosmos3.datasets.video import FrameReader
from strands_cosmos3.embodiments import (
    MODEL_GRIPPER,
    Embodiment,
    GripperConvention,
    get_embodiment,
)
from strands_cosmos3.errors import DatasetFormatError, NonFiniteError
from strands_cosmos3.resources import Closeable, write_json

_CACHED_COLUMNS = 64
_CLIPPED = 2.0  # of the range: a replay clips what is nearer, as it does a server's rows
_SHUT, _HARDLY_OPEN = 0.03, 0.12  # fractions: fingers in metres open to between the two
_CUT_RATE = (
    " If the rate has a fraction, meta/info.json may state its whole part alone, as LeRobot's "
    'converter from v2.1 does; write the rate itself to its "fps".'
)
_LISTS = pa.ListType | pa.LargeListType | pa.FixedSizeListType


class Dataset(Closeable):
    """A dataset, open for reading.

    Data is read and decoded on demand; recently read columns and opened videos are cached. An
    object belongs to one thread. If pickled, it opens its files again in the other process, which
    must be spawned: Arrow's threads do not survive a fork.

    Raises:
        DatasetFormatError: It is not a LeRobot v3 dataset, or its files contradict each other.
    """

    @typed()
    def __init__(self, root: str | Path):
        self.root = Path(root).expanduser()
        self.info = read_info(self.root)
        self.tasks: tuple[str, ...] = read_tasks(self.root, self.info)
        self._index = EpisodeIndex(self.root, self.info)
        self._videos = FrameReader(self.info.spec.fps)
        self._file_column = lru_cache(_CACHED_COLUMNS)(self._read_column)
        first: dict[tuple[int, int], int] = {}
        for data_file, start in zip(
            map(tuple, self._index.data.tolist()), self._index.start.tolist(), strict=True
        ):
            first.setdefault(data_file, start)
        ends = [*first.values(), self.n_frames][1:]  # the frames of each data file: [first, end)
        self._files = dict(zip(first, zip(first.values(), ends, strict=True), strict=True))

    @property
    def spec(self) -> DatasetSpec:
        """Frame rate, features and robot."""
        return self.info.spec

    @property
    def fps(self) -> float:
        """Frames per second."""
        return self.info.spec.fps

    @property
    def n_frames(self) -> int:
        """Number of frames of all episodes."""
        return self.info.total_frames

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of frames of each episode, [episodes]."""
        return self._index.length.copy()

    @property
    def starts(self) -> NDArray[np.int64]:
        """Row of :meth:`column` at which each episode begins, [episodes]."""
        return self._index.start.copy()

    @property
    def stats(self) -> dict[str, Stats]:
        """Statistics by feature from ``meta/stats.json``; empty without one. Raises
        DatasetFormatError if it is malformed.
        """
        if not (self.root / STATS).exists():
            return {}
        raw = read_meta(self.root, STATS)
        try:
            return {
                key: {name: np.asarray(value, np.float64) for name, value in part.items()}
                for key, part in raw.items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise DatasetFormatError(f"{self.root / STATS} is malformed: {error}.") from None

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self._index)

    def __getitem__(self, episode: int) -> RecordedEpisode:
        """Return an episode by index; negative ones count from the end. Raises IndexError if
        there is none.
        """
        i = episode + len(self) if episode < 0 else episode
        if not 0 <= i < len(self):
            raise IndexError(f"episode {episode} of a dataset with {len(self)}")
        return RecordedEpisode(self, i)

    def __iter__(self) -> Iterator[RecordedEpisode]:
        return (self[i] for i in range(len(self)))

    @typed()
    def episodes_without(self, camera: str) -> tuple[int, ...]:
        """Return the episodes that have no film of a camera."""
        return tuple(np.flatnonzero(self._index.videos[camera][:, 0] < 0).tolist())

    def require_films(self, cameras: Iterable[str]) -> None:
        """Raise DatasetFormatError if an episode has no film of one of the cameras."""
        for camera in cameras:
            if lacking := self.episodes_without(camera):
                raise DatasetFormatError(
                    f"episode {lacking[0]} of {self.root} has no film of {camera!r}; leave it out "
                    "with LeRobot (lerobot-edit-dataset, delete_episodes), or name other cameras."
                )

    def require_rate(self) -> None:
        """Raise DatasetFormatError if the times of the first frames contradict the stated rate."""
        _ = self[0]["timestamp"] if len(self) else None

    @typed()
    def column(self, key: str) -> NDArray[Any]:
        """Return a numeric feature of all frames of all episodes: [n_frames, n] ([n_frames] if n is
        1).

        Raises:
            UnknownNameError: No such numeric feature.
            DatasetFormatError, NonFiniteError: The files are damaged, or contain NaN.
        """
        feature = self._numeric(key)
        if not len(self):
            return np.empty((0,) if feature.shape == (1,) else (0, *feature.shape), feature.dtype)
        return np.concatenate([self._file_column(data_file, key) for data_file in self._files])

    def _numeric(self, key: str) -> Feature:
        return self._feature("numeric feature", key, {**self.spec.columns, **BOOKKEEPING})

    def _feature(self, kind: str, key: str, features: Mapping[str, Feature]) -> Feature:
        if key in self.info.foreign:
            raise DatasetFormatError(
                f"feature {key!r} of {self.root} cannot be read: {self.info.foreign[key]}"
            )
        known_name(key, kind, features)
        return features[key]

    def _read_column(self, data_file: tuple[int, int], key: str) -> NDArray[Any]:
        """Return a column of one data file, read-only."""
        feature, (first, end) = self._numeric(key), self._files[data_file]
        path = file_of(self.root, self.info.data_path, data_file)
        expected = self._bookkeeping(np.arange(first, end))
        most_values = (end - first) * (feature.shape[0] + len(expected))
        columns = list(dict.fromkeys((key, *expected)))
        table = read_table(self.root, path, end - first, columns, most_values=most_values)
        if table.num_rows != end - first:
            raise DatasetFormatError(f"{path} does not hold the frames {first} to {end - 1}.")
        for name, (numbers, tolerance) in expected.items():
            stored = _to_numpy(table.column(name), BOOKKEEPING[name], f"{path}, {name}")
            if (differs := np.abs(stored - numbers) > tolerance).any():
                row = int(np.argmax(differs))
                raise DatasetFormatError(
                    f"{path}: {name} of row {row} is {stored[row]:.10g}; by meta/episodes it is "
                    f"{numbers[row]:.10g}." + _CUT_RATE * (name == "timestamp")
                )
        values = _to_numpy(table.column(key), feature, f"{path}, {key}")
        values.setflags(write=False)
        return values

    def _bookkeeping(self, index: NDArray[np.int64]) -> dict[str, tuple[NDArray[Any], Any]]:
        """What the columns of frames must hold by the episode index, and with what tolerance."""
        episode = np.searchsorted(self._index.start, index, side="right") - 1
        row = index - self._index.start[episode]
        # of other programs, steps differ from 1 / fps by up to 0.1 ms
        tolerance_s = 0.5 / self.fps + 1e-4 * row
        return {
            "index": (index, 0),
            "episode_index": (episode, 0),
            "frame_index": (row, 0),
            "timestamp": (row / self.fps, tolerance_s),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self.root,)

    def close(self) -> None:
        """Close the videos. Idempotent; reading opens them again."""
        self._videos.close()


def write_stats(root: Path, stats: Mapping[str, Stats]) -> None:
    """Write ``meta/stats.json``: those of numeric columns computed from all rows, so that their
    quantiles are exact, and of pictures ``stats``.
    """
    exact: dict[str, Stats] = {}
    with Dataset(root) as dataset:
        for key in (*dataset.spec.columns, *BOOKKEEPING) if len(dataset) else ():
            exact[key] = column_stats(dataset.column(key))
    write_json(root / STATS, to_json({**stats, **exact}))


def _to_numpy(column: Any, feature: Feature, name: str) -> NDArray[Any]:
    """Return an Arrow column as [rows, n], or [rows] if n is 1."""
    n_rows = len(column)
    if column.null_count:
        raise DatasetFormatError(f"{name} has empty entries.")
    while isinstance(column.type, pa.BaseExtensionType | _LISTS):
        if isinstance(column.type, pa.BaseExtensionType):
            column = column.cast(column.type.storage_type)
        else:
            sizes = compute.call_function("list_value_length", [column]).to_numpy()
            if n_rows and np.ptp(sizes):  # else values of one row would become another's
                raise DatasetFormatError(
                    f"{name} has rows of {sizes.min()} and of {sizes.max()} values; its feature is "
                    f"{list(feature.shape)}."
                )
            column = compute.call_function("list_flatten", [column])
    holds = is_numeric(column.type) or pa.types.is_boolean(column.type)
    if len(column) != n_rows * feature.shape[0] or not holds:
        raise DatasetFormatError(
            f"{name} has {len(column)} values of type {column.type} in {n_rows} rows; its feature "
            f"is {feature.dtype} {list(feature.shape)}."
        )
    flat = column.to_numpy()
    with np.errstate(invalid="ignore"):  # NaN as a whole number, refused below
        cast = flat.astype(feature.dtype)
    if cast.dtype.kind != "f" and (changed := cast != flat).any():
        raise DatasetFormatError(
            f"{name} holds {flat[np.argmax(changed)]:g}; its feature is {feature.dtype}."
        )
    values = cast.reshape((n_rows,) if feature.shape == (1,) else (n_rows, *feature.shape))
    if not np.isfinite(values).all():
        raise NonFiniteError(
            f"{name} contains NaN or infinity in row "
            f"{int(np.argwhere(~np.isfinite(values))[0][0])}."
        )
    return values


@dataclass(frozen=True, eq=False)
class RecordedEpisode:
    """One episode of an open dataset."""

    dataset: Dataset
    index: int

    def __len__(self) -> int:
        """Return the number of frames."""
        return int(self.dataset._index.length[self.index])

    @property
    def tasks(self) -> tuple[str, ...]:
        """Instructions in the episode index."""
        return self.dataset._index.tasks(self.index)

    @property
    def task(self) -> str:
        """Instruction of the first frame. Raises DatasetFormatError if its task index has no
        instruction.
        """
        return self.task_at(0)

    def task_at(self, row: int) -> str:
        """Return the instruction of a frame; errors as :attr:`task`."""
        number = int(self["task_index"][row])
        if not 0 <= number < len(self.dataset.tasks):
            raise DatasetFormatError(
                f"episode {self.index} refers to task {number} of {len(self.dataset.tasks)}."
            )
        return self.dataset.tasks[number]

    @property
    def note(self) -> Mapping[str, Any]:
        """The writer's note, e.g. seed and outcome; empty in datasets of other programs."""
        return self.dataset._index.note(self.index)

    def __getitem__(self, key: str) -> NDArray[Any]:
        """Return a numeric feature, [N, n] ([N] if n is 1), read-only.

        Raises:
            UnknownNameError: No such numeric feature.
            DatasetFormatError, NonFiniteError: The file is damaged, or contains NaN.
        """
        dataset = self.dataset
        index = self.dataset._index
        chunk, file = index.data[self.index].tolist()
        data_file = (chunk, file)
        first = int(index.start[self.index]) - dataset._files[data_file][0]
        return dataset._file_column(data_file, key)[first : first + len(self)]

    @typed()
    def frames(self, camera: str, rows: Sequence[int] | slice | None = None) -> NDArray[np.uint8]:
        """Return pictures [n, H, W, 3] uint8 of a camera, given its feature key; ``rows`` None
        means all.

        Decoding starts at the key frame before each row.

        Raises:
            UnknownNameError: No such camera.
            InputError: A frame is outside the episode.
            DatasetFormatError: The video is damaged, or the episode has none of this camera.
        """
        dataset = self.dataset
        n = len(self)
        shape = dataset._feature("camera", camera, dataset.spec.cameras).shape
        rows = slice(None) if rows is None else rows
        numbers = [
            whole_number(row, "row", 0, n - 1)
            for row in (range(n)[rows] if isinstance(rows, slice) else rows)
        ]
        index = dataset._index
        chunk, file, first = index.videos[camera][self.index].tolist()
        if chunk < 0:
            raise DatasetFormatError(
                f"episode {self.index} of {dataset.root} has no film of {camera!r}."
            )
        path = file_of(dataset.root, dataset.info.video_path, (chunk, file), camera)
        dataset.require_rate()
        n_frames = index.film_end(camera, (chunk, file))
        return dataset._videos.read(path, first, numbers, shape, n_frames)

    @typed()
    def frame(self, row: int, keys: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
        """Return the given features of one frame, or all; pictures are [H, W, 3].

        Raises:
            InputError: No such row, or no such feature.
            DatasetFormatError: A file is damaged.
        """
        row = whole_number(row, "row", 0, len(self) - 1)
        cameras = self.dataset.spec.cameras
        return {
            key: self.frames(key, [row])[0] if key in cameras else np.asarray(self[key][row])
            for key in (self.dataset.spec.features if keys is None else keys)
        }


@dataclass(frozen=True, eq=False)
class RecordedLimb:
    """The motion of one limb in an episode of N frames.

    Args:
        q_rad: [N, n] measured joint angles.
        gripper: [N] measured open fractions.
        T_base_cosmos: [N, 4, 4] measured poses of the Cosmos frame in the limb's base.
        T_base_commanded: [N + 1, 4, 4] commanded poses of it: the first frame's, and where each row
            leads.
        gripper_commanded: [N] open fractions that the rows command.
    """

    q_rad: F64
    gripper: F64
    T_base_cosmos: F64
    T_base_commanded: F64
    gripper_commanded: F64


def action_info(dataset: Dataset) -> Mapping[str, Any]:
    """Return what a dataset says of its actions; nothing without such a feature."""
    feature = dataset.spec.features.get(ACTION)
    return {} if feature is None else feature.info


def embodiment_of(episode: RecordedEpisode) -> Embodiment:
    """Return the embodiment whose rows an episode records.

    Raises:
        DatasetFormatError: The dataset does not state it, or has other columns.
    """
    root = episode.dataset.root
    name = action_info(episode.dataset).get("embodiment")
    if not isinstance(name, str):
        raise DatasetFormatError(
            f"{root} does not state the embodiment of its {ACTION!r}; record it with rollout "
            "--dataset."
        )
    embodiment = get_embodiment(name)
    columns = embodiment.action_space("midtrain").columns
    if column_names(episode.dataset, ACTION) != columns or not embodiment.limbs:
        raise DatasetFormatError(
            f"the columns of {ACTION!r} in {root} are not those of {name!r}: {', '.join(columns)}."
        )
    return embodiment


@typed()
def recorded_limbs(episode: RecordedEpisode) -> dict[str, RecordedLimb]:
    """Return the motion of each limb, by the limb's name, in the order of the embodiment's columns.

    Raises:
        DatasetFormatError: A limb's columns are missing, or the dataset does not state its
            embodiment.
    """
    limbs = [limb for limb in embodiment_of(episode).limbs if limb.gripper is not None]
    limb_names = [limb.name for limb in limbs]
    rows = episode[ACTION].astype(np.float64)
    recorded: dict[str, RecordedLimb] = {}
    for limb in limbs:
        prefix = limb_prefix(limb.name, limb_names)
        names = column_names(episode.dataset, STATE)
        n = sum(name.startswith(f"{prefix}joint_") for name in names)
        joints = [f"{prefix}joint_{i}" for i in range(n)]
        state = named_columns(episode, STATE, [*joints, prefix + GRIPPER])
        require_meaning(episode.dataset, STATE, STATE_MEANING)
        T = poses_of(named_columns(episode, EE_POSE, [prefix + name for name in POSE_COLUMNS]))
        require_meaning(episode.dataset, EE_POSE, POSE_MEANING)
        assert limb.gripper is not None
        for key, values, unit in (
            (STATE, state[:, -1], MODEL_GRIPPER),
            (ACTION, rows[:, limb.gripper_column], limb.gripper),
        ):
            require_openings(values, unit, f"the gripper of {key!r}", whole=False)
        recorded[limb.name] = RecordedLimb(
            state[:, :-1],
            state[:, -1],
            T,
            decode_pose_trajectory(rows[:, limb.pose], T[0]),
            limb.gripper.to_fraction(rows[:, limb.gripper_column]),
        )
    return recorded


def column_names(dataset: Dataset, key: str, unnamed: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of a feature's columns: ``unnamed`` if it has as many and no names. Return
    nothing without usable names.
    """
    feature = dataset.spec.columns.get(key)
    if feature is None or key in dataset.info.misnamed:
        return ()
    return feature.names or (tuple(unnamed) if feature.shape == (len(unnamed),) else ())


def require_meaning(dataset: Dataset, key: str, needed: Mapping[str, Any]) -> None:
    """Raise DatasetFormatError if a feature's info states other than what is needed; it need not
    state it.
    """
    info = dataset.spec.features[key].info
    for name, value in needed.items():
        if (stated := info.get(name, value)) != value:
            raise DatasetFormatError(
                f"{key!r} of {dataset.root} has the {name} {stated!r} by its info in "
                f"meta/info.json; {value!r} is needed. Convert the numbers, then state {value!r}."
            )


def require_openings(values: F64, gripper: GripperConvention, name: str, whole: bool) -> None:
    """Raise DatasetFormatError if values of a gripper are of another unit: they lie far outside its
    range; or it opens and closes in a small part of it, as fingers in metres do. Unless they are a
    ``whole`` dataset's, values up to twice the range, and small ones, are only warned of.
    """
    said = (
        f"{name} is from {values.min(initial=np.inf):.4g} to {values.max(initial=-np.inf):.4g}; a "
        f"gripper is from {gripper.closed_value:g} (closed) to {gripper.open_value:g} (open). "
        "Convert the column to that unit"
    )
    if gripper.outlier(values) is not None:
        most = _CLIPPED * max(abs(gripper.open_value), abs(gripper.closed_value))
        if whole or np.abs(values).max() > most:
            raise DatasetFormatError(f"{said}.")
        warnings.warn(f"{said}.", stacklevel=3)
    opening = gripper.to_fraction(values)
    widest = opening.max(initial=0.0)
    if _SHUT < widest < _HARDLY_OPEN:
        said += f": it opens by less than {_HARDLY_OPEN:.0%}, as widths in metres do."
        if whole and opening.min() < widest / 2:
            raise DatasetFormatError(said)
        warnings.warn(said, stacklevel=3)


def named_columns(
    episode: RecordedEpisode, key: str, columns: Sequence[str], unnamed: Sequence[str] = ()
) -> F64:
    """Return the named columns of a feature, [N, len(columns)]; ``unnamed``: as in
    :func:`column_names`. Raises DatasetFormatError if one is missing.
    """
    names = column_names(episode.dataset, key, unnamed)
    if missing := [name for name in columns if name not in names]:
        raise DatasetFormatError(
            f"{key!r} of {episode.dataset.root} has no column {', '.join(missing)}; it has "
            f"{', '.join(names) or 'no names that fit'}. Name its columns in meta/info.json."
        )
    return episode[key].astype(np.float64)[:, [names.index(name) for name in columns]]
