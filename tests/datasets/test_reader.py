"""Reading: at random, only what is asked, and whatever a hostile or damaged dataset may say."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.small_episodes import columns, pictures, spec, which
from strands_cosmos3.datasets import (
    ACTION,
    STATE,
    Dataset,
    DatasetWriter,
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
        "/etc/passwd",
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
        {"features": {"observation.images.none": {"dtype": "video", "shape": [48, 64, 3]}}},
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
    says = rf"{ROWS}: {column} of row {row} is (.+); by meta/episodes it is (.+)\."
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
    "pose": {"dtype": "float32", "shape": [3], "names": ["x", "y"]},
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
        (ROWS, replaced("action", [[0.0] * 30_000] * 3), "more than the 39 values"),
        (ROWS, replaced("action", [[[0.0] * 100] * 300] * 3), "more than the 39 values"),
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
def test_pipes_are_not_opened(write, file: str):
    root = write([3])
    (root / file).unlink()
    os.mkfifo(root / file)
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


@pytest.mark.parametrize("version", ["v3.1", "v4.0", "v30.0"])
def test_a_newer_dataset_is_not_told_to_convert(write, version: str):
    root = write([3])
    change(root, codebase_version=version)
    with pytest.raises(DatasetFormatError, match=r"only v3\.0 is read\.$"):
        Dataset(root)
