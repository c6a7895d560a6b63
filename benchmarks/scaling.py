"""What ranks cost on this machine: time, processor time, weights and bytes; or the model of it.

    python benchmarks/scaling.py                       # 1 to 8 processes over gloo, random weights
    python benchmarks/scaling.py --tier 480 --most 2   # DROID's sequence on 1 and 2 processes
    python benchmarks/scaling.py --model               # Nano and Super on 1 to 64 GPUs, by formula

Each arrangement runs under torchrun. The random model has Nano's proportions; what it answers means
nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

import report
from engine import SETTINGS, random_request
from nano_latency import NANO
from recipes.random_checkpoint import MID_SIZE, write_checkpoint
from scaling_model import (
    KINDS,
    Cluster,
    Link,
    Work,
    exchanges,
    sent_bytes,
    step_seconds,
    text_bytes,
    weight_bytes,
)
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.parallel.collectives import Traffic
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.parallel.mesh import Mesh
from strands_cosmos3.parallel.rank import exit_rank

ARRANGEMENTS = (
    (1, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (2, 1, 1),
    (1, 4, 1),
    (1, 1, 4),
    (1, 2, 2),
    (2, 2, 1),
    (2, 1, 2),
    (1, 8, 1),
    (1, 1, 8),
    (2, 4, 1),
    (2, 1, 4),
)
"""(cfg, tp, sp)"""
STEPS = 4
CONFIGS = {"Nano": NANO, "Super": TransformerConfig(5120, 64, 64, 8, 128, 25600, 151936, 64)}
CLUSTER = Cluster(790e12, 8, Link(300e9, 12e-6), Link(40e9, 25e-6))
MOST_GPUS = 64
DROID = Work(3093, 33, 2720, 32, 1, 1)


def run(
    model: bool = False, tier: Literal["256", "480"] = "256", most: int = 8, repeats: int = 2
) -> dict[str, Any]:
    """Measure every arrangement in processes of its own.

    Args:
        model: Instead, the model of benchmarks/NOTES.md for Nano and Super.
        tier: A small composite at the 256 tier, or DROID's at the 480 tier.
        most: Largest number of ranks.
        repeats: Inferences, of which the fastest counts.
    """
    if model:
        return {name: modelled(config) for name, config in CONFIGS.items()}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, sizes=MID_SIZE)
        for cfg, tp, sp in ARRANGEMENTS:
            parallel = ParallelConfig(tp, cfg, sp)
            if parallel.ranks > most:
                continue
            report.progress(f"cfg {cfg} x tp {tp} x sp {sp}")
            torchrun = ["torch.distributed.run", "--standalone"]
            torchrun.append(f"--nproc-per-node={parallel.ranks}")
            arguments = [folder, tier, *map(str, (cfg, tp, sp, repeats))]
            done = subprocess.run(
                [sys.executable, "-m", *torchrun, __file__, *arguments],
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=True,
            )
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            for name in ("step_ms", "peak_mb"):
                rows[-1][f"{name}_of_one"] = rows[-1][name] / rows[0][name]
    return {"load_before": os.getloadavg(), "arrangements": rows}


def resident_growth() -> Callable[[], int]:
    """Forget the largest resident memory so far; the returned function tells how far it has grown
    since [bytes].
    """
    Path("/proc/self/clear_refs").write_text("5")

    def resident(which: str) -> int:
        found = re.search(rf"{which}:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    before = resident("VmRSS")
    return lambda: resident("VmHWM") - before


def measure(folder: Path, tier: str, cfg: int, tp: int, sp: int, repeats: int) -> None:
    """One rank's share of an arrangement; rank 0 prints it."""
    parallel = ParallelConfig(tp, cfg, sp)
    engine = Cosmos3Engine.from_pretrained(folder, dtype="float32", parallel=parallel)
    request = random_request(SETTINGS[tier], engine, STEPS)
    growth = resident_growth()
    context = engine.parallel_context
    traffic = context.traffic if isinstance(context, Mesh) else Traffic()
    engine.step(request)  # prompts, pages and connections are warm
    parts = []
    cpu_s = 0.0
    for _ in range(repeats):
        context.barrier()
        traffic.clear()
        started_s = time.process_time()
        parts.append(engine.step(request)["timing"])
        cpu_s = time.process_time() - started_s
    mine = engine.kept_bytes / 1e6, growth() / 1e6, cpu_s
    ranks = [mine] * parallel.ranks
    if len(ranks) > 1:
        dist.all_gather_object(ranks, mine)
    if context.rank == 0:
        row = {
            "cfg": cfg,
            "tp": tp,
            "sp": sp,
            "weights_mb": max(weights_mb for weights_mb, _, _ in ranks),
            "peak_mb": max(peak_mb for _, peak_mb, _ in ranks),
            "messages_per_step": sum(traffic.messages[kind] for kind in KINDS) / STEPS,
            "sent_mb_per_step": sent_bytes(traffic, parallel) / STEPS / 1e6,
            "cpu_s_all_ranks": sum(cpu_s for _, _, cpu_s in ranks),
            "encode_ms": min(part["encode"] for part in parts),
            "step_ms": min(part["denoise"] for part in parts) / STEPS,
        }
        print(json.dumps(row))
    context.barrier()
    engine.close()


def modelled(config: TransformerConfig) -> list[dict[str, float]]:
    """Memory and the modelled step for 1 to 64 GPUs."""
    rows: list[dict[str, float]] = []
    powers = [2**i for i in range(MOST_GPUS.bit_length())]
    for gpus, cfg, tp in product(powers, (1, 2), powers):
        sp = gpus // (cfg * tp)
        if sp == 0 or tp * sp > config.num_attention_heads:
            continue
        parallel = ParallelConfig(tp, cfg, sp)
        traffic = exchanges(config, parallel, 0, DROID, 2)
        step_ms = 1e3 * step_seconds(config, parallel, DROID, CLUSTER)
        row = {
            "gpus": gpus,
            "nodes": -(-gpus // CLUSTER.node),
            "cfg": cfg,
            "tp": tp,
            "sp": sp,
            "weights_gb": weight_bytes(config, tp, 2) / 1e9,
            "text_mb_per_prompt": text_bytes(config, parallel, 200, 2) / 1e6,
            "messages_per_step": traffic.messages.total(),
            "sent_mb_per_step": sent_bytes(traffic, parallel) / 1e6,
            "step_ms": step_ms,
            "times_one": rows[0]["step_ms"] / step_ms if rows else 1.0,
        }
        rows.append(row)
    return rows


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:  # under torchrun
        measure(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
        exit_rank(0)
    report.run(run)
