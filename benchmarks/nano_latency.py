"""Latency of Nano's real size with random weights, part by part, at the DROID shape (3093
generation tokens).

    python benchmarks/nano_latency.py > nano.json      # a GPU with 28 GB, at most ten minutes
    python benchmarks/nano_latency.py --small --device cpu   # that it runs, on any machine

Weights are made on the device and never touch a disk; what comes out means nothing, how long it
takes does. Every way of computing is measured with every form of the weights; a table of them, the
kernels that take longest, and the time of each of torch's kernels for attention go to standard
error and into the figures. A floor stands beside each figure: a generation forward of Nano is 49
TFLOP, 62 ms at the 790 TFLOP/s that an H200 was measured to reach in bfloat16.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile as profiling

import report
from engine import Setting, random_request
from recipes.random_checkpoint import fresh_vae
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.formats.layout import Layout
from strands_cosmos3.engine.loading import load_transformer
from strands_cosmos3.engine.options import TEXT_CACHE_BYTES, EngineOptions, Quantize
from strands_cosmos3.engine.parallel_context import SingleProcess
from strands_cosmos3.engine.quantised import Quantization
from strands_cosmos3.engine.request import Cosmos3ActionRequest
from strands_cosmos3.engine.sampler import SchedulerConfig
from strands_cosmos3.engine.vae import WanVae
from strands_cosmos3.engine.variants import VARIANTS
from strands_cosmos3.engine.wan_config import WanConfig
from strands_cosmos3.engine.weights import expected_shapes
from strands_cosmos3.errors import ConfigError

NANO = TransformerConfig(4096, 36, 32, 8, 128, 12288, 151936, 64)
SMALL = TransformerConfig(128, 2, 4, 2, 32, 256, 512, 64, rope_axes_dim=(6, 5, 5))
DROID = Setting("480 tier, DROID composite", (540, 640), 480, 32)
SMALL_DROID = Setting("small", (64, 64), 256, 32)
FORWARD_MS = 62.0
INTERVALS = {"every step": None, "first step only": (960.0, 1001.0)}
Way = Literal["eager", "graphs", "compiled", "compiled graphs"]
Form = Quantize | Literal["unquantised"]
OPTIONS: dict[Way, dict[str, Any]] = {
    "eager": {},
    "compiled": {"compile": True},
    "graphs": {"cuda_graphs": True},
    "compiled graphs": {"compile": True, "cuda_graphs": True},
}
_KERNELS = 12  # that a profile names
_ATTENTION_RUNS = 20


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
        vae_config = WanConfig.from_dict(
            fresh_vae(base, decoder_base, config.latent_channel).config
        )
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
    transformer = load_transformer(
        checkpoint,
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


def attention_ms(
    config: TransformerConfig, tokens: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float | str]:
    """Milliseconds of one layer's attention by torch's own choice of kernel and by each kernel;
    why one cannot.
    """
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    q, k, v = (
        torch.randn(2, n, tokens, config.head_dim, device=device, dtype=dtype) for n in heads
    )

    def run() -> float:
        for i in range(_ATTENTION_RUNS + 1):
            if i == 1:
                start = now_s(device)
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return (now_s(device) - start) / _ATTENTION_RUNS * 1e3

    spent: dict[str, float | str] = {"torch's choice": run()}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                spent[name] = run()
        except RuntimeError as error:
            spent[name] = str(error).splitlines()[0]
    return spent


def now_s(device: torch.device) -> float:
    """Seconds, after all that was asked of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def chunks(engine: Cosmos3Engine, small: bool, repeats: int) -> dict[str, Any]:
    """Milliseconds of the first and of later chunks, by the number of guided steps; kernels of
    the first kind.
    """
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
            }
            if len(figures) == 1:
                figures["kernels_ms"] = kernels_ms(engine, asked)
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


def table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Milliseconds of denoising (of the whole chunk), of the first chunk, and memory, a line for
    each combination.
    """
    rows: list[list[str]] = []
    for name, figures in measured.items():
        cases = {case: at for case, at in figures.items() if case.startswith("N=")}
        if not rows:
            titles = ["way", *cases, "first chunk", "GiB"]
            rows = [titles, ["---"] * len(titles)]
        cells = [
            f"{at['warm_ms']['denoise']:.0f} ({at['warm_ms']['total']:.0f})"
            for at in cases.values()
        ]
        cells += [f"{at['cold_ms']['total']:.0f}" for at in list(cases.values())[:1]]
        cells += [figures["refused"]] if "refused" in figures else []
        memory = f"{figures.get('peak_gib', figures.get('kept_gib', 0.0)):.1f}"
        rows.append([name, *cells, memory])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def measure(
    device: str = "cuda",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    small: bool = False,
    offload_text: bool = False,
    text_cache_bytes: int = TEXT_CACHE_BYTES,
    repeats: int = 5,
    ways: tuple[Way, ...] = (),
    forms: tuple[Form, ...] = ("unquantised", "fp8", "int8", "int8-weights"),
    minutes: float = 9.0,
) -> dict[str, Any]:
    """Measure each way of computing a chunk with each form of the weights.

    Args:
        device: cuda, cuda:N or cpu.
        dtype: Of weights and hidden states.
        small: A tiny model, to see that the script runs.
        offload_text: Keep the text tower in host memory.
        text_cache_bytes: Bytes of prompts to keep.
        repeats: Chunks of which the medians are reported.
        ways: All by default, on a CPU eager.
        forms: Of the generation tower's weights.
        minutes: After which no further combination begins.
    """
    where, cuda = torch.device(device), device.startswith("cuda")
    kind = getattr(torch, dtype)
    config = SMALL if small else NANO
    end_s = time.perf_counter() + 60 * minutes
    attention = attention_ms(config, 64 if small else 3093, where, kind)
    report.progress(json.dumps(attention))
    measured: dict[str, Any] = {}
    for form, way in product(forms, ways or (tuple(OPTIONS) if cuda else ("eager",))):
        name = way if form == "unquantised" else f"{way}, {form}"
        if time.perf_counter() > end_s:
            measured[name] = {"refused": f"not begun after {minutes:g} minutes"}
            continue
        report.progress(f"{name} ...")
        options = EngineOptions(
            offload_text=offload_text,
            text_cache_bytes=text_cache_bytes,
            quantize=None if form == "unquantised" else form,
            **OPTIONS[way],
        )
        torch.manual_seed(0)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            with build(small, where, kind, options) as engine:
                kept_gib = engine.kept_bytes / 2**30
                measured[name] = {"kept_gib": kept_gib, **chunks(engine, small, repeats)}
        except ConfigError as error:  # this device has no such kernel
            measured[name] = {"refused": str(error)}
        if cuda:
            measured[name]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        report.progress(json.dumps(measured[name]))  # should a later one not end
    report.progress(table(measured))
    name = torch.cuda.get_device_name(where) if cuda else platform.processor() or "cpu"
    tokens = "small" if small else 3093
    figures = {"device": name, "dtype": dtype, "tokens": tokens, "attention_ms": attention}
    return {**figures, "ways": measured, "table": table(measured).splitlines()}


if __name__ == "__main__":
    report.run(measure)
