"""Linear codes of blocks: what they keep, and what a distance from them means in pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipes.muon import muon_and_adamw
from recipes.table_policy.block_codes import BlockCodes, blocks
from recipes.vae_training import make_vae, train_only
from strands_cosmos3.training.loop import Loop, TrainLoopConfig

CODES = 6


def clips(count: int, seed: int = 0) -> torch.Tensor:
    """Clips [count, 3, 9, 32, 48] whose blocks vary in a few directions only."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.linalg.qr(
        torch.randn(3 * 4 * 16 * 16, CODES, generator=torch.Generator().manual_seed(9))
    )[0]
    size = torch.tensor([9.0, 6.0, 4.0, 3.0, 2.0, 1.0])
    flat = (torch.randn(count, 3, 2, 3, CODES, generator=generator) * size) @ drawn.T + 0.2
    split = flat.unflatten(-1, (3, 4, 16, 16))  # [n, F', H', W', 3, 4, 16, 16]
    pixels = split.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(2, 3).flatten(3, 4).flatten(4, 5)
    return pixels[:, :, 3:]  # the first latent has one frame


@pytest.fixture(scope="module")
def fitted() -> BlockCodes:
    return BlockCodes.fit((clips(64, seed) for seed in range(4)), CODES)


def test_a_block_is_four_frames_and_the_first_frame_stands_for_four_alike():
    pixels = torch.arange(3 * 9 * 32 * 48, dtype=torch.float32).view(1, 3, 9, 32, 48)
    made = blocks(pixels).unflatten(-1, (3, 4, 16, 16))
    assert made.shape == (1, 3, 2, 3, 3, 4, 16, 16)
    torch.testing.assert_close(made[0, 2, 1, 2], pixels[0, :, 5:9, 16:32, 32:48])
    for frame in range(4):
        torch.testing.assert_close(made[0, 0, 1, 0, :, frame], pixels[0, :, 0, 16:32, :16])


def test_codes_of_later_frames_keep_the_blocks_and_have_about_unit_variance(fitted: BlockCodes):
    fresh = clips(32, seed=7)
    codes = fitted.of(fresh)
    assert codes.shape == (32, CODES, 3, 2, 3)
    drawn = codes.movedim(1, -1) * fitted.deviation @ fitted.components.T + fitted.mean
    later = blocks(fresh)[:, 1:]
    assert (drawn[:, 1:] - later).square().mean() < 0.1 * later.var()
    assert 0.3 < codes[:, :, 1:].var() < 3
    torch.testing.assert_close(
        fitted.components.T @ fitted.components, torch.eye(CODES), rtol=0, atol=1e-4
    )
    assert (fitted.deviation.diff() <= 0).all()


def test_an_error_counts_by_the_deviation_of_its_code(fitted: BlockCodes):
    fresh = clips(4, seed=8)
    codes = fitted.of(fresh)
    assert fitted.error(codes, fresh) < 1e-8

    def of_one(code: int, size: float) -> float:
        off = torch.zeros_like(codes)
        off[:, code] = size
        return float(fitted.error(codes + off, fresh))

    assert of_one(0, 0.2) == pytest.approx(4 * of_one(0, 0.1), rel=1e-3)
    assert of_one(0, 0.1) / of_one(5, 0.1) == pytest.approx(
        float(fitted.deviation[0] / fitted.deviation[5]), rel=1e-3
    )
    assert sum(of_one(code, 0.1) for code in range(CODES)) == pytest.approx(0.01, rel=1e-3)


def test_an_encoder_learns_the_codes(tmp_path):
    vae = make_vae(CODES, 8, 8)
    codes = BlockCodes.fit(iter([clips(64)]), CODES)
    train_only(vae, "quant_conv", "encoder")

    def loss(step: int):
        pixels = clips(4, seed=100 + step)[:, :, : 1 if step % 2 else 5]
        apart = codes.error(vae.encode(pixels).latent_dist.mean, pixels)
        return apart, {"loss": apart.item()}

    loop = Loop(vae, loss, TrainLoopConfig(60, 2e-3, 1), tmp_path, muon_and_adamw(0.02))
    seen: list[float] = []
    loop.run(on_step=lambda step, metrics: seen.append(metrics["loss"]))
    assert np.mean(seen[-6:]) < 0.5 * np.mean(seen[:2])
