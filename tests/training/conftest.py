"""A small policy with random weights."""

from __future__ import annotations

import pytest

from helpers.training_data import random_policy
from recipes.random_checkpoint import FactorySizes, transformer_config
from strands_cosmos3.engine.config import TransformerConfig

SIZES = FactorySizes(64, 2, 2, 1, 32, 96, 16, shards=1)


@pytest.fixture
def policy():
    return random_policy(TransformerConfig.from_dict(transformer_config(SIZES, "silu", 64)), 1)
