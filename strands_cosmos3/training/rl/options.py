"""Options of reinforcement learning. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strands_cosmos3.training.options import PostConfig


@dataclass(frozen=True)
class RLConfig:
    """How a policy learns from what its chunks achieve."""

    algorithm: Literal["nft", "awfm", "rft"] = "nft"
    """DiffusionNFT, advantage-weighted flow matching, or flow matching to the best chunk of each
    group.
    """
    episodes: int = 8
    """Episodes of an iteration."""
    pairs: int = 4
    """Pairs of displaced chunks that are tried in each visited state, beside the policy's own."""
    shift_cm: float = 1.5
    """Standard deviation of their offset at the chunk's end, along each axis."""
    turn_deg: float = 2.0
    """Standard deviation of their rotation, about each axis."""
    grasp: float = 0.25
    """Fraction of the pairs that also close or open the fingers earlier or later."""
    whole_episodes: bool = False
    """Try one chunk in each visited state, and compare what followed with a prediction, as in
    worlds that cannot return to a state; more episodes an iteration serve it.
    """
    anneal: float = 0.985
    """Factor on the offsets after each iteration, down to a third."""
    staleness: Literal[0, 1] = 0
    """Weight versions between what samples and what is trained; 1 lets workers sample while the
    trainer computes.
    """
    nft_beta: float = 1.0
    """DiffusionNFT's beta; smaller takes larger steps."""
    kl_beta: float = 0.0
    """Penalty on the distance of velocities to the start policy's, with the pictures of the run
    itself; above 1e-4 it pulls a policy back.
    """
    keep: float = 1.0
    """Penalty on the distance to the start policy, with pictures without the condition: the policy
    stays as it was where nothing has changed, in its predictions of pictures too.
    """
    steps: int = 20
    """Optimiser steps of an iteration."""
    batch: int = 48
    """Chunks of a step."""
    lr: float = 2e-4
    """Learning rate."""
    average: float = 0.9
    """Decay a step of the average of the weights, which samples."""
    train: tuple[str, ...] = ()
    """Shell patterns of the weights to train, by their names in the released layout; the default
    is all, or beside adapters the action heads.
    """
    lora_rank: int = 0
    """Rank of adapters of the generation tower's projections, for checkpoints that are too large to
    be trained whole; 0 means no adapters.
    """
    lora_targets: tuple[str, ...] = PostConfig.lora_targets
    """Projections that get adapters."""
    evaluate_every: int = 20
    """Iterations between evaluations on held-out scenes."""
    evaluate_episodes: int = 20
    """Episodes of such an evaluation."""
    seed: int = 0
    """Seed of scenes, offsets, order, noise and adapters."""

    @property
    def trained(self) -> tuple[str, ...]:
        """Patterns of the weights that are trained."""
        return self.train or (PostConfig.train if self.lora_rank else ("*",))
