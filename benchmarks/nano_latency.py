"""Latency of Nano's real size with random weights, part by part, at the DROID shape (3093
generation tokens).

    python benchmarks/nano_latency.py --json nano.json            # on a GPU: bfloat16, 16 GB and a
    few minutes python benchmarks/nano_latency.py --compile --json nano.json  # with torch.compile
    as well python benchmarks/nano_latency.py --small --device cpu        # that the script runs, on
    any machine

Weights are made on the device and never touch a disk; what comes out means nothing, how long it
takes does. Beside each figure stands the floor of the reference notes: a generation forward of Nano
is 49 TFLOP, 62 ms at the 790 TFLOP/s that an H200 was measured to reach in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.formats.layout import Layout
from strands_cosmos3.engine.options import TEXT_CACHE_BYTES, EngineOptions
from strands_cosmos3.engine.request import Cosmos3ActionRequest, pixel_to_latent_shape
from strands_cosmos3.engine.sampler import SchedulerConfig
from strands_cosmos3.engine.vae import WanVae
from strands_cosmos3.engine.variants import VARIANTS
from strands_cosmos3.engine.weights import expected_shapes
from strands_cosmos3.observe.views import canvas_hw, to_canvas

NANO = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
NANO |= {"intermediate_size": 12288, "vocab_size": 151936, "action_dim": 64}
SMALL = {
    **NANO,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL |= {"head_dim": 32, "intermediate_size": 256, "vocab_size": 512, "rope_axes_dim": (6, 5, 5)}
FLOORS_MS = {
    ("4", "every step"): 496.0,
    ("4", "first step only"): 310.0,
    ("2", "every step"): 248.0,
    ("2", "first step only"): 186.0,
}
"""Generation alone, 62 ms a forward: model.md."""
PROMPT_TOKENS, NEGATIVE_TOKENS, CHUNK = 160, 29, 32


class RandomWeights:
    """Stands where a checkpoint's files stand, and fills what it is asked to read with fan-in
    scaled noise.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self.shapes = shapes

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: object = ()) -> None:
        """Whatever is wanted is there."""

    def read_into(self, targets: Mapping[str, torch.Tensor], slices: object = None) -> None:
        for name, target in targets.items():
            scale = 1.0 if "norm" in name or target.ndim < 2 else target[0].numel() ** -0.5
            target.normal_(0, scale)
            if "norm" in name or "gamma" in name:
                target.fill_(1.0)


def build(
    small: bool, device: torch.device, dtype: torch.dtype, options: EngineOptions
) -> Cosmos3Engine:
    config = TransformerConfig.from_dict(SMALL if small else NANO)
    base = (8, 8) if small else (160, 256)
    vae_config = {
        "base_dim": base[0],
        "decoder_base_dim": base[1],
        "z_dim": config.latent_channel,
        "dim_mult": [1, 2, 4, 4],
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0] * config.latent_channel,
        "latents_std": [1.0] * config.latent_channel,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_temporal": 4,
        "scale_factor_spatial": 16,
    }
    weights: Any = RandomWeights(expected_shapes(config))
    scheduler = SchedulerConfig(use_karras_sigmas=False, flow_shift=5.0, native_flow=True)
    checkpoint = Checkpoint(
        Path("random"),
        config,
        scheduler,
        vae_config,
        weights,
        weights,
        VARIANTS["small-silu"],
        "joint_pos",
        {},
        layout=Layout(Path("random")),
    )
    vae = WanVae(vae_config, weights, device, dtype, decoder=False)
    options.require_runnable(device.type)
    transformer = checkpoint.load_transformer(
        device, dtype, torch.device("cpu") if options.offload_text else None
    )
    return Cosmos3Engine(checkpoint, transformer, vae, device, options=options)


def request(
    engine: Cosmos3Engine, small: bool, steps: int, interval: tuple[float, float] | None
) -> Cosmos3ActionRequest:
    hw, tier = ((64, 64), 256) if small else ((540, 640), 480)
    rng = np.random.RandomState(0)
    picture = rng.randint(0, 256, (1, *hw, 3), dtype=np.uint8)
    canvas = to_canvas(picture, canvas_hw(*hw, tier))
    return Cosmos3ActionRequest(
        text_ids=torch.from_numpy(rng.randint(0, engine.config.vocab_size, PROMPT_TOKENS)),
        neg_text_ids=torch.from_numpy(rng.randint(0, engine.config.vocab_size, NEGATIVE_TOKENS)),
        video_shape=pixel_to_latent_shape(CHUNK + 1, *canvas.content_hw),
        action_chunk=CHUNK,
        domain_id=8,
        raw_action_dim=8,
        action_prefix=torch.zeros(1, 8),
        cond_video_pixels=torch.from_numpy(canvas.frames).permute(3, 0, 1, 2)[None],
        fps=15.0,
        num_inference_steps=steps,
        guidance_scale=3.0,
        guidance_interval=interval,
        return_video=False,
    )


def measure(
    small: bool, device: torch.device, dtype: torch.dtype, options: EngineOptions, repeats: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = build(small, device, dtype, options)
    figures: dict[str, Any] = {"kept_gib": engine.kept_bytes / 2**30, **vars(options)}
    for steps in (4, 2):
        for name, interval in (("every step", None), ("first step only", (960.0, 1001.0))):
            asked = request(engine, small, steps, interval)
            cold = engine.step(asked)["timing"]  # prefills the prompts, captures the graphs
            engine.step(asked)
            runs = [engine.step(asked)["timing"] for _ in range(repeats)]
            warm = {part: statistics.median(run[part] for run in runs) for part in runs[0]}
            floor = None if small else FLOORS_MS[(str(steps), name)]
            figures[f"N={steps}, guidance {name}"] = {
                "warm_ms": warm,
                "cold_ms": cold,
                "generation_floor_ms": floor,
            }
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    engine.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--small", action="store_true", help="a tiny model, to see that the script runs"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="measure with torch.compile as well, alone and with graphs",
    )
    parser.add_argument(
        "--offload-text", action="store_true", help="keep the text tower in host memory"
    )
    parser.add_argument(
        "--text-cache-bytes", type=int, default=TEXT_CACHE_BYTES, help="bytes of prompts to keep"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or "cpu",
        "torch": torch.__version__,
        "dtype": options.dtype,
        "tokens": "small" if options.small else 3093,
    }
    ways = {"eager": {}, "graphs": {"cuda_graphs": True}, "compiled": {"compile": True}}
    ways["compiled graphs"] = ways["graphs"] | ways["compiled"]
    for name, way in ways.items():
        if (device.type == "cuda" or "cuda_graphs" not in way) and (
            options.compile or "compile" not in way
        ):
            chosen = EngineOptions(
                offload_text=options.offload_text, text_cache_bytes=options.text_cache_bytes, **way
            )
            print(f"{name} ...", file=sys.stderr, flush=True)
            figures[name] = measure(
                options.small, device, getattr(torch, options.dtype), chosen, options.repeats
            )
            if options.json:  # after each way: compiling takes minutes
                options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
