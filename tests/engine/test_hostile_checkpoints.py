"""Hostile checkpoints: every attack of the table ends at once, in a typed error that names file
and key.
"""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from helpers.environments import TESTS
from helpers.hostile_checkpoints import ATTACKS, PRODUCTS
from helpers.memory import peak_rss_growth
from strands_cosmos3.engine import token_worker
from strands_cosmos3.engine.checkpoint import Checkpoint, locate
from strands_cosmos3.engine.tokens import _WORKERS, PromptTokenizer, _end_worker
from strands_cosmos3.engine.vae import WanVae
from strands_cosmos3.errors import CheckpointError, InputError, LayoutError

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


TEMPLATES = {
    "one that fails": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "one that leaves the sandbox": ("{{ ''.__class__.mro() }}", "SecurityError"),
    "none": (None, "chat_template is not set"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_fails_is_named(checkpoints, tmp_path, name):
    folder = Path(shutil.copytree(checkpoints["silu"] / "text_tokenizer", tmp_path / "tokenizer"))
    text, said = TEMPLATES[name]
    if text is None:
        (folder / "chat_template.jinja").unlink()
    else:
        (folder / "chat_template.jinja").write_text(text)
    with pytest.raises(LayoutError, match=rf"chat template \(.*{said}"):
        PromptTokenizer(folder)


@pytest.fixture
def stand_in(monkeypatch):
    """Another program in the tokenizer's process, with its limits."""
    _end_worker()
    monkeypatch.setattr(token_worker, "__file__", str(TESTS / "helpers/greedy_tokenizer.py"))
    monkeypatch.setattr(token_worker, "CPU_S", 1)
    yield
    _end_worker()


GREEDY = {
    "memory": "MemoryError",
    "time": "it took more than 1 s or 2 GiB",
    "panic": "Panic: not an Exception",
    "exit": "SystemExit: 3",
}


@pytest.mark.parametrize("what", GREEDY)
@pytest.mark.usefixtures("stand_in")
def test_a_tokenizer_has_little_memory_and_time(tmp_path, what):
    tokens = PromptTokenizer(tmp_path)
    expected = tokens.ids("lift the cube")
    grown = peak_rss_growth()
    with pytest.raises(LayoutError, match=GREEDY[what]):
        tokens.ids(f"take {what}")
    assert grown() < LITTLE
    assert (tokens.ids("lift the cube.") == expected).all()  # whatever became of the process


def test_the_time_of_earlier_prompts_does_not_count(checkpoints, monkeypatch):
    tokens = PromptTokenizer(checkpoints["silu"] / "text_tokenizer")
    monkeypatch.setattr(token_worker, "CPU_S", 1)
    (worker,) = _WORKERS.values()

    def spent_s():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    end_s = max(spent_s(), token_worker.CPU_S) + 0.3
    prompts = (f"{i} {'x ' * 3000}" for i in range(9999))
    while spent_s() < end_s:
        tokens.ids(next(prompts))
    assert worker.poll() is None


def test_a_prompt_is_bounded_in_tokens(checkpoints):
    tokens = PromptTokenizer(checkpoints["silu"] / "text_tokenizer")
    fits = tokens.ids("x " * 3000)
    assert 3000 < fits.size <= token_worker.MOST_TOKENS
    for prompt in ("x " * 9000, "\n?" * 9000, "\U0001f600" * 9000):
        with pytest.raises(InputError, match=r"at most 8192 are taken"):
            tokens.ids(prompt)


@pytest.mark.parametrize("name", ["a\0b", "owner/na\0me", "\ud800/x"])
def test_a_name_that_no_file_can_have(name):
    with pytest.raises(LayoutError, match=r"neither|hub"):
        locate(name, local_files_only=True)
