"""Latents of clips at every tick, put together from those of every fourth."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recipes.table_policy.clip_latents import (
    BLOCK,
    ClipLatents,
    clip_frames,
    encoded_ticks,
)
from recipes.vae_training import make_vae
from strands_cosmos3.engine.wan_config import WanConfig
from strands_cosmos3.training.windows import ROWS

LENGTHS = (40, 23, 17, 5, 32)


def demonstrations() -> Any:
    """Episodes of those lengths, a picture of each tick showing its number."""
    ends = np.cumsum(LENGTHS)
    last = np.repeat(ends - 1, LENGTHS)
    made = SimpleNamespace(
        last=last, frames=np.arange(len(last))[:, None, None, None].astype(np.uint8)
    )
    return type("Demos", (SimpleNamespace,), {"__len__": lambda self: len(self.last)})(**vars(made))


def clips_of(demos, config) -> ClipLatents:
    """Latents that hold the tick of a picture, and the first of a block's plus one half."""
    ticks, starts = np.arange(len(demos)), encoded_ticks(demos)
    frames = clip_frames(demos, starts)[:, :, 0, 0, 0].astype(np.float16)
    encoded = np.concatenate([frames[:, :1], frames[:, :-1:BLOCK] + 0.5], axis=1)
    channels = np.ones((1, 2, 1, 1, 1), np.float16)
    whole = ticks[ticks + ROWS <= demos.last]
    pictures = ticks.astype(np.float16)[:, None, None, None, None] * channels
    return ClipLatents(whole, pictures, encoded[:, None, :, None, None] * channels, starts, config)


@pytest.fixture
def config():
    return WanConfig.from_dict(make_vae(2, 8, 8).config)


def test_a_clip_at_any_tick_has_its_own_picture_and_blocks(config):
    demos = demonstrations()
    clips = clips_of(demos, config)
    assert len(clips) == sum(max(0, length - ROWS) for length in LENGTHS)
    made = clips[np.arange(len(clips))]
    assert made.shape == (len(clips), 2, 1 + ROWS // BLOCK, 1, 1)
    expected = np.stack(
        [clips.ticks, *(clips.ticks + BLOCK * i + 0.5 for i in range(ROWS // BLOCK))], axis=1
    )
    np.testing.assert_array_equal(made[:, 0, :, 0, 0], expected)
    np.testing.assert_array_equal(clips.among(slice(7, 9))[np.array([1])], made[[8]])


def test_as_many_clips_are_encoded_as_every_fourth_tick_would_take():
    demos = demonstrations()
    starts = encoded_ticks(demos)
    assert starts[:9].tolist() == [0, 1, 2, 3, 16, 17, 18, 19, 32]
    assert np.isin(np.cumsum(LENGTHS)[:-1], starts).all()  # every episode begins anew
    assert len(starts) <= len(demos) / BLOCK + BLOCK * len(LENGTHS)


def test_frames_have_their_scale(config):
    scaled = replace(
        config, latent_frames=(((1.0, 1.0), (2.0, 2.0)),) * 2 + (((3.0, 3.0), (4.0, 4.0)),)
    )
    plain, made = (
        clips_of(demonstrations(), one)[np.array([5])][0, 0, :, 0, 0] for one in (config, scaled)
    )
    mean, std = np.array([1, 1, 3, 3, 3]), np.array([2, 2, 4, 4, 4])
    torch.testing.assert_close(
        torch.from_numpy(made), torch.from_numpy((plain - mean) / std).half()
    )


def test_a_clip_that_an_episode_is_too_short_for_repeats_its_last_frame():
    demos = demonstrations()
    assert clip_frames(demos, np.array([38]))[0, :, 0, 0, 0].tolist() == [38] + [39] * ROWS
