"""Encode pixels to normalised latents and decode them, with a checkpoint's Wan VAE or its preview
decoder.

The preview decoder is several times cheaper than the VAE's own, and less exact. Released
checkpoints have none. Ours keep it in ``preview_decoder/`` beside ``vae/``; it is trained on the
VAE's latents, and everything that is judged by its pixels is decoded by the VAE itself.

Shape suffixes: B batch (of the VAE 1), C latent channels, F latent frames, H W latent height and
width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from strands_cosmos3.checks import whole_number
from strands_cosmos3.engine.sequence import SPATIAL_COMPRESSION, TEMPORAL_COMPRESSION
from strands_cosmos3.engine.wan import WanAutoencoder, WanConfig, empty_weight
from strands_cosmos3.engine.weight_files import WeightSource
from strands_cosmos3.errors import InputError, LayoutError, ShapeError


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


class Remembered:
    """A function of a tensor that remembers its latest answer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        self._function = function
        self._latest: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, argument: torch.Tensor, again: bool) -> torch.Tensor:
        """Return the answer, the remembered one if ``again`` and the argument is equal."""
        if not again or self._latest is None or not torch.equal(argument, self._latest[0]):
            # a copy, since the caller may write the next picture over it
            self._latest = argument.clone(), self._function(argument)
        return self._latest[1]

    def row(self, argument: torch.Tensor) -> torch.Tensor | None:
        """Return the row [1, ...] of the latest answer for a row [1, ...] of its argument; None if
        it has no such row.
        """
        for known, answer in zip(*(self._latest or ((), ())), strict=True):
            if torch.equal(known, argument[0]):
                return answer[None]
        return None


class Novelty:
    """Dissimilarity of pictures to those of training: the RMS error of their reconstruction,
    divided by a quantile of such errors.

    Above 1 a picture is unusual: 99.9 % of the validation pictures are below.

    Args:
        decoder: The checkpoint's preview decoder, or None if it has none; then nothing is known.
        quantile: The checkpoint's ``novelty_rmse``, for pixels in 0..1, or None if it states none;
            then nothing is known.
    """

    def __init__(self, decoder: PreviewDecoder | None, quantile: float | None):
        self._decoded = None if decoder is None else Remembered(decoder)
        self._quantile = quantile

    def __call__(
        self, pictures: Sequence[torch.Tensor], latents: Sequence[torch.Tensor], again: bool
    ) -> list[float]:
        """Return the novelty of each picture, or an empty list if it is not known.

        Args:
            pictures: Pixels [1, 3, frames, height, width] in [-1, 1]; the first frame counts. The
                same tensor is judged once.
            latents: Normalised latents [C, H, W] of the first frames, all of one size; what lies
                beyond them is padding.
            again: Whether the latest ones may come again.
        """
        if self._decoded is None or self._quantile is None:
            return []
        judged = dict(zip(pictures, latents, strict=True))
        stacked = torch.stack(list(judged.values()))[:, :, None]
        decoded = self._decoded(stacked, again).clamp(-1, 1).float()
        height, width = decoded.shape[-2:]
        real = torch.cat([picture[:, :, :1, :height, :width] for picture in judged])
        off = decoded - real.to(decoded)
        errors = off.square().mean((1, 2, 3, 4)).sqrt() / 2 / self._quantile
        error_of = dict(zip(judged, errors.tolist(), strict=True))
        return [error_of[picture] for picture in pictures]

    def decoded(self, latents: torch.Tensor) -> torch.Tensor | None:
        """The picture [1, 3, 1, height, width] that the preview decoder made of these latents [1,
        C, 1, H, W], if they were among the latest.
        """
        return None if self._decoded is None else self._decoded.row(latents)


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
        shape = (1, -1, 1, 1, 1)
        self._mean = torch.tensor(config.latents_mean, dtype=dtype).view(shape).to(device)
        self._inverse_std = (
            (1.0 / torch.tensor(config.latents_std, dtype=dtype)).view(shape).to(device)
        )
        self._frame_scale = frame_scale(config)

    @property
    def channels(self) -> int:
        """Latent channels."""
        return self._mean.shape[1]

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
        raw = self.model.encode(pixels.to(self._mean.device, self._mean.dtype))
        latents = ((raw - self._mean) * self._inverse_std).float()
        mean, std = self._frame_scale(latents)
        return (latents - mean) / std

    def decode(self, latents: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
        """Pixels [1, 3, frames, height, width] in [-1, 1], float32, of normalised latents [1, C, F,
        H, W].

        Leading latents alone give the same leading frames, to the bit. ``first`` is the first frame
        as the preview decoder makes it, if that is known.
        """
        if self.model.preview is not None:
            return self.model.preview(latents, first).float()
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
