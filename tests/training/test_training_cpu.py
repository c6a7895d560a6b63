"""Norms and attention that training computes in blocks on CPUs, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from helpers.training_data import random_policy
from recipes.random_checkpoint import FactorySizes, transformer_config
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.transformer import RmsNorm
from strands_cosmos3.training.cpu import BlockRmsNorm, attention

CONFIG = TransformerConfig.from_dict(transformer_config(FactorySizes(64, 2), "silu", 100))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(answer: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    weights = drawn(*answer.shape, seed=9)
    return [answer, *torch.autograd.grad((answer * weights).sum(), of)]


@pytest.mark.parametrize(
    "rows", [3, 2**17 // 64 + 5], ids=["one block", "blocks of unequal length"]
)
def test_norms_have_the_values_and_gradients_of_the_engines(rows):
    plain, blocks = RmsNorm(64, CONFIG), BlockRmsNorm(64, CONFIG)
    for norm in (plain, blocks):
        norm.weight.data = 1 + drawn(64, seed=1)
    x = (drawn(2, rows, 64) * drawn(2, rows, 1, seed=2).exp()).requires_grad_()
    for ours, theirs in zip(
        *(gradients(norm(x), x, norm.weight) for norm in (blocks, plain)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_norms_output_has_the_dtype_that_matrices_compute_in():
    norm, x = BlockRmsNorm(64, CONFIG), drawn(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
    assert norm(x).dtype == torch.float32


@pytest.mark.parametrize("lower", [True, False], ids=["bfloat16", "float32"])
def test_attention_hides_padding_and_has_torchs_gradients(lower):
    """Rows of two windows, four query heads over two key heads; the second window hides its
    first two keys.
    """
    q, k, v = (
        drawn(2, heads, n, 32, seed=i).requires_grad_()
        for i, (heads, n) in enumerate(((4, 7), (2, 9), (2, 9)))
    )
    seen = torch.ones(2, 9, dtype=torch.bool)
    seen[1, :2] = False
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        ours = gradients(attention(q, k, v, seen).float(), q, k, v)
    theirs = gradients(
        F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None], enable_gqa=True),
        q,
        k,
        v,
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() < (0.02 if lower else 1e-5) * other.norm()
    for gradient in ours[2:]:
        assert gradient[1, :, :2].abs().max() == 0


def test_a_trained_policy_has_these_norms_under_the_released_names():
    policy = random_policy(CONFIG)
    kinds = {
        name.rsplit(".", 1)[-1]: type(module)
        for name, module in policy.named_modules()
        if isinstance(module, RmsNorm)
    }
    assert {name for name, kind in kinds.items() if kind is BlockRmsNorm} == {
        *(
            "input_layernorm",
            "input_layernorm_moe_gen",
            "post_attention_layernorm",
            "post_attention_layernorm_moe_gen",
        ),
        "norm_moe_gen",
    }
    assert "transformer.generation.layers.0.input_layernorm_moe_gen.weight" in dict(
        policy.named_parameters()
    )
