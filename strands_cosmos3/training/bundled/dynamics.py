"""Quality of a checkpoint's world model on held-out clips: PSNR of forward dynamics, end-point
error of inverse dynamics.

Controls tell whether the predicted world follows the actions: the same clip is predicted from other
actions, and with a sentence that names another goal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strands_cosmos3.actions.rotations import se3_between
from strands_cosmos3.checks import whole_number
from strands_cosmos3.embodiments import Sampling, get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.request import Cosmos3ActionRequest, pixel_to_latent_shape
from strands_cosmos3.engine.tokens import PromptTokenizer
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_json
from strands_cosmos3.training.bundled.captions import caption
from strands_cosmos3.training.bundled.demos import DemoCollector, DemoConfig
from strands_cosmos3.training.bundled.phrases import GOALS, plain
from strands_cosmos3.training.bundled.shards import Demos, pack, shard_path, write_shard
from strands_cosmos3.training.bundled.windows import (
    executed_rows,
    latent_columns,
    scaled_rows,
    undisturbed,
)
from strands_cosmos3.training.release import DOMAIN
from strands_cosmos3.training.vae import to_pixels
from strands_cosmos3.training.validation import chunk_errors
from strands_cosmos3.training.windows import FPS, RAW_WIDTH, ROWS, state_columns
from strands_cosmos3.types import Mode
from strands_cosmos3.worlds.table.instruction import Verb

VALIDATION_SEED = 1_000_000
_CLIPS_PER_EPISODE = 4
_RECORDED_CLIPS = 64
_MOVES = 0.1  # change of a channel, of the range 0..1, from which a pixel counts as moving


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


def judge_dynamics(
    checkpoint: Path,
    demos: Demos,
    ticks: NDArray[np.int64],
    steps: int | None = None,
    on_clip: Callable[[int, int], None] | None = None,
) -> DynamicsReport:
    """Measure forward and inverse dynamics on clips, given by their first ticks, which training
    must not have seen.

    ``steps``: Denoising steps; None means the checkpoint's preset.
    """
    opened, domain = require_video(checkpoint), get_embodiment(DOMAIN)
    steps = opened.resolve_sampling(
        domain, "midtrain", Sampling(steps), Mode.FORWARD_DYNAMICS
    ).num_steps
    assert steps is not None  # a preset names it
    rows = {name: torch.from_numpy(made) for name, made in control_rows(demos, ticks).items()}
    judged, recovered = [], []
    with Cosmos3Engine.from_pretrained(
        checkpoint, dtype=torch.float32, decode_video=True
    ) as engine:
        clip = _ClipJudge(engine, PromptTokenizer(checkpoint / "text_tokenizer"), demos, steps)
        for i, tick in enumerate(ticks):
            forward, inverse = clip(int(tick), {name: made[i] for name, made in rows.items()})
            judged.append(forward)
            recovered.append(inverse)
            if on_clip is not None:
                on_clip(i + 1, len(ticks))
    errors = chunk_errors(torch.stack(recovered), rows["true"])
    whole, moving = (
        np.nanmean([getattr(one, name) for one in judged], axis=0).tolist()
        for name in ("whole", "moving")
    )
    off = {
        name: float(np.mean([one.latent_errors[name] for one in judged]))
        for name in judged[0].latent_errors
    }
    controls = {name: error / off["true"] for name, error in off.items() if name != "true"}
    moved: dict[str, float] = dict(
        zip(("forward_db", "copy_frame_psnr", "vae_psnr"), moving, strict=True)
    )
    forward_db, copy_frame, vae = whole
    return DynamicsReport(
        len(ticks),
        forward_db,
        copy_frame,
        vae,
        moved,
        controls,
        errors.end_mm,
        errors.moved_mm,
        steps,
    )


def record_dynamics(
    checkpoint: Path, demos: Demos, held_out: NDArray[np.int64], on_clip: Callable[[int, int], None]
) -> None:
    """Write the figures of a checkpoint on every n-th of the held-out clips to ``dynamics.json``
    beside it.
    """
    clips = held_out[:: max(1, len(held_out) // _RECORDED_CLIPS)]
    write_json(
        checkpoint.parent / "dynamics.json",
        asdict(judge_dynamics(checkpoint, demos, clips, on_clip=on_clip)),
    )


def control_rows(demos: Demos, ticks: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
    """Return rows [n, rows, 10] by name: the true ones, those of another clip, of the opposite
    motion, and of no motion.
    """
    true = executed_rows(demos, ticks)
    index = ticks[:, None] + np.arange(ROWS + 1)
    poses, gripper = demos.T_base_cosmos[index], demos.gripper_command[index[:, :-1]]
    still = np.broadcast_to(np.eye(4), poses[:, 1:].shape)
    return {
        "true": true,
        "shuffled": np.roll(true, len(true) // 2, axis=0),
        "opposite": scaled_rows(se3_between(poses[:, 1:], poses[:, :-1]), gripper),
        "zero": scaled_rows(still, gripper),
    }


def judge_on_expert(
    checkpoint: Path,
    clips: int,
    seed: int = 0,
    steps: int | None = None,
    on_step: Callable[[str, int, int], None] | None = None,
) -> DynamicsReport:
    """Record the unperturbed expert on new tables and measure a checkpoint's dynamics on its
    chunks.

    Args:
        clips: Number of clips; on average four per episode.
        seed: Tables are drawn by ``VALIDATION_SEED + seed``, apart from those of demonstrations.
        steps: Denoising steps; None means the checkpoint's preset.
    """
    whole_number(clips, "clips", 1)
    opened = require_video(checkpoint)
    report = on_step or (lambda *_: None)
    calm: dict[str, Any] = {
        "perturbed": 0.0,
        "wandering": 0.0,
        "distractors": 0.0,
        "close": 0.0,
        "edges_m": (0.04,),
    }
    tier = int(opened.metadata["resolution_tier"])
    config = DemoConfig(tier, goals=_goals_of(opened), visual_randomization=0.1, **calm)
    with TemporaryDirectory(prefix="sc3-clips-") as folder, DemoCollector(config) as collector:
        records, episode, episodes = [], 0, -(-clips // _CLIPS_PER_EPISODE)
        while len(records) < episodes:
            record = collector.record(VALIDATION_SEED + seed, episode)
            episode += 1
            if record is not None and len(record.gripper_opening) > ROWS + 1:
                records.append(record)
                report("expert", len(records), episodes)
        write_shard(shard_path(Path(folder), 0), pack(records))
        demos = Demos.open(Path(folder))
        ticks = demos.clips(ROWS)
        ticks = ticks[undisturbed(demos, ticks)]
        chosen = ticks[np.linspace(0, len(ticks) - 1, clips).round().astype(int)]
        return judge_dynamics(
            checkpoint, demos, chosen, steps, lambda done, total: report("dynamics", done, total)
        )


def _goals_of(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the goals whose sentences it knows; without sentences they do not matter."""
    known = (
        GOALS
        if checkpoint.dynamics_without_text
        else [goal for goal in GOALS if goal[0] is not Verb.PLACE]
    )
    return tuple(range(len(known)))


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


@dataclass(frozen=True)
class _Judged:
    """PSNR [dB] of prediction, of the repeated frame and of the VAE; squared error of the
    latents by control.
    """

    whole: tuple[float, ...]
    moving: tuple[float, ...]  # nan if nothing moves
    latent_errors: Mapping[str, float]


class _ClipJudge:
    """Measure an engine on one clip at a time."""

    def __init__(self, engine: Cosmos3Engine, tokens: PromptTokenizer, demos: Demos, steps: int):
        self._engine, self._tokens, self._demos, self._steps = engine, tokens, demos, steps
        height, _ = demos.canvas_hw
        # the rest is padding, which no model sees
        self._content_hw = height, 16 * latent_columns(demos.canvas_hw)

    def __call__(self, tick: int, rows: Mapping[str, torch.Tensor]) -> tuple[_Judged, torch.Tensor]:
        """Judge predictions from rows [rows, 10] by name, ``true`` first; return also the
        recovered rows.
        """
        height, width = self._content_hw
        frames = to_pixels(self._demos.frames(range(tick, tick + ROWS + 1))[None])
        real = (frames[..., :height, :width] + 1) / 2
        common = self._common(tick, frames)
        made = dict(
            zip(
                (*rows, "foreign"),
                self._engine.step_batch(self._requests(tick, rows, common)),
                strict=True,
            )
        )
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
        whole = tuple(_psnr(picture[:, :, 1:], real[:, :, 1:]) for picture in candidates)
        moving = tuple(
            _psnr(picture[:, :, 1:][moves], real[:, :, 1:][moves]) for picture in candidates
        )
        truth = latents[:, :, 1:, : height // 16, : width // 16]
        off = {
            name: float((one["video"][:, :, 1:] - truth).square().mean())
            for name, one in made.items()
        }
        inverse = Cosmos3ActionRequest(
            mode=Mode.INVERSE_DYNAMICS, decode_frames=0, return_video=False, **common
        )
        recovered = self._engine.step(inverse)["action"][0]
        return _Judged(whole, moving, off), recovered

    def _requests(
        self, tick: int, rows: Mapping[str, torch.Tensor], common: Mapping[str, Any]
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
        foreign = self._tokens.ids(self._prompt((int(self._demos.goal[tick]) + 1) % len(GOALS)))
        return [true, *others, replace(true, text_ids=foreign, decode_frames=0)]

    def _prompt(self, goal: int) -> str:
        """The caption of a goal, as users' requests have it: empty where the checkpoint was
        trained on dynamics without one.
        """
        return (
            ""
            if self._engine.checkpoint.dynamics_without_text
            else caption(plain(goal), self._demos.canvas_hw)
        )

    def _common(self, tick: int, frames: torch.Tensor) -> dict[str, Any]:
        """Return the arguments that both requests share."""
        demos, checkpoint = self._demos, self._engine.checkpoint
        state, sampling = checkpoint.state_row, checkpoint.sampling
        assert state is not None  # by require_video
        measured = state_columns(demos.T_base_cosmos[[tick]], demos.gripper_opening[[tick]])
        return {
            "text_ids": self._tokens.ids(self._prompt(int(demos.goal[tick]))),
            "video_shape": pixel_to_latent_shape(frames.shape[2], *self._content_hw),
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


def _psnr(made: torch.Tensor, real: torch.Tensor) -> float:
    return float(-10 * torch.log10((made - real).square().mean().clamp(min=1e-10)))
