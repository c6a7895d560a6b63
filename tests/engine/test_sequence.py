"""Packing and positions by themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.sequence import (
    SequenceLayout,
    generation_positions,
    patchify,
    text_positions,
    unpatchify,
)
from strands_cosmos3.engine.transformer import rope_tables

CONFIG = TransformerConfig(4096, 36, 32, 8, 128, 12288, 151936, 64)
DROID = SequenceLayout((9, 33, 40), 2, 33, (0,), 1, 8, 15.0, 0)


def test_the_droid_sequence_has_3093_tokens():
    assert (DROID.grid, DROID.vision_tokens, DROID.tokens) == ((9, 17, 20), 3060, 3093)
    assert DROID.noisy == (slice(340, 3060), slice(1, 33))
    assert DROID.counts == (3060, 33)
    assert [DROID.counts_from(first) for first in (0, 340, 3060, 3070)] == [
        [3060, 33],
        [2720, 33],
        [0, 33],
        [0, 23],
    ]


@settings(max_examples=30)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 7), st.integers(1, 7), st.integers(1, 3)
)
def test_unpatchify_is_the_way_back(channels, frames, height, width, patch):
    latent = torch.randn(channels, frames, height, width)
    tokens = patchify(latent, patch)
    assert tokens.shape == (
        frames * -(-height // patch) * -(-width // patch),
        patch * patch * channels,
    )
    assert torch.equal(unpatchify(tokens, (frames, height, width), patch), latent)


def test_positions_share_one_clock():
    """Frame i is at pixel frame 4 i, action row j at its own frame: equal times have equal
    positions.
    """
    positions = generation_positions(DROID, CONFIG, text_tokens=100)
    rows = positions[:, DROID.vision_tokens :]
    frames = positions[0, : DROID.vision_tokens : 340]
    np.testing.assert_allclose(frames, 15100 + np.arange(9) * 4 / 15 * 6, rtol=1e-7)
    np.testing.assert_allclose(rows[0], 15100 + np.arange(33) / 15 * 6, rtol=1e-7)
    np.testing.assert_allclose(rows[0, ::4], frames, rtol=1e-7)
    assert not rows[1:].any()
    assert positions[1:, :340].tolist() == positions[1:, 340:680].tolist(), (
        "rows and columns restart in each frame"
    )
    assert positions[1, 20] == 1
    assert positions[2, 20] == 0


def test_the_offset_without_a_state_row():
    later = SequenceLayout((9, 33, 40), 2, 32, (0,), 0, 10, 15.0, 1)
    first = generation_positions(later, CONFIG, 100)[0, later.vision_tokens]
    np.testing.assert_allclose(first, 15100 + 6 / 15, rtol=1e-7)


def test_a_single_frame_carries_no_rate():
    still = SequenceLayout((1, 4, 4), 2, 1, (0,), 0, 10, 15.0, 1)
    assert generation_positions(still, CONFIG, 10)[0].tolist() == [15010.0] * 4 + [15011.0]


def test_axes_of_the_frequencies():
    """Vertical i = 1, 4, .. 58, horizontal 2, 5, .. 59, the rest temporal."""
    cpu = torch.device("cpu")
    base = np.zeros((3, 1), np.float32)
    still = rope_tables(base, CONFIG, cpu, torch.float32)[1][0, :64]
    for axis, expected in ((0, None), (1, range(1, 60, 3)), (2, range(2, 60, 3))):
        moved = base.copy()
        moved[axis] = 1.0
        changed = (
            (rope_tables(moved, CONFIG, cpu, torch.float32)[1][0, :64] != still)
            .nonzero()
            .flatten()
            .tolist()
        )
        wanted = (
            [i for i in range(64) if i >= 60 or i % 3 == 0] if expected is None else list(expected)
        )
        assert changed == wanted


def test_neighbours_near_15000_stay_apart():
    positions = np.tile(np.float32([15000.0, 15000.4]), (3, 1))
    cos, _ = rope_tables(positions, CONFIG, torch.device("cpu"), torch.float32)
    assert (cos[0] - cos[1]).abs().max() > 0.1


def test_text_positions():
    assert text_positions(3).tolist() == [[0.0, 1.0, 2.0]] * 3


@pytest.mark.parametrize(
    ("clean", "expected"),
    [((0, 1, 2), slice(0, 0)), ((), slice(0, 12)), ((0, 2), slice(4, 8)), ((1,), slice(0, 12))],
)
def test_the_noisy_stretch(clean, expected):
    assert SequenceLayout((3, 4, 4), 2, 5, clean, 0, 10, 15.0, 1).noisy[0] == expected
