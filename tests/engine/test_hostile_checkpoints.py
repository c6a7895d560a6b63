"""Hostile checkpoints: every attack of the table ends at once, in a typed error that names file
and key.
"""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from helpers.hostile_checkpoints import ATTACKS, PRODUCTS
from helpers.memory import peak_rss_growth
from strands_cosmos3.engine import token_worker
from strands_cosmos3.engine.checkpoint import Checkpoint, locate
from strands_cosmos3.engine.tokens import _WORKERS, PromptTokenizer
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


REPLACE = {"type": "Replace", "pattern": {"String": "a"}}
MANY = {"type": "Sequence", "normalizers": [{**REPLACE, "content": "a" * 99}] * 6}
NORMALIZERS = {
    "an a becomes many": (MANY, "it took more than 10 s or 2 GiB"),
    "an expression that Rust gives up": (
        {**REPLACE, "pattern": {"Regex": "(a+)+b"}, "content": ""},
        "PanicException: Onig",
    ),
    "a table that Rust cannot read": (
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        "PanicException: Precompiled",
    ),
}
DOUBLED = (
    "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    "{{ n.s }}"
)
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "a string of 4 GB": ("{{ 'x' * 4000000000 }}", "MemoryError"),
    "a string that doubles": (DOUBLED, "MemoryError"),
    "a field of 3 GB": ("{{ '%3000000000d' % 1 }}", "MemoryError"),
    "loops in loops": (LOOPS, "it took more than 0 s or 2 GiB"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "Recursion"),
    "no template": (None, "chat_template is not set"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_has_little_memory_and_time(checkpoints, tmp_path, monkeypatch, name):
    folder = Path(shutil.copytree(checkpoints["silu"] / "text_tokenizer", tmp_path / "tokenizer"))
    sound = PromptTokenizer(checkpoints["silu"] / "text_tokenizer")
    expected = sound.ids("lift the cube")
    text, said = TEMPLATES[name]
    if text is None:
        (folder / "chat_template.jinja").unlink()
    else:
        (folder / "chat_template.jinja").write_text(text)
    grown = peak_rss_growth()
    if text is LOOPS:  # until the second ends in which the process is
        monkeypatch.setattr(token_worker, "CPU_S", 0)
    with pytest.raises(LayoutError, match=rf"chat template \(.*{said}"):
        PromptTokenizer(folder)
    assert grown() < LITTLE
    monkeypatch.undo()
    again = PromptTokenizer(checkpoints["silu"] / "text_tokenizer")
    assert torch.equal(again.ids("lift the cube"), expected)  # whatever became of the process


@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_tokenizer_has_little_memory_and_time(checkpoints, tmp_path, name):
    normalizer, said = NORMALIZERS[name]
    folder = Path(shutil.copytree(checkpoints["silu"] / "text_tokenizer", tmp_path / "tokenizer"))
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, "normalizer": normalizer}))
    with pytest.raises(LayoutError, match=said):
        PromptTokenizer(folder).ids("a" * 40)


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
    assert 3000 < fits.numel() <= token_worker.MOST_TOKENS
    for prompt in ("x " * 9000, "\n?" * 9000, "\U0001f600" * 9000):
        with pytest.raises(InputError, match=r"at most 8192 are taken"):
            tokens.ids(prompt)


@pytest.mark.parametrize("name", ["a\0b", "owner/na\0me", "\ud800/x"])
def test_a_name_that_no_file_can_have(name):
    with pytest.raises(LayoutError, match=r"neither|hub"):
        locate(name, local_files_only=True)
