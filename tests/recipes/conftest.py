"""One small collection of demonstrations and one untrained checkpoint, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.training_data import CANVAS, recorded_episodes
from recipes.random_checkpoint import FactorySizes, transformer_config
from recipes.table_policy.captions import fresh_tokenizer, read_captions
from recipes.table_policy.demos import Demos, write_demos
from recipes.table_policy.release import export, fresh_policy
from recipes.table_policy.windows import state_row_of
from recipes.vae_training import convolve_flat, make_vae
from strands_cosmos3.engine.config import TransformerConfig

SIZES = FactorySizes(64, 2, 2, 1, 32, 96, 16, shards=1)


@pytest.fixture(scope="session")
def records():
    """Two episodes."""
    return recorded_episodes()


@pytest.fixture(scope="session")
def demos(records, tmp_path_factory) -> Demos:
    folder = tmp_path_factory.mktemp("demos")
    write_demos(folder, records)
    return Demos.open(folder)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    fresh_tokenizer(folder, CANVAS)
    return folder


@pytest.fixture(scope="session")
def captions(tokenizer):
    return read_captions(tokenizer, CANVAS)


@pytest.fixture(scope="session")
def config_json(tokenizer):
    from transformers import AutoTokenizer

    return transformer_config(SIZES, "silu", len(AutoTokenizer.from_pretrained(tokenizer)))


@pytest.fixture
def policy(config_json):
    """A policy with something to say: heads that a fresh one leaves at zero are filled."""
    made = fresh_policy(TransformerConfig.from_dict(config_json), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in (made.w_out, made.transformer.proj_out.weight):
            weight.normal_(0, 0.05, generator=generator)
        for name, weight in made.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.2 * torch.randn(weight.shape, generator=generator))
    return made


@pytest.fixture(scope="session")
def vae():
    made = make_vae(16, 8, 8).eval().requires_grad_(False)
    convolve_flat(made)
    return made


@pytest.fixture
def released(policy, vae, tokenizer, config_json, demos, tmp_path):
    """A checkpoint of the policy stage: actions without a future."""
    vae.register_to_config(latents_mean=[0.1] * 16, latents_std=[0.7] * 16)
    state = state_row_of(demos)
    args = (
        tmp_path / "checkpoint",
        config_json,
        dict(policy.named_parameters()),
        vae,
        tokenizer,
        state,
        128,
    )
    return export(*args, frames=(1,), label="untrained, for a test", dtype=torch.float32)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Only smoke tests of the recipes belong to ``make test``; the others run with ``make
    test-recipes``.
    """
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("smoke"):
            item.add_marker(pytest.mark.slow)
