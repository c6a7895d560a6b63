"""Shards into one dataset: the same episodes, renumbered, not one picture encoded again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

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
from strands_cosmos3.errors import ConfigError, DatasetError, DatasetMismatchError

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
