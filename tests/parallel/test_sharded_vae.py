"""The VAE over width shards: exact for any widths, up to the roundings that helpers/parity.py allows;
tiles are not.
"""

from functools import cache

import numpy as np
import pytest
import torch

from helpers import rank_cases as cases
from helpers.parity import reference, share
from helpers.stock_loop import stock_decoded, stock_encoded, stock_pixels

FRAMES = 9


@cache
def known(folder, columns):
    """Of latents and of pixels: what they are in float64, and in diffusers' float32."""
    clip, given = cases.clip_and_latents(columns, FRAMES)
    return [
        [made(folder, what, dtype) for dtype in (torch.float64, torch.float32)]
        for made, what in ((stock_encoded, clip), (stock_decoded, given))
    ]


def share_of(found, folder, columns):
    """The larger share of latents and pixels, those that there are."""
    both = zip(found, known(folder, columns), strict=True)
    return max(share(one, *expected) for one, expected in both if one is not None)


def compare(harness, folder, ranks, widths, split="exact", tp=None):
    """One process and the ranks, (latents, pixels) for each width; all ranks hold the same latents,
    and the first the pixels.
    """
    which = {"folder": folder, "widths": widths, "frames": FRAMES}
    alone = cases.encode_decode(**which)
    found = harness.group(ranks).run(
        "encode_decode", tp=tp or ranks, cfg=ranks // (tp or ranks), split=split, **which
    )
    assert all(pixels is None for rank in found[1:] for _, pixels in rank), (
        "only rank 0 keeps pixels"
    )
    assert all(
        np.array_equal(rank[i][0], found[0][i][0]) for rank in found for i in range(len(widths))
    )
    for columns, one in zip(widths, alone, strict=True):
        assert share_of(one, folder, columns) <= 1
    return alone, found[0]


def compare_exactly(harness, folder, ranks, widths, **how):
    alone, found = compare(harness, folder, ranks, widths, **how)
    for columns, one in zip(widths, found, strict=True):
        assert share_of(one, folder, columns) <= 1, columns
    return alone, found


def same_bits(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_two_ranks(harness, checkpoints):
    """Even, uneven, and one column each."""
    compare_exactly(harness, checkpoints["nano"], 2, (4, 5, 2))


def test_four_ranks_and_a_picture_too_narrow_to_split(harness, checkpoints):
    alone, found = compare_exactly(harness, checkpoints["nano"], 4, (7, 4, 3), tp=2)
    assert same_bits(found[2], alone[2])  # three columns: everybody has all of it


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_any_width(harness, checkpoints, ranks):
    compare_exactly(harness, checkpoints["nano"], ranks, tuple(range(ranks, 2 * ranks + 5)))


def test_tiles_are_approximate_in_decoding_only(harness, checkpoints):
    [alone], [found] = compare(harness, checkpoints["nano"], 2, (14,), split="tiles")
    assert share_of((found[0], None), checkpoints["nano"], 14) <= 1
    assert share_of((None, found[1]), checkpoints["nano"], 14) > 10
    assert np.abs(found[1] - alone[1]).max() < 1.0


def test_tiles_fade_linearly_into_each_other_over_their_overlap(harness, checkpoints):
    """Latent columns 0 to 10 and 3 to 13, of 16 pixels each: both tiles cover pixels 48 to 175."""
    folder = checkpoints["nano"]
    _, given = cases.clip_and_latents(14, FRAMES)
    fade = (torch.arange(128) + 0.5) / 128

    def faded(dtype):
        left, right = (
            stock_decoded(folder, tile.contiguous(), dtype)
            for tile in (given[..., :11], given[..., 3:])
        )
        both = left[..., 48:] * (1 - fade) + right[..., :128] * fade
        return torch.cat([left[..., :48], both, right[..., 128:]], dim=-1)

    which = {"folder": folder, "widths": (14,), "frames": FRAMES}
    [(_, pixels)] = harness.group(2).run("encode_decode", tp=2, cfg=1, split="tiles", **which)[0]
    assert share(pixels, faded(torch.float64), faded(torch.float32)) <= 1


def test_off(harness, checkpoints):
    [alone], [found] = compare(harness, checkpoints["nano"], 2, (5,), split="off")
    assert same_bits(found, alone)


def test_a_whole_inference_with_pixels(harness, checkpoints):
    folder, asked = checkpoints["nano"], {"mode": "inverse_dynamics", "frames": 9}
    expected = reference(folder, cases.question(**asked))
    first, *others = harness.group(2).run("step", asked=asked, folder=folder, tp=1, cfg=2)
    assert not any("pixels" in other for other in others)
    for found in (first, cases.step(asked, folder=folder)):
        assert expected.share(found) <= 1
        video = torch.from_numpy(found["video"])
        exact, peer = (stock_pixels(folder, video, t) for t in (torch.float64, torch.float32))
        assert share(found["pixels"], exact, peer) <= 1
