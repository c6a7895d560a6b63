"""Quality of a checkpoint's world model on held-out clips: PSNR of forward dynamics, end-point
error of inverse dynamics.

Controls tell whether the predicted world follows the actions: the same clip is predicted from other
actions, and with a sentence that names another goal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strands_cosmos3.actions.decode import decode_pose_trajectory
from strands_cosmos3.actions.rotations import geodesic_angle, se3_between
from strands_cosmos3.actions.stats import denormalize_chunk
from strands_cosmos3.checks import F64
from strands_cosmos3.datasets.arm_rows import ArmClip, state_columns
from strands_cosmos3.embodiments import DROID_RIG, Sampling, get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.request import Cosmos3ActionRequest, pixel_to_latent_shape
from strands_cosmos3.engine.tokens import PromptTokenizer
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.observe.prompts import compose_prompt
from strands_cosmos3.training.windows import (
    FPS,
    RAW_WIDTH,
    ROWS,
    latent_columns,
    scaled_rows,
    to_pixels,
)
from strands_cosmos3.types import Mode

DOMAIN = "droid_lerobot"
"""Domain of the small policies of this project."""
_MOVES = 0.1  # change of a channel, of the range 0..1, from which a pixel counts as moving
_PICTURES: tuple[str, ...] = ("forward_db", "copy_frame_psnr", "vae_psnr")
"""What is compared with true frames: predictions, the given frame, true frames through the VAE."""


@dataclass(frozen=True)
class ChunkErrors:
    """Errors of predicted chunks; the end point is where the arm would go."""

    mse: float  # of normalised rows
    end_mm: float  # median distance between the ends of predicted and true chunks
    end_deg: float  # median angle between them
    moved_mm: float  # median distance that the true chunks cover, for comparison
    grasp: float  # fraction of rows whose gripper command is on the right side of one half


@dataclass(frozen=True)
class DynamicsReport:
    """Figures over held-out clips: mean PSNR [dB] of forward dynamics, median distances [mm] of
    inverse dynamics.

    ``moving``: PSNR over pixels that differ from the given frame by more than a tenth of the range.
    ``controls``: for each control experiment, the squared error of the predicted latents divided by
    that with the true actions.
    """

    clips: int
    forward_db: float  # predicted frames
    copy_frame_psnr: float  # repeating the given frame, the least to expect
    vae_psnr: float  # the true frames through the VAE, the upper limit
    moving: Mapping[str, float]  # the same three: forward_db, copy_frame_psnr, vae_psnr
    controls: Mapping[str, float]
    inverse_mm: float  # between the end points of recovered and true chunks
    moved_mm: float  # that the true chunks cover
    steps: int  # of denoising


def caption(instruction: str, canvas_hw: tuple[int, int]) -> str:
    """Return the caption of the small checkpoints: the plain format with DROID's layout."""
    return compose_prompt(
        instruction,
        canvas_hw=canvas_hw,
        prompt_format="plain",
        view="concat",
        num_frames=ROWS + 1,
        fps=FPS,
        layout=DROID_RIG.layout,
    )


def chunk_errors(predicted: torch.Tensor, true: torch.Tensor) -> ChunkErrors:
    """Compare chunks [B, rows, 10] in the model's scale."""
    T_predicted = _ends(predicted)
    T_true = _ends(true)
    apart = np.linalg.norm(T_predicted[:, :3, 3] - T_true[:, :3, 3], axis=1)
    angle = geodesic_angle(T_predicted[:, :3, :3], T_true[:, :3, :3])
    return ChunkErrors(
        float((predicted - true).square().mean()),
        float(np.median(apart) * 1e3),
        float(np.degrees(np.median(angle))),
        float(np.median(np.linalg.norm(T_true[:, :3, 3], axis=1)) * 1e3),
        float(((predicted[..., 9] > 0) == (true[..., 9] > 0)).float().mean()),
    )


def _ends(rows: torch.Tensor) -> F64:
    """Return the end poses [B, 4, 4] of chunks in the frame of their starts."""
    metres = denormalize_chunk(
        rows.double().numpy().clip(-9, 9).reshape(-1, rows.shape[-1]), DOMAIN
    )
    return np.stack(
        [
            decode_pose_trajectory(chunk[:, :9], np.eye(4))[-1]
            for chunk in metres.reshape(rows.shape)
        ]
    )


def judge_dynamics(
    checkpoint: Path,
    clips: Sequence[ArmClip],
    steps: int | None = None,
    on_clip: Callable[[int, int], None] = lambda *_: None,
) -> DynamicsReport:
    """Measure forward and inverse dynamics on clips, which training must not have seen.

    ``steps``: Denoising steps; None means the checkpoint's preset.
    """
    opened = require_video(checkpoint)
    domain = get_embodiment(DOMAIN)
    steps = opened.resolve_sampling(
        domain, "midtrain", Sampling(steps), Mode.FORWARD_DYNAMICS
    ).num_steps
    assert steps is not None  # a preset names it
    rows = {name: torch.from_numpy(made) for name, made in control_rows(clips).items()}
    judged = []
    with Cosmos3Engine.from_pretrained(
        checkpoint, dtype=torch.float32, decode_video=True
    ) as engine:
        judge = _ClipJudge(engine, PromptTokenizer(checkpoint / "text_tokenizer"), steps)
        for i, clip in enumerate(clips):
            judged.append(judge(clip, {name: made[i] for name, made in rows.items()}))
            on_clip(i + 1, len(clips))
    psnr, latent_errors, recovered = zip(*judged, strict=True)
    errors = chunk_errors(torch.stack(recovered), rows["true"])
    # by region and picture
    whole, moving = (
        dict(zip(_PICTURES, means_db, strict=True))
        for means_db in np.nanmean(psnr, axis=0).tolist()
    )
    off = {
        name: float(np.mean([errors[name] for errors in latent_errors]))
        for name in latent_errors[0]
    }
    return DynamicsReport(
        clips=len(clips),
        **whole,
        moving=moving,
        controls={name: error / off["true"] for name, error in off.items() if name != "true"},
        inverse_mm=errors.end_mm,
        moved_mm=errors.moved_mm,
        steps=steps,
    )


def control_rows(clips: Sequence[ArmClip]) -> dict[str, NDArray[np.float32]]:
    """Return rows [n, rows, 10] by name: the true ones, those of another clip, of the opposite
    motion, and of no motion.
    """
    poses = np.stack([clip.T_base_cosmos for clip in clips])
    gripper = np.stack([clip.gripper_command for clip in clips])
    before = poses[:, :-1]
    after = poses[:, 1:]
    true = scaled_rows(se3_between(before, after), gripper)
    still = np.broadcast_to(np.eye(4), after.shape)
    return {
        "true": true,
        "shuffled": np.roll(true, len(true) // 2, axis=0),
        "opposite": scaled_rows(se3_between(after, before), gripper),
        "zero": scaled_rows(still, gripper),
    }


def require_video(checkpoint: Path) -> Checkpoint:
    """Open a checkpoint; raise ConfigError if it predicts actions only, or was not trained on
    demonstrations.
    """
    opened = Checkpoint.open(checkpoint)
    if opened.state_row is None:
        raise ConfigError(
            f"{checkpoint} has no state row: dynamics are measured only for checkpoints that were "
            "trained on demonstrations."
        )
    if opened.policy_frames == (1,):
        raise ConfigError(
            f"{checkpoint} answers actions without a video; train it jointly with the future first."
        )
    return opened


class _ClipJudge:
    """Measure an engine on one clip at a time."""

    def __init__(self, engine: Cosmos3Engine, tokens: PromptTokenizer, steps: int):
        self._engine = engine
        self._tokens = tokens
        self._steps = steps

    def __call__(
        self, clip: ArmClip, rows: Mapping[str, torch.Tensor]
    ) -> tuple[list[list[float]], dict[str, float], torch.Tensor]:
        """Judge predictions from rows [rows, 10] by name, ``true`` first.

        Return the PSNR [dB] of whole pictures and of what moves in them (nan if nothing does), each
        of ``_PICTURES``; the squared error of the latents by control; and the recovered rows.
        """
        height, width = _content_hw(clip)
        frames = to_pixels(clip.frames[None])
        real = (frames[..., :height, :width] + 1) / 2
        common = self._common(clip, frames)
        answers = self._engine.step_batch(self._requests(clip, rows, common))
        made = dict(zip((*rows, "foreign"), answers, strict=True))
        with torch.inference_mode():
            latents = self._engine.vae.encode(frames)
            decoded = self._engine.vae.decode(latents)
            assert decoded is not None
        through_vae = ((decoded + 1) / 2)[..., :height, :width].clamp(0, 1)
        candidates = (
            made["true"]["pixels"][..., :height, :width],
            real[:, :, :1].expand_as(real),
            through_vae,
        )
        moves = ((real - real[:, :, :1]).abs().amax(1, keepdim=True) > _MOVES).expand_as(real)[
            :, :, 1:
        ]
        later = [picture[:, :, 1:] for picture in candidates]
        psnr = [
            [_psnr(picture[region], real[:, :, 1:][region]) for picture in later]
            for region in (..., moves)
        ]
        truth = latents[:, :, 1:, : height // 16, : width // 16]
        off = {
            name: float((one["video"][:, :, 1:] - truth).square().mean())
            for name, one in made.items()
        }
        inverse = Cosmos3ActionRequest(
            mode=Mode.INVERSE_DYNAMICS, decode_frames=0, return_video=False, **common
        )
        recovered = self._engine.step(inverse)["action"][0]
        return psnr, off, recovered

    def _requests(
        self, clip: ArmClip, rows: Mapping[str, torch.Tensor], common: Mapping[str, Any]
    ) -> list[Cosmos3ActionRequest]:
        """Forward dynamics from each rows, and from the true ones with a sentence of another
        goal and colour.
        """
        true = Cosmos3ActionRequest(mode=Mode.FORWARD_DYNAMICS, cond_action=rows["true"], **common)
        others = [
            replace(true, cond_action=one, decode_frames=0)
            for name, one in rows.items()
            if name != "true"
        ]
        foreign = self._prompt(clip.other_instruction, clip)
        return [true, *others, replace(true, text_ids=foreign, decode_frames=0)]

    def _prompt(self, instruction: str, clip: ArmClip) -> torch.Tensor:
        """Return the token ids of a caption, as users' requests have it: empty where the checkpoint
        was trained on dynamics without one.
        """
        without_text = self._engine.checkpoint.dynamics_without_text
        text = "" if without_text else caption(instruction, clip.frames.shape[1:3])
        return torch.from_numpy(self._tokens.ids(text))

    def _common(self, clip: ArmClip, frames: torch.Tensor) -> dict[str, Any]:
        """Return the arguments that both requests share."""
        checkpoint = self._engine.checkpoint
        state = checkpoint.state_row
        sampling = checkpoint.sampling
        assert state is not None  # by require_video
        measured = state_columns(clip.T_base_cosmos[:1], np.array([clip.gripper_opening]))
        return {
            "text_ids": self._prompt(clip.instruction, clip),
            "video_shape": pixel_to_latent_shape(frames.shape[2], *_content_hw(clip)),
            "action_chunk": ROWS,
            "domain_id": get_embodiment(DOMAIN).domain_id,
            "raw_action_dim": RAW_WIDTH,
            "cond_video_pixels": frames,
            "action_prefix": torch.from_numpy(state.scaled(measured)).float(),
            "fps": FPS,
            "num_inference_steps": self._steps,
            "flow_shift": 5.0 if sampling is None else sampling.flow_shift,
            "use_karras_sigmas": False,
        }


def _content_hw(clip: ArmClip) -> tuple[int, int]:
    """Return height and width of what the frames show; the rest is padding, which no model sees."""
    height, width = clip.frames.shape[1:3]
    return height, 16 * latent_columns((height, width))


def _psnr(made: torch.Tensor, real: torch.Tensor) -> float:
    return float(-10 * torch.log10((made - real).square().mean().clamp(min=1e-10)))
