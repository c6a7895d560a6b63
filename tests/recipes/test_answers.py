"""The head of training that reads every goal's rows from a picture's tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recipes.random_checkpoint import transformer_config
from recipes.table_policy.auxiliary_head import (
    PARTS,
    LabelledBatch,
    PolicyWithAuxiliaryHead,
    without_auxiliary_head,
)
from recipes.table_policy.config import RunConfig
from recipes.table_policy.release import fresh_policy
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.training.matching import FlowConfig, flow_loss
from strands_cosmos3.training.windows import Batch

GOALS, WINDOWS = 3, 8


def _policy(seed: int = 0) -> PolicyWithAuxiliaryHead:
    sizes = RunConfig(hidden=64, layers=2, latent_channels=16, latent_patch=2, rope_theta=5e6).sizes
    config = TransformerConfig.from_dict(transformer_config(sizes, "silu", 16))
    return PolicyWithAuxiliaryHead(fresh_policy(config, seed), GOALS, seed)


def _batch(latents: torch.Tensor) -> Batch:
    noise = torch.Generator().manual_seed(1)
    rows = torch.randn(WINDOWS, 16, 10, generator=noise)
    answers = torch.randn(WINDOWS, GOALS, 16, 10, generator=noise)
    prompt = torch.zeros(WINDOWS, dtype=torch.long)
    return LabelledBatch(
        latents, torch.zeros(WINDOWS, 10), rows, ((1, 2),), prompt, goal_rows=answers
    )


@pytest.fixture
def batch() -> Batch:
    return _batch(torch.randn(WINDOWS, 16, 1, 8, 9, generator=torch.Generator().manual_seed(2)))


def _error(
    policy: PolicyWithAuxiliaryHead, batch: Batch, rank: int = 0, ranks: int = 1
) -> torch.Tensor:
    flow_loss(policy, batch, FlowConfig(), torch.Generator().manual_seed(3))
    return policy.auxiliary_error(batch, rank, ranks)


def test_a_new_head_answers_zero_and_errs_by_the_mean_square_of_quarters(batch):
    assert batch.goal_rows is not None
    quarters = batch.goal_rows.reshape(WINDOWS, GOALS, PARTS, 4, 10).mean(3)
    assert _error(_policy(), batch).item() == pytest.approx(
        quarters.square().mean().item(), rel=1e-5
    )


def test_the_head_teaches_the_tokens_what_pictures_show(batch):
    policy = _policy()
    optimizer = torch.optim.AdamW(policy.parameters(), 3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        error = _error(policy, batch)
        error.backward()
        optimizer.step()
    policy_layers = policy.transformer.generation.layers
    for parameter in (
        policy.transformer.proj_in.weight,
        policy_layers[0].get_parameter("mlp_moe_gen.up_proj.weight"),
    ):
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0
    exchanged = replace(batch, latents=batch.latents.flip(0))
    assert _error(policy, exchanged).item() > 2 * error.item()


def test_each_process_answers_its_own_windows(batch):
    policy = _policy()
    torch.nn.init.normal_(policy.auxiliary.outer.bias)
    whole = _error(policy, batch)
    halves = []
    for rank in (0, 1):
        own = replace(
            batch,
            latents=batch.latents[rank::2],
            rows=batch.rows[rank::2],
            prompt=batch.prompt[rank::2],
        )
        own = replace(own, state=torch.zeros(WINDOWS // 2, 10))
        flow_loss(policy, own, FlowConfig(), torch.Generator().manual_seed(3))
        halves.append(policy.auxiliary_error(batch, rank, 2))
    assert sum(halves).item() / 2 == pytest.approx(whole.item(), rel=1e-4)


def test_the_head_is_no_part_of_the_policy(batch):
    policy = _policy()
    plain = fresh_policy(policy.transformer.config)
    assert without_auxiliary_head(policy.state_dict()).keys() == plain.state_dict().keys()
    losses = [
        flow_loss(p, batch, FlowConfig(), torch.Generator().manual_seed(3))[0].item()
        for p in (policy, plain)
    ]
    assert losses[0] == losses[1]
