"""Parity with diffusers' pipeline on checkpoints of other shapes and settings than the released
ones', and on other prompts.
"""

import json
import shutil
from itertools import product

import numpy as np
import pytest
import torch
from diffusers import Cosmos3OmniTransformer
from safetensors.torch import load_file

from helpers.cosmos3_oracle import NEGATIVE_IDS, Case, engine, oracle, pipeline
from helpers.parity import case_share, share
from recipes.random_checkpoint import FactorySizes, write_checkpoint, write_weights
from strands_cosmos3.engine import tokens
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.transformer import Mlp
from strands_cosmos3.engine.weights import expected_shapes

HEADS = {"6/2": (6, 2, 54), "5/1": (5, 1, 56), "7/7": (7, 7, 40)}  # heads, key heads, hidden
PROMPTS = {
    "empty": "",
    "unicode": "Füge den roten Würfel ein ☃ 積み木を取る 🤖",
    "long": "pick up the red cube. " * 500,
}
SHORT = (
    ("6/2", 24, "silu", "empty", 2, 2.5),
    ("5/1", 40, "relu2", "unicode", 7, 1.0),
    ("7/7", 16, "silu", "long", 4, 2.5),
)
# seven divides no period of the product: every value occurs, and every number of steps with either
# guidance
ALL = tuple(product(HEADS, (16, 24, 40), ("silu", "relu2"), PROMPTS, (2, 4, 7), (1.0, 2.5)))[::7]


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A function from a shape to its checkpoint, each written once."""
    root = tmp_path_factory.mktemp("odd")

    def folder(heads, head_dim, kind):
        path = root / f"{heads.replace('/', '-')}-{head_dim}-{kind}"
        if not path.exists():
            count, kv, hidden = HEADS[heads]
            sizes = FactorySizes(
                hidden=hidden,
                layers=2,
                heads=count,
                kv_heads=kv,
                head_dim=head_dim,
                intermediate=72,
            )
            write_checkpoint(path, hidden_act=kind, sizes=sizes, seed=head_dim)
        return path

    return folder


def check(odd, heads, head_dim, kind, prompt, steps, guidance):
    folder = odd(heads, head_dim, kind)
    tokenizer = tokens.PromptTokenizer(folder / "text_tokenizer")
    ids = tuple(tokenizer.ids(PROMPTS[prompt])[0].tolist())[:2000]
    assert (len(ids) == 2000) == (prompt == "long")
    negative = tuple(tokenizer.ids("")[0].tolist())
    case = Case(folder, steps=steps, guidance=guidance, prompt=ids, negative=negative)
    assert case_share(case) <= 1


def test_a_caption_is_tokenised_once(checkpoints, monkeypatch):
    tokenizer = tokens.PromptTokenizer(checkpoints["silu"] / "text_tokenizer")
    first = tokenizer.ids("pick up the red cube")
    kept = first.copy()
    first[:] = 0  # a caller's own
    monkeypatch.setattr(tokens, "_asked", None)
    assert np.array_equal(tokenizer.ids("pick up the red cube"), kept)


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_parity(odd, case):
    check(odd, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_parity_everywhere(odd, case):
    check(odd, *case)


def test_float64_tells_rounding_from_a_fault(odd):
    """The engine's own rounding is allowed, a wrong prompt is not."""
    case = Case(odd("6/2", 24, "silu"), steps=2, guidance=2.5)
    assert case_share(case) <= 1
    assert case_share(case, text_ids=torch.tensor(NEGATIVE_IDS)) > 100


CONFIG = "transformer/config.json"
SETTINGS = {
    "spatial positions go on": {"unified_3d_mrope_reset_spatial_ids": False},
    "no rate": {"enable_fps_modulation": False},
    "other clocks": {
        "unified_3d_mrope_temporal_modality_margin": 777,
        "base_fps": 30,
        "timestep_scale": 0.002,
    },
    "other rotation": {"rope_theta": 1e4, "rope_axes_dim": [4, 4, 8], "rms_norm_eps": 1e-3},
    "biases and named sections": {
        "attention_bias": True,
        "rope_axes_dim": None,
        "rope_scaling": {"mrope_section": [8, 6, 2]},
    },
}
WEIGHTS = (
    {},
    {"attention_bias": True},
    {"qk_norm_for_text": False},
    {"use_und_k_norm_for_gen": True},
    {"hidden_act": "relu2"},
)


def stock_weights(data):
    with torch.device("meta"):
        return Cosmos3OmniTransformer.from_config(data).state_dict()


@pytest.mark.parametrize("config", WEIGHTS, ids=str)
def test_a_config_says_which_weights_there_are(checkpoints, config):
    data = {**json.loads((checkpoints["silu"] / CONFIG).read_text()), **config}
    wanted = {key: tuple(weight.shape) for key, weight in stock_weights(data).items()}
    assert expected_shapes(TransformerConfig.from_dict(data)) == wanted


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_config(checkpoints, tmp_path, name):
    folder = tmp_path / "c"
    shutil.copytree(checkpoints["silu"], folder)
    data = {**json.loads((folder / CONFIG).read_text()), **SETTINGS[name]}
    (folder / CONFIG).write_text(json.dumps(data))
    held = {
        key: weight
        for path in folder.glob("transformer/*.safetensors")
        for key, weight in load_file(path).items()
    }
    if lacking := {
        key: torch.randn(weight.shape)
        for key, weight in stock_weights(data).items()
        if key not in held
    }:
        write_weights(folder / "transformer", held | lacking, count=2)
    assert case_share(Case(folder, steps=1)) <= 1
    other, plain = (oracle(Case(where, steps=1))[1] for where in (folder, checkpoints["silu"]))
    assert float((other - plain).abs().max()) > 1e-3, "the setting matters"


@pytest.mark.parametrize("clip", [4, 7])
def test_a_short_clip_repeats_its_last_frame(checkpoints, clip):
    assert case_share(Case(checkpoints["silu"], "inverse_dynamics", 1, 1.0, clip=clip)) <= 1


@pytest.mark.parametrize("rows", [1024, 1025, 2500])
@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_the_mlp_of_many_rows(checkpoints, kind, rows):
    """Above 1,024 rows it works in blocks; the stock one does not."""
    x = torch.randn(2, rows // 2 + rows % 2, 64, generator=torch.Generator().manual_seed(0))
    ours = engine(checkpoints[kind], torch.float32).transformer.generation.layers[1].mlp_moe_gen
    assert isinstance(ours, Mlp)
    with torch.no_grad():
        exact, peer = (
            pipeline(checkpoints[kind], dtype).transformer.layers[1].mlp_moe_gen(x.to(dtype))
            for dtype in (torch.float64, torch.float32)
        )
        assert share(ours(x), exact, peer) <= 1
