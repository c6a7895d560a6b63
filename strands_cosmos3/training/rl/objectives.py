"""What a chunk's worth makes of the velocities that the policy is to predict.

``v_old`` is the velocity of the policy that sampled, ``v`` that of flow matching to the chunk.

nft: DiffusionNFT (arXiv 2509.16117), on action rows. ``v+ = (1 - b) v_old + b v_theta`` matches the
    chunk with weight r, ``v- = (1 + b) v_old - b v_theta`` with 1 - r. Its optimum is
    ``v_old + (2 / b) E[(r - 1/2) (v - v_old)]``; a chunk of r = 1/2 pulls nowhere.
awfm: Flow matching to all chunks, weighted with the exponential of their advantage.
rft: Flow matching to the best chunk of each group.
"""

from __future__ import annotations

import numpy as np
import torch

from strands_cosmos3.checks import F64

_TEMPERATURE = 0.5  # of awfm, in units of 2 r - 1


def weights_of(algorithm: str, rating: F64) -> F64:
    """Return the weight [G, K] of each chunk, of their ratings r [G, K]: r itself for ``nft``, else
    with a mean of 1 over those of each group that are learnt from, whose weight is not 0.
    """
    if algorithm == "nft":
        return rating
    if algorithm == "rft":
        return (rating == rating.max(axis=1, keepdims=True)).astype(np.float64)
    weights = np.exp((2 * rating - 1) / _TEMPERATURE)
    return weights / weights.mean(axis=1, keepdims=True)


def errors(
    algorithm: str,
    v_theta: torch.Tensor,
    v_old: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    beta: float,
    executed: torch.Tensor,
) -> torch.Tensor:
    """Return the loss of each window [B], of velocities [B, T, D] and weights [B]: the mean over
    its ``executed`` rows [B], as the others did not contribute to what the chunk was worth.

    ``beta`` is DiffusionNFT's: half of it takes steps of twice the size.
    """
    counts = torch.arange(v.shape[1], device=v.device) < executed[:, None]

    def square(error: torch.Tensor) -> torch.Tensor:
        return (error.square().mean(2) * counts).sum(1) / executed.clamp(min=1)

    if algorithm != "nft":
        return weight * square(v_theta - v)
    positive = (1 - beta) * v_old + beta * v_theta
    negative = (1 + beta) * v_old - beta * v_theta
    return (weight * square(positive - v) + (1 - weight) * square(negative - v)) / beta
