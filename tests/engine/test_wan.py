"""The VAE against diffusers' ``AutoencoderKLWan``: the same names, and latents and pixels as near to
those in float64 as helpers/parity.py says.
"""

import re

import pytest
import torch
from diffusers import AutoencoderKLWan

from helpers.parity import in_float64, share
from recipes.random_checkpoint import fresh_vae
from strands_cosmos3.engine.latents import frame_scale
from strands_cosmos3.engine.wan import WanAutoencoder
from strands_cosmos3.engine.wan_config import WanConfig
from strands_cosmos3.errors import LayoutError

SIZES = [(8, 12, 16), (12, 8, 48)]


@pytest.fixture(params=SIZES, ids=str, scope="module")
def pair(request):
    return pair_of(fresh_vae(*request.param).config)


@pytest.fixture(scope="module")
def small():
    """The config of the first of these sizes."""
    return fresh_vae(*SIZES[0]).config


def pair_of(config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        stock = AutoencoderKLWan.from_config(config).eval().requires_grad_(False)
        for name, parameter in stock.named_parameters():
            if name.endswith("gamma"):
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape))
    ours = WanAutoencoder(WanConfig.from_dict(stock.config)).eval()
    ours.load_state_dict(stock.state_dict())  # strict: the released names, all of them
    return stock, ours, in_float64(stock)


def share_of_latents(pair, pixels):
    stock, ours, exact = pair
    with torch.no_grad():
        wanted, peer = (
            model.encode(x).latent_dist.mode()
            for model, x in ((exact, pixels.double()), (stock, pixels))
        )
        return share(ours.encode(pixels), wanted, peer)


def share_of_pixels(pair, latents):
    stock, ours, exact = pair
    with torch.no_grad():
        wanted, peer = exact.decode(latents.double()).sample, stock.decode(latents).sample
        return share(ours.decode(latents), wanted, peer)


@pytest.mark.parametrize("frames", [1, 5, 7, 9])
def test_latents_and_pixels_are_diffusers(pair, frames):
    """Seven frames are one and four: the rest is dropped by both."""
    drawing = torch.Generator().manual_seed(frames)
    pixels = torch.rand(2, 3, frames, 32, 48, generator=drawing) * 2 - 1
    assert share_of_latents(pair, pixels) <= 1
    with torch.no_grad():
        latents = pair[0].encode(pixels).latent_dist.mode()
    assert share_of_pixels(pair, latents) <= 1


def test_loud_latents(pair):
    channels = pair[0].config.z_dim
    loud = 50 * torch.randn(2, channels, 1, 2, 3, generator=torch.Generator().manual_seed(1))
    assert share_of_pixels(pair, loud) <= 1


def test_shortcuts_that_lengthen_and_narrow(small):
    """Not so in the released VAE: a block of the decoder that makes two frames of one also
    halves the channels.
    """
    pair = pair_of({**small, "temperal_downsample": [True, True, False]})
    latents = torch.randn(1, 16, 2, 3, 5, generator=torch.Generator().manual_seed(6))
    assert share_of_pixels(pair, latents) <= 1


def test_in_bfloat16_every_bit_is_the_same():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        stock = fresh_vae(*SIZES[0]).eval().bfloat16()
    ours = WanAutoencoder(WanConfig.from_dict(stock.config)).eval().bfloat16()
    ours.load_state_dict(stock.state_dict())
    pixels = (
        torch.rand(1, 3, 9, 32, 32, generator=torch.Generator().manual_seed(5)) * 2 - 1
    ).bfloat16()
    with torch.no_grad():
        latents = stock.encode(pixels).latent_dist.mode()
        assert torch.equal(ours.encode(pixels)[:, :, 1:], latents[:, :, 1:])
        # one tap, not three
        torch.testing.assert_close(
            ours.encode(pixels)[:, :, :1], latents[:, :, :1], rtol=0.05, atol=0.05
        )
        assert torch.equal(ours.decode(latents)[:, :, 1:], stock.decode(latents).sample[:, :, 1:])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"is_residual": False}, "is_residual is False"),
        ({"attn_scales": [0.5]}, "attn_scales is"),
        ({"latents_std": [1.0]}, "z_dim = 16"),
        ({"latent_frames": [{"mean": [0.0] * 16, "std": [1.0]}]}, "z_dim = 16"),
        ({"latent_frames": [{"mean": [0.0] * 16, "std": [0.0] * 16}]}, "above zero"),
        ({"scale_factor_spatial": 8}, r"\(4, 8\); Cosmos 3 needs \(4, 16\)"),
        ({"patch_size": None}, r"needs \(4, 16\)"),
        ({"temperal_downsample": [True, True, True]}, r"needs \(4, 16\)"),
        ({"temperal_downsample": [True]}, "one value fewer"),
        ({"z_dim": None}, "download it again"),
        ({"dim_mult": 4}, "download it again"),
    ],
)
def test_another_network_is_refused(small, change, says):
    config = {**small, **change}
    with pytest.raises(LayoutError, match=says):
        WanConfig.from_dict({key: value for key, value in config.items() if not re.match("_", key)})


def test_latents_of_later_frames_have_their_own_scale(small):
    config = WanConfig.from_dict(
        {
            **small,
            "latent_frames": [
                {"mean": [0.0] * 16, "std": [1.0] * 16},
                {"mean": [0.5] * 16, "std": [2.0] * 16},
            ],
        }
    )
    mean, std = frame_scale(config)(torch.zeros(1, 16, 4, 2, 2))
    # the last one given is that of all later frames
    assert mean[0].flatten().tolist() == [0, 0.5, 0.5, 0.5]
    assert std[3].flatten().tolist() == [1, 2, 2, 2]
