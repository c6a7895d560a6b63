"""Reading: at random, only what is asked, and whatever a hostile or damaged dataset may say."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import stat
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.films import write_film
from helpers.small_episodes import columns, fill, pictures, spec, which
from strands_cosmos3.datasets import (
    ACTION,
    STATE,
    Dataset,
    DatasetWriter,
    Feature,
    files,
    merge_datasets,
    video,
)
from strands_cosmos3.errors import (
    DatasetFormatError,
    DatasetMismatchError,
    InputError,
    NonFiniteError,
    UnknownNameError,
)

_originals: dict[Any, Path] = {}


@pytest.fixture
def write(write: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The writer's datasets, each written once and copied for every test that damages it."""

    def copied(lengths: list[int], name: str = "set", first: int = 0, **options: Any) -> Path:
        key = (tuple(lengths), first, tuple(sorted(options.items())))
        if key not in _originals:
            kept = tmp_path_factory.mktemp("written") / "set"
            _originals[key] = shutil.move(write(lengths, "original", first, **options), kept)
        return shutil.copytree(_originals[key], tmp_path / name)

    return copied


WRIST, EXTERIOR = "observation.images.wrist", "observation.images.exterior_1"


def test_columns_and_pictures_come_back(write):
    with Dataset(write([40, 5, 33], commit_every=2)) as dataset:
        assert len(dataset) == 3
        assert (dataset.fps, dataset.n_frames, dataset.tasks[1]) == (15, 78, "pick up cube 1")
        assert dataset.lengths.tolist() == [40, 5, 33]
        assert dataset.starts.tolist() == [0, 40, 45]
        for k, episode in enumerate(dataset):
            assert len(episode) == [40, 5, 33][k]
            np.testing.assert_array_equal(
                episode[ACTION], columns(len(episode), k)[ACTION].astype(np.float32)
            )
            assert episode["next.done"].dtype == bool
            assert episode.task == f"pick up cube {k}"
            for key, truth in pictures(k, len(episode)).items():
                assert np.abs(episode.frames(key).astype(int) - truth).mean() < 3
            assert which(episode.frames(WRIST), k, len(episode)) == list(range(len(episode)))
        whole = dataset.column(STATE)
        np.testing.assert_array_equal(whole[45:], dataset[-1][STATE])
        assert dataset.stats[ACTION]["q99"].shape == (10,)


def test_frames_at_random_are_the_very_frames(write):
    with Dataset(write([40, 5, 90], commit_every=3)) as dataset:
        episode = dataset[2]
        whole = episode.frames(WRIST)
        for rows in ([0], [89], [17, 3, 17], [88, 0, 41], range(10, 20), [15], [14], [16]):
            np.testing.assert_array_equal(episode.frames(WRIST, list(rows)), whole[list(rows)])
        np.testing.assert_array_equal(episode.frames(WRIST, slice(2, 9, 3)), whole[2:9:3])
        assert episode.frames(WRIST, []).shape == (0, 48, 64, 3)
        frame = episode.frame(7)
        np.testing.assert_array_equal(frame[WRIST], whole[7])
        assert set(frame) == set(dataset.spec.features)
        assert set(episode.frame(7, [ACTION])) == {ACTION}


def test_only_what_is_asked_is_decoded(write, monkeypatch: pytest.MonkeyPatch):
    with Dataset(write([90])) as dataset:
        decoded = 0
        real = video.FrameReader._decode

        def count(self: Any, container: Any, stream: Any, first: int, run: list[int]) -> Any:
            class Counted:
                seek = container.seek

                @staticmethod
                def decode(stream: Any) -> Any:
                    nonlocal decoded
                    for frame in container.decode(stream):
                        decoded += 1
                        yield frame

            return real(self, Counted(), stream, first, run)

        monkeypatch.setattr(video.FrameReader, "_decode", count)
        dataset[0].frames(WRIST, [47])
        assert decoded == 47 - 45 + 1  # from the key frame before it, and not one more
        decoded = 0
        _ = dataset[0][ACTION]
        assert decoded == 0


def test_wrong_questions_are_named(write):
    with Dataset(write([4])) as dataset:
        with pytest.raises(IndexError, match="episode 1 of a dataset with 1"):
            dataset[1]
        with pytest.raises(UnknownNameError, match=STATE):
            dataset[0]["state"]
        with pytest.raises(UnknownNameError, match=WRIST):
            dataset[0].frames("wrist")
        for row in (4, -1, 1.5):
            with pytest.raises(InputError):
                dataset[0].frames(WRIST, [row])  # type: ignore[list-item]
        assert not dataset[0][ACTION].flags.writeable


def test_it_goes_into_another_process(write):
    dataset = Dataset(write([20, 5]))
    first = dataset[0].frames(WRIST, [3])
    again = pickle.loads(pickle.dumps(dataset))
    np.testing.assert_array_equal(again[0].frames(WRIST, [3]), first)
    dataset.close()
    again.close()


def change(root: Path, **values: Any) -> None:
    path = root / "meta/info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def rewrite(path: Path, change_table: Any) -> None:
    pq.write_table(change_table(pq.read_table(path)), path)


def replaced(name: str, value: Any) -> Any:
    def act(table: pa.Table) -> pa.Table:
        at = table.column_names.index(name)
        return table.set_column(
            at, name, pa.array(value if isinstance(value, list) else [value] * table.num_rows)
        )

    return act


@pytest.mark.parametrize(
    "template",
    [
        "../{file_index}.parquet",
        "/nowhere/secret",
        "data/../../{chunk_index}",
        "{chunk_index.__class__}",
        "{0}",
        "{other}",
        "{chunk_index",
        "data\\..\\x",
        "{file_index:099999999d}",
        "{video_key:>99999999}",
        "data/{chunk_index:{file_index}d}",
        17,
    ],
)
@pytest.mark.parametrize("name", ["data_path", "video_path"])
def test_paths_that_lead_elsewhere_are_refused(write, name: str, template: Any):
    root = write([3])
    change(root, **{name: template})
    with pytest.raises(DatasetFormatError, match=r"info\.json"):
        Dataset(root)


def test_links_that_lead_elsewhere_are_not_followed(write, tmp_path: Path):
    root = write([3])
    (tmp_path / "elsewhere").mkdir()
    rows = root / "data/chunk-000/file-000.parquet"
    shutil.move(rows, tmp_path / "elsewhere/rows.parquet")
    rows.symlink_to(tmp_path / "elsewhere/rows.parquet")
    with pytest.raises(DatasetFormatError, match="outside the dataset"), Dataset(root) as dataset:
        _ = dataset[0][ACTION]


@pytest.mark.parametrize(
    "values",
    [
        {"codebase_version": "v2.1"},
        {"fps": 0},
        {"fps": float("nan")},
        {"fps": "15"},
        {"total_episodes": 3},
        {"total_episodes": -1},
        {"total_episodes": True},
        {"total_frames": 10**12},
        {"total_tasks": 9},
        {"features": []},
        {"features": {}},
        {"features": {"a": {"dtype": "float32", "shape": [10**12]}}},
        {"features": {"a": {"dtype": "float32", "shape": "x"}}},
        {"features": {"a": 3}},
        {"features": {"../../x": {"dtype": "video", "shape": [48, 64, 3]}}},
        {"total_episodes": None},
        {"total_frames": None},
    ],
    ids=str,
)
def test_an_impossible_info_is_a_format_error(write, values: dict):
    root = write([3, 4], commit_every=2)
    change(root, **values)
    with pytest.raises(DatasetFormatError):
        Dataset(root)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "nul", '{"a":' * 100_000], ids=["empty", "list", "cut", "word", "deep"]
)
def test_an_info_that_is_no_object_is_a_format_error(write, text: str):
    root = write([3])
    (root / "meta/info.json").write_text(text)
    with pytest.raises(DatasetFormatError):
        Dataset(root)


INDEX, ROWS = "meta/episodes/chunk-000/file-000.parquet", "data/chunk-000/file-000.parquet"


SHIFTED = {  # of two episodes with 3 and 4 frames in one file
    "an episode's last frame in the next": ("episode_index", [0, 0, 1, 1, 1, 1, 1], 2),
    "another file's episodes": ("episode_index", [2, 2, 2, 3, 3, 3, 3], 0),
    "episodes exchanged": ("episode_index", [1, 1, 1, 0, 0, 0, 0], 0),
    "times that go on": ("timestamp", [0, 1, 2, 3, 4, 5, 6], 3),
    "a frame later": ("timestamp", [1, 2, 3, 1, 2, 3, 4], 0),
    "times of half the rate": ("timestamp", [0, 2, 4, 0, 2, 4, 6], 1),
    "times in frames of another file": ("timestamp", [0, 1, 2, 900, 901, 902, 903], 3),
}


@pytest.mark.parametrize("name", SHIFTED)
@pytest.mark.parametrize("key", [ACTION, "episode_index"])
def test_rows_of_other_frames_than_the_index_says_are_refused(write, name: str, key: str):
    column, values, row = SHIFTED[name]
    root = write([3, 4], commit_every=2)
    stated = np.array([0, 0, 0, 1, 1, 1, 1] if column == "episode_index" else [0, 1, 2, 0, 1, 2, 3])
    unit = 1.0 if column == "episode_index" else 1 / Dataset(root).fps
    rewrite(root / ROWS, replaced(column, [value * unit for value in values]))
    says = rf"{ROWS}: {column} of row {row} is (\S+); by meta/episodes it is (\S+)\.(?: |$)"
    with pytest.raises(DatasetFormatError, match=says) as refusal:
        _ = Dataset(root)[1][key]
    shown = re.search(says, str(refusal.value))
    assert shown is not None
    assert [float(number) for number in shown.groups()] == pytest.approx(
        [values[row] * unit, stated[row] * unit], rel=1e-6
    )


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("task_index", [0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0]),
        ("frame_index", [0.0, 1.25, 2.0, 0.0, 1.0, 2.0, 3.0]),
        ("task_index", [float("nan")] * 7),
        ("next.done", [0, 0, 2, 0, 0, 0, 1]),
    ],
)
def test_values_that_a_feature_cannot_hold_are_refused(write, column: str, values: list[Any]):
    """They were cut to whole numbers."""
    root = write([3, 4], commit_every=2)
    rewrite(root / ROWS, replaced(column, values))
    with pytest.raises(DatasetFormatError, match=f"{column} holds .*; its feature is "):
        _ = Dataset(root)[1][column]


@pytest.mark.parametrize("sizes", [(1, -1, 0), (0, 2, -2), (-1, -1, 2)])
@pytest.mark.parametrize("key", [ACTION, STATE])
def test_rows_of_other_widths_are_refused(write, key: str, sizes: tuple[int, ...]):
    """As many values as the feature has went to the rows that they were not of."""
    root = write([3])
    rows = pq.read_table(root / ROWS)[key].to_pylist()
    ragged = [(row * 2)[: len(row) + more] for row, more in zip(rows, sizes, strict=True)]
    rewrite(root / ROWS, replaced(key, ragged))
    with pytest.raises(DatasetFormatError, match=f"{key} has rows of .* and of .* values"):
        Dataset(root).column(key)


@pytest.mark.parametrize(
    "value", [{"a": 1.0}, Decimal("1.5"), datetime(2026, 1, 1)], ids=["struct", "decimal", "time"]
)
def test_values_that_are_no_numbers_are_named_by_their_type(write, value: Any):
    root = write([3])
    rewrite(root / ROWS, replaced("next.done", value))
    with pytest.raises(
        DatasetFormatError, match=r"next\.done has 3 values of type (struct|dec|time)"
    ):
        Dataset(root).column("next.done")


def test_whole_numbers_may_be_stored_as_floats(write):
    root = write([3, 4], commit_every=2)
    rewrite(root / ROWS, replaced("episode_index", [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]))
    assert Dataset(root)[1]["episode_index"].tolist() == [1] * 4


@pytest.mark.parametrize(
    "times_s",
    [
        lambda rows, fps: np.cumsum(np.full(7, np.float32(1 / fps)))[rows] - 1 / fps,
        lambda rows, fps: np.round(rows / fps, 3),
        lambda rows, fps: rows / (fps * 0.999),
        lambda rows, fps: rows / fps + 0.3 / fps * (-1.0) ** rows,
        lambda rows, fps: (rows / fps).astype(np.float64),
    ],
)
def test_times_of_real_files_are_read(write, times_s):
    root = write([3, 4], commit_every=2)
    rows = np.array([0, 1, 2, 0, 1, 2, 3])
    rewrite(root / ROWS, replaced("timestamp", list(times_s(rows, Dataset(root).fps))))
    assert len(Dataset(root)[1][ACTION]) == 4


@pytest.mark.parametrize(("off_ms", "fits"), [(0.09, True), (-0.09, True), (0.3, False)])
def test_steps_may_differ_by_a_tenth_of_a_millisecond(write, off_ms: float, fits: bool):
    """After 400 of them the times are a frame's half away."""
    root = write([400])
    times_s = np.arange(400) * (1 / Dataset(root).fps + 1e-3 * off_ms)
    rewrite(root / ROWS, replaced("timestamp", list(times_s)))
    if fits:
        assert len(Dataset(root)[0][ACTION]) == 400
    else:
        with pytest.raises(DatasetFormatError, match="timestamp of row "):
            Dataset(root)[0][ACTION]


@pytest.mark.parametrize(
    ("file", "act"),
    [
        (INDEX, replaced("length", [3, 5])),
        (INDEX, replaced("length", [-3, 10])),
        (INDEX, replaced("episode_index", [1, 0])),
        (INDEX, replaced("dataset_from_index", [0, 0])),
        (INDEX, replaced("data/file_index", -1)),
        (INDEX, replaced("data/file_index", 7)),
        (INDEX, replaced("data/file_index", [0, None])),
        (INDEX, replaced("length", ["a", "b"])),
        (INDEX, replaced(f"videos/{WRIST}/from_timestamp", [0.0, float("nan")])),
        (INDEX, replaced(f"videos/{WRIST}/from_timestamp", [0.0, 1e30])),
        (INDEX, replaced(f"videos/{WRIST}/from_timestamp", [0.0, 3.0])),
        (INDEX, replaced(f"videos/{WRIST}/file_index", [0, 3])),
        (INDEX, lambda table: table.drop_columns(["length"])),
        (INDEX, lambda table: table.slice(0, 1)),
        (ROWS, lambda table: table.slice(0, 5)),
        (ROWS, lambda table: table.slice(1)),
        (ROWS, lambda table: table.drop_columns(["action"])),
        (ROWS, replaced("action", [[0.0] * 9] * 7)),
        (ROWS, replaced("action", ["x"] * 7)),
        (ROWS, replaced("action", [None] * 7)),
        (ROWS, replaced("index", [0, 1, 2, 9, 4, 5, 6])),
        (ROWS, replaced("task_index", 99)),
    ],
)
def test_files_that_contradict_each_other_are_format_errors(write, file: str, act: Any):
    root = write([3, 4], commit_every=2)
    rewrite(root / file, act)
    with pytest.raises(DatasetFormatError), Dataset(root) as dataset:
        _ = dataset[1][ACTION], dataset[1].task, dataset[1].frames(WRIST)


@pytest.mark.parametrize(
    "file",
    [
        INDEX,
        ROWS,
        "meta/tasks.parquet",
        f"videos/{WRIST}/chunk-000/file-000.mp4",
        "meta/stats.json",
    ],
)
@pytest.mark.parametrize("how", ["cut", "noise", "empty", "gone"])
def test_damaged_files_are_format_errors(write, file: str, how: str):
    root = write([3, 4], commit_every=2)
    path = root / file
    whole = path.read_bytes()
    noise = np.random.default_rng(0).integers(0, 256, len(whole), dtype=np.uint8).tobytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": whole[: len(whole) // 2], "noise": noise, "empty": b""}[how])
    if (file, how) == ("meta/stats.json", "gone"):
        assert Dataset(root).stats == {}
        return
    with pytest.raises(DatasetFormatError), Dataset(root) as dataset:
        _ = dataset[1][ACTION], dataset[1].task, dataset.stats, dataset[1].frames(WRIST)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("task_index", [None, 1]),
        ("task_index", ["a", "b"]),
        ("task_index", [0.5, None]),
        ("task", [None, None]),
        ("task", [1, 2]),
    ],
)
def test_tasks_of_other_types_are_refused(write, column: str, values: list[Any]):
    root = write([3, 4])
    rewrite(root / "meta/tasks.parquet", replaced(column, values))
    with pytest.raises(DatasetFormatError, match="does not number its 2 tasks"):
        Dataset(root)


@pytest.mark.parametrize("column", ["length", f"videos/{WRIST}/from_timestamp", "tasks"])
def test_index_files_that_cannot_be_joined_are_refused(write, column: str):
    root = write([3, 4], commit_every=1)
    rewrite(root / INDEX, replaced(column, [{"a": 1}]))
    with pytest.raises(DatasetFormatError, match="files of the index differ"):
        Dataset(root)


def test_nan_in_a_file_is_refused(write):
    root = write([3])
    rewrite(root / ROWS, replaced("action", [[0.0] * 9 + [float("nan")]] * 3))
    with Dataset(root) as dataset, pytest.raises(NonFiniteError, match="action"):
        dataset[0][ACTION]


def test_an_empty_dataset_can_be_opened(write):
    with Dataset(write([])) as dataset:
        assert len(dataset) == 0
        assert list(dataset) == []
        assert dataset.column(ACTION).shape == (0, 10)


def test_what_is_no_dataset_says_so(tmp_path: Path):
    with pytest.raises(DatasetFormatError, match="LeRobot v3"):
        Dataset(tmp_path)


FOREIGN = {
    "half": {"dtype": "float16", "shape": [2]},
    "sound": {"dtype": "audio", "shape": [1]},
    "cube": {"dtype": "float32", "shape": [2, 2, 2]},
    "observation.images.depth": {"dtype": "video", "shape": [48, 64, 1]},
    "a key": {"dtype": "int64", "shape": [1]},
    "pose": {"dtype": "float32", "shape": [3], "names": ["x", "y", "x"]},
    "nothing": None,
}


@pytest.mark.parametrize("key", FOREIGN)
def test_a_feature_of_another_program_is_refused_only_when_asked_for(write, key: str, tmp_path):
    root = write([3])
    features = json.loads((root / "meta/info.json").read_text())["features"]
    change(root, features={**features, key: FOREIGN[key]})
    with Dataset(root) as dataset:
        assert dataset[0].frame(2).keys() == spec().features.keys()
        for ask in (dataset.column, dataset[0].frames, dataset[0].__getitem__):
            with pytest.raises(DatasetFormatError, match=f"{key!r} of .* cannot be read: "):
                ask(key)
    with pytest.raises(DatasetMismatchError, match=key):
        DatasetWriter(root, spec())
    with pytest.raises(DatasetMismatchError, match=key):
        merge_datasets([root], tmp_path / "merged")


@pytest.mark.parametrize("fps", [23.976, 7.5, 59.94])
def test_a_rate_may_have_a_fraction(write, fps: float):
    root = write([20, 9], commit_every=2)
    for key in (WRIST, EXTERIOR):
        encoder = video.CameraWriter(spec().features[key], fps, video.VideoConfig())
        for frame in [*pictures(0, 20)[key], *pictures(1, 9)[key]]:
            encoder.add(frame)
        (root / f"videos/{key}/chunk-000/file-000.mp4").write_bytes(encoder.finish()[0])
        rewrite(root / INDEX, replaced(f"videos/{key}/from_timestamp", [0.0, 20 / fps]))
    change(root, fps=fps)
    rows = np.concatenate([np.arange(20), np.arange(9)])
    rewrite(root / ROWS, replaced("timestamp", list(np.float32(rows / fps))))
    for path in (root, root.parent / "merged"):
        with Dataset(path) if path == root else merge_datasets([root], path) as dataset:
            assert dataset.fps == fps
            for k, episode in enumerate(dataset):
                assert which(episode.frames(WRIST), k, len(episode)) == list(range(len(episode)))
    with pytest.raises(InputError, match="whole number"):
        DatasetWriter(root, dataset.spec)


def longer(table: pa.Table) -> pa.Table:
    return table.take([0] * 20_000)


@pytest.mark.parametrize(
    ("file", "act", "message"),
    [
        (ROWS, longer, "20000 rows"),
        (INDEX, longer, "20000 rows"),
        ("meta/tasks.parquet", longer, "20000 rows"),
        (ROWS, replaced("action", [[0.0] * 30_000] * 3), "more than the 42 values"),
        (ROWS, replaced("action", [[[0.0] * 100] * 300] * 3), "more than the 42 values"),
    ],
)
def test_nothing_is_read_of_a_file_with_more_than_the_dataset_counts(
    write, file: str, act: Any, message: str, monkeypatch: pytest.MonkeyPatch
):
    root, read = write([3]), pq.ParquetFile.read
    rewrite(root / file, act)

    def small(self: Any, *columns: Any) -> Any:
        assert self.metadata.num_rows < 10
        return read(self, *columns)

    monkeypatch.setattr(pq.ParquetFile, "read", small)
    with pytest.raises(DatasetFormatError, match=message), Dataset(root) as dataset:
        _ = dataset[0][ACTION]


@pytest.mark.parametrize(
    "script",
    [
        "ffconcat version 1.0\nfile '{film}'\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:1,\n{film}\n#EXT-X-ENDLIST\n",
        "<SAMI><BODY><SYNC Start=0>{film}</SAMI>",
    ],
    ids=["ffconcat", "playlist", "subtitles"],
)
def test_a_film_is_opened_as_mp4_and_as_nothing_else(write, tmp_path: Path, script: str):
    root = write([3])
    film = root / f"videos/{WRIST}/chunk-000/file-000.mp4"
    shutil.move(film, tmp_path / "film.mp4")
    (film.parent / "link.mp4").symlink_to(tmp_path / "film.mp4")
    film.write_text(script.format(film="link.mp4"))
    with Dataset(root) as dataset, pytest.raises(DatasetFormatError, match="as a video"):
        dataset[0].frames(WRIST)


@pytest.mark.parametrize(
    "file",
    [
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        "meta/episodes",
        "meta/episodes/chunk-000",
        INDEX,
        "meta",
    ],
)
def test_links_of_the_index_that_lead_elsewhere_are_not_followed(write, tmp_path: Path, file: str):
    root = write([3])
    shutil.move(root / file, tmp_path / "elsewhere")
    (root / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DatasetFormatError, match="outside the dataset"), Dataset(root) as dataset:
        _ = dataset.stats


@pytest.mark.parametrize(
    "file", [INDEX, ROWS, "meta/tasks.parquet", f"videos/{WRIST}/chunk-000/file-000.mp4"]
)
def test_what_is_no_ordinary_file_is_not_opened(write, file: str):
    root = write([3])
    (root / file).unlink()
    os.mknod(root / file, stat.S_IFSOCK | 0o600)
    with pytest.raises(DatasetFormatError, match="ordinary file"), Dataset(root) as dataset:
        _ = dataset[0][ACTION], dataset[0].frames(WRIST)


@pytest.mark.parametrize(
    "file",
    [
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        INDEX,
        ROWS,
        f"videos/{WRIST}/chunk-000/file-000.mp4",
    ],
)
def test_a_git_lfs_pointer_is_named(write, file: str):
    root = write([3])
    (root / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with (
        pytest.raises(DatasetFormatError, match=rf"{file} is a Git LFS pointer.*git lfs pull"),
        Dataset(root) as dataset,
    ):
        _ = dataset.stats, dataset[0][ACTION], dataset[0].frames(WRIST)


@pytest.mark.parametrize("version", ["v2.1", "v2.0", None])
def test_an_older_dataset_is_told_how_to_convert(write, version: str | None):
    root = write([3])
    change(root, codebase_version=version)
    command = f"convert_dataset_v21_to_v30 --repo-id=local/set --root={root} --push-to-hub=false"
    with pytest.raises(DatasetFormatError, match=command):
        Dataset(root)


@pytest.mark.parametrize("version", ["v3.1", "v4.0", "v30.0", "v10.0", "v3.10", "tables"])
def test_a_newer_dataset_is_not_told_to_convert(write, version: str):
    root = write([3])
    change(root, codebase_version=version)
    with pytest.raises(DatasetFormatError, match=r"only v3\.0 is read\.$"):
        Dataset(root)


@pytest.mark.parametrize("version", ["3.0", "v3.0.0", "V3.0", 3.0])
def test_a_version_is_a_number_and_no_text(write, version: Any):
    root = write([3])
    change(root, codebase_version=version)
    assert len(Dataset(root)) == 1


@pytest.mark.parametrize("how", ["gone", "null"])
def test_tasks_are_counted_if_their_number_is_not_stated(write, how: str):
    root = write([3, 4])
    info = json.loads((root / "meta/info.json").read_text())
    info["total_tasks"] = None
    if how == "gone":
        del info["total_tasks"]
    (root / "meta/info.json").write_text(json.dumps(info))
    with Dataset(root) as dataset:
        assert [episode.task for episode in dataset] == ["pick up cube 0", "pick up cube 1"]
    with DatasetWriter(root, spec()) as writer:
        fill(writer, [5], first=2)
    with Dataset(root) as dataset:
        assert dataset[2].task == "pick up cube 2"


def without_columns(prefix: str) -> Any:
    def act(table: pa.Table) -> pa.Table:
        return table.drop_columns([name for name in table.column_names if name.startswith(prefix)])

    return act


FILM = f"videos/{WRIST}/"
ABSENT = {
    "no file": replaced(f"{FILM}file_index", [0, None, 0]),
    "a time before the film": replaced(f"{FILM}from_timestamp", [0.0, -1.0, 0.6]),
    "an endless time": replaced(f"{FILM}from_timestamp", [0.0, float("inf"), 0.6]),
    "no time": replaced(f"{FILM}from_timestamp", [0.0, None, 0.6]),
}


@pytest.mark.parametrize("name", ABSENT)
def test_a_camera_that_an_episode_lacks_is_missed_there_alone(write, tmp_path: Path, name: str):
    root = write([3, 4, 5], commit_every=3)
    rewrite(root / INDEX, ABSENT[name])
    with Dataset(root) as dataset:
        assert dataset.column(ACTION).shape == (12, 10)
        assert (dataset.episodes_without(WRIST), dataset.episodes_without(EXTERIOR)) == ((1,), ())
        assert which(dataset[1].frames(EXTERIOR), 1, 4, view=1) == list(range(4))
        assert which(dataset[0].frames(WRIST), 0, 3) == list(range(3))
        with pytest.raises(DatasetFormatError, match=f"episode 1 of .* no film of {WRIST!r}"):
            dataset[1].frames(WRIST)
    with pytest.raises(DatasetFormatError, match=f"episode 1 of .* no film of {WRIST!r}"):
        merge_datasets([root], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    "act",
    [
        without_columns(FILM),
        without_columns(f"{FILM}from"),
        replaced(f"{FILM}chunk_index", ["x", "y"]),
    ],
    ids=["no columns", "no times", "texts"],
)
def test_a_camera_that_the_index_does_not_know_is_in_no_episode(write, act: Any):
    root = write([3, 4], commit_every=2)
    rewrite(root / INDEX, act)
    with Dataset(root) as dataset:
        assert dataset.episodes_without(WRIST) == (0, 1)
        for episode in dataset:
            with pytest.raises(DatasetFormatError, match=f"no film of {WRIST!r}"):
                episode.frames(WRIST, [0])


JOINTS = [f"j{i}" for i in range(8)]
NAMES: dict[str, tuple[Any, Any]] = {
    "lists in an object": ({"arm": JOINTS[:7], "hand": JOINTS[7:]}, tuple(JOINTS)),
    "a list in a list": ([JOINTS], tuple(JOINTS)),
    "places": ({name: 7 - i for i, name in enumerate(JOINTS)}, tuple(JOINTS[::-1])),
    "a label": (["joints"], None),
    "too few": (JOINTS[:5], None),
    "numbers": (list(range(8)), None),
    "other things": ([{"name": "j0"}] * 8, None),
    "places that are none": (dict.fromkeys(JOINTS, 1), None),
    "a text": ("joints", None),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_read_or_left_out(write, name: str):
    root = write([3])
    features = json.loads((root / "meta/info.json").read_text())["features"]
    features[STATE]["names"], expected = NAMES[name]
    change(root, features=features)
    with Dataset(root) as dataset:
        assert dataset.column(STATE).shape == (3, 8)
        assert dataset.spec.features[STATE].names == expected
        assert dataset.info.misnamed == ({STATE} if name == "too few" else set())


@pytest.mark.parametrize("names", [["x", "x"], ("a", "b", "a"), ["", "", "z"]])
def test_columns_of_one_name_are_refused(names: Any):
    with pytest.raises(InputError, match="names of a feature's columns must differ"):
        Feature("float32", (len(names),), names)


def twice(name: str) -> Any:
    return lambda table: pa.Table.from_arrays(
        [*table.columns, table.column(name)], names=[*table.column_names, name]
    )


@pytest.mark.parametrize(
    ("file", "name"), [("data", ACTION), ("data", "index"), ("meta/episodes", "length")]
)
def test_two_columns_of_a_file_with_one_name_are_refused(write, file: str, name: str):
    root = write([3])
    rewrite(root / file / "chunk-000/file-000.parquet", twice(name))
    with (
        pytest.raises(DatasetFormatError, match=f"has two columns {name}"),
        Dataset(root) as dataset,
    ):
        _ = dataset[0][ACTION]


@pytest.mark.parametrize("fps", [23.976, 59.94, 12.5])
def test_a_rate_that_lost_its_fraction_is_refused_with_the_remedy(write, fps: float):
    """As LeRobot's converter writes it: the films and times are right, and the rate is not."""
    root = write([80])
    change(root, fps=int(fps))
    rewrite(root / ROWS, replaced("timestamp", list(np.float32(np.arange(80) / fps))))
    write_film(root / f"{FILM}chunk-000/file-000.mp4", pictures(0, 80)[WRIST], fps)
    says = r"timestamp of row \d+ is .*LeRobot's converter .*\"fps\""
    with Dataset(root) as dataset:
        for ask in (lambda: dataset.column(ACTION), lambda: dataset[0].frames(WRIST, [3])):
            for _ in range(2):
                with pytest.raises(DatasetFormatError, match=says):
                    ask()
    change(root, fps=fps)
    with Dataset(root) as dataset:
        assert dataset.column(ACTION).shape == (80, 10)
        assert which(dataset[0].frames(WRIST, [1, 40, 79]), 0, 80) == [1, 40, 79]


@pytest.mark.parametrize("times", [2, 3])
def test_a_film_with_more_frames_shows_the_one_of_each_time(write, times: int):
    root = write([9])
    frames = np.repeat(pictures(0, 9)[WRIST], times, axis=0)
    frames[1::times] = 0  # not at the time of a row
    write_film(root / f"{FILM}chunk-000/file-000.mp4", frames, 15 * times)
    with Dataset(root) as dataset:
        assert which(dataset[0].frames(WRIST), 0, 9) == list(range(9))
        assert which(dataset[0].frames(WRIST, [7, 2]), 0, 9) == [7, 2]


@pytest.mark.parametrize("begin", [1, 4])
def test_a_film_that_begins_late_is_read_from_its_first_frame(write, begin: int):
    root = write([3, 4], commit_every=2)
    film = root / f"{FILM}chunk-000/file-000.mp4"
    frames = np.concatenate([pictures(0, 3)[WRIST], pictures(1, 4)[WRIST]])
    write_film(film, frames, 15, begin=begin)
    with Dataset(root) as dataset:
        for k, episode in enumerate(dataset):
            assert which(episode.frames(WRIST), k, len(episode)) == list(range(len(episode)))
    times = replaced(f"{FILM}from_timestamp", [begin / 15, (begin + 3) / 15])
    rewrite(root / INDEX, times)  # counted from zero, so that it would be counted twice
    with Dataset(root) as dataset, pytest.raises(DatasetFormatError, match="from its first one on"):
        dataset[0].frames(WRIST, [0])


SMALL_BYTES = 4096


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds so small that a few kilobytes exceed them."""
    monkeypatch.setattr(files, "_UNPACKED_BYTES", SMALL_BYTES)
    monkeypatch.setattr(files, "_UNPACKED_RATIO", 1)


def packed(path: Path, table: pa.Table, **columns: Any) -> None:
    """Write a table with other columns, packed well."""
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    pq.write_table(table, path, compression="zstd")


PACKED = {
    "a long instruction": ("meta/tasks.parquet", {"task": ["x" * 200_000]}),
    "an episode's instructions": (INDEX, {"tasks": [["y" * 99, "z"] * 20_000]}),
    "a note": (INDEX, {"strands_cosmos3/note": ["{" + " " * 300_000 + "}"]}),
    "texts for numbers": (ROWS, {"action": ["w" * 200_000] * 3}),
    "bytes for numbers": (ROWS, {"index": pa.array([b"v" * 90_000] * 3, pa.binary(90_000))}),
}


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("name", PACKED)
def test_nothing_is_read_that_unpacks_to_more_than_its_file_may(
    write, name: str, monkeypatch: pytest.MonkeyPatch
):
    root = write([3])
    file, columns = PACKED[name]
    packed(root / file, pq.read_table(root / file), **columns)
    read = pq.ParquetFile.read

    def small(self: Any, names: Any) -> Any:
        group = self.metadata.row_group(0)
        assert group.total_byte_size < 80_000
        assert max(group.column(j).num_values for j in range(group.num_columns)) < 100
        return read(self, names)

    monkeypatch.setattr(pq.ParquetFile, "read", small)
    with (
        pytest.raises(DatasetFormatError, match=rf"{file} unpacks to \d+ bytes of "),
        Dataset(root) as dataset,
    ):
        _ = dataset[0][ACTION]


def test_a_text_of_many_rows_is_kept_once(write):
    root = write([3])
    texts = pa.table({"task": ["x" * 50_000] * 500, "tasks": [["x" * 50_000] * 3] * 500})
    pq.write_table(texts, root / "texts.parquet")
    table = files.read_table(root, root / "texts.parquet", 500)
    assert table.nbytes < 200_000
    for column in (table.column("task"), table.column("tasks")[1].values):
        found = files.shared_texts(column)
        assert found[0] == "x" * 50_000
        assert len({id(text) for text in found}) == 1


@pytest.mark.parametrize("total", [3, 10**15, 2**53])
def test_tasks_that_are_not_there_cost_nothing(write, total: int):
    root = write([3, 4])
    change(root, total_tasks=total)
    with pytest.raises(DatasetFormatError, match=f"does not number its {total} tasks"):
        Dataset(root)


@pytest.mark.parametrize("numbers", [[0, 0, 1], [0, 1, 1], [1, 0, 2, 0]])
def test_two_instructions_of_one_number_are_refused(write, numbers: list[int]):
    root = write([3, 4])
    texts = [f"task {i}" for i in range(len(numbers))]
    pq.write_table(pa.table({"task_index": numbers, "task": texts}), root / "meta/tasks.parquet")
    with pytest.raises(DatasetFormatError, match="does not number its 2 tasks"):
        Dataset(root)


def test_other_columns_of_the_index_are_not_read_for_the_statistics(write, monkeypatch):
    root = write([3])
    table = pq.read_table(root / INDEX)
    more = table.append_column("more", pa.array(["x"])).append_column(
        "stats/no/max", table["length"]
    )
    pq.write_table(more, root / INDEX)
    asked: list[str] = []
    read = pq.ParquetFile.read

    def note(self: Any, columns: Any) -> Any:
        asked.extend(columns)
        return read(self, columns)

    monkeypatch.setattr(pq.ParquetFile, "read", note)
    with Dataset(root) as dataset:
        stats = files.read_episode_stats(root, dataset._index, dataset.spec)
    assert stats[0][ACTION]["q99"].shape == (10,)
    assert not {"more", "stats/no/max"} & set(asked)


@pytest.mark.parametrize(
    ("name", "value"),
    [("mean", None), ("max", [1.0, 2.0]), ("std", [float("nan")] * 10), ("count", ["x"])],
)
def test_statistics_that_are_no_numbers_are_refused(write, tmp_path, name: str, value: Any):
    root = write([3])
    rewrite(root / INDEX, replaced(f"stats/{ACTION}/{name}", [value]))
    with pytest.raises(DatasetFormatError, match=f"stats/{ACTION}/{name} must hold"):
        merge_datasets([root], tmp_path / "merged")


@pytest.mark.parametrize("size", [(96, 64), (48, 256), (50, 66)])
def test_no_larger_picture_is_decoded_than_the_feature_has(write, tmp_path, size, monkeypatch):
    root = write([3])
    film = root / f"{FILM}chunk-000/file-000.mp4"
    write_film(film, np.zeros((3, *size, 3), np.uint8), 15)
    decoded = []
    monkeypatch.setattr(video.FrameReader, "_decode", lambda *_: decoded.append(1) or {})
    says = f"size {size[0]} x {size[1]}, but its feature is "
    with Dataset(root) as dataset, pytest.raises(DatasetFormatError, match=says):
        dataset[0].frames(WRIST)
    with pytest.raises(DatasetFormatError, match=says):
        merge_datasets([root], tmp_path / "merged")
    assert not decoded


def test_the_decoder_takes_no_larger_picture_than_the_header_says(write, monkeypatch):
    """A film may change its size on the way; here the room for padding is less than none."""
    root = write([3])
    monkeypatch.setattr(video, "_PADDING_PX", -20)
    with Dataset(root) as dataset, pytest.raises(DatasetFormatError, match="cannot be decoded"):
        dataset[0].frames(WRIST)


@pytest.mark.parametrize("codec", ["mpeg4", "libvpx-vp9", "libsvtav1"])
def test_the_room_for_padding_suffices(write, codec: str, monkeypatch: pytest.MonkeyPatch):
    """MPEG-4 takes more room than others."""
    monkeypatch.setenv("SVT_LOG", "0")
    root = write([3])
    write_film(root / f"{FILM}chunk-000/file-000.mp4", pictures(0, 3)[WRIST], 15, codec=codec)
    with Dataset(root) as dataset:
        assert dataset[0].frames(WRIST).shape == (3, 48, 64, 3)
