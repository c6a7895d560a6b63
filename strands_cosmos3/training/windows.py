"""Windows of episodes as the model reads them: latents of pictures, a state row, action rows and
prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from strands_cosmos3.actions.decode import encode_pose_delta
from strands_cosmos3.actions.stats import normalize_chunk
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_whole

ROWS = 16
FPS = 15.0
RAW_WIDTH = 10
POLICY = 0
FORWARD = 1
INVERSE = 2
"""Mode of a window: policy, forward dynamics, inverse dynamics."""


@dataclass(frozen=True, eq=False)
class Batch:
    """B windows, clean; state and rows in the model's scale."""

    latents: torch.Tensor  # [B, C, F, H, W]
    # [B, 10] from state_columns, or None if the sequence has no state row
    state: torch.Tensor | None
    rows: torch.Tensor  # [B, rows, 10]
    prompts: tuple[tuple[int, ...], ...]  # token ids of G captions
    prompt: torch.Tensor  # [B] index of each window's caption in prompts
    mode: torch.Tensor | None = None  # [B] POLICY, FORWARD or INVERSE; None means POLICY for all
    # [B] rows of the chunk that are given, for a policy; None means 0 for all
    prefix: torch.Tensor | None = None
    fps: float = FPS

    @property
    def modes(self) -> torch.Tensor:
        """[B] mode of each window."""
        return torch.full((len(self.rows),), POLICY) if self.mode is None else self.mode


def scaled_rows(deltas: NDArray[np.float64], gripper: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return rows [n, rows, 10] in the model's scale, of pose deltas [n, rows, 4, 4] and gripper
    commands [n, rows].
    """
    raw = np.concatenate([encode_pose_delta(deltas), gripper[..., None]], axis=-1)
    return (
        normalize_chunk(raw.reshape(-1, raw.shape[-1]), "droid_lerobot")
        .reshape(raw.shape)
        .astype(np.float32)
    )


def latent_columns(canvas_hw: tuple[int, int]) -> int:
    """Return the number of latent columns that contain pictures; DROID's composite is 640 x 540,
    the rest is padding.
    """
    height, width = canvas_hw
    return max(int(min(width / 640, height / 540) * 640 + 0.5) // 16, 1)


def to_pixels(frames: NDArray[np.uint8], device: torch.device | None = None) -> torch.Tensor:
    """Convert uint8 pictures [B, H, W, 3] or clips [B, F, H, W, 3] to pixels [B, 3, F, H, W] in
    [-1, 1], on a device.
    """
    clips = torch.from_numpy(
        np.require(frames if frames.ndim == 5 else frames[:, None], requirements="W")
    )
    return clips.to(device).float().permute(0, 4, 1, 2, 3).div_(127.5).sub_(1)


def cached_latents(
    encode: Callable[[NDArray[np.int64]], torch.Tensor],
    ticks: NDArray[np.int64],
    path: Path,
    columns: int,
    on_batch: Callable[[int, int], None] = lambda *_: None,
    batch: int = 32,
) -> NDArray[np.float16]:
    """Encode windows once, cache their latents in ``path`` (.npy) and map them from disk.

    Args:
        encode: Ticks [b] -> normalised latents [b, C, F, H, W].
        columns: Latent columns to keep; the rest is padding, which the model does not see.

    Raises:
        ConfigError: The cache has another number of windows.
    """
    if not path.exists():
        parts = []
        for start in range(0, len(ticks), batch):
            with torch.no_grad():
                parts.append(
                    encode(ticks[start : start + batch])[..., :columns].to(torch.float16).numpy()
                )
            on_batch(min(start + batch, len(ticks)), len(ticks))
        write_whole(path, lambda unfinished: np.save(unfinished, np.concatenate(parts)))
    latents = np.load(path, mmap_mode="r")
    if len(latents) != len(ticks):
        raise ConfigError(
            f"{path} holds the latents of {len(latents)} windows, and there are {len(ticks)}: it "
            "was made from other episodes "
            "or with other settings. Choose another folder."
        )
    return latents
