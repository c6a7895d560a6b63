"""The VAE stage: the gate sees what would break the language, and errors weigh what pictures
show.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.parity import in_float64, share
from recipes.table_policy.colour_gate import ColourGate, colour_gate
from recipes.vae_training import (
    VaeLoss,
    convolve_flat,
    make_vae,
    plain_state,
    train_only,
    weighted_error,
)
from strands_cosmos3.errors import TrainingError
from strands_cosmos3.training.windows import to_pixels


class Through:
    """Stands in for a VAE: answers its input, changed."""

    device = torch.device("cpu")

    def __init__(self, change):
        self.change = change

    def encode(self, pixels):
        latents = type("L", (), {"mode": lambda _: self.change(pixels)})()
        return type("E", (), {"latent_dist": latents})()

    def decode(self, latents):
        return type("D", (), {"sample": latents})()


def picture() -> np.ndarray:
    frame = np.full((1, 64, 64, 3), (204, 176, 140), np.uint8)
    for i, rgb in enumerate(((212, 31, 28), (33, 148, 56), (26, 82, 209))):
        frame[0, 10:16, 10 + 18 * i : 16 + 18 * i] = rgb
    return frame


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        (lambda x: x, True),
        (lambda x: 0.9 * x + 0.02, True),
        (lambda x: x.mean(1, keepdim=True).expand_as(x), False),  # no colour at all
        (lambda x: x[:, [0, 2, 1]], False),  # blue and green exchanged
        # alike
        (
            lambda x: torch.cat(
                [x[:, :1], x[:, 1:].mean(1, keepdim=True).expand(-1, 2, -1, -1, -1)], 1
            ),
            False,
        ),
    ],
)
def test_the_gate_passes_what_keeps_colours_apart_and_nothing_else(change, passes):
    gate = colour_gate(Through(change), picture())
    assert gate.passed == passes
    if not passes:
        with pytest.raises(TrainingError, match="blue"):
            gate.require()


def test_one_lost_colour_is_enough_to_fail():
    assert not ColourGate(0.97, {"red": 1.0, "green": 1.0, "blue": 0.85}, 30.0).passed


def test_a_cube_weighs_more_than_the_table():
    pixels = to_pixels(picture())
    on_cube, on_table = pixels.clone(), pixels.clone()
    on_cube[:, :, :, 10:16, 10:16] += 0.2
    on_table[:, :, :, 30:36, 10:16] += 0.2
    of_cube, of_table = (float(weighted_error(x, pixels, VaeLoss())) for x in (on_cube, on_table))
    nothing = float(weighted_error(pixels, pixels, VaeLoss()))
    assert of_cube - nothing > 5 * (of_table - nothing)


def test_without_magnitudes_an_error_counts_by_its_square():
    """The picture that answers two truths best is then their mean, and with magnitudes alone any
    between them.
    """
    pixels = torch.zeros(1, 3, 1, 16, 16)
    grey, squares = (
        torch.ones(1, 3, 1, 1, 1),
        VaeLoss(saturated=0, dark=0, changing=0, edges=0, magnitudes=0),
    )

    def cost(error: float, config: VaeLoss) -> float:
        return float(weighted_error(pixels + error * grey, pixels, config))

    assert cost(0.4, squares) == pytest.approx(4 * cost(0.2, squares))
    assert cost(0.4, squares) == pytest.approx(0.16)
    assert cost(0.4, VaeLoss(edges=0)) == pytest.approx(0.4 + 0.16, rel=0.02)


def test_only_the_named_parts_are_trained():
    vae = make_vae(16, 8, 8)
    train_only(vae, "quant_conv", "encoder")
    trained = {
        name.split(".")[0] for name, parameter in vae.named_parameters() if parameter.requires_grad
    }
    assert trained == {"quant_conv", "encoder"}
    train_only(vae, "decoder")
    assert {
        name.split(".")[0] for name, parameter in vae.named_parameters() if parameter.requires_grad
    } == {"decoder"}


def test_flat_first_frames_are_the_stock_vaes():
    from diffusers import AutoencoderKLWan

    vae = make_vae(16, 8, 8, seed=1)
    stock = AutoencoderKLWan.from_config(vae.config)
    convolve_flat(vae)
    stock.load_state_dict(plain_state(vae))
    x = torch.rand(2, 3, 1, 64, 96) * 2 - 1
    with torch.no_grad():
        found, exact, peer = (
            model.encode(x.to(model.dtype)).latent_dist.mode()
            for model in (vae, in_float64(stock), stock)
        )
    assert share(found, exact, peer) <= 1
