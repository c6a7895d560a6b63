"""Where a denoising pass of Nano's size spends its time, and what compiling one layer gains.

    PYTHONPATH=. python benchmarks/gpu_profile.py        # on a CUDA GPU: 27 GB, three minutes
    PYTHONPATH=. python benchmarks/gpu_profile.py --small  # that it runs; kernels need a GPU

Weights are random (``nano_latency.py``). Figures of one run: ``gpu_notes.md``.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import nano_latency
from gpu_kernels import milliseconds
from strands_cosmos3.engine import transformer
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.options import EngineOptions

KINDS = {
    "attention": "flash|fmha|sdpa|attention",
    "matmul": "gemm|nvjet|cublas|splitK|xmma|cutlass",
    "copies": "copy|CatArray|Memcpy|Memset",
    "reductions": "reduce",
}
GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
Run = Callable[..., Any]


def recorded(engine: Cosmos3Engine, small: bool) -> dict[str, tuple[Any, ...]]:
    """Arguments of a pass with both branches and of one without guidance."""
    found: dict[str, tuple[Any, ...]] = {}
    runner = engine._runner

    def spy(*args: Any) -> Any:
        found.setdefault("guided" if len(args[4][0]) == 2 else "unguided", args)
        return runner(*args)

    with patch.object(engine, "_runner", spy):
        engine.step(nano_latency.request(engine, small, 2, (960.0, 1001.0)))
    return found


def traced(run: Run, times: int = 2) -> list[dict[str, Any]]:
    """Events of the profiler's trace, from a few runs after a first one."""
    run()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(times):
            run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def by_kind(events: list[dict[str, Any]], times: int = 2) -> dict[str, float]:
    """Milliseconds of a pass by kind of kernel, and how long the GPU waited between kernels."""
    spent: Counter[str] = Counter()
    end = None
    gpu = (event for event in events if event.get("cat") in GPU_EVENTS)
    for event in sorted(gpu, key=lambda event: event["ts"]):
        kinds = (kind for kind, names in KINDS.items() if re.search(names, event["name"], re.I))
        spent[next(kinds, "elementwise")] += event["dur"] / times / 1e3
        if end is not None:
            spent["gaps"] += max(0.0, event["ts"] - end) / times / 1e3
        end = max(end or 0.0, event["ts"] + event["dur"])
    return dict(spent.most_common())


def by_part(events: list[dict[str, Any]], times: int = 2) -> dict[str, float]:
    """Milliseconds of a pass by the innermost ``@`` range around each kernel's launch."""
    named = [e for e in events if e.get("cat") == "user_annotation" and e["name"][0] == "@"]
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat", "").startswith("cuda_") and "correlation" in e.get("args", {})
    }
    spent: Counter[str] = Counter()
    for event in events:
        launch = launches.get(event.get("args", {}).get("correlation"))
        if event.get("cat") in GPU_EVENTS and launch is not None:
            at = launch["ts"]
            around = [e for e in named if e["ts"] <= at <= e["ts"] + e["dur"]]
            name = min(around, key=lambda e: e["dur"])["name"] if around else "elsewhere"
            spent[name] += event["dur"] / times / 1e3
    return dict(spent.most_common())


@contextmanager
def labelled() -> Iterator[None]:
    """Named ranges around the parts of a layer."""
    parts: list[tuple[Any, str, Callable[..., str] | str]] = [
        (torch.nn.Linear, "forward", lambda m, x: f"linear {m.in_features}x{m.out_features}"),
        (transformer.RmsNorm, "forward", lambda m, x: f"norm of {m.weight.numel()}"),
        (transformer, "rotate", "rope"),
        (transformer, "_over_prompts", "keys and values: stack, cat"),
        (transformer.F, "scaled_dot_product_attention", "attention"),
        (transformer.Mlp, "_block", "silu and product"),
        (transformer.DecoderLayer, "finish", "residuals, transpose"),
        (transformer.DecoderLayer, "forward", "joining attention of branches"),
    ]

    def ranged(old: Run, label: Callable[..., str] | str, *args: Any, **kwargs: Any) -> Any:
        with record_function("@" + (label if isinstance(label, str) else label(*args))):
            return old(*args, **kwargs)

    with ExitStack() as stack:
        for owner, name, label in parts:
            old = getattr(owner, name)
            call = lambda *args, _o=old, _l=label, **kw: ranged(_o, _l, *args, **kw)  # noqa: E731
            stack.enter_context(patch.object(owner, name, call))
        yield


def compiled_layer(engine: Cosmos3Engine, passes: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Seconds of the first pass, milliseconds of later ones, and graphs so far."""
    from torch._dynamo.utils import counters

    forward = torch.compile(transformer.DecoderLayer.forward, fullgraph=True, dynamic=True)
    figures: dict[str, Any] = {}
    for layer in engine.transformer.generation.layers:
        layer.forward = partial(forward, layer)  # pyright: ignore[reportAttributeAccessIssue]
    for name, args in passes.items():
        start = time.perf_counter()
        run = partial(engine._runner, *args)
        run()
        figures[name] = {"first_s": time.perf_counter() - start, "ms": milliseconds(run)}
        figures[name]["graphs"] = counters["stats"]["unique_graphs"]
    return figures


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    small = parser.parse_args().small
    device = torch.device("cpu" if small else "cuda")
    dtype = torch.float32 if small else torch.bfloat16
    for ways in ({},) if small else ({}, {"cuda_graphs": True}):
        engine = nano_latency.build(small, device, dtype, EngineOptions(**ways))
        passes = recorded(engine, small)
        for name, args in passes.items():
            run = partial(engine._runner, *args)
            print(ways, name, f"{milliseconds(run):.1f} ms", by_kind(traced(run)), flush=True)
            if not ways:
                with labelled():
                    print("by part", by_part(traced(run)), flush=True)
        if not ways:
            print("layer compiled", compiled_layer(engine, passes), flush=True)
        engine.close()


if __name__ == "__main__":
    main()
