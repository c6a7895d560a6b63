"""Latency of Nano's real size with random weights, part by part, at the DROID shape (3093
generation tokens).

    python benchmarks/nano_latency.py > nano.json      # a GPU with 28 GB, a few minutes
    python benchmarks/nano_latency.py --compile        # with torch.compile as well
    python benchmarks/nano_latency.py --profile        # which kernels take longest
    python benchmarks/nano_latency.py --small --device cpu   # that it runs, on any machine

Weights are made on the device and never touch a disk; what comes out means nothing, how long it
takes does. Beside each figure stands a floor: a generation forward of Nano is 49 TFLOP, 62 ms at
the 790 TFLOP/s that an H200 was measured to reach in bfloat16.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import profile as profiling

import report
from engine import Setting, random_request
from recipes.random_checkpoint import fresh_vae
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.formats.layout import Layout
from strands_cosmos3.engine.options import TEXT_CACHE_BYTES, EngineOptions, Quantize
from strands_cosmos3.engine.parallel_context import SingleProcess
from strands_cosmos3.engine.quantised import Quantization
from strands_cosmos3.engine.request import Cosmos3ActionRequest
from strands_cosmos3.engine.sampler import SchedulerConfig
from strands_cosmos3.engine.vae import WanVae
from strands_cosmos3.engine.variants import VARIANTS
from strands_cosmos3.engine.weights import expected_shapes
from strands_cosmos3.errors import ConfigError

NANO = TransformerConfig(4096, 36, 32, 8, 128, 12288, 151936, 64)
SMALL = TransformerConfig(128, 2, 4, 2, 32, 256, 512, 64, rope_axes_dim=(6, 5, 5))
DROID = Setting("480 tier, DROID composite", (540, 640), 480, 32)
SMALL_DROID = Setting("small", (64, 64), 256, 32)
FORWARD_MS = 62.0
INTERVALS = {"every step": None, "first step only": (960.0, 1001.0)}
_KERNELS = 12  # that a profile names


class RandomWeights:
    """Stands where a checkpoint's files stand, and fills what it is asked to read with fan-in
    scaled noise.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device):
        self.shapes = shapes
        self.device = device
        self.eight_bit = None

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: object = ()) -> None:
        """Whatever is wanted is there."""

    def read_into(self, targets: Mapping[str, Any], slices: object = None) -> None:
        for name, target in targets.items():
            scale = 1.0 if len(target.shape) < 2 else math.prod(target.shape[1:]) ** -0.5
            weight = torch.randn(target.shape, device=self.device).mul_(scale)
            target.copy_(weight.fill_(1.0) if "norm" in name or "gamma" in name else weight)


def build(
    small: bool, device: torch.device, dtype: torch.dtype, options: EngineOptions
) -> Cosmos3Engine:
    config = SMALL if small else NANO
    base, decoder_base = (8, 8) if small else (160, 256)
    with torch.device("meta"):
        vae_config = dict(fresh_vae(base, decoder_base, config.latent_channel).config)
    weights: Any = RandomWeights(expected_shapes(config), device)
    checkpoint = Checkpoint(
        Path("random"),
        config,
        SchedulerConfig(use_karras_sigmas=False, flow_shift=5.0, native_flow=True),
        vae_config,
        weights,
        weights,
        VARIANTS["small-silu"],
        "joint_pos",
        {},
        layout=Layout(Path("random")),
    )
    options.require_runnable(device.type)
    quantization = Quantization.of(config, None, options)
    if quantization is not None:
        quantization.require_kernels({}, device, dtype)
    transformer = checkpoint.load_transformer(
        device,
        dtype,
        torch.device("cpu") if options.offload_text else None,
        quantization=quantization,
    )
    vae = WanVae(vae_config, weights, device, dtype, decoder=False)
    return Cosmos3Engine(
        checkpoint,
        transformer,
        vae,
        parallel_context=SingleProcess(device),
        options=options,
        preview=None,
    )


def chunks(engine: Cosmos3Engine, small: bool, repeats: int, profile: bool) -> dict[str, Any]:
    """Milliseconds of the first and of later chunks, by the number of guided steps."""
    figures: dict[str, Any] = {}
    for steps in (4, 2):
        for when, interval in INTERVALS.items():
            asked = replace(
                random_request(SMALL_DROID if small else DROID, engine, steps),
                raw_action_dim=8,
                action_prefix=torch.zeros(1, 8),  # the state, one row more
                action_noise=None,
                guidance_interval=interval,
            )
            cold = engine.step(asked)["timing"]  # prefills the prompts, captures the graphs
            engine.step(asked)
            runs = [engine.step(asked)["timing"] for _ in range(repeats)]
            forwards = 2 * steps if interval is None else steps + 1
            figures[f"N={steps}, guidance {when}"] = {
                "warm_ms": report.medians(runs),
                "cold_ms": cold,
                "generation_floor_ms": None if small else forwards * FORWARD_MS,
                **({"kernels_ms": kernels_ms(engine, asked)} if profile else {}),
            }
    return figures


def kernels_ms(engine: Cosmos3Engine, asked: Cosmos3ActionRequest) -> dict[str, float]:
    """Milliseconds of all kernels of a chunk and of those that take longest; on a CPU, of
    operators.
    """
    with profiling() as trace:
        engine.step(asked)
    kind = engine.device.type.upper()
    events = [event for event in trace.key_averages() if event.device_type.name == kind]
    time = "self_cpu_time_total" if kind == "CPU" else "self_device_time_total"
    spent = {event.key: getattr(event, time) / 1e3 for event in events}
    longest = sorted(spent, key=spent.__getitem__, reverse=True)[:_KERNELS]
    return {"all": sum(spent.values()), **{name: spent[name] for name in longest}}


def measure(
    device: str = "cuda",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    small: bool = False,
    compile: bool = False,
    profile: bool = False,
    offload_text: bool = False,
    text_cache_bytes: int = TEXT_CACHE_BYTES,
    repeats: int = 10,
    forms: tuple[Quantize | Literal["unquantised"], ...] = ("unquantised", "int8", "fp8"),
) -> dict[str, Any]:
    """Measure each way of computing a chunk, eager, with CUDA graphs, and compiled, with each form
    of the weights.

    Args:
        device: cuda, cuda:N or cpu.
        dtype: Of weights and hidden states.
        small: A tiny model, to see that the script runs.
        compile: Measure torch.compile as well, alone and with graphs.
        profile: Also the kernels of each chunk.
        offload_text: Keep the text tower in host memory.
        text_cache_bytes: Bytes of prompts to keep.
        repeats: Chunks of which the medians are reported.
        forms: Of the generation tower's weights.
    """
    where, cuda = torch.device(device), device.startswith("cuda")
    ways = {"eager": {}, "graphs": {"cuda_graphs": True}, "compiled": {"compile": True}}
    ways["compiled graphs"] = ways["graphs"] | ways["compiled"]
    measured: dict[str, Any] = {}
    for (name, way), form in product(ways.items(), forms):
        if ("cuda_graphs" in way and not cuda) or ("compile" in way and not compile):
            continue
        name = name if form == "unquantised" else f"{name}, {form}"
        report.progress(f"{name} ...")
        options = EngineOptions(
            offload_text=offload_text,
            text_cache_bytes=text_cache_bytes,
            quantize=None if form == "unquantised" else form,
            **way,
        )
        torch.manual_seed(0)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            with build(small, where, getattr(torch, dtype), options) as engine:
                kept_gib = engine.kept_bytes / 2**30
                measured[name] = {"kept_gib": kept_gib, **chunks(engine, small, repeats, profile)}
        except ConfigError as error:  # this device has no such kernel
            measured[name] = {"refused": str(error)}
        if cuda:
            measured[name]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        report.progress(json.dumps(measured[name]))  # should a later way not end: compiling is slow
    name = torch.cuda.get_device_name(where) if cuda else platform.processor() or "cpu"
    return {"device": name, "dtype": dtype, "tokens": "small" if small else 3093, "ways": measured}


if __name__ == "__main__":
    report.run(measure)
