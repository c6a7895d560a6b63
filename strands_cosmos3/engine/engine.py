"""Cosmos 3 inference from request to action: encode, prefill, denoise, decode.

Shape suffixes: B guidance branches, N generation tokens, V vision tokens, T action rows (a state row included), P numbers in a
vision token, A action width, D hidden, d head width; C F H W latent channels, frames, height, width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from strands_cosmos3.embodiments import NUM_DOMAINS
from strands_cosmos3.engine.checkpoint import Checkpoint, locate
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.graphs import VelocityRunner
from strands_cosmos3.engine.parallel_context import ParallelContext, SingleProcess, Vae
from strands_cosmos3.engine.preflight import preflight
from strands_cosmos3.engine.request import Cosmos3ActionRequest, starting_noise, token_ids, widened
from strands_cosmos3.engine.sampler import Schedule, UniPC, unipc_coefficients
from strands_cosmos3.engine.sequence import (
    TEMPORAL_COMPRESSION,
    SequenceLayout,
    generation_positions,
    patchify,
    rope_tables,
    text_positions,
    unpatchify,
)
from strands_cosmos3.engine.text_cache import TextCache
from strands_cosmos3.engine.timing import Stopwatch
from strands_cosmos3.engine.transformer import ActionHead, Cosmos3Transformer, Rope, TextKV
from strands_cosmos3.engine.vae import WanVae
from strands_cosmos3.errors import ActionSpaceError, ConfigError, InputError, ShapeError, VariantError
from strands_cosmos3.types import Mode

if TYPE_CHECKING:
    from strands_cosmos3 import ParallelConfig

OnStep = Callable[[int, int], None]
_TEXT_CACHE_BYTES = 512 << 20


@dataclass(frozen=True)
class _Branches:
    """Prompts of a pass, the conditional one first, and cosine and sine [B, N, d] of the positions that follow them."""

    texts: tuple[TextKV, ...]
    rope: Rope


@dataclass(frozen=True)
class _Passes:
    """What this rank computes: its own branches at steps with guidance, the conditional one at steps without."""

    guided: tuple[bool, ...]  # one a step
    with_guidance: _Branches | None
    without: _Branches | None

    def at(self, step: int) -> _Branches:
        branches = self.with_guidance if self.guided[step] else self.without
        assert branches is not None
        return branches


@dataclass(frozen=True)
class _Sample:
    """The starting sample: given values where something is given, noise elsewhere."""

    layout: SequenceLayout
    vision_VP: torch.Tensor
    action_TA: torch.Tensor
    vision_free: torch.Tensor  # [V, P], 1 where the sampler writes
    action_free: torch.Tensor  # [T, A]
    noisy_N1: torch.Tensor  # 1 where the time embedding is added


class Cosmos3Engine:
    """Cosmos 3 action inference on one device, or as one of several ranks that all make the same calls.

    Create it with :meth:`from_pretrained`. It serves one call at a time.

    Attributes:
        action_space: ``midtrain`` or ``joint_pos``; None if the checkpoint does not state it.
        text_cache: Keys and values of recent prompts; ``prefills`` counts runs of the text tower.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        transformer: Cosmos3Transformer,
        vae: Vae,
        device: torch.device,
        *,
        parallel_context: ParallelContext | None = None,
        text_cache_bytes: int = _TEXT_CACHE_BYTES,
        offload_text: bool = False,
        cuda_graphs: bool = False,
    ):
        self.checkpoint = checkpoint
        self.config: TransformerConfig = checkpoint.config
        self.action_space = checkpoint.action_space
        self.transformer = transformer
        self.vae = vae
        self.device = device
        self.parallel_context = SingleProcess(device) if parallel_context is None else parallel_context
        self.text_cache = TextCache(text_cache_bytes, self._prefill)
        self._offload_text = offload_text
        self._heads: dict[int, ActionHead] = {}
        self._runner = VelocityRunner(transformer, cuda_graphs and device.type == "cuda")
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        parallel: ParallelConfig | None = None,
        decode_video: bool = False,
        variant: str | None = None,
        action_space: str | None = None,
        domains: Sequence[int] = (),
        revision: str | None = None,
        local_files_only: bool = False,
        verify: bool = True,
        text_cache_bytes: int = _TEXT_CACHE_BYTES,
        offload_text: bool = False,
        cuda_graphs: bool = False,
    ) -> Cosmos3Engine:
        """Load a checkpoint.

        Args:
            path_or_repo_id: A folder in the released layout, or a hub repository (``HF_*`` variables are honoured).
            device: ``cpu``, ``cuda`` or ``cuda:N``; under torchrun, ``cuda`` is the GPU of the process's local rank.
            dtype: Of weights and hidden states; None is bfloat16 on CUDA and float32 on a CPU. The sampler and the time
                embedding are in float32 in any case.
            parallel: How torchrun's processes, each of which calls this, split the engine; None is a single process.
            decode_video: Whether to decode predicted videos to pixels. If not, the VAE's decoder is not read.
            variant: Expected variant, e.g. ``nano-policy-droid``; None accepts any.
            action_space: Action space, if neither the checkpoint's name nor its metadata states it.
            domains: Action heads to read now; others are read on first use.
            revision, local_files_only: Options of a hub repository.
            verify: Whether to compare files with the recorded digests.
            text_cache_bytes: Bytes of prompts' keys and values to keep across calls.
            offload_text: Whether the text tower stays in host memory except while it reads a new prompt.
            cuda_graphs: Whether to replay CUDA graphs, one for each shape and branch (CUDA only).

        Raises:
            CheckpointError: The checkpoint is damaged, is not the expected one, or does not fit; see the subclasses.
            ConfigError: ``parallel`` does not fit the number of processes or the transformer.
        """
        parallel_context = SingleProcess(torch.device(device)) if parallel is None else parallel.join(torch.device(device))
        with ExitStack() as on_failure:
            on_failure.callback(parallel_context.close)
            where = parallel_context.device
            dtype = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
            checkpoint = Checkpoint.open(locate(path_or_repo_id, revision, local_files_only), variant, action_space)
            parallel_context.check(checkpoint.config)
            preflight(checkpoint, where, dtype, decoder=decode_video, offload_text=offload_text, shard=parallel_context.shard)
            if verify:
                checkpoint.verify()
            vae = WanVae(checkpoint.vae_config, checkpoint.vae_weights, where, dtype, decode_video)
            if vae.channels != checkpoint.config.latent_channel:
                raise VariantError(
                    f"the VAE has {vae.channels} latent channels, the transformer {checkpoint.config.latent_channel}: "
                    "they do not belong together."
                )
            text_device = torch.device("cpu") if offload_text else None
            transformer = checkpoint.load_transformer(where, dtype, text_device, parallel_context.shard)
            parallel_context.parallelize(transformer)
            engine = cls(
                checkpoint,
                transformer,
                parallel_context.parallelize_vae(vae),
                where,
                parallel_context=parallel_context,
                text_cache_bytes=text_cache_bytes,
                offload_text=offload_text,
                cuda_graphs=cuda_graphs,
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
    def kept_bytes(self) -> int:
        """Bytes of weights in memory, on all devices."""
        held = [*self.transformer.parameters(), *self.vae.model.parameters()]
        held += [t for head in self._heads.values() for t in vars(head).values()]
        return sum(t.numel() * t.element_size() for t in held)

    def close(self) -> None:
        """Free weights, graphs and prompts, and leave the process group; nothing can be called afterwards."""
        self.parallel_context.close()
        self.text_cache.clear()
        self._heads.clear()
        self._runner.clear()
        self.transformer.to("meta")  # frees the parameters' memory
        torch.nn.Module.to(self.vae.model, "meta")
        self._closed = True

    def __enter__(self) -> Cosmos3Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def action_head(self, domain: int) -> ActionHead:
        """The action head of one domain, read on first use; raises InputError if the checkpoint has no such domain."""
        if not 0 <= domain < min(NUM_DOMAINS, self.config.num_embodiment_domains):
            raise InputError(f"domain {domain}: this checkpoint has 0..{self.config.num_embodiment_domains - 1}.")
        if domain not in self._heads:
            self._heads[domain] = self.checkpoint.load_action_head(domain, self.device, self.dtype)
        return self._heads[domain]

    @torch.inference_mode()
    def step(self, request: Cosmos3ActionRequest, on_step: OnStep | None = None) -> dict[str, Any]:
        """Run one inference.

        Args:
            on_step: Called after each denoising step with (steps done, total steps).

        Returns:
            ``action`` [1, chunk, raw_action_dim], float32 on the CPU, in the model's scale (in forward dynamics the given
            actions); ``video`` [1, C, F, H, W] latents, float32 on the device, unless ``return_video`` is off; ``pixels``
            [1, 3, frames, height, width] in [0, 1] if the engine decodes, on rank 0 only; ``seed``; ``action_space``;
            ``timing``, milliseconds by part.

        Raises:
            ActionSpaceError: The request asks for another action space than the checkpoint's.
            InputError: A shape does not fit the checkpoint, or state and action space contradict each other.
        """
        if self._closed:
            raise ConfigError("this engine was closed; load it again with Cosmos3Engine.from_pretrained.")
        clock = Stopwatch(self.device)
        space = self._action_space(request)
        request = replace(request, return_video=request.return_video or self.decodes_video)
        with clock.part("encode"):
            layout = self._layout(request, space)
            clean = self._encode(request, layout)
        with clock.part("text"):
            schedule = self.checkpoint.scheduler.schedule(
                request.num_inference_steps, request.flow_shift, request.use_karras_sigmas
            )
            passes = self._passes(request, layout, schedule)
        with clock.part("denoise"):
            sample = self._sample(request, layout, clean)
            vision_VP, action_TA = self._denoise(request, schedule, sample, passes, on_step)
        result = self._video(vision_VP, layout, clock) if request.return_video else {}
        result["action"] = action_TA[-request.action_chunk :, : request.raw_action_dim][None].float().cpu()
        return {**result, "seed": request.seed, "action_space": space, "timing": clock.milliseconds()}

    def _video(self, vision_VP: torch.Tensor, layout: SequenceLayout, clock: Stopwatch) -> dict[str, Any]:
        video = unpatchify(vision_VP, layout.latent_shape, layout.patch)[None]
        if not self.decodes_video:
            return {"video": video}
        with clock.part("decode"):
            pixels = self.vae.decode(video)
            return {"video": video} | ({} if pixels is None else {"pixels": ((pixels + 1) / 2).clamp(0, 1)})

    def _action_space(self, request: Cosmos3ActionRequest) -> str:
        requested, own = request.action_space, self.action_space
        if requested and own and requested != own:
            raise ActionSpaceError(
                f"the request asks for {requested!r} actions, but this checkpoint emits {own!r}; midtrain rows are "
                "normalised pose deltas, joint_pos rows are raw joint angles."
            )
        space = requested or own
        if space is None:
            raise VariantError(
                "the checkpoint does not state its action space; pass action_space='midtrain' (normalised pose "
                "deltas) or 'joint_pos' (raw joint angles with a state row)."
            )
        if request.action_prefix is None and space == "joint_pos":
            raise InputError("joint_pos needs the state as the first row of action_prefix: [q1..q7, gripper open].")
        if request.action_prefix is None and self.checkpoint.state_row is not None:
            raise InputError(
                "this checkpoint's sequence starts with a state row: give the measured pose and gripper opening, scaled, as "
                "the first row of action_prefix (Cosmos3PolicyProcessor.for_checkpoint does, from `state`)."
            )
        return space

    def _layout(self, request: Cosmos3ActionRequest, space: str) -> SequenceLayout:
        state_rows = 1 if space == "joint_pos" or self.checkpoint.state_row is not None else 0
        rows, frames = request.action_chunk + state_rows + request.history_rows, request.video_shape[0]
        if request.raw_action_dim > self.config.action_dim:
            raise ShapeError(f"raw_action_dim {request.raw_action_dim} exceeds the model's {self.config.action_dim}.")
        clean_rows = 0 if request.action_prefix is None else len(request.action_prefix)
        if clean_rows < request.history_rows + state_rows:
            raise InputError(f"action_prefix has {clean_rows} rows; it needs {request.history_rows} of history and the state.")
        if clean_rows > rows:
            raise ShapeError(f"action_prefix has {clean_rows} rows, the sequence only {rows}.")
        given_frames = request.cond_frame_indexes
        if given_frames is None and request.mode is Mode.INVERSE_DYNAMICS:
            given_frames = range(frames)
        return SequenceLayout(
            latent_shape=request.video_shape,
            patch=self.config.latent_patch_size,
            action_rows=rows,
            clean_frames=tuple(sorted({*(given_frames or (0,))})),
            clean_rows=rows if request.mode is Mode.FORWARD_DYNAMICS else clean_rows,
            raw_action_dim=request.raw_action_dim,
            fps=request.fps,
            action_offset=(0 if state_rows else 1) - request.history_rows,
        )

    def _encode(self, request: Cosmos3ActionRequest, layout: SequenceLayout) -> torch.Tensor:
        """Latents [C, F, H, W] with the given frames in place and zeros elsewhere."""
        frames, height, width = layout.latent_shape
        wanted = max(layout.clean_frames) * TEMPORAL_COMPRESSION + 1
        pixels = request.cond_video_pixels
        if pixels.shape[2] < wanted:
            pixels = torch.cat([pixels, pixels[:, :, -1:].expand(-1, -1, wanted - pixels.shape[2], -1, -1)], dim=2)
        latents = self.vae.encode(pixels[:, :, :wanted].to(self.device))[0]
        if latents.shape[2] < height or latents.shape[3] < width:
            raise ShapeError(
                f"video_shape {layout.latent_shape} is larger than the canvas's latents {list(latents.shape[1:])}."
            )
        clean = torch.zeros(latents.shape[0], frames, height, width, device=self.device)
        for i in layout.clean_frames:
            clean[:, i] = latents[:, i, :height, :width]
        return clean

    def _passes(self, request: Cosmos3ActionRequest, layout: SequenceLayout, schedule: Schedule) -> _Passes:
        vocab = self.config.vocab_size
        prompts = [token_ids(request.text_ids, request.text_mask, "text_ids", vocab)]
        if request.guidance_scale != 1:
            assert request.neg_text_ids is not None  # the request checked it
            prompts.append(token_ids(request.neg_text_ids, request.neg_text_mask, "neg_text_ids", vocab))
        guides = [len(prompts) == 2 and _guides(request.guidance_interval, t) for t in schedule.timesteps]
        own = self.parallel_context.branches if any(guides) else ()
        needed = sorted({*own, *(() if all(guides) else (0,))})
        texts = {i: self.text_cache.get(prompts[i]) for i in needed}
        tables = {i: self._rope(generation_positions(layout, self.config, texts[i].tokens)) for i in needed}

        def branches(which: Sequence[int]) -> _Branches:
            cos, sin = (torch.stack(table) for table in zip(*(tables[i] for i in which), strict=True))
            return _Branches(tuple(texts[i] for i in which), (cos, sin))

        return _Passes(tuple(guides), branches(own) if own else None, branches((0,)) if 0 in needed else None)

    def _rope(self, positions: torch.Tensor) -> Rope:
        return rope_tables(positions, self.config, self.device, self.dtype)

    def _prefill(self, ids: tuple[int, ...]) -> TextKV:
        tower = self.transformer.text.to(self.device)
        text = tower(torch.tensor(ids, device=self.device), self._rope(text_positions(len(ids))))
        if self._offload_text:
            tower.to("cpu")
        return text

    def _sample(self, request: Cosmos3ActionRequest, layout: SequenceLayout, clean: torch.Tensor) -> _Sample:
        patch, shape, V = layout.patch, (self.config.latent_channel, *layout.latent_shape), layout.vision_tokens
        per_frame = V // layout.latent_shape[0]
        vision_free, noisy = torch.ones(shape), torch.ones(layout.tokens, 1)
        for i in layout.clean_frames:
            vision_free[:, i] = 0
            noisy[i * per_frame : (i + 1) * per_frame] = 0
        noisy[V : V + layout.clean_rows] = 0
        vision_free = patchify(vision_free, patch).to(self.device)  # padding of an odd edge is not free either
        noise = starting_noise(request.video_noise, request.seed, shape, "video_noise").to(self.device)
        action_free = torch.zeros(layout.action_rows, self.config.action_dim)
        action_free[layout.clean_rows :, : layout.raw_action_dim] = 1
        action_free = action_free.to(self.device)
        row_noise = starting_noise(request.action_noise, request.seed, tuple(action_free.shape), "action_noise")
        given = torch.zeros_like(action_free)
        if (known := self._known_rows(request, layout)) is not None:
            given[: len(known), : known.shape[1]] = known
        return _Sample(
            layout,
            torch.where(vision_free > 0, patchify(noise, patch), patchify(clean, patch)),
            torch.where(action_free > 0, row_noise.to(self.device), given),
            vision_free,
            action_free,
            noisy.to(self.device, self.dtype),
        )

    def _known_rows(self, request: Cosmos3ActionRequest, layout: SequenceLayout) -> torch.Tensor | None:
        """Given action rows from the first on; in forward dynamics history and state row, if any, and then the whole chunk."""
        prefix, actions = request.action_prefix, request.cond_action
        if actions is None:
            return None if prefix is None else prefix.to(self.device, torch.float32)
        missing = max(request.action_chunk - len(actions), 0)
        actions = torch.cat([actions, actions[-1:].expand(missing, -1)])[: request.action_chunk]
        before = layout.action_rows - request.action_chunk  # history and state
        if before and prefix is not None:
            actions = torch.cat([widened(prefix[:before], actions.shape[1]), actions])
        return actions.to(self.device, torch.float32)

    def _denoise(
        self, request: Cosmos3ActionRequest, schedule: Schedule, sample: _Sample, passes: _Passes, on_step: OnStep | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps = unipc_coefficients(schedule)
        timesteps = torch.tensor(schedule.timesteps, device=self.device)
        times = self.transformer.time_embedder(timesteps).to(self.dtype)  # [steps, D]: one row a step, not one a token
        head = self.action_head(request.domain_id)
        vision, action = UniPC(sample.vision_VP, steps), UniPC(sample.action_TA, steps)
        layout, count = sample.layout, len(steps)
        action_group = layout.noisy_action
        rows = slice(action_group.start - layout.vision_tokens, layout.action_rows)
        for i in range(count):
            vision_group = layout.noisy_vision if request.return_video or i + 1 < count else slice(0, 0)
            now, groups = passes.at(i), (vision_group, action_group)
            velocities = self._runner(
                vision.sample, action.sample, times[i], sample.noisy_N1, now.rope, now.texts, head, *groups
            )
            if passes.guided[i]:
                velocities = self.parallel_context.exchange(velocities)
            of_vision, of_action = (_combine(v_B, request.guidance_scale) for v_B in velocities)
            if vision_group.stop > vision_group.start:
                _advance(vision, of_vision, vision_group, sample.vision_free, sample.vision_VP)
            if action_group.stop > action_group.start:
                _advance(action, of_action, rows, sample.action_free, sample.action_TA)
            if on_step is not None:
                on_step(i + 1, count)
        return vision.sample, action.sample


def _advance(state: UniPC, velocity: torch.Tensor, rows: slice, free: torch.Tensor, given: torch.Tensor) -> None:
    """One sampler step with the velocity of some tokens; given values are restored."""
    whole = torch.zeros_like(state.sample)
    whole[rows] = velocity
    state.sample = torch.where(free > 0, state.step(whole * free), given)


def _combine(velocity_B: torch.Tensor, scale: float) -> torch.Tensor:
    """Guidance ``u + g (c - u)`` of velocities [B, ...], float32; the conditional velocity if it is the only one."""
    conditional, *rest = velocity_B.float()
    return rest[0] + scale * (conditional - rest[0]) if rest else conditional


def _guides(interval: tuple[float, float] | None, timestep: int) -> bool:
    return interval is None or interval[0] < timestep < interval[1]
