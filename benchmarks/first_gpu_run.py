"""A first run of a released checkpoint on a GPU: what it should measure, in one report to send in.

    python benchmarks/first_gpu_run.py --checkpoint nvidia/Cosmos3-Nano-Policy-DROID
    python benchmarks/first_gpu_run.py --checkpoint nvidia/Cosmos3-Edge-Policy-DROID --episodes 5
    python benchmarks/first_gpu_run.py --small --device cpu  # that the script runs, on any machine

It records the machine, the self-test, the latency and memory of a chunk in each way of computing
it, and optionally rollouts on the simulated table, which these checkpoints were not trained on. The
report has no pictures, paths or names of yours.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

import report
from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3 import Cosmos3Policy, Robot
from strands_cosmos3.commands import self_test
from strands_cosmos3.embodiments import DROID_RIG
from strands_cosmos3.engine.options import QUANTIZE
from strands_cosmos3.errors import ConfigError, Cosmos3Error
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.types import Observation

Way = Literal[
    "eager",
    "offload_text",
    "cuda_graphs",
    "compile",
    "compile+cuda_graphs",
    "int8",
    "int8-weights",
    "fp8",
    "compile+int8",
    "compile+int8-weights",
    "compile+fp8",
]
"""Options of the engine that are set, and the form of 8-bit weights, joined by +."""


def latency(model: str, options: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Seconds to load, milliseconds of the first and of later chunks by part, and memory."""
    rng = np.random.RandomState(0)
    views = {name: rng.randint(0, 256, (360, 640, 3), dtype=np.uint8) for name in DROID_RIG.views}
    seen = Observation(HOME_Q, 1.0, views)
    cuda = options["device"].startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with Cosmos3Policy("droid", "panda", model=model, options=options, seed=0) as policy:
        load_s = time.perf_counter() - start
        runs = []
        for _ in range(repeats + 2):
            policy.plan(seen, self_test.TASK)
            runs.append(dict(policy.last_rollout["timing"]))
    warm = runs[2:]
    return {
        "load_s": load_s,
        "first_ms": runs[0],
        "median_ms": report.medians(warm),
        "max_total_ms": max(run["total_ms"] for run in warm),
        **({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if cuda else {}),
    }


def rollouts(model: str, options: dict[str, Any], episodes: int) -> dict[str, Any]:
    """Episodes of pick on the simulated table."""
    robot = Robot()
    config = {"embodiment": "droid", "backend": "native", "model": model, **options}
    ran = [
        robot.run_policy(task="pick", duration=20.0, policy_config=config, seed=seed)
        for seed in range(episodes)
    ]
    return {
        "successes": sum(bool(rollout.success) for rollout in ran),
        "episodes": [rollout.to_dict() for rollout in ran],
    }


def run(
    checkpoint: str | None = None,
    small: bool = False,
    device: str = "cuda",
    ways: Sequence[Way] = (),
    repeats: int = 10,
    episodes: int = 0,
    out: Path = Path("first_gpu_run.json"),
) -> dict[str, Any]:
    """Measure a checkpoint and write the report, anew after each part.

    Args:
        checkpoint: A folder or hub repository.
        small: Instead, a small random checkpoint, to see that the script runs.
        device: cuda, cuda:N or cpu.
        ways: Ways of computing to measure; all by default, on a CPU eager.
        repeats: Chunks of which the medians are reported.
        episodes: Rollouts of pick on the simulated table.
        out: The report.
    """
    if (checkpoint is None) == (not small):
        raise ConfigError("give --checkpoint FOLDER_OR_REPOSITORY, or --small.")
    cuda = device.startswith("cuda")
    options = {"device": device, "dtype": "bfloat16" if cuda else "float32"}
    figures: dict[str, Any] = {"checkpoint": checkpoint or "small", **options}
    if cuda:
        gpu = torch.cuda.get_device_properties(device)
        figures |= {
            "gpu": gpu.name,
            "gpu_gib": gpu.total_memory / 2**30,
            "cuda": torch.version.cuda,
        }
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint or str(write_checkpoint(folder, action_space="joint_pos"))

        def tested() -> list[Any]:
            checks, measured = self_test.run(model, PolicyOptions.of(options))
            return [[vars(check) for check in checks], measured]

        def timed(way: Way) -> Callable[[], dict[str, Any]]:
            parts: Sequence[str] = [] if way == "eager" else way.split("+")
            chosen = dict([("quantize", p) if p in QUANTIZE else (p, True) for p in parts])
            return lambda: latency(model, options | chosen, repeats)

        parts: dict[str, Callable[[], Any]] = {"self_test": tested}
        parts |= {way: timed(way) for way in ways or (get_args(Way) if cuda else ("eager",))}
        if episodes:
            parts["rollouts"] = lambda: rollouts(model, options, episodes)
        for name, measure in parts.items():
            report.progress(f"{name} ...")
            try:
                figures[name] = measure()
            except (Cosmos3Error, RuntimeError) as error:
                # e.g. out of memory: the other parts are still worth having
                figures[name] = {"error": f"{type(error).__name__}: {error}"}
            out.write_text(report.with_machine(figures) + "\n")
    report.progress(f'wrote {out}; please attach it to an issue ("first run on a GPU")')
    return figures


if __name__ == "__main__":
    report.run(run)
