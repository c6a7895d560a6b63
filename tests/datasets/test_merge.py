"""Shards into one dataset: the same episodes, renumbered, not one picture encoded again."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from helpers.films import write_film
from helpers.small_episodes import columns, fill, pictures, spec, which
from strands_cosmos3.datasets import (
    ACTION,
    Dataset,
    DatasetWriter,
    VideoConfig,
    arm_spec,
    merge_datasets,
)
from strands_cosmos3.datasets.stats import column_stats, merged
from strands_cosmos3.datasets.video import join_videos
from strands_cosmos3.errors import (
    ConfigError,
    DatasetError,
    DatasetFormatError,
    DatasetMismatchError,
)

WRIST = "observation.images.wrist"


# every shard meets the tasks in another order, so that it numbers them otherwise
FIRSTS = (0, 4, 8)
SEEDS = [first + k for first in FIRSTS for k in range(3)]


def test_parallel_producers_become_one_dataset(write, tmp_path: Path):
    shards = [
        write([3, 5, 4], f"shard-{k}", first, commit_every=2) for k, first in enumerate(FIRSTS)
    ]
    with merge_datasets(shards, tmp_path / "all") as merged:
        assert len(merged) == 9
        assert [episode.note["seed"] for episode in merged] == SEEDS
        assert merged.tasks == ("pick up cube 0", "pick up cube 1", "pick up cube 2")
        for k, episode in enumerate(merged):
            assert episode.task == f"pick up cube {SEEDS[k] % 3}"
            assert episode.tasks == (episode.task,)
            np.testing.assert_array_equal(
                episode[ACTION], columns(len(episode), SEEDS[k])[ACTION].astype(np.float32)
            )
            with Dataset(shards[k // 3]) as shard:
                np.testing.assert_array_equal(episode.frames(WRIST), shard[k % 3].frames(WRIST))
    assert len(list((tmp_path / "all").rglob("*.mp4"))) == 2  # one file a camera
    table = pq.read_table(tmp_path / "all/data/chunk-000/file-000.parquet")
    assert table.column("index").to_pylist() == list(range(36))
    assert (
        table.column("episode_index").to_numpy().tolist()
        == np.repeat(np.arange(9), [3, 5, 4] * 3).tolist()
    )
    with DatasetWriter(tmp_path / "all", spec()) as writer:  # and it can grow
        fill(writer, [6], first=9)
    with Dataset(tmp_path / "all") as grown:
        assert which(grown[9].frames(WRIST), 9, 6) == list(range(6))


def test_a_shard_without_an_episode_adds_nothing(write, tmp_path: Path):
    with DatasetWriter(tmp_path / "empty", spec()):
        pass  # a producer that was ended before its first episode
    merge_datasets(
        [tmp_path / "empty", write([3, 5], name="a"), tmp_path / "empty"], tmp_path / "all"
    ).close()
    with Dataset(tmp_path / "all") as merged:
        assert [len(episode) for episode in merged] == [3, 5]


def test_figures_of_the_whole(write, tmp_path: Path):
    merge_datasets(
        [write([3, 5], name="a"), write([9], name="b", first=2)], tmp_path / "all"
    ).close()
    with Dataset(tmp_path / "all") as merged:
        rows, stats = merged.column(ACTION), merged.stats
        np.testing.assert_allclose(stats[ACTION]["q01"], np.quantile(rows, 0.01, axis=0), rtol=1e-5)
        np.testing.assert_allclose(stats[ACTION]["std"], rows.std(axis=0), rtol=1e-5)
        assert stats[WRIST]["count"].tolist() == [3 + 5 + 8]
    with Dataset(tmp_path / "a") as source:  # the same order in every process
        assert list(stats) == list(source.stats)


def test_figures_merge_as_if_computed_at_once():
    a, b = columns(7, 0)[ACTION], columns(31, 1)[ACTION] + 1.0
    together, apart = (
        column_stats(np.concatenate([a, b])),
        merged([column_stats(a), column_stats(b)]),
    )
    for name in ("min", "max", "mean", "std", "count"):
        np.testing.assert_allclose(apart[name], together[name], rtol=1e-12)


def test_files_are_filled_up_to_their_size(tmp_path: Path):
    """A shard has four tenths of a megabyte for each camera."""
    noise = np.random.default_rng(0).integers(0, 256, (20, 48, 64, 3), dtype=np.uint8)
    for k in range(3):
        with DatasetWriter(
            tmp_path / f"{k}", spec(), commit_every=4, video=VideoConfig(crf=0)
        ) as writer:
            for i in range(4):
                writer.add_episode(
                    columns(20, 4 * k + i), dict.fromkeys(spec().cameras, noise), task="look"
                )
    with merge_datasets(
        [tmp_path / f"{k}" for k in range(3)], tmp_path / "all", video_file_mb=1
    ) as merged:
        files = sorted((tmp_path / f"all/videos/{WRIST}/chunk-000").iterdir())
        assert len(files) == 2
        assert all(file.stat().st_size < 1.2 * 2**20 for file in files)
        with Dataset(tmp_path / "2") as last:
            np.testing.assert_array_equal(
                merged[-1].frames(WRIST, [19]), last[-1].frames(WRIST, [19])
            )


def test_other_encodings_begin_another_file(tmp_path: Path):
    for k, pixel_format in enumerate(("yuv420p", "yuv444p")):
        with DatasetWriter(
            tmp_path / f"{k}", spec(), video=VideoConfig(pixel_format=pixel_format)
        ) as writer:
            fill(writer, [5], first=k)
    with merge_datasets([tmp_path / "0", tmp_path / "1"], tmp_path / "all") as merged:
        assert len(list((tmp_path / "all/videos" / WRIST).rglob("*.mp4"))) == 2
        assert which(merged[1].frames(WRIST), 1, 5) == list(range(5))


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    a = write([3], name="a")
    with pytest.raises(ConfigError, match="nothing to merge"):
        merge_datasets([], tmp_path / "all")
    with pytest.raises(DatasetError, match="not empty"):
        merge_datasets([a], a)
    with DatasetWriter(tmp_path / "b", arm_spec({"wrist": (48, 64)})) as writer:
        writer.add_episode(columns(3), {WRIST: pictures(0, 3)[WRIST]}, task="pick")
    with pytest.raises(DatasetMismatchError, match=r"exterior_1 video \[48, 64, 3\] and absent"):
        merge_datasets([a, tmp_path / "b"], tmp_path / "all")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_datasets([a], tmp_path / "all", progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def refilm(root: Path, lengths: list[int], first: int, **film: Any) -> Path:
    """Encode the wrist's film of a dataset again; its episodes are numbered from ``first``."""
    frames = [pictures(first + k, n)[WRIST] for k, n in enumerate(lengths)]
    path = root / f"videos/{WRIST}/chunk-000/file-000.mp4"
    write_film(path, np.concatenate(frames), 15, **film)
    return root


FILMS = {
    "the first begins later, and both have B-frames": (
        {"begin": 2, "b_frames": 2},
        {"b_frames": 2},
        {"begin": 5, "b_frames": 2},
    ),
    "each begins at another time, in a fine time base": tuple(
        {"begin": begin, "time_base": Fraction(1, 90_000)} for begin in (4, 0, 7)
    ),
    "other orders of frames": ({"begin": 1}, {"b_frames": 3}, {"begin": 3}),
    "AV1 that begins later": ({"codec": "libsvtav1"}, {"codec": "libsvtav1", "begin": 3}, {}),
    "VP9": tuple({"codec": "libvpx-vp9", "begin": begin} for begin in (0, 1, 0)),
    "VP9 between H.264": ({}, {"codec": "libvpx-vp9"}, {"begin": 1}),
}


@pytest.mark.parametrize("name", FILMS)
def test_films_of_other_programs_are_joined_as_they_are_read(
    write, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SVT_LOG", "0")
    shards = [
        refilm(write([3, 5], f"{k}", 2 * k, commit_every=2), [3, 5], 2 * k, **film)
        for k, film in enumerate(FILMS[name])
    ]
    with merge_datasets(shards, tmp_path / "all") as merged:
        for k, episode in enumerate(merged):
            assert which(episode.frames(WRIST), k, len(episode)) == list(range(len(episode)))


def frames_of_a_film(**film: Any) -> Any:
    def write_it(path: Path) -> Path:
        write_film(path, pictures(0, 4)[WRIST], 15, **film)
        return path

    return write_it


def unknown_codec(path: Path) -> Path:
    write_film(path, pictures(0, 4)[WRIST], 15)
    path.write_bytes(path.read_bytes().replace(b"avc1", b"zzzz"))
    return path


@pytest.mark.parametrize(
    ("second", "n_frames", "said"),
    [
        (frames_of_a_film(b_frames=3), 4, "second.mp4 cannot follow the films before it"),
        (frames_of_a_film(), 3, "second.mp4 has 4 frames, but its episodes have 3"),
        (unknown_codec, 4, "second.mp4 has no video stream in a codec that PyAV reads"),
    ],
    ids=["times that go back", "a frame too many", "an unknown codec"],
)
def test_films_that_cannot_be_joined_are_format_errors(
    tmp_path: Path, second: Any, n_frames: int, said: str
):
    first = frames_of_a_film()(tmp_path / "first.mp4")
    parts = [(first, 4), (second(tmp_path / "second.mp4"), n_frames)]
    with pytest.raises(DatasetFormatError, match=said):
        join_videos(parts, 15, tmp_path / "joined.mp4", (48, 64, 3))


def test_a_full_disk_is_no_fault_of_a_film(tmp_path: Path):
    parts = [(frames_of_a_film()(tmp_path / f"{k}.mp4"), 4) for k in range(2)]
    with pytest.raises(OSError, match="No space left") as refusal:
        join_videos(parts, 15, Path("/dev/full"), (48, 64, 3))
    assert not isinstance(refusal.value, DatasetFormatError)
