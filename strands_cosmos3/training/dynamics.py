"""How well a released checkpoint knows the world: forward dynamics in decibels, inverse dynamics in millimetres.

Through the engine and its VAE, on clips that no training saw. Forward dynamics is compared with the cheapest prediction there
is, that nothing moves; the VAE's own reconstruction is the most that could be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.request import Cosmos3ActionRequest, pixel_to_latent_shape
from strands_cosmos3.engine.tokens import PromptTokenizer
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.training.held_out import chunk_errors
from strands_cosmos3.training.phrases import plain
from strands_cosmos3.training.release import DOMAIN, caption
from strands_cosmos3.training.shards import Demos
from strands_cosmos3.training.vae import to_pixels
from strands_cosmos3.training.windows import FPS, RAW_WIDTH, ROWS, executed_rows, state_columns
from strands_cosmos3.types import Mode


@dataclass(frozen=True)
class DynamicsReport:
    """Figures over some held-out clips.

    Args:
        clips: How many.
        forward_db: Mean PSNR of predicted frames. still_db: Of repeating the given frame. ceiling_db: Of the true frames
            through the VAE.
        inverse_mm: Median distance between the ends of recovered and true chunks. moved_mm: Median distance that they cover.
        steps: Denoising steps.
    """

    clips: int
    forward_db: float
    still_db: float
    ceiling_db: float
    inverse_mm: float
    moved_mm: float
    steps: int


def judge_dynamics(
    checkpoint: Path,
    demos: Demos,
    ticks: NDArray[np.int64],
    steps: int = 4,
    content_hw: tuple[int, int] = (128, 144),
    on_clip: Callable[[int, int], None] | None = None,
) -> DynamicsReport:
    """Ask a checkpoint what known actions do, and what was done, on some clips.

    Args:
        checkpoint: In the released layout, trained with the future.
        demos: Where the clips are. ticks: Where they begin; they must be held out.
        steps: Denoising steps.
        content_hw: The pictures' part that the model sees, in pixels; the rest is padding and is not compared.
        on_clip: Called with clips done and in all.

    Raises:
        ConfigError: The checkpoint answers actions without a video.
    """
    if Checkpoint.open(checkpoint).policy_frames == (1,):
        raise ConfigError(f"{checkpoint} answers actions without a video; train it jointly with the future first.")
    rows = executed_rows(demos, ticks)
    forward, still, ceiling, recovered = [], [], [], []
    height, width = content_hw
    with Cosmos3Engine.from_pretrained(checkpoint, dtype=torch.float32, decode_video=True) as engine:
        tokens = PromptTokenizer(checkpoint / "text_tokenizer")
        for i, tick in enumerate(ticks):
            frames = demos.frames(range(int(tick), int(tick) + ROWS + 1))
            ask = _Question(engine, tokens, demos, int(tick), frames, rows[i], content_hw, steps)
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


class _Question:
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
        assert state is not None  # every checkpoint that demonstrations train has one
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
