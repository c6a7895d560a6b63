"""diffusers' pipeline as the oracle: one case, run by it and by the engine from equal pixels,
token ids and noise.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import Cosmos3OmniPipeline
from diffusers.models.autoencoders.autoencoder_kl_wan import WanUpsample
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3NemotronRMSNorm
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import (
    _ACTION_RESOLUTION_BINS,
    CosmosActionCondition,
)
from PIL import Image

from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.engine.request import Cosmos3ActionRequest
from strands_cosmos3.engine.transformer import RmsNorm

PROMPT_IDS = tuple(range(40, 75))
NEGATIVE_IDS = tuple(range(20, 29))
HW = (80, 112)  # 5 x 7 latents: both edges of the token grid are padded
CHUNK = 8
TIER = 96
"""A tier of pictures beside the pipeline's own, the smallest of which fills this picture up to nine
times its pixels. The VAE would take nine tenths of a case's time.
"""
_ACTION_RESOLUTION_BINS[str(TIER)] = {str(96 / 128): (96, 128)}


@dataclass(frozen=True)
class Case:
    """What is asked of both."""

    folder: Any
    mode: str = "policy"
    steps: int = 4
    guidance: float = 3.0
    dtype: torch.dtype = torch.float32
    fps: float = 15
    seed: int = 5
    prompt: tuple[int, ...] = PROMPT_IDS
    negative: tuple[int, ...] = NEGATIVE_IDS
    clip: int = CHUNK + 1  # frames of an observed clip
    sound: bool = False  # of a checkpoint with ears


def frames() -> list[Image.Image]:
    rng = np.random.RandomState(0)
    return [
        Image.fromarray(rng.randint(0, 255, (*HW, 3), dtype=np.uint8)) for _ in range(CHUNK + 1)
    ]


def given_actions() -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(1).randn(CHUNK, 10)).float() * 0.5


@cache
def pipeline(folder: Any, dtype: torch.dtype) -> Cosmos3OmniPipeline:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = Cosmos3OmniPipeline.from_pretrained(folder, torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.encode = _remembered(pipe.vae, Path(folder))
    if dtype is torch.float64:
        pipe.transformer.time_embedder.double()  # which stays in float32 by default
        without_float32(pipe.transformer)
        without_float32(pipe.vae)
    return pipe


def without_float32(model: torch.nn.Module) -> None:
    """Replace what diffusers, and for Edge the engine, computes in float32 whatever its inputs are:
    norms of the transformer, and copies of pixels in the decoder.
    """
    for module in model.modules():
        if isinstance(module, (RMSNorm, Cosmos3NemotronRMSNorm, RmsNorm)):
            module.forward = partial(_norm, module)
        elif isinstance(module, WanUpsample):
            module.forward = partial(torch.nn.Upsample.forward, module)


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.eps) * module.weight


_encoded: dict[Any, Any] = {}


def _remembered(vae: Any, folder: Path) -> Callable[..., Any]:
    """The stock VAE's ``encode``, once for each of its weights, settings and pixels: it takes nine
    tenths of a case's time, and most cases show the same picture.
    """
    files = b"".join(path.read_bytes() for path in sorted((folder / "vae").iterdir()))
    which, encode = hashlib.sha256(files).digest(), vae.encode

    def remembered(pixels: torch.Tensor) -> Any:
        seen = hashlib.sha256(pixels.double().numpy().tobytes()).digest()
        key = (which, vae.dtype, pixels.dtype, tuple(pixels.shape), seen)
        if key not in _encoded:
            _encoded[key] = encode(pixels)
        return _encoded[key]

    return remembered


def engine(folder: Any, dtype: torch.dtype, sound: bool = False) -> Cosmos3Engine:
    return _engine(folder, dtype, sound)  # one, however it is asked for


@cache
def _engine(folder: Any, dtype: torch.dtype, sound: bool) -> Cosmos3Engine:
    options = EngineOptions(decode_sound=sound)
    return Cosmos3Engine.from_pretrained(folder, dtype=dtype, options=options)


@cache
def oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Video latents [1, C, F, H, W], actions [T, 10] (None in forward dynamics) and latents of sound
    [C, S], if asked, of the stock diffusers pipeline.
    """
    pipe, inverse = pipeline(case.folder, case.dtype), case.mode == "inverse_dynamics"
    condition = CosmosActionCondition(
        mode=case.mode,
        chunk_size=CHUNK,
        domain_name="droid_lerobot",
        resolution_tier=TIER,
        raw_actions=given_actions() if case.mode == "forward_dynamics" else None,
        image=None if inverse else frames()[0],
        video=frames()[: case.clip] if inverse else None,
    )
    pipe.tokenize_prompt = lambda *_, **__: (list(case.prompt), list(case.negative))
    heard: list[torch.Tensor] = []
    pipe.decode_sound = heard.append
    out = pipe(
        prompt="x",
        action=condition,
        enable_sound=case.sound,
        fps=case.fps,
        num_inference_steps=case.steps,
        guidance_scale=case.guidance,
        generator=torch.Generator().manual_seed(case.seed),
        output_type="latent",
    )
    return out.video, out.action[0] if out.action else None, heard[0] if heard else None


@cache
def canvas(folder: Any, clip: bool) -> torch.Tensor:
    """The pipeline's own canvas of pixels, so that both encoders see equal numbers."""
    pipe = pipeline(folder, torch.float32)
    pixels, *_ = pipe._prepare_action_video_conditioning(
        frames() if clip else frames()[:1], TIER, CHUNK + 1, device="cpu", dtype=torch.float32
    )
    return pixels


def request(case: Case) -> Cosmos3ActionRequest:
    """The same case for the engine, with the pipeline's noise."""
    channels = pipeline(case.folder, torch.float32).transformer.config.latent_channel
    shape = (1, channels, CHUNK // 4 + 1, HW[0] // 16, HW[1] // 16)
    generator = torch.Generator().manual_seed(case.seed)
    video_noise = torch.randn(shape, generator=generator)
    sound_noise = None
    if case.sound:
        of_case = engine(case.folder, torch.float32, sound=True)
        latents = of_case._sound.latents(CHUNK + 1, case.fps)
        sound_noise = torch.randn((of_case.config.sound_dim, latents), generator=generator)
    return Cosmos3ActionRequest(
        text_ids=torch.tensor(case.prompt),
        neg_text_ids=torch.tensor(case.negative),
        video_shape=shape[2:],
        action_chunk=CHUNK,
        domain_id=8,
        raw_action_dim=10,
        cond_video_pixels=canvas(case.folder, case.mode == "inverse_dynamics")[:, :, : case.clip],
        mode=case.mode,
        cond_action=given_actions() if case.mode == "forward_dynamics" else None,
        fps=case.fps,
        num_inference_steps=case.steps,
        guidance_scale=case.guidance,
        video_noise=video_noise,
        action_noise=torch.randn((CHUNK, 64), generator=generator),
        sound=case.sound,
        sound_noise=sound_noise,
    )
