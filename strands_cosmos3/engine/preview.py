"""A small decoder of a VAE's latents, for films: several times cheaper than the VAE's own, and less
exact.

Released checkpoints have none. Ours keep it in ``preview_decoder/`` beside ``vae/``; it is trained
on the VAE's latents, and everything that is judged by its pixels is decoded by the VAE itself.

Shape suffixes: B batch, C channels, F latent frames, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from strands_cosmos3.checks import whole_number
from strands_cosmos3.errors import InputError, LayoutError

_FRAMES = 4  # pixel frames of one latent frame, the first apart


class NovelPictureWarning(UserWarning):
    """A camera picture is unlike those of the checkpoint's training."""


class PreviewDecoder(nn.Module):
    """Normalised latents to pixels, latent frame by latent frame, each with the one before it.

    Args:
        latent_channels: Channels of the latents.
        widths: Channels at 1/16, 1/8 and 1/4 of the picture's size.
    """

    def __init__(self, latent_channels: int = 48, widths: tuple[int, int, int] = (128, 64, 32)):
        super().__init__()
        coarse, middle, fine = widths
        self.conv_in = nn.Conv2d(2 * latent_channels, coarse, 3, padding=1)
        self.coarse = nn.Sequential(_Residual(coarse), _Residual(coarse))
        self.frames = nn.Conv2d(coarse, _FRAMES * coarse, 1)
        self.to_middle = nn.Conv2d(coarse, 4 * middle, 3, padding=1)
        self.middle = _Residual(middle)
        self.to_fine = nn.Conv2d(middle, 4 * fine, 3, padding=1)
        self.fine = _Residual(fine)
        self.conv_out = nn.Conv2d(fine, 3 * 16, 3, padding=1)

    @staticmethod
    def from_config(config: Mapping[str, Any], latent_channels: int) -> PreviewDecoder:
        """Build it from ``preview_decoder/config.json``; raises LayoutError if its ``widths``
        are not three sizes.
        """
        try:
            coarse, middle, fine = (
                whole_number(width, "widths", 1, 1024) for width in config["widths"]
            )
        except (InputError, KeyError, TypeError, ValueError):
            raise LayoutError(
                'preview_decoder/config.json needs three "widths" of 1..1024; download it again.'
            ) from None
        return PreviewDecoder(latent_channels, (coarse, middle, fine))

    def forward(self, latents_BCFHW: torch.Tensor) -> torch.Tensor:
        """Return pixels [B, 3, 1 + 4 (F - 1), 16 H, 16 W], about [-1, 1]. Later latents do not
        change earlier frames.
        """
        B, _, count, H, W = latents_BCFHW.shape
        before = torch.cat([latents_BCFHW[:, :, :1], latents_BCFHW[:, :, :-1]], dim=2)
        x = torch.cat([latents_BCFHW, before], dim=1).transpose(1, 2).flatten(0, 1)
        x = self.coarse(self.conv_in(x.contiguous(memory_format=torch.channels_last)))
        # the first has one frame, its last
        x = self.frames(F.silu(x)).reshape(B, count * _FRAMES, -1, H, W)[:, _FRAMES - 1 :]
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        x = self.middle(F.pixel_shuffle(self.to_middle(F.silu(x)), 2))
        x = self.fine(F.pixel_shuffle(self.to_fine(F.silu(x)), 2))
        return F.pixel_shuffle(self.conv_out(F.silu(x)), 4).unflatten(0, (B, -1)).transpose(1, 2)


class _Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(F.silu(self.conv1(F.silu(x))))


@dataclass(frozen=True)
class Novelty:
    """How unlike training pictures are: the RMS error of their reconstruction, divided by a
    quantile of such errors.

    Above 1 a picture is unusual: 99.9 % of the validation pictures are below.

    Args:
        decoder: The checkpoint's preview decoder, or None if it has none; then nothing is known.
        quantile: The checkpoint's ``novelty_rmse``, for pixels in 0..1, or None if it states none;
            then nothing is known.
    """

    decoder: PreviewDecoder | None
    quantile: float | None

    def __call__(
        self, pictures: Sequence[torch.Tensor], latents: Sequence[torch.Tensor]
    ) -> list[float]:
        """Return the novelty of each picture, or an empty list if it is not known.

        Args:
            pictures: Pixels [1, 3, frames, height, width] in [-1, 1]; the first frame counts. The
                same tensor is judged once.
            latents: Normalised latents [C, H, W] of the first frames, all of one size; what lies
                beyond them is padding.
        """
        if self.decoder is None or self.quantile is None:
            return []
        weight, firsts = (
            self.decoder.conv_in.weight,
            {id(pixels): i for i, pixels in reversed([*enumerate(pictures)])},
        )
        chosen = torch.stack([latents[i] for i in firsts.values()])[:, :, None]
        made = self.decoder(chosen.to(weight.device, weight.dtype)).clamp(-1, 1).float()
        height, width = made.shape[-2:]
        real = torch.cat([pictures[i][:, :, :1, :height, :width] for i in firsts.values()]).to(made)
        errors = (made - real).square().mean((1, 2, 3, 4)).sqrt() / 2 / self.quantile
        found = dict(zip(firsts, errors.tolist(), strict=True))
        return [found[id(pixels)] for pixels in pictures]
