"""What ranks cost on this machine: time, processor time, weights and bytes; or the model of it.

    python benchmarks/scaling.py            # 1, 2, 4 and 8 processes over gloo, random weights
    python benchmarks/scaling.py --model    # Nano and Super on 1 to 64 GPUs, by formula

Each arrangement runs under torchrun. The random model has Nano's proportions; what it answers means
nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import report
from engine import SETTINGS, random_request
from nano_latency import NANO
from recipes.random_checkpoint import MID_SIZE, write_checkpoint
from scaling_model import (
    KINDS,
    Machine,
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

ARRANGEMENTS = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (1, 8), (2, 4))
"""(cfg, tp)"""
STEPS = 4
CONFIGS = {"Nano": NANO, "Super": TransformerConfig(5120, 64, 64, 8, 128, 25600, 151936, 64)}
NODE = 8  # GPUs
INSIDE = Machine(790e12, 300e9, 12e-6)
ACROSS = Machine(790e12, 40e9, 25e-6)
DROID = Work(3093, 33, 2720, 32, 1, 1)


def run(model: bool = False, repeats: int = 2) -> dict[str, Any]:
    """Measure every arrangement in processes of its own.

    Args:
        model: Instead, the model of benchmarks/NOTES.md for Nano and Super.
        repeats: Inferences, of which the fastest counts.
    """
    if model:
        return {name: modelled(config) for name, config in CONFIGS.items()}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, sizes=MID_SIZE)
        for cfg, tp in ARRANGEMENTS:
            report.progress(f"cfg {cfg} x tp {tp}")
            torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={cfg * tp}"]
            arguments = [folder, str(cfg), str(tp), str(repeats)]
            done = subprocess.run(
                [sys.executable, "-m", *torchrun, __file__, *arguments],
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=True,
            )
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            rows[-1]["times_one"] = rows[0]["step_ms"] / rows[-1]["step_ms"]
    return {"arrangements": rows}


def measure(folder: Path, cfg: int, tp: int, repeats: int) -> None:
    """One rank's share of an arrangement; rank 0 prints it."""
    parallel = ParallelConfig(tp, cfg)
    engine = Cosmos3Engine.from_pretrained(folder, dtype="float32", parallel=parallel)
    request = random_request(SETTINGS["256"], engine, STEPS)
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
    mine = engine.kept_bytes / 1e6, cpu_s
    ranks = [mine] * (cfg * tp)
    if len(ranks) > 1:
        dist.all_gather_object(ranks, mine)
    if context.rank == 0:
        row = {
            "cfg": cfg,
            "tp": tp,
            "weights_mb": max(weights_mb for weights_mb, _ in ranks),
            "messages_per_step": sum(traffic.messages[kind] for kind in KINDS) / STEPS,
            "sent_mb_per_step": sent_bytes(traffic, parallel) / STEPS / 1e6,
            "cpu_s_all_ranks": sum(cpu_s for _, cpu_s in ranks),
            "encode_ms": min(part["encode"] for part in parts),
            "step_ms": min(part["denoise"] for part in parts) / STEPS,
        }
        print(json.dumps(row))
    context.barrier()
    engine.close()


def modelled(config: TransformerConfig) -> list[dict[str, float]]:
    """Memory and the modelled step for 1 to 64 GPUs, eight to a node."""
    rows: list[dict[str, float]] = []
    for gpus, cfg in [(1, 1), *((2**i, cfg) for i in range(1, 7) for cfg in (2, 1))]:
        tp = gpus // cfg
        if tp > config.num_attention_heads:
            continue
        parallel = ParallelConfig(tp, cfg)
        traffic = exchanges(config, parallel, 0, DROID, 2)
        step_ms = 1e3 * step_seconds(config, parallel, DROID, INSIDE if tp <= NODE else ACROSS)
        row = {
            "gpus": gpus,
            "cfg": cfg,
            "tp": tp,
            "weights_gb": weight_bytes(config, tp, 2) / 1e9,
            "text_mb_per_prompt": text_bytes(config, tp, 200, 2) / 1e6,
            "messages_per_step": traffic.messages.total(),
            "sent_mb_per_step": sent_bytes(traffic, parallel) / 1e6,
            "step_ms": step_ms,
            "times_one": rows[0]["step_ms"] / step_ms if rows else 1.0,
        }
        rows.append(row)
    return rows


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:  # under torchrun
        measure(Path(sys.argv[1]), *map(int, sys.argv[2:]))
        exit_rank(0)
    report.run(run)
