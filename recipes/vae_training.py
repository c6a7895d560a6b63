"""A small Wan VAE that preserves small, coloured objects.

With a plain loss, blue and green cubes look alike and the fingers vanish. Errors are therefore
measured in luminance and chroma, with more weight on chroma and on saturated (cubes) and dark
(fingers) pixels. Pixels are [B, 3, F, H, W] in [-1, 1], F being 1 or 4 n + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKLWan  # pyright: ignore[reportPrivateImportUsage]
from diffusers.utils import logging
from torch import nn
from torch.nn import functional as F

from recipes.random_checkpoint import fresh_vae
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.wan import causal_convolution
from strands_cosmos3.training.loop import LossMetrics

_LUMA = (0.299, 0.587, 0.114)
_SATURATED = 0.32
_DARK = 0.16
_CHANGE = 0.15


@dataclass(frozen=True)
class VaeLoss:
    """Weights of the reconstruction loss."""

    chroma: float = 2.0  # of each chroma channel; luminance has 1
    saturated: float = 7.0  # added to that of saturated pixels
    dark: float = 2.0  # added to that of dark pixels
    changing: float = 4.0  # added to that of pixels that differ from the clip's first frame
    edges: float = 0.5  # of differences between neighbouring pixels
    magnitudes: float = 1.0  # of the errors' magnitudes, beside their squares
    kl: float = 1e-4  # divergence from a unit Gaussian, per latent number


def make_vae(
    latent_channels: int, base: int, decoder_base: int, patch: int = 4, seed: int = 0
) -> AutoencoderKLWan:
    """Return an untrained Wan VAE (residual, 4 x 16 x 16) that treats each frame of a clip as a
    picture at first.

    ``base`` and ``decoder_base`` are the widths of encoder and decoder, ``patch`` that of the
    patches of pixels that it begins with.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = fresh_vae(base, decoder_base, latent_channels, patch)
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, nn.Conv3d) and module.kernel_size[:2] == (3, 3):
                module.weight[:, :, :-1] = 0
    return vae


def train_only(vae: AutoencoderKLWan, *parts: str) -> None:
    """Freeze a VAE apart from some of its parts."""
    vae.requires_grad_(False)
    for part in parts:
        vae.get_submodule(part).requires_grad_(True)


def reconstruction_loss(
    vae: AutoencoderKLWan, pixels: torch.Tensor, noise: torch.Generator, config: VaeLoss
) -> tuple[torch.Tensor, LossMetrics]:
    """Return the weighted reconstruction error plus the divergence, and metrics."""
    posterior = vae.encode(pixels).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
    mean = posterior.mean
    std = posterior.std
    latents = mean + std * torch.randn(mean.shape, generator=noise).to(mean.device)
    decoded = vae.decode(latents).sample  # pyright: ignore[reportAttributeAccessIssue]
    kl = 0.5 * (mean.pow(2) + std.pow(2) - 1 - 2 * std.log()).mean()
    error = weighted_error(decoded, pixels, config)
    reached = picture_psnr(decoded, pixels)
    return error + config.kl * kl, {"loss": error.item(), "psnr": reached, "kl": kl.item()}


def psnr(squared_error: torch.Tensor) -> float:
    """Return the peak signal-to-noise ratio [dB] of a mean squared error of pixels in [-1, 1]."""
    return float(-10 * torch.log10(squared_error.detach() / 4))


def picture_psnr(decoded: torch.Tensor, pixels: torch.Tensor) -> float:
    """Return the ratio [dB] of decoded pictures, whose pixels are cut off at -1 and 1."""
    return psnr((decoded.detach().clamp(-1, 1) - pixels).square().mean())


def weighted_error(decoded: torch.Tensor, pixels: torch.Tensor, config: VaeLoss) -> torch.Tensor:
    """Return the mean error of pixels, weighted by what they show."""
    unit = (pixels + 1) / 2
    weight = colour_weight(pixels, config.saturated)
    weight = weight + config.dark * (unit.mean(1) < _DARK).float()
    weight = weight + config.changing * ((unit - unit[:, :, :1]).abs().amax(1) / _CHANGE).clamp(
        0, 1
    )
    weight = weight / weight.mean()
    error = decoded - pixels
    luma = torch.stack([part * error[:, i] for i, part in enumerate(_LUMA)]).sum(0)
    chroma = [error[:, 2] - luma, error[:, 0] - luma]  # Cb and Cr up to scale
    cost = partial(_cost, magnitudes=config.magnitudes)
    parts = [cost(luma), *(config.chroma * cost(c) for c in chroma)]
    edges = sum(cost(luma.diff(dim=axis)).mean() for axis in (-1, -2))
    return (torch.stack(parts).sum(0) * weight).mean() + config.edges * edges


def colour_weight(pixels: torch.Tensor, saturated: float) -> torch.Tensor:
    """Return weights [B, F, H, W] of pixels [B, 3, F, H, W] in [-1, 1]: 1 for grey, 1 +
    ``saturated`` for a strong colour.
    """
    saturation = (pixels.amax(1) - pixels.amin(1)) / 2
    return 1 + saturated * ((saturation - _SATURATED) / 0.15).clamp(0, 1)


def _cost(x: torch.Tensor, magnitudes: float) -> torch.Tensor:
    return magnitudes * (x * x + 1e-3**2).sqrt() + x * x


class FlatConv(nn.Module):
    """diffusers' ``WanCausalConv3d`` as a convolution of single frames.

    The frames that the kernel sees before each one are given as more channels: backwards, on CPUs,
    a convolution in two dimensions is three times as fast as one in three.
    """

    def __init__(self, conv: nn.Conv3d):
        super().__init__()
        self.conv = conv
        # in diffusers: width and height twice each, and all frames before
        padding: Any = conv._padding
        self._padding = (padding[4] // 2, padding[2], padding[0])

    def forward(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        weight, bias, stride = self.conv.weight, self.conv.bias, self.conv.stride
        return causal_convolution(x, cache_x, weight, bias, stride, self._padding, _flat)


def _flat(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
) -> torch.Tensor:
    """Convolve x [B, C, T, H, W] in two dimensions, the frames under the kernel being channels."""
    in_time, taps = stride[0], weight.shape[2]
    n = (x.shape[2] - taps) // in_time + 1
    frames = x.permute(0, 2, 3, 4, 1)  # channels last
    seen = torch.cat(
        [frames[:, tap : tap + (n - 1) * in_time + 1 : in_time] for tap in range(taps)], dim=-1
    )
    kernels = weight.permute(0, 2, 1, 3, 4).flatten(1, 2)
    pictures = seen.flatten(0, 1).permute(0, 3, 1, 2)
    made = F.conv2d(pictures, kernels, bias, tuple(stride[1:]), tuple(padding[1:]))
    return made.unflatten(0, (len(x), n)).transpose(1, 2)


def convolve_flat(model: nn.Module) -> None:
    """Replace every causal convolution of a VAE, in place, by a :class:`FlatConv` that shares
    its weights.
    """
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, nn.Conv3d):
                setattr(owner, name, FlatConv(child))


def latent_moments(vae: Any) -> tuple[torch.Tensor, ...]:
    """Mean and deviation of the channels of a VAE's latents, [1, C, 1, 1, 1] each."""
    names = ("latents_mean", "latents_std")
    return tuple(torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in names)


def load_vae(checkpoint: Checkpoint) -> AutoencoderKLWan:
    """The VAE of a checkpoint in float32, for training."""
    with without_warnings():
        return AutoencoderKLWan.from_pretrained(checkpoint.root / "vae", torch_dtype=torch.float32)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence diffusers, which keeps the ``latent_frames`` of a config and warns of them with
    all their numbers.
    """
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def plain_state(vae: AutoencoderKLWan) -> dict[str, torch.Tensor]:
    """Weights of a VAE under diffusers' names, with or without the two-dimensional wrappers."""
    wrapped = {name for name, module in vae.named_modules() if isinstance(module, FlatConv)}
    state = {}
    for name, tensor in vae.state_dict().items():
        owner, _, leaf = name.rpartition(".conv.")
        state[f"{owner}.{leaf}" if owner in wrapped else name] = tensor.detach().float()
    return state


def plain_vae(
    vae: AutoencoderKLWan,
    dtype: torch.dtype = torch.float32,
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """A copy of a VAE on the CPU without the two-dimensional wrappers and without the path it was
    read from; ``changes`` are of its config.
    """
    config = {key: value for key, value in vae.config.items() if key != "_name_or_path"}
    with without_warnings():
        plain: Any = AutoencoderKLWan.from_config({**config, **(changes or {})})
    plain.load_state_dict(plain_state(vae))
    return plain.to(dtype)
