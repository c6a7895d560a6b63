"""How well a released checkpoint knows the world: forward dynamics in decibels, inverse dynamics in millimetres.

Through the engine and its VAE, on clips that no training saw. Forward dynamics is compared with the cheapest prediction there
is, that nothing moves; the VAE's own reconstruction is the most that could be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strands_cosmos3.checks import whole_number
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.request import Cosmos3ActionRequest, pixel_to_latent_shape
from strands_cosmos3.engine.tokens import PromptTokenizer
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.training.demos import DemoCollector, DemoConfig
from strands_cosmos3.training.phrases import plain
from strands_cosmos3.training.release import DOMAIN, caption
from strands_cosmos3.training.shards import Demos, pack, shard_path, write_shard
from strands_cosmos3.training.vae import to_pixels
from strands_cosmos3.training.validation import chunk_errors
from strands_cosmos3.training.windows import FPS, RAW_WIDTH, ROWS, executed_rows, latent_columns, state_columns, undisturbed
from strands_cosmos3.types import Mode

HELD_OUT_SEED = 1_000_000
_CLIPS_AN_EPISODE = 4


@dataclass(frozen=True)
class DynamicsReport:
    """Figures over some clips that no training saw.

    Args:
        clips: How many.
        forward_db: Mean PSNR of predicted frames. copy_frame_psnr: Of repeating the given frame. vae_psnr: Of the true frames
            through the VAE.
        inverse_mm: Median distance between the ends of recovered and true chunks. moved_mm: Median distance that they cover.
        steps: Denoising steps.
    """

    clips: int
    forward_db: float
    copy_frame_psnr: float
    vae_psnr: float
    inverse_mm: float
    moved_mm: float
    steps: int


def judge_dynamics(
    checkpoint: Path,
    demos: Demos,
    ticks: NDArray[np.int64],
    steps: int = 4,
    on_clip: Callable[[int, int], None] | None = None,
) -> DynamicsReport:
    """Ask a checkpoint what known actions do, and what was done, on some clips.

    Args:
        checkpoint: In the released layout, trained with the future.
        demos: Where the clips are. ticks: Where they begin; they must be held out.
        steps: Denoising steps.
        on_clip: Called with clips done and in all.

    Raises:
        ConfigError: As :func:`require_video`.
    """
    require_video(checkpoint)
    rows = executed_rows(demos, ticks)
    forward, still, ceiling, recovered = [], [], [], []
    canvas_hw = demos.frame(0).shape[:2]
    height, width = content_hw = canvas_hw[0], 16 * latent_columns(canvas_hw)  # the rest is padding, which no model sees
    with Cosmos3Engine.from_pretrained(checkpoint, dtype=torch.float32, decode_video=True) as engine:
        tokens = PromptTokenizer(checkpoint / "text_tokenizer")
        for i, tick in enumerate(ticks):
            frames = demos.frames(range(int(tick), int(tick) + ROWS + 1))
            ask = PendingInference(engine, tokens, demos, int(tick), frames, rows[i], content_hw, steps)
            real = (to_pixels(frames[None])[..., :height, :width] + 1) / 2
            answer = ask(Mode.FORWARD_DYNAMICS)["pixels"][..., :height, :width]
            forward.append(_psnr(answer[:, :, 1:], real[:, :, 1:]))
            still.append(_psnr(real[:, :, :1].expand_as(real)[:, :, 1:], real[:, :, 1:]))
            with torch.inference_mode():
                decoded = engine.vae.decode(engine.vae.encode(to_pixels(frames[None])))
                assert decoded is not None
                through = (decoded + 1) / 2
            ceiling.append(_psnr(through[..., :height, :width].clamp(0, 1)[:, :, 1:], real[:, :, 1:]))
            recovered.append(ask(Mode.INVERSE_DYNAMICS)["action"][0])
            if on_clip is not None:
                on_clip(i + 1, len(ticks))
    errors = chunk_errors(torch.stack(recovered), torch.from_numpy(rows))
    decibels = [float(np.mean(values)) for values in (forward, still, ceiling)]
    return DynamicsReport(len(ticks), decibels[0], decibels[1], decibels[2], errors.end_mm, errors.moved_mm, steps)


def judge_on_expert(
    checkpoint: Path,
    clips: int,
    seed: int = 0,
    steps: int | None = None,
    on_step: Callable[[str, int, int], None] | None = None,
) -> DynamicsReport:
    """Record the undisturbed expert on tables that no training saw, and judge a checkpoint on some of its chunks.

    Args:
        checkpoint: As in :func:`judge_dynamics`.
        clips: How many; four of each episode on average.
        seed: Of the tables. Demonstrations of other seeds than ``HELD_OUT_SEED + seed`` have others.
        steps: Denoising steps; None is the checkpoint's preset.
        on_step: Called with what is under way, how much of it is done and how much there is.

    Raises:
        ConfigError: It is no checkpoint that demonstrations trained jointly with the future.
    """
    whole_number(clips, "clips", 1)
    opened = require_video(checkpoint)
    sampling, tier = opened.sampling, int(opened.metadata["resolution_tier"])
    say = on_step or (lambda *_: None)
    with (
        TemporaryDirectory(prefix="sc3-clips-") as folder,
        DemoCollector(DemoConfig(tier, bend=0.0, distractors=0.0)) as studio,
    ):
        kept, episode, least = [], 0, -(-clips // _CLIPS_AN_EPISODE)
        while len(kept) < least:
            record = studio.record(HELD_OUT_SEED + seed, episode)
            episode += 1
            if record is not None and len(record.opening) > ROWS + 1:
                kept.append(record)
                say("expert", len(kept), least)
        write_shard(shard_path(Path(folder), 0), pack(kept))
        demos = Demos.open(Path(folder))
        ticks = demos.clips(ROWS)
        ticks = ticks[undisturbed(demos, ticks)]
        chosen = ticks[np.linspace(0, len(ticks) - 1, clips).round().astype(int)]
        preset = steps or (sampling and sampling.num_steps) or 4
        return judge_dynamics(checkpoint, demos, chosen, preset, on_clip=lambda done, of: say("dynamics", done, of))


def require_video(checkpoint: Path) -> Checkpoint:
    """A checkpoint that can be asked about the world.

    Raises:
        ConfigError: It answers actions without a video, or speaks another contract than the demonstrations'.
    """
    opened = Checkpoint.open(checkpoint)
    if opened.state_row is None:
        raise ConfigError(f"{checkpoint} has no state row: dynamics are judged on checkpoints that demonstrations trained.")
    if opened.policy_frames == (1,):
        raise ConfigError(f"{checkpoint} answers actions without a video; train it jointly with the future first.")
    return opened


class PendingInference:
    """One clip's requests."""

    def __init__(
        self,
        engine: Cosmos3Engine,
        tokens: PromptTokenizer,
        demos: Demos,
        tick: int,
        frames: NDArray[np.uint8],
        rows: NDArray[np.float32],
        content_hw: tuple[int, int],
        steps: int,
    ):
        state = engine.checkpoint.state_row
        assert state is not None  # require_video saw to it
        measured = state_columns(demos.T_base_cosmos[[tick]], demos.opening[[tick]])
        self._engine, self._rows = engine, torch.from_numpy(rows)
        sampling = engine.checkpoint.sampling
        self._common: dict[str, Any] = {
            "text_ids": tokens.ids(caption(plain(int(demos.goal[tick])), (frames.shape[1], frames.shape[2]))),
            "video_shape": pixel_to_latent_shape(len(frames), *content_hw),
            "action_chunk": ROWS,
            "domain_id": get_embodiment(DOMAIN).domain_id,
            "raw_action_dim": RAW_WIDTH,
            "cond_video_pixels": to_pixels(frames[None]),
            "action_prefix": torch.from_numpy(state.scaled(measured)).float(),
            "fps": FPS,
            "num_inference_steps": steps,
            "flow_shift": 5.0 if sampling is None else sampling.flow_shift,
            "use_karras_sigmas": False,
        }

    def __call__(self, mode: Mode) -> dict[str, torch.Tensor]:
        known: dict[str, Any] = {"cond_action": self._rows} if mode is Mode.FORWARD_DYNAMICS else {}
        return self._engine.step(Cosmos3ActionRequest(mode=mode, **self._common, **known))


def _psnr(made: torch.Tensor, real: torch.Tensor) -> float:
    return float(-10 * torch.log10((made - real).square().mean().clamp(min=1e-10)))
