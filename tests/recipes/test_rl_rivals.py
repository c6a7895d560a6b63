"""What reinforcement learning is compared with, in a small form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mujoco")
pytest.importorskip("ray")

from recipes.rl_rivals import LabellingWorker, OffsetWorker, Rival
from strands_cosmos3.actions.decode import decode_limbs
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.training.loop import read_curve
from strands_cosmos3.training.rl.exploration import Exploration
from strands_cosmos3.types import ActionChunk

MODEL = str(embedded_checkpoint("droid", "panda", "pick"))
ROOT = Path(__file__).parents[2]
HOW = Exploration(2, 0.02, 0.05, 0.0)


def run(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "recipes.rl_rivals", *arguments, "--model", MODEL]
    command += ["--out", str(folder), "--workers", "1", "--duration", "2"]
    subprocess.run(command, check=True, cwd=ROOT)


def test_an_expert_labels_the_states_that_the_policy_visits():
    settings = Rival(Path("out"), MODEL, duration=2.5).settings(seeds=1)
    worker = LabellingWorker(settings)
    episode = worker.explore(settings.plan()[0], HOW, 1)
    worker.close()
    assert len(episode.groups) > 1
    own, expert = episode.groups[0].rows
    assert own.shape == expert.shape == (16, 10)
    assert np.abs(own - expert).max() > 0.05
    anchor, space = {"arm": np.eye(4)}, worker_space()
    ends = [
        decode_limbs(ActionChunk(rows.astype(float), *space), anchor).by_limb["arm"].T_base_frame
        for rows in (own, expert)
    ]
    apart_m = np.linalg.norm(ends[0][-1, :3, 3] - ends[1][-1, :3, 3])
    assert apart_m < 0.15, "both go to the cube"
    assert all(group.rewards.tolist() == [0.0, 1.0] for group in episode.groups)


def worker_space():
    droid = get_embodiment("droid")
    return droid.action_space("midtrain"), droid


def test_offsets_are_read_from_rows_and_added_to_them():
    settings = Rival(Path("out"), MODEL, duration=1.0).settings(seeds=1)
    worker = OffsetWorker(settings)
    (group, *_) = worker.explore(settings.plan()[0], HOW, 1).groups
    offsets = worker._offsets(group)
    np.testing.assert_allclose(offsets[0], 0, atol=1e-6)
    np.testing.assert_allclose(offsets[1::2], -offsets[2::2], atol=2e-4)
    assert 0.002 < np.abs(offsets[1:, :3]).mean() < 0.06
    worker.take_weights({"offset": offsets[1]})
    (displaced, *_) = worker.explore(settings.plan()[0], HOW, 1).groups
    worker.close()
    own, space = group.rows[0].astype(float), worker_space()
    anchors = {"arm": np.eye(4)}
    there = decode_limbs(ActionChunk(displaced.rows[0].astype(float), *space), anchors)
    expected = decode_limbs(ActionChunk(group.rows[1].astype(float), *space), anchors)
    assert np.abs(own - displaced.rows[0]).max() > 0.01
    np.testing.assert_allclose(
        there.by_limb["arm"].T_base_frame, expected.by_limb["arm"].T_base_frame, atol=1e-3
    )


@pytest.mark.slow
def test_labels_of_an_expert_are_learnt_in_a_small_form(tmp_path):
    for until in ("1", "2"):  # the second start resumes
        run(tmp_path, "dagger", "--episodes", "2", "--until", until, "--judged", "1")
    assert (tmp_path / "checkpoint/transformer").is_dir()
    assert len(read_curve(tmp_path / "rollouts.jsonl")) == 2
    assert len(list((tmp_path / "labels").iterdir())) == 2


@pytest.mark.slow
def test_an_offset_is_fitted_and_measured_in_a_small_form(tmp_path):
    run(tmp_path, "offset", "--episodes", "2", "--until", "2", "--seeds", "2")
    state = json.loads((tmp_path / "offset.json").read_text())
    assert len(state["offsets"]) == 3
    assert np.abs(state["offsets"][-1]).max() > 0
    assert json.loads((tmp_path / "success.json").read_text())["of"] == 2


@pytest.mark.slow
def test_wider_demonstrations_are_learnt_in_a_small_form(tmp_path):
    run(tmp_path, "wider", "--budget", "1e-4", "--pilot", "2", "--batch", "4")
    assert (tmp_path / "training/checkpoint/transformer").is_dir()
