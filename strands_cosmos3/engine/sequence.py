"""The generation sequence: the tokens of its streams, which of them are clean, and their positions
in time and space.

Shape suffixes: N generation tokens, V vision tokens, T action rows, P numbers in a vision token
(patch x patch x channels), C latent channels, F latent frames, H W latent height and width; 3
temporal, vertical and horizontal axis; S sound tokens.

Source: diffusers 0.42.1 ``pipeline_cosmos3_omni`` (``get_3d_mrope_ids_*``, packing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from array_api_compat import array_namespace

from strands_cosmos3.engine.arrays import Array
from strands_cosmos3.engine.config import TransformerConfig

Rope: TypeAlias = tuple[Array, Array]
"""Cosine and sine [..., N, d] of tokens' positions."""
TEMPORAL_COMPRESSION = 4  # pixel frames per latent frame after the first
SPATIAL_COMPRESSION = 16  # pixels per latent in height and width
# streams, in the order of the sequence; without sound there are two
VISION, SOUND, ACTION = 0, 1, -1


@dataclass(frozen=True)
class SequenceLayout:
    """Layout of one generation sequence: vision tokens frame by frame, then those of sound, if any,
    then the action rows, each a stream of its own.
    """

    # (F, H, W) of the video latents, cropped to the picture's content
    latent_shape: tuple[int, int, int]
    patch: int  # side of a vision token, in latents
    action_rows: int  # a state row included
    clean_frames: tuple[int, ...]  # given latent frames
    clean_rows: int  # given action rows, counted from the first
    raw_action_dim: int  # used action channels; the others stay zero
    fps: float  # frames and rows a second
    # temporal position of the first row, in rows: 0 with a state row, else 1, less the rows of
    # history
    action_offset: int
    sound_tokens: int = 0  # S, latents of sound, none of which is given

    @property
    def grid(self) -> tuple[int, int, int]:
        """(F, rows, columns) of vision tokens; an odd edge is padded with zeros."""
        frames, height, width = self.latent_shape
        return frames, math.ceil(height / self.patch), math.ceil(width / self.patch)

    @property
    def vision_tokens(self) -> int:
        """V, the number of vision tokens."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of tokens of each stream."""
        sound = (self.sound_tokens,) if self.sound_tokens else ()
        return self.vision_tokens, *sound, self.action_rows

    @property
    def tokens(self) -> int:
        """N, the number of generation tokens."""
        return sum(self.counts)

    @property
    def noisy(self) -> tuple[slice, ...]:
        """The tokens of each stream from its first to its last noisy one; empty if none is."""
        frames, rows, columns = self.grid
        noisy = [i for i in range(frames) if i not in self.clean_frames] or [0, -1]
        of_vision = slice(noisy[0] * rows * columns, (noisy[-1] + 1) * rows * columns)
        of_sound = (slice(0, self.sound_tokens),) if self.sound_tokens else ()
        of_rows = slice(min(self.clean_rows, self.action_rows), self.action_rows)
        return of_vision, *of_sound, of_rows

    def counts_from(self, first: int) -> list[int]:
        """The number of tokens of each stream from the token ``first`` of the sequence on."""
        ends = accumulate(self.counts)
        return [max(0, min(n, end - first)) for n, end in zip(self.counts, ends, strict=True)]


def patchify(latent_CFHW: Array, patch: int) -> Array:
    """Vision tokens [V, P] of latents [C, F, H, W]: patches ordered (row, column, channel), odd
    edges padded with zeros.
    """
    xp = array_namespace(latent_CFHW)
    padded = latent_CFHW
    for axis in (2, 3):
        shape = list(padded.shape)
        shape[axis] = -shape[axis] % patch
        if shape[axis]:
            zeros = xp.zeros(tuple(shape), dtype=padded.dtype, device=padded.device)
            padded = xp.concat([padded, zeros], axis=axis)
    C, F, H, W = padded.shape
    split = padded.reshape(C, F, H // patch, patch, W // patch, patch)
    return xp.permute_dims(split, (1, 2, 4, 3, 5, 0)).reshape(-1, patch * patch * C)


def unpatchify(tokens_VP: Array, latent_shape: tuple[int, int, int], patch: int) -> Array:
    """Latents [C, F, H, W] of vision tokens [V, P]; the inverse of :func:`patchify`."""
    F, H, W = latent_shape
    rows = math.ceil(H / patch)
    columns = math.ceil(W / patch)
    split = tokens_VP.reshape(F, rows, columns, patch, patch, -1)
    turned = array_namespace(split).permute_dims(split, (5, 0, 1, 3, 2, 4))
    return turned.reshape(-1, F, rows * patch, columns * patch)[:, :, :H, :W]


def text_positions(count: int) -> Array:
    """[3, count] positions of a prompt: 0, 1, 2, ... on every axis, float32 of NumPy."""
    return np.tile(np.arange(count, dtype=np.float32), (3, 1))


def generation_positions(
    layout: SequenceLayout, config: TransformerConfig, text_tokens: int
) -> Array:
    """[3, N] positions of the generation tokens, float32 of NumPy.

    Temporal positions of frames and action rows share one clock: the time at ``base_fps`` in latent
    frames, after the prompt and a margin. That of sound starts there too and counts ``base_fps``
    itself, four times as fast. Vertical and horizontal positions restart at zero in each frame.
    """
    start = text_tokens + config.unified_3d_mrope_temporal_modality_margin
    spatial = 0 if config.unified_3d_mrope_reset_spatial_ids else start
    frames, rows, columns = layout.grid
    base = config.base_fps / TEMPORAL_COMPRESSION
    frame_t = _times(frames, 0, layout.fps / TEMPORAL_COMPRESSION, base, config) + start
    row_t = _times(layout.action_rows, layout.action_offset, layout.fps, base, config) + start
    sound_t = _times(layout.sound_tokens, 0, config.sound_latent_fps, config.base_fps, config)
    still_t = np.concatenate([sound_t + start, row_t])
    h, w = (np.arange(count, dtype=np.float32) + spatial for count in (rows, columns))
    vision_3V = np.stack(np.meshgrid(frame_t, h, w, indexing="ij")).reshape(3, -1)
    still = np.full_like(still_t, spatial)
    return np.concatenate([vision_3V, np.stack([still_t, still, still])], axis=1)


def _times(
    count: int, first: int, rate: float, base_rate: float, config: TransformerConfig
) -> Array:
    index = np.arange(count, dtype=np.float32) + first
    if not config.enable_fps_modulation or count == 1:  # a single frame or row has no rate
        return index
    return index / np.float32(rate) * np.float32(base_rate)


def rotations(positions_3N: Array, frequency_h: Array, config: TransformerConfig) -> Rope:
    """Cosine and sine [N, d] of interleaved multi-axis RoPE, of the kind of ``frequency_h`` [d /
    2]; sines of the first half are negative, since they rotate the second half into it.

    Frequency i belongs to the vertical axis for i = 1, 4, 7, ..., to the horizontal axis for i = 2,
    5, 8, ..., up to the size of those sections, and to the temporal axis otherwise. Angles are
    products of float32 elements: positions are near 15000, where a coarser dtype or a matrix
    product in TF32 would merge neighbours.
    """
    xp = array_namespace(frequency_h)
    axis = np.zeros(config.head_dim // 2, np.int64)
    for which in (1, 2):
        axis[which : config.rope_axes_dim[which] * 3 : 3] = which
    angle_Nh = xp.asarray(positions_3N[axis].T) * frequency_h
    cos_Nd = xp.cos(xp.concat([angle_Nh, angle_Nh], axis=-1))
    return cos_Nd, xp.sin(xp.concat([-angle_Nh, angle_Nh], axis=-1))
