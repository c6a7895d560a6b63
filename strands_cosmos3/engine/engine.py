"""Cosmos 3 inference with torch's networks, on one device or as one of several ranks.

Shape suffixes: R requests, N generation tokens, S sound tokens, D hidden; C F H W latent channels,
frames, height and width.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from strands_cosmos3.checks import typed, whole_number
from strands_cosmos3.embodiments import NUM_DOMAINS
from strands_cosmos3.engine.arrays import Array
from strands_cosmos3.engine.checkpoint import Checkpoint, locate
from strands_cosmos3.engine.denoising import Pass, Stream
from strands_cosmos3.engine.graphs import Graphs, compile_layers, compiling
from strands_cosmos3.engine.inference import Inference, OnStep, frames_of
from strands_cosmos3.engine.loading import (
    load_action_head,
    load_preview,
    load_transformer,
)
from strands_cosmos3.engine.novelty import Novelty
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
from strands_cosmos3.engine.request import Cosmos3ActionRequest
from strands_cosmos3.engine.sampler import Schedule, unipc_coefficients
from strands_cosmos3.engine.sequence import Rope
from strands_cosmos3.engine.sound import SoundDecoder, load_decoder, load_head, sound_bytes
from strands_cosmos3.engine.text_cache import TextKV
from strands_cosmos3.engine.transformer import ActionHead, Cosmos3Transformer, rope_tables
from strands_cosmos3.engine.vae import PreviewDecoder, WanVae
from strands_cosmos3.engine.variants import EARS
from strands_cosmos3.errors import ConfigError, InputError, VariantError

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


class Cosmos3Engine(Inference):
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
        device = parallel_context.device
        super().__init__(
            checkpoint,
            torch.empty(0, device=device),
            options.text_cache_bytes,
            Novelty(preview, checkpoint.novelty_rmse),
        )
        self.options = options
        self.transformer = transformer
        self.vae = vae
        self.parallel_context = parallel_context
        self._head_of: dict[int, ActionHead] = {}
        self._graphs = Graphs(device) if options.cuda_graphs else None
        if options.compile:
            compile_layers(transformer.generation)
        self._precision = StepPrecision(transformer, policy)
        self._preview = preview
        self._sound = sound

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
                load_preview(checkpoint, where, dtype) if films or checkpoint.novelty_rmse else None
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
            transformer = load_transformer(
                checkpoint, where, dtype, text_device, shard, quantization
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
        heads = sum(t.nbytes for head in self._head_of.values() for t in vars(head).values())
        return kept + heads + packed_bytes(self.transformer)

    def close(self) -> None:
        """Free weights, graphs and prompts, and leave the process group; nothing can be called
        afterwards.
        """
        self.parallel_context.close()
        self.text_cache.clear()
        self._head_of.clear()
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
        if domain not in self._head_of:
            self._head_of[domain] = load_action_head(
                self.checkpoint, domain, self.device, self.dtype
            )
        return self._head_of[domain]

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

    @torch.inference_mode()
    def step_batch(
        self, requests: Sequence[Cosmos3ActionRequest], on_step: OnStep | None = None
    ) -> list[dict[str, Any]]:
        return super().step_batch(requests, on_step)

    step_batch.__doc__ = Inference.step_batch.__doc__

    def _clock(self) -> Stopwatch:
        return Stopwatch(self.device)

    def _on_host(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.float().cpu()

    def _encoded(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.vae.encode(pixels)

    def _pixels(self, latents_1CFHW: torch.Tensor, frames: int) -> torch.Tensor | None:
        first = self._novelty_of.decoded(latents_1CFHW[:, :, :1])
        pixels = self.vae.decode(latents_1CFHW, first)
        return None if pixels is None else (pixels[:, :, :frames] + 1).mul_(0.5).clamp_(0, 1)

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

    def _rope(self, positions: Array) -> Rope:
        return rope_tables(positions, self.config, self.device, self.dtype)

    def _read_prompt(self, ids: tuple[int, ...], rope: Rope) -> TextKV:
        return self.transformer.text(torch.tensor(ids, device=self.device), rope)

    def _branches(self, guided: bool) -> tuple[int, ...]:
        return self.parallel_context.branches if guided else (0,)

    def _heads(self, domains: Sequence[int]) -> ActionHead:
        return self._side_by_side([self.action_head(domain) for domain in domains])

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
        # a module can be hashed, which its type's declaration does not say
        steps = unipc_coefficients(schedule, torch)  # pyright: ignore[reportArgumentType]
        arguments = streams, tuple(passes), self._times(schedule), steps
        with compiling() if self.options.compile else nullcontext():
            if self._graphs is None:
                return self._loop(*arguments, on_step=on_step)
            answer = self._graphs(self._loop, *arguments)
        if on_step is not None:
            on_step(len(passes), len(passes))
        return answer

    def _times(self, schedule: Schedule) -> torch.Tensor:
        timesteps = torch.tensor(schedule.timesteps, device=self.device)
        # [steps, D]: one row a step, not one a token
        return self.transformer.time_embedder(timesteps).to(self.dtype)

    def _begin_step(self, step: int, steps: int) -> None:
        self._precision.select(step, steps)

    def _velocity(
        self,
        of: Pass,
        tokens: Sequence[torch.Tensor],
        time: torch.Tensor,
        noisy_RN1: torch.Tensor,
        groups: list[slice],
    ) -> list[torch.Tensor]:
        noisy = noisy_RN1.to(self.dtype)
        velocities = self.parallel_context.velocity(
            self.transformer, tokens, time, noisy, of.rope, of.texts, of.heads, groups
        )
        if of.guided:
            velocities = self.parallel_context.exchange(velocities)
        return [velocity.float() for velocity in velocities]
