"""The formulas of benchmarks/NOTES.md against what was counted and what is kept."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from helpers import rank_cases as cases
from recipes.random_checkpoint import FactorySizes, write_checkpoint
from scaling_model import KINDS, Work, exchanges, step_flops, text_bytes, weight_bytes
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.parallel.config import ParallelConfig


def config_of(folder):
    return TransformerConfig.from_dict(
        json.loads((Path(folder) / "transformer/config.json").read_text())
    )


@pytest.mark.parametrize(
    ("degrees", "interval", "guidance"),
    [
        ((1, 2, 1), None, 3.0),
        ((2, 1, 1), None, 3.0),
        ((2, 2, 1), (960.0, 1001.0), 3.0),
        ((1, 4, 1), None, 1.0),
        ((1, 1, 2), None, 3.0),
        ((2, 1, 2), (960.0, 1001.0), 3.0),
        ((1, 2, 2), None, 3.0),
        ((1, 1, 4), (960.0, 1001.0), 3.0),
    ],
)
def test_exchanges_of_an_inference(harness, checkpoints, degrees, interval, guidance):
    cfg, tp, sp = degrees
    parallel, config = ParallelConfig(tp, cfg, sp), config_of(checkpoints["super"])
    # a prompt that no other test has asked: it is prefilled
    prompt = 50 + 10 * cfg + tp + 20 * (sp - 1)
    asked = {"interval": interval, "guidance": guidance, "prompt": prompt}
    which = {"folder": checkpoints["super"], "tp": tp, "cfg": cfg, "sp": sp, "decode": False}
    # the negative prompt is known
    group = harness.group(parallel.ranks)
    group.run("step", asked={**asked, "prompt": prompt + 5}, **which)
    ranks = group.run("step", asked=asked, **which)
    per_frame = cases.ROWS // 2 * ((cases.COLUMNS + 1) // 2)
    guided = 0 if guidance == 1 else 3 if interval is None else 1
    work = Work(2 * per_frame + 4, 4, per_frame, 4, 3, guided, prompt=23)
    for rank, found in enumerate(ranks):
        expected = exchanges(config, parallel, rank, work, 4)
        for name in cases.TRAFFIC:
            counted = {kind: found[name][kind] for kind in KINDS if kind in found[name]}
            assert counted == dict(getattr(expected, name)), (rank, name)


def share(name, config, tp):
    """Of a parameter that a rank should keep; written apart from the code that cuts."""
    if "norm" in name or name.startswith(
        ("proj_in", "proj_out", "time_embedder", "action_modality_embed")
    ):
        return 1
    if any(part in name for part in (".to_k.", ".to_v.", ".add_k_proj.", ".add_v_proj.")):
        return max(1 / tp, 1 / config.num_key_value_heads)
    return 1 / tp


@pytest.mark.parametrize(("kind", "tp"), list(product(("nano", "super", "edge"), (1, 2, 4))))
def test_weights_of_a_rank(harness, checkpoints, kind, tp):
    config = config_of(checkpoints[kind])
    whole = cases.weights(folder=checkpoints[kind])[0]
    ranks = (
        [(whole, 0)]
        if tp == 1
        else harness.group(tp).run("weights", folder=checkpoints[kind], tp=tp)
    )
    should = {name: size * share(name, config, tp) for name, size in whole.items()}
    assert all(mine == should for mine, _ in ranks)
    assert weight_bytes(config, tp, 4, domains=0) == sum(should.values())


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_peak_of_loading(harness, checkpoints, tmp_path_factory, tp):
    """A rank's peak is its share of what is split, all of what is not, and five per cent."""
    sizes = FactorySizes(hidden=640, layers=5, heads=8, kv_heads=2, head_dim=64, intermediate=2560)
    folder = str(write_checkpoint(tmp_path_factory.mktemp("mid") / "c", sizes=sizes))
    config = config_of(folder)
    held, kept_alone = cases.weights(folder=folder, decode=False)
    vae = kept_alone - sum(held.values())
    share_of_all = vae + sum(size * share(name, config, tp) for name, size in held.items())
    alike = vae + sum(
        size * share(name, config, tp)
        for name, size in held.items()
        if share(name, config, tp) > 1 / tp
    )
    for peak, kept in harness.group(tp).run(
        "loading_peak", small=checkpoints["nano"], folder=folder, tp=tp
    ):
        assert kept == share_of_all > 30e6, "too small to say anything"
        assert peak <= 1.05 * (sum(held.values()) / tp + alike)


def test_bytes_of_a_prompt(checkpoints):
    config = config_of(checkpoints["super"])
    engine = cases.engine(checkpoints["super"])
    text = engine.text_cache.get(tuple(range(30)))
    assert text.nbytes == text_bytes(config, ParallelConfig(), 30, 4)
    # two key heads: each rank keeps one
    for degrees in (ParallelConfig(8), ParallelConfig(sp_size=8), ParallelConfig(2, sp_size=4)):
        assert text_bytes(config, degrees, 30, 4) == text.nbytes // 2


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("nano", (1, 1, 1)),
        ("edge", (1, 1, 1)),
        ("super", (1, 4, 1)),
        ("nano", (2, 1, 1)),
        ("super", (1, 1, 4)),
        ("nano", (1, 2, 2)),
    ],
)
def test_arithmetic_of_a_step(harness, checkpoints, kind, degrees):
    """Against torch's own count."""
    cfg, tp, sp = degrees
    parallel, config = ParallelConfig(tp, cfg, sp), config_of(checkpoints[kind])
    per_frame = cases.ROWS // 2 * ((cases.COLUMNS + 1) // 2)
    work = Work(2 * per_frame + 4, 4, per_frame, 4, 1, 1)
    which = {"folder": checkpoints[kind], "tp": tp, "cfg": cfg, "sp": sp, "decode": False}
    ranks = parallel.ranks
    counted = [cases.flops(**which)] if ranks == 1 else harness.group(ranks).run("flops", **which)
    assert counted == [step_flops(config, parallel, work, prompt=23)] * ranks


def test_released_sizes():
    """Nano and Super have the parameters that their cards say."""
    nano = TransformerConfig(4096, 36, 32, 8, 128, 12288, 151936, 64)
    # 15.17 less lm_head .62, and what is unread
    assert weight_bytes(nano, 1, 2, 32) / 2e9 == pytest.approx(14.4, abs=0.25)
    assert np.isclose(weight_bytes(nano, 8, 2), weight_bytes(nano, 1, 2) / 8, rtol=0.1)
