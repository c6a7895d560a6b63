"""The VAE over width shards: exact for any widths; tiles are not."""

import numpy as np
import pytest
import torch

from helpers import rank_cases as cases

FRAMES = 9
TOLERANCE = 1e-5


def compare(harness, folder, ranks, widths, split="exact", tp=None):
    which = {"folder": folder, "widths": widths, "frames": FRAMES}
    alone = cases.encode_decode(**which)
    found = harness.group(ranks).run(
        "encode_decode", tp=tp or ranks, cfg=ranks // (tp or ranks), split=split, **which
    )
    assert all(pixels is None for rank in found[1:] for _, pixels in rank), (
        "only rank 0 keeps pixels"
    )
    latents = [
        max(np.abs(rank[i][0] - alone[i][0]).max() for rank in found) for i in range(len(widths))
    ]
    pixels = [np.abs(found[0][i][1] - alone[i][1]).max() for i in range(len(widths))]
    assert all(
        np.array_equal(rank[i][0], found[0][i][0]) for rank in found for i in range(len(widths))
    )
    return latents, pixels


def test_two_ranks(harness, checkpoints):
    """Even, uneven, and one column each."""
    latents, pixels = compare(harness, checkpoints["nano"], 2, (4, 5, 2))
    assert max(latents + pixels) <= TOLERANCE


def test_four_ranks_and_a_picture_too_narrow_to_split(harness, checkpoints):
    latents, pixels = compare(harness, checkpoints["nano"], 4, (7, 4, 3), tp=2)
    assert max(latents + pixels) <= TOLERANCE
    assert latents[2] == pixels[2] == 0  # three columns: everybody has all of it


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_any_width(harness, checkpoints, ranks):
    latents, pixels = compare(
        harness, checkpoints["nano"], ranks, tuple(range(ranks, 2 * ranks + 5))
    )
    assert max(latents + pixels) <= TOLERANCE


def test_tiles_are_approximate_in_decoding_only(harness, checkpoints):
    latents, pixels = compare(harness, checkpoints["nano"], 2, (14,), split="tiles")
    assert max(latents) <= TOLERANCE
    assert TOLERANCE < max(pixels) < 1.0


def test_tiles_fade_linearly_into_each_other_over_their_overlap(harness, checkpoints):
    """Latent columns 0 to 10 and 3 to 13, of 16 pixels each: both tiles cover pixels 48 to 175."""
    which = {"folder": checkpoints["nano"], "widths": (14,), "frames": FRAMES}
    [(latents, _)] = cases.encode_decode(**which)
    given = torch.randn(latents.shape, generator=torch.Generator().manual_seed(14))
    vae, fade = (
        cases.engine(split="exact", folder=which["folder"]).vae,
        (torch.arange(128) + 0.5) / 128,
    )
    with torch.inference_mode():
        left, right = (vae.decode(tile.contiguous()) for tile in (given[..., :11], given[..., 3:]))
    both = left[..., 48:] * (1 - fade) + right[..., :128] * fade
    [(_, pixels)] = harness.group(2).run("encode_decode", tp=2, cfg=1, split="tiles", **which)[0]
    assert (
        np.abs(pixels - torch.cat([left[..., :48], both, right[..., 128:]], dim=-1).numpy()).max()
        <= TOLERANCE
    )


def test_off(harness, checkpoints):
    latents, pixels = compare(harness, checkpoints["nano"], 2, (5,), split="off")
    assert max(latents + pixels) == 0


def test_a_whole_inference_with_pixels(harness, checkpoints):
    asked = {"mode": "inverse_dynamics", "frames": 9}
    alone = cases.step(asked, folder=checkpoints["nano"])
    first, *others = harness.group(2).run(
        "step", asked=asked, folder=checkpoints["nano"], tp=1, cfg=2
    )
    assert not any("pixels" in other for other in others)
    assert all(np.abs(first[name] - alone[name]).max() <= 5e-5 for name in alone)
