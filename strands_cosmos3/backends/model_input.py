"""Make a model's input from a request, for every backend that runs a model in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.decode import encode_pose_delta
from strands_cosmos3.backends.options import BackendOptions
from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import CameraRig, Sampling
from strands_cosmos3.engine.arrays import Array
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.formats.acting import require_acting, row_quantiles
from strands_cosmos3.engine.frames import compose_views
from strands_cosmos3.engine.processor import DEFAULT_TIER, Clip, Cosmos3PolicyProcessor
from strands_cosmos3.engine.request import Cosmos3ActionRequest, fields_of
from strands_cosmos3.errors import BackendError, InputError
from strands_cosmos3.types import Mode, Request


class ModelInput:
    """Makes the engine's requests of a policy's, with one processor for each embodiment, action
    space and number of rows.

    Args:
        checkpoint: Source of tokenizer, prompt format and presets.
        options: Options that override them.
        processing: Further arguments of its processors.

    Raises:
        StatisticsError: The checkpoint's own statistics cannot be read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: BackendOptions,
        processing: Mapping[str, Any] = MappingProxyType({}),
    ):
        self._checkpoint = checkpoint
        self._processing = processing
        self._options = options
        self._sampling = options.sampling
        self._stats = checkpoint.action_stats()
        language = checkpoint.language
        # a control loop says the same with every picture
        self._understood = None if language is None else lru_cache(64)(language.understand)
        self._processors: dict[tuple[str, str, int], Cosmos3PolicyProcessor] = {}

    def __call__(
        self,
        requests: Sequence[Request],
        backend: str,
        recorded: bool = False,
        decodes_video: bool = False,
    ) -> list[Cosmos3ActionRequest]:
        """Return the engine's request for each. Those that share a picture share its pixels.

        Args:
            requests: What a policy asks.
            backend: Name of the backend, for messages.
            recorded: Whether to sample as the checkpoint records, whatever the options.
            decodes_video: Whether the engine has a decoder, for the frames that are wanted.

        Raises:
            ContractError: The checkpoint does not state what its actions mean, or means others than
                the request.
            BackendError: A request lacks a picture, joint angles or the measured pose.
            InputError: Picture, state, instruction or action prefix cannot be used.
            InstructionError: A checkpoint that declares its language does not understand the
                instruction.
        """
        engine_requests: list[Cosmos3ActionRequest] = []
        clips: list[tuple[Any, Clip]] = []
        for request in requests:
            require_acting(
                self._checkpoint, request.embodiment, request.action_space, self._sampling.stated
            )
            task = self._task(request)
            processor = self._processor(request)
            call = processor.settings(request.mode)
            picture = self._picture(request, processor, backend)
            state = self._state(request)
            clip = next((clip for other, clip in clips if other is picture), None)
            if clip is None:
                clip = processor.clip(call, picture)
                clips.append((picture, clip))
            sampled = {
                **fields_of(self.sampling(request, recorded)),
                "seed": request.seed,
                "use_karras_sigmas": not recorded and self._sampling.karras,
                "return_video": False,  # pixels are wanted, as many as are decoded
                "decode_frames": request.decode_frames if decodes_video else 0,
                "sound": request.sound,
            }
            engine_request = processor.request(
                call,
                clip,
                request.prompt or ("" if task is None else processor.caption(call, clip, task)),
                state=state,
                cond_action=request.conditioning_actions,
                action_prefix=request.action_prefix,
                sampled=sampled,
            )
            engine_requests.append(engine_request)
        return engine_requests

    def _task(self, request: Request) -> str | None:
        """Return what the caption is composed around; None if the request has its caption, or the
        checkpoint takes none.
        """
        textless = self._checkpoint.dynamics_without_text and request.mode is not Mode.POLICY
        if request.prompt or textless:
            return None
        if not request.instruction.strip():
            raise InputError(
                "the instruction is blank; say what is to be done, e.g. 'pick up the red cube'."
            )
        if self._understood is not None and self._options.check_language:
            return self._understood(request.instruction)
        return request.instruction

    def _state(self, request: Request) -> list[Any] | None:
        """Return the state row of a sequence that has one: joint angles, or the measured pose."""
        if request.action_space.state_row:
            if request.q_rad is None:
                raise BackendError(
                    f"{request.action_space.name!r} starts from the joint angles, and the request "
                    "has none."
                )
            return [*request.q_rad.tolist(), request.gripper]
        if self._checkpoint.state_row is None:
            return None
        if request.T_base_cosmos is None:
            raise BackendError(
                "the checkpoint starts from the measured pose, but the request has none; name "
                "a robot, e.g. robot='panda'."
            )
        return [*encode_pose_delta(request.T_base_cosmos).tolist(), request.gripper]

    def compose(self, views: Mapping[str, Any], rig: CameraRig) -> NDArray[np.uint8]:
        """Return the composite of a rig's views as the checkpoint, or the option, wants it, no
        larger than the canvas.
        """
        composition = self._sampling.composition or self._checkpoint.composition
        return compose_views(views, rig, composition, self.tier)

    @property
    def tier(self) -> int:
        """The resolution tier."""
        stated = self._checkpoint.metadata.get("resolution_tier")
        return self._sampling.image_size or stated or DEFAULT_TIER

    @staticmethod
    def _picture(request: Request, processor: Cosmos3PolicyProcessor, backend: str) -> Any:
        """Return the picture or frames that are given; a request's own by reference."""
        if request.mode is Mode.INVERSE_DYNAMICS:
            film = request.clip
            is_file = isinstance(film, str | Path)
            return processor.read_film(film, request.mode) if is_file else film
        if request.composite is None:
            raise BackendError(
                f"backend {backend!r} needs a picture: the request has no composite."
            )
        return request.composite

    def quantiles(self, request: Request) -> tuple[F64, F64] | None:
        """Return the checkpoint's own q01 and q99, or what its normalisation maps to -1 and 1, if
        it states any.

        Raises:
            StatisticsError: They are of another domain, or lack the normalisation's figures.
        """
        return row_quantiles(
            self._checkpoint, self._stats, request.embodiment, request.action_space
        )

    def sampling(self, request: Request, recorded: bool = False) -> Sampling:
        """Return how to sample for a request; ``recorded``: as the checkpoint records, whatever
        the options.
        """
        options = Sampling() if recorded else self._sampling
        return self._checkpoint.resolve_sampling(
            request.embodiment, request.action_space.name, options, request.mode
        )

    def _processor(self, request: Request) -> Cosmos3PolicyProcessor:
        key = request.embodiment.name, request.action_space.name, request.n_rows
        if key not in self._processors:
            frames = self._sampling.policy_frames
            engine = self._options.engine
            perceived = engine.decode_video or engine.decode_sound
            if frames is None and perceived and not self._checkpoint.future_from_actions:
                frames = max(self._checkpoint.policy_frames, default=None)
            options: dict[str, Any] = {**self._sampling.of_processor, "policy_frames": frames}
            self._processors[key] = Cosmos3PolicyProcessor.for_checkpoint(
                self._checkpoint,
                domain_name=request.embodiment.name,
                action_space=request.action_space.name,
                action_chunk_size=request.n_rows,
                **{**options, **self._processing},
            )
        return self._processors[key]


def as_pictures(pixels: Array) -> NDArray[np.uint8]:
    """[F, H, W, 3] uint8 of pixels [1, 3, F, H, W] in [0, 1]."""
    if not isinstance(pixels, np.ndarray):
        levels = (pixels[0].permute(1, 2, 3, 0) * 255).round_()
        # torch converts floats to bytes more slowly than by way of int16
        return levels.short().byte().cpu().numpy()
    return np.rint(pixels[0].transpose(1, 2, 3, 0) * np.float32(255)).astype(np.uint8)


def as_path(model: Any, backend: str) -> str | Path:
    """The model as a path or repository id.

    Raises:
        BackendError: It is neither.
    """
    if not isinstance(model, str | Path):
        raise BackendError(
            f"backend {backend!r} needs model= a checkpoint's folder or hub "
            f"repository, got {model!r}."
        )
    return model
