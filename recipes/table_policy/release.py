"""Create or load the modules that training starts from, and export them as a checkpoint in the
released layout.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan  # pyright: ignore[reportPrivateImportUsage]

from recipes.random_checkpoint import write_parts
from recipes.table_policy.preview import save_preview
from recipes.vae_training import plain_vae
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.metadata import StateRow, read_metadata, write_metadata
from strands_cosmos3.engine.transformer import ActionHead, Cosmos3Transformer
from strands_cosmos3.engine.vae import PreviewDecoder
from strands_cosmos3.engine.weight_files import weight_digests
from strands_cosmos3.engine.weights import expected_shapes, kept_dtype
from strands_cosmos3.errors import CheckpointError
from strands_cosmos3.language import Language
from strands_cosmos3.resources import write_folder
from strands_cosmos3.training.adapters import released_key, replace_weights
from strands_cosmos3.training.dynamics import DOMAIN
from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.windows import ROWS
from strands_cosmos3.types import Mode

REPLAN_ROWS = ROWS // 2
"""Replanning after half a chunk raises the success rate of picking from 3 in 4 to nearly all
(figures in the model card).
"""
SAMPLING = {"num_steps": 3, "guidance_scale": 1.0, "flow_shift": 5.0}
"""Of the small policies. Actions need few steps, and each costs a fifth of the engine's part of
a chunk.
"""
DYNAMICS_STEPS = 1
"""A single step answers the mean of what may happen, which is closer to what does than any of
the futures drawn with more.
"""


def fresh_policy(config: TransformerConfig, seed: int = 0) -> TrainedPolicy:
    """An untrained policy: matrices scaled by fan-in, small residual branches, outputs of zero."""
    generator = torch.Generator().manual_seed(seed)
    transformer = Cosmos3Transformer(config)
    A, D = config.action_dim, config.hidden_size
    head = ActionHead(
        torch.randn(A, D, generator=generator) * 0.3,
        torch.zeros(D),
        torch.zeros(D, A),
        torch.zeros(A),
    )
    policy = TrainedPolicy(transformer, head)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if "norm" in name:
                continue
            if parameter.ndim == 1:
                parameter.zero_()
            elif name.endswith("embed_tokens.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            else:
                scale = parameter.shape[1] ** -0.5
                if name.endswith(("to_out.weight", "to_add_out.weight", "down_proj.weight")):
                    scale /= (2 * config.num_hidden_layers) ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        transformer.action_modality_embed.copy_(torch.randn(D, generator=generator) * 0.3)
        transformer.proj_out.weight.zero_()
    return policy


def released_weights(
    policy: Mapping[str, torch.Tensor], config: TransformerConfig, domain: int
) -> dict[str, torch.Tensor]:
    """Every tensor of the released layout; those that inference does not use are zeros, norms ones.

    Raises CheckpointError if the layout has no place for one of the policy's.
    """
    shapes = expected_shapes(config)
    weights = {
        key: torch.ones(shape) if "norm" in key else torch.zeros(shape)
        for key, shape in shapes.items()
    }
    if unknown := sorted({released_key(name) for name in policy} - weights.keys()):
        raise CheckpointError(
            f"trained tensors {unknown} have no place in the released layout of this configuration."
        )
    return replace_weights(weights, policy, domain)


def export(
    folder: Path,
    config: Mapping[str, Any],
    policy: Mapping[str, torch.Tensor],
    vae: AutoencoderKLWan,
    tokenizer: Path,
    state: StateRow,
    tier: int,
    *,
    frames: Sequence[int],
    label: str,
    dtype: torch.dtype = torch.float16,
    steps: int | None = None,
    dynamics_from_frame: bool = False,
    prefix_rows: int = 0,
    language: Language | None = None,
    preview: PreviewDecoder | None = None,
    novelty: float | None = None,
) -> Path:
    """Write a checkpoint in the released layout, atomically.

    Args:
        config: ``transformer/config.json``. policy: Parameters of a :class:`TrainedPolicy`.
        frames: Pixel frames of a policy's clip in training, the default first; 1 predicts actions
            alone. With more, forward dynamics predict the video of an answer.
        dynamics_from_frame: Whether both dynamics start at the given frame.
        prefix_rows: Longest action prefix that training showed it. language: Sentences of its
            training.
        preview: Decoder of films, if there is one. novelty: Its 99.9 % quantile on validation
            pictures.
    """
    ours: dict[str, Any] = {
        "variant": "small-silu",
        "action_space": "midtrain",
        "prompt_format": "plain",
        "resolution_tier": tier,
        "domain": DOMAIN,
        "state": state.to_metadata(),
        "sampling": SAMPLING,
        "policy_frames": list(frames),
        "replan_rows": REPLAN_ROWS,
        "dynamics_prompt": "empty",
        "dynamics_steps": DYNAMICS_STEPS,
        "label": label,
        "steps": steps,
        "future_mode": Mode.FORWARD_DYNAMICS if max(frames) > 1 else None,
        "prefix_rows": prefix_rows or None,
        "dynamics_start": "frame" if dynamics_from_frame else None,
        "novelty_rmse": novelty,
        "language": None if language is None else language.to_metadata(),
    }
    typed = TransformerConfig.from_dict(config)
    weights = {
        key: tensor.to(kept_dtype(key, dtype)).contiguous()
        for key, tensor in released_weights(policy, typed, get_embodiment(DOMAIN).domain_id).items()
    }

    def fill(unfinished: Path) -> None:
        write_parts(unfinished, config, weights, plain_vae(vae, dtype), label=label)
        if preview is not None:
            save_preview(preview, unfinished, dtype)
        shutil.copytree(tokenizer, unfinished / "text_tokenizer")
        write_metadata(unfinished, {**ours, "sha256": weight_digests(unfinished)})

    write_folder(folder, fill)
    return folder


def with_vae(checkpoint: Checkpoint, vae: AutoencoderKLWan, folder: Path) -> Path:
    """Write a copy of a checkpoint with other weights of its VAE, atomically."""

    def fill(unfinished: Path) -> None:
        shutil.copytree(
            checkpoint.root, unfinished, dirs_exist_ok=True, ignore=shutil.ignore_patterns("vae")
        )
        plain_vae(vae, torch.float16).save_pretrained(unfinished / "vae")
        write_metadata(unfinished, {"sha256": weight_digests(unfinished)})

    write_folder(folder, fill)
    return folder


def released_steps(folder: Path) -> int | None:
    """Training steps that a checkpoint records, or None."""
    return read_metadata(folder).get("steps")
