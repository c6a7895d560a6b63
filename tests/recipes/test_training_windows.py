"""Windows of demonstrations: pictures with labels, prefixes and other looks, and clips."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from recipes.table_policy.windows import ClipWindows, PictureWindows, executed_rows
from strands_cosmos3.actions.stats import denormalize_chunk
from strands_cosmos3.engine.metadata import StateRow
from strands_cosmos3.training.windows import POLICY
from strands_cosmos3.worlds.table.phrases import GOALS


def _state():
    return StateRow((0.0,) * 10, (1.0,) * 10)


def test_windows_drop_prompts_as_often_as_they_should(demos, captions):
    latents = np.zeros((len(demos.label_ticks), 16, 8, 9), np.float16)
    windows = PictureWindows(demos, latents, _state(), captions, size=4000, dropout=0.08)
    batch = windows.batch(0)
    dropped = batch.prompt == len(GOALS)
    assert dropped.float().mean().item() == pytest.approx(0.08, abs=0.015)
    assert batch.prompts[-1] == captions.empty
    assert torch.equal(windows.batch(0).prompt, batch.prompt)
    assert not torch.equal(windows.batch(1).prompt, batch.prompt)


def test_a_window_is_labelled_for_the_sentence_it_reads(demos, captions):
    latents = np.zeros((len(demos.label_ticks), 16, 8, 9), np.float16)
    windows = PictureWindows(demos, latents, _state(), captions, size=64, dropout=0.0)
    rng, batch = np.random.default_rng([0, 0]), windows.batch(0)
    chosen = rng.integers(len(windows), size=64)
    for i in range(64):
        label = demos.labels[chosen[i], int(batch.prompt[i])]
        np.testing.assert_allclose(batch.rows[i], np.clip(label, -3, 3), atol=1e-6)
        assert batch.prompts[int(batch.prompt[i])] in captions.by_goal[int(batch.prompt[i])]


def test_half_of_the_windows_begin_with_a_prefix_that_their_rows_continue(demos, captions):
    """No longer than the policy allows; a longer recorded one is cut, and the rows that follow
    it are learnt.
    """
    latents = np.zeros((len(demos.label_ticks), 16, 8, 9), np.float16)
    windows = PictureWindows(
        demos, latents, _state(), captions, size=600, dropout=0.0, prefix_rows=6
    )
    chosen, batch = np.random.default_rng([0, 0]).integers(len(windows), size=600), windows.batch(0)
    assert (batch.prefix > 0).float().mean().item() == pytest.approx(0.5, abs=0.07)
    assert batch.prefix.max() == 6
    waited = []
    for i in range(600):
        goal, given = int(batch.prompt[i]), int(batch.prefix[i])
        rows, label = batch.rows[i].numpy(), np.clip(demos.labels[chosen[i], goal], -3, 3)
        still = given > 0 and np.allclose(
            denormalize_chunk(rows[:given], "droid_lerobot")[:, :3], 0.0, atol=1e-6
        )
        expected = (
            np.clip(demos.continued[chosen[i], goal], -3, 3) if given and not still else label
        )
        waited += [still] if given else []
        np.testing.assert_allclose(
            rows[given if still else 0 :], expected[: 16 - given * still], atol=1e-6
        )
        assert given in (0, min(demos.prefix_rows[chosen[i], goal], 6))
    assert 0.1 < np.mean(waited) < 0.3


def test_a_tenth_of_the_windows_release_a_held_cube(demos, captions):
    """In the episode's own goal: fingers are closed in the first row and open later."""
    latents = np.zeros((len(demos.label_ticks), 16, 8, 9), np.float16)
    labels = np.array(demos.labels)
    labels[..., 9] = 1.0
    labels[5, :, :8, 9] = -1.0
    windows = PictureWindows(
        replace(demos, labels=labels), latents, _state(), captions, size=2000, dropout=0.0
    )
    rows = windows.batch(0).rows[:, :, 9]
    released = ((rows[:, 0] < 0) & (rows[:, -1] > 0)).float().mean().item()
    assert released == pytest.approx(0.1 + 0.9 / len(labels), abs=0.02)


def test_65_percent_of_the_windows_show_other_looks_of_their_tick(demos, captions):
    count = len(demos.label_ticks)
    own = np.broadcast_to(
        np.arange(count, dtype=np.float16)[:, None, None, None], (count, 16, 8, 9)
    )
    windows = PictureWindows(demos, own, _state(), captions, size=400, looks=own + np.float16(1000))
    batch = windows.batch(0)
    shown, chosen = (
        batch.latents[:, 0, 0, 0, 0].numpy(),
        np.random.default_rng([0, 0]).integers(count, size=400),
    )
    assert (shown >= 1000).mean() == pytest.approx(0.65, abs=0.08)
    np.testing.assert_array_equal(shown % 1000, chosen)
    for i in np.flatnonzero(batch.prompt < len(GOALS)):  # the others read the empty caption
        labels = demos.looks_labels if shown[i] >= 1000 else demos.labels
        np.testing.assert_allclose(
            batch.rows[i], np.clip(labels[chosen[i], int(batch.prompt[i])], -3, 3), atol=1e-6
        )


def test_answers_are_the_labels_of_every_goal(demos, captions):
    own = np.zeros((len(demos.label_ticks), 16, 8, 9), np.float16)
    windows = PictureWindows(demos, own, _state(), captions, size=7)
    chosen = np.random.default_rng([0, 0]).integers(len(windows), size=7)
    np.testing.assert_array_equal(windows.batch(0).goal_rows, np.clip(demos.labels[chosen], -3, 3))


def test_clips_answer_the_label_without_a_prefix_and_what_was_executed_after_one(demos, captions):
    ticks = demos.label_ticks[demos.label_ticks + 16 <= demos.last[demos.label_ticks]]
    latents = np.zeros((len(ticks), 16, 5, 8, 9), np.float16)
    calm = replace(demos, perturbed=np.zeros_like(demos.perturbed))
    windows = ClipWindows(
        calm,
        latents,
        _state(),
        captions,
        size=200,
        ticks=ticks,
        forward=0.3,
        inverse=0.3,
        prefix_rows=8,
    )
    batch, done = windows.batch(0), np.clip(executed_rows(demos, ticks), -3, 3)
    labels = np.clip(
        demos.labels[np.searchsorted(demos.label_ticks, ticks), demos.goal[ticks]], -3, 3
    )
    plain = ((batch.mode == POLICY) & (batch.prefix == 0)).numpy()
    assert 20 < plain.sum() < 120
    for i, rows in enumerate(batch.rows.numpy()):
        assert np.abs((labels if plain[i] else done) - rows).max((1, 2)).min() < 1e-6
