"""Make a model's input from a request, for every backend that runs a model in this process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strands_cosmos3.actions.decode import encode_pose_delta
from strands_cosmos3.backends.options import BackendOptions
from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import CameraRig, Sampling
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.formats.acting import require_acting, row_quantiles
from strands_cosmos3.engine.frames import compose_views
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.engine.preflight import torch_device
from strands_cosmos3.engine.processor import (
    DEFAULT_TIER,
    Cosmos3PolicyProcessor,
    ProcessedInput,
)
from strands_cosmos3.errors import BackendError, InputError
from strands_cosmos3.types import Mode, Request


def resolve_device(options: EngineOptions) -> torch.device:
    """Return the device: CUDA if torch sees a GPU, else the CPU; the option wins."""
    return torch_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


class ModelInput:
    """Makes processed inputs of requests, with one processor for each embodiment and action space.

    Args:
        checkpoint: Source of tokenizer, prompt format and presets.
        options: Options that override them.

    Raises:
        StatisticsError: The checkpoint's own statistics cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint, options: BackendOptions):
        self._checkpoint = checkpoint
        self._options = options
        self._sampling = options.sampling
        self._stats = checkpoint.action_stats()
        language = checkpoint.language
        # a control loop says the same with every picture
        self._understood = None if language is None else lru_cache(64)(language.understand)
        self._processors: dict[tuple[str, str, int], Cosmos3PolicyProcessor] = {}

    def __call__(self, request: Request, backend: str) -> ProcessedInput:
        """Return the input for a request.

        Raises:
            ContractError: The checkpoint does not state what its actions mean, or means others than
                the request.
            BackendError: The request lacks a picture, joint angles or the measured pose.
            InputError: Picture, state or instruction cannot be used.
            InstructionError: A checkpoint that declares its language does not understand the
                instruction.
        """
        require_acting(
            self._checkpoint, request.embodiment, request.action_space, self._sampling.stated
        )
        textless = self._checkpoint.dynamics_without_text and request.mode is not Mode.POLICY
        task = request.instruction
        if not request.prompt and not textless:
            if not task.strip():
                raise InputError(
                    "the instruction is blank; say what is to be done, e.g. 'pick up the red cube'."
                )
            if self._understood is not None and self._options.check_language:
                task = self._understood(task)
        raw: dict[str, Any] = {
            "task": task,
            "mode": request.mode,
            "images": self._frames(request, backend),
            "cond_action": request.conditioning_actions,
            "action_prefix": request.action_prefix,
            "caption": request.prompt or ("" if textless else None),
        }
        if request.action_space.state_row:
            if request.q_rad is None:
                raise BackendError(
                    f"{request.action_space.name!r} starts from the joint angles, and the request "
                    "has none."
                )
            raw["state"] = [*request.q_rad.tolist(), request.gripper]
        elif self._checkpoint.state_row is not None:
            if request.T_base_cosmos is None:
                raise BackendError(
                    "the checkpoint starts from the measured pose, but the request has none; name "
                    "a robot, e.g. robot='panda'."
                )
            raw["state"] = [*encode_pose_delta(request.T_base_cosmos).tolist(), request.gripper]
        return self._processor(request).preprocess(raw)

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

    def _frames(self, request: Request, backend: str) -> Any:
        if request.mode is Mode.INVERSE_DYNAMICS:
            clip = request.clip
            if not isinstance(clip, str | Path):
                return clip
            return self._processor(request).read_film(clip, request.mode)
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
            filmed = self._options.engine.decode_video and not self._checkpoint.future_from_actions
            if frames is None and filmed:
                frames = max(self._checkpoint.policy_frames, default=None)
            self._processors[key] = Cosmos3PolicyProcessor.for_checkpoint(
                self._checkpoint,
                domain_name=request.embodiment.name,
                action_space=request.action_space.name,
                action_chunk_size=request.n_rows,
                **{**self._sampling.of_processor, "policy_frames": frames},
            )
        return self._processors[key]


def as_pictures(pixels: torch.Tensor) -> NDArray[np.uint8]:
    """[F, H, W, 3] uint8 of pixels [1, 3, F, H, W] in [0, 1]."""
    levels = (pixels[0].permute(1, 2, 3, 0) * 255).round_()
    # torch converts floats to bytes more slowly than by way of int16
    return levels.to(torch.int16).to(torch.uint8).cpu().numpy()


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
