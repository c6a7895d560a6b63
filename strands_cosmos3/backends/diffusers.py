"""The stock diffusers pipeline as a backend, with the inputs that the model was trained on.

By default the pipeline squeezes 540 rows to 528, uses a caption without DROID's layout sentence,
and samples on the checkpoint's Karras schedule. Here pictures are scaled once, the caption is this
package's, the schedule is the preset's, and each call has its own generator. It cannot take a state
row, so it answers ``midtrain`` only.
"""

from __future__ import annotations

import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.backends.devices import resolve_device
from strands_cosmos3.backends.model_input import ModelInput, as_path
from strands_cosmos3.backends.options import BackendOptions
from strands_cosmos3.engine.checkpoint import Checkpoint, locate
from strands_cosmos3.engine.preflight import choose_dtype
from strands_cosmos3.engine.request import Cosmos3ActionRequest
from strands_cosmos3.engine.sound import load_decoder
from strands_cosmos3.engine.variants import EARS
from strands_cosmos3.errors import BackendError, VariantError
from strands_cosmos3.extras import needed_by
from strands_cosmos3.films import Sound
from strands_cosmos3.types import ActionChunk, Mode, Request


class DiffusersBackend(Backend):
    """Answers with ``Cosmos3OmniPipeline``.

    Args:
        model: A checkpoint's folder or hub repository.
        options: How to load and sample. A guidance interval is not supported by the pipeline.
        action_space: The checkpoint's action space, if neither its name nor its metadata states it.

    Raises:
        CheckpointError: The checkpoint cannot be loaded, or its action space is ``joint_pos``.
        MissingDependencyError: diffusers is not installed, or accelerate, without which it cannot
            load this model.
    """

    def __init__(
        self,
        model: str | Path,
        options: BackendOptions = BackendOptions(),
        action_space: str | None = None,
    ):
        self._decodes_video = options.engine.decode_video
        sound = options.engine.decode_sound
        root = locate(as_path(model, "diffusers"), also=EARS if sound else ())
        checkpoint = Checkpoint.open(root, action_space=action_space)
        checkpoint.require_released("diffusers' pipeline")
        if checkpoint.action_space == "joint_pos" or checkpoint.state_row is not None:
            raise VariantError(
                f"{root} has action space {checkpoint.action_space!r} and starts from a state "
                "row, which diffusers' pipeline "
                "cannot take. Use backend='native'."
            )
        self.info = BackendInfo(
            name="diffusers",
            action_space=checkpoint.require_space(),
            language=checkpoint.language,
            sound=sound,
        )
        self._checkpoint = checkpoint
        self._input = ModelInput(checkpoint, options)
        self._device = resolve_device(options.engine)
        dtype = choose_dtype(options.engine.dtype, self._device, checkpoint.config)
        tokenizer = load_decoder(checkpoint, self._device, dtype).model if sound else None
        self._pipe: Any = _load(root, dtype, tokenizer).to(self._device)

    @property
    def model_sha256(self) -> str:
        return self._checkpoint.digest

    def infer(self, request: Request) -> ActionChunk:
        """Return the chunk for a request.

        Raises:
            BackendError: The request has no picture, is not of mode ``policy``, asks for guidance
                on some steps only, or for a sound that was not loaded; or the checkpoint declares a
                shorter clip.
        """
        if request.mode is not Mode.POLICY:
            raise BackendError(
                f"backend 'diffusers' answers mode 'policy'; {str(request.mode)!r} "
                "needs backend='native'."
            )
        (engine_request,) = self._input([request], self.info.name)
        if engine_request.guidance_interval is not None:
            raise BackendError(
                "diffusers' pipeline guides every step; a guidance interval needs backend='native'."
            )
        if request.sound and not self.info.sound:
            raise BackendError(
                "the request asks for sound, which this backend was loaded without; make it with "
                "sound=True."
            )
        if engine_request.video_shape[0] != engine_request.action_chunk // 4 + 1:
            raise BackendError(
                "diffusers' pipeline denoises rows + 1 frames, and this checkpoint declares "
                f"policy_frames {self._checkpoint.policy_frames[0]}: use backend='native'."
            )
        if request.action_space.name != "midtrain":
            raise BackendError(
                f"diffusers' pipeline answers 'midtrain', not {request.action_space.name!r}."
            )
        started = time.perf_counter()
        out = self._run(request, engine_request)
        total_ms = (time.perf_counter() - started) * 1e3
        video = None
        if self._decodes_video:
            video = (np.asarray(out.video) * 255).round().clip(0, 255).astype(np.uint8)
            video = video[: request.decode_frames]
        sound = None
        if request.sound:
            hz = self._pipe.sound_tokenizer.config.sampling_rate
            samples = int((engine_request.action_chunk + 1) / engine_request.fps * hz)
            sound = Sound(out.sound[:, :samples].float().cpu().numpy(), hz)
        return ActionChunk(
            out.action[0].double().numpy(),
            request.action_space,
            request.embodiment,
            fps=engine_request.fps,
            seed=request.seed,
            timing={"total_ms": total_ms},
            video=video,
            sound=sound,
            quantiles=self._input.quantiles(request),
        )

    def _run(self, request: Request, engine_request: Cosmos3ActionRequest) -> Any:
        from diffusers import UniPCMultistepScheduler  # pyright: ignore[reportPrivateImportUsage]
        from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import CosmosActionCondition

        pipe = self._pipe
        flow = {"use_karras_sigmas": False, "flow_shift": engine_request.flow_shift}
        pipe.scheduler = cast("Any", UniPCMultistepScheduler).from_config(
            {**pipe.scheduler.config, **flow}
        )
        assert engine_request.neg_text_ids is not None  # a processor made it
        ids = [
            [int(i) for i in prompt[0]]
            for prompt in (engine_request.text_ids, engine_request.neg_text_ids)
        ]

        def tokenize(*_: Any, **__: Any) -> Any:
            return ids

        pipe.tokenize_prompt = tokenize
        condition = CosmosActionCondition(
            mode="policy",
            chunk_size=engine_request.action_chunk,
            domain_name=request.embodiment.name,
            resolution_tier=self._input.tier,
            image=Image.fromarray(np.array(request.composite)),
        )
        return pipe(
            prompt=request.instruction,  # of which tokenize_prompt makes nothing
            action=condition,
            fps=engine_request.fps,
            num_inference_steps=engine_request.num_inference_steps,
            guidance_scale=engine_request.guidance_scale,
            generator=torch.Generator(self._device).manual_seed(request.seed),
            output_type="np" if self._decodes_video else "latent",
            enable_sound=request.sound,
        )

    def close(self) -> None:
        """Free the weights; calling it twice is harmless."""
        self._pipe = None


def _load(root: Path, dtype: torch.dtype, sound_tokenizer: Any = None) -> Any:
    with needed_by("backend 'diffusers'"):
        from diffusers import Cosmos3OmniPipeline  # pyright: ignore[reportPrivateImportUsage]
        from diffusers.video_processor import VideoProcessor

        import_module("accelerate")  # diffusers needs it, and says so in a way that does not help
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = cast("Any", Cosmos3OmniPipeline).from_pretrained(
            root,
            torch_dtype=dtype,
            enable_safety_checker=False,
            sound_tokenizer=sound_tokenizer,
        )
    pipe.set_progress_bar_config(disable=True)
    pipe.register_to_config(use_native_flow_schedule=True)
    pipe.video_processor = VideoProcessor(
        vae_scale_factor=pipe.vae_scale_factor_spatial, do_resize=False
    )
    return pipe
