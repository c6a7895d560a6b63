"""Configs that describe another model than the engine computes are refused; released ones load."""

import inspect
import json
import shutil
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

from helpers.checkpoint_formats import framework_export, write_json
from recipes.random_checkpoint import LAYOUT, fresh_vae
from strands_cosmos3.engine import computed
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.formats.framework import FrameworkExport
from strands_cosmos3.engine.formats.layout import Layout
from strands_cosmos3.engine.sampler import SchedulerConfig
from strands_cosmos3.engine.tokens import PromptTokenizer
from strands_cosmos3.engine.wan_config import WanConfig
from strands_cosmos3.errors import LayoutError, VariantError

SCHEDULER = json.loads((LAYOUT / "scheduler/scheduler_config.json").read_text())
TABLES = tomllib.loads(Path(computed.__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TOKENIZER = "text_tokenizer/tokenizer_config.json"
FIELDS = [(file, field) for file, table in TABLES.items() for field in table if file != TOKENIZER]
# nvidia/Cosmos3-Nano's transformer/config.json, with all that nothing reads
NANO = {
    "_class_name": "Cosmos3OmniTransformer",
    "_diffusers_version": "0.37.1",
    "action_dim": 64,
    "action_gen": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "base_fps": 24,
    "dtype": "bfloat16",
    "enable_fps_modulation": True,
    "freeze_und": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "joint_attn_implementation": "two_way",
    "latent_channel": 48,
    "latent_patch_size": 2,
    "max_action_dim": 64,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_vl_text",
    "num_attention_heads": 32,
    "num_embodiment_domains": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "patch_latent_dim": 192,
    "position_embedding_type": "unified_3d_mrope",
    "qk_norm": False,
    "qk_norm_for_diffusion": True,
    "qk_norm_for_text": True,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
        "rope_type": "default",
    },
    "rope_theta": 5000000,
    "sound_dim": 64,
    "sound_gen": True,
    "sound_latent_fps": 25,
    "temporal_compression_factor_sound": 1,
    "timestep_scale": 0.001,
    "unified_3d_mrope_reset_spatial_ids": True,
    "unified_3d_mrope_temporal_modality_margin": 15000,
    "use_cache": True,
    "use_moe": True,
    "video_temporal_causal": False,
    "vocab_size": 151936,
}
EDGE = {
    **NANO,
    "backbone_type": "cosmos3_edge_nemotron_dense",
    "hidden_act": "relu2",
    "hidden_size": 2048,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "qk_norm_for_text": False,
    "rms_norm_eps": 1e-05,
    "rope_axes_dim": [24, 20, 20],
    "rope_scaling": {"mrope_section": [24, 20, 20]},
    "rope_theta": 100000000,
    "sound_dim": None,
    "sound_gen": False,
    "temporal_compression_factor": 4,
    "use_und_k_norm_for_gen": True,
    "vocab_size": 131072,
}


STOCK = {
    "transformer/config.json": (Cosmos3OmniTransformer, TransformerConfig, {*NANO, *EDGE}),
    "vae/config.json": (AutoencoderKLWan, WanConfig, set()),
    "scheduler/scheduler_config.json": (UniPCMultistepScheduler, SchedulerConfig, {*SCHEDULER}),
}
# names, what is read under another name, and options of training, sound, betas or what is refused
WITHOUT_EFFECT = {
    "transformer/config.json": """_diffusers_version action_gen attention_dropout backbone_type
        dtype freeze_und initializer_range max_position_embeddings model_type qk_norm sound_gen
        temporal_compression_factor_sound use_cache""",
    "vae/config.json": "dropout scale_factor_spatial scale_factor_temporal temperal_downsample",
    "scheduler/scheduler_config.json": """beta_end beta_schedule beta_start
        dynamic_thresholding_ratio rescale_betas_zero_snr sample_max_value steps_offset
        time_shift_type timestep_spacing trained_betas""",
}


@pytest.mark.parametrize("file", STOCK)
def test_every_option_of_a_stock_class_is_read_or_refused(file):
    """And every field of a released config; the others change nothing of what is computed."""
    stock, config, released = STOCK[file]
    read = {field.name for field in fields(config)}
    refused = {name.partition(".")[0] for name in TABLES[file]}
    others = {*inspect.signature(stock).parameters, *released} - read - refused
    assert others == set(WITHOUT_EFFECT[file].split())


def with_field(data, field, value):
    """The config with a field, which may be within another (``outer.inner``)."""
    outer, _, inner = field.rpartition(".")
    return data | ({outer: {**data.get(outer, {}), inner: value}} if outer else {inner: value})


@pytest.mark.parametrize(("file", "field"), FIELDS)
@pytest.mark.parametrize("value", ["another", 0.3, [7]], ids=str)
def test_a_field_that_says_otherwise_is_refused(checkpoints, file, field, value):
    class Edited(Layout):
        def read(self, name):
            data = super().read(name)
            return with_field(data, field, value) if name == file else data

    layout = Edited(checkpoints["silu"])
    with pytest.raises(
        LayoutError, match=rf"{file}: .*{field} is .*the engine computes"
    ) as refusal:
        Checkpoint.open(layout)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("data", [NANO, EDGE], ids=["nano", "edge"])
def test_released_transformers_are_read(data):
    config = TransformerConfig.from_dict(data)
    assert config.rope_axes_dim == (24, 20, 20)
    assert config.nemotron == (data is EDGE)


@pytest.mark.parametrize("karras", [False, True])
def test_schedulers_that_diffusers_writes_are_read(karras):
    config = dict(UniPCMultistepScheduler(**{**SCHEDULER, "use_karras_sigmas": karras}).config)
    assert SchedulerConfig.from_dict(config | {"_class_name": "UniPCMultistepScheduler"})


def test_a_vae_that_diffusers_writes_is_read():
    assert WanConfig.from_dict(fresh_vae(8, 8, 16).config | {"clip_output": False}).z_dim == 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_embedding_type", "3d_rope"),
        ("vision_temporal_position_mode", "uniae_source_right_edge"),
        ("base_fps", 16),
        ("enable_fps_modulation", False),
        ("unified_3d_mrope_temporal_modality_margin", 0),
    ],
)
def test_an_export_of_another_sequence_is_refused(checkpoints, tmp_path, field, value):
    folder = framework_export(checkpoints["silu"], tmp_path / "export", edge=False)
    config = json.loads((folder / "config.json").read_text())
    expert = {
        "base_fps": 24,
        "enable_fps_modulation": True,
        "patch_spatial": 2,
        "position_embedding_type": "unified_3d_mrope",
        "unified_3d_mrope_temporal_modality_margin": 15000,
        "vision_temporal_position_mode": "latent_index",
    }
    config["model"]["config"] |= {
        "diffusion_expert_config": expert,
        "joint_attn_implementation": "two_way",
        "natten_parameter_list": None,
        "video_temporal_causal": False,
    }
    write_json(folder / "config.json", config)
    layout = FrameworkExport(folder, base=Layout(checkpoints["silu"]))
    assert layout.config("transformer")["hidden_act"] == "silu"
    expert[field] = value
    write_json(folder / "config.json", config)
    with pytest.raises(VariantError, match=field):
        layout.config("transformer")


@pytest.mark.parametrize(
    "token", ["<|endoftext|>", "<|vision_end|>", {"content": "</s>", "__type": "AddedToken"}]
)
def test_another_end_of_a_message_is_refused(checkpoints, tmp_path, token):
    """The stock pipeline closes a prompt with the tokenizer's eos_token, the engine with
    <|im_end|>.
    """
    folder = tmp_path / "text_tokenizer"
    shutil.copytree(checkpoints["silu"] / "text_tokenizer", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", config | {"eos_token": token})
    with pytest.raises(LayoutError, match=r"tokenizer_config\.json: eos_token is"):
        PromptTokenizer(folder)


@pytest.mark.parametrize(
    "template",
    [
        "hello",
        "",
        "{% for message in messages if message.role == 'system' %}{{ message.content }}{% endfor %}",
        "{% for message in messages %}{{ message.content | upper }}{% endfor %}",
        "{% for message in messages %}{{ message.content[:9] }}{% endfor %}",
        "{% for message in messages %}{{ message.role }}{% endfor %}<|im_end|>",
    ],
)
def test_a_template_that_loses_the_caption_is_refused(checkpoints, tmp_path, template):
    """Otherwise every instruction would have the same answer."""
    folder = tmp_path / "text_tokenizer"
    shutil.copytree(checkpoints["silu"] / "text_tokenizer", folder)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(LayoutError, match="chat template"):
        PromptTokenizer(folder)


def test_a_template_may_strip_a_caption(checkpoints, tmp_path):
    folder = tmp_path / "text_tokenizer"
    shutil.copytree(checkpoints["silu"] / "text_tokenizer", folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content | trim }}{% endfor %}"
    )
    tokens = PromptTokenizer(folder)
    assert tokens.ids(" stop! \n").tolist() == tokens.ids("stop!").tolist()
