"""Demonstrations as the trainer reads them, and how datasets become them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recipes.table_policy.demos import Demos, unpack
from recipes.table_policy.record import LabelConfig
from recipes.table_policy.windows import executed_rows, undisturbed
from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.worlds.table.demo_dataset import VIDEO, add_record, demo_spec


def test_last_is_the_last_tick_of_the_episode(records, demos):
    lengths = [len(record.goal) for record in records]
    np.testing.assert_array_equal(demos.last, np.repeat(np.cumsum(lengths) - 1, lengths))


def test_a_chunk_with_one_perturbed_row_or_another_goal_is_disturbed(demos):
    perturbed, goal = np.zeros(len(demos), bool), np.zeros(len(demos), np.int8)
    perturbed[5], goal[30:] = True, 1
    changed = replace(demos, perturbed=perturbed, goal=goal)
    expected = [False] * 6 + [True] * 9 + [False] * 3  # a chunk has 16 rows
    assert undisturbed(changed, np.arange(18)).tolist() == expected


def test_executed_rows_decode_to_the_measured_poses(demos):
    ticks = np.array([0, 4])
    for tick, rows in zip(ticks, executed_rows(demos, ticks), strict=True):
        poses = demos.T_base_cosmos[tick : tick + 17]
        np.testing.assert_allclose(
            rows, encode_chunk(poses, demos.gripper_command[tick : tick + 16], "droid"), atol=1e-5
        )


@pytest.mark.parametrize("prefix_rows", [0, 8])
def test_there_and_back_through_lerobot(records, prefix_rows, tmp_path):
    """With the labels after action prefixes where they are asked for."""
    from strands_cosmos3.datasets import DatasetWriter

    if not prefix_rows:
        records = [replace(record, prefix_rows=0 * record.prefix_rows) for record in records]
    spec = demo_spec(records[0], LabelConfig())
    with DatasetWriter(tmp_path / "set", spec, commit_every=2, video=VIDEO) as writer:
        for i, record in enumerate(records):
            add_record(writer, record, 3, i)
    unpack(tmp_path / "set", tmp_path / "unpacked")
    back = Demos.open(tmp_path / "unpacked")
    for name in ("T_base_cosmos", "gripper_opening", "gripper_command", "goal", "perturbed"):
        there = np.concatenate([getattr(record, name) for record in records])
        np.testing.assert_allclose(getattr(back, name), there, atol=2e-6, err_msg=name)
    continued, other = (
        ("continued", "looks_continued") if prefix_rows else ("labels", "looks_labels")
    )
    there = {
        "labels": "labels",
        "looks_labels": "looks_labels",
        "continued": continued,
        "looks_continued": other,
    }
    for name, recorded in there.items():
        expected = np.concatenate([getattr(record, recorded) for record in records])
        np.testing.assert_allclose(getattr(back, name), expected, atol=1e-6, err_msg=name)
    assert back.prefix_rows.max() == prefix_rows
    off = back.frames.astype(int) - np.concatenate([record.frames for record in records])
    assert np.abs(off).mean() < 2.0


def test_what_was_unpacked_is_of_one_dataset(records, tmp_path):
    from strands_cosmos3.datasets import DatasetWriter

    for name, which in (("one", 0), ("two", 1)):  # of the same length
        with DatasetWriter(
            tmp_path / name, demo_spec(records[which], LabelConfig()), commit_every=1, video=VIDEO
        ) as writer:
            add_record(writer, records[which], 3, which)
    unpack(tmp_path / "one", tmp_path / "unpacked")
    unpack(tmp_path / "one", tmp_path / "unpacked")
    with pytest.raises(ConfigError, match=r"path .*one \(now .*two\)"):
        unpack(tmp_path / "two", tmp_path / "unpacked")
