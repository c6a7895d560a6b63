"""A plain sampling loop over diffusers' stock transformer, scheduler and VAE, for sequences that
its pipeline cannot make.

It follows the model's description (a state row at temporal position 0, history before it, given
values without a time embedding and restored after each step) and shares no code with the engine:
only the request, as a record of what is asked. In float64 it says what the weights mean, and how
far from that a run in float32 may be (helpers/parity.py).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import (
    get_3d_mrope_ids_text_tokens,
    get_3d_mrope_ids_vae_tokens,
)

from helpers.cosmos3_oracle import pipeline


@dataclass(frozen=True)
class Sequence:
    """What is asked, and what of it is given: latent frames, and the first rows of the action
    sequence.
    """

    asked: Any  # the engine's request
    state_rows: int
    clean_frames: tuple[int, ...]
    given: torch.Tensor  # [rows, D]

    @property
    def rows(self) -> int:
        return self.asked.action_chunk + self.state_rows + self.asked.history_rows


@torch.no_grad()
def stock_loop(
    folder: Any, sequence: Sequence, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Video latents [1, C, F, H, W], actions [chunk, raw width] and latents of sound [C, S], if
    asked, in a type throughout.

    What is float32 by definition (timesteps, noise levels, coefficients of the sampler, tables of
    rotations) is the same numbers in float64.
    """
    pipe, asked = pipeline(folder, dtype), sequence.asked
    scheduler, action_scheduler = _schedulers(pipe, asked)
    clean, free_video = _video(pipe, sequence, dtype)
    shape = sequence.rows, pipe.transformer.config.action_dim
    given, free_action = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    free_action[len(sequence.given) :, : asked.raw_action_dim] = 1
    given[: len(sequence.given), : sequence.given.shape[1]] = sequence.given.to(dtype)
    video = torch.where(free_video > 0, asked.video_noise.to(dtype), clean)
    action = torch.where(free_action > 0, asked.action_noise.to(dtype), given)
    sound = asked.sound_noise.to(dtype) if asked.sound else None
    sound_scheduler = copy.deepcopy(scheduler)
    prompts = [asked.text_ids, asked.neg_text_ids]
    for t in scheduler.timesteps:
        low, high = asked.guidance_interval or (-1, 1001)
        guided = asked.guidance_scale != 1 and low < int(t) < high
        made = [
            _velocities(pipe, sequence, ids, video, action, sound, int(t))
            for ids in prompts[: 1 + guided]
        ]
        of_video, of_action, *of_sound = (
            v[0] if not guided else v[1] + asked.guidance_scale * (v[0] - v[1])
            for v in zip(*made, strict=True)
        )
        if sound is not None:
            sound = sound_scheduler.step(of_sound[0][None], t, sound[None], return_dict=False)[0][0]
        video = scheduler.step(of_video * free_video, t, video, return_dict=False)[0]
        action = action_scheduler.step(
            (of_action * free_action)[None], t, action[None], return_dict=False
        )[0][0]
        video = torch.where(free_video > 0, video, clean)
        action = torch.where(free_action > 0, action, given)
    return video, action[-asked.action_chunk :, : asked.raw_action_dim], sound


@torch.no_grad()
def stock_pixels(
    folder: Any, video: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Pixels [1, 3, frames, height, width] in [0, 1] of video latents."""
    return ((stock_decoded(folder, video, dtype) + 1) / 2).clamp(0, 1)


@torch.no_grad()
def stock_encoded(folder: Any, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Normalised latents of pixels in [-1, 1]."""
    return pipeline(folder, dtype)._encode_video(pixels.to(dtype))


@torch.no_grad()
def stock_decoded(folder: Any, latents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pixels around [-1, 1], not clipped, of normalised latents."""
    vae = pipeline(folder, dtype).vae
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(dtype)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return vae.decode(latents.to(dtype) * std + mean).sample


def _schedulers(pipe: Any, asked: Any) -> tuple[Any, Any]:
    if asked.use_karras_sigmas is None:  # the checkpoint's own schedule
        scheduler = copy.deepcopy(pipe.scheduler)
        scheduler.set_timesteps(asked.num_inference_steps)
        return scheduler, copy.deepcopy(scheduler)
    flow = {"use_karras_sigmas": False, "flow_shift": asked.flow_shift}
    scheduler = UniPCMultistepScheduler.from_config({**pipe.scheduler.config, **flow})
    scheduler.set_timesteps(
        asked.num_inference_steps,
        sigmas=np.linspace(1 - 1 / 1000, 0.0, asked.num_inference_steps + 1)[:-1],
    )
    return scheduler, copy.deepcopy(scheduler)


def _video(pipe: Any, sequence: Sequence, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of the whole clip, its last picture repeated to the end, and 1 where they are
    predicted.
    """
    asked = sequence.asked
    F, H, W = asked.video_shape
    pixels = asked.cond_video_pixels.to(dtype)
    missing = (F - 1) * 4 + 1 - pixels.shape[2]
    pixels = torch.cat([pixels, pixels[:, :, -1:].repeat(1, 1, max(missing, 0), 1, 1)], dim=2)
    clean = pipe._encode_video(pixels)[..., :H, :W]
    free = torch.ones_like(clean)
    free[:, :, list(sequence.clean_frames)] = 0
    return clean, free


def _velocities(
    pipe: Any,
    sequence: Sequence,
    ids: torch.Tensor,
    video: torch.Tensor,
    action: torch.Tensor,
    sound: torch.Tensor | None,
    t: int,
) -> Any:
    asked, config = sequence.asked, pipe.transformer.config
    F, H, W = video.shape[2:]
    rows, columns, text = -(-H // 2), -(-W // 2), len(ids)
    count, per_frame = sequence.rows, rows * columns
    tokens, known = F * per_frame, len(sequence.given)
    noisy_frames = [i for i in range(F) if i not in sequence.clean_frames]
    noisy = torch.arange(text, text + tokens).view(F, per_frame)[noisy_frames].flatten()
    text_positions, after = get_3d_mrope_ids_text_tokens(text, 0, config.enable_fps_modulation)
    where = {
        "temporal_offset": after + config.unified_3d_mrope_temporal_modality_margin,
        "reset_spatial_indices": config.unified_3d_mrope_reset_spatial_ids,
        "fps": asked.fps if config.enable_fps_modulation else None,
        "base_fps": float(config.base_fps),
    }
    offset = (0 if sequence.state_rows else 1) - asked.history_rows
    frames_at = get_3d_mrope_ids_vae_tokens(
        F, rows, columns, **where, temporal_compression_factor=4
    )[0]
    per_row = {
        "temporal_compression_factor": 1,
        "base_temporal_compression_factor": 4,
        "start_frame_offset": offset,
    }
    rows_at = get_3d_mrope_ids_vae_tokens(count, 1, 1, **where, **per_row)[0]
    heard = 0 if sound is None else sound.shape[1]
    places, with_sound = [frames_at, rows_at], {}
    if sound is not None:
        places[1:1] = [
            get_3d_mrope_ids_vae_tokens(
                heard,
                1,
                1,
                **{**where, "fps": where["fps"] and config.sound_latent_fps},
                temporal_compression_factor=1,
            )[0]
        ]
        of_sound = torch.arange(text + tokens, text + tokens + heard)
        with_sound = {
            "sound_tokens": [sound],
            "sound_token_shapes": [(heard, 1, 1)],
            "sound_sequence_indexes": of_sound,
            "sound_mse_loss_indexes": of_sound,
            "sound_timesteps": torch.full((heard,), t),
            "sound_noisy_frame_indexes": [torch.arange(heard)],
        }
    first = text + tokens + heard
    of_video, of_sound, of_action = pipe.transformer(
        input_ids=ids,
        text_indexes=torch.arange(text),
        position_ids=torch.cat([text_positions, *places], dim=1),
        und_len=text,
        sequence_length=first + count,
        vision_tokens=[video],
        vision_token_shapes=[(F, rows, columns)],
        vision_sequence_indexes=torch.arange(text, text + tokens),
        vision_mse_loss_indexes=noisy,
        vision_timesteps=torch.full((len(noisy),), t),
        vision_noisy_frame_indexes=[torch.tensor(noisy_frames, dtype=torch.long)],
        action_tokens=[action],
        action_token_shapes=[(count, 1, 1)],
        action_sequence_indexes=torch.arange(first, first + count),
        action_mse_loss_indexes=torch.arange(first + known, first + count),
        action_timesteps=torch.full((count - known,), t),
        action_noisy_frame_indexes=[torch.arange(known, count)],
        action_domain_ids=[torch.tensor([asked.domain_id])],
        return_dict=False,
        **with_sound,
    )
    return of_video[0], of_action[0], *(of_sound or ())
