"""The VAE divided among all ranks by width.

Exact: each rank holds the activations of some latent columns and fetches what it needs beyond them.
Before a convolution three columns wide that is one column of each neighbour (of the right one only,
if the convolution halves the width); in the middle block's attention it is the keys and values of
all ranks. Every other layer acts on single columns or on pairs. A shard is a whole number of latent
columns, 16 pixels each, so it never splits a pair.

Tiles: each rank decodes its columns and a margin without any exchange, and neighbours are blended
over the margin. This is approximate, because the attention sees one tile only. Images are always
encoded exactly.

Shape suffixes: B batch, C channels, T frames, H height, W this rank's width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from strands_cosmos3.engine.parallel_context import Vae
from strands_cosmos3.engine.sequence import SPATIAL_COMPRESSION
from strands_cosmos3.engine.wan import Attention, CausalConv3d, DoublingConv2d, Downsample
from strands_cosmos3.parallel.collectives import Group

TILE_MARGIN = 4
"""Latent columns by which a tile extends its shard on either side."""


def shard_widths(columns: int, ranks: int) -> list[int]:
    """Return the number of latent columns of each rank, as even as possible."""
    return [columns * (i + 1) // ranks - columns * i // ranks for i in range(ranks)]


@dataclass
class HaloExchange:
    """Fetches the columns beside this rank's shard: a neighbour's, or zeros at the image's edge.

    ``widths`` are the latent columns of each rank while an image is split; None while this rank has
    all of it.
    """

    group: Group
    widths: list[int] | None = None

    def widen(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        """Return x [..., W] with the column to its right, and with the one to its left if
        requested.
        """
        from_left = from_right = None
        if self.widths is not None:
            to_right = x[..., -1:].contiguous() if left else None
            from_left, from_right = self.group.neighbours(x[..., :1].contiguous(), to_right, "halo")
        zeros = torch.zeros_like(x[..., :1])
        before, after = (zeros if column is None else column for column in (from_left, from_right))
        return torch.cat([before, x, after] if left else [x, after], dim=-1)

    def hook(self, left: bool) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        """Return a hook before a module's forward that widens its first argument."""
        return lambda _, args: (self.widen(args[0], left), *args[1:])

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., W] of all columns of the image."""
        return x if self.widths is None else self.group.gather_widths(x, self.widths, "attention")


class ShardedVae:
    """A VAE whose weights every rank holds (modified in place) and whose work is divided by width.

    An image with fewer latent columns than ranks is not split: every rank encodes it, rank 0
    decodes it.
    """

    def __init__(self, vae: Vae, group: Group, split: str):
        self._vae = vae
        self.model = vae.model
        self.has_decoder = vae.has_decoder
        self._group = group
        self._split = split
        self._halo = HaloExchange(group)
        if split != "off":
            _parallelize(vae.model, self._halo)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return normalised latents [1, C, F, H, W] on every rank; see :meth:`WanVae.encode`."""
        columns, rest = divmod(pixels.shape[-1], SPATIAL_COMPRESSION)
        if self._split == "off" or rest or columns < self._group.size:
            return self._vae.encode(pixels)
        widths = shard_widths(columns, self._group.size)
        sizes = [width * SPATIAL_COMPRESSION for width in widths]
        mine = pixels.split(sizes, dim=-1)[self._group.rank].contiguous()
        latents = self._together(widths, self._vae.encode, mine)
        return self._group.gather_widths(latents, widths, "latents")

    def decode(
        self, latents: torch.Tensor, first: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return pixels [1, 3, frames, height, width] on rank 0, None on the others; see
        :meth:`WanVae.decode`.
        """
        columns = latents.shape[-1]
        alone = self._split == "off" or self.model.preview is not None
        if alone or columns < self._group.size:
            return self._vae.decode(latents, first) if self._group.rank == 0 else None
        widths = shard_widths(columns, self._group.size)
        margin = TILE_MARGIN if self._split == "tiles" else 0
        spans = [
            (max(left - margin, 0), min(right + margin, columns))
            for left, right in pairwise(accumulate(widths, initial=0))
        ]
        left, right = spans[self._group.rank]
        mine = latents[..., left:right].contiguous()
        decode: Any = self._vae.decode
        pixels = decode(mine) if margin else self._together(widths, decode, mine)
        sizes = [(right - left) * SPATIAL_COMPRESSION for left, right in spans]
        parts = self._group.collect(pixels, sizes, "pixels")
        if parts is None:
            return None
        return _blended(parts, spans, columns) if margin else torch.cat(parts, dim=-1)

    def _together(self, widths: list[int], run: Any, x: torch.Tensor) -> torch.Tensor:
        self._halo.widths = widths
        try:
            return run(x)
        finally:
            self._halo.widths = None


def _blended(
    parts: list[torch.Tensor], tiles: Sequence[tuple[int, int]], columns: int
) -> torch.Tensor:
    """Blend overlapping tiles; weights fall linearly over the overlap."""
    size = SPATIAL_COMPRESSION
    total = parts[0].new_zeros(*parts[0].shape[:-1], columns * size)
    weights = parts[0].new_zeros(columns * size)
    for part, (first, last) in zip(parts, tiles, strict=True):
        at = torch.arange(part.shape[-1], device=part.device, dtype=part.dtype) + 0.5
        margin = 2 * TILE_MARGIN * size
        rising = at / margin if first > 0 else torch.ones_like(at)
        falling = (part.shape[-1] - at) / margin if last < columns else torch.ones_like(at)
        weight = torch.minimum(rising, falling).clamp(max=1)
        total[..., first * size : last * size] += part * weight
        weights[first * size : last * size] += weight
    return total / weights


def _parallelize(model: nn.Module, halo: HaloExchange) -> None:
    """Have every layer that reads beyond a column take it from the neighbours instead of padding
    it.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.all_columns = halo.gather
        elif isinstance(module, Downsample):  # pads one column and one row
            module.resample[0] = nn.ZeroPad2d((0, 0, 0, 1))
            module.resample.register_forward_pre_hook(halo.hook(left=False))
        elif isinstance(module, CausalConv3d | DoublingConv2d) and module.kernel_size[-1] == 3:
            padding: Any = module.padding
            module.padding = (*padding[:-1], 0)
            module.register_forward_pre_hook(halo.hook(left=True))
