"""State of the sampling loop for several requests at once: the streams that are sampled together,
and the passes of each step.

Shape suffixes: R requests, B branches (all conditional prompts, then all unconditional ones), N
generation tokens, n tokens of a stream, V vision tokens, S sound tokens, T action rows, P numbers
in a token, A action width, d head width; C F H W latent channels, frames, height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import array_namespace

from strands_cosmos3.engine.arrays import Array
from strands_cosmos3.engine.sampler import Schedule, UniPC
from strands_cosmos3.engine.sequence import VISION, Rope, SequenceLayout, patchify
from strands_cosmos3.engine.text_cache import TextKV
from strands_cosmos3.errors import InputError, ShapeError
from strands_cosmos3.types import Mode

if TYPE_CHECKING:
    from strands_cosmos3.engine.request import Cosmos3ActionRequest


@dataclass(frozen=True)
class Pass:
    """Requests that share a forward pass, the prompts of its B branches, cosine and sine [B, N,
    d] of what follows them, and the scales of guidance and the action heads of the requests, as the
    engine reads them.
    """

    members: tuple[int, ...]
    guided: bool
    texts: tuple[TextKV, ...]
    rope: Rope
    scale_R11: Array
    heads: Any


@dataclass(frozen=True)
class Stream:
    """What is sampled of one kind of token.

    Attributes:
        start_RnP: Starting sample: given values where something is given, noise elsewhere.
        free_RnP: 1 where the sampler writes. Of a noisy token the first number always is free.
        noisy: The first noisy token, and the one after the last.
        wanted: How many tokens are wanted in the end, from the first on.
    """

    start_RnP: Array
    free_RnP: Array
    noisy: tuple[int, int]
    wanted: int

    def group(self, last: bool) -> slice:
        """The tokens whose velocity a step needs; at the last one, only those that are wanted."""
        start, stop = self.noisy
        return slice(start, max(start, min(stop, self.wanted)) if last else stop)

    def advance(self, sampler: UniPC, velocity: Array, group: slice) -> None:
        """Take one sampler step with the velocity [R, tokens, P] of a group; given values are
        restored.
        """
        if group.stop > group.start:
            xp = array_namespace(sampler.sample)
            whole = xp.zeros_like(sampler.sample)
            whole[:, group] = velocity
            free = self.free_RnP
            sampler.sample = xp.where(free > 0, sampler.step(whole * free), self.start_RnP)


def noisy_tokens(streams: Sequence[Stream]) -> Array:
    """[R, N, 1], 1 where the time embedding is added."""
    parts = [stream.free_RnP[..., :1] for stream in streams]
    return array_namespace(*parts).concat(parts, axis=1)


def require_alike(layouts: Sequence[SequenceLayout], schedules: Sequence[Schedule]) -> None:
    """Refuse requests that cannot share a pass.

    Raises:
        ShapeError: Their latent grids, or their numbers of action rows or of sound latents differ.
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
        if layout.sound_tokens != first.sound_tokens:
            raise ShapeError(
                f"request {i} has {layout.sound_tokens} latents of sound, request 0 has "
                f"{first.sound_tokens}; a batch needs equal shapes: call step_batch for each shape."
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
    make = cache(make)
    steps = []
    for flags in zip(*guides, strict=True):
        with_guidance, without = (
            tuple(i for i, flag in enumerate(flags) if flag is guided) for guided in (True, False)
        )
        keys = (with_guidance, True), (without, False)
        steps.append(tuple(make(*key) for key in keys if key[0]))
    return steps


def starting_streams(
    requests: Sequence[Cosmos3ActionRequest],
    dynamics_from_frame: bool,
    layouts: Sequence[SequenceLayout],
    clean_RCFHW: Sequence[Array],
    frames: int,
    width: int,
    sound_width: int = 0,
) -> tuple[Stream, ...]:
    """The streams of requests with equal shapes, which start as noise; ``dynamics_from_frame`` in
    both dynamics every frame is frame 0 and every row zero.

    Noise that a request brings counts in any case. Of the latents the first ``frames`` are wanted;
    ``width`` is that of action rows, ``sound_width`` that of sound latents.
    """
    batch = [
        (request, layout, clean, dynamics_from_frame and request.mode is not Mode.POLICY)
        for request, layout, clean in zip(requests, layouts, clean_RCFHW, strict=True)
    ]
    sound = (partial(_starting_sound, sound_width),) if layouts[0].sound_tokens else ()
    samples = (_starting_vision, *sound, partial(_starting_action, width))
    noisy = zip(*(layout.noisy for layout in layouts), strict=True)
    wanted = list(layouts[0].counts)
    wanted[VISION] = wanted[VISION] // layouts[0].latent_shape[0] * frames
    stack = array_namespace(*clean_RCFHW).stack
    streams = []
    for sample, groups, count in zip(samples, noisy, wanted, strict=True):
        start, free = map(stack, zip(*(sample(*each) for each in batch), strict=True))
        streams.append(Stream(start, free, hull(groups), count))
    return tuple(streams)


def _starting_vision(
    request: Cosmos3ActionRequest,
    layout: SequenceLayout,
    clean_CFHW: Array,
    from_frame: bool,
) -> tuple[Array, Array]:
    """Vision tokens [V, P] and where they are free; the padding of an odd edge is not."""
    xp = array_namespace(clean_CFHW)
    free = xp.ones_like(clean_CFHW)
    free[:, list(layout.clean_frames)] = 0
    free = patchify(free, layout.patch)
    if request.video_noise is None and len(layout.clean_frames) == clean_CFHW.shape[1]:
        return patchify(clean_CFHW, layout.patch), free  # no noise is drawn that nobody sees
    start = xp.broadcast_to(clean_CFHW[:, :1], clean_CFHW.shape) if from_frame else None
    noise = starting_noise(request.video_noise, request.seed, clean_CFHW, "video_noise", start)
    noise = patchify(noise, layout.patch)
    return xp.where(free > 0, noise, patchify(clean_CFHW, layout.patch)), free


def _starting_sound(
    width: int,
    request: Cosmos3ActionRequest,
    layout: SequenceLayout,
    clean_CFHW: Array,
    from_frame: bool,
) -> tuple[Array, Array]:
    """Sound tokens [S, P], all of them free, on the device of the latents."""
    xp = array_namespace(clean_CFHW)
    shape = width, layout.sound_tokens
    like = xp.zeros(shape, dtype=clean_CFHW.dtype, device=clean_CFHW.device)
    start_SP = starting_noise(request.sound_noise, request.seed, like, "sound_noise").T
    return start_SP, xp.ones_like(start_SP)


def _starting_action(
    width: int,
    request: Cosmos3ActionRequest,
    layout: SequenceLayout,
    clean_CFHW: Array,
    from_frame: bool,
) -> tuple[Array, Array]:
    """Action rows [T, A] and where they are free, on the device of the latents."""
    xp = array_namespace(clean_CFHW)
    size = layout.action_rows, width
    given = xp.zeros(size, dtype=clean_CFHW.dtype, device=clean_CFHW.device)
    free = xp.zeros_like(given)
    free[layout.clean_rows :, : layout.raw_action_dim] = 1
    start = xp.zeros_like(given) if from_frame else None
    noise = starting_noise(request.action_noise, request.seed, given, "action_noise", start)
    # history and state row come first; in forward dynamics the whole chunk follows
    first_of_chunk = layout.action_rows - request.action_chunk
    for at, rows in ((0, request.action_prefix), (first_of_chunk, request.cond_action)):
        if rows is not None:
            given[at : at + len(rows), : rows.shape[1]] = rows
    return xp.where(free > 0, noise, given), free


def starting_noise(
    noise: Array | None, seed: int, like: Array, name: str, default: Array | None = None
) -> Array:
    """Noise of the shape, dtype, kind and device of ``like``: the given one (ShapeError if its
    shape differs), else the default or the seed's, equal on every device.
    """
    chosen: Array = default if noise is None else noise
    if chosen is None:
        chosen = np.random.RandomState(seed).standard_normal(like.shape).astype(np.float32)
    chosen = chosen[0] if chosen.ndim == like.ndim + 1 and chosen.shape[0] == 1 else chosen
    if chosen.shape != like.shape:
        raise ShapeError(
            f"{name} must be {list(like.shape)} (a leading 1 is allowed), got {list(chosen.shape)}."
        )
    return array_namespace(like).asarray(chosen, dtype=like.dtype, device=like.device)


def hull(groups: Sequence[slice]) -> tuple[int, int]:
    """Start and stop of the smallest group that holds all of these; 0, 0 if they are empty."""
    nonempty = [group for group in groups if group.stop > group.start] or [slice(0, 0)]
    return min(g.start for g in nonempty), max(g.stop for g in nonempty)


def combine(conditional: Array, unconditional: Array, scale_R11: Array) -> Array:
    """[R, ...]: guidance ``u + g (c - u)`` of conditional and unconditional velocities."""
    return unconditional + scale_R11 * (conditional - unconditional)


def joined(members: Sequence[Sequence[int]], parts: Sequence[list[Array]]) -> list[Array]:
    """[R, ...] of each stream in the order of the requests, from the parts of passes with these
    members.
    """
    if len(parts) == 1:
        return parts[0]
    places = sorted(
        (m, i, row) for i, of_pass in enumerate(members) for row, m in enumerate(of_pass)
    )
    of_streams = zip(*parts, strict=True)
    stack = array_namespace(*parts[0]).stack
    return [stack([of_passes[i][row] for _, i, row in places]) for of_passes in of_streams]


def guides(interval: tuple[float, float] | None, timestep: int) -> bool:
    """Whether a step has guidance: strictly inside the interval, or always without one."""
    return interval is None or interval[0] < timestep < interval[1]
