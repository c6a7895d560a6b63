"""Encode pixels to normalised latents and decode them with a checkpoint's Wan VAE.

Shape suffixes: C latent channels, F latent frames, H W latent height and width; the batch is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from strands_cosmos3.engine.preview import PreviewDecoder
from strands_cosmos3.engine.wan import SPATIAL_COMPRESSION, WanAutoencoder, WanConfig, empty_weight
from strands_cosmos3.engine.weight_source import WeightSource
from strands_cosmos3.errors import ShapeError


class WanVae:
    """The VAE of a checkpoint, with its decoder only on demand, or with a preview decoder in its
    place.

    Raises:
        LayoutError: The config does not describe a Wan VAE with 4 x 16 x 16 compression.
        WeightsError: A weight is missing, surplus, misshapen or not finite.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        files: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        decoder: bool,
        preview: PreviewDecoder | None = None,
    ):
        described = WanConfig.from_dict(config)
        with torch.device("meta"):
            self.model = WanAutoencoder(described)
        files.check({name: tuple(p.shape) for name, p in self.model.named_parameters()})
        if not decoder or preview is not None:
            self.model.decoder = self.model.post_quant_conv = None
        self.has_decoder = decoder
        files.read_into(
            materialise(self.model, lambda _, shape: empty_weight(shape, device, dtype))
        )
        self.model.preview = preview
        self.model.eval().requires_grad_(False)
        shape = (1, -1, 1, 1, 1)
        self._mean = torch.tensor(described.latents_mean, dtype=dtype).view(shape).to(device)
        self._inverse_std = (
            (1.0 / torch.tensor(described.latents_std, dtype=dtype)).view(shape).to(device)
        )
        self._frame_scale = frame_scale(described)

    @property
    def channels(self) -> int:
        """Latent channels."""
        return self._mean.shape[1]

    @property
    def previews(self) -> bool:
        """Whether a preview decoder decodes."""
        return self.model.preview is not None

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised latents [1, C, F, H, W], float32, of pixels [1, 3, frames, height, width] in
        [-1, 1].

        Raises ShapeError if height or width is not a multiple of 16.
        """
        if pixels.shape[-1] % SPATIAL_COMPRESSION or pixels.shape[-2] % SPATIAL_COMPRESSION:
            raise ShapeError(
                f"pixels are {list(pixels.shape[-2:])} (H, W); both must be multiples of "
                f"{SPATIAL_COMPRESSION}. "
                "Cosmos3PolicyProcessor pads them to a canvas that is."
            )
        raw = self.model.encode(pixels.to(self._mean.device, self._mean.dtype))
        latents = ((raw - self._mean) * self._inverse_std).float()
        mean, std = self._frame_scale(latents)
        return (latents - mean) / std

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pixels [1, 3, frames, height, width] in [-1, 1], float32, of normalised latents [1, C, F,
        H, W].

        Leading latents alone give the same leading frames, to the bit.
        """
        if self.model.preview is not None:
            return self.model.preview(latents.to(self._mean.device, self._mean.dtype)).float()
        mean, std = self._frame_scale(latents)
        raw = (latents * std + mean).to(self._mean.dtype) / self._inverse_std + self._mean
        return self.model.decode(raw).float()


def frame_scale(
    config: WanConfig,
) -> Callable[[torch.Tensor], tuple[torch.Tensor | float, torch.Tensor | float]]:
    """Return a function from latents [B, C, F, H, W] to mean and deviation [C, F, 1, 1] of their
    frames, by default (0, 1).

    Latents of a clip's later frames hold motion as well and are larger than those of its first
    frame.
    """
    if not config.latent_frames:
        return lambda latents: (0.0, 1.0)
    table = torch.tensor(config.latent_frames)  # [frames, 2, C]

    def scale(latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.arange(latents.shape[2]).clamp(max=len(table) - 1)
        mean, std = table[index].permute(1, 2, 0)[..., None, None].to(latents.device)
        return mean, std

    return scale


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
