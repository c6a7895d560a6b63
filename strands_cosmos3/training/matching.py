"""Flow matching on vision tokens and action rows: what is made noisy, by how much, and what the error counts.

At noise level sigma a clean number x0 becomes ``(1 - sigma) x0 + sigma eps`` and the model is to answer ``eps - x0``: the
engine's sampler takes ``x - sigma v`` for clean data. One window has one noise level for all that is noisy in it, because the
sampler takes video and actions through the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.sequence import SequenceLayout, patchify
from strands_cosmos3.training.flow import TrainedPolicy, read_prompts, rope_of, velocity
from strands_cosmos3.training.loop import LossMetrics
from strands_cosmos3.training.windows import FORWARD, INVERSE, Batch, layout_of

TRAIN_TIMESTEPS = 1000


@dataclass(frozen=True)
class FlowConfig:
    """How noise is drawn and errors are weighed.

    Args:
        shift: Of the noise level: ``shift u / (1 + (shift - 1) u)`` of a uniform u.
        pure_noise_fraction: Share of windows at pure noise, where sampling starts.
        video: Weight of the video's error beside the actions'.
    """

    shift: float = 5.0
    pure_noise_fraction: float = 0.5
    video: float = 0.2


@dataclass(frozen=True, eq=False)
class Noised:
    """Windows with noise in them.

    Args:
        vision, action: [B, V, P] and [B, T, A] as the model sees them.
        vision_target, action_target: Velocities that it should answer.
        noisy: [B, V + T, 1] which tokens are noisy. sigma: [B].
        real: [V, P] 1 where a vision token's number is a latent and not an odd edge's padding.
        layout: The sequence.
    """

    vision: torch.Tensor
    action: torch.Tensor
    vision_target: torch.Tensor
    action_target: torch.Tensor
    noisy: torch.Tensor
    sigma: torch.Tensor
    real: torch.Tensor
    layout: SequenceLayout


def sample_sigma(count: int, how: FlowConfig, noise: torch.Generator) -> torch.Tensor:
    """[count] shares of noise, in (0, 1]."""
    u = torch.rand(count, generator=noise)
    sigma = how.shift * u / (1 + (how.shift - 1) * u)
    return torch.where(torch.rand(count, generator=noise) < how.pure_noise_fraction, torch.ones(count), sigma.clamp(min=1e-3))


def discretize_timestep(sigma: torch.Tensor) -> torch.Tensor:
    """The whole timestep that a model is told at a noise level, as the samplers' schedules do (999 at the most)."""
    return (sigma * TRAIN_TIMESTEPS).floor().clamp(max=TRAIN_TIMESTEPS - 1)


def add_noise(batch: Batch, config: TransformerConfig, how: FlowConfig, noise: torch.Generator) -> Noised:
    """Corrupt what each window's mode leaves to be found.

    A policy's window is given frame 0 and the state row, forward dynamics the chunk too, inverse dynamics all frames.
    """
    B, _, frames, H, W = batch.latents.shape
    head = 0 if batch.state is None else 1
    layout = layout_of((H, W), frames, (0,), head, batch.rows.shape[1], batch.rows.shape[2], batch.fps)
    V, per_frame = layout.vision_tokens, layout.vision_tokens // frames
    noisy = torch.ones(B, layout.tokens, 1)
    noisy[:, :per_frame] = 0
    noisy[:, V : V + head] = 0
    if batch.mode is not None:
        noisy[batch.mode == FORWARD, V:] = 0
        noisy[batch.mode == INVERSE, :V] = 0
    sigma = sample_sigma(B, how, noise)
    clean = torch.stack([patchify(latent, config.latent_patch_size) for latent in batch.latents]), _rows(batch, config)
    real = patchify(torch.ones(config.latent_channel, *layout.latent_shape), layout.patch)
    free_rows = torch.arange(config.action_dim) < layout.raw_action_dim
    eps = torch.randn(clean[0].shape, generator=noise) * real, torch.randn(clean[1].shape, generator=noise) * free_rows
    share = noisy * sigma[:, None, None]
    vision = clean[0] + share[:, :V] * (eps[0] - clean[0])
    action = clean[1] + share[:, V:] * (eps[1] - clean[1])
    return Noised(vision, action, eps[0] - clean[0], eps[1] - clean[1], noisy, sigma, real, layout)


def _rows(batch: Batch, config: TransformerConfig) -> torch.Tensor:
    """[B, T, A] the clean action sequence: the state row, if any, then the chunk, zeros above their widths."""
    parts = [batch.rows] if batch.state is None else [batch.state[:, None], batch.rows]
    widened = [torch.nn.functional.pad(part, (0, config.action_dim - part.shape[-1])) for part in parts]
    return torch.cat(widened, dim=1)


@dataclass(frozen=True)
class DataShard:
    """Which of a step's windows a process computes: every ``ranks``-th from ``rank`` on."""

    rank: int = 0
    ranks: int = 1


ALONE = DataShard()


def flow_loss(
    policy: TrainedPolicy, batch: Batch, how: FlowConfig, noise: torch.Generator, share: DataShard = ALONE
) -> tuple[torch.Tensor, LossMetrics]:
    """Squared error of the velocities of everything that is noisy, averaged over each modality's noisy tokens.

    Every process draws the whole step's noise and computes its share of the windows; what it returns is weighed so that the
    average over processes is the loss that one process would have.

    Returns:
        The weighted sum, and its parts as numbers: ``action`` and, where there is a video, ``video``.
    """
    config, device = policy.transformer.config, policy.w_in.device
    noised = add_noise(batch, config, how, noise)
    layout, V = noised.layout, noised.layout.vision_tokens
    totals = noised.noisy[:, :V].sum(), noised.noisy[:, V:].sum()
    mine = slice(share.rank, None, share.ranks)
    vision, action, v_vision, v_action, noisy, sigma, prompt = (
        whole[mine].to(device)
        for whole in (
            *(noised.vision, noised.action, noised.vision_target, noised.action_target),
            *(noised.noisy, noised.sigma, batch.prompt),
        )
    )
    memory = read_prompts(policy.transformer, batch.prompts).of(prompt)
    rope = rope_of(layout, config, memory.lengths, vision)
    frames = layout.latent_shape[0]
    first = V // frames if frames > 1 else V
    of_vision, of_action = velocity(policy, vision, action, discretize_timestep(sigma), noisy, rope, memory, first)
    width = layout.raw_action_dim
    rows = _sum_square(of_action[..., :width] - v_action[..., :width], noisy[:, V:])
    loss = share.ranks * rows / totals[1].clamp(min=1).to(device)
    parts = {"action": loss.item()}
    if frames > 1:
        off = (of_vision - v_vision[:, first:]) * noised.real[first:].to(device)
        video = share.ranks * _sum_square(off, noisy[:, first:V]) / totals[0].clamp(min=1).to(device)
        parts["video"], loss = video.item(), loss + how.video * video
    return loss, {"loss": loss.item(), **parts}


def _sum_square(off_BND: torch.Tensor, counts_BN1: torch.Tensor) -> torch.Tensor:
    return (off_BND.square().mean(-1, keepdim=True) * counts_BN1).sum()
