"""Graphs of the Wan VAE, for clips of fixed size; :mod:`~strands_cosmos3.engine.wan` says what they
compute.

A clip's first frame is [B, C, H, W], and the others after it are [B, C, T, H, W], a part at a time.
Values of a part are computed from the last frames of the one before, which ``past`` keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from strands_cosmos3.engine.exported.graph_builder import GraphBuilder
from strands_cosmos3.engine.exported.transformer_graphs import silu
from strands_cosmos3.engine.sequence import SPATIAL_COMPRESSION, TEMPORAL_COMPRESSION
from strands_cosmos3.engine.wan_config import WanConfig

_SMALLEST_NORM = 1e-12
_END = 2**31 - 1


@dataclass(frozen=True)
class _Frames:
    """A value [B, C, H, W], or [B, C, T, H, W] with ``later`` = T frames after the first."""

    value: str
    channels: int
    hw: tuple[int, int]
    later: int = 0

    @property
    def spatial(self) -> int:
        """The axis of height."""
        return 3 if self.later else 2


@dataclass
class _Vae:
    """The VAE in a graph."""

    g: GraphBuilder
    config: WanConfig
    # by the name of a convolution, its last input frames [B, C, n, H, W] and their number
    past: dict[str, tuple[str, int]] = field(default_factory=dict)

    def convolved(
        self, x: _Frames, key: str, out: int, kernel: int = 3, order: Sequence[int] = ()
    ) -> _Frames:
        """A causal convolution of ``kernel`` frames, rows and columns. ``order`` says which channel
        of the weight each channel of ``x`` is, if they are not the same.
        """
        before = self.past.get(key)
        if kernel > 1:
            self.past[key] = self._recent(x, before)
        weight, pads = self.g.weight(f"{key}.weight"), [kernel // 2] * 2
        if order:
            weight = self.g("Gather", weight, self.g.sizes(*order), axis=1)
        if not x.later:  # zeros are before it: the last tap alone counts
            weight = self.g("Gather", weight, self.g.sizes(kernel - 1), axis=2)
            weight = self.g("Squeeze", weight, self.g.sizes(2))
            value = x.value
        else:
            value = self._after(x, before, kernel - 1)
            pads = [0, *pads]
        value = self.g("Conv", value, weight, self.g.weight(f"{key}.bias"), pads=pads * 2)
        return _Frames(value, out, x.hw, x.later)

    def in_time(self, x: _Frames, key: str, out: int, stride: int, padding: int) -> str:
        """A convolution of three frames alone, after ``padding`` frames of zeros or of the past."""
        before = self.past.get(key)
        self.past[key] = self._recent(x, before)
        value = self._after(x, before, 2 * padding)
        weights = (self.g.weight(f"{key}.{kind}") for kind in ("weight", "bias"))
        return self.g("Conv", value, *weights, strides=[stride, 1, 1])

    def _after(self, x: _Frames, before: tuple[str, int] | None, frames: int) -> str:
        """A part after so many frames, those of the past last, before which there are zeros."""
        if not frames:
            return x.value
        known = 0 if before is None else before[1]
        parts = [] if before is None else [before[0]]
        if known < frames:
            one = self.g.part(x.value, 0, 1, 2)
            zeros = self.g("Mul", one, self.g.constant(0.0))
            parts = [zeros] * (frames - known) + parts
        return self.g("Concat", *parts, x.value, axis=2)

    def _recent(self, x: _Frames, before: tuple[str, int] | None) -> tuple[str, int]:
        """The last two frames of a convolution's input, or the only one."""
        if not x.later:
            return self.g("Unsqueeze", x.value, self.g.sizes(2)), 1
        value, frames = x.value, x.later
        if before is not None and frames < 2:
            value, frames = self.g("Concat", before[0], value, axis=2), frames + before[1]
        return self.g.part(value, -2, _END, 2), min(frames, 2)

    def normed(self, x: str, key: str, axes: int) -> str:
        """``gamma sqrt(C) x / |x|`` over the channels; ``axes`` follow them."""
        g, gamma = self.g, self.g.weight(f"{key}.gamma")
        channels = g("Cast", g("Shape", gamma, start=0, end=1), to=1)
        gamma = g("Mul", gamma, g("Sqrt", channels))
        gamma = g.reshape(gamma, -1, *[1] * axes)
        length = g("ReduceL2", x, g.sizes(1), keepdims=1)
        inverse = g("Reciprocal", g("Max", length, g.constant(_SMALLEST_NORM)))
        return g("Mul", g("Mul", x, inverse), gamma)

    def activated(self, x: _Frames, key: str) -> _Frames:
        """A norm and silu."""
        normed = silu(self.g, self.normed(x.value, key, 3 if x.later else 2))
        return _Frames(normed, x.channels, x.hw, x.later)

    def residual(self, x: _Frames, key: str, out: int) -> _Frames:
        """A residual block."""
        inner = self.convolved(self.activated(x, f"{key}.norm1"), f"{key}.conv1", out)
        inner = self.convolved(self.activated(inner, f"{key}.norm2"), f"{key}.conv2", out)
        if x.channels != out:
            x = self.convolved(x, f"{key}.conv_shortcut", out, kernel=1)
        return _Frames(self.g("Add", inner.value, x.value), out, x.hw, x.later)

    def middle(self, x: _Frames, key: str) -> _Frames:
        """A residual block, attention, and another residual block."""
        x = self.residual(x, f"{key}.resnets.0", x.channels)
        x = self._attended(x, f"{key}.attentions.0")
        return self.residual(x, f"{key}.resnets.1", x.channels)

    def _attended(self, x: _Frames, key: str) -> _Frames:
        g, C, (H, W) = self.g, x.channels, x.hw
        pictures = self.by_frame(x)
        normed = self.normed(pictures, f"{key}.norm", 2)
        weights = (g.weight(f"{key}.to_qkv.{kind}") for kind in ("weight", "bias"))
        flat = g.reshape(g("Conv", normed, *weights), 0, 3 * C, H * W)
        rows = g("Transpose", flat, perm=[0, 2, 1])
        q, k, v = g.several(3, "Split", rows, axis=2, num_outputs=3)
        attended = g("Attention", q, k, v, q_num_heads=1, kv_num_heads=1)
        back = g.reshape(g("Transpose", attended, perm=[0, 2, 1]), 0, C, H, W)
        weights = (g.weight(f"{key}.proj.{kind}") for kind in ("weight", "bias"))
        value = self.in_clip(g("Conv", back, *weights), C, x.hw, x.later).value
        return _Frames(g("Add", value, x.value), C, x.hw, x.later)

    def by_frame(self, x: _Frames) -> str:
        """Frames [B T, C, H, W]."""
        if not x.later:
            return x.value
        turned = self.g("Transpose", x.value, perm=[0, 2, 1, 3, 4])
        return self.g.reshape(turned, -1, x.channels, *x.hw)

    def in_clip(self, value: str, channels: int, hw: tuple[int, int], later: int) -> _Frames:
        """The inverse of :meth:`by_frame`."""
        if later:
            value = self.g.reshape(value, -1, later, channels, *hw)
            value = self.g("Transpose", value, perm=[0, 2, 1, 3, 4])
        return _Frames(value, channels, hw, later)

    def block(self, x: _Frames, key: str, out: int) -> _Frames:
        """The residual blocks of a block."""
        for i in range(self.config.num_res_blocks):
            x = self.residual(x, f"{key}.resnets.{i}", out)
        return x

    def halved(self, x: _Frames, key: str, in_time: bool) -> _Frames:
        """Half the height and width, and with ``in_time`` half the later frames."""
        weights = (self.g.weight(f"{key}.resample.1.{kind}") for kind in ("weight", "bias"))
        pictures = self.g("Conv", self.by_frame(x), *weights, strides=[2, 2], pads=[0, 0, 1, 1])
        hw = x.hw[0] // 2, x.hw[1] // 2
        x = self.in_clip(pictures, x.channels, hw, x.later)
        if not in_time:
            return x
        before = self.past.get(key)
        last = x.value if x.later else self.g("Unsqueeze", x.value, self.g.sizes(2))
        self.past[key] = self.g.part(last, -1, _END, 2), 1
        if before is None:
            return x
        joined = self.g("Concat", before[0], x.value, axis=2)
        value = self.in_time(
            _Frames(joined, x.channels, hw, x.later + 1), f"{key}.time_conv", x.channels, 2, 0
        )
        return _Frames(value, x.channels, hw, x.later // 2)

    def averaged(self, x: _Frames, out: int, frames: int, size: int) -> str:
        """Blocks as channels, averaged in groups."""
        g, (H, W) = self.g, (x.hw[0] // size, x.hw[1] // size)
        value, T = x.value, max(x.later, 1)
        if not x.later and x.channels * frames % out == 0:
            return self._pooled(x, out, frames, size)
        if not x.later:
            value = g("Unsqueeze", value, g.sizes(2))
        if T % frames:
            missing = -T % frames
            zeros = g("Mul", g.part(value, 0, 1, 2), g.constant(0.0))
            value, T = g("Concat", *[zeros] * missing, value, axis=2), T + missing
        blocks = g.reshape(value, 0, x.channels, T // frames, frames, H, size, W, size)
        turned = g("Transpose", blocks, perm=[0, 1, 3, 5, 7, 2, 4, 6])
        grouped = g.reshape(turned, 0, out, -1, T // frames, H, W)
        mean = g("ReduceMean", grouped, g.sizes(2), keepdims=0)
        return mean if x.later else g("Squeeze", mean, g.sizes(2))

    def _pooled(self, x: _Frames, out: int, frames: int, size: int) -> str:
        """The same of a first frame where each group has whole blocks: an average of pixels, and of
        the frames of zeros before it.
        """
        g, (H, W) = self.g, (x.hw[0] // size, x.hw[1] // size)
        shape = [size, size]
        value = g("AveragePool", x.value, kernel_shape=shape, strides=shape)
        if frames > 1:
            value = g("Unsqueeze", value, g.sizes(2))
            zeros = g("Mul", value, g.constant(0.0))
            value = g("Concat", *[zeros] * (frames - 1), value, axis=2)
        if frames > 1 or x.channels != out:
            value = g.reshape(value, 0, out, -1, H, W)
            value = g("ReduceMean", value, g.sizes(2), keepdims=0)
        return value

    def doubled(self, x: _Frames, key: str, in_time: bool) -> _Frames:
        """Twice the height and width, and with ``in_time`` twice the later frames."""
        g, C = self.g, x.channels
        if in_time and x.later:
            value = self.in_time(x, f"{key}.time_conv", 2 * C, 1, 1)
            H, W = x.hw
            turned = g(
                "Transpose", g.reshape(value, 0, 2, C, x.later, H, W), perm=[0, 2, 3, 1, 4, 5]
            )
            x = _Frames(g.reshape(turned, 0, C, 2 * x.later, H, W), C, x.hw, 2 * x.later)
        scales = g.constant([1, 1, 2, 2])
        pictures = g("Resize", self.by_frame(x), "", scales, mode="nearest", nearest_mode="floor",
                     coordinate_transformation_mode="asymmetric")  # fmt: skip
        weights = (g.weight(f"{key}.resample.1.{kind}") for kind in ("weight", "bias"))
        value = g("Conv", pictures, *weights, pads=[1] * 4)
        return self.in_clip(value, C, (2 * x.hw[0], 2 * x.hw[1]), x.later)

    def repeated(self, x: _Frames, out: int, frames: int, size: int) -> str:
        """The inverse arrangement of :meth:`averaged`: channels, repeated, as blocks. Of a clip's
        first frame only the last of a block's frames is made.
        """
        g, (H, W) = self.g, x.hw
        times = frames * size * size * out // x.channels
        value = x.value if x.later else g("Unsqueeze", x.value, g.sizes(2))
        T = max(x.later, 1)
        value = g.reshape(value, 0, x.channels, 1, T, H, W)
        value = g("Expand", value, g.sizes(1, 1, times, 1, 1, 1))
        blocks = g.reshape(value, 0, out, frames, size, size, T, H, W)
        turned = g("Transpose", blocks, perm=[0, 1, 5, 2, 6, 3, 7, 4])
        whole = g.reshape(turned, 0, out, T * frames, H * size, W * size)
        if x.later:
            return whole
        return g("Squeeze", g.part(whole, -1, _END, 2), g.sizes(2))


def write_encoder(
    g: GraphBuilder, config: WanConfig, frames: int, canvas_hw: tuple[int, int], path: Path
) -> None:
    """Latents [B, C, F, H, W] of pixels [B, 3, frames, height, width]."""
    vae, size = _Vae(g, config), config.patch_size
    H, W = (pixels // size for pixels in canvas_hw)
    colours, step = config.in_channels // size**2, TEMPORAL_COMPRESSION
    pixels = g.input("pixels", ("B", colours, frames, *canvas_hw))

    def patches(start: int, later: int) -> _Frames:
        part = g.part(pixels, start, start + max(later, 1), 2)
        pictures = g("Transpose", part, perm=[0, 2, 1, 3, 4])
        pictures = g.reshape(pictures, -1, colours, *canvas_hw)
        blocks = g("SpaceToDepth", pictures, blocksize=size)
        return vae.in_clip(blocks, config.in_channels, (H, W), later)

    parts = [patches(0, 0)]
    parts += [patches(start, step) for start in range(1, frames - step + 1, step)]
    latents = [_encoded(vae, part) for part in parts]
    joined = latents[0] if len(latents) == 1 else g("Concat", *latents, axis=2)
    grid = [pixels // SPATIAL_COMPRESSION for pixels in canvas_hw]
    shape = "B", config.z_dim, len(parts), *grid
    g.save(path, {"latents": (joined, shape)})


def _encoded(vae: _Vae, x: _Frames) -> str:
    """Latents [B, C, 1, H, W] of a part."""
    config, g = vae.config, vae.g
    widths = [config.base_dim * n for n in (1, *config.dim_mult)]
    x = vae.convolved(x, "encoder.conv_in", widths[0], order=_order(config))
    for i, out in enumerate(widths[1:]):
        key, start = f"encoder.down_blocks.{i}", x
        x = vae.block(x, key, out)
        shrinks = i < len(config.temporal_downsample)
        in_time = shrinks and config.temporal_downsample[i]
        if shrinks:
            x = vae.halved(x, f"{key}.downsampler", in_time)
        average = vae.averaged(start, out, 1 + in_time, 1 + shrinks)
        x = _Frames(g("Add", x.value, average), out, x.hw, x.later)
    x = vae.activated(vae.middle(x, "encoder.mid_block"), "encoder.norm_out")
    x = vae.convolved(x, "encoder.conv_out", 2 * config.z_dim)
    x = vae.convolved(x, "quant_conv", 2 * config.z_dim, kernel=1)
    mean = g.part(x.value, 0, config.z_dim, 1)
    return mean if x.later else g("Unsqueeze", mean, g.sizes(2))


def _order(config: WanConfig) -> list[int]:
    """Of each channel that SpaceToDepth makes of patches (row, column, colour), the released one
    (colour, column, row).
    """
    size = config.patch_size
    released = np.arange(config.in_channels).reshape(-1, size, size)
    return released.transpose(2, 1, 0).ravel().tolist()


def write_decoder(
    g: GraphBuilder, config: WanConfig, latent_frames: int, grid: tuple[int, int], path: Path
) -> None:
    """Pixels [B, 3, frames, height, width] of latents [B, C, F, H, W]; ``grid`` is H and W."""
    vae, size = _Vae(g, config), config.patch_size
    canvas_hw = grid[0] * SPATIAL_COMPRESSION, grid[1] * SPATIAL_COMPRESSION
    latents = g.input("latents", ("B", config.z_dim, latent_frames, *grid))
    parts = []
    for i in range(latent_frames):
        part = g.part(latents, i, i + 1, 2)
        if not i:
            part = g("Squeeze", part, g.sizes(2))
        parts.append(_decoded(vae, _Frames(part, config.z_dim, grid, int(i > 0))))
    patches = parts[0] if len(parts) == 1 else g("Concat", *parts, axis=2)
    frames = 1 + TEMPORAL_COMPRESSION * (latent_frames - 1)
    H, W = (pixels // size for pixels in canvas_hw)
    colours = config.out_channels // size**2
    blocks = g.reshape(patches, 0, colours, size, size, frames, H, W)
    turned = g("Transpose", blocks, perm=[0, 1, 4, 5, 3, 6, 2])
    pixels = g.reshape(turned, 0, colours, frames, *canvas_hw)
    pixels = g("Clip", pixels, g.constant(-1.0), g.constant(1.0))
    g.save(path, {"pixels": (pixels, ("B", colours, frames, *canvas_hw))})


def _decoded(vae: _Vae, x: _Frames) -> str:
    """Patches [B, C, T, H, W] of a part."""
    config, g = vae.config, vae.g
    widths = [config.decoder_base_dim * n for n in (config.dim_mult[-1], *config.dim_mult[::-1])]
    x = vae.convolved(x, "post_quant_conv", config.z_dim, kernel=1)
    x = vae.convolved(x, "decoder.conv_in", widths[0])
    x = vae.middle(x, "decoder.mid_block")
    for i, (_, out) in enumerate(pairwise(widths)):
        key, start = f"decoder.up_blocks.{i}", x
        for j in range(config.num_res_blocks + 1):
            x = vae.residual(x, f"{key}.resnets.{j}", out)
        if i < len(config.temporal_downsample):
            in_time = config.temporal_downsample[::-1][i]
            x = vae.doubled(x, f"{key}.upsampler", in_time)
            shortcut = vae.repeated(start, out, 1 + in_time, 2)
            x = _Frames(g("Add", x.value, shortcut), out, x.hw, x.later)
    x = vae.convolved(vae.activated(x, "decoder.norm_out"), "decoder.conv_out", config.out_channels)
    return x.value if x.later else g("Unsqueeze", x.value, g.sizes(2))
