"""ParallelContext over ranks an engine answers what it answers alone, and every rank holds the
same bits.
"""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from helpers import rank_cases as cases
from helpers.parity import of_neighbours, reference, rms, share
from strands_cosmos3.engine.options import QUANTIZE

DEGREES = ((1, 2), (2, 1), (2, 2), (1, 4), (2, 4), (1, 8))
GUIDANCE = (0.5, 1.0, 3.0)
PAIRWISE = [
    ("nano", "policy", (1, 2), 0.5),
    ("super", "forward_dynamics", (1, 2), 1.0),
    ("nano", "inverse_dynamics", (1, 2), 3.0),
    ("super", "inverse_dynamics", (2, 1), 0.5),
    ("nano", "policy", (2, 1), 1.0),
    ("nano", "forward_dynamics", (2, 1), 3.0),
    ("nano", "forward_dynamics", (2, 2), 0.5),
    ("nano", "inverse_dynamics", (2, 2), 1.0),
    ("super", "policy", (2, 2), 3.0),
    ("super", "policy", (1, 4), 1.0),
    ("super", "inverse_dynamics", (1, 4), 3.0),
    ("nano", "forward_dynamics", (1, 4), 0.5),
]


@cache
def expected(folder, **asked):
    return reference(folder, cases.question(**asked))


def compare(harness, folder, cfg, tp, dtype="float32", **asked):
    """All ranks hold one answer, and it is as near to float64 as helpers/parity.py says; so is that
    of one process. In bfloat16 the peer is one process, which engine/test_parity.py compares, and
    the sum of two parts is rounded three times where a whole product is once.
    """
    which = {"folder": folder, "decode": False, "dtype": dtype}
    alone = cases.step(asked, **which)
    ranks = harness.group(cfg * tp).run("step", asked=asked, tp=tp, cfg=cfg, **which)
    for found in ranks:
        for name in ("action", "video"):
            assert np.array_equal(found[name], ranks[0][name]), "ranks differ"
    known, most = expected(folder, **asked), 1.0
    if dtype == "bfloat16":
        known, most = known.in_bfloat16(alone), 3**0.5 if tp > 1 else 1.0
    assert known.share(alone) <= 1
    assert known.share(ranks[0]) <= most
    return ranks


def test_the_pairs_are_all_there():
    """Every two values of (variant, mode, degrees up to four ranks, guidance) meet."""
    axes = (("nano", "super"), cases.MODES, DEGREES[:4], GUIDANCE)
    for i in range(4):
        for j in range(i):
            assert {(case[i], case[j]) for case in PAIRWISE} == set(product(axes[i], axes[j]))


@pytest.mark.parametrize(("kind", "mode", "degrees", "guidance"), PAIRWISE)
def test_pairs(harness, checkpoints, kind, mode, degrees, guidance):
    compare(harness, checkpoints[kind], *degrees, mode=mode, guidance=guidance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode", "degrees", "guidance"),
    list(product(("nano", "super", "edge"), cases.MODES, DEGREES, GUIDANCE)),
)
def test_everything(harness, checkpoints, kind, mode, degrees, guidance):
    compare(harness, checkpoints[kind], *degrees, mode=mode, guidance=guidance)


@pytest.mark.parametrize("degrees", [(1, 2), (1, 4)])
def test_edge(harness, checkpoints, degrees):
    compare(harness, checkpoints["edge"], *degrees)


def test_more_ranks_than_key_heads(harness, checkpoints):
    """Two key heads on four ranks."""
    compare(harness, checkpoints["super"], 1, 4)


@pytest.mark.parametrize("degrees", [(2, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("interval", [(960.0, 1001.0), (0.0, 900.0), (2000.0, 3000.0)])
def test_guidance_on_some_steps(harness, checkpoints, degrees, interval):
    """At the first step of three, at the others, at none: one packed exchange at each step with
    guidance, no other.
    """
    guided = {960.0: 1, 0.0: 1, 2000.0: 0}[interval[0]]
    for guidance in (1.0, 3.0):
        ranks = compare(
            harness, checkpoints["nano"], *degrees, interval=interval, guidance=guidance
        )
        for found in ranks:
            assert found["messages"].get("guidance", 0) == (guided if guidance != 1 else 0)


def test_bfloat16(harness, checkpoints):
    compare(harness, checkpoints["nano"], 2, 1, dtype="bfloat16")
    compare(harness, checkpoints["nano"], 1, 2, dtype="bfloat16")


class Halves(nn.Module):
    """What two ranks make of a layer whose columns they share: products with scales of their
    own.
    """

    def __init__(self, kept, whole):
        super().__init__()
        self.halves = nn.ModuleList()
        for part in whole.weight.chunk(2, 1):
            half = type(kept)(None)
            half.a16 = kept.a16
            half.place(tuple(part.shape), part.device)
            half.copy_(part)
            self.halves.append(half)

    def forward(self, x):
        first, second = (half(part) for half, part in zip(self.halves, x.chunk(2, -1), strict=True))
        return first + second


def rounded_as_ranks_do(model, folder):
    """The layers of one process with the scales of two ranks."""
    whole = cases.engine(folder, decode=False).transformer.generation
    tower = model.transformer.generation
    replaced = 0
    for name, module in [*tower.named_modules()]:
        if name.endswith((".to_add_out", ".down_proj", ".down_proj_moe_gen")):
            owner, _, last = name.rpartition(".")
            halves = Halves(module, whole.get_submodule(name))
            setattr(tower.get_submodule(owner), last, halves)
            replaced += 1
    assert replaced == 2 * len(tower.layers)


def one_branch_at_a_time(model, _):
    """Products of the size that a rank of one branch has, so that no last bit differs."""
    velocity = model.transformer.velocity

    def each(tokens, time, noisy, rope, texts, *rest):
        parts = [
            velocity(tokens, time, noisy, [t[i : i + 1] for t in rope], (text,), *rest)
            for i, text in enumerate(texts)
        ]
        return tuple(torch.cat(branches) for branches in zip(*parts, strict=True))

    model.transformer.velocity = each


@pytest.mark.parametrize(
    ("cfg", "tp", "alike", "scheme"),
    [
        *((2, 1, one_branch_at_a_time, scheme) for scheme in QUANTIZE),
        *((1, 2, rounded_as_ranks_do, scheme) for scheme in ("int8", "int8-weights")),
    ],
)
def test_layers_in_8_bits(harness, checkpoints, cfg, tp, alike, scheme):
    """Ranks answer what a process answers that rounds the same numbers, branches to the bit. Each
    encodes the whole picture: a last bit of it moves some number of 8 bits to the next one. Parts
    of layers sum in another order, so that both err as float32 does and some numbers become their
    neighbours: no more than all of them, up or down. FP8, whose neighbours are 6 % apart, is not
    compared there.
    """
    folder = checkpoints["nano"]
    which = {"folder": folder, "decode": False, "quantize": scheme, "split": "off"}
    ranks = harness.group(2).run("step", asked={}, tp=tp, cfg=cfg, **which)
    with cases.engine.__wrapped__(**which) as model:
        alike(model, folder)
        alone = model.step(cases.question())
        steps = {} if tp == 1 else of_neighbours(model, cases.question())
    for name in ("action", "video"):
        assert np.array_equal(ranks[0][name], ranks[1][name])
        roundings = 0 if tp == 1 else 2 * expected(folder).allowed(name)
        found = rms(ranks[0][name] - alone[name].numpy())
        assert found <= steps.get(name, 0) + roundings


def test_a_bias_is_added_once(harness):
    for tp in (2, 4):
        for rank in harness.group(tp).run("biased", tp=tp):
            assert all(share(part, exact, whole) <= 1 for exact, whole, part in rank)


def test_ranks_refuse_alike_and_go_on(harness, checkpoints):
    which = {"folder": checkpoints["nano"], "tp": 2, "cfg": 2}
    first = harness.group(4).run("refused", mode_of="request", **which)
    assert first == [first[0]] * 4
    assert first[0][0] == "ShapeError"
    wrong_product = harness.group(4).run(
        "refused", mode_of="load", folder=checkpoints["nano"], tp=2
    )
    assert all("there are 4 processes" in message for _, message in wrong_product)
    compare(harness, checkpoints["nano"], 2, 2)
