"""Flow matching on the streams of a sequence: vision tokens and action rows.

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
class NoisedStream:
    """Tokens of one stream with added noise, and the velocities to predict."""

    tokens: torch.Tensor  # [B, n, P]
    target: torch.Tensor  # [B, n, P]
    noisy: torch.Tensor  # [B, n, 1], 1 where a token is noisy
    real: torch.Tensor  # [n, P] or [P], 0 where a number of a token is padding


@dataclass(frozen=True, eq=False)
class Noised:
    """Windows with added noise."""

    streams: tuple[NoisedStream, ...]
    sigma: torch.Tensor  # [B]
    layout: SequenceLayout

    @property
    def noisy(self) -> torch.Tensor:
        """[B, N, 1], 1 where a token is noisy."""
        return torch.cat([stream.noisy for stream in self.streams], dim=1)


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
    per_frame = layout.vision_tokens // frames
    noisy, noisy_rows = (torch.ones(B, n, 1) for n in layout.counts)
    noisy[:, :per_frame] = 0
    noisy_rows[:, :head] = 0
    if batch.prefix is not None:
        given = torch.arange(rows)[None] < batch.prefix[:, None]
        noisy_rows[:, head:][given] = 0
    noisy[batch.modes == INVERSE] = 0
    noisy_rows[batch.modes == FORWARD] = 0
    sigma = sample_sigma(B, how, noise) if sigma is None else sigma.clone()
    from_frame = (batch.modes != POLICY) & how.dynamics_from_frame
    sigma[from_frame] = 1.0
    clean = torch.vmap(partial(patchify, patch=config.latent_patch_size))(batch.latents)
    clean_rows = _rows(batch, config)
    real = patchify(torch.ones(config.latent_channel, *layout.latent_shape), layout.patch)
    real_rows = torch.arange(config.action_dim) < layout.raw_action_dim
    frame = clean[:, :per_frame].repeat(1, frames, 1)

    def noised(
        clean: torch.Tensor, noisy: torch.Tensor, real: torch.Tensor, start: torch.Tensor
    ) -> NoisedStream:
        eps = torch.randn(clean.shape, generator=noise) * real
        eps[from_frame] = start[from_frame]
        target = eps - clean
        tokens = clean + noisy * sigma[:, None, None] * target
        return NoisedStream(tokens, target, noisy, real)

    vision = noised(clean, noisy, real, frame)
    action = noised(clean_rows, noisy_rows, real_rows, torch.zeros_like(clean_rows))
    return Noised((vision, action), sigma, layout)


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
    vision, action = noised.streams
    inverse = batch.modes == INVERSE
    forward = (batch.modes == FORWARD).float()
    frames = layout.latent_shape[0]
    first = first_noisy(layout)
    of_vision, of_action = predicted(policy, batch, noised, share)
    off = of_action - share.of(action.target).to(device)
    off = off[..., : layout.raw_action_dim]
    loss = share.ranks * _sum_square(off, share.of(action.noisy).to(device)).sum()
    loss = loss / action.noisy.sum().clamp(min=1)
    metrics = {"action": loss.detach()}
    if config.end_points and inverse.any():
        mine = share.of(inverse).nonzero()[:, 0].to(device)
        ends = (
            share.ranks * end_point_error(off[mine, -batch.rows.shape[1] :]).sum() / inverse.sum()
        )
        metrics["ends"] = ends.detach()
        loss = loss + config.end_points * ends
    if frames > 1:
        error = of_vision - share.of(vision.target).to(device)[:, first:]
        error = error * vision.real[first:].to(device)
        if config.channels is not None:  # a token's channels follow one another
            error = (
                error.unflatten(-1, (-1, model.latent_channel)) @ config.channels.to(device)
            ).flatten(-2)
        noisy = share.of(vision.noisy).to(device)[:, first:]
        of_window = share.ranks * _sum_square(error, noisy)
        for name, weight, windows in (
            ("video", config.video, 1 - forward),
            ("forward", config.forward, forward),
        ):
            if count := (vision.noisy.sum((1, 2)) * windows).sum().item():
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
) -> tuple[torch.Tensor, ...]:
    """Return the velocities that a policy predicts for a share's windows, of each stream from the
    token :func:`first_noisy` on.
    """
    device, layout = policy.w_in.device, noised.layout
    *tokens, noisy, sigma = (
        share.of(tensor).to(device)
        for tensor in (*(stream.tokens for stream in noised.streams), noised.noisy, noised.sigma)
    )
    prompts, asked = read_prompts(policy.transformer, batch.prompts), share.of(batch.prompt)
    first, parts = first_noisy(layout), []
    counts = layout.counts_from(first)
    timestep = discretize_timestep(sigma)
    groups = _by_first_token(batch.modes == INVERSE, share, first, layout.vision_tokens)
    for chosen, since in groups:
        text, at = prompts.select(asked[chosen]), chosen.to(device)
        chosen_tokens = [of_stream[at] for of_stream in tokens]
        of_group = velocity(policy, chosen_tokens, timestep[at], noisy[at], layout, text, since)
        # of tokens that nobody asks for it is zero
        parts.append(
            [F.pad(v, (0, 0, n - v.shape[1], 0)) for n, v in zip(counts, of_group, strict=True)]
        )
    order = torch.cat([chosen for chosen, _ in groups]).argsort().to(device)
    return tuple(torch.cat(outputs)[order] for outputs in zip(*parts, strict=True))


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
