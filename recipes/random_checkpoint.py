"""Small checkpoints with random weights in the released layout, for tests and benchmarks. diffusers
loads them unchanged.

Weights are scaled by their fan-in, and norms of queries and keys are 1.5: default initialisation
gives uniform attention, which hides a swapped position or a wrong mask.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file

from recipes.random_ears import SOUND, write_ears
from recipes.random_eyes import PADS, write_eyes
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.metadata import write_metadata
from strands_cosmos3.engine.weight_files import weight_digests
from strands_cosmos3.engine.weights import expected_shapes
from strands_cosmos3.resources import write_json

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan  # pyright: ignore[reportPrivateImportUsage]

LABEL = "random weights, for tests and benchmarks: the outputs of this checkpoint mean nothing"
STEM = "diffusion_pytorch_model"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_CORPUS = (
    "pick up the red cube. place the green block on the blue one. robot pushes the object forward "
    "to the right.",
    "This video contains concatenated views from multiple camera perspectives. The top row is from "
    "the wrist-mounted camera. The bottom row contains two horizontally concatenated third-person "
    "perspective views of the scene from opposite sides, with the robot visible. The video is 2.0 "
    "seconds long and is of 15 FPS. This video is of 544x736 resolution.",
    '{"cinematography": {"framing": ""}, "actions": [{"time": "0:00-0:02", "description": ""}], '
    '"duration": "2s", '
    '"fps": 15.0, "resolution": {"H": 544, "W": 736}, "aspect_ratio": "4,3"}',
)
LAYOUT = Path(__file__).with_name("released_layout")
"""Files that every checkpoint has alike."""


@dataclass(frozen=True)
class FactorySizes:
    """Sizes of a small checkpoint, with the base widths of its VAE and the number of its files."""

    hidden: int = 64
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 160
    latent_channels: int = 16
    vae_base: int = 8
    vae_decoder_base: int = 8
    shards: int = 2
    action_dim: int = 64
    latent_patch: int = 2  # side of a vision token, in latents
    rope_theta: float | None = None  # None: the released checkpoints'


MID_SIZE = FactorySizes(1024, 8, 16, 8, 64, 3072, 48, 24, 32, 1)
"""The model of the benchmarks: Nano's proportions at a quarter of its width, with a VAE of the
same share of the work.
"""


def write_checkpoint(
    folder: str | Path,
    *,
    hidden_act: Literal["silu", "relu2"] = "silu",
    action_space: Literal["midtrain", "joint_pos"] = "midtrain",
    sizes: FactorySizes | None = None,
    seed: int = 0,
    digests: bool = False,
    eyes: bool = False,
    ears: bool = False,
) -> Path:
    """Write a small random checkpoint; its metadata says that its outputs mean nothing.

    ``relu2`` is Edge's kind, ``silu`` that of the others. Without ``sizes`` it is the smallest that
    tests everything. ``digests`` records the SHA-256 of every weight file. ``eyes`` adds a vision
    encoder, so that it answers questions (:mod:`recipes.random_eyes`), ``ears`` what predicts sound
    (:mod:`recipes.random_ears`).
    """
    folder = Path(folder)
    sizes = sizes or FactorySizes()
    vocab = write_tokenizer(folder / "text_tokenizer", special=(*_SPECIAL, *PADS * eyes))
    data = transformer_config(sizes, hidden_act, vocab) | (SOUND if ears else {})
    generator = torch.Generator().manual_seed(seed)
    config = TransformerConfig.from_dict(data)
    weights = {
        key: _weight(key, shape, generator)
        for key, shape in sorted(expected_shapes(config).items())
    }
    write_parts(folder, data, weights, _random_vae(sizes, seed), sizes.shards)
    fields = {"variant": f"small-{hidden_act}", "action_space": action_space, "label": LABEL}
    if eyes:
        write_eyes(folder, seed)
    if ears:
        write_ears(folder, seed)
    write_metadata(folder, {**fields, "sha256": weight_digests(folder) if digests else None})
    return folder


def write_parts(
    folder: Path,
    config: Mapping[str, Any],
    weights: dict[str, torch.Tensor],
    vae: AutoencoderKLWan,
    shards: int = 1,
    label: str = LABEL,
) -> None:
    """Write transformer, VAE, scheduler and index of a checkpoint in the released layout."""
    shutil.copytree(LAYOUT, folder, dirs_exist_ok=True)
    write_json(folder / "transformer/config.json", dict(config))
    write_weights(folder / "transformer", weights, shards, label)
    vae.save_pretrained(folder / "vae")


def transformer_config(sizes: FactorySizes, hidden_act: str, vocab: int) -> dict[str, Any]:
    """``transformer/config.json`` of a small checkpoint."""
    edge = hidden_act == "relu2"
    spatial = round(sizes.head_dim * 10 / 64)
    return {
        "_class_name": "Cosmos3OmniTransformer",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate,
        "vocab_size": vocab,
        "hidden_act": hidden_act,
        "qk_norm_for_text": not edge,
        "use_und_k_norm_for_gen": edge,
        "rms_norm_eps": 1e-5 if edge else 1e-6,
        "rope_theta": sizes.rope_theta or (1e8 if edge else 5e6),
        "rope_axes_dim": [sizes.head_dim // 2 - 2 * spatial, spatial, spatial],
        "latent_channel": sizes.latent_channels,
        "latent_patch_size": sizes.latent_patch,
        "patch_latent_dim": sizes.latent_patch**2 * sizes.latent_channels,
        "action_dim": sizes.action_dim,
        "action_gen": True,
        "num_embodiment_domains": 32,
        "timestep_scale": 0.001,
        "base_fps": 24,
    }


def _weight(key: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in key:
        return (1.5 if key.endswith(("_q.weight", "_k.weight", "for_gen.weight")) else 1.0) * (
            1 + 0.1 * noise
        )
    if key.startswith("embed_tokens"):
        return noise
    if key.endswith("bias") or len(shape) == 1 or "bias.weight" in key:
        return 0.2 * noise
    if key.startswith("action_proj_in.fc"):
        return noise * 0.3  # about ten of 64 channels are used
    if key.startswith("action_proj_out.fc"):
        return noise / (shape[1] // 64) ** 0.5
    return noise / shape[1] ** 0.5


def write_weights(
    folder: Path, weights: dict[str, torch.Tensor], count: int = 1, label: str = LABEL
) -> None:
    """Write weights in the released layout: one file, or ``count`` files and their index."""
    keys = sorted(weights)
    weight_map = {}
    for i in range(count):
        part = f"-{i + 1:05d}-of-{count:05d}" if count > 1 else ""
        name = f"{STEM}{part}.safetensors"
        mine = {key: weights[key] for key in keys[i::count]}
        weight_map |= dict.fromkeys(mine, name)
        save_file(mine, folder / name, metadata={"format": "pt", "label": label})
    if count == 1:
        return
    size = sum(w.numel() * w.element_size() for w in weights.values())
    write_json(
        folder / f"{STEM}.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": weight_map},
    )


def fresh_vae(base: int, decoder_base: int, channels: int, patch: int = 2) -> AutoencoderKLWan:
    """A Wan VAE of the released kind (residual, 4 x 16 x 16 compression), initialised from torch's
    global generator.

    ``patch`` is the width of the patches of pixels that it begins with: 2 as in the released ones,
    or 4, with a level fewer.
    """
    from diffusers import AutoencoderKLWan  # pyright: ignore[reportPrivateImportUsage]

    multiples, in_time = {2: ([1, 2, 4, 4], [False, True, True]), 4: ([1, 2, 2], [True, True])}[
        patch
    ]
    return AutoencoderKLWan(
        base_dim=base,
        decoder_base_dim=decoder_base,
        z_dim=channels,
        dim_mult=multiples,
        temperal_downsample=in_time,
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
        is_residual=True,
        in_channels=3 * patch**2,
        out_channels=3 * patch**2,
        patch_size=patch,
        scale_factor_temporal=4,
        scale_factor_spatial=16,
    )


def _random_vae(sizes: FactorySizes, seed: int) -> AutoencoderKLWan:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = fresh_vae(sizes.vae_base, sizes.vae_decoder_base, sizes.latent_channels)
        sample = torch.rand(1, 3, 5, 96, 96) * 2 - 1
    with torch.no_grad():
        raw = vae.encode(sample).latent_dist.mode()  # pyright: ignore[reportAttributeAccessIssue]
    vae.register_to_config(**latent_scale(raw))
    return vae


def latent_scale(latents: torch.Tensor) -> dict[str, list[float]]:
    """Mean and deviation of each channel of latents [B, C, F, H, W], as a VAE's config has them."""
    mean = latents.mean((0, 2, 3, 4))
    std = latents.std((0, 2, 3, 4))
    return {"latents_mean": mean.tolist(), "latents_std": std.tolist()}


def write_tokenizer(
    folder: Path,
    corpus: Sequence[str] = _CORPUS,
    phrases: Sequence[str] = (),
    special: Sequence[str] = _SPECIAL,
) -> int:
    """Train a small byte-level BPE tokenizer with the released chat template; return the size of
    its vocabulary.

    Each of ``phrases`` becomes one token, which keeps captions short.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(special),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens(list(phrases))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special[1:]),
        chat_template=_CHAT_TEMPLATE,
    )
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    return len(fast)
