"""The small LIBERO policy: windows of recorded actions, the checkpoint that training starts
from, the recipe and its card.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from recipes.libero_policy import demos as libero_demos
from recipes.libero_policy.recipe import (
    RECIPE,
    card,
    pictures_of,
    write_start,
)
from recipes.vae_training import load_vae
from strands_cosmos3.actions.controller_rows import decode_rows, encode_actions, normalize_actions
from strands_cosmos3.datasets import ACTION, Dataset, DatasetSpec, DatasetWriter, Feature
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.loading import load_action_head
from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.training.options import PostConfig
from strands_cosmos3.training.post import PostTraining
from strands_cosmos3.worlds.libero.simulation import CAMERAS, side_by_side

SENTENCES = (
    "pick up the milk and place it in the basket",
    "pick up the butter and place it in the basket",
)
LENGTH = 24


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """Two episodes as `recipes.libero_policy.demos` writes them: the views differ in colour, and
    change every 6 frames.
    """
    root, rng = tmp_path_factory.mktemp("libero") / "demos", np.random.default_rng(0)
    spec = libero_demos.libero_spec(libero_demos.LiberoConfig(picture_px=128))
    spec = DatasetSpec(
        spec.fps, {key: spec.features[key] for key in (ACTION, *spec.cameras)}, spec.robot_type
    )
    with DatasetWriter(root, spec) as writer:
        for sentence in SENTENCES:
            actions = rng.uniform(-1, 1, (LENGTH, 7))
            frames = {
                key: np.full((LENGTH, 128, 128, 3), 60 + 120 * i, np.uint8)
                for i, key in enumerate(spec.cameras)
            }
            for t in range(LENGTH):
                frames[next(iter(frames))][t] += 10 * (t // libero_demos.LOOK_EVERY)
            writer.add_episode(
                {ACTION: encode_actions(actions).astype(np.float32)}, frames, sentence
            )
    return root


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    vae = load_vae(Checkpoint.open(embedded_checkpoint()))
    return write_start(tmp_path_factory.mktemp("libero") / "start", SENTENCES, vae)


@pytest.fixture(scope="module")
def post(demos, start, tmp_path_factory):
    how = PostConfig(
        train=("*",),
        stats="packaged",
        embodiment="libero",
        steps=1,
        batch=2,
        validation_fraction=0.5,
    )
    return PostTraining(start, demos, tmp_path_factory.mktemp("libero") / "run", how)


def test_windows_are_the_recorded_actions_normalised_as_nvidias(post, demos):
    """They begin where a picture is, all the way to the end, after which the last action is
    repeated.
    """
    with Dataset(demos) as dataset:
        recorded = np.asarray(dataset[0][ACTION], np.float64)
    windows = post.windows
    assert len(windows) == 2 * (LENGTH // libero_demos.LOOK_EVERY)
    rows = windows._pick(np.array([1, 3]), np.zeros(2, bool)).rows
    actions = decode_rows(recorded)
    at = libero_demos.LOOK_EVERY
    np.testing.assert_allclose(rows[0], normalize_actions(actions[at : at + 16]), atol=1e-4)
    assert rows.abs().max() > 1, (
        "not clamped: the expert's translations exceed the packaged quantiles"
    )
    padded = np.concatenate(
        [actions[3 * at :], np.repeat(actions[-1:], 16 - (LENGTH - 3 * at), axis=0)]
    )
    np.testing.assert_allclose(rows[1], normalize_actions(padded), atol=1e-4)
    batch = windows.batch(0)
    assert batch.state is None
    assert batch.fps == 20
    assert batch.latents.shape[2] == 1


def test_training_sees_the_pictures_of_inference(post, demos):
    """The third person left, as an evaluation composes them; another order, or another frame, is
    another canvas.
    """
    with Dataset(demos) as dataset:
        episode = dataset[0]
        views = {name: episode.frames(f"observation.images.{name}", [6])[0] for name in CAMERAS}
        seen, _ = post.windows._processed(0, 6)
        assert pictures_of(dataset).shape == (2 * LENGTH // 6, 80, 160, 3)
    raw = {"images": side_by_side(views), "task": SENTENCES[0]}
    asked = Cosmos3PolicyProcessor.for_checkpoint(post.checkpoint).preprocess(raw)
    torch.testing.assert_close(seen.pixel_values, asked.pixel_values)
    assert seen.prompt == asked.prompt
    left, right = (
        seen.pixel_values[0, :, 0, :80, :80].mean(),
        seen.pixel_values[0, :, 0, :80, 80:].mean(),
    )
    assert left < right - 0.5


def test_other_actions_are_refused(demos, start, tmp_path):
    with Dataset(demos) as dataset:
        spec = dataset.spec
    features = {**spec.features, ACTION: Feature("float32", (10,), info={"embodiment": "droid"})}
    with DatasetWriter(tmp_path / "set", DatasetSpec(20, features, "panda")) as writer:
        frames = {key: np.zeros((20, 128, 128, 3), np.uint8) for key in spec.cameras}
        writer.add_episode({ACTION: np.zeros((20, 10), np.float32)}, frames, "x")
    with pytest.raises(ConfigError, match="'droid', not of 'libero'"):
        PostTraining(
            start,
            tmp_path / "set",
            tmp_path / "run",
            PostConfig(embodiment="libero", stats="packaged"),
        )


def test_the_start_has_liberos_contract(start):
    made, source = Checkpoint.open(start), Checkpoint.open(embedded_checkpoint())
    assert (made.metadata["domain"], made.state_row, made.policy_frames, made.replan_rows) == (
        "libero",
        None,
        (1,),
        8,
    )
    stats = made.action_stats()
    assert stats is not None
    assert stats.raw is not None
    device = torch.device("cpu")
    head, before = (
        load_action_head(one, domain, device, torch.float32)
        for one, domain in ((made, 5), (source, 8))
    )
    assert torch.equal(head.w_out, before.w_out)
    asked = Cosmos3PolicyProcessor.for_checkpoint(made).preprocess(
        {"images": np.zeros((256, 512, 3), np.uint8), "task": SENTENCES[0]}
    )
    assert asked.text_ids.shape[1] < 30
    assert asked.video_shape == (1, 80, 160)


@pytest.mark.smoke
def test_the_card_has_every_figure_and_its_command(tmp_path):
    (tmp_path / "records").mkdir()
    for name in ("demos", "start", "policy", "evaluation", "controls", "swap", "task"):
        record = {"command": f"do {name}", "finished": "today", "seconds": 90, "machine": "one"}
        (tmp_path / f"records/{name}.json").write_text(json.dumps(record))
        (tmp_path / name).mkdir()
        successes = {"successes": len(name), "of": 40, "rate": len(name) / 40}
        success = {**successes, "low": 0.1, "high": 0.2}
        row = {"condition": name, "task": None, "success": success, "seconds_to_success": None}
        (tmp_path / name / "report.json").write_text(json.dumps({"rows": [row]}))
    said = card(tmp_path)
    for name in ("evaluation", "controls", "swap", "task"):
        assert f"do {name}" in said
        assert f"| {name} | all | {len(name)} of 40" in said


@pytest.mark.libero
def test_all_stages_of_the_tiny_recipe(tmp_path, capsys):
    pytest.importorskip("libero", reason="LIBERO has an environment of its own: make test-libero")
    out = tmp_path / "made"
    assert RECIPE.main(["--out", str(out), "--tiny", "--workers", "1"]) == 0
    Checkpoint.open(out / "checkpoint").verify()
    assert "| plain | 0 | 0 of 1" in (out / "checkpoint/README.md").read_text()
    assert RECIPE.main(["--out", str(out), "--tiny"]) == 0
    assert capsys.readouterr().out.count(": done on") == 8
