"""A policy whose latents change by a linear map reads the same after its projections are fitted."""

from __future__ import annotations

import pytest
import torch

from recipes.random_checkpoint import transformer_config
from recipes.table_policy.refit import refit_projections
from recipes.table_policy.release import fresh_policy, policy_sizes
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.sequence import patchify

C = 6


@pytest.mark.parametrize("patch", [1, 2])
def test_pictures_are_read_as_before(patch: int):
    sizes = policy_sizes(hidden=32, layers=1, latent_channels=C, latent_patch=patch)
    policy = fresh_policy(TransformerConfig.from_dict(transformer_config(sizes, "silu", 16)))
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(20, C, 1, 4, 6, generator=generator)
    mixed = torch.randn(C, C, generator=generator)
    known = torch.einsum("ck,nkfhw->ncfhw", mixed, latents) + 0.7
    before = policy.transformer.proj_in(patchify(known[3], patch))
    policy.transformer.proj_out.weight.data.fill_(0.1)
    refit_projections(policy, known, latents)
    torch.testing.assert_close(
        policy.transformer.proj_in(patchify(latents[3], patch)), before, rtol=1e-3, atol=1e-3
    )
    # a predicted video begins as the given frame
    assert not policy.transformer.proj_out.weight.any()
