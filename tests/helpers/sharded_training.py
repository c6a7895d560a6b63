"""What each of two processes does in test_training_sharding.py: a few steps with spread weights,
then the state.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from helpers.training_data import random_policy
from recipes.random_checkpoint import FactorySizes, transformer_config
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.parallel.rank import exit_rank
from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.loop import Loop, TrainLoopConfig
from strands_cosmos3.training.matching import FlowConfig, flow_loss
from strands_cosmos3.training.sharding import mean_over_ranks, processes, shard_policy
from strands_cosmos3.training.windows import Batch


def main(folder: Path, until: int) -> None:
    torch.set_num_threads(1)
    config = TransformerConfig.from_dict(
        transformer_config(FactorySizes(32, 2, 2, 1, 16, 48, 8), "silu", 32)
    )
    with processes() as share:
        policy = shard_policy(random_policy(config, seed=1), share.ranks)
        losses = []

        def loss(step: int):
            generator = torch.Generator().manual_seed(step)
            shapes = (6, 8, 2, 4, 6), (6, 10), (6, 16, 10)
            latents, state, rows = (torch.randn(shape, generator=generator) for shape in shapes)
            mode = torch.tensor([0, 1, 2, 0, 0, 0])
            batch = Batch(
                latents, state, rows, ((1, 2, 3), (4,)), torch.tensor([0, 1, 0, 1, 0, 1]), mode
            )
            noise = torch.Generator().manual_seed(100 + step)

            def job(mine: TrainedPolicy):
                return flow_loss(mine, batch, FlowConfig(), noise, share)

            value, parts = policy(job)
            losses.append(float(mean_over_ranks(parts, share.ranks)["loss"]))
            return value, parts

        Loop(policy, loss, TrainLoopConfig(steps=8, lr=1e-2, warmup=1, ema=0.9), folder).run(until)
        if share.rank == 0:
            (folder / f"losses-{until}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    exit_rank(0)
