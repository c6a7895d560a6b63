"""Cosmos 3 inference from request to action: encode, prefill, denoise, decode.

Shape suffixes: R requests, B branches of guidance of all requests, N generation tokens, V vision
tokens, S sound tokens, T action rows (a state row included), P numbers in a token, A action width,
D hidden, d head width; C F H W latent channels, frames, height and width.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from strands_cosmos3.checks import typed, whole_number
from strands_cosmos3.embodiments import NUM_DOMAINS
from strands_cosmos3.engine.arrays import Array
from strands_cosmos3.engine.checkpoint import Checkpoint, locate
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
from strands_cosmos3.engine.graphs import Graphs, compile_layers, compiling
from strands_cosmos3.engine.options import DecodeVideo, Dtype, EngineOptions
from strands_cosmos3.engine.parallel_context import ParallelContext, SingleProcess, Vae
from strands_cosmos3.engine.precision import StepPolicy
from strands_cosmos3.engine.preflight import choose_dtype, preflight, torch_device
from strands_cosmos3.engine.quantised import (
    Quantization,
    QuantizedLinear,
    StepPrecision,
    packed_bytes,
)
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
    SequenceLayout,
    generation_positions,
    text_positions,
    unpatchify,
)
from strands_cosmos3.engine.sound import SoundDecoder, load_decoder, load_head, sound_bytes
from strands_cosmos3.engine.tokens import token_ids
from strands_cosmos3.engine.transformer import (
    ActionHead,
    Cosmos3Transformer,
    Rope,
    TextKV,
    rope_tables,
    side_by_side,
)
from strands_cosmos3.engine.vae import Novelty, PreviewDecoder, Remembered, WanVae
from strands_cosmos3.engine.variants import EARS
from strands_cosmos3.errors import (
    ActionSpaceError,
    ConfigError,
    InputError,
    ShapeError,
    VariantError,
)
from strands_cosmos3.resources import Closeable
from strands_cosmos3.types import Mode

if TYPE_CHECKING:
    from strands_cosmos3 import ParallelConfig


class Stopwatch:
    """Times named parts of one call: wall-clock time on a CPU, events in the device's current
    stream on a GPU.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._cuda = device.type == "cuda"
        self._parts: list[tuple[str, Any, Any]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body of a ``with`` statement."""
        start = self._now()
        yield
        self._parts.append((name, start, self._now()))

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds of each part and their ``total``."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        spent = {
            p: start.elapsed_time(end) if self._cuda else (end - start) * 1e3
            for p, start, end in self._parts
        }
        return {**spent, "total": sum(spent.values())}

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        # a thread's own device may be another
        event.record(torch.cuda.current_stream(self._device))
        return event


class TextCache:
    """Least-recently-used cache of :class:`TextKV` by token ids, for the weights of one engine.

    ``prefill`` computes a missing entry. A prompt above ``limit_bytes`` is not kept.
    """

    def __init__(self, limit_bytes: int, prefill: Callable[[tuple[int, ...]], TextKV]):
        self._limit = limit_bytes
        self._prefill = prefill
        self._held: OrderedDict[tuple[int, ...], TextKV] = OrderedDict()
        self.nbytes = 0
        self.prefills = 0
        self.hits = 0

    def get(self, ids: tuple[int, ...]) -> TextKV:
        """Keys and values of a prompt."""
        if ids in self._held:
            self._held.move_to_end(ids)
            self.hits += 1
            return self._held[ids]
        self.prefills += 1
        text = self._prefill(ids)
        if text.nbytes <= self._limit:
            while self.nbytes + text.nbytes > self._limit:
                self.nbytes -= self._held.popitem(last=False)[1].nbytes
            self._held[ids] = text
            self.nbytes += text.nbytes
        return text

    def clear(self) -> None:
        """Drop all prompts."""
        self._held.clear()
        self.nbytes = 0


OnStep = Callable[[int, int], None]
_TABLES = 8  # that are kept, of rope: a rollout needs one for each of its passes and prompts


def latents_of(frames: int) -> int:
    """Latent frames that pixel frames are decoded from; later ones change nothing."""
    return -(-(frames - 1) // TEMPORAL_COMPRESSION) + 1 if frames else 0


def frames_of(request: Cosmos3ActionRequest) -> int:
    """Pixel frames of a request's whole clip."""
    return (request.video_shape[0] - 1) * TEMPORAL_COMPRESSION + 1


class Cosmos3Engine(Closeable):
    """Cosmos 3 action inference on one device, or as one of several ranks that all make the same
    calls.

    Create it with :meth:`from_pretrained`. It serves one call at a time.

    Attributes:
        action_space: ``midtrain`` or ``joint_pos``; None if the checkpoint does not state it.
        options: How it computes.
        text_cache: Keys and values of recent prompts; ``prefills`` counts runs of the text tower.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        transformer: Cosmos3Transformer,
        vae: Vae,
        *,
        parallel_context: ParallelContext,
        options: EngineOptions,
        preview: PreviewDecoder | None,
        policy: StepPolicy | None = None,
        sound: SoundDecoder | None = None,
    ):
        self.options = options
        self.checkpoint = checkpoint
        self.config: TransformerConfig = checkpoint.config
        self.action_space = checkpoint.action_space
        self.transformer = transformer
        self.vae = vae
        self.parallel_context = parallel_context
        self.device = device = parallel_context.device
        self.text_cache = TextCache(options.text_cache_bytes, self._prefill)
        self._table_of = lru_cache(_TABLES)(self._generation_rope)
        self._heads: dict[int, ActionHead] = {}
        self._graphs = Graphs(device) if options.cuda_graphs else None
        if options.compile:
            compile_layers(transformer.generation)
        self._precision = StepPrecision(transformer, policy)
        self._preview = preview
        self._sound = sound
        self._latents_of = Remembered(lambda pixels: self.vae.encode(pixels))
        self._novelty_of = Novelty(preview, checkpoint.novelty_rmse)
        self._closed = False

    @classmethod
    @typed()
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | Dtype | None = None,
        parallel: ParallelConfig | None = None,
        decode_video: DecodeVideo = False,
        options: EngineOptions | None = None,
        variant: str | None = None,
        action_space: str | None = None,
        domains: Sequence[int] = (),
        revision: str | None = None,
        local_files_only: bool = False,
        verify: bool = True,
    ) -> Cosmos3Engine:
        """Load a checkpoint.

        Args:
            path_or_repo_id: A folder in the released layout or another format (docs/formats.md), a
                contract file that names one, or a hub repository (``HF_*`` variables are honoured).
            device: ``cpu``, ``cuda`` or ``cuda:N``; under torchrun, ``cuda`` is the GPU of the
                process's local rank. None is the device of ``options``, else the CPU.
            dtype: Of weights and hidden states; None is bfloat16 on CUDA and float32 on a CPU,
                ``auto`` measures (:func:`~strands_cosmos3.engine.preflight.choose_dtype`). The
                sampler and the time embedding are in float32 in any case.
            parallel: How torchrun's processes, each of which calls this, split the engine; None is
                a single process.
            decode_video: Whether predicted videos can be decoded to pixels; a request's
                ``decode_frames`` says how many frames are. If not, the VAE's decoder is not read.
                ``"preview"`` reads the checkpoint's preview decoder instead, if it has one:
                cheaper, for films (:mod:`strands_cosmos3.engine.vae`).
            options: Speed and memory; its device, dtype and ``decode_video`` count where the
                arguments of that name are not given. Its ``decode_sound`` says whether requests can
                ask for sound, which reads the parts that predict it.
            variant: Expected variant, e.g. ``nano-policy-droid``; None accepts any.
            action_space: Action space, if neither the checkpoint's name nor its metadata states it.
            domains: Action heads to read now; others are read on first use.
            revision, local_files_only: Options of a hub repository.
            verify: Whether to compare files with the recorded digests.

        Raises:
            CheckpointError: The checkpoint is damaged, is not the expected one, or does not fit;
                see the subclasses.
            ConfigError: ``parallel`` does not fit the number of processes or the transformer, or an
                option the device.
        """
        options = options or EngineOptions()
        if not hasattr(parallel, "tp_size") and parallel is not None:
            raise ConfigError(f"parallel must be a ParallelConfig or None, got {parallel!r:.80}.")
        device = torch_device(device or options.device or "cpu")
        dtype = dtype or options.dtype
        decode_video = decode_video or options.decode_video
        options.require_runnable(device.type, 1 if parallel is None else parallel.layer_ranks)
        if dtype == "auto" and parallel is not None and parallel.ranks > 1:
            raise ConfigError(
                "dtype 'auto' could differ between ranks; name one: bfloat16 or float32."
            )
        parallel_context = SingleProcess(device) if parallel is None else parallel.join(device)
        with ExitStack() as on_failure:
            on_failure.callback(parallel_context.close)
            where = parallel_context.device
            also = EARS if options.decode_sound else ()
            checkpoint = Checkpoint.open(
                locate(path_or_repo_id, revision, local_files_only, also), variant, action_space
            )
            parallel_context.require_same_checkpoint(lambda: checkpoint.digest)
            dtype = choose_dtype(dtype, where, checkpoint.config)
            quantization = Quantization.of(checkpoint.config, checkpoint.weights.eight_bit, options)
            shard = parallel_context.sharding(checkpoint.config)
            decoder = bool(decode_video)
            rank = parallel_context.rank
            heard = partial(sound_bytes, checkpoint, decoder=rank == 0)
            preflight(
                checkpoint,
                where,
                dtype,
                decoder=decoder,
                offload_text=options.offload_text,
                shard=shard,
                quantization=quantization,
                sound=heard if options.decode_sound else None,
            )
            if verify:
                checkpoint.verify()
            films = decode_video == "preview"
            preview = (
                checkpoint.load_preview(where, dtype) if films or checkpoint.novelty_rmse else None
            )
            vae = WanVae(
                checkpoint.vae_config,
                checkpoint.vae_weights,
                where,
                dtype,
                decoder,
                preview if films else None,
            )
            if vae.channels != checkpoint.config.latent_channel:
                raise VariantError(
                    f"the VAE has {vae.channels} latent channels, the transformer "
                    f"{checkpoint.config.latent_channel}: "
                    "they do not belong together."
                )
            text_device = torch.device("cpu") if options.offload_text else None
            transformer = checkpoint.load_transformer(
                where, dtype, text_device, shard, quantization
            )
            sound = None
            if options.decode_sound:
                transformer.sound = load_head(checkpoint, where, dtype)
                sound = load_decoder(checkpoint, where, dtype, decodes=rank == 0)
            parallel_context.parallelize(transformer)
            engine = cls(
                checkpoint,
                transformer,
                parallel_context.parallelize_vae(vae),
                parallel_context=parallel_context,
                options=options,
                preview=preview,
                policy=None if quantization is None else quantization.policy,
                sound=sound,
            )
            for domain in domains:
                engine.action_head(domain)
            on_failure.pop_all()
        return engine

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and hidden states."""
        return self.transformer.dtype

    @property
    def decodes_video(self) -> bool:
        """Whether results have pixels."""
        return self.vae.has_decoder

    @property
    def predicts_sound(self) -> bool:
        """Whether a request can ask for sound."""
        return self._sound is not None

    @property
    def kept_bytes(self) -> int:
        """Bytes of weights in memory, on all devices."""
        # the last may be a part of the second; each parameter counts once
        ears = None if self._sound is None else self._sound.model
        modules = filter(None, (self.transformer, self.vae.model, self._preview, ears))
        kept = sum(p.nbytes for p in torch.nn.ModuleList(modules).parameters())
        heads = sum(t.nbytes for head in self._heads.values() for t in vars(head).values())
        return kept + heads + packed_bytes(self.transformer)

    def close(self) -> None:
        """Free weights, graphs and prompts, and leave the process group; nothing can be called
        afterwards.
        """
        self.parallel_context.close()
        self.text_cache.clear()
        self._heads.clear()
        if self._graphs is not None:
            self._graphs.clear()
        self.transformer.to("meta")  # frees the parameters' memory
        torch.nn.Module.to(self.vae.model, "meta")
        self._sound = None
        self._closed = True

    @typed()
    def action_head(self, domain: int) -> ActionHead:
        """The action head of one domain, read on first use; raises InputError if the checkpoint
        has no such domain.
        """
        last = min(NUM_DOMAINS, self.config.num_embodiment_domains) - 1
        whole_number(domain, "domain", 0, last)
        if domain not in self._heads:
            self._heads[domain] = self.checkpoint.load_action_head(domain, self.device, self.dtype)
        return self._heads[domain]

    @typed()
    @torch.inference_mode()
    def take_weights(self, weights: Mapping[str, torch.Tensor], domain: int) -> None:
        """Replace weights between two calls, in place: those of the transformer by their names
        after ``transformer.``, and ``w_in``, ``b_in``, ``w_out`` and ``b_out`` of a domain's action
        head. Prompts are read again. InputError: a name or a shape is not the engine's.
        ConfigError: it keeps weights in 8 bits, which take no others.
        """
        if any(isinstance(module, QuantizedLinear) for module in self.transformer.modules()):
            raise ConfigError(
                "this engine keeps weights in 8 bits, which take no others; load it without "
                "quantize, from a checkpoint that stores none so."
            )
        own: dict[str, torch.Tensor] = dict(vars(self.action_head(domain)))
        own |= {f"transformer.{name}": p for name, p in self.transformer.named_parameters()}
        shapes = {name: tuple(weight.shape) for name, weight in own.items()}
        for name, weight in weights.items():
            if shapes.get(name) != tuple(weight.shape):
                raise InputError(
                    f"weight {name!r} has shape {tuple(weight.shape)}; the engine's has "
                    f"{shapes.get(name, 'no such name')}. Take weights of the same checkpoint."
                )
        for name, weight in weights.items():
            own[name].copy_(weight)
        self.text_cache.clear()

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
    @torch.inference_mode()
    def step_batch(
        self, requests: Sequence[Cosmos3ActionRequest], on_step: OnStep | None = None
    ) -> list[dict[str, Any]]:
        """Run several inferences in shared matrix products; in float32 each result equals
        :meth:`step`'s up to rounding.

        Requests share the latent grid, the numbers of action rows and of sound latents, and the
        noise levels. Prompts,
        pictures, states, seeds, modes, guidance, domains and rates are each request's own. Equal
        prompts are read once and the same tensor of pixels is encoded once, so that candidates made
        with ``dataclasses.replace(request, seed=...)`` share all but the denoising.

        Nothing is padded: prompts of equal length share an attention call, others have one each.

        Returns:
            The results in the order of the requests, as :meth:`step`'s; each ``timing`` is that of
            the whole batch.

        Raises:
            ShapeError, InputError: Shapes or noise levels differ; or as :meth:`step`.
        """
        if self._closed:
            raise ConfigError(
                "this engine was closed; load it again with Cosmos3Engine.from_pretrained."
            )
        if not requests:
            raise InputError("a batch needs at least one request.")
        clock = Stopwatch(self.device)
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
            result["action"] = rows[None].float().cpu()
            result["seed"] = request.seed
            results.append(result | {"action_space": self._action_space(request)})
        timing = clock.milliseconds()
        return [{**result, "timing": dict(timing)} for result in results]

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

    def _video(
        self, latents_1CFHW: torch.Tensor, frames: int, clock: Stopwatch
    ) -> dict[str, torch.Tensor]:
        result = {"video": latents_1CFHW}
        if frames:
            with clock.part("decode"):
                latents = latents_1CFHW[:, :, : latents_of(frames)]
                pixels = self.vae.decode(latents, self._novelty_of.decoded(latents[:, :, :1]))
                if pixels is not None:
                    result["pixels"] = (pixels[:, :, :frames] + 1).mul_(0.5).clamp_(0, 1)
        return result

    def _sound_latents(self, request: Cosmos3ActionRequest) -> int:
        if not request.sound:
            return 0
        if self._sound is None:
            raise InputError(
                "the request asks for sound, and this engine was loaded without what predicts it: "
                "load it with options=EngineOptions(decode_sound=True)."
            )
        return self._sound.latents(frames_of(request), request.fps)

    def _heard(
        self, latents_1CS: torch.Tensor, request: Cosmos3ActionRequest, clock: Stopwatch
    ) -> dict[str, Any]:
        result: dict[str, Any] = {"sound": latents_1CS}
        if self._sound is not None and self._sound.model is not None:
            with clock.part("sound"):
                waveform = self._sound.decode(latents_1CS, frames_of(request), request.fps)
            result |= {"waveform": waveform, "sample_rate": self._sound.rate_hz}
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
    ) -> list[torch.Tensor]:
        """For each request latents [C, F, H, W] with the given frames in place and zeros
        elsewhere. Clips of one shape are encoded together, and equal ones once.
        """
        pixels = [request.cond_video_pixels for request in requests]
        counts = [max(layout.clean_frames) * TEMPORAL_COMPRESSION + 1 for layout in layouts]
        keys = list(zip(pixels, counts, strict=True))  # a tensor is a key by reference
        clips = {(clip, count): first_of(clip, count, 2) for clip, count in keys}
        latents: dict[tuple[torch.Tensor, int], torch.Tensor] = {}
        for shape in dict.fromkeys(clip.shape for clip in clips.values()):
            alike = {key: clip for key, clip in clips.items() if clip.shape == shape}
            encoded = self._latents_of(torch.cat(list(alike.values())).to(self.device), again)
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
            clean = torch.zeros(encoded.shape[0], frames, height, width, device=self.device)
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
        prompts = [self._prompts(request) for request in requests]
        text_of = cache(self.text_cache.get)  # each prompt once, even if it is too long to be kept

        def branch(member: int, which: int) -> tuple[TextKV, Rope]:
            text = text_of(prompts[member][which])
            return text, self._table_of(layouts[member], text.tokens)

        def make(members: tuple[int, ...], guided: bool) -> Pass:
            branches = self.parallel_context.branches if guided else (0,)
            read, ropes = zip(
                *(branch(member, which) for which in branches for member in members), strict=True
            )
            cos, sin = map(torch.stack, zip(*ropes, strict=True))
            batch = [requests[member] for member in members]
            texts = side_by_side(read)
            scales = torch.tensor([r.guidance_scale for r in batch], device=self.device)
            head = self._side_by_side([self.action_head(r.domain_id) for r in batch])
            return Pass(members, guided, texts, (cos, sin), scales[:, None, None], head)

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

    def _rope(self, positions: Array) -> Rope:
        return rope_tables(positions, self.config, self.device, self.dtype)

    def _generation_rope(self, layout: SequenceLayout, text_tokens: int) -> Rope:
        return self._rope(generation_positions(layout, self.config, text_tokens))

    def _prefill(self, ids: tuple[int, ...]) -> TextKV:
        ids_S = torch.tensor(ids, device=self.device)
        return self.transformer.text(ids_S, self._rope(text_positions(len(ids))))

    @staticmethod
    def _side_by_side(heads: Sequence[ActionHead]) -> ActionHead:
        """The action head that all requests of a pass share, or their heads side by side, [R,
        ...].
        """
        if all(head is heads[0] for head in heads):
            return heads[0]
        tensors = zip(*(vars(head).values() for head in heads), strict=True)
        return ActionHead(*map(torch.stack, tensors))

    def _denoise(
        self,
        streams: tuple[Stream, ...],
        schedule: Schedule,
        passes: Sequence[tuple[Pass, ...]],
        on_step: OnStep | None,
    ) -> tuple[torch.Tensor, ...]:
        """The final tokens [R, n, P] of each stream."""
        timesteps = torch.tensor(schedule.timesteps, device=self.device)
        # [steps, D]: one row a step, not one a token
        times = self.transformer.time_embedder(timesteps).to(self.dtype)
        # a module can be hashed, which its type's declaration does not say
        steps = unipc_coefficients(schedule, torch)  # pyright: ignore[reportArgumentType]
        arguments = streams, tuple(passes), times, steps
        with compiling() if self.options.compile else nullcontext():
            if self._graphs is None:
                return self._loop(*arguments, on_step=on_step)
            answer = self._graphs(self._loop, *arguments)
        if on_step is not None:
            on_step(len(passes), len(passes))
        return answer

    def _loop(
        self,
        streams: Sequence[Stream],
        passes: Sequence[tuple[Pass, ...]],
        times: torch.Tensor,
        steps: tuple[StepCoefficients, ...],
        on_step: OnStep | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """All steps, on the device alone: a CUDA graph can hold them."""
        samplers = [UniPC(stream.start_RnP, steps) for stream in streams]
        noisy_RN1 = noisy_tokens(streams).to(self.dtype)
        for i, at_step in enumerate(passes):
            self._precision.select(i, len(passes))
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

    def _velocities(
        self, of: Pass, state: list[torch.Tensor], time: torch.Tensor, groups: Sequence[slice]
    ) -> list[torch.Tensor]:
        """Velocities of a pass for each stream's group, [requests of the pass, tokens, P], float32,
        after guidance; ``state`` is that of all requests, as in :meth:`_loop`.
        """
        if len(of.members) < len(state[0]):
            state = [torch.stack([each[member] for member in of.members]) for each in state]
        *tokens, noisy = state
        velocities = self.parallel_context.velocity(
            self.transformer, tokens, time, noisy, of.rope, of.texts, of.head, groups
        )
        if not of.guided:
            return [velocity.float() for velocity in velocities]
        velocities = self.parallel_context.exchange(velocities)
        branches = [velocity_B.float().chunk(2) for velocity_B in velocities]
        return [combine(c, u, of.scale_R11) for c, u in branches]
