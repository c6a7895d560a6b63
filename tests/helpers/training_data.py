"""What the tests of training share by import."""

from __future__ import annotations

import numpy as np
import torch

CANVAS = (128, 160)
TICKS = 26
EPISODES = (18, 22)  # of seed 3: calm for a chunk, and in both a cube is grasped


def latents_like(n: int, frames: int = 1, seed: int = 0) -> torch.Tensor:
    """[n, 16, frames, 8, 9] noise in the shape of latents."""
    return torch.from_numpy(
        np.random.default_rng(seed).normal(size=(n, 16, frames, 8, 9)).astype(np.float32)
    )
