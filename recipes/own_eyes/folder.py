"""The bundled checkpoint with eyes, as a folder in the released layout that transformers reads.

The tensors that the policy reads keep their bits. Its text tower gets rows for new words, behind
the others. What the released layout has of the text tower's last layer beyond its keys and values,
and the head, the policy never reads: they are zeros in the bundled checkpoint, and trained here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from recipes.own_eyes.questions import MERGES, WORDS
from recipes.random_eyes import CHAT_TEMPLATE, PADS, reasoner_config
from strands_cosmos3.engine.weight_files import weight_digests
from strands_cosmos3.errors import CheckpointError
from strands_cosmos3.resources import load_json, read_json, write_folder, write_json, write_text

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
ASKED = ", and four questions about it"
"""Ends the label of a checkpoint with eyes."""
POLICY_WORDS = 479
"""Rows of the text tower that are the policy's."""
HW = (128, 160)
"""Height and width of the policy's canvas, in which the eyes see."""
VISION = {
    "model_type": "qwen3_vl_vision",
    "depth": 4,
    "hidden_size": 192,
    "num_heads": 6,
    "intermediate_size": 320,
    "hidden_act": "relu",
    "num_position_embeddings": 100,
    "deepstack_visual_indexes": [],
}
_WEIGHTS = "diffusion_pytorch_model.safetensors"
_PATCHES = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    # pixels: the policy's composite of 540 x 640, at a quarter of it, becomes the canvas
    "size": {"shortest_edge": HW[0] * HW[1], "longest_edge": 540 * 640 // 16},
}


def read_by_policy(key: str, layers: int) -> bool:
    """Whether the policy reads a tensor of ``transformer/``, by its released name."""
    last = f"layers.{layers - 1}."
    unread = ("self_attn.to_q", "self_attn.norm_q", "self_attn.to_out", "mlp.", "post_attention_")
    of_text = "moe_gen" not in key and "add" not in key
    return key not in (HEAD, "norm.weight") and not (
        of_text and key.startswith(tuple(last + name for name in unread))
    )


def write_sight(
    bundled: Path,
    folder: Path,
    vision: Mapping[str, torch.Tensor],
    text: Mapping[str, torch.Tensor],
    label: str,
) -> Path:
    """Write a checkpoint with eyes, atomically.

    Args:
        bundled: The folder of the policy.
        vision: Weights of the encoder, by their released names.
        text: Weights of ``transformer/`` that the policy does not read, and the rows of new words
            as :data:`EMBEDDING`.
        label: What the weights' file says of them.

    Raises CheckpointError if the policy reads one of ``text``, or it does not fit.
    """
    write_folder(folder, lambda unfinished: _write(bundled, unfinished, vision, text, label))
    return folder


def _write(
    bundled: Path,
    folder: Path,
    vision: Mapping[str, torch.Tensor],
    text: Mapping[str, torch.Tensor],
    label: str,
) -> None:
    shutil.copytree(bundled, folder, dirs_exist_ok=True)
    config = read_json(folder / "transformer/config.json", CheckpointError, "")
    stored = load_file(folder / "transformer" / _WEIGHTS)
    known = POLICY_WORDS
    if len(stored[EMBEDDING]) < known:
        raise CheckpointError(f"{EMBEDDING} has fewer than the {known} rows of the policy.")
    stored[EMBEDDING] = stored[EMBEDDING][:known]  # behind them are those of earlier eyes
    for key, tensor in text.items():
        if key not in stored or (
            key != EMBEDDING and read_by_policy(key, config["num_hidden_layers"])
        ):
            raise CheckpointError(f"{key} is the policy's; the eyes leave it as it is.")
        half = tensor.detach().to("cpu", torch.float16).contiguous()
        stored[key] = torch.cat([stored[key], half]) if key == EMBEDDING else half
    vocabulary = write_words(folder)
    if {len(stored[EMBEDDING]), len(stored[HEAD])} != {vocabulary}:
        raise CheckpointError(
            f"the tokenizer has {vocabulary} words, {EMBEDDING} {len(stored[EMBEDDING])} and "
            f"{HEAD} {len(stored[HEAD])} rows; {known} are the policy's."
        )
    metadata = {"format": "pt", "label": label}
    save_file(stored, folder / "transformer" / _WEIGHTS, metadata=metadata)
    write_json(folder / "transformer/config.json", {**config, "vocab_size": vocabulary})
    (folder / "vision_encoder").mkdir(exist_ok=True)
    halves = {k: v.detach().to("cpu", torch.float16).contiguous() for k, v in vision.items()}
    save_file(halves, folder / "vision_encoder/model.safetensors", metadata=metadata)
    write_reasoner(folder, VISION)
    weight_map = dict.fromkeys(stored, f"transformer/{_WEIGHTS}")
    weight_map |= dict.fromkeys(halves, "vision_encoder/model.safetensors")
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
    facts = load_json(folder / "checkpoint.json")
    stated = facts["strands_cosmos3"]
    stated["label"] = stated["label"].removesuffix(ASKED) + ASKED
    stated["sha256"] = weight_digests(folder)
    write_json(folder / "checkpoint.json", facts)


def write_words(folder: Path) -> int:
    """Write the reasoner's tokenizer at the top of a folder: that of ``text_tokenizer/``, which
    stays as it is, with new words behind its own. Return the size of its vocabulary.
    """
    shutil.copytree(folder / "text_tokenizer", folder, dirs_exist_ok=True)
    write_text(folder / "chat_template.jinja", CHAT_TEMPLATE)
    path = folder / "tokenizer.json"
    stated = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = stated["model"]["vocab"]
    # an added token that is no word of the model would get the first id behind the model's
    vocabulary |= {token["content"]: token["id"] for token in stated["added_tokens"]}
    for merge in MERGES:
        a, b = merge.split()
        stated["model"]["merges"].append([a, b])
        vocabulary[a + b] = len(vocabulary)
    tokenizer = Tokenizer.from_str(json.dumps(stated))
    tokenizer.add_special_tokens([AddedToken(pad, special=True) for pad in PADS])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    tokenizer.save(str(path))
    return tokenizer.get_vocab_size()


def write_reasoner(folder: Path, vision: Mapping[str, Any]) -> None:
    """Write the configs at the top of a folder whose tokenizer is there."""
    transformer = read_json(folder / "transformer/config.json", CheckpointError, "")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", reasoner_config(transformer, vision, tokenizer.token_to_id))
    write_json(folder / "preprocessor_config.json", _PATCHES)
    size = {name: 2 * pixels for name, pixels in _PATCHES["size"].items()}
    films = {**_PATCHES, "size": size, "fps": 2, "min_frames": 2, "max_frames": 2}
    write_json(folder / "video_preprocessor_config.json", films)
    write_json(folder / "generation_config.json", {"eos_token_id": 2})
