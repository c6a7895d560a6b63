"""The colour gate: no policy is trained on latents in which cubes lose their colour."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKLWan  # pyright: ignore[reportPrivateImportUsage]
from numpy.typing import NDArray

from recipes.vae_training import picture_psnr
from strands_cosmos3.errors import TrainingError
from strands_cosmos3.training.windows import to_pixels

_HUE_TOLERANCE_RAD = 0.35
_MIN_SHARE = 0.9


@dataclass(frozen=True)
class ColourGate:
    """How well the colours of small objects survive."""

    # of strongly coloured pixels that keep their hue (within 20 degrees) and half of their
    # saturation
    share: float
    by_colour: dict[str, float]  # the same for red, green and blue
    psnr: float  # of whole pictures [dB]

    @property
    def passed(self) -> bool:
        """Whether every colour survives."""
        return min(self.by_colour.values()) >= _MIN_SHARE

    def require(self) -> None:
        """Raise TrainingError unless every colour survives."""
        if not self.passed:
            figures = ", ".join(f"{name} {share:.0%}" for name, share in self.by_colour.items())
            raise TrainingError(
                f"the VAE does not keep colours apart ({figures}; each must reach "
                f"{_MIN_SHARE:.0%}): a policy could not obey "
                "'red'. Train the VAE longer (--vae-steps) before any policy."
            )


@torch.no_grad()
def colour_gate(vae: AutoencoderKLWan, frames: NDArray[np.uint8]) -> ColourGate:
    """Encode and decode pictures [n, H, W, 3] and compare the hues of strongly coloured pixels."""
    pixels = to_pixels(frames)
    decoded = torch.cat([_reconstruct(vae, part) for part in pixels.split(16)]).clamp(-1, 1)
    (hue, saturation), (hue_made, saturation_made) = (
        _hue((x[:, :, 0] + 1) / 2) for x in (pixels, decoded)
    )
    right = _angle(hue - hue_made) < _HUE_TOLERANCE_RAD
    right &= saturation_made > 0.5 * saturation
    strong = saturation > 0.45
    by_colour = {}
    for i, name in enumerate(("red", "green", "blue")):
        mine = strong & (_angle(hue - 2 * torch.pi / 3 * i) < torch.pi / 6)
        by_colour[name] = float(right[mine].float().mean()) if mine.any() else 0.0
    share = float(right[strong].float().mean())
    return ColourGate(share, by_colour, picture_psnr(decoded, pixels))


def _angle(difference: torch.Tensor) -> torch.Tensor:
    """Return the angle between hues that differ by this, in 0..pi."""
    return torch.minimum(difference.abs(), 2 * torch.pi - difference.abs())


def _reconstruct(vae: AutoencoderKLWan, pixels: torch.Tensor) -> torch.Tensor:
    latents = vae.encode(pixels.to(vae.device)).latent_dist.mode()  # pyright: ignore[reportAttributeAccessIssue]
    return vae.decode(latents).sample.cpu()  # pyright: ignore[reportAttributeAccessIssue]


def _hue(rgb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hue angle [rad, 0..2 pi) and saturation (largest minus smallest channel) of [B, 3,
    H, W] in [0, 1].
    """
    r, g, b = rgb.unbind(1)
    angle = torch.atan2(3**0.5 * (g - b), 2 * r - g - b) % (2 * torch.pi)
    return angle, rgb.amax(1) - rgb.amin(1)
