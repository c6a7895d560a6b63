"""The reasoner is transformers' own model with the folder's weights, and shares an engine's."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from reasoner.conftest import KINDS, QUESTION
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.formats.convert import convert
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.engine.sequence import text_positions
from strands_cosmos3.engine.transformer import rope_tables, rotate
from strands_cosmos3.engine.weight_files import WeightFiles
from strands_cosmos3.errors import ConfigError, LayoutError, PreflightError, WeightsError
from strands_cosmos3.reasoner import loading
from strands_cosmos3.reasoner.options import AskOptions
from strands_cosmos3.reasoner.reasoner import Reasoner


@pytest.fixture(scope="module")
def theirs(seeing):
    """Kind -> what transformers' own ``from_pretrained`` makes of the same folder."""
    return {
        kind: AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        for kind, folder in seeing.items()
    }


@pytest.fixture
def copy(seeing, tmp_path):
    """Nano's kind, to be damaged."""
    return shutil.copytree(seeing["silu"], tmp_path / "copy")


def edited(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers_load(kind, reasoners, theirs, cases):
    """Text alone, one picture, three, a film, and all of it; and the picture matters."""
    answers = {}
    for name, (images, videos) in cases.items():
        inputs = reasoners[kind].prompts.inputs(QUESTION, images, videos)
        with torch.no_grad():
            expected = theirs[kind](**inputs).logits
            answers[name] = reasoners[kind].model(**inputs).logits
        assert expected.std() > 0.5
        torch.testing.assert_close(answers[name], expected, rtol=0, atol=1e-5)
    last = [logits[0, -1] for logits in answers.values()]
    assert all((a - b).abs().max() > 0.1 for a in last for b in last if a is not b)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_and_buffer_is_theirs(kind, reasoners, theirs):
    ours = reasoners[kind].model
    for of in ("state_dict", "named_buffers"):
        mine, expected = dict(getattr(ours, of)()), dict(getattr(theirs[kind], of)())
        assert mine.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(mine[name], tensor), name
    assert not any(p.requires_grad for p in ours.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_our_text_tower_s_keys_and_values_equal_theirs(kind, seeing, theirs):
    """Edge's engine normalises the keys once more, for the generation tower alone."""
    engine = Cosmos3Engine.from_pretrained(seeing[kind])
    ids = torch.arange(30, 70)
    config = engine.config
    cpu = torch.device("cpu")
    rope = rope_tables(text_positions(len(ids)), config, cpu, torch.float32)
    with torch.no_grad():
        mine = engine.transformer.text(ids, rope)
        cache = theirs[kind](input_ids=ids[None], use_cache=True).past_key_values
    for i, (keys, values) in enumerate(mine.layers):
        expected = cache.layers[i].keys[0]
        if kind == "relu2":
            norm = engine.transformer.text.layers[i].self_attn.k_norm_und_for_gen
            unrotated = rotate(expected.transpose(0, 1), (rope[0], -rope[1]))
            expected = rotate(norm(unrotated), rope).transpose(0, 1)
        torch.testing.assert_close(keys, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(values, cache.layers[i].values[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_s_text_tower_is_shared(kind, seeing, reasoners, pictures):
    engine = Cosmos3Engine.from_pretrained(seeing[kind])
    beside = Reasoner.beside(engine)
    held = {p.data_ptr(): name for name, p in engine.transformer.text.named_parameters()}
    used = {p.data_ptr(): name for name, p in beside.model.named_parameters()}
    own = {held[pointer] for pointer in held.keys() - used.keys()}
    # of the engine's text tower only the norm for the generation tower has no use here
    assert all("k_norm_und_for_gen" in name for name in own)
    rest = sum(p.nbytes for p in beside.model.parameters() if p.data_ptr() not in held)
    assert rest < sum(p.nbytes for p in beside.model.parameters()) * 0.9
    short = AskOptions(max_tokens=8)
    expected = reasoners[kind].ask(QUESTION, pictures[:1], options=short)
    assert beside.ask(QUESTION, pictures[:1], options=short) == expected


def test_an_engine_in_bfloat16_is_shared_in_bfloat16(seeing):
    engine = Cosmos3Engine.from_pretrained(seeing["silu"], dtype=torch.bfloat16)
    assert {p.dtype for p in Reasoner.beside(engine).model.parameters()} == {torch.bfloat16}


def test_a_text_tower_in_8_bits_is_not_shared(seeing):
    options = EngineOptions(quantize="int8", quantize_text=True)
    engine = Cosmos3Engine.from_pretrained(seeing["silu"], options=options)
    with pytest.raises(ConfigError, match="quantize_text"):
        Reasoner.beside(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_checkpoint_sees_as_before(kind, seeing, reasoners, pictures, tmp_path):
    out = convert(Checkpoint.open(seeing[kind]), tmp_path / "out", shard_bytes=1 << 17)
    assert len(list((out / "vision_encoder").glob("*.safetensors"))) > 1, "several files"
    assert not (out / "model.safetensors.index.json").exists(), "it names files of the original"
    converted = Reasoner.from_pretrained(out)
    short = AskOptions(max_tokens=8)
    expected = reasoners[kind].ask(QUESTION, pictures[:1], options=short)
    assert converted.ask(QUESTION, pictures[:1], options=short) == expected


def test_held_weights_that_are_a_slice_are_refused(seeing):
    """As on one of several ranks."""
    checkpoint = Checkpoint.open(seeing["silu"])
    held = {"layers.0.self_attn.to_q.weight": torch.zeros(64, 64)}
    with pytest.raises(WeightsError, match=r"q_proj.*\[64, 64\].*\[128, 64\]"):
        loading.load_model(checkpoint, torch.device("cpu"), torch.float32, held)


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        ("vision_encoder", "the vision encoder (vision_encoder/)"),
        ("config.json", "a config.json whose model_type is cosmos3_omni or cosmos3_edge"),
        ("preprocessor_config.json", "preprocessor_config.json"),
    ],
)
def test_what_is_missing_is_named(copy, absent, named):
    path = copy / absent
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(LayoutError) as error:
        Reasoner.from_pretrained(copy)
    assert f"lacks {named}. " in str(error.value)


def without_head(folder):
    index = folder / "transformer/diffusion_pytorch_model.safetensors.index.json"
    listed = json.loads(index.read_text())
    file = folder / "transformer" / listed["weight_map"].pop("lm_head.weight")
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file)
    index.write_text(json.dumps(listed))
    return folder


def test_a_folder_without_a_head_says_so(copy):
    with pytest.raises(LayoutError, match=r"lacks the head that writes words \(lm_head.weight in"):
        Reasoner.from_pretrained(without_head(copy))


def test_a_tied_head_is_the_embedding(copy):
    edited(copy / "config.json", tie_word_embeddings=True)
    model = Reasoner.from_pretrained(without_head(copy)).model
    embedding = model.get_input_embeddings().weight
    assert model.lm_head.weight.data_ptr() == embedding.data_ptr()
    assert embedding.device.type == "cpu"


def test_weights_that_do_not_fit_the_config_are_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    edited(copy / "config.json", text_config=config["text_config"] | {"intermediate_size": 128})
    with pytest.raises(WeightsError, match=r"(?s)do not fit its config.json.*size mismatch"):
        Reasoner.from_pretrained(copy)


def test_eyes_that_the_config_does_not_know_are_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    edited(copy / "config.json", vision_config=config["vision_config"] | {"depth": 2})
    with pytest.raises(
        WeightsError, match=r"(?s)do not fit its config.json.*Unexpected key.*blocks.2"
    ):
        Reasoner.from_pretrained(copy)


def test_a_config_of_nonsense_is_refused(copy):
    edited(copy / "config.json", text_config={"hidden_size": "wide"})
    with pytest.raises(LayoutError, match="describes no model"):
        Reasoner.from_pretrained(copy)


def test_weights_that_are_not_finite_are_refused(copy):
    file = copy / "vision_encoder/model.safetensors"
    weights = load_file(file)
    weights["merger.linear_fc2.weight"][0, 0] = torch.nan
    save_file(weights, file)
    with pytest.raises(WeightsError, match=r"merger.linear_fc2.weight holds NaN"):
        Reasoner.from_pretrained(copy)


def test_eyes_that_lead_out_of_the_folder_are_not_opened(copy, tmp_path):
    file = copy / "vision_encoder/model.safetensors"
    outside = shutil.move(file, tmp_path / "elsewhere.safetensors")
    os.symlink(outside, file)
    with pytest.raises(LayoutError, match="outside the checkpoint"):
        Reasoner.from_pretrained(copy)


def test_too_little_memory_is_said_before_anything_is_read(seeing, monkeypatch):
    monkeypatch.setattr(loading, "available_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(WeightFiles, "parts", None)
    with pytest.raises(PreflightError, match=r"has 0.00 GiB left, 0.\d\d GiB are needed"):
        Reasoner.from_pretrained(seeing["silu"])
