"""Cosmos 3 inference from request to action, whatever runs the networks: encode, prefill, denoise,
decode. Importing this loads no torch.

Shape suffixes: R requests, B branches of guidance of all requests, N generation tokens, V vision
tokens, T action rows (a state row included), P numbers in a token, A action width, d head width;
C F H W latent channels, frames, height and width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from time import perf_counter
from typing import Any

from array_api_compat import array_namespace

from strands_cosmos3.checks import typed
from strands_cosmos3.engine.arrays import Array
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.denoising import (
    Pass,
    Stream,
    combine,
    guides,
    joined,
    noisy_tokens,
    passes_of_steps,
    require_alike,
    starting_streams,
)
from strands_cosmos3.engine.novelty import Novelty, Remembered
from strands_cosmos3.engine.request import Cosmos3ActionRequest, first_of
from strands_cosmos3.engine.sampler import (
    Schedule,
    StepCoefficients,
    UniPC,
    unipc_coefficients,
)
from strands_cosmos3.engine.sequence import (
    ACTION,
    SOUND,
    TEMPORAL_COMPRESSION,
    VISION,
    Rope,
    SequenceLayout,
    generation_positions,
    text_positions,
    unpatchify,
)
from strands_cosmos3.engine.text_cache import TextCache, TextKV, side_by_side
from strands_cosmos3.engine.tokens import token_ids
from strands_cosmos3.errors import ActionSpaceError, ConfigError, InputError, ShapeError
from strands_cosmos3.resources import Closeable
from strands_cosmos3.types import Mode

OnStep = Callable[[int, int], None]
_TABLES = 8  # that are kept, of rope: a rollout needs one for each of its passes and prompts


def latents_of(frames: int) -> int:
    """Latent frames that pixel frames are decoded from; later ones change nothing."""
    return -(-(frames - 1) // TEMPORAL_COMPRESSION) + 1 if frames else 0


def frames_of(request: Cosmos3ActionRequest) -> int:
    """Pixel frames of a request's whole clip."""
    return (request.video_shape[0] - 1) * TEMPORAL_COMPRESSION + 1


class WallClock:
    """Wall-clock time of named parts of one call."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, float]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body of a ``with`` statement."""
        start = perf_counter()
        yield
        self._parts.append((name, (perf_counter() - start) * 1e3))

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds of each part and their ``total``."""
        spent = dict(self._parts)
        return {**spent, "total": sum(spent.values())}


class Inference(Closeable):
    """Answers requests with a checkpoint. A subclass runs the networks, on arrays of one kind.

    Args:
        checkpoint: What it runs.
        like: An array of the kind and on the device that it computes with.
        text_cache_bytes: Bytes of prompts' keys and values to keep across calls.
        novelty: Tells how novel pictures are.

    Attributes:
        action_space: ``midtrain`` or ``joint_pos``; None if the checkpoint does not state it.
        text_cache: Keys and values of recent prompts; ``prefills`` counts runs of the text tower.
    """

    def __init__(
        self, checkpoint: Checkpoint, like: Array, text_cache_bytes: int, novelty: Novelty
    ):
        self.checkpoint = checkpoint
        self.config: TransformerConfig = checkpoint.config
        self.action_space = checkpoint.action_space
        self.text_cache = TextCache(text_cache_bytes, self._prefill)
        self._xp: Any = array_namespace(like)
        self.device: Any = like.device
        self._table_of = lru_cache(_TABLES)(self._generation_rope)
        self._latents_of = Remembered(lambda pixels: self._encoded(pixels))
        self._novelty_of = novelty
        self._closed = False

    @property
    @abstractmethod
    def decodes_video(self) -> bool:
        """Whether results have pixels."""

    @property
    def predicts_sound(self) -> bool:
        """Whether a request can ask for sound."""
        return False

    def step(self, request: Cosmos3ActionRequest, on_step: OnStep | None = None) -> dict[str, Any]:
        """Run one inference: :meth:`step_batch` of one request.

        Args:
            on_step: Called after each denoising step with (steps done, total steps).

        Returns:
            ``action`` [1, chunk, raw_action_dim], float32 on the CPU, in the model's scale (in
            forward dynamics the given actions); ``video`` [1, C, F, H, W] latents, float32 on the
            device, unless ``return_video`` is off; ``pixels`` [1, 3, frames, height, width] in [0,
            1], the first ``decode_frames``, on rank 0 only; ``seed``; ``action_space``; ``timing``,
            milliseconds by part; ``novelty`` of the picture, if the checkpoint can tell. Of a
            request for sound also ``sound`` [1, C, S] latents, float32 on the device, and on rank 0
            ``waveform`` [1, channels, samples] in [-1, 1], float32 on the CPU, as long as the clip,
            and ``sample_rate`` in Hz.

        Raises:
            ActionSpaceError: The request asks for another action space than the checkpoint's.
            InputError: A shape does not fit the checkpoint, state and action space contradict each
                other, or pixels or sound are wanted of an engine without their decoder.
        """
        return self.step_batch((request,), on_step)[0]

    @typed()
    def step_batch(
        self, requests: Sequence[Cosmos3ActionRequest], on_step: OnStep | None = None
    ) -> list[dict[str, Any]]:
        """Run several inferences in shared matrix products; in float32 each result equals
        :meth:`step`'s up to rounding.

        Requests share the latent grid, the numbers of action rows and of sound latents, and the
        noise levels. Prompts,
        pictures, states, seeds, modes, guidance, domains and rates are each request's own. Equal
        prompts are read once and the same array of pixels is encoded once, so that candidates made
        with ``dataclasses.replace(request, seed=...)`` share all but the denoising.

        Nothing is padded: prompts of equal length share an attention call, others have one each.

        Returns:
            The results in the order of the requests, as :meth:`step`'s; each ``timing`` is that of
            the whole batch.

        Raises:
            ShapeError, InputError: Shapes or noise levels differ; or as :meth:`step`.
        """
        if self._closed:
            raise ConfigError("this engine was closed; load the checkpoint again.")
        if not requests:
            raise InputError("a batch needs at least one request.")
        clock = self._clock()
        frames = [self._decoded_frames(request) for request in requests]
        layouts = [self._layout(request) for request in requests]
        schedules = [
            self.checkpoint.scheduler.schedule(
                request.num_inference_steps, request.flow_shift, request.use_karras_sigmas
            )
            for request in requests
        ]
        require_alike(layouts, schedules)
        with clock.part("encode"):
            # a rollout's second pass predicts the video of an answer, from the same picture
            again = all(request.mode is Mode.FORWARD_DYNAMICS for request in requests)
            clean = self._encode(requests, layouts, again)
            pictures = [request.cond_video_pixels for request in requests]
            novel = self._novelty_of(pictures, [latents[:, 0] for latents in clean], again)
        with clock.part("text"):
            passes = self._passes(requests, layouts, schedules[0])
        with clock.part("denoise"):
            latent_frames = [
                layout.latent_shape[0] if request.return_video else latents_of(count)
                for request, layout, count in zip(requests, layouts, frames, strict=True)
            ]
            streams = starting_streams(
                requests,
                self.checkpoint.dynamics_from_frame,
                layouts,
                clean,
                max(latent_frames),
                self.config.action_dim,
                self.config.sound_dim or 0,
            )
            samples = self._denoise(streams, schedules[0], passes, on_step)
        results = []
        for i, (request, layout) in enumerate(zip(requests, layouts, strict=True)):
            result: dict[str, Any] = {}
            if latent_frames[i]:
                video = unpatchify(samples[VISION][i], layout.latent_shape, layout.patch)[None]
                result = self._video(video[:, :, : latent_frames[i]], frames[i], clock)
            if novel:
                result["novelty"] = novel[i]
            if layout.sound_tokens:
                result |= self._heard(samples[SOUND][i].T[None], request, clock)
            rows = samples[ACTION][i, -request.action_chunk :, : request.raw_action_dim]
            result["action"] = self._on_host(rows[None])
            result["seed"] = request.seed
            results.append(result | {"action_space": self._action_space(request)})
        timing = clock.milliseconds()
        return [{**result, "timing": dict(timing)} for result in results]

    @abstractmethod
    def _encoded(self, pixels: Array) -> Array:
        """Normalised latents [R, C, F, H, W], float32, of pixels [R, 3, frames, height, width]."""

    @abstractmethod
    def _read_prompt(self, ids: tuple[int, ...], rope: Rope) -> TextKV:
        """Keys and values of a prompt at these rotations of its positions."""

    @abstractmethod
    def _rope(self, positions_3N: Array) -> Rope:
        """Rotations of positions."""

    @abstractmethod
    def _heads(self, domains: Sequence[int]) -> Any:
        """The action heads of the requests of a pass."""

    @abstractmethod
    def _times(self, schedule: Schedule) -> Array:
        """What the network reads of the timestep of each step."""

    @abstractmethod
    def _velocity(
        self, of: Pass, tokens: Sequence[Array], time: Array, noisy_RN1: Array, groups: list[slice]
    ) -> list[Array]:
        """Velocities of the branches of a pass, [B, tokens, P] of each stream's group, float32."""

    @abstractmethod
    def _pixels(self, latents_1CFHW: Array, frames: int) -> Array | None:
        """The first frames [1, 3, frames, height, width] in [0, 1] of latents; None on a rank that
        has none.
        """

    def _branches(self, guided: bool) -> tuple[int, ...]:
        """The branches that are computed here: the conditional prompt, the unconditional one."""
        return (0, 1) if guided else (0,)

    def _clock(self) -> Any:
        return WallClock()

    def _on_host(self, rows: Array) -> Array:
        return rows

    def _sound_latents(self, request: Cosmos3ActionRequest) -> int:
        """The number of latents of a request's sound."""
        if request.sound:
            raise InputError(
                "the request asks for sound, and this engine was loaded without what predicts it."
            )
        return 0

    def _heard(
        self, latents_1CS: Array, request: Cosmos3ActionRequest, clock: Any
    ) -> dict[str, Any]:
        """What a request gets of its sound: nothing, where none is predicted."""
        return {}

    def _decoded_frames(self, request: Cosmos3ActionRequest) -> int:
        """The number of frames to decode, none of which lies beyond the clip."""
        every = frames_of(request)
        count = request.decode_frames
        if count and not self.decodes_video:
            raise InputError(
                f"decode_frames is {count}, and this engine has no decoder: load it "
                "with decode_video=True."
            )
        return min(every if count is None else count, every) if self.decodes_video else 0

    def _video(self, latents_1CFHW: Array, frames: int, clock: Any) -> dict[str, Array]:
        result = {"video": latents_1CFHW}
        if frames:
            with clock.part("decode"):
                pixels = self._pixels(latents_1CFHW[:, :, : latents_of(frames)], frames)
                if pixels is not None:
                    result["pixels"] = pixels
        return result

    def _action_space(self, request: Cosmos3ActionRequest) -> str:
        requested = request.action_space
        emitted = self.action_space
        if requested and emitted and requested != emitted:
            raise ActionSpaceError(
                f"the request asks for {requested!r} actions, but this checkpoint emits "
                f"{emitted!r}; midtrain rows are normalised pose deltas, joint_pos "
                "rows are raw joint angles."
            )
        return requested or self.checkpoint.require_space()

    def _layout(self, request: Cosmos3ActionRequest) -> SequenceLayout:
        of_joints = self._action_space(request) == "joint_pos"
        state_rows = 1 if of_joints or self.checkpoint.state_row is not None else 0
        rows = request.action_chunk + state_rows + request.history_rows
        if request.raw_action_dim > self.config.action_dim:
            raise ShapeError(
                f"raw_action_dim {request.raw_action_dim} exceeds the "
                f"model's {self.config.action_dim}."
            )
        clean_rows = 0 if request.action_prefix is None else len(request.action_prefix)
        if not request.history_rows + state_rows <= clean_rows <= rows:
            state = "the state row that Cosmos3PolicyProcessor makes of `state`, " * state_rows
            raise ShapeError(
                f"action_prefix has {clean_rows} rows; it must be {request.history_rows} rows of "
                f"history, {state}and at most {request.action_chunk} rows of the chunk."
            )
        given_frames = request.cond_frame_indexes
        if given_frames is None and request.mode is Mode.INVERSE_DYNAMICS:
            given_frames = range(request.video_shape[0])
        return SequenceLayout(
            latent_shape=request.video_shape,
            patch=self.config.latent_patch_size,
            action_rows=rows,
            clean_frames=tuple(sorted({*(given_frames or (0,))})),
            clean_rows=rows if request.mode is Mode.FORWARD_DYNAMICS else clean_rows,
            raw_action_dim=request.raw_action_dim,
            fps=request.fps,
            action_offset=(0 if state_rows else 1) - request.history_rows,
            sound_tokens=self._sound_latents(request),
        )

    def _encode(
        self,
        requests: Sequence[Cosmos3ActionRequest],
        layouts: Sequence[SequenceLayout],
        again: bool,
    ) -> list[Array]:
        """For each request latents [C, F, H, W] with the given frames in place and zeros
        elsewhere. Clips of one shape are encoded together, and equal ones once.
        """
        pixels = [request.cond_video_pixels for request in requests]
        counts = [max(layout.clean_frames) * TEMPORAL_COMPRESSION + 1 for layout in layouts]
        keys = [(id(clip), count) for clip, count in zip(pixels, counts, strict=True)]
        clips = {
            key: first_of(clip, count, 2)
            for key, clip, count in zip(keys, pixels, counts, strict=True)
        }
        latents: dict[tuple[int, int], Array] = {}
        for shape in dict.fromkeys(clip.shape for clip in clips.values()):
            alike = {key: clip for key, clip in clips.items() if clip.shape == shape}
            joined_clips = self._xp.concat(list(alike.values()))
            encoded = self._latents_of(self._xp.asarray(joined_clips, device=self.device), again)
            latents |= dict(zip(alike, encoded, strict=True))
        canvases = []
        for key, layout in zip(keys, layouts, strict=True):
            encoded, (frames, height, width) = latents[key], layout.latent_shape
            if encoded.shape[2] < height or encoded.shape[3] < width:
                shape = list(encoded.shape[1:])
                raise ShapeError(
                    f"video_shape {layout.latent_shape} is larger than the "
                    f"canvas's latents {shape}."
                )
            of_canvas = encoded.shape[0], frames, height, width
            clean = self._xp.zeros(of_canvas, dtype=self._xp.float32, device=self.device)
            for i in layout.clean_frames:
                clean[:, i] = encoded[:, i, :height, :width]
            canvases.append(clean)
        return canvases

    def _passes(
        self,
        requests: Sequence[Cosmos3ActionRequest],
        layouts: Sequence[SequenceLayout],
        schedule: Schedule,
    ) -> list[tuple[Pass, ...]]:
        """The passes of each step, with this rank's own branches where there is guidance."""
        xp = self._xp
        prompts = [self._prompts(request) for request in requests]
        text_of = cache(self.text_cache.get)  # each prompt once, even if it is too long to be kept

        def branch(member: int, which: int) -> tuple[TextKV, Rope]:
            text = text_of(prompts[member][which])
            return text, self._table_of(layouts[member], text.tokens)

        def make(members: tuple[int, ...], guided: bool) -> Pass:
            read, ropes = zip(
                *(branch(member, b) for b in self._branches(guided) for member in members),
                strict=True,
            )
            cos, sin = map(xp.stack, zip(*ropes, strict=True))
            batch = [requests[member] for member in members]
            scales = [float(request.guidance_scale) for request in batch]
            scale_R = xp.asarray(scales, dtype=xp.float32, device=self.device)
            heads = self._heads([request.domain_id for request in batch])
            texts = side_by_side(read)
            return Pass(members, guided, texts, (cos, sin), scale_R[:, None, None], heads)

        guided = [
            [len(ids) == 2 and guides(request.guidance_interval, t) for t in schedule.timesteps]
            for request, ids in zip(requests, prompts, strict=True)
        ]
        return passes_of_steps(guided, make)

    def _prompts(self, request: Cosmos3ActionRequest) -> list[tuple[int, ...]]:
        """Ids of the conditional prompt and, with guidance, of the unconditional one."""
        vocab = self.config.vocab_size
        negative = request.neg_text_ids
        prompts = [token_ids(request.text_ids, request.text_mask, "text_ids", vocab)]
        if request.guidance_scale != 1:
            assert negative is not None  # the request checked it
            prompts.append(token_ids(negative, request.neg_text_mask, "neg_text_ids", vocab))
        return prompts

    def _generation_rope(self, layout: SequenceLayout, text_tokens: int) -> Rope:
        return self._rope(generation_positions(layout, self.config, text_tokens))

    def _prefill(self, ids: tuple[int, ...]) -> TextKV:
        return self._read_prompt(ids, self._rope(text_positions(len(ids))))

    def _denoise(
        self,
        streams: tuple[Stream, ...],
        schedule: Schedule,
        passes: Sequence[tuple[Pass, ...]],
        on_step: OnStep | None,
    ) -> tuple[Array, ...]:
        """The final tokens [R, n, P] of each stream."""
        steps = unipc_coefficients(schedule, self._xp)
        return self._loop(streams, tuple(passes), self._times(schedule), steps, on_step)

    def _loop(
        self,
        streams: Sequence[Stream],
        passes: Sequence[tuple[Pass, ...]],
        times: Array,
        steps: tuple[StepCoefficients, ...],
        on_step: OnStep | None = None,
    ) -> tuple[Array, ...]:
        """All steps, on the device alone: a CUDA graph can hold them."""
        samplers = [UniPC(stream.start_RnP, steps) for stream in streams]
        noisy_RN1 = noisy_tokens(streams)
        for i, at_step in enumerate(passes):
            self._begin_step(i, len(passes))
            groups = [stream.group(last=i + 1 == len(passes)) for stream in streams]
            state = [*(sampler.sample for sampler in samplers), noisy_RN1]
            parts = [self._velocities(each, state, times[i], groups) for each in at_step]
            of_streams = joined([each.members for each in at_step], parts)
            for stream, sampler, velocity, group in zip(
                streams, samplers, of_streams, groups, strict=True
            ):
                stream.advance(sampler, velocity, group)
            if on_step is not None:
                on_step(i + 1, len(passes))
        return tuple(sampler.sample for sampler in samplers)

    def _begin_step(self, step: int, steps: int) -> None:
        """Prepare for a step of so many."""

    def _velocities(
        self, of: Pass, state: list[Array], time: Array, groups: list[slice]
    ) -> list[Array]:
        """Velocities of a pass for each stream's group, [requests of the pass, tokens, P], float32,
        after guidance; ``state`` is that of all requests, as in :meth:`_loop`.
        """
        if len(of.members) < len(state[0]):
            stack = self._xp.stack
            state = [stack([each[member] for member in of.members]) for each in state]
        *tokens, noisy = state
        velocities = self._velocity(of, tokens, time, noisy, groups)
        if not of.guided:
            return velocities
        members = len(of.members)
        branches = [(each[:members], each[members:]) for each in velocities]
        return [combine(c, u, of.scale_R11) for c, u in branches]
