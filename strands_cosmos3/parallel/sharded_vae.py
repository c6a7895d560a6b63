"""The VAE shared by all ranks, in shards of the width.

Exact: each rank keeps some latent columns' worth of every activation. What reaches beyond them is fetched: before a
convolution three columns wide one column of each neighbour (of the right one alone where it halves the width), and in
the attention of the middle block everybody's keys and values. Everything else in the network acts on columns, or on
pairs of them, alone. A shard is a whole number of latent columns, 16 pixels each, so pairs are never torn.

Tiles: each rank decodes its columns and a margin without a word to anybody, and neighbours are blended over the margin.
That is approximate, because the attention sees one tile only; pictures are always encoded exactly.

Shape suffixes: B batch, C channels, T frames, H height, W this rank's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from strands_cosmos3.engine.parallel_context import Vae
from strands_cosmos3.engine.vae import SPATIAL_COMPRESSION, FlatConv

if TYPE_CHECKING:
    from strands_cosmos3.parallel.config import VaeSplit
    from strands_cosmos3.parallel.mesh import Group

TILE_MARGIN = 4
"""Latent columns that a tile reaches beyond its shard on either side."""


def shard_widths(columns: int, ranks: int) -> list[int]:
    """Latent columns of each rank: as even as can be."""
    return [columns * (i + 1) // ranks - columns * i // ranks for i in range(ranks)]


class HaloExchange:
    """Where this rank's columns end, and what lies beyond: a neighbour's columns, or zeros at the picture's edge.

    Attributes:
        widths: Latent columns of each rank while a picture is split; None while this rank has all of it.
    """

    def __init__(self, group: Group):
        self.group = group
        self.widths: list[int] | None = None

    def columns(self, x: torch.Tensor, left: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The columns [..., 1] to the left (if wanted) and to the right of x [..., W]."""
        nothing = torch.zeros_like(x[..., :1])
        from_left = from_right = None
        if self.widths is not None:
            to_right = x[..., -1:].contiguous() if left else None
            from_left, from_right = self.group.neighbours(x[..., :1].contiguous(), to_right, "halo")
        return (nothing if from_left is None else from_left) if left else None, nothing if from_right is None else from_right


class HaloConv(nn.Module):
    """A causal 3x3x3 convolution whose width padding is its neighbours' columns.

    diffusers hands a convolution the last frames of its previous call; their borders are kept here, so that each column
    travels once.

    Args:
        inner: The convolution; its own width padding is taken away.
    """

    def __init__(self, inner: FlatConv, border: HaloExchange):
        super().__init__()
        conv: Any = inner.conv
        conv._padding = (0, 0, *conv._padding[2:])
        self.inner = inner
        self._border = border
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        left, right = self._border.columns(x, left=True)
        assert left is not None
        wide = torch.cat([left, x, right], dim=-1)
        if cache_x is not None:
            assert self._seen is not None
            n = cache_x.shape[2]
            old_left, old_right = self._seen
            cache_x = torch.cat([old_left[:, :, -n:], cache_x, old_right[:, :, -n:]], dim=-1)
            left, right = torch.cat([old_left, left], dim=2), torch.cat([old_right, right], dim=2)
        self._seen = left[:, :, -2:], right[:, :, -2:]
        return self.inner(wide, cache_x)


class Widen(nn.Module):
    """Puts the neighbours' columns beside x [..., W], before a convolution in two dimensions."""

    def __init__(self, border: HaloExchange, left: bool):
        super().__init__()
        self._border = border
        self._left = left

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self._border.columns(x, self._left)
        return torch.cat([x, right] if left is None else [left, x, right], dim=-1)


class GatheredAttention(nn.Module):
    """The middle block's attention within each frame: this rank's queries over everybody's keys and values.

    Args:
        inner: diffusers' ``WanAttentionBlock``, whose layers it uses.
    """

    def __init__(self, inner: Any, border: HaloExchange):
        super().__init__()
        self.inner = inner
        self._border = border

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        if self._border.widths is None:
            return self.inner(x_BCTHW)
        B, C, T, H, W = x_BCTHW.shape
        frames = x_BCTHW.permute(0, 2, 1, 3, 4).reshape(B * T, C, H, W)
        query, memory = self.inner.to_qkv(self.inner.norm(frames)).split([C, 2 * C], dim=1)
        keys, values = self._border.group.gather_widths(memory, self._border.widths, "attention").chunk(2, dim=1)
        q, k, v = (t.flatten(2).transpose(1, 2)[:, None].contiguous() for t in (query, keys, values))
        attended = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(B * T, C, H, W)
        projected = self.inner.proj(attended).view(B, T, C, H, W).permute(0, 2, 1, 3, 4)
        return projected + x_BCTHW


class ShardedVae:
    """A VAE of which every rank holds the weights and computes a share.

    A picture with fewer latent columns than there are ranks is not worth splitting: every rank encodes it, rank 0 decodes.

    Args:
        vae: This rank's; its network is wired in place.
        group: The ranks.
        split: See :class:`~strands_cosmos3.parallel.config.ParallelConfig`.
    """

    def __init__(self, vae: Vae, group: Group, split: VaeSplit):
        self._vae = vae
        self._group = group
        self._split = split
        self._border = HaloExchange(group)
        if split != "off":
            _wire(vae.model, self._border)

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self._vae.model

    @property
    def has_decoder(self) -> bool:
        """Whether videos are decoded."""
        return self._vae.has_decoder

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised latents [1, C, F, H, W] on every rank; see :meth:`WanVae.encode`."""
        columns, torn = divmod(pixels.shape[-1], SPATIAL_COMPRESSION)
        if self._split == "off" or torn or columns < self._group.size:
            return self._vae.encode(pixels)
        widths = shard_widths(columns, self._group.size)
        mine = _own(pixels, [width * SPATIAL_COMPRESSION for width in widths], self._group.rank)
        return self._group.gather_widths(self._together(widths, self._vae.encode, mine), widths, "latents")

    def decode(self, latents: torch.Tensor) -> torch.Tensor | None:
        """Pixels [1, 3, frames, height, width] on rank 0, None on the others; see :meth:`WanVae.decode`."""
        columns = latents.shape[-1]
        if self._split == "off" or columns < self._group.size:
            return self._vae.decode(latents) if self._group.rank == 0 else None
        widths = shard_widths(columns, self._group.size)
        if self._split == "tiles":
            return self._decode_tiles(latents, widths)
        mine = self._together(widths, self._vae.decode, _own(latents, widths, self._group.rank))
        parts = self._group.collect(mine, [width * SPATIAL_COMPRESSION for width in widths], "pixels")
        return None if parts is None else torch.cat(parts, dim=-1)

    def _together(self, widths: list[int], run: Any, x: torch.Tensor) -> torch.Tensor:
        self._border.widths = widths
        try:
            return run(x)
        finally:
            self._border.widths = None

    def _decode_tiles(self, latents: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        ends = list(accumulate(widths, initial=0))
        columns = ends[-1]
        tiles = [(max(a - TILE_MARGIN, 0), min(b + TILE_MARGIN, columns)) for a, b in pairwise(ends)]
        first, last = tiles[self._group.rank]
        mine = self._vae.decode(latents[..., first:last].contiguous())
        assert mine is not None
        parts = self._group.collect(mine, [(b - a) * SPATIAL_COMPRESSION for a, b in tiles], "pixels")
        return None if parts is None else _blended(parts, tiles, columns)


def _own(x: torch.Tensor, widths: Sequence[int], rank: int) -> torch.Tensor:
    return x.split(list(widths), dim=-1)[rank].contiguous()


def _blended(parts: list[torch.Tensor], tiles: Sequence[tuple[int, int]], columns: int) -> torch.Tensor:
    """One picture of overlapping ones: weights fall linearly from a tile's middle to its ends inside the picture."""
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


def _wire(model: nn.Module, border: HaloExchange) -> None:
    """Put a border before whatever looks beyond a column."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, FlatConv) and child.conv.kernel_size[2] == 3:
                setattr(owner, name, HaloConv(child, border))
            elif type(child).__name__ == "WanAttentionBlock":
                setattr(owner, name, GatheredAttention(child, border))
            elif name == "resample" and isinstance(child, nn.Sequential):
                setattr(owner, name, _widened(child, border))


def _widened(resample: nn.Sequential, border: HaloExchange) -> nn.Sequential:
    before, conv = resample
    assert isinstance(conv, nn.Conv2d)
    assert conv.kernel_size == (3, 3)
    if conv.stride[1] == 1:  # doubled first; padding of one on every side
        conv.padding = (1, 0)
        return nn.Sequential(before, Widen(border, left=True), conv)
    return nn.Sequential(Widen(border, left=False), nn.ZeroPad2d((0, 0, 0, 1)), conv)  # halves: padded right and below
