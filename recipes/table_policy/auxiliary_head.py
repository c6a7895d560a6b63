"""Auxiliary head (training only) that predicts all goals' actions.

A window asks for one goal, and its answer shows where noise is low or a prefix is given. The head
asks each picture for the rows of all goals, so that its tokens learn sooner where the cubes are.
After 1,000 steps on 7,200 labelled pictures of nominal tables the squared error of chunks was 0.050
with the head and 0.079 without on these pictures, 0.090 and 0.096 on others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from strands_cosmos3.engine.transformer import RmsNorm
from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.windows import RAW_WIDTH, Batch


@dataclass(frozen=True, eq=False)
class LabelledBatch(Batch):
    """Windows of pictures, with the expert's rows for every goal."""

    goal_rows: torch.Tensor = field(kw_only=True)  # [B, goals, rows, 10]


PARTS = 4
"""Parts of a chunk over which rows are averaged."""


class AuxiliaryHead(nn.Module):
    """Average the tokens of a picture, then two layers. The output begins at zero."""

    def __init__(self, policy: TrainedPolicy, goals: int, seed: int):
        super().__init__()
        config = policy.transformer.config
        generator = torch.Generator().manual_seed(seed)
        D = config.hidden_size
        self.goals = goals
        self.norm = RmsNorm(D, config)
        self.inner = nn.Linear(D, 2 * D)
        self.outer = nn.Linear(2 * D, goals * PARTS * RAW_WIDTH)
        with torch.no_grad():
            self.inner.weight.copy_(torch.randn(2 * D, D, generator=generator) * D**-0.5)
            for tensor in (self.inner.bias, self.outer.weight, self.outer.bias):
                tensor.zero_()

    def forward(self, tokens_BVD: torch.Tensor) -> torch.Tensor:
        """Return [B, goals, PARTS, 10] in the model's scale."""
        read = self.outer(F.silu(self.inner(self.norm(tokens_BVD).mean(1))))
        return read.view(len(read), self.goals, PARTS, RAW_WIDTH)


class PolicyWithAuxiliaryHead(TrainedPolicy):
    """A policy with such a head on its tokens before the last layer.

    Args:
        goals: Number of goals that pictures are labelled for. seed: Of the head's weights.
    """

    def __init__(self, policy: TrainedPolicy, goals: int, seed: int = 0):
        super().__init__(policy.transformer, policy.head)
        self.auxiliary = AuxiliaryHead(policy, goals, seed)
        layers = policy.transformer.generation.layers
        layers[max(len(layers) - 2, 0)].register_forward_hook(self._keep)
        self._tokens: torch.Tensor | None = None

    def _keep(self, _layer: nn.Module, _args: Any, groups: list[torch.Tensor]) -> None:
        self._tokens = groups[0]

    def auxiliary_error(self, batch: LabelledBatch, rank: int = 0, ranks: int = 1) -> torch.Tensor:
        """Return the mean squared error of the head for a process's share of windows whose
        velocities were just computed.
        """
        assert self._tokens is not None  # kept by the layer
        tokens = self._tokens
        self._tokens = None
        rows = batch.rows.shape[1] + (batch.state is not None)
        parts = batch.goal_rows[rank::ranks].unflatten(2, (PARTS, -1)).mean(3)
        return F.mse_loss(self.auxiliary(tokens[:, :-rows]), parts.to(tokens.device))


def without_auxiliary_head(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a policy without those of its head."""
    return {name: tensor for name, tensor in weights.items() if not name.startswith("auxiliary.")}
