"""The reasoner's half of a small random checkpoint, for tests and benchmarks: a vision encoder with
random weights, and the files at the top of a released folder that transformers reads.

Weights are scaled by their fan-in: the default initialisation hides a swapped patch or position.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from strands_cosmos3.errors import CheckpointError
from strands_cosmos3.resources import read_json, write_json, write_text

PADS = ("<|image_pad|>", "<|video_pad|>")
"""Tokens that stand for pictures and films, which the tokenizer of such a checkpoint has."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PIXELS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "patch_size": 16}
_VISION = {
    "silu": {
        "model_type": "qwen3_vl_vision",
        "depth": 3,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 96,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
    "relu2": {
        "model_type": "cosmos3_edge_vision",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "num_patches": 16,
    },
}


def write_eyes(folder: Path, seed: int = 0, sizes: Mapping[str, Any] | None = None) -> Path:
    """Give a random checkpoint, whose tokenizer has :data:`PADS`, a vision encoder and the files of
    its reasoner.

    ``sizes`` replace those of the small encoder, under the names of its config. Nano's kind stores
    the encoder's weights under its own names, Edge's under those of the whole model.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    transformer = read_json(folder / "transformer/config.json", CheckpointError, "")
    config = _config(folder, transformer, sizes or {})
    write_json(folder / "config.json", config)
    kind = AutoConfig.from_pretrained(folder)
    with torch.device("meta"), no_init_weights():
        model = AutoModelForImageTextToText.from_config(kind)
    generator = torch.Generator().manual_seed(seed)
    edge = transformer["hidden_act"] == "relu2"
    weights = {
        name if edge else name.removeprefix("model.visual."): _weight(name, p.shape, generator)
        for name, p in sorted(model.named_parameters())
        if name.startswith(("model.visual.", "model.projector."))
    }
    (folder / "vision_encoder").mkdir()
    save_file(weights, folder / "vision_encoder/model.safetensors", metadata={"format": "pt"})
    _write_index(folder, weights, edge)
    return folder


def _config(folder: Path, transformer: dict[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of ``config.json``; the files beside it are written."""
    from transformers import AutoTokenizer

    edge = transformer["hidden_act"] == "relu2"
    vision = _VISION[transformer["hidden_act"]] | dict(sizes)
    shutil.copytree(folder / "text_tokenizer", folder, dirs_exist_ok=True)
    write_text(folder / "chat_template.jinja", CHAT_TEMPLATE)
    frames = 1 if edge else 2
    pixels = {**_PIXELS, "temporal_patch_size": frames, "merge_size": 2}
    of_pictures = {"shortest_edge": 64 * 64, "longest_edge": 512 * 512}
    write_json(folder / "preprocessor_config.json", {**pixels, "size": of_pictures})
    of_films = {"shortest_edge": 64 * 64, "longest_edge": 64 * 256 * 256}
    write_json(folder / "video_preprocessor_config.json", {**pixels, "size": of_films, "fps": 2})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": tokenizer.eos_token_id})
    return reasoner_config(transformer, vision, tokenizer.convert_tokens_to_ids)


def reasoner_config(
    transformer: Mapping[str, Any], vision: Mapping[str, Any], id_of: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the reasoner's ``config.json``: that of a text tower, from the transformer's, and of a
    vision encoder. ``id_of`` gives the id of a token.
    """
    edge = transformer["hidden_act"] == "relu2"
    ids = dict(zip(("image", "video"), map(id_of, PADS), strict=True))
    ids |= {name: id_of(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    same += ("head_dim", "intermediate_size", "vocab_size", "rms_norm_eps", "hidden_act")
    text = {name: transformer[name] for name in same} | {
        "model_type": "cosmos3_edge_text" if edge else "qwen3_vl_text",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": transformer["rope_theta"],
            "mrope_section": transformer["rope_axes_dim"],
        },
    }
    out = {} if edge else {"out_hidden_size": transformer["hidden_size"]}
    return {
        "model_type": "cosmos3_edge" if edge else "cosmos3_omni",
        "text_config": text,
        "vision_config": {**vision, **out},
        **({"projector_hidden_size": 3 * vision["hidden_size"]} if edge else {}),
        **{f"{name}_token_id": number for name, number in ids.items()},
    }


def _weight(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 1 + 0.1 * noise if "norm" in name and name.endswith("weight") else 0.2 * noise
    if "pos" in name:
        return noise
    return noise / math.prod(shape[1:]) ** 0.5


def _write_index(folder: Path, eyes: Mapping[str, torch.Tensor], edge: bool) -> None:
    """Write the list of weights that transformers reads: the text tower's and the encoder's."""
    index = folder / "transformer/diffusion_pytorch_model.safetensors.index.json"
    stored = read_json(index, CheckpointError, "")["weight_map"]
    weight_map = {
        key: f"transformer/{file}"
        for key, file in stored.items()
        if not edge or key.startswith(("layers.", "embed_tokens.", "norm.", "lm_head."))
    }
    weight_map |= dict.fromkeys(eyes, "vision_encoder/model.safetensors")
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": 0}, "weight_map": weight_map},
    )
