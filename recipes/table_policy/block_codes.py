"""Linear codes of blocks of pixels, which the VAE's encoder learns, so that a transformer reads
motion off its latents.

A VAE that is trained for its pictures alone hides motion: see "Latents that show motion" in
recipes/table_policy/NOTES.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import eigsh


@dataclass(frozen=True)
class BlockCodes:
    """Principal components of blocks of 4 frames and 16 x 16 pixels: P = 3 * 4 * 16 * 16
    numbers, C codes of unit variance.
    """

    mean: torch.Tensor  # [P]
    components: torch.Tensor  # [P, C], orthonormal
    deviation: torch.Tensor  # [C] of the codes before they are scaled

    @classmethod
    def fit(cls, clips: Iterable[torch.Tensor], codes: int) -> BlockCodes:
        """Return the codes that keep most of the variance of clips [n, 3, F, H, W]."""
        count = 0
        total = torch.zeros(())
        products = torch.zeros(())
        for pixels in clips:
            flat = blocks(pixels).flatten(0, 3)
            count = count + len(flat)
            total = total + flat.sum(0).double()
            products = products + (flat.T @ flat).double()
        mean = total / max(count, 1)
        covariance = (products / max(count, 1) - torch.outer(mean, mean)).cpu().numpy()
        variance, vectors = eigsh(covariance, codes, v0=np.ones(len(covariance)))
        kept, variance = (
            torch.from_numpy(found[..., ::-1].copy()).float() for found in (vectors, variance)
        )
        return cls(mean.float().cpu(), kept, variance.clamp(min=1e-8).sqrt())

    def of(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the codes [n, C, F', H / 16, W / 16] of clips [n, 3, F, H, W], F = 4 (F' - 1) +
        1.
        """
        mean, components, deviation = (
            t.to(pixels.device) for t in (self.mean, self.components, self.deviation)
        )
        return ((blocks(pixels) - mean) @ components / deviation).movedim(-1, 1)

    def error(self, latents: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        """Return the mean squared difference of latents from the codes, each weighted by its
        deviation in pixels.

        Squared deviations would be the pixels' error, and leave the weak codes unlearnt, which show
        motion, too.
        """
        weight = (self.deviation / self.deviation.mean()).to(pixels.device)
        return ((latents.float() - self.of(pixels)).movedim(1, -1).square() * weight).mean()


def blocks(pixels: torch.Tensor) -> torch.Tensor:
    """Return [n, F', H / 16, W / 16, P] pixels that each latent stands for; the first frame
    stands for four alike.
    """
    first = pixels[:, :, :1].expand(-1, -1, 4, -1, -1)
    split = (
        torch.cat([first, pixels[:, :, 1:]], dim=2)
        .unflatten(2, (-1, 4))
        .unflatten(4, (-1, 16))
        .unflatten(6, (-1, 16))
    )
    return split.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)  # of [n, 3, F', 4, H', 16, W', 16]
