"""A first run of a released checkpoint on a GPU: what it should measure, in one report to send in.

    python benchmarks/first_gpu_run.py --checkpoint nvidia/Cosmos3-Nano-Policy-DROID
    python benchmarks/first_gpu_run.py --checkpoint nvidia/Cosmos3-Edge-Policy-DROID --episodes 5
    python benchmarks/first_gpu_run.py --small --device cpu  # that the script runs, on any machine

It records the machine, the self-test, the latency and memory of a chunk in each way of computing
it, and optionally rollouts on the simulated table, which these checkpoints were not trained on. The
report has no pictures, paths or names of yours.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3 import Cosmos3Policy, Robot
from strands_cosmos3.commands import self_test
from strands_cosmos3.commands.files import versions
from strands_cosmos3.embodiments import DROID_RIG
from strands_cosmos3.errors import Cosmos3Error
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.types import Observation

WAYS: dict[str, dict[str, bool]] = {
    "eager": {},
    "offload_text": {"offload_text": True},
    "cuda_graphs": {"cuda_graphs": True},
    "compile": {"compile": True},
    "compile and cuda_graphs": {"compile": True, "cuda_graphs": True},
}


def machine(device: str) -> dict[str, Any]:
    found = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **versions(),
    }
    if device.startswith("cuda"):
        gpu = torch.cuda.get_device_properties(device)
        found |= {"gpu": gpu.name, "gpu_gib": gpu.total_memory / 2**30, "cuda": torch.version.cuda}
    return found


def latency(
    model: str, options: dict[str, Any], ways: dict[str, bool], repeats: int
) -> dict[str, Any]:
    """Seconds to load, milliseconds of the first and of later chunks by part, and memory, with
    one way of computing.
    """
    rng = np.random.RandomState(0)
    views = {name: rng.randint(0, 256, (360, 640, 3), dtype=np.uint8) for name in DROID_RIG.views}
    seen = Observation(HOME_Q, 1.0, views)
    if options["device"].startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with Cosmos3Policy("droid", "panda", model=model, options=ways, seed=0, **options) as policy:
        figures: dict[str, Any] = {"load_s": time.perf_counter() - start}
        runs = []
        for _ in range(repeats + 2):
            policy.plan(seen, self_test.TASK)
            runs.append(dict(policy.last_rollout["timing"]))
    warm = runs[2:]
    figures |= {
        "first_ms": runs[0],
        "median_ms": {part: statistics.median(run[part] for run in warm) for part in warm[0]},
    }
    figures["max_total_ms"] = max(run["total_ms"] for run in warm)
    if options["device"].startswith("cuda"):
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return figures


def rollouts(model: str, options: dict[str, Any], episodes: int) -> dict[str, Any]:
    robot, config = Robot(), {"embodiment": "droid", "backend": "native", "model": model, **options}
    ran = [
        robot.run_policy(task="pick", duration=20.0, policy_config=config, seed=seed)
        for seed in range(episodes)
    ]
    return {
        "successes": sum(bool(one.success) for one in ran),
        "episodes": [one.to_dict() for one in ran],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", help="a folder or hub repository")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--small",
        action="store_true",
        help="a small random checkpoint, to see that the script runs",
    )
    parser.add_argument(
        "--ways", nargs="*", choices=WAYS, help="ways of computing to measure; all by default"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--episodes", type=int, default=0, help="rollouts of pick on the simulated table"
    )
    parser.add_argument("--out", type=Path, default=Path("first_gpu_run.json"))
    chosen = parser.parse_args()
    if (chosen.checkpoint is None) == (not chosen.small):
        parser.error("give --checkpoint FOLDER_OR_REPOSITORY, or --small")
    with tempfile.TemporaryDirectory() as folder:
        model = chosen.checkpoint or str(
            write_checkpoint(Path(folder) / "small", action_space="joint_pos")
        )
        options = {
            "device": chosen.device,
            "dtype": "bfloat16" if chosen.device.startswith("cuda") else "float32",
        }
        report: dict[str, Any] = {
            "machine": machine(chosen.device),
            "checkpoint": chosen.checkpoint or "small",
            **options,
        }
        jobs: dict[str, Any] = {"self_test": lambda: self_test.run(model, None, options)}
        ways = chosen.ways or [
            way for way in WAYS if chosen.device.startswith("cuda") or way == "eager"
        ]
        jobs |= {
            way: lambda way=way: latency(model, options, WAYS[way], chosen.repeats) for way in ways
        }
        if chosen.episodes:
            jobs["rollouts"] = lambda: rollouts(model, options, chosen.episodes)
        for name, job in jobs.items():
            print(f"{name} ...", flush=True)
            try:
                report[name] = job()
            except (Cosmos3Error, RuntimeError) as error:
                # e.g. out of memory: the other parts are still worth having
                report[name] = {"error": f"{type(error).__name__}: {error}"}
            chosen.out.write_text(json.dumps(report, indent=1, default=vars) + "\n")
            print(json.dumps(report[name], default=vars)[:400])
    print(f'wrote {chosen.out}; please attach it to an issue ("first run on a GPU")')


if __name__ == "__main__":
    main()
