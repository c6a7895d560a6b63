"""Whether a folder has eyes and ears, from its configs and headers."""

import json

import pytest
import torch
from safetensors.torch import save_file

from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.formats.inspect import inspect, lines_of
from strands_cosmos3.engine.senses import reasoner_bytes
from strands_cosmos3.reasoner.reasoner import Reasoner


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("senses") / "c", eyes=True)


def test_a_policy_has_neither(checkpoints):
    report = inspect(checkpoints["silu"])
    assert report["senses"]["eyes"][0] == "the vision encoder (vision_encoder/)"
    assert [what.split(" (")[0] for what in report["senses"]["ears"]] == [
        "the sound tokenizer",
        "the sound heads",
    ]
    lines = lines_of(report)
    assert any(line.startswith("eyes       no: it lacks the vision encoder") for line in lines)
    assert not any("ask alone" in line for line in lines)


def test_eyes_are_reported_and_counted(seeing):
    report = inspect(seeing)
    assert report["verdict"] == "ready"
    assert report["senses"]["eyes"] == []
    assert "eyes       yes" in lines_of(report)
    model = Reasoner.from_pretrained(seeing).model
    eyes = sum(p.numel() for p in model.model.visual.parameters())
    assert report["parts"]["vision encoder"]["numbers"] == eyes
    kept = sum(p.nbytes for p in model.parameters())
    assert reasoner_bytes(Checkpoint.open(seeing), torch.float32) == kept
    assert "bfloat16 for ask alone" in report["memory_gib"]


def test_ears_are_reported(tmp_path):
    folder = write_checkpoint(tmp_path / "c")
    (folder / "sound_tokenizer").mkdir()
    save_file(
        {"decoder.conv1.bias": torch.zeros(8)},
        folder / "sound_tokenizer/diffusion_pytorch_model.safetensors",
    )
    report = inspect(folder)
    assert report["parts"]["sound tokenizer"]["numbers"] == 8
    assert report["senses"]["ears"] == [
        "the sound heads (audio_proj_in and others in transformer/)"
    ]


def test_a_damaged_encoder_is_told_and_the_policy_still_loads(seeing, tmp_path):
    file = seeing / "vision_encoder/model.safetensors"
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:100])
        report = inspect(seeing)
        assert report["verdict"] == "LayoutError"
        assert "vision_encoder/model.safetensors" in report["problem"]
        assert Checkpoint.open(seeing).config.hidden_size == 64
    finally:
        file.write_bytes(whole)


def test_another_model_s_config_is_no_reasoner_s(seeing, tmp_path):
    config = seeing / "config.json"
    stated = config.read_text()
    try:
        config.write_text(json.dumps({"model_type": "qwen3_vl"}))
        assert "cosmos3_omni or cosmos3_edge" in inspect(seeing)["senses"]["eyes"][0]
    finally:
        config.write_text(stated)
