"""What ranks cost on this machine: time, processor time, memory, and bytes as the kernel counts
them.

    python benchmarks/scaling.py --json scaling.json       # 1, 2, 4 and 8 processes over gloo,
    random weights python benchmarks/scaling.py --quick                   # one timed inference each
    instead of two, no decoding: some minutes python benchmarks/scaling.py --model
    # the model of benchmarks/NOTES.md, for Nano and Super

Each arrangement runs under torchrun in a network namespace of its own where this user may make one
(``unshare -n``), so that the loopback's counters count nothing else. The model has random weights
and Nano's proportions; what it answers means nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import scaling_model as model
from strands_cosmos3.parallel.rank import exit_rank

ARRANGEMENTS = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (1, 8), (2, 4))
"""(cfg, tp)"""
COLUMNS, ROWS, FRAMES, ACTIONS, STEPS = 10, 10, 17, 16, 4
CALLS = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write every figure")
    parser.add_argument(
        "--model",
        action="store_true",
        help="print the model for Nano and Super, and measure nothing",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one timed inference of each arrangement, and no decoding",
    )
    parser.add_argument(
        "--small", action="store_true", help="a tiny checkpoint: that the script runs"
    )
    parser.add_argument(
        "--rank-of", nargs=3, metavar=("FOLDER", "CFG", "TP"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.rank_of is not None:
        measure(options.rank_of[0], int(options.rank_of[1]), int(options.rank_of[2]), options.quick)
        exit_rank(0)
    elif options.model:
        print_model()
    else:
        run_all(options.small, options.quick, options.json)


def run_all(small: bool, quick: bool, out: Path | None) -> None:
    """Every arrangement in processes of its own; prints the table of benchmarks/NOTES.md."""
    from recipes.random_checkpoint import MID_SIZE, FactorySizes, write_checkpoint

    sizes = (
        FactorySizes(64, 2, heads=8, kv_heads=4, head_dim=16, intermediate=160)
        if small
        else MID_SIZE
    )
    found = []
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, sizes=sizes)
        for cfg, tp in ARRANGEMENTS:
            line = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={cfg * tp}",
            ]
            line += [
                __file__,
                *(["--quick"] if quick else []),
                "--rank-of",
                folder,
                str(cfg),
                str(tp),
            ]
            namespace = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
            alone = (
                shutil.which("unshare")
                and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0
            )
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            done = subprocess.run(
                [*(namespace if alone else []), *line],
                capture_output=True,
                text=True,
                env=environment,
            )
            if done.returncode:
                sys.exit(done.stderr)
            row = json.loads(done.stdout.strip().splitlines()[-1])
            row["kernel_mb_per_step"] = row["kernel_mb_per_step"] if alone else None
            found.append(row)
            print(f"{cfg} x {tp}: a step {row['step_ms']:.0f} ms", file=sys.stderr, flush=True)
    print_table(found)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


HEAD = (
    "cfg x tp",
    "weights a rank, MB",
    "anonymous memory, MB",
    "messages a step",
    "sent a step and rank, MB",
    "all ranks, by the kernel, MB",
    "processor time, s",
    "a step of wall-clock time, ms",
    "times one",
    "encoding, ms",
    "decoding, ms",
)


def print_table(rows: list[dict[str, Any]]) -> None:
    """The table, in Markdown; times one is the speed-up of a step over one process."""
    print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|")
    for row in rows:
        ranks = row["cfg"] * row["tp"]
        cells = [
            f"{row['cfg']} x {row['tp']}",
            f"{max(row['weights_mb']):.0f}",
            f"{row['anonymous_mb_max']:.0f}",
        ]
        cells.append(f"{row['messages_per_step']:.0f}")
        cells.append(
            f"{row['sent_mb_per_step']:.2f} ({ranks * row['sent_mb_per_step']:.2f} of all)"
        )
        cells.append(
            "" if row["kernel_mb_per_step"] is None else f"{row['kernel_mb_per_step']:.2f}"
        )
        cells += [
            f"{row['cpu_s_all_ranks']:.2f}",
            f"{row['step_ms']:.0f}",
            f"{rows[0]['step_ms'] / row['step_ms']:.2f}",
        ]
        cells += [
            "" if row[f"{part}_ms"] is None else f"{row[f'{part}_ms']:.0f}"
            for part in ("encode", "decode")
        ]
        print(f"| {' | '.join(cells)} |")


def measure(folder: str, cfg: int, tp: int, quick: bool) -> None:
    """One rank's share of an arrangement; rank 0 prints it."""
    import torch
    import torch.distributed as dist

    from strands_cosmos3.engine.engine import Cosmos3Engine
    from strands_cosmos3.engine.request import Cosmos3ActionRequest
    from strands_cosmos3.parallel.config import ParallelConfig

    torch.set_num_threads(1)
    engine = Cosmos3Engine.from_pretrained(
        folder, dtype=torch.float32, parallel=ParallelConfig(tp, cfg), decode_video=not quick
    )
    type(engine).decodes_video = False  # decoded once, apart
    generator = torch.Generator().manual_seed(0)
    request = Cosmos3ActionRequest(
        text_ids=torch.arange(100, 260),
        neg_text_ids=torch.arange(7, 36),
        video_shape=((FRAMES - 1) // 4 + 1, ROWS, COLUMNS),
        action_chunk=ACTIONS,
        domain_id=8,
        raw_action_dim=10,
        cond_video_pixels=torch.rand(1, 3, 1, 16 * ROWS, 16 * COLUMNS, generator=generator) * 2 - 1,
        fps=15.0,
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        flow_shift=5.0,
        use_karras_sigmas=False,
    )
    several, traffic = cfg * tp > 1, getattr(engine.parallel_context, "traffic", None)
    engine.step(request)  # prompts, pages and connections are warm
    parts, marks, cpu = [], [], 0.0
    for _ in range(1 if quick else CALLS):
        if several:
            dist.barrier()
        if traffic is not None:
            traffic.clear()
        cpu, marks = time.process_time(), []
        parts.append(
            engine.step(request, on_step=lambda *_, marks=marks: marks.append(_loopback()))[
                "timing"
            ]
        )
        cpu = time.process_time() - cpu
    kinds = {"layer": tp, "guidance": cfg}
    messages = sum(traffic.messages[kind] for kind in kinds) / STEPS if traffic else 0
    sent = (
        sum(
            model.sent_bytes(kind, traffic.payload[kind], ranks)
            for kind, ranks in kinds.items()
            if ranks > 1
        )
        if traffic
        else 0
    )
    decode_ms = None
    if not quick:
        with torch.inference_mode():
            began = time.perf_counter()
            engine.vae.decode(
                torch.zeros(1, engine.config.latent_channel, (FRAMES - 1) // 4 + 1, ROWS, COLUMNS)
            )
            decode_ms = 1e3 * (time.perf_counter() - began)
    mine = torch.tensor([engine.kept_bytes / 1e6, _anonymous() / 1e6, cpu])
    everyone = [torch.empty_like(mine) for _ in range(cfg * tp)]
    if several:
        dist.all_gather(everyone, mine)
    else:
        everyone = [mine]
    if engine.parallel_context.rank == 0:
        table = torch.stack(everyone)
        row = {"cfg": cfg, "tp": tp}
        row |= {
            f"{name}_ms": round(min(p[name] for p in parts), 1) for name in ("encode", "denoise")
        }
        row["decode_ms"] = decode_ms if decode_ms is None else round(decode_ms, 1)
        row |= {
            "step_ms": round(min(p["denoise"] for p in parts) / STEPS, 1),
            "cpu_s_all_ranks": round(float(table[:, 2].sum()), 2),
        }
        row |= {
            "weights_mb": [round(float(x), 1) for x in table[:, 0]],
            "anonymous_mb_max": round(float(table[:, 1].max()), 1),
        }
        row |= {"messages_per_step": messages, "sent_mb_per_step": round(sent / STEPS / 1e6, 3)}
        # from the first step's end on
        row["kernel_mb_per_step"] = round((marks[-1] - marks[0]) / 1e6 / (STEPS - 1), 3)
        print(json.dumps(row))
    engine.parallel_context.barrier()
    engine.close()


def _loopback() -> int:
    """Bytes that went over this namespace's loopback so far."""
    table = Path("/proc/self/net/dev").read_text()
    return int(re.search(r"lo:\s*(\d+)", table)[1])  # pyright: ignore[reportOptionalSubscript]


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024  # pyright: ignore[reportOptionalSubscript]


NANO = (4096, 36, 32, 8, 128, 12288, 151936, 64)
SUPER = (5120, 64, 64, 8, 128, 25600, 151936, 64)
NODE = 8


def print_model() -> None:
    """Memory and the modelled step for 1 to 64 GPUs, eight to a node."""
    from strands_cosmos3.engine.config import TransformerConfig
    from strands_cosmos3.parallel.config import ParallelConfig

    inside, across = model.Machine(790e12, 300e9, 12e-6), model.Machine(790e12, 40e9, 25e-6)
    work = model.Work(3093, 33, 2720, 32, 1, 1)
    head = (
        "GPUs",
        "cfg x tp",
        "weights, GB",
        "text, MB a prompt",
        "messages a step",
        "sent, MB a step",
        "step, ms",
        "times one",
    )
    for name, sizes in (("Nano", NANO), ("Super", SUPER)):
        config = TransformerConfig(*sizes)
        print(f"\n{name}\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
        one = model.step_seconds(config, ParallelConfig(), work, inside)
        for gpus, cfg in [(1, 1), *((2**i, cfg) for i in range(1, 7) for cfg in (2, 1))]:
            parallel = ParallelConfig(tp := gpus // cfg, cfg)
            if tp > config.num_attention_heads:
                continue
            made = model.transformer_exchanges(config, parallel, 0, work, 2)
            groups = {"layer": tp, "guidance": cfg}
            sent = sum(
                model.sent_bytes(kind, nbytes, groups[kind])
                for kind, nbytes in made.payload.items()
            )
            seconds = model.step_seconds(config, parallel, work, inside if tp <= NODE else across)
            weights, text = (
                model.weight_bytes(config, tp, 2)[0] / 1e9,
                model.text_bytes(config, tp, 200, 2) / 1e6,
            )
            cells = [
                str(gpus),
                f"{cfg} x {tp}",
                f"{weights:.2f}",
                f"{text:.1f}",
                str(sum(made.messages.values())),
            ]
            cells += [f"{sent / 1e6:.0f}", f"{seconds * 1e3:.1f}", f"{one / seconds:.2f}"]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
