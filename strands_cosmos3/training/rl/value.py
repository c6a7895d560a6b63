"""What an episode is worth from a state on, where no other chunk can be tried in that state.

A linear head on the start policy's features predicts the return. It is fitted in closed form, so a
run that is resumed has the same head to the bit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from strands_cosmos3.checks import F64
from strands_cosmos3.engine.sequence import ACTION
from strands_cosmos3.engine.transformer import ActionHead
from strands_cosmos3.resources import write_whole
from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.matching import Noised, predicted
from strands_cosmos3.training.windows import Batch

DISCOUNT = 0.9
"""Of a reward that comes a chunk later."""
_FORGETTING = 0.9  # weight of older iterations, whose policy was another
_RIDGE = 30.0  # of features of about unit size


def returns_of(rewards: list[float]) -> list[float]:
    """Return the discounted sum of each chunk's reward and those that follow it."""
    sums, later = list[float](), 0.0
    for reward in reversed(rewards):
        later = reward + DISCOUNT * later
        sums.append(later)
    return sums[::-1]


class Value:
    """A head on the final hidden states that a policy writes its rows from.

    Args:
        folder: Of its sums over the states of earlier iterations, one file an iteration.
        writes: Whether this process writes them.
    """

    def __init__(self, policy: TrainedPolicy, folder: Path, writes: bool = True):
        width = len(policy.w_out)
        eye = torch.eye(width).to(policy.w_out)
        head = ActionHead(policy.w_in, policy.b_in, eye, torch.zeros(width).to(eye))
        self._policy = TrainedPolicy(policy.transformer, head).requires_grad_(False)
        self._folder, self._writes = folder, writes

    def features(self, batch: Batch, noised: Noised) -> F64:
        """Return features [B, D + 1] of a batch's states, whatever rows and noise it has."""
        vision, rows = noised.streams
        rows = replace(rows, tokens=rows.tokens * (1 - rows.noisy))
        noised = replace(noised, streams=(vision, rows))
        hidden = predicted(self._policy, batch, noised)[ACTION].mean(1)
        return np.pad(hidden.double().cpu().numpy(), ((0, 0), (0, 1)), constant_values=1.0)

    def advantages(self, features: F64, returns: F64, iteration: int) -> F64:
        """Return by how much returns [N] exceed what earlier iterations let one expect; the next
        iteration expects what these teach, too.
        """
        size = features.shape[1]
        path = self._folder / f"{iteration:06d}.npy"
        sums = np.load(path) if path.exists() else np.zeros((size, size + 1))
        head = np.linalg.solve(sums[:, :-1] + _RIDGE * np.eye(size), sums[:, -1])
        sums = _FORGETTING * sums + features.T @ np.column_stack([features, returns])
        if self._writes:
            path = path.with_stem(f"{iteration + 1:06d}")
            write_whole(path, lambda unfinished: np.save(unfinished, sums))
        return returns - features @ head
