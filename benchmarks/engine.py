"""The engine in float32 against diffusers' pipeline, or against itself in fewer bits: the same
random weights in one process, CPU time.

The architecture is genuine at a quarter of Nano's width (``MID_SIZE``: hidden 1024, 8 layers, 16
query and 8 key heads of 64, intermediate 3072), with VAE base widths of 24 and 32 for Nano's ratio
of work. Prompts have 160 and 29 tokens and are cached in the engine, as in a control loop from the
second chunk on; the first call is reported separately. The pipeline always decodes its video; its
time up to the latents is measured in the same run.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

import report
from recipes.random_checkpoint import MID_SIZE, FactorySizes, write_checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.engine.request import Cosmos3ActionRequest, pixel_to_latent_shape
from strands_cosmos3.observe.views import canvas_hw, to_canvas

_PROMPT_TOKENS = 160
_NEGATIVE_TOKENS = 29
_FPS = 15.0
_SEED = 0
_Run = Callable[[], torch.Tensor]
"""One inference; returns its actions [rows, width]."""


@dataclass(frozen=True)
class Setting:
    """One workload: height and width of the composite, resolution tier, action rows."""

    name: str
    picture_hw: tuple[int, int]
    tier: int
    chunk: int


SETTINGS = {
    "480": Setting("480 tier, DROID composite", (528, 640), 480, 32),
    "256": Setting("256 tier, small composite", (160, 320), 256, 16),
}


def measure(
    tier: Literal["256", "480"] = "256",
    against: Literal["pipeline", "bfloat16", "int8", "int8-weights"] = "pipeline",
    steps: int = 4,
    guidance: float = 3.0,
    repeats: int = 3,
    threads: int = 1,
    sizes: FactorySizes = MID_SIZE,
) -> dict[str, Any]:
    """Run both sides alternately on a key of :data:`SETTINGS`; return the medians, their ratios to
    the engine's in float32, and the largest difference of actions.

    Both are warmed; every other round begins with the other side.

    Args:
        tier: A small composite at the 256 tier (minutes), or DROID's at the 480 tier (half an
            hour).
        against: diffusers' pipeline, or the engine in bfloat16 or with weights in 8 bits.
        steps: Denoising steps.
        guidance: Guidance scale.
        repeats: Runs of each side, of which the medians are reported.
        threads: Threads of torch.
        sizes: Sizes of the random model.
    """
    setting = SETTINGS[tier]
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as loaded:
        report.progress("writing a random checkpoint")
        write_checkpoint(folder, sizes=sizes)
        report.progress("loading it twice")

        def load(**options: Any) -> Cosmos3Engine:
            chosen = EngineOptions(**{"dtype": "float32", **options})
            return loaded.enter_context(
                Cosmos3Engine.from_pretrained(folder, options=chosen, domains=(8,))
            )

        engine = load()
        request = random_request(setting, engine, steps, guidance)
        latent_ms: list[float] = []
        if against == "pipeline":
            name = "pipeline_decoded"
            other = _pipeline_run(_pipeline(folder), setting, request, latent_ms)
        else:
            option = "dtype" if against == "bfloat16" else "quantize"
            name, other = against, _engine_run(load(**{option: against}), request)
        native = _engine_run(engine, request)
        theirs = other()
        latent_ms.clear()  # the warm-up's
        start_s = time.process_time()
        actions = native()
        cold_s = time.process_time() - start_s
        cpu_ms = report.alternate({"native": native, name: other}, repeats)
        cpu_ms |= {"pipeline_latent": latent_ms} if latent_ms else {}
    cpu_s = {name: float(np.median(runs_ms)) / 1e3 for name, runs_ms in cpu_ms.items()}
    each = {name: np.divide(runs_ms, cpu_ms["native"]) for name, runs_ms in cpu_ms.items()}
    return {
        "setting": setting.name,
        "generation_tokens": _tokens(request),
        "steps": steps,
        "guidance": guidance,
        "threads": threads,
        "repeats": repeats,
        "cpu_s": cpu_s,
        "cold_cpu_s": cold_s,
        "ratio": {name: median_s / cpu_s["native"] for name, median_s in cpu_s.items()},
        "ratio_each": {name: ratios.tolist() for name, ratios in each.items()},
        "largest_action_difference": float((actions - theirs).abs().max()),
        "actions_rms": float(actions.square().mean().sqrt()),
        "model": vars(sizes),
    }


def _engine_run(engine: Cosmos3Engine, request: Cosmos3ActionRequest) -> _Run:
    return lambda: engine.step(request)["action"][0]


def _pipeline(folder: str) -> Any:
    from diffusers import Cosmos3OmniPipeline  # pyright: ignore[reportPrivateImportUsage]
    from diffusers.utils import logging

    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = Cosmos3OmniPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _picture(setting: Setting) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, (*setting.picture_hw, 3), dtype=np.uint8)


def random_request(
    setting: Setting, engine: Cosmos3Engine, steps: int, guidance: float = 3.0
) -> Cosmos3ActionRequest:
    """A setting's request with seeded noise for a picture, the prompts and the sampler."""
    canvas = to_canvas(_picture(setting)[None], canvas_hw(*setting.picture_hw, setting.tier))
    rng = np.random.RandomState(_SEED)
    vocabulary = engine.config.vocab_size
    # the pipeline draws video, then action, from one generator
    generator = torch.Generator().manual_seed(_SEED)
    shape = pixel_to_latent_shape(setting.chunk + 1, *canvas.content_hw)
    video_noise = torch.randn((1, engine.config.latent_channel, *shape), generator=generator)
    action_noise = torch.randn((setting.chunk, engine.config.action_dim), generator=generator)
    return Cosmos3ActionRequest(
        text_ids=torch.from_numpy(rng.randint(0, vocabulary, _PROMPT_TOKENS)),
        neg_text_ids=torch.from_numpy(rng.randint(0, vocabulary, _NEGATIVE_TOKENS)),
        video_shape=shape,
        action_chunk=setting.chunk,
        domain_id=8,
        raw_action_dim=10,
        cond_video_pixels=torch.from_numpy(canvas.frames).permute(3, 0, 1, 2)[None],
        fps=_FPS,
        num_inference_steps=steps,
        guidance_scale=guidance,
        video_noise=video_noise,
        action_noise=action_noise,
        return_video=False,
    )


def _tokens(request: Cosmos3ActionRequest) -> int:
    frames, height, width = request.video_shape
    return frames * -(-height // 2) * -(-width // 2) + request.action_chunk


def _pipeline_run(
    pipe: Any, setting: Setting, request: Cosmos3ActionRequest, latent_ms: list[float]
) -> _Run:
    """A call of the pipeline, which adds its time up to the latents to ``latent_ms``."""
    from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import CosmosActionCondition

    assert request.neg_text_ids is not None
    prompts = request.text_ids.tolist(), request.neg_text_ids.tolist()
    pipe.tokenize_prompt = lambda *_, **__: prompts
    condition = CosmosActionCondition(
        mode="policy",
        chunk_size=setting.chunk,
        domain_name="droid_lerobot",
        resolution_tier=setting.tier,
        image=Image.fromarray(_picture(setting)),
    )
    decode = pipe.vae.decode
    start_s = 0.0

    def timed_decode(*args: Any, **options: Any) -> Any:
        latent_ms.append((time.process_time() - start_s) * 1e3)
        return decode(*args, **options)

    pipe.vae.decode = timed_decode

    def run() -> torch.Tensor:
        nonlocal start_s
        start_s = time.process_time()
        out = pipe(
            prompt="injected",
            action=condition,
            fps=_FPS,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            generator=torch.Generator().manual_seed(_SEED),
            output_type="pt",
        )
        return out.action[0]

    return run


if __name__ == "__main__":
    report.run(measure)
