"""What a processor hands to the engine: one call's tensors, and how to sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strands_cosmos3.embodiments import ActionSpace, Embodiment
from strands_cosmos3.engine.request import Cosmos3ActionRequest, pixel_to_latent_shape
from strands_cosmos3.types import Mode


@dataclass(frozen=True)
class Sampling:
    """How to denoise; None follows the checkpoint.

    Args:
        num_inference_steps, guidance_scale, guidance_interval, flow_shift, use_karras_sigmas, seed: As in
            :class:`Cosmos3ActionRequest`.
        return_video: Whether video latents are wanted.
    """

    num_inference_steps: int = 30
    guidance_scale: float = 1.0
    guidance_interval: tuple[float, float] | None = None
    flow_shift: float | None = None
    use_karras_sigmas: bool | None = None
    seed: int = 0
    return_video: bool = True


@dataclass(frozen=True, eq=False)
class ProcessedInput:
    """What :meth:`Cosmos3PolicyProcessor.preprocess` makes of a call.

    Args:
        text_ids, text_mask, neg_text_ids, neg_text_mask: [1, S] ids and ones.
        pixel_values: [1, 3, frames, height, width] in [-1, 1] on the canvas: the frames that are given to the model.
        video_shape: (frames, height, width) in pixels of the whole clip and of the picture's content; see
            :func:`pixel_to_latent_shape`.
        cond_action: [1, chunk, action_dim] given actions in the model's scale, or None.
        action_prefix: [rows, action_dim] the state row, if any, and rows bound to be executed; or None.
        prompt: The caption that was tokenised.
        embodiment, space: What was resolved.
    """

    text_ids: torch.Tensor
    text_mask: torch.Tensor
    neg_text_ids: torch.Tensor
    neg_text_mask: torch.Tensor
    pixel_values: torch.Tensor
    video_shape: tuple[int, int, int]
    mode: Mode
    domain_id: int
    action_chunk: int
    raw_action_dim: int
    cond_action: torch.Tensor | None
    action_prefix: torch.Tensor | None
    cond_frame_indexes: tuple[int, ...] | None
    fps: float
    prompt: str
    embodiment: Embodiment
    space: ActionSpace

    def request(self, sampling: Sampling | None = None) -> Cosmos3ActionRequest:
        """The engine's request for this input."""
        return Cosmos3ActionRequest(
            text_ids=self.text_ids,
            text_mask=self.text_mask,
            neg_text_ids=self.neg_text_ids,
            neg_text_mask=self.neg_text_mask,
            video_shape=pixel_to_latent_shape(*self.video_shape),
            mode=self.mode,
            domain_id=self.domain_id,
            action_space=self.space.name,
            action_chunk=self.action_chunk,
            raw_action_dim=self.raw_action_dim,
            cond_video_pixels=self.pixel_values,
            cond_action=self.cond_action,
            action_prefix=self.action_prefix,
            cond_frame_indexes=self.cond_frame_indexes,
            fps=self.fps,
            **vars(sampling or Sampling()),
        )
