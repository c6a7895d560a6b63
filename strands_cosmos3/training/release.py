"""From trained modules to a checkpoint in the released layout, and the fresh ones that training starts from.

What the engine never reads but the layout holds (``lm_head``, the text tower's last MLP, other domains' heads) is written as
zeros, norms as ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan  # pyright: ignore[reportPrivateImportUsage]

from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.factory import (
    MODEL_INDEX,
    SCHEDULER,
    FactorySizes,
    transformer_config,
    write_tokenizer,
    write_weights,
)
from strands_cosmos3.engine.state import StateRow
from strands_cosmos3.engine.tokens import PromptTokenizer
from strands_cosmos3.engine.transformer import ActionHead, Cosmos3Transformer
from strands_cosmos3.engine.weight_files import sha256
from strands_cosmos3.engine.weights import checkpoint_key, expected_shapes
from strands_cosmos3.instruction import COLOURS
from strands_cosmos3.observe.prompts import DROID_LAYOUT, VIEW_SENTENCES, compose_prompt
from strands_cosmos3.resources import write_folder, write_json
from strands_cosmos3.training.bundled.phrases import GOALS, TRAINED
from strands_cosmos3.training.bundled.windows import Captions
from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.windows import FPS, ROWS

DOMAIN = "droid_lerobot"
REPLAN_ROWS = ROWS // 2
"""What is near is known best: executing half a chunk lifts picking from three in four to nearly all (the card has figures)."""
SAMPLING = {"num_steps": 4, "guidance_scale": 1.0, "flow_shift": 5.0}


def policy_sizes(hidden: int = 128, layers: int = 4, latent_channels: int = 48) -> FactorySizes:
    """Sizes of a small policy: heads of 32, half as many for keys."""
    heads = hidden // 32
    return FactorySizes(hidden, layers, heads, max(heads // 2, 1), 32, 3 * hidden, latent_channels, shards=1)


def caption(instruction: str, canvas_hw: tuple[int, int]) -> str:
    """The caption that the small checkpoints are asked with: the plain format, DROID's layout."""
    return compose_prompt(
        instruction,
        prompt_format="plain",
        view="concat",
        num_frames=ROWS + 1,
        fps=FPS,
        canvas_hw=canvas_hw,
        droid_layout=True,
    )


def fresh_tokenizer(folder: Path, canvas_hw: tuple[int, int]) -> int:
    """A tokenizer that knows the trained sentences' words, each fixed sentence of the caption being one token.

    Returns:
        The vocabulary's size.
    """
    sentences = [template.format(colour) for verb in TRAINED for template in TRAINED[verb] for colour in COLOURS]
    rest = caption("x", canvas_hw).removeprefix("x.")
    fixed = [f" {VIEW_SENTENCES['concat']}", *(f" {s}" for s in DROID_LAYOUT.replace(". ", ".|").split("|"))]
    length, size = rest.removeprefix("".join(fixed)).split(" This video is of ")
    phrases = [*fixed, length, f" This video is of {size}", "user\n", "assistant\n"]
    return write_tokenizer(folder, sentences, phrases)


def read_captions(tokenizer: Path, canvas_hw: tuple[int, int]) -> Captions:
    """Token ids of every trained sentence and of the empty caption."""
    tokens = PromptTokenizer(tokenizer)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokens.ids(text)[0].tolist())

    by_goal = tuple(
        tuple(ids(caption(template.format(colour), canvas_hw)) for template in TRAINED[verb]) for verb, colour in GOALS
    )
    return Captions(by_goal, ids(""))


def fresh_policy(config: TransformerConfig, seed: int = 0) -> TrainedPolicy:
    """An untrained policy: fan-in scaled matrices, small outputs into the residual stream, heads that answer zero."""
    generator = torch.Generator().manual_seed(seed)
    transformer = Cosmos3Transformer(config)
    A, D = config.action_dim, config.hidden_size
    head = ActionHead(torch.randn(A, D, generator=generator) * 0.3, torch.zeros(D), torch.zeros(D, A), torch.zeros(A))
    policy = TrainedPolicy(transformer, head)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if "norm" in name:
                continue
            if parameter.ndim == 1:
                parameter.zero_()
            elif name.endswith("embed.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            else:
                scale = parameter.shape[1] ** -0.5
                if name.endswith(("out.weight", "down.weight")) and name != "proj_out.weight":
                    scale /= (2 * config.num_hidden_layers) ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        transformer.action_modality_embed.copy_(torch.randn(D, generator=generator) * 0.3)
        transformer.proj_out.weight.zero_()
    return policy


def load_policy(checkpoint: Checkpoint, domain: int) -> TrainedPolicy:
    """A released checkpoint's transformer and one domain's head, in float32, ready to be trained."""
    transformer = checkpoint.load_transformer(torch.device("cpu"), torch.float32)
    A, D = checkpoint.config.action_dim, checkpoint.config.hidden_size
    shapes = {"in.fc": (A, D), "in.bias": (D,), "out.fc": (D, A), "out.bias": (A,)}
    made = {name: torch.empty(shape) for name, shape in shapes.items()}
    checkpoint.weights.read_into({f"action_proj_{name}.weight#{domain}": tensor for name, tensor in made.items()})
    return TrainedPolicy(transformer, ActionHead(*made.values()))


def load_vae(checkpoint: Checkpoint) -> AutoencoderKLWan:
    """A released checkpoint's VAE in float32, ready to be trained."""
    return AutoencoderKLWan.from_pretrained(checkpoint.root / "vae", torch_dtype=torch.float32)


def released_weights(policy: Mapping[str, torch.Tensor], config: TransformerConfig, domain: int) -> dict[str, torch.Tensor]:
    """Every tensor of the released layout from a :class:`TrainedPolicy`'s state."""
    weights = {
        key: torch.ones(shape) if "norm" in key else torch.zeros(shape) for key, shape in expected_shapes(config).items()
    }
    for name, tensor in policy.items():
        if name.startswith("transformer."):
            weights[checkpoint_key(name.removeprefix("transformer."))] = tensor.detach().float()
    for ours, theirs in (("w_in", "in.fc"), ("b_in", "in.bias"), ("w_out", "out.fc"), ("b_out", "out.bias")):
        weights[f"action_proj_{theirs}.weight"][domain] = policy[ours].detach().float().reshape(-1)
    return weights


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
    sampling: Mapping[str, Any] | None = None,
    steps: int | None = None,
) -> Path:
    """Write a checkpoint in the released layout, whole or not at all.

    Args:
        folder: Where; made if need be.
        config: ``transformer/config.json``.
        policy: State of a :class:`TrainedPolicy`; averaged weights, not the last ones.
        vae: With ``latents_mean`` and ``latents_std`` in its config.
        tokenizer: Folder that is copied.
        state: Its state row. tier: Its resolution tier.
        frames: Pixel frames of a policy's clip that it was trained with, its own first; 1 answers actions alone.
        label: What a user reads about it.
        dtype: Type of the weights on disk.
        sampling: Its default sampling.
        steps: Steps of the stage that it comes from, if it comes from one.
    """
    ours: dict[str, Any] = {
        "variant": "small-silu",
        "action_space": "midtrain",
        "prompt_format": "plain",
        "resolution_tier": tier,
        "domain": DOMAIN,
        "state": state.to_metadata(),
        "sampling": dict(sampling or SAMPLING),
        "policy_frames": list(frames),
        "replan_rows": REPLAN_ROWS,
        "label": label,
        **({} if steps is None else {"steps": steps}),
    }
    write_folder(folder, lambda hidden: _fill(hidden, config, policy, vae, tokenizer, dtype, ours))
    return folder


def released_steps(folder: Path) -> int | None:
    """Steps of its stage that a checkpoint was exported after; None where there is none, or it does not say."""
    path = folder / "checkpoint.json"
    return json.loads(path.read_text(encoding="utf-8"))["strands_cosmos3"].get("steps") if path.exists() else None


def _fill(
    folder: Path,
    config: Mapping[str, Any],
    policy: Mapping[str, torch.Tensor],
    vae: AutoencoderKLWan,
    tokenizer: Path,
    dtype: torch.dtype,
    ours: Mapping[str, Any],
) -> None:
    typed = TransformerConfig.from_dict(config)
    write_json(folder / "transformer/config.json", dict(config))
    weights = released_weights(policy, typed, get_embodiment(DOMAIN).domain_id)
    kept = {key: w if key.startswith("time_embedder") else w.to(dtype) for key, w in weights.items()}
    write_weights(folder / "transformer", {k: w.contiguous() for k, w in kept.items()}, label=ours["label"])
    _save_vae(vae, folder / "vae", dtype)
    (folder / "text_tokenizer").mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        (folder / "text_tokenizer" / file.name).write_bytes(file.read_bytes())
    write_json(folder / "scheduler/scheduler_config.json", SCHEDULER)
    write_json(folder / "model_index.json", MODEL_INDEX)
    files = sorted(folder.glob("*/*.safetensors"))
    digests = {str(file.relative_to(folder)): sha256(file) for file in files}
    write_json(folder / "checkpoint.json", {"strands_cosmos3": {**ours, "sha256": digests}})


def _save_vae(vae: AutoencoderKLWan, folder: Path, dtype: torch.dtype) -> None:
    """The VAE without the two-dimensional wrappers, whose weights have other names, and without the place it was read from."""
    plain: Any = AutoencoderKLWan.from_config({key: value for key, value in vae.config.items() if key != "_name_or_path"})
    plain.load_state_dict({name: tensor.cpu() for name, tensor in plain_state(vae).items()})
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(dtype)
    plain.save_pretrained(folder)


def plain_state(vae: AutoencoderKLWan) -> dict[str, torch.Tensor]:
    """A VAE's weights under diffusers' own names, whether or not first frames are computed flat."""
    names = set(AutoencoderKLWan.from_config(vae.config).state_dict())  # pyright: ignore[reportAttributeAccessIssue]
    state = {}
    for name, tensor in vae.state_dict().items():
        bare = name if name in names else name.replace(".conv.weight", ".weight").replace(".conv.bias", ".bias")
        state[bare] = tensor.detach().float()
    return state


def with_statistics(vae: AutoencoderKLWan, mean: Sequence[float], std: Sequence[float]) -> AutoencoderKLWan:
    """Record how latents are normalised."""
    vae.register_to_config(latents_mean=[float(x) for x in mean], latents_std=[float(x) for x in std])
    return vae


def new_config(sizes: FactorySizes, vocabulary: int) -> dict[str, Any]:
    """``transformer/config.json`` of a new small policy."""
    return json.loads(json.dumps(transformer_config(sizes, "silu", vocabulary)))
