"""Hostile checkpoints: every attack of the table ends at once, in a typed error that names file
and key.
"""

import shutil
import signal
from pathlib import Path

import pytest
import torch

from helpers.hostile_checkpoints import ATTACKS, PRODUCTS
from helpers.memory import peak_rss_growth
from strands_cosmos3.engine.checkpoint import Checkpoint, locate
from strands_cosmos3.engine.tokens import PromptTokenizer
from strands_cosmos3.engine.vae import WanVae
from strands_cosmos3.errors import CheckpointError, LayoutError

ENDLESS_S, LITTLE = 20, 100 << 20


@pytest.fixture(autouse=True)
def an_endless_reader_fails():
    def fail(*_):
        raise AssertionError(f"still reading after {ENDLESS_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(ENDLESS_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def read(folder):
    """All that reads a checkpoint, but the weights' numbers."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    WanVae(checkpoint.vae_config, checkpoint.vae_weights, torch.device("cpu"), torch.float32, False)
    PromptTokenizer(folder / "text_tokenizer")


OFTEN = list(PRODUCTS)[::6]
RARELY = [pytest.param(name, marks=pytest.mark.slow) for name in PRODUCTS if name not in OFTEN]


@pytest.mark.parametrize("name", [*ATTACKS, *OFTEN, *RARELY])
def test_attack(checkpoints, tmp_path, name):
    folder = Path(shutil.copytree(checkpoints["silu"], tmp_path / "c"))
    attack, word = (ATTACKS | PRODUCTS)[name]
    attack(folder)

    grown = peak_rss_growth()
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    said = str(caught.value)
    assert grown() < LITTLE
    assert word in said
    assert said.isprintable() or "\n  - " in said
    assert len(said) < 2000


def test_a_good_checkpoint_is_read(checkpoints):
    for folder in checkpoints.values():
        read(folder)


@pytest.mark.parametrize("name", ["a\0b", "owner/na\0me", "\ud800/x"])
def test_a_name_that_no_file_can_have(name):
    with pytest.raises(LayoutError, match=r"neither|hub"):
        locate(name, local_files_only=True)
