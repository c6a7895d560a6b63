"""The generation sequence: the tokens of its streams, which of them are clean, and their positions
in time and space.

Shape suffixes: N generation tokens, V vision tokens, T action rows, P numbers in a vision token
(patch x patch x channels), C latent channels, F latent frames, H W latent height and width, d head
width; 3 temporal, vertical and horizontal axis.

Source: diffusers 0.42.1 ``pipeline_cosmos3_omni`` (``get_3d_mrope_ids_*``, packing),
``Cosmos3VLTextRotaryEmbedding``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch

from strands_cosmos3.engine.config import TransformerConfig

TEMPORAL_COMPRESSION = 4  # pixel frames per latent frame after the first
SPATIAL_COMPRESSION = 16  # pixels per latent in height and width
VISION, ACTION = 0, 1  # streams, in the order of the sequence


@dataclass(frozen=True)
class SequenceLayout:
    """Layout of one generation sequence: vision tokens frame by frame, then the action rows, each a
    stream of its own.
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
        return self.vision_tokens, self.action_rows

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
        return of_vision, slice(min(self.clean_rows, self.action_rows), self.action_rows)

    def counts_from(self, first: int) -> list[int]:
        """The number of tokens of each stream from the token ``first`` of the sequence on."""
        ends = accumulate(self.counts)
        return [max(0, min(n, end - first)) for n, end in zip(self.counts, ends, strict=True)]


def patchify(latent_CFHW: torch.Tensor, patch: int) -> torch.Tensor:
    """Vision tokens [V, P] of latents [C, F, H, W]: patches ordered (row, column, channel), odd
    edges padded with zeros.
    """
    height, width = latent_CFHW.shape[2:]
    padded = torch.nn.functional.pad(latent_CFHW, (0, -width % patch, 0, -height % patch))
    split = padded.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
    return split.permute(1, 2, 4, 3, 5, 0).flatten(3).flatten(0, 2)


def unpatchify(
    tokens_VP: torch.Tensor, latent_shape: tuple[int, int, int], patch: int
) -> torch.Tensor:
    """Latents [C, F, H, W] of vision tokens [V, P]; the inverse of :func:`patchify`."""
    F, H, W = latent_shape
    rows = math.ceil(H / patch)
    columns = math.ceil(W / patch)
    split = tokens_VP.reshape(F, rows, columns, patch, patch, -1).permute(5, 0, 1, 3, 2, 4)
    return split.flatten(4).flatten(2, 3)[:, :, :H, :W]


def text_positions(count: int) -> torch.Tensor:
    """[3, count] positions of a prompt: 0, 1, 2, ... on every axis, float32."""
    return torch.arange(count, dtype=torch.float32).expand(3, -1)


def generation_positions(
    layout: SequenceLayout, config: TransformerConfig, text_tokens: int
) -> torch.Tensor:
    """[3, N] positions of the generation tokens, float32.

    Temporal positions of frames and action rows share one clock: the time at ``base_fps`` in latent
    frames, after the prompt and a margin. Vertical and horizontal positions restart at zero in each
    frame.
    """
    start = text_tokens + config.unified_3d_mrope_temporal_modality_margin
    spatial = 0 if config.unified_3d_mrope_reset_spatial_ids else start
    frames, rows, columns = layout.grid
    frame_t = _times(frames, 0, layout.fps / TEMPORAL_COMPRESSION, config) + start
    row_t = _times(layout.action_rows, layout.action_offset, layout.fps, config) + start
    h, w = (torch.arange(count, dtype=torch.float32) + spatial for count in (rows, columns))
    vision_3V = torch.stack(torch.meshgrid(frame_t, h, w, indexing="ij")).flatten(1)
    still = torch.full_like(row_t, spatial)
    return torch.cat([vision_3V, torch.stack([row_t, still, still])], dim=1)


def _times(count: int, first: int, rate: float, config: TransformerConfig) -> torch.Tensor:
    index = torch.arange(count, dtype=torch.float32) + first
    if not config.enable_fps_modulation or count == 1:  # a single frame or row has no rate
        return index
    return index / rate * (config.base_fps / TEMPORAL_COMPRESSION)


def rope_tables(
    positions_3N: torch.Tensor, config: TransformerConfig, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [N, d] of interleaved multi-axis RoPE; sines of the first half are negative,
    since they rotate the second half into it.

    Frequency i belongs to the vertical axis for i = 1, 4, 7, ..., to the horizontal axis for i = 2,
    5, 8, ..., up to the size of those sections, and to the temporal axis otherwise. Angles are
    products of float32 elements: positions are near 15000, where a coarser dtype or a matrix
    product in TF32 would merge neighbours.
    """
    half = config.head_dim // 2
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequency = 1.0 / (config.rope_theta**exponent)
    axis = torch.zeros(half, dtype=torch.long)
    for which in (1, 2):
        axis[which : config.rope_axes_dim[which] * 3 : 3] = which
    angle_Nd = positions_3N[axis].T * frequency
    cos_Nd = torch.cat([angle_Nd, angle_Nd], dim=-1).cos()
    sin_Nd = torch.cat([-angle_Nd, angle_Nd], dim=-1).sin()
    return cos_Nd.to(device, dtype), sin_Nd.to(device, dtype)
