"""The Wan VAE (residual, 4 x 16 x 16 compression) with the parameter names of the released
checkpoints.

A first frame is encoded alone, then four frames at a time; latent frames are decoded one by one.
Convolutions see no later frame: each keeps the last frames of its input for the next call. Source
of the architecture: Wan 2.2, as in diffusers' ``AutoencoderKLWan``, with which the tests compare
it.

Shape suffixes: B batch, C channels, T frames, H W height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from strands_cosmos3.engine.sequence import TEMPORAL_COMPRESSION
from strands_cosmos3.engine.wan_config import WanConfig

_SMALLEST_SQUARE = 1e-24


class Past(dict[nn.Module, torch.Tensor]):
    """Last input frames of each convolution, kept from call to call while frames follow."""

    frames_follow = True

    def keep(self, module: nn.Module, frames: torch.Tensor) -> None:
        """Keep a module's last frames for the next call, if there is one."""
        if self.frames_follow:
            self[module] = frames.clone()

    def parts(self, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The parts of a clip, one after the other."""
        for i, part in enumerate(parts):
            self.frames_follow = i + 1 < len(parts)
            yield part


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
) -> torch.Tensor:
    """In float32 on a CPU, oneDNN's convolution in two or three dimensions: torch takes a slower
    one for a single clip.
    """
    if _in_planes(x) and torch.backends.mkldnn.is_available():
        return torch.mkldnn_convolution(
            x, channels_last(weight), bias, padding, stride, (1,) * len(stride), 1
        )
    return (F.conv2d if x.ndim == 4 else F.conv3d)(x, weight, bias, tuple(stride), tuple(padding))


def causal_convolution(
    x: torch.Tensor,
    past: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    convolve: Callable[..., torch.Tensor] = _convolve,
) -> torch.Tensor:
    """Convolve x [B, C, T, H, W] after its ``past`` frames, with zeros before them and at the edges
    (``padding`` of T, H, W), by ``convolve`` unless x is a first frame.

    A first frame needs the last temporal tap alone: before it are zeros.
    """
    x = channels_last(x)
    if x.shape[2] == 1 and past is None and stride[0] == 1:
        return F.conv2d(x[:, :, 0], weight[:, :, -1], bias, tuple(stride[1:]), tuple(padding[1:]))[
            :, :, None
        ]
    if padding[0]:
        earlier = [] if past is None else [past]
        zeros = [torch.zeros_like(x[:, :, :1])] * (
            2 * padding[0] - sum(frames.shape[2] for frames in earlier)
        )
        x = torch.cat([*zeros, *earlier, x], dim=2)
    return convolve(x, weight, bias, stride, (0, *padding[1:]))


def _in_planes(x: torch.Tensor) -> bool:
    return _plane_by_plane(x.device, x.dtype)


def _plane_by_plane(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype is torch.float32


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """The same [B, C, H, W] or [B, C, T, H, W] with a pixel's channels side by side, where
    oneDNN convolves it.
    """
    layout = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    return x.contiguous(memory_format=layout) if _in_planes(x) else x


def empty_weight(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a weight of this shape, laid out as :func:`causal_convolution` reads it: tap by
    tap, channels last.
    """
    if not _plane_by_plane(device, dtype) or len(shape) not in (4, 5):
        return torch.empty(shape, device=device, dtype=dtype)
    if len(shape) == 4:
        return torch.empty(shape, device=device, dtype=dtype, memory_format=torch.channels_last)
    o, i, t, h, w = shape
    return torch.empty((t, o, h, w, i), device=device, dtype=dtype).permute(1, 4, 0, 2, 3)


class CausalConv3d(nn.Conv3d):
    """A convolution that sees the frames of earlier calls, kept in ``past``, and no later ones."""

    def forward(self, x_BCTHW: torch.Tensor, past: Past) -> torch.Tensor:  # pyright: ignore
        padding: Any = self.padding
        x = channels_last(x_BCTHW)
        before = past.get(self)
        window = 2 * padding[0]
        if window:
            recent = x if before is None or x.shape[2] >= window else torch.cat([before, x], dim=2)
            past.keep(self, recent[:, :, -window:])
        return causal_convolution(x, before, self.weight, self.bias, self.stride, padding)


class ChannelNorm(nn.Module):
    """``gamma sqrt(C) x / |x|`` over the channels of x [B, C, ...]; ``axes`` follow the channel."""

    def __init__(self, channels: int, axes: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *[1] * axes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        C = self.gamma.shape[0]
        if not _in_planes(x):
            return F.normalize(x.float(), dim=1).to(x.dtype) * C**0.5 * self.gamma
        normed = F.rms_norm(x.movedim(1, -1), (C,), self.gamma.view(C), _SMALLEST_SQUARE)
        return normed.movedim(-1, 1)


class Attention(nn.Module):
    """Self-attention with one head among the positions of each frame.

    Attributes:
        all_columns: From keys and values of the columns here, [..., W], to those of all columns:
            ranks that share the width exchange them.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.norm = ChannelNorm(channels, 2)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)
        self.all_columns: Callable[[torch.Tensor], torch.Tensor] = lambda memory: memory

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        B, C, T, H, W = x_BCTHW.shape
        frames = x_BCTHW.permute(0, 2, 1, 3, 4).reshape(B * T, C, H, W)
        query, memory = self.to_qkv(self.norm(frames)).split([C, 2 * C], dim=1)
        q, k, v = (
            t.flatten(2).transpose(1, 2)[:, None].contiguous()
            for t in (query, *self.all_columns(memory).chunk(2, dim=1))
        )
        attended = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2)
        projected = self.proj(attended.reshape(B * T, C, H, W))
        return projected.view(B, T, C, H, W).permute(0, 2, 1, 3, 4) + x_BCTHW


class ResidualBlock(nn.Module):
    """Two normalised convolutions beside a shortcut."""

    def __init__(self, channels: int, out: int):
        super().__init__()
        self.norm1 = ChannelNorm(channels, 3)
        self.norm2 = ChannelNorm(out, 3)
        self.conv1 = CausalConv3d(channels, out, 3, padding=1)
        self.conv2 = CausalConv3d(out, out, 3, padding=1)
        self.conv_shortcut = CausalConv3d(channels, out, 1) if channels != out else None

    def forward(self, x_BCTHW: torch.Tensor, past: Past) -> torch.Tensor:
        shortcut = x_BCTHW if self.conv_shortcut is None else self.conv_shortcut(x_BCTHW, past)
        x = self.conv1(F.silu(self.norm1(x_BCTHW), inplace=True), past)
        return self.conv2(F.silu(self.norm2(x), inplace=True), past).add_(shortcut)


class MidBlock(nn.Module):
    """A residual block, attention, and another residual block."""

    def __init__(self, channels: int):
        super().__init__()
        self.attentions = nn.ModuleList([Attention(channels)])
        self.resnets = nn.ModuleList([ResidualBlock(channels, channels) for _ in range(2)])

    def forward(self, x_BCTHW: torch.Tensor, past: Past) -> torch.Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x_BCTHW, past)), past)


class Downsample(nn.Module):
    """Halves height and width, and with ``in_time`` the frames after the first."""

    def __init__(self, channels: int, in_time: bool):
        super().__init__()
        self.resample = nn.Sequential(
            nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(channels, channels, 3, stride=2)
        )
        self.time_conv = (
            CausalConv3d(channels, channels, (3, 1, 1), stride=(2, 1, 1)) if in_time else None
        )

    def forward(self, x_BCTHW: torch.Tensor, past: Past) -> torch.Tensor:
        x = _each_frame(self.resample, x_BCTHW)
        if self.time_conv is None:
            return x
        before = past.get(self)
        past.keep(self, x[:, :, -1:])
        return x if before is None else self.time_conv(torch.cat([before, x], dim=2), past)


class Upsample(nn.Module):
    """Doubles height and width, and with ``in_time`` the frames after the first."""

    def __init__(self, channels: int, in_time: bool):
        super().__init__()
        self.resample = nn.Sequential(
            nn.Identity(), DoublingConv2d(channels, channels, 3, padding=1)
        )
        self.time_conv = (
            CausalConv3d(channels, 2 * channels, (3, 1, 1), padding=(1, 0, 0)) if in_time else None
        )

    def forward(self, x_BCTHW: torch.Tensor, past: Past) -> torch.Tensor:
        x = x_BCTHW
        if self.time_conv is not None and self not in past:
            # the first latent frame is one pixel frame; its features are not seen by the next
            past[self] = x[:, :, :0]
        elif self.time_conv is not None:
            halves = self.time_conv(x, past).unflatten(1, (2, -1))
            x = torch.stack([halves[:, 0], halves[:, 1]], dim=3).flatten(2, 3)
        return _each_frame(self.resample, x)


class DoublingConv2d(nn.Conv2d):
    """A 3 x 3 convolution of pictures whose pixels are first repeated 2 x 2.

    A doubled picture has only 2 x 2 different pixels under the kernel, so that each of four places
    in a pixel has a kernel of that size: in float32 on a CPU their sums are taken at the picture's
    own size, 4 / 9 of the products. Where columns beside the picture are given instead of padded
    (``padding`` (1, 0)), they are columns of the picture's own size.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        padding: Any = self.padding
        if not _in_planes(x):
            doubled = F.interpolate(x.float(), scale_factor=2.0, mode="nearest-exact").type_as(x)
            return super().forward(doubled if padding[1] else doubled[..., 1:-1])
        # place, small row, row
        sums = self.weight.new_tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]])
        kernels = torch.einsum("apy,bqx,oiyx->aboipq", sums, sums, self.weight).flatten(0, 2)
        bias = None if self.bias is None else self.bias.repeat(4)
        x = channels_last(F.pad(x, (padding[1], padding[1], padding[0], padding[0])))
        y = _convolve(x, kernels, bias, (1, 1), (0, 0))
        # places, pictures, rows, columns, channels
        y = y.unflatten(1, (2, 2, -1)).permute(1, 2, 0, 4, 5, 3)
        _, _, B, H, W, C = y.shape
        out = x.new_empty(B, H - 1, 2, W - 1, 2, C)
        for i, j in product(range(2), repeat=2):
            out[:, :, i, :, j] = y[i, j, :, i : H - 1 + i, j : W - 1 + j]
        return out.view(B, 2 * H - 2, 2 * W - 2, C).permute(0, 3, 1, 2)


class DownBlock(nn.Module):
    """Residual blocks and downsampling, beside a shortcut that averages."""

    def __init__(self, channels: int, out: int, blocks: int, downsample: bool, in_time: bool):
        super().__init__()
        widths = [channels, *[out] * blocks]
        self.resnets = nn.ModuleList([ResidualBlock(a, b) for a, b in pairwise(widths)])
        self.downsampler = Downsample(out, in_time) if downsample else None
        self._factors = (2 if in_time else 1, 2 if downsample else 1)
        self._out = out

    def forward(self, x_BCTHW: torch.Tensor, past: Past) -> torch.Tensor:
        x = x_BCTHW
        for block in self.resnets:
            x = block(x, past)
        if self.downsampler is not None:
            x = self.downsampler(x, past)
        return x + _averaged(x_BCTHW, self._out, *self._factors)


class UpBlock(nn.Module):
    """Residual blocks and upsampling, beside a shortcut that repeats."""

    def __init__(self, channels: int, out: int, blocks: int, upsample: bool, in_time: bool):
        super().__init__()
        widths = [channels, *[out] * (blocks + 1)]
        self.resnets = nn.ModuleList([ResidualBlock(a, b) for a, b in pairwise(widths)])
        self.upsampler = Upsample(out, in_time) if upsample else None
        self._factors = (2 if in_time else 1, 2)

    def forward(self, x_BCTHW: torch.Tensor, past: Past) -> torch.Tensor:
        first = self.upsampler is not None and self.upsampler not in past
        x = x_BCTHW
        for block in self.resnets:
            x = block(x, past)
        if self.upsampler is None:
            return x
        return _add_repeated(self.upsampler(x, past), x_BCTHW, *self._factors, first)


def _blocks(
    kind: type[DownBlock] | type[UpBlock],
    widths: list[int],
    config: WanConfig,
    in_time: tuple[bool, ...],
) -> nn.ModuleList:
    """Blocks between these widths; all but the last one change the size, and ``in_time`` the
    number of frames.
    """
    return nn.ModuleList(
        kind(*pair, config.num_res_blocks, i < len(in_time), i < len(in_time) and in_time[i])
        for i, pair in enumerate(pairwise(widths))
    )


class Encoder(nn.Module):
    """Patches [B, C, T, H, W] of the first frame, or of the next four, to twice as many channels
    as latents have.
    """

    def __init__(self, config: WanConfig):
        super().__init__()
        widths = [config.base_dim * n for n in (1, *config.dim_mult)]
        self.conv_in = CausalConv3d(config.in_channels, widths[0], 3, padding=1)
        self.down_blocks = _blocks(DownBlock, widths, config, config.temporal_downsample)
        self.mid_block = MidBlock(widths[-1])
        self.norm_out = ChannelNorm(widths[-1], 3)
        self.conv_out = CausalConv3d(widths[-1], 2 * config.z_dim, 3, padding=1)

    def forward(self, x_BCTHW: torch.Tensor, past: Past) -> torch.Tensor:
        x = self.conv_in(x_BCTHW, past)
        for block in self.down_blocks:
            x = block(x, past)
        return self.conv_out(F.silu(self.norm_out(self.mid_block(x, past)), inplace=True), past)


class Decoder(nn.Module):
    """One latent frame [B, C, 1, H, W] to the patches of its frames: one for the first, four for
    each other.
    """

    def __init__(self, config: WanConfig):
        super().__init__()
        widths = [
            config.decoder_base_dim * n for n in (config.dim_mult[-1], *config.dim_mult[::-1])
        ]
        self.conv_in = CausalConv3d(config.z_dim, widths[0], 3, padding=1)
        self.mid_block = MidBlock(widths[0])
        self.up_blocks = _blocks(UpBlock, widths, config, config.temporal_downsample[::-1])
        self.norm_out = ChannelNorm(widths[-1], 3)
        self.conv_out = CausalConv3d(widths[-1], config.out_channels, 3, padding=1)

    def forward(self, x_BCTHW: torch.Tensor, past: Past) -> torch.Tensor:
        x = self.mid_block(self.conv_in(x_BCTHW, past), past)
        for block in self.up_blocks:
            x = block(x, past)
        return self.conv_out(F.silu(self.norm_out(x), inplace=True), past)


class WanAutoencoder(nn.Module):
    """Pixels in [-1, 1] to unnormalised latents, and back."""

    def __init__(self, config: WanConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.quant_conv = CausalConv3d(2 * config.z_dim, 2 * config.z_dim, 1)
        self.post_quant_conv: CausalConv3d | None = CausalConv3d(config.z_dim, config.z_dim, 1)
        self.decoder: Decoder | None = Decoder(config)
        self.preview: nn.Module | None = None  # decodes in its place

    def encode(self, pixels_BCTHW: torch.Tensor) -> torch.Tensor:
        """Mean latents [B, z_dim, 1 + n, H / 16, W / 16] of pixels [B, 3, 1 + 4 n, H, W];
        further frames are dropped.
        """
        x = channels_last(_patches(pixels_BCTHW, self.config.patch_size))
        past = Past()
        starts = range(1, x.shape[2] - TEMPORAL_COMPRESSION + 1, TEMPORAL_COMPRESSION)
        parts = [x[:, :, :1], *(x[:, :, i : i + TEMPORAL_COMPRESSION] for i in starts)]
        moments = self.quant_conv(
            torch.cat([self.encoder(part, past) for part in past.parts(parts)], dim=2), past
        )
        return moments.chunk(2, dim=1)[0]

    def decode(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """Pixels [B, 3, 1 + 4 n, 16 H, 16 W] of latents [B, z_dim, 1 + n, H, W]; none depends on
        later latents.
        """
        assert self.decoder is not None
        assert self.post_quant_conv is not None
        past = Past()
        x = channels_last(self.post_quant_conv(latents_BCTHW, past))
        frames = [self.decoder(frame, past) for frame in past.parts(x.split(1, dim=2))]
        return _pixels(torch.cat(frames, dim=2), self.config.patch_size).clamp(-1.0, 1.0)


def _each_frame(module: nn.Module, x_BCTHW: torch.Tensor) -> torch.Tensor:
    B, _, T, _, _ = x_BCTHW.shape
    out = module(channels_last(x_BCTHW).permute(0, 2, 1, 3, 4).flatten(0, 1))
    return out.unflatten(0, (B, T)).permute(0, 2, 1, 3, 4)


def _averaged(x: torch.Tensor, out: int, frames: int, size: int) -> torch.Tensor:
    """Blocks of ``frames`` x ``size`` x ``size`` as channels, averaged in groups to ``out``
    channels.
    """
    x = F.pad(x, (0, 0, 0, 0, -x.shape[2] % frames, 0)) if x.shape[2] % frames else x
    blocks = x.unflatten(4, (-1, size)).unflatten(3, (-1, size)).unflatten(2, (-1, frames))
    as_channels = blocks.permute(0, 1, 3, 5, 7, 2, 4, 6).contiguous().flatten(1, 4)
    return as_channels.unflatten(1, (out, -1)).mean(dim=2)


def _add_repeated(
    y: torch.Tensor, x: torch.Tensor, frames: int, size: int, first: bool
) -> torch.Tensor:
    """Add to y, in place, the inverse arrangement of x: its channels, repeated, as blocks of
    ``frames`` x ``size`` x ``size``.

    Of a clip's first frame only the last of a block's frames is made.
    """
    sources = x.shape[1] // y.shape[1]  # channels of x that make up one of y
    repeats = frames * size * size // sources
    for k in range((frames - 1) * size * size if first else 0, frames * size * size):
        t = 0 if first else k // size**2
        i = k // size % size
        j = k % size
        y[:, :, t :: 1 if first else frames, i::size, j::size] += x[:, k // repeats :: sources]
    return y


def _patches(x: torch.Tensor, size: int) -> torch.Tensor:
    """[B, C, T, H, W] -> [B, C size^2, T, H / size, W / size]; a patch's columns come before its
    rows.
    """
    blocks = x.unflatten(4, (-1, size)).unflatten(3, (-1, size))
    return blocks.permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)


def _pixels(x: torch.Tensor, size: int) -> torch.Tensor:
    """The inverse of :func:`_patches`."""
    blocks = x.unflatten(1, (-1, size, size))
    return blocks.permute(0, 1, 4, 5, 3, 6, 2).flatten(5).flatten(3, 4)
