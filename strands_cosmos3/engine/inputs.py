"""What a processor hands to the engine: one call's settings and tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strands_cosmos3.embodiments import ActionSpace, Embodiment, Sampling
from strands_cosmos3.engine.request import Cosmos3ActionRequest, pixel_to_latent_shape
from strands_cosmos3.types import Mode

_OF_TEXT = ("text_ids", "text_mask", "neg_text_ids", "neg_text_mask")
_OF_ACTIONS = (
    "mode",
    "domain_id",
    "action_chunk",
    "raw_action_dim",
    "fps",
    "cond_action",
    "action_prefix",
    "history_rows",
)
_UNCHANGED = (*_OF_TEXT, *_OF_ACTIONS, "cond_frame_indexes")  # fields that a request takes over


@dataclass(frozen=True, eq=False, kw_only=True)
class CallSettings:
    """What one call asks for, resolved from the call itself, the processor's options and the
    domain.
    """

    mode: Mode
    embodiment: Embodiment
    space: ActionSpace
    raw_action_dim: int
    action_chunk: int
    fps: float
    view: str

    @property
    def domain_id(self) -> int:
        """Slot of the domain-aware heads."""
        return self.embodiment.domain_id


@dataclass(frozen=True, eq=False, kw_only=True)
class ProcessedInput(CallSettings):
    """A call's settings and its tensors, from :meth:`Cosmos3PolicyProcessor.preprocess`."""

    text_ids: torch.Tensor  # [1, S] ids and ones
    text_mask: torch.Tensor
    neg_text_ids: torch.Tensor
    neg_text_mask: torch.Tensor
    # [1, 3, frames, height, width] in [-1, 1] on the canvas: the frames that the model is given
    pixel_values: torch.Tensor
    # (frames, height, width) in pixels of the whole clip and of the picture's content
    video_shape: tuple[int, int, int]
    cond_action: torch.Tensor | None  # [1, chunk, action_dim] given actions in the model's scale
    # [rows, action_dim] the state row, if any, and rows bound to be executed
    action_prefix: torch.Tensor | None
    # latent frames that are given; None is the mode's own
    cond_frame_indexes: tuple[int, ...] | None
    prompt: str  # the caption that was tokenised
    history_rows: int = 0  # rows of action_prefix before the state row

    def request(
        self,
        sampling: Sampling | None = None,
        *,
        seed: int = 0,
        use_karras_sigmas: bool | None = None,
        return_video: bool = True,
        decode_frames: int | None = None,
    ) -> Cosmos3ActionRequest:
        """The engine's request. What ``sampling`` leaves open is 30 steps without guidance on
        the checkpoint's schedule.
        """
        sampling = sampling or Sampling()
        return Cosmos3ActionRequest(
            **{name: getattr(self, name) for name in _UNCHANGED},
            video_shape=pixel_to_latent_shape(*self.video_shape),
            action_space=self.space.name,
            cond_video_pixels=self.pixel_values,
            num_inference_steps=sampling.num_steps or 30,
            guidance_scale=1.0 if sampling.guidance_scale is None else sampling.guidance_scale,
            guidance_interval=sampling.guidance_interval,
            flow_shift=sampling.flow_shift,
            use_karras_sigmas=use_karras_sigmas,
            seed=seed,
            return_video=return_video,
            decode_frames=decode_frames,
        )
