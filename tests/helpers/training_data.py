"""What the tests of training share by import."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from recipes.table_policy.record import LabelCollector, LabelConfig, LabelledRecord
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.transformer import ActionHead, Cosmos3Transformer
from strands_cosmos3.engine.vae import PreviewDecoder
from strands_cosmos3.resources import write_json
from strands_cosmos3.training.flow import TrainedPolicy

CANVAS = (128, 160)
DEMOS = LabelConfig(ticks=26, perturbed=0.15, wandering=0.0, label_every=2, prefix_rows=8)
EPISODES = (18, 22)  # of seed 3: calm for a chunk, and in both a cube is grasped
PREVIEW_WIDTHS = (64, 64, 32)


@cache
def recorded_episodes() -> list[LabelledRecord]:
    """Two episodes of demonstrations."""
    with LabelCollector(DEMOS) as collector:
        records = [collector.record(3, episode) for episode in EPISODES]
    return [record for record in records if isinstance(record, LabelledRecord)]


def latents_like(n: int, frames: int = 1, seed: int = 0) -> torch.Tensor:
    """[n, 16, frames, 8, 9] noise in the shape of latents."""
    return torch.from_numpy(
        np.random.default_rng(seed).normal(size=(n, 16, frames, 8, 9)).astype(np.float32)
    )


def random_policy(config: TransformerConfig, seed: int = 0) -> TrainedPolicy:
    """A policy with random weights: matrices scaled by their fan-in, norms around one."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    A, D = config.action_dim, config.hidden_size
    head = ActionHead(noise(A, D), torch.zeros(D), noise(D, A), torch.zeros(A))
    policy = TrainedPolicy(Cosmos3Transformer(config), head)
    with torch.no_grad():
        for name, weight in policy.transformer.named_parameters():
            random = noise(*weight.shape)
            weight.copy_(1 + 0.2 * random * len(random) ** 0.5 if "norm" in name else random)
    return policy


def random_preview(latent_channels: int) -> PreviewDecoder:
    """An untrained preview decoder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PreviewDecoder(latent_channels, PREVIEW_WIDTHS)


def write_preview(folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Give a checkpoint with 16 latent channels an untrained preview decoder."""
    home = folder / "preview_decoder"
    home.mkdir()
    write_json(home / "config.json", {"widths": list(PREVIEW_WIDTHS)})
    weights = {
        name: p.detach().to(dtype).contiguous() for name, p in random_preview(16).named_parameters()
    }
    save_file(weights, home / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
