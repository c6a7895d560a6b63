"""Groups of chunks that begin in the same state, and their advantages over each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64

_SPREAD = 1e-3  # of a group's rewards, below which it says nothing
_CLIP = 2.0  # of advantages, in standard deviations


@dataclass(frozen=True, eq=False)
class Group:
    """A visited state as the model reads it, and what K chunks from it were worth; the one of a
    whole episode, with what followed.
    """

    latents: NDArray[np.float32]  # [C, F, H, W] of the picture
    plain: NDArray[np.float32]  # the same without the variation; [0] where there is none
    state: NDArray[np.float32]  # [10], or [0] of a model without a state row
    prompt: tuple[int, ...]  # token ids of the caption
    empty: tuple[int, ...]  # token ids of the caption without text
    rows: NDArray[np.float32]  # [K, T, D] chunks in the model's scale, the policy's own first
    rewards: F64  # [K]
    executed: NDArray[np.int64]  # [K] rows of each chunk that were


def rated(rewards: F64) -> tuple[F64, NDArray[np.bool_]]:
    """Return r in 0..1 of each chunk of G groups [G, K], with a mean of 1/2 in each group, and
    which groups tell chunks apart [G].

    Chunks of one state are compared with each other only, in that group's standard deviations.
    The mean matters: with another one, chunks that the policy would not have drawn pull it towards
    themselves, whatever they are worth.
    """
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    spread = rewards.std(axis=1, keepdims=True)
    clipped = np.clip(centred / np.maximum(spread, _SPREAD), -_CLIP, _CLIP)
    clipped -= clipped.mean(axis=1, keepdims=True)
    reach = np.maximum(np.abs(clipped).max(axis=1, keepdims=True), _CLIP)
    return 0.5 + clipped / (2 * reach), spread[:, 0] > _SPREAD
