"""Normalisation of latents: by a VAE's mean and deviation of each channel, and where a config
states it, by those of each frame of a clip.

Shape suffixes: B batch, C latent channels, F latent frames, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from strands_cosmos3.engine.arrays import Array
from strands_cosmos3.engine.wan_config import WanConfig


class LatentScale:
    """Scale of a VAE's latents, as arrays like ``like``: of its kind and device, and of its dtype
    but for the scale of frames, which is float32.
    """

    def __init__(self, config: WanConfig, like: Array):
        self._xp: Any = array_namespace(like)
        mean, std = (
            self._xp.asarray(values, dtype=like.dtype, device=like.device).reshape(1, -1, 1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        self._mean = mean
        self._inverse_std = 1.0 / std
        self._of_frames = frame_scale(config)

    @property
    def channels(self) -> int:
        """Latent channels."""
        return self._mean.shape[1]

    def normalised(self, raw_BCFHW: Array) -> Array:
        """Latents of the transformer, float32, from those of the VAE."""
        latents = self._xp.astype(
            (raw_BCFHW - self._mean) * self._inverse_std, self._xp.float32, copy=False
        )
        mean, std = self._of_frames(latents)
        return (latents - mean) / std

    def raw(self, latents_BCFHW: Array) -> Array:
        """Latents of the VAE from those of the transformer."""
        mean, std = self._of_frames(latents_BCFHW)
        scaled = self._xp.astype(latents_BCFHW * std + mean, self._mean.dtype, copy=False)
        return scaled / self._inverse_std + self._mean


def frame_scale(config: WanConfig) -> Callable[[Array], tuple[Array | float, Array | float]]:
    """Return a function from latents [B, C, F, H, W] to mean and deviation [C, F, 1, 1] of their
    frames, by default (0, 1).

    Latents of a clip's later frames hold motion as well and are larger than those of its first
    frame.
    """
    if not config.latent_frames:
        return lambda latents: (0.0, 1.0)
    table = np.array(config.latent_frames, np.float32)  # [frames, 2, C]

    def scale(latents: Array) -> tuple[Array, Array]:
        index = np.minimum(np.arange(latents.shape[2]), len(table) - 1)
        of_frames = table[index].transpose(1, 2, 0)[..., None, None]
        mean, std = array_namespace(latents).asarray(of_frames, device=latents.device)
        return mean, std

    return scale
