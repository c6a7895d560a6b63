"""Ranks that share a sequence answer what one process answers, whatever is asked of them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from helpers import rank_cases as cases
from helpers.parity import of_neighbours, rms
from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3.parallel.payload import encode_requests
from strands_cosmos3.parallel.shared_sequence import repeats

DEGREES = ((1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2))
"""(cfg, tp, sp)"""
TOLERANCE = 5e-5


def rows(count):
    return torch.rand(count, 10, generator=torch.Generator().manual_seed(count))


def odd(mode, given, chunk=5):
    """A request with ``given`` rows before its chunk; its 15 vision tokens and its rows divide by
    neither 2 nor 4.
    """
    return replace(
        cases.question(mode=mode, frames=9),
        video_shape=(3, 2, 9),
        action_chunk=chunk,
        action_prefix=rows(given) if given else None,
        cond_action=rows(chunk) if mode == "forward_dynamics" else None,
    )


def batches(state_rows):
    """Batches by what is special about them; every mode meets what its tokens could break."""
    policy, forward, inverse = (odd(mode, state_rows) for mode in cases.MODES)
    words = {"text_ids": torch.arange(50, 61), "domain_id": 4}
    prefix = {"action_prefix": rows(3 + state_rows), "return_video": False}
    history = {"action_prefix": rows(2 + state_rows), "history_rows": 2}
    found = {
        "policy": [policy],
        "actions only": [replace(policy, return_video=False)],
        "one row": [odd("policy", state_rows, chunk=1)],
        "prefix": [replace(policy, **prefix)],
        "forward dynamics": [forward],
        "history": [replace(forward, **history, guidance_scale=1.0)],
        "inverse dynamics": [inverse],
        "guided at first": [replace(inverse, guidance_interval=(960.0, 1001.0))],
        "batch": [replace(policy, **words), replace(inverse, seed=6), replace(forward, **words)],
    }
    return found if state_rows else {**found, "even": [cases.question()]}


@pytest.fixture(scope="module")
def kinds(checkpoints, tmp_path_factory):
    """Kind -> folder and rows of the state. Of ``joints`` only ranks' answers are compared."""
    joints = tmp_path_factory.mktemp("joints") / "c"
    write_checkpoint(joints, hidden_act="relu2", action_space="joint_pos")
    return {**{kind: (folder, 0) for kind, folder in checkpoints.items()}, "joints": (joints, 1)}


@cache
def alone(folder, state_rows):
    return cases.answers(encoded(state_rows), folder=folder, decode=False)


def encoded(state_rows):
    return [encode_requests(batch) for batch in batches(state_rows).values()]


def names(state_rows):
    """Of each request."""
    return [name for name, batch in batches(state_rows).items() for _ in batch]


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("kind", ["nano", "edge", "super", "joints"])
def test_every_request_is_answered_as_by_one_process(harness, kinds, kind, degrees):
    """Also where key heads are fewer than ranks (super, edge, joints)."""
    folder, state_rows = kinds[kind]
    cfg, tp, sp = degrees
    which = {"folder": folder, "decode": False, "cfg": cfg, "tp": tp, "sp": sp}
    ranks = harness.group(cfg * tp * sp).run("answers", batches=encoded(state_rows), **which)
    expected = alone(folder, state_rows)
    off = {}
    for i, name in enumerate(names(state_rows)):
        for result in ("action", "video"):
            if result in expected[i]:
                assert all(np.array_equal(found[i][result], ranks[0][i][result]) for found in ranks)
                off[name] = np.abs(ranks[0][i][result] - expected[i][result]).max()
    print(max(off.values()))
    assert {name: error for name, error in off.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize("scheme", ["int8", "int8-weights"])
def test_layers_in_8_bits(harness, checkpoints, scheme):
    """Scales are a token's own: only last bits of attention may round numbers to their neighbours.
    Each rank encodes the whole picture.
    """
    which = {"folder": checkpoints["nano"], "decode": False, "quantize": scheme, "split": "off"}
    batch = [encode_requests([odd("policy", 0)])]
    ranks = harness.group(2).run("answers", batches=batch, sp=2, **which)
    model = cases.engine(**which)
    (expected,) = cases.answers(batch, **which)
    most = of_neighbours(model, odd("policy", 0))
    for name in ("action", "video"):
        assert np.array_equal(ranks[0][0][name], ranks[1][0][name])
        assert rms(ranks[0][0][name] - expected[name]) <= most[name] + TOLERANCE


def test_pictures_are_split_over_all_ranks(harness, checkpoints):
    which = {"folder": checkpoints["nano"], "asked": {"columns": 9}}
    alone = cases.step(**which)
    for tp, sp in ((1, 2), (2, 2)):
        ranks = harness.group(tp * sp).run("step", tp=tp, sp=sp, **which)
        assert [set(found) & {"pixels"} for found in ranks[1:]] == [set()] * (tp * sp - 1)
        assert np.abs(ranks[0]["pixels"] - alone["pixels"]).max() <= TOLERANCE
        assert all(found["messages"]["halo"] for found in ranks)


@pytest.mark.parametrize(
    ("key_heads", "ranks", "times"), [(8, 2, 1), (8, 8, 1), (8, 16, 2), (1, 4, 4), (3, 2, 2)]
)
def test_how_often_a_key_head_is_repeated(key_heads, ranks, times):
    assert repeats(key_heads, ranks) == times
