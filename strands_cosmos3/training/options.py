"""Options of post-training. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strands_cosmos3.options import option


@dataclass(frozen=True)
class PostConfig:
    """How a checkpoint is post-trained."""

    train: tuple[str, ...] = ("action_proj_*", "action_modality_embed")
    """Shell patterns of the weights to train, by their names in the released layout; all others
    are frozen. The default is the least that post-training needs.
    """
    lora_rank: int = 0
    """Rank of adapters of the generation tower's projections; 0 means no adapters."""
    lora_targets: tuple[str, ...] = ("q", "k", "v", "out")
    """Projections that get adapters."""
    stats: Literal["dataset", "packaged"] = "dataset"
    """Normalise rows with the dataset's own statistics or with the embodiment's."""
    embodiment: str | None = None
    """Embodiment of the rows. The default is the checkpoint's, else droid."""
    steps: int = 1000
    """Number of steps."""
    batch: int = 8
    """Windows per step."""
    lr: float = 1e-4
    """Learning rate."""
    accumulate: int = 1
    """Average the gradients of so many draws of windows per step: larger batches in the same
    memory.
    """
    every: int = option(4, hidden=True)
    """Frames between windows."""
    validation_fraction: float = 0.1
    """Fraction of the episodes, at the end, that only validate; rounded down."""
    validate_every: int = 100
    """Steps between validations: the loss of the averaged weights on held-out windows."""
    policy_frames: int | None = None
    """Frames of the clip that the policy denoises, 1 + 4 for each future latent frame. The default
    is the checkpoint's. 1 trains actions alone, with the expert's answers if the dataset has them
    (`demos --robot`). The new checkpoint declares the number, and runs with it.
    """
    seed: int = 0
    """Seed of adapters, order and noise."""
