"""Flow matching on vision tokens and action rows.

At noise level sigma, clean data x0 becomes ``(1 - sigma) x0 + sigma eps`` and the model predicts
the velocity ``eps - x0``; the engine's sampler reads ``x - sigma v`` as clean data. Video and
actions share one noise level, as in the sampler. Shape suffixes as in :mod:`.flow`; D any width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn import functional as F

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.sequence import SequenceLayout, patchify
from strands_cosmos3.training.flow import TrainedPolicy, read_prompts, velocity
from strands_cosmos3.training.loop import LossMetrics
from strands_cosmos3.training.windows import FORWARD, INVERSE, POLICY, Batch

TRAIN_TIMESTEPS = 1000


@dataclass(frozen=True)
class FlowConfig:
    """Noise levels and weights of the loss."""

    shift: float = 5.0  # sigma = shift u / (1 + (shift - 1) u) of a uniform u
    pure_noise_fraction: float = 0.5  # of windows at pure noise, where sampling starts
    # windows of dynamics are at sigma 1, with frame 0 and rows of zeros instead of noise
    dynamics_from_frame: bool = False
    video: float = 0.2  # weight of the error of a policy's video; the actions' is 1
    forward: float = 0.2  # weight of that of forward dynamics' video
    # [C, C] applied to the video's errors, see pixel_metric
    channels: torch.Tensor | None = field(default=None, compare=False)
    # weight of the error of where inverse dynamics end, the sum of their rows' translations
    end_points: float = 0.0


@dataclass(frozen=True, eq=False)
class Noised:
    """Windows with added noise, and the velocities to predict."""

    vision: torch.Tensor  # [B, V, P]
    action: torch.Tensor  # [B, T, A]
    vision_target: torch.Tensor
    action_target: torch.Tensor
    noisy: torch.Tensor  # [B, N, 1], 1 where a token is noisy
    sigma: torch.Tensor  # [B]
    real: torch.Tensor  # [V, P], 0 where a number of a vision token is padding
    layout: SequenceLayout


def sample_sigma(count: int, how: FlowConfig, noise: torch.Generator) -> torch.Tensor:
    """[count] noise levels in (0, 1]."""
    u = torch.rand(count, generator=noise)
    sigma = how.shift * u / (1 + (how.shift - 1) * u)
    return torch.where(
        torch.rand(count, generator=noise) < how.pure_noise_fraction,
        torch.ones(count),
        sigma.clamp(min=1e-3),
    )


def discretize_timestep(sigma: torch.Tensor) -> torch.Tensor:
    """The integer timestep of a noise level, at most 999, rounded as the sampler's schedules do."""
    return (sigma * TRAIN_TIMESTEPS).floor().clamp(max=TRAIN_TIMESTEPS - 1)


def add_noise(
    batch: Batch,
    config: TransformerConfig,
    how: FlowConfig,
    noise: torch.Generator,
    sigma: torch.Tensor | None = None,
) -> Noised:
    """Add noise to what the model predicts, at the levels ``sigma`` [B], or random ones.

    Given are frame 0 and the state row, a policy's action prefix (training-time real-time chunking,
    arXiv 2512.05964: the model learns the rows that follow those that are already being executed),
    the chunk in forward dynamics, and all frames in inverse dynamics.

    A model that answers dynamics in one step needs no noise there: its best answer does not depend
    on it, and a token's width is free for the picture. Frame 0 in place of the noise leaves the
    change to predict, as flow matching between two distributions does (stochastic interpolants with
    data-dependent coupling, arXiv 2310.03725).
    """
    B, _, frames, H, W = batch.latents.shape
    head = 0 if batch.state is None else 1
    _, rows, width = batch.rows.shape
    layout = SequenceLayout(
        (frames, H, W),
        config.latent_patch_size,
        rows + head,
        (0,),
        head,
        width,
        batch.fps,
        1 - head,  # of the rows' clock, as in the released checkpoints
    )
    V = layout.vision_tokens
    per_frame = V // frames
    noisy = torch.ones(B, layout.tokens, 1)
    noisy[:, :per_frame] = 0
    noisy[:, V : V + head] = 0
    if batch.prefix is not None:
        given = torch.arange(rows)[None] < batch.prefix[:, None]
        noisy[:, V + head :][given] = 0
    noisy[batch.modes == FORWARD, V:] = 0
    noisy[batch.modes == INVERSE, :V] = 0
    sigma = sample_sigma(B, how, noise) if sigma is None else sigma.clone()
    from_frame = (batch.modes != POLICY) & how.dynamics_from_frame
    sigma[from_frame] = 1.0
    clean = torch.vmap(partial(patchify, patch=config.latent_patch_size))(batch.latents)
    clean_rows = _rows(batch, config)
    real = patchify(torch.ones(config.latent_channel, *layout.latent_shape), layout.patch)
    free_rows = torch.arange(config.action_dim) < layout.raw_action_dim
    eps = torch.randn(clean.shape, generator=noise) * real
    eps_rows = torch.randn(clean_rows.shape, generator=noise) * free_rows
    eps[from_frame] = clean[from_frame, :per_frame].repeat(1, frames, 1)
    eps_rows[from_frame] = 0
    share = noisy * sigma[:, None, None]
    target = eps - clean
    row_target = eps_rows - clean_rows
    vision = clean + share[:, :V] * target
    action = clean_rows + share[:, V:] * row_target
    return Noised(vision, action, target, row_target, noisy, sigma, real, layout)


def _rows(batch: Batch, config: TransformerConfig) -> torch.Tensor:
    """[B, T, A] clean action sequences: the state row, if any, then the chunk, padded with zeros
    to the model's width.
    """
    parts = [batch.rows] if batch.state is None else [batch.state[:, None], batch.rows]
    widened = [F.pad(part, (0, config.action_dim - part.shape[-1])) for part in parts]
    return torch.cat(widened, dim=1)


@dataclass(frozen=True)
class DataShard:
    """The windows of a step that a process computes: every ``ranks``-th from ``rank`` on."""

    rank: int = 0
    ranks: int = 1

    def of(self, windows: torch.Tensor) -> torch.Tensor:
        """This process's part of something of each window."""
        return windows[self.rank :: self.ranks]


SINGLE_PROCESS = DataShard()


def flow_loss(
    policy: TrainedPolicy,
    batch: Batch,
    config: FlowConfig,
    noise: torch.Generator,
    share: DataShard = SINGLE_PROCESS,
) -> tuple[torch.Tensor, LossMetrics]:
    """Return :func:`noised_loss` of windows with noise. Every process draws the noise of the
    whole step.
    """
    return noised_loss(
        policy, batch, add_noise(batch, policy.transformer.config, config, noise), config, share
    )


def noised_loss(
    policy: TrainedPolicy,
    batch: Batch,
    noised: Noised,
    config: FlowConfig,
    share: DataShard = SINGLE_PROCESS,
) -> tuple[torch.Tensor, LossMetrics]:
    """Squared error of the velocities, averaged over the noisy tokens of actions, a policy's video
    and forward dynamics' video.

    Every process computes its share of the windows, scaled so that the mean over processes is the
    loss of one. Return the weighted sum, and metrics: ``loss``, ``action`` and, with a video,
    ``video`` and ``forward``, of those that the batch has.
    """
    model = policy.transformer.config
    device = policy.w_in.device
    layout = noised.layout
    V = layout.vision_tokens
    v_vision, v_action, noisy = (
        share.of(tensor).to(device)
        for tensor in (noised.vision_target, noised.action_target, noised.noisy)
    )
    inverse = batch.modes == INVERSE
    forward = (batch.modes == FORWARD).float()
    frames = layout.latent_shape[0]
    first = first_noisy(layout)
    of_vision, of_action = predicted(policy, batch, noised, share)
    width = layout.raw_action_dim
    off = of_action[..., :width] - v_action[..., :width]
    loss = (
        share.ranks * _sum_square(off, noisy[:, V:]).sum() / noised.noisy[:, V:].sum().clamp(min=1)
    )
    metrics = {"action": loss.detach()}
    if config.end_points and inverse.any():
        mine = share.of(inverse).nonzero()[:, 0].to(device)
        ends = (
            share.ranks * end_point_error(off[mine, -batch.rows.shape[1] :]).sum() / inverse.sum()
        )
        metrics["ends"] = ends.detach()
        loss = loss + config.end_points * ends
    if frames > 1:
        error = (of_vision - v_vision[:, first:]) * noised.real[first:].to(device)
        if config.channels is not None:  # a token's channels follow one another
            error = (
                error.unflatten(-1, (-1, model.latent_channel)) @ config.channels.to(device)
            ).flatten(-2)
        of_window = share.ranks * _sum_square(error, noisy[:, first:V])
        for name, weight, windows in (
            ("video", config.video, 1 - forward),
            ("forward", config.forward, forward),
        ):
            if count := (noised.noisy[:, :V].sum((1, 2)) * windows).sum().item():
                mean = (of_window * share.of(windows).to(device)).sum() / count
                metrics[name] = mean.detach()
                loss = loss + weight * mean
    return loss, {"loss": loss.detach(), **metrics}


def first_noisy(layout: SequenceLayout) -> int:
    """Return the first vision token after the given frame, from which on velocities count."""
    frames, V = layout.latent_shape[0], layout.vision_tokens
    return V // frames if frames > 1 else V


def predicted(
    policy: TrainedPolicy, batch: Batch, noised: Noised, share: DataShard = SINGLE_PROCESS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the velocities that a policy predicts for a share's windows, of vision tokens from
    :func:`first_noisy` on and of action rows.
    """
    device, V = policy.w_in.device, noised.layout.vision_tokens
    vision, action, noisy, sigma = (
        share.of(tensor).to(device)
        for tensor in (noised.vision, noised.action, noised.noisy, noised.sigma)
    )
    prompts, asked = read_prompts(policy.transformer, batch.prompts), share.of(batch.prompt)
    first, parts = first_noisy(noised.layout), []
    timestep = discretize_timestep(sigma)
    groups = _by_first_token(batch.modes == INVERSE, share, first, V)
    for chosen, since in groups:
        text, at = prompts.select(asked[chosen]), chosen.to(device)
        of_group = velocity(
            policy, vision[at], action[at], timestep[at], noisy[at], noised.layout, text, since
        )
        parts.append((F.pad(of_group[0], (0, 0, since - first, 0)), of_group[1]))
    order = torch.cat([chosen for chosen, _ in groups]).argsort().to(device)
    of_vision, of_action = (torch.cat(outputs)[order] for outputs in zip(*parts, strict=True))
    return of_vision, of_action


def _by_first_token(
    inverse: torch.Tensor, share: DataShard, first: int, rows: int
) -> list[tuple[torch.Tensor, int]]:
    """Return the indices of a share's windows, and the first token whose velocity they need:
    inverse dynamics only rows'.

    Windows are one group where a process would have none in a second one: processes gather each
    layer's weights together.
    """
    shares = [DataShard(rank, share.ranks).of(inverse) for rank in range(share.ranks)]
    mine = shares[share.rank]
    if any(part.all() or not part.any() for part in shares):
        return [(torch.arange(len(mine)), first)]
    return [((~mine).nonzero()[:, 0], first), (mine.nonzero()[:, 0], rows)]


def end_point_error(off_BTA: torch.Tensor) -> torch.Tensor:
    """[B] squared error of where rows end, ``|sum_t e_t|^2 / (3 T)`` of their translations'
    errors: independent ones count as they do in the rows' own error, and a drift, which moves
    the end point, T times as much.
    """
    return off_BTA[..., :3].sum(1).square().mean(-1) / off_BTA.shape[1]


def _sum_square(error_BND: torch.Tensor, noisy_BN1: torch.Tensor) -> torch.Tensor:
    """[B]"""
    return (error_BND.square().mean(-1, keepdim=True) * noisy_BN1).sum((1, 2))
