"""Sound on several ranks: each way to divide an engine answers what diffusers' parts answer."""

from functools import cache

import numpy as np
import pytest
import torch

from helpers import rank_cases as cases
from helpers.parity import reference
from recipes.random_checkpoint import FactorySizes, write_checkpoint

MOST = 5e-5


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    """Kind -> folder with ears, of sizes that two ranks can split."""
    root = tmp_path_factory.mktemp("hearing")
    sizes = FactorySizes(64, 2, heads=8, kv_heads=2, head_dim=16, intermediate=160)
    return {
        kind: str(write_checkpoint(root / kind, hidden_act=act, sizes=sizes, ears=True))
        for kind, act in (("nano", "silu"), ("edge", "relu2"))
    }


@cache
def expected(folder, **asked):
    return reference(folder, cases.question(**asked))


@pytest.mark.parametrize("kind", ["nano", "edge"])
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"cfg": 2}, {"sp": 2}], ids=str)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_ranks_predict_sound(harness, hearing, kind, degrees, guidance):
    """Every rank holds the latents, and rank 0 alone the waveform."""
    asked = {"guidance": guidance, "sound": True}
    which = {"folder": hearing[kind], "decode": False, "sound": True}
    ranks = harness.group(2).run("step", asked=asked, **degrees, **which)
    known = expected(hearing[kind], **asked)
    assert known.share(ranks[0]) <= 1
    for name, exact in known.exact.items():
        assert np.array_equal(ranks[0][name], ranks[1][name]), "ranks differ"
        found = torch.from_numpy(ranks[0][name]).reshape(exact.shape)
        assert float((found - exact).abs().max()) <= MOST
    alone = cases.step(asked, **which)
    assert np.abs(ranks[0]["waveform"] - alone["waveform"]).max() <= MOST
    assert "waveform" not in ranks[1]


def test_a_stream_that_ranks_cannot_divide_evenly(harness, hearing):
    """Five frames are 9 latents of sound, of which the ranks have 5 and 4."""
    asked, which = {"sound": True}, {"folder": hearing["nano"], "decode": False, "sound": True}
    (found, _) = harness.group(2).run("step", asked=asked, sp=2, **which)
    assert found["sound"].shape == (1, 6, 9)
