"""State of the sampling loop for several requests at once: their starting samples, and the passes
of each step.

Shape suffixes: R requests, B branches (all conditional prompts, then all unconditional ones), N
generation tokens, V vision tokens, T action rows, P numbers in a vision token, A action width, d
head width; C F H W latent channels, frames, height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.request import Cosmos3ActionRequest, starting_noise
from strands_cosmos3.engine.sampler import Schedule, UniPC
from strands_cosmos3.engine.sequence import SequenceLayout, patchify
from strands_cosmos3.engine.transformer import ActionHead, Rope, TextKV
from strands_cosmos3.errors import InputError, ShapeError
from strands_cosmos3.types import Mode


@dataclass(frozen=True)
class Pass:
    """Requests that share a forward pass, the prompts of its B branches, cosine and sine [B, N,
    d] of what follows them, and the scales of guidance and the action head of the requests.
    """

    members: tuple[int, ...]
    guided: bool
    texts: tuple[TextKV, ...]
    rope: Rope
    scale_R11: torch.Tensor
    head: ActionHead


@dataclass(frozen=True)
class Sample:
    """Starting samples: given values where something is given, noise elsewhere."""

    vision_RVP: torch.Tensor
    action_RTA: torch.Tensor
    vision_free: torch.Tensor  # [R, V, P], 1 where the sampler writes
    action_free: torch.Tensor  # [R, T, A]
    noisy_RN1: torch.Tensor  # 1 where the time embedding is added


def require_alike(layouts: Sequence[SequenceLayout], schedules: Sequence[Schedule]) -> None:
    """Refuse requests that cannot share a pass.

    Raises:
        ShapeError: Their latent grids or their numbers of action rows differ.
        InputError: Their noise levels differ, by steps, shift or kind of schedule.
    """
    first = layouts[0]
    schedule = schedules[0]
    for i, (layout, other) in enumerate(zip(layouts, schedules, strict=True)):
        if (layout.latent_shape, layout.action_rows) != (first.latent_shape, first.action_rows):
            raise ShapeError(
                f"request {i} has latents {layout.latent_shape} and {layout.action_rows} action "
                "rows, request 0 has "
                f"{first.latent_shape} and {first.action_rows}; a batch needs equal shapes: call "
                "step_batch for each shape."
            )
        if other != schedule:
            raise InputError(
                f"request {i} has {len(other.timesteps)} steps from sigma {other.sigmas[0]:.4g}, "
                f"request 0 has {len(schedule.timesteps)} from {schedule.sigmas[0]:.4g}; a batch "
                "needs the same num_inference_steps, flow_shift and use_karras_sigmas: "
                "call step_batch for each."
            )


def passes_of_steps(
    guides: Sequence[Sequence[bool]], make: Callable[[tuple[int, ...], bool], Pass]
) -> list[tuple[Pass, ...]]:
    """The passes of each step: one of the requests with guidance there, one of those without.

    ``guides`` says for each request at which steps it has guidance; ``make`` is called once for
    each distinct pass.
    """
    passes: dict[tuple[tuple[int, ...], bool], Pass] = {}
    steps = []
    for flags in zip(*guides, strict=True):
        keys = [
            (tuple(i for i, flag in enumerate(flags) if flag is guided), guided)
            for guided in (True, False)
        ]
        keys = [key for key in keys if key[0]]
        passes |= {key: make(*key) for key in keys if key not in passes}
        steps.append(tuple(passes[key] for key in keys))
    return steps


def starting_samples(
    requests: Sequence[Cosmos3ActionRequest],
    dynamics_from_frame: bool,
    layouts: Sequence[SequenceLayout],
    clean_RCFHW: Sequence[torch.Tensor],
    config: TransformerConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> Sample:
    """The starting samples of requests with equal shapes: noise, or ``dynamics_from_frame`` in
    both dynamics every frame is frame 0 and every row zero.

    ``dtype`` is that of hidden states. Noise that a request brings counts in any case.
    """
    each = []
    for request, layout, clean in zip(requests, layouts, clean_RCFHW, strict=True):
        vision_free, noisy = _free_vision(layout, config)
        action_free = torch.zeros(layout.action_rows, config.action_dim)
        action_free[layout.clean_rows :, : layout.raw_action_dim] = 1
        clean_rows = torch.zeros_like(action_free)
        first = rest = None
        if dynamics_from_frame and request.mode is not Mode.POLICY:
            first = clean[:, :1].expand_as(clean)
            rest = clean_rows.clone()
        seed = request.seed
        noise = starting_noise(request.video_noise, seed, clean.shape, "video_noise", first)
        row_noise = starting_noise(
            request.action_noise, seed, clean_rows.shape, "action_noise", rest
        )
        # history and state row come first; in forward dynamics the whole chunk follows
        first_of_chunk = layout.action_rows - request.action_chunk
        for at, rows in ((0, request.action_prefix), (first_of_chunk, request.cond_action)):
            if rows is not None:
                clean_rows[at : at + len(rows), : rows.shape[1]] = rows
        vision_free = vision_free.to(device)
        noise = patchify(noise.to(device), layout.patch)
        vision = torch.where(vision_free > 0, noise, patchify(clean, layout.patch))
        action = torch.where(action_free > 0, row_noise.to(clean_rows), clean_rows).to(device)
        each.append((vision, action, vision_free, action_free.to(device), noisy.to(device, dtype)))
    return Sample(*map(torch.stack, zip(*each, strict=True)))


def _free_vision(
    layout: SequenceLayout, config: TransformerConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """[V, P] where the sampler writes latents, and [N, 1] noisy tokens; the padding of an odd
    edge is not free either.
    """
    free = torch.ones(config.latent_channel, *layout.latent_shape)
    noisy = torch.ones(layout.tokens, 1)
    clean = list(layout.clean_frames)
    free[:, clean] = 0
    noisy[: layout.vision_tokens].view(layout.latent_shape[0], -1)[clean] = 0
    noisy[layout.vision_tokens : layout.vision_tokens + layout.clean_rows] = 0
    return patchify(free, layout.patch), noisy


def hull(groups: Sequence[slice]) -> slice:
    """The smallest slice that holds all of these; empty if they are."""
    nonempty = [group for group in groups if group.stop > group.start] or [slice(0, 0)]
    return slice(min(g.start for g in nonempty), max(g.stop for g in nonempty))


def advance(
    state: UniPC, velocity: torch.Tensor, tokens: slice, free: torch.Tensor, clean: torch.Tensor
) -> None:
    """One sampler step with the velocity [R, n, ...] of some tokens; given values are restored."""
    if tokens.stop > tokens.start:
        whole = torch.zeros_like(state.sample)
        whole[:, tokens] = velocity
        state.sample = torch.where(free > 0, state.step(whole * free), clean)


def combine(velocity_B: torch.Tensor, guided: bool, scale_R11: torch.Tensor) -> torch.Tensor:
    """[R, ...] float32: guidance ``u + g (c - u)`` of conditional and unconditional velocities,
    or the conditional ones.
    """
    if not guided:
        return velocity_B.float()
    conditional, unconditional = velocity_B.float().chunk(2)
    return unconditional + scale_R11 * (conditional - unconditional)


def guides(interval: tuple[float, float] | None, timestep: int) -> bool:
    """Whether a step has guidance: strictly inside the interval, or always without one."""
    return interval is None or interval[0] < timestep < interval[1]
