"""The first stage: a small Wan VAE that keeps what the policy must see, and the gate that it has to pass.

A plain reconstruction loss forgets what is small: blue and green cubes come out alike, the fingers vanish. So errors are
measured in luminance and chroma, chroma counting more, and pixels that are saturated (cubes) or dark (fingers) weigh more.
The gate decodes pictures of every cube at the end and compares hues; no policy is trained on latents that fail it.

Pixels are [B, 3, F, H, W] in [-1, 1], F being 1 or 4 n + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKLWan  # pyright: ignore[reportPrivateImportUsage]
from numpy.typing import NDArray
from torch import nn

from strands_cosmos3.engine.factory import fresh_vae
from strands_cosmos3.engine.vae import convolve_flat
from strands_cosmos3.errors import TrainingError
from strands_cosmos3.training.loop import LossMetrics
from strands_cosmos3.training.shards import Demos

_LUMA = (0.299, 0.587, 0.114)
_SATURATED = 0.32
_DARK = 0.16
_HUE_TOLERANCE_RAD = 0.35
_GATE_SHARE = 0.9


@dataclass(frozen=True)
class VaeSizes:
    """Sizes of the VAE.

    Args:
        latent_channels: z.
        base, decoder_base: Base widths of encoder and decoder.
    """

    latent_channels: int = 48
    base: int = 12
    decoder_base: int = 12


@dataclass(frozen=True)
class VaeLoss:
    """What counts in a reconstruction.

    Args:
        chroma: Weight of each chroma channel beside luminance.
        saturated: Further weight of saturated pixels. dark: Of dark ones.
        kl: Weight of the divergence from a unit Gaussian, for each latent number.
    """

    chroma: float = 2.0
    saturated: float = 7.0
    dark: float = 2.0
    kl: float = 1e-4


def make_vae(sizes: VaeSizes, seed: int = 0) -> AutoencoderKLWan:
    """A Wan VAE of the released kind (residual, 4 x 16 x 16) with fresh weights.

    Taps that look back in time start at zero: on clips the fresh model does what it does on pictures, frame by frame.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = fresh_vae(sizes.base, sizes.decoder_base, sizes.latent_channels)
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, nn.Conv3d) and module.kernel_size[0] == 3 and module.kernel_size[1] == 3:
                module.weight[:, :, :-1] = 0
    return vae


def flat_first_frames(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """The same module, computing in two dimensions as the engine does: lone first frames, and on CPUs clips as well."""
    convolve_flat(vae)
    return vae


def keep_first_frames(vae: AutoencoderKLWan) -> None:
    """Freeze all of the encoder that a first frame passes through; only what looks back in time may still learn.

    So a first frame's latent stays what it is, to the bit, while the VAE learns motion: policies that were trained on first
    frames stay valid. The decoder stays free.
    """
    vae.requires_grad_(True)
    for name, module in vae.named_modules():
        if not name.startswith(("encoder", "quant_conv")):
            continue
        looks_back = isinstance(module, nn.Conv3d) and module.kernel_size[0] > 1
        for key, parameter in module.named_parameters(recurse=False):
            if looks_back and key == "weight" and "time_conv" not in name:
                parameter.register_hook(_without_last_tap)
            elif "time_conv" not in name:
                parameter.requires_grad_(False)


def _without_last_tap(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[:, :, -1] = 0
    return gradient


def to_pixels(frames: NDArray[np.uint8]) -> torch.Tensor:
    """[B, H, W, 3] pictures or [B, F, H, W, 3] clips -> [B, 3, F, H, W] in [-1, 1]."""
    clips = torch.from_numpy((frames if frames.ndim == 5 else frames[:, None]).astype(np.float32))
    return clips.permute(0, 4, 1, 2, 3).div_(127.5).sub_(1)


def reconstruction_loss(
    vae: AutoencoderKLWan, pixels: torch.Tensor, noise: torch.Generator, how: VaeLoss
) -> tuple[torch.Tensor, LossMetrics]:
    """Weighted error of what comes back, and the divergence."""
    posterior = vae.encode(pixels).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
    mean, std = posterior.mean, posterior.std
    latents = mean + std * torch.randn(mean.shape, generator=noise).to(mean.device)
    decoded = vae.decode(latents).sample  # pyright: ignore[reportAttributeAccessIssue]
    kl = 0.5 * (mean.pow(2) + std.pow(2) - 1 - 2 * std.log()).mean()
    error = _weighted_error(decoded, pixels, how)
    with torch.no_grad():
        psnr = -10 * torch.log10((decoded.clamp(-1, 1) - pixels).pow(2).mean() / 4)
    return error + how.kl * kl, {"loss": error.item(), "psnr": psnr.item(), "kl": kl.item()}


def _weighted_error(decoded: torch.Tensor, pixels: torch.Tensor, how: VaeLoss) -> torch.Tensor:
    unit = (pixels + 1) / 2
    saturation = unit.amax(1) - unit.amin(1)
    weight = 1 + how.saturated * ((saturation - _SATURATED) / 0.15).clamp(0, 1)
    weight = weight + how.dark * (unit.mean(1) < _DARK).float()
    weight = weight / weight.mean()
    off = decoded - pixels
    luma = torch.stack([share * off[:, i] for i, share in enumerate(_LUMA)]).sum(0)
    chroma = [off[:, 2] - luma, off[:, 0] - luma]  # Cb and Cr but for their scale
    parts = [_charbonnier(luma), *(how.chroma * _charbonnier(c) for c in chroma)]
    return (torch.stack(parts).sum(0) * weight).mean()


def _charbonnier(x: torch.Tensor) -> torch.Tensor:
    return (x * x + 1e-3**2).sqrt() + x * x


def picture_batch(demos: Demos, batch: int, seed: int, step: int) -> torch.Tensor:
    """Pictures of a step, drawn by (seed, step)."""
    rng = np.random.default_rng([seed, step])
    return to_pixels(demos.frames(rng.integers(len(demos), size=batch)))


def clip_batch(demos: Demos, starts: NDArray[np.int64], frames: int, batch: int, seed: int, step: int) -> torch.Tensor:
    """Clips of a step, drawn by (seed, step)."""
    rng = np.random.default_rng([seed, step])
    chosen = starts[rng.integers(len(starts), size=batch)]
    return to_pixels(np.stack([demos.frames(range(tick, tick + frames)) for tick in chosen]))


@dataclass(frozen=True)
class ColourGate:
    """How well the colours of small things survive.

    Args:
        share: Of strongly coloured pixels, how many come back with their hue (within 20 degrees) and half their saturation.
        by_colour: The same for red, green and blue.
        psnr: Of whole pictures, dB.
    """

    share: float
    by_colour: dict[str, float]
    psnr: float

    @property
    def passed(self) -> bool:
        """Whether policies may be trained on these latents."""
        return min(self.by_colour.values()) >= _GATE_SHARE

    def require(self) -> None:
        """Stop where colours do not survive.

        Raises:
            TrainingError: They do not; the figures are named.
        """
        if not self.passed:
            figures = ", ".join(f"{name} {share:.0%}" for name, share in self.by_colour.items())
            raise TrainingError(
                f"the VAE does not keep colours apart ({figures}; each must reach {_GATE_SHARE:.0%}): a policy could not obey "
                "'red'. Train the VAE longer (--vae-steps) before any policy."
            )


@torch.no_grad()
def colour_gate(vae: AutoencoderKLWan, frames: NDArray[np.uint8]) -> ColourGate:
    """Decode pictures [n, H, W, 3] and compare the hues of what is strongly coloured in them."""
    pixels = to_pixels(frames)
    decoded = torch.cat([_there_and_back(vae, part) for part in pixels.split(16)]).clamp(-1, 1)
    psnr = float(-10 * torch.log10((decoded - pixels).pow(2).mean() / 4))
    real, made = ((x[:, :, 0] + 1) / 2 for x in (pixels, decoded))
    hue, saturation = _hue(real)
    hue_made, saturation_made = _hue(made)
    off = (hue - hue_made).abs()
    right = (torch.minimum(off, 2 * torch.pi - off) < _HUE_TOLERANCE_RAD) & (saturation_made > 0.5 * saturation)
    strong = saturation > 0.45
    by_colour = {}
    for name, angle in (("red", 0.0), ("green", 2 * torch.pi / 3), ("blue", 4 * torch.pi / 3)):
        away = (hue - angle).abs()
        mine = strong & (torch.minimum(away, 2 * torch.pi - away) < torch.pi / 6)
        by_colour[name] = float(right[mine].float().mean()) if mine.any() else 0.0
    return ColourGate(float(right[strong].float().mean()), by_colour, psnr)


def _there_and_back(vae: AutoencoderKLWan, pixels: torch.Tensor) -> torch.Tensor:
    device = getattr(vae, "device", torch.device("cpu"))
    latents = vae.encode(pixels.to(device)).latent_dist.mode()  # pyright: ignore[reportAttributeAccessIssue]
    return vae.decode(latents).sample.cpu()  # pyright: ignore[reportAttributeAccessIssue]


def _hue(rgb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hue angle [rad, 0..2 pi) and saturation (largest minus smallest channel) of [B, 3, H, W] in [0, 1]."""
    r, g, b = rgb.unbind(1)
    angle = torch.atan2(3**0.5 * (g - b), 2 * r - g - b) % (2 * torch.pi)
    return angle, rgb.amax(1) - rgb.amin(1)
