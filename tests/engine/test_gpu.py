"""The engine on a GPU answers as on the CPU; CUDA graphs, compiled code and weights kept in host
memory change nothing.
"""

from dataclasses import replace

import pytest
import torch

from helpers.cosmos3_oracle import Case, request
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.options import EngineOptions

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA GPU")

WAYS = {
    "eager": {},
    "offload_text": {"offload_text": True},
    "cuda_graphs": {"cuda_graphs": True},
    "compile": {"compile": True},
    "compile and cuda_graphs": {"compile": True, "cuda_graphs": True},
}


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Float32 throughout: by default, convolutions on a GPU round their inputs to TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def cases(folder):
    """Requests of several modes, shapes and prompts. The first comes again last, after others
    that used the same memory.
    """
    asked = request(Case(folder, steps=2))
    modes = [
        request(Case(folder, mode=mode, steps=2))
        for mode in ("forward_dynamics", "inverse_dynamics")
    ]
    others = [replace(asked, guidance_interval=(900, 1001)), replace(asked, fps=7.5, domain_id=6)]
    longer = replace(asked, neg_text_ids=torch.arange(100, 300))
    return [
        asked,
        *modes,
        *others,
        replace(asked, text_ids=asked.text_ids[..., :9] + 1),
        longer,
        asked,
    ]


def answers(folder, device, dtype=torch.float32, few=False, **options):
    engine = Cosmos3Engine.from_pretrained(
        folder, dtype=dtype, device=device, options=EngineOptions(**options)
    )
    asked = cases(folder)
    try:
        # few: the first twice; each shape compiles anew
        found = [engine.step(one) for one in (asked[::7] if few else asked)]
    finally:
        engine.close()
    return [
        {name: one[name].float().cpu() for name in ("action", "video") if one.get(name) is not None}
        for one in found
    ]


def distance(found, expected):
    """Largest difference, relative to the largest expected value of its kind."""
    assert [set(one) for one in found] == [set(one) for one in expected]
    pairs = [
        (one[name], two[name]) for one, two in zip(found, expected, strict=True) for name in one
    ]
    assert all(one.isfinite().all() for one, _ in pairs)
    return max(float((one - two).abs().max() / two.abs().max()) for one, two in pairs)


def test_the_comparison_runs(checkpoints):
    """Where there is no GPU, too: the CPU's answers are its own."""
    first, again = (answers(checkpoints["silu"], "cpu", few=True) for _ in range(2))
    assert distance(first, again) == 0
    assert distance([{**first[0], "action": -first[0]["action"]}], first[:1]) > 1


@on_a_gpu
@pytest.mark.parametrize("kind", ["silu", "relu2"])
@pytest.mark.parametrize("way", WAYS)
def test_the_answers_are_the_cpus(way, kind, checkpoints):
    found = answers(checkpoints[kind], "cuda", few="compile" in way, **WAYS[way])
    assert distance(found, answers(checkpoints[kind], "cpu", few="compile" in way)) < 1e-3
    assert distance(found[-1:], found[:1]) < 1e-6, "the first request again, after others"


@on_a_gpu
def test_bfloat16_stays_near(checkpoints):
    folder = checkpoints["silu"]
    assert (
        distance(answers(folder, "cuda", torch.bfloat16), answers(folder, "cpu", torch.bfloat16))
        < 0.1
    )
