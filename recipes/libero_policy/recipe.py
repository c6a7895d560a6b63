"""``python -m recipes.libero_policy``: make a small policy for LIBERO from
nothing, or go on with it.

It records demonstrations of the scripted expert on libero_object, trains the bundled policy's VAE
on their pictures and all other weights of it on their rows, and evaluates the result on official
initial states. What the bundled policy has learned of our table is of no use there, but its weights
are a cheaper start than random ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan  # pyright: ignore[reportPrivateImportUsage]
from numpy.typing import NDArray
from safetensors.torch import load_file

from recipes.pipeline import Recipe, evaluated, history
from recipes.random_checkpoint import latent_scale, write_parts, write_tokenizer
from recipes.table_policy.release import SAMPLING
from recipes.vae_training import VaeLoss, convolve_flat, load_vae, plain_vae, reconstruction_loss
from strands_cosmos3.datasets import ACTION, Dataset
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.metadata import write_metadata
from strands_cosmos3.engine.weights import HEAD_KEYS, expected_shapes
from strands_cosmos3.observe.prompts import compose_prompt
from strands_cosmos3.observe.views import canvas_hw, to_canvas
from strands_cosmos3.resources import write_folder
from strands_cosmos3.training.loop import Loop, LossMetrics, TrainLoopConfig
from strands_cosmos3.training.windows import to_pixels

_DOMAIN = "libero"
_TIER = 128  # on which each view is 80 x 80 pixels; NVIDIA's is 256
_VAE_BATCH = 8
_REPLAN_ROWS = 8
_EVALUATIONS = ("evaluation", "controls", "swap", "task")


def _start(folder: Path, options: Mapping[str, Any]) -> None:
    with Dataset(folder / "demos") as dataset:
        sentences = sorted({episode.task for episode in dataset})
        pictures = pictures_of(dataset)
    vae = train_vae(folder / "vae", pictures, options["vae_steps"])
    write_start(folder / "start", sentences, vae)


def pictures_of(dataset: Dataset) -> NDArray[np.uint8]:
    """Return every picture [n, H, W, 3] of demonstrations as the model sees it, both views side
    by side, without padding.
    """
    every = dataset.spec.features[ACTION].info["pictures_every"]
    found = []
    for episode in dataset:
        views = [episode.frames(key, range(0, len(episode), every)) for key in dataset.spec.cameras]
        both = np.concatenate(views, axis=2)
        canvas = to_canvas(both, canvas_hw(both.shape[1], both.shape[2], _TIER))
        height, width = canvas.content_hw
        found.append(((canvas.frames[:, :height, :width].clip(-1, 1) + 1) * 127.5).astype(np.uint8))
    return np.concatenate(found)


def train_vae(folder: Path, pictures: NDArray[np.uint8], steps: int) -> AutoencoderKLWan:
    """Train the bundled policy's VAE on these pictures, and measure its latents' mean and
    deviation.
    """
    vae: Any = load_vae(Checkpoint.open(embedded_checkpoint()))
    convolve_flat(vae)

    def loss(step: int) -> tuple[torch.Tensor, LossMetrics]:
        chosen = np.random.default_rng([0, step]).integers(len(pictures), size=_VAE_BATCH)
        noise = torch.Generator().manual_seed(step)
        return reconstruction_loss(vae, to_pixels(pictures[chosen]), noise, VaeLoss())

    how = TrainLoopConfig(steps, 1e-3, min(50, steps), weight_decay=0.0, ema=0.99)
    loop = Loop(vae, loss, how, folder)
    loop.run(
        on_step=lambda step, seen: (
            print(f"vae {step}/{steps} {seen}", flush=True) if step % 50 == 0 else None
        )
    )
    loop.adopt_average()
    vae.eval().requires_grad_(False)
    some = pictures[:: max(1, len(pictures) // 64)]
    latents = torch.cat(
        [vae.encode(to_pixels(part)).latent_dist.mode() for part in np.array_split(some, len(some))]
    )
    return plain_vae(vae, changes={**latent_scale(latents), "latent_frames": ()})


def write_start(folder: Path, sentences: Sequence[str], vae: AutoencoderKLWan) -> Path:
    """Write the checkpoint that training starts from: the bundled policy with the ``libero`` domain
    and its contract.

    It has no state row, answers actions alone, and has a tokenizer for these sentences, so that a
    caption is about twenty tokens. Its action head is that of the bundled policy's domain;
    embeddings of tokens are new.
    """
    source = Checkpoint.open(embedded_checkpoint())
    caption = compose_prompt(
        "x",
        prompt_format="plain",
        view="concat",
        num_frames=17,
        fps=20.0,
        canvas_hw=canvas_hw(256, 512, _TIER),
    )
    phrases = (caption.removeprefix("x."), "user\n", "assistant\n")
    label = (
        "a small policy of this project for LIBERO's libero_object; its card says how well it does"
    )
    ours = {
        "variant": source.variant.name,
        "action_space": "midtrain",
        "prompt_format": "plain",
        "resolution_tier": _TIER,
        "domain": _DOMAIN,
        "normalization": "quantile_rot",
        "statistics": _DOMAIN,
        "sampling": SAMPLING,
        "policy_frames": [1],
        "replan_rows": _REPLAN_ROWS,
        "label": label,
    }

    def fill(unfinished: Path) -> None:
        vocabulary = write_tokenizer(unfinished / "text_tokenizer", sentences, phrases)
        config = {**source.layout.config("transformer"), "vocab_size": vocabulary}
        weights = _start_weights(source, TransformerConfig.from_dict(config))
        write_parts(unfinished, config, weights, vae, label=label)
        write_metadata(unfinished, ours)

    write_folder(folder, fill)
    return folder


def _start_weights(source: Checkpoint, config: TransformerConfig) -> dict[str, torch.Tensor]:
    """Return the source's weights with new embeddings, and its domain's heads as LIBERO's."""
    (file,) = source.weights.files
    weights = load_file(file)
    generator = torch.Generator().manual_seed(0)
    for key, shape in expected_shapes(config).items():
        if weights[key].shape != shape:  # of other tokens
            weights[key] = torch.randn(shape, generator=generator).to(weights[key].dtype)
    old, new = (get_embodiment(name).domain_id for name in (source.metadata["domain"], _DOMAIN))
    for key in HEAD_KEYS.values():
        weights[key][new] = weights[key][old]
    return weights


def card(folder: Path) -> str:
    """Return the model card: every figure from the records and reports of the steps."""
    template = Template(Path(__file__).with_name("card.md").read_text(encoding="utf-8"))
    return template.substitute(
        evaluations="\n\n".join(evaluated(folder, name) for name in _EVALUATIONS),
        history=history(folder, ("demos", "start", "policy")),
    )


RECIPE = Recipe(
    "libero policy",
    Path(__file__).with_name("recipe.toml"),
    "run/checkpoint",
    card,
    works={"start": _start},
)
