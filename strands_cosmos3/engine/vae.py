"""Encode pixels to latents and decode them with diffusers' Wan VAE.

Shape suffixes: C latent channels, F latent frames, H W latent height and width; the batch is 1.

The encoder is causal in time: for a lone first frame a 3x3x3 convolution equals a 3x3 one with its last temporal tap, which
is computed instead. On a CPU, clips are also convolved tap by tap: the same sums, three to nine times faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import AutoencoderKLWan  # pyright: ignore[reportPrivateImportUsage]
from torch import nn
from torch.nn import functional as F

from strands_cosmos3.engine.weight_files import WeightFiles
from strands_cosmos3.errors import LayoutError, ShapeError

SPATIAL_COMPRESSION = 16


class FlatConv(nn.Module):
    """diffusers' ``WanCausalConv3d``, computed in two dimensions for lone first frames and for clips on a CPU."""

    def __init__(self, conv: nn.Conv3d):
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[2] == 1 and cache_x is None and self.conv.stride[0] == 1:
            return self._flat(x[:, :, 0])[:, :, None]
        if x.device.type == "cpu" and x.dtype is torch.float32:  # other dtypes would round each tap's sum
            return self._by_taps(x, cache_x)
        return self.conv(x, cache_x)

    def _flat(self, frame: torch.Tensor) -> torch.Tensor:
        conv = self.conv
        pad: Any = list(conv._padding[:4])  # pyright: ignore  (in diffusers: width twice, height twice, time)
        frame = F.pad(frame, pad) if any(pad) else frame
        return F.conv2d(frame, conv.weight[:, :, -1], conv.bias, conv.stride[1:])

    def _by_taps(self, x: torch.Tensor, cache_x: torch.Tensor | None) -> torch.Tensor:
        conv, padding = self.conv, list(self.conv._padding)  # pyright: ignore
        if cache_x is not None and padding[4] > 0:
            x, padding[4] = torch.cat([cache_x, x], dim=2), padding[4] - cache_x.shape[2]
        x = F.pad(x, padding) if any(padding) else x
        taps, stride = conv.kernel_size[0], conv.stride[0]
        out = (x.shape[2] - taps) // stride + 1
        frames = x.transpose(1, 2)
        total: Any = None
        for tap in range(taps):
            seen = frames[:, tap : tap + (out - 1) * stride + 1 : stride].flatten(0, 1)
            bias = conv.bias if total is None else None
            made = F.conv2d(seen.contiguous(memory_format=torch.channels_last), conv.weight[:, :, tap], bias, conv.stride[1:])
            total = made if total is None else total + made
        return total.unflatten(0, (-1, out)).transpose(1, 2).contiguous()


class WanVae:
    """The VAE of a checkpoint, with its decoder only on demand.

    Raises:
        LayoutError: The config does not describe a Wan VAE with 4 x 16 x 16 compression.
        WeightsError: A weight is missing, surplus, misshapen or not finite.
    """

    def __init__(self, config: Mapping[str, Any], files: WeightFiles, device: torch.device, dtype: torch.dtype, decoder: bool):
        self.model = _skeleton(config)
        files.check({name: tuple(p.shape) for name, p in self.model.named_parameters()})
        if not decoder:
            self.model.decoder = None  # pyright: ignore[reportAttributeAccessIssue]
            self.model.post_quant_conv = None  # pyright: ignore[reportAttributeAccessIssue]
        self.has_decoder = decoder
        files.read_into(materialise(self.model, lambda _, shape: torch.empty(shape, device=device, dtype=dtype)))
        convolve_flat(self.model)
        self.model.eval().requires_grad_(False)
        shape = (1, -1, 1, 1, 1)
        self._mean = torch.tensor(config["latents_mean"], dtype=dtype).view(shape).to(device)
        self._inverse_std = (1.0 / torch.tensor(config["latents_std"], dtype=dtype)).view(shape).to(device)

    @property
    def channels(self) -> int:
        """Latent channels."""
        return self._mean.shape[1]

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised latents [1, C, F, H, W], float32, of pixels [1, 3, frames, height, width] in [-1, 1].

        Raises ShapeError if height or width is not a multiple of 16.
        """
        if pixels.shape[-1] % SPATIAL_COMPRESSION or pixels.shape[-2] % SPATIAL_COMPRESSION:
            raise ShapeError(
                f"pixels are {list(pixels.shape[-2:])} (H, W); both must be multiples of {SPATIAL_COMPRESSION}. "
                "Cosmos3PolicyProcessor pads them to a canvas that is."
            )
        raw = self.model.encode(pixels.to(self._mean.device, self._mean.dtype)).latent_dist.mode()  # pyright: ignore
        return ((raw - self._mean) * self._inverse_std).float()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pixels [1, 3, frames, height, width] in [-1, 1], float32, of normalised latents [1, C, F, H, W]."""
        raw = latents.to(self._mean.dtype) / self._inverse_std + self._mean
        return self.model.decode(raw).sample.float()  # pyright: ignore


def _skeleton(config: Mapping[str, Any]) -> AutoencoderKLWan:
    known = {key: value for key, value in config.items() if not key.startswith("_")}
    try:
        with torch.device("meta"):
            model: AutoencoderKLWan = AutoencoderKLWan.from_config(known)  # pyright: ignore
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise LayoutError(f"vae/config.json does not describe a Wan VAE ({error}); download it again.") from None
    z = model.config["z_dim"]
    if len(model.config["latents_mean"]) != z or len(model.config["latents_std"]) != z:
        raise LayoutError(f"vae/config.json: latents_mean and latents_std must have z_dim = {z} values.")
    scales = model.config["scale_factor_temporal"], model.config["scale_factor_spatial"]
    if scales != (4, SPATIAL_COMPRESSION):
        raise LayoutError(f"vae/config.json compresses (time, space) by {scales}; Cosmos 3 needs (4, 16).")
    return model


def materialise(module: nn.Module, empty: Callable[[str, tuple[int, ...]], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace every parameter of a module on the meta device by uninitialised memory; return name -> tensor to fill.

    ``empty`` makes the tensor that is kept from the name and shape of a parameter.
    """
    targets = {}
    for prefix, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            full = f"{prefix}.{name}" if prefix else name
            targets[full] = empty(full, tuple(parameter.shape))
            setattr(owner, name, nn.Parameter(targets[full], requires_grad=False))
    return targets


def convolve_flat(model: nn.Module) -> None:
    """Replace every causal convolution of a VAE, in place, by a :class:`FlatConv` that shares its weights."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, nn.Conv3d):
                setattr(owner, name, FlatConv(child))
