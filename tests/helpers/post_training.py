"""A made-up arm's dataset for post-training, and what each of two processes does in
test_training_sharding.py.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from recipes.random_checkpoint import FactorySizes
from strands_cosmos3.actions.rotations import so3_exp
from strands_cosmos3.datasets import (
    ACTION,
    EE_POSE,
    STATE,
    DatasetSpec,
    DatasetWriter,
    arm_spec,
    camera_key,
)
from strands_cosmos3.datasets.arm_rows import pose7, raw_rows
from strands_cosmos3.observe import views
from strands_cosmos3.training.options import PostConfig
from strands_cosmos3.training.post import PostTraining
from strands_cosmos3.training.sharding import processes, rank_0_first, require_one_folder

SMALL = FactorySizes(32, 2, 2, 1, 16, 48, 16, shards=2)
SMALL_CANVAS = {480: ((32, 48),)}
SHARED = PostConfig(
    steps=6,
    batch=5,
    lr=1e-2,
    every=4,
    validation_fraction=0.5,
    validate_every=2,
    lora_rank=2,
    lora_targets=("q", "v"),
)


def made_up_arm(root: Path, tasks: tuple[str, ...]) -> Path:
    """Episodes of a made-up arm with one small camera."""
    rng = np.random.default_rng(0)
    full = arm_spec({"composite": (32, 48)})
    keys = (STATE, EE_POSE, ACTION, camera_key("composite"))
    spec = DatasetSpec(15, {key: full.features[key] for key in keys}, "panda")
    with DatasetWriter(root, spec) as writer:
        for task in tasks:
            poses = np.tile(np.eye(4), (36, 1, 1))
            poses[:, :3, 3] = np.cumsum(rng.normal(0.004, 0.002, (36, 3)), 0)
            poses[:, :3, :3] = so3_exp(np.cumsum(rng.normal(0, 0.01, (36, 3)), 0))
            orders = (np.arange(36) < 20).astype(float)
            state = np.concatenate([rng.normal(0, 0.3, (36, 7)), orders[:, None]], 1)
            columns = {STATE: state.astype(np.float32), EE_POSE: pose7(poses).astype(np.float32)}
            columns[ACTION] = raw_rows(poses, orders).astype(np.float32)
            writer.add_episode(
                columns,
                {camera_key("composite"): rng.integers(0, 255, (36, 32, 48, 3)).astype(np.uint8)},
                task,
            )
    return root


def main(source: Path, dataset: Path, folder: Path, until: int | None = None) -> None:
    torch.set_num_threads(1)
    with patch.object(views, "TIERS", SMALL_CANVAS), processes() as share:
        require_one_folder(folder, share)
        with rank_0_first(share):
            post = PostTraining(source, dataset, folder, SHARED, shard=share)
        post.run(until)
