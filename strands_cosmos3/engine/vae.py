"""Encode pixels to normalised latents and decode them, with a checkpoint's Wan VAE or its preview
decoder.

The preview decoder is several times cheaper than the VAE's own, and less exact. Released
checkpoints have none. Ours keep it in ``preview_decoder/`` beside ``vae/``; it is trained on the
VAE's latents, and everything that is judged by its pixels is decoded by the VAE itself.

Shape suffixes: B batch (of the VAE 1), C latent channels, F latent frames, H W latent height and
width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from strands_cosmos3.checks import whole_number
from strands_cosmos3.engine.latents import LatentScale
from strands_cosmos3.engine.sequence import SPATIAL_COMPRESSION, TEMPORAL_COMPRESSION
from strands_cosmos3.engine.wan import WanAutoencoder, empty_weight
from strands_cosmos3.engine.wan_config import WanConfig
from strands_cosmos3.engine.weight_files import WeightSource
from strands_cosmos3.errors import InputError, LayoutError, ShapeError


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
        self.frames = nn.Conv2d(coarse, TEMPORAL_COMPRESSION * coarse, 1)
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

    def forward(
        self, latents_BCFHW: torch.Tensor, first: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return pixels [B, 3, 1 + 4 (F - 1), 16 H, 16 W], about [-1, 1]. Later latents do not
        change earlier frames. ``first`` is the first of them, if it was decoded before.
        """
        latents = latents_BCFHW.to(self.conv_in.weight)
        before = torch.cat([latents[:, :, :1], latents[:, :, :-1]], dim=2)
        pairs = torch.cat([latents, before], dim=1)
        # the first has one frame, its last
        surplus = TEMPORAL_COMPRESSION - 1
        if first is not None:
            pairs = pairs[:, :, 1:]
            surplus = 0
        B, _, _, H, W = pairs.shape
        x = pairs.transpose(1, 2).flatten(0, 1).contiguous(memory_format=torch.channels_last)
        x = F.silu(self.coarse(self.conv_in(x)), inplace=True).permute(0, 2, 3, 1)
        x = F.linear(x, self.frames.weight.flatten(1), self.frames.bias)
        x = x.unflatten(3, (TEMPORAL_COMPRESSION, -1)).permute(0, 3, 1, 2, 4)
        x = x.unflatten(0, (B, -1)).flatten(1, 2)[:, surplus:].flatten(0, 1).permute(0, 3, 1, 2)
        x = self.middle(F.pixel_shuffle(self.to_middle(F.silu(x, inplace=True)), 2))
        x = self.fine(F.pixel_shuffle(self.to_fine(F.silu(x, inplace=True)), 2))
        # as F.pixel_shuffle arranges them, but faster on a CPU: a block's rows are whole, colours
        # last
        weight, bias = (
            p.unflatten(0, (3, 16)).transpose(0, 1).flatten(0, 1)
            for p in self.conv_out.parameters()
        )
        blocks = F.conv2d(F.silu(x, inplace=True), weight, bias, padding=1).permute(0, 2, 3, 1)
        rows = blocks.unflatten(3, (4, 12)).transpose(2, 3)
        pixels = rows.reshape(B, -1, 16 * H, 16 * W, 3)
        if first is not None:
            pixels = torch.cat([first.movedim(1, -1), pixels], dim=1)
        return pixels.movedim(-1, 1)


class _Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv2(F.silu(self.conv1(F.silu(x)), inplace=True)).add_(x)


class WanVae:
    """The VAE of a checkpoint, with its decoder only on demand, or with a preview decoder in its
    place.

    Raises WeightsError if a weight is missing, surplus, misshapen or not finite.
    """

    def __init__(
        self,
        config: WanConfig,
        files: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        decoder: bool,
        preview: PreviewDecoder | None = None,
    ):
        with torch.device("meta"):
            self.model = WanAutoencoder(config)
        files.check({name: tuple(p.shape) for name, p in self.model.named_parameters()})
        if not decoder or preview is not None:
            self.model.decoder = self.model.post_quant_conv = None
        self.has_decoder = decoder
        files.read_into(
            materialise(self.model, lambda _, shape: empty_weight(shape, device, dtype))
        )
        self.model.preview = preview
        self.model.eval().requires_grad_(False)
        self._device = device
        self._dtype = dtype
        self.scale = LatentScale(config, torch.empty(0, device=device, dtype=dtype))

    @property
    def channels(self) -> int:
        """Latent channels."""
        return self.scale.channels

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised latents [1, C, F, H, W], float32, of pixels [1, 3, frames, height, width] in
        [-1, 1].

        Raises ShapeError if height or width is not a multiple of 16.
        """
        if pixels.shape[-1] % SPATIAL_COMPRESSION or pixels.shape[-2] % SPATIAL_COMPRESSION:
            raise ShapeError(
                f"pixels are {list(pixels.shape[-2:])} (H, W); both must be multiples of "
                f"{SPATIAL_COMPRESSION}. Cosmos3PolicyProcessor pads them to a canvas that is."
            )
        return self.scale.normalised(self.model.encode(pixels.to(self._device, self._dtype)))

    def decode(self, latents: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
        """Pixels [1, 3, frames, height, width] in [-1, 1], float32, of normalised latents [1, C, F,
        H, W].

        Leading latents alone give the same leading frames, to the bit. ``first`` is the first frame
        as the preview decoder makes it, if that is known.
        """
        if self.model.preview is not None:
            return self.model.preview(latents, first).float()
        return self.model.decode(self.scale.raw(latents)).float()


def materialise(
    module: nn.Module, empty: Callable[[str, tuple[int, ...]], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Replace every parameter of a module on the meta device by uninitialised memory; return name
    -> tensor to fill.

    ``empty`` makes the tensor that is kept from the name and shape of a parameter.
    """
    targets = {}
    for prefix, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            full = f"{prefix}.{name}" if prefix else name
            targets[full] = empty(full, tuple(parameter.shape))
            setattr(owner, name, nn.Parameter(targets[full], requires_grad=False))
    return targets
