"""The engine against diffusers' pipeline, with the same process and weights, one
thread, CPU time.

The weights are random. The architecture is genuine at a quarter of Nano's width (``MID_SIZE``:
hidden 1024, 8 layers, 16 query and 8 key heads of 64, intermediate 3072), with VAE base widths of
24 and 32 for Nano's ratio of work. Prompts have 160 and 29 tokens and are cached in the engine, as
in a control loop from the second chunk on; the first call is reported separately. The pipeline
always decodes its video; its time up to the latents is measured in the same run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

import report
from recipes.random_checkpoint import MID_SIZE, FactorySizes, write_checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.request import Cosmos3ActionRequest, pixel_to_latent_shape
from strands_cosmos3.observe.views import canvas_hw, to_canvas

_PROMPT_TOKENS, _NEGATIVE_TOKENS, _FPS, _SEED = 160, 29, 15.0, 0
_RunPipe = Callable[[], tuple[float, float, torch.Tensor]]


@dataclass(frozen=True)
class Setting:
    """One workload: height and width of the composite, resolution tier, action rows, and the
    project's target ratios.
    """

    name: str
    picture_hw: tuple[int, int]
    tier: int
    chunk: int
    target_decoded: float
    target_latent: float


SETTINGS = {
    "480": Setting("480 tier, DROID composite", (528, 640), 480, 32, 2.4, 1.45),
    "256": Setting("256 tier, small composite", (160, 320), 256, 16, 4.5, 2.4),
}


def measure(
    tier: Literal["256", "480"] = "256",
    *,
    steps: int = 4,
    guidance: float = 3.0,
    repeats: int = 3,
    threads: int = 1,
    sizes: FactorySizes = MID_SIZE,
) -> dict[str, Any]:
    """Run pipeline and engine alternately on a key of :data:`SETTINGS`; return the medians, ratios
    and differences.

    Both are warmed; every other round begins with the pipeline.

    Args:
        tier: A small composite at the 256 tier (minutes), or DROID's at the 480 tier (half an
            hour).
        steps: Denoising steps.
        guidance: Guidance scale.
        repeats: Runs of each side, of which the medians are reported.
        threads: Threads of torch.
        sizes: Sizes of the random model.
    """
    chosen = SETTINGS[tier]
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        report.progress("writing a random checkpoint")
        write_checkpoint(folder, sizes=sizes)
        report.progress("loading it twice")
        pipe, engine = (
            _pipeline(folder),
            Cosmos3Engine.from_pretrained(folder, dtype=torch.float32, domains=(8,)),
        )
        request = random_request(chosen, engine, steps, guidance)
        run_pipe = _pipe_runner(pipe, chosen, _picture(chosen), request, steps, guidance)
        cold = cpu_seconds(lambda: engine.step(request))[0]
        run_pipe()  # as warm as the engine
        runs, difference = _alternate(engine, request, run_pipe, repeats)
        engine.close()
    native, latent, decoded = (statistics.median(column) for column in zip(*runs, strict=True))
    return {
        "setting": chosen.name,
        "generation_tokens": _tokens(request),
        "steps": steps,
        "guidance": guidance,
        "threads": threads,
        "repeats": repeats,
        "cpu_s": {
            "native": native,
            "native_cold": cold,
            "pipeline_latent": latent,
            "pipeline_decoded": decoded,
        },
        "ratio": {"decoded": decoded / native, "latent": latent / native},
        "ratio_each": {
            "decoded": [d / n for n, _, d in runs],
            "latent": [x / n for n, x, _ in runs],
        },
        "target": {"decoded": chosen.target_decoded, "latent": chosen.target_latent},
        "largest_action_difference": difference,
        "model": vars(sizes),
    }


def _alternate(
    engine: Cosmos3Engine,
    request: Cosmos3ActionRequest,
    run_pipe: _RunPipe,
    repeats: int,
) -> tuple[list[tuple[float, float, float]], float]:
    """CPU seconds (engine, pipeline's latents, pipeline with video) of each run, and the largest
    difference of actions.
    """
    runs: list[tuple[float, float, float]] = []
    difference = 0.0
    for i in range(repeats):
        report.progress(f"run {i + 1} of {repeats}")
        theirs_first = run_pipe() if i % 2 else None
        native, ours = cpu_seconds(lambda: engine.step(request))
        decoded, latent, theirs = theirs_first or run_pipe()
        runs.append((native, latent, decoded))
        difference = max(difference, float((ours["action"][0] - theirs).abs().max()))
    return runs, difference


def cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and what it returns."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def _pipeline(folder: str | Path) -> Any:
    from diffusers import Cosmos3OmniPipeline  # pyright: ignore[reportPrivateImportUsage]
    from diffusers.utils import logging

    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = Cosmos3OmniPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _picture(chosen: Setting) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, (*chosen.picture_hw, 3), dtype=np.uint8)


def random_request(
    chosen: Setting, engine: Cosmos3Engine, steps: int, guidance: float = 3.0
) -> Cosmos3ActionRequest:
    """A setting's request with seeded noise for a picture, the prompts and the sampler."""
    canvas = to_canvas(_picture(chosen)[None], canvas_hw(*chosen.picture_hw, chosen.tier))
    rng, vocabulary = np.random.RandomState(_SEED), engine.config.vocab_size
    # the pipeline draws video, then action, from one generator
    generator = torch.Generator().manual_seed(_SEED)
    shape = pixel_to_latent_shape(chosen.chunk + 1, *canvas.content_hw)
    video_noise = torch.randn((1, engine.config.latent_channel, *shape), generator=generator)
    action_noise = torch.randn((chosen.chunk, engine.config.action_dim), generator=generator)
    return Cosmos3ActionRequest(
        text_ids=torch.from_numpy(rng.randint(0, vocabulary, _PROMPT_TOKENS)),
        neg_text_ids=torch.from_numpy(rng.randint(0, vocabulary, _NEGATIVE_TOKENS)),
        video_shape=shape,
        action_chunk=chosen.chunk,
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


def _pipe_runner(
    pipe: Any,
    chosen: Setting,
    picture: np.ndarray,
    request: Cosmos3ActionRequest,
    steps: int,
    guidance: float,
) -> _RunPipe:
    """A call of the pipeline that returns its CPU seconds, those up to the latents, and the
    actions.
    """
    from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import CosmosActionCondition

    assert request.neg_text_ids is not None
    prompts = request.text_ids.tolist(), request.neg_text_ids.tolist()
    pipe.tokenize_prompt = lambda *_, **__: prompts
    condition = CosmosActionCondition(
        mode="policy",
        chunk_size=chosen.chunk,
        domain_name="droid_lerobot",
        resolution_tier=chosen.tier,
        image=Image.fromarray(picture),
    )
    decode, reached = pipe.vae.decode, [0.0]

    def timed_decode(*args: Any, **options: Any) -> Any:
        reached[0] = time.process_time()
        return decode(*args, **options)

    pipe.vae.decode = timed_decode

    def run() -> tuple[float, float, torch.Tensor]:
        start = time.process_time()
        out = pipe(
            prompt="injected",
            action=condition,
            fps=_FPS,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=torch.Generator().manual_seed(_SEED),
            output_type="pt",
        )
        return time.process_time() - start, reached[0] - start, out.action[0]

    return run


if __name__ == "__main__":
    report.run(measure)
