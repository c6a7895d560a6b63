"""What a chunk of the bundled policy costs, against another checkpoint's (``--against``), another
commit's (``--before``) or with a film, and what candidates and batches save.

Each side is run once before, and the sides change their order from round to round. Figures are
medians of CPU time, one thread.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import report
from strands_cosmos3.embodiments import DROID_RIG
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.sim.film import frames_shown
from strands_cosmos3.types import Observation, Request

_TASK = "pick up the red cube"
_BATCH = 8


def run(
    repeats: int = 9,
    threads: int = 1,
    against: Path | None = None,
    before: Path | None = None,
    answers: bool = False,
) -> dict[str, Any]:
    """Return CPU milliseconds of each side, and their ratios.

    Args:
        repeats: Rounds, of which the medians are reported.
        threads: Threads of torch.
        against: Instead, compare actions alone with those of another checkpoint for the table, each
            with its own preset.
        before: Instead, compare chunks with those of another commit's working tree, in a process
            of each that take turns.
        answers: Instead, be such a process.
    """
    if before is not None:
        return _before(before, repeats)
    torch.set_num_threads(threads)
    options: dict[str, Any] = {"device": "cpu", "seed": 0}
    if against is not None:
        return _against(against, repeats, options)
    if answers:
        return _answer(options)
    with (
        Cosmos3Policy("droid", "panda", decode_video="preview", **options) as policy,
        Cosmos3Policy("droid", "panda", options={"policy_frames": 1}, **options) as quick,
    ):
        report.progress("the bundled policy with and without a film")
        film = _film(policy, repeats)
        report.progress("batches of the bundled policy")
        batch = _batch(quick, repeats)
    return {"repeats": repeats, "threads": threads, "film": film, "batch": batch}


def _against(other: Path, repeats: int, options: dict[str, Any]) -> dict[str, Any]:
    with (
        Cosmos3Policy("droid", "panda", **options) as bundled,
        Cosmos3Policy("droid", "panda", model=other, **options) as reference,
    ):
        infer = {
            name: partial(policy.backend.infer, replace(_request(policy, 0), decode_frames=0))
            for name, policy in (("bundled", bundled), ("other", reference))
        }
        cpu_ms = _alternate(infer, repeats)
    return {"repeats": repeats, "cpu_ms": cpu_ms, "ratio": cpu_ms["bundled"] / cpu_ms["other"]}


def _before(other: Path, repeats: int) -> dict[str, Any]:
    """CPU milliseconds of a chunk, with and without its predicted video, of both trees."""
    spent: dict[str, list[float]] = {}
    with ExitStack() as started:
        processes = {
            name: started.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, "--answers"],
                    env={**os.environ, "PYTHONPATH": str(tree)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for name, tree in (("now", Path(__file__).parents[1]), ("before", other.resolve()))
        }
        for i in range(repeats + 1):
            for side in ("without", "shown"):
                for name in list(processes)[:: 1 if i % 2 == 0 else -1]:
                    process: Any = processes[name]
                    print(side, file=process.stdin, flush=True)
                    spent.setdefault(f"{side}, {name}", []).append(float(process.stdout.readline()))
        for process in processes.values():
            process.communicate()  # its own report is not read
    cpu_ms = {name: statistics.median(times[1:]) for name, times in spent.items()}
    return {
        "repeats": repeats,
        "cpu_ms": cpu_ms,
        "ratio": cpu_ms["without, now"] / cpu_ms["without, before"],
        "ratio_video": cpu_ms["shown, now"] / cpu_ms["shown, before"],
        "video_now": cpu_ms["shown, now"] / cpu_ms["without, now"],
        "video_before": cpu_ms["shown, before"] / cpu_ms["without, before"],
    }


def _answer(options: dict[str, Any]) -> dict[str, Any]:
    """Print the CPU milliseconds of a chunk for each line of standard input, which is a key of
    :func:`_chunks`.
    """
    with Cosmos3Policy("droid", "panda", decode_video="preview", **options) as policy:
        chunks = _chunks(policy)
        for line in sys.stdin:
            (times_ms,) = report.alternate({"": chunks[line.strip()]}, 1).values()
            print(*times_ms, flush=True)
    return {}


def _chunks(policy: Cosmos3Policy) -> dict[str, Callable[[], None]]:
    """Chunks, from views to joint angles, without a film, with the frames that it shows, and
    with all frames.
    """
    # so that a picture is not the latest one again
    observations = itertools.cycle([_observation(seed) for seed in range(_BATCH)])

    def plan(frames: int | None) -> None:
        policy.decode_frames = frames
        policy.plan(next(observations), _TASK)

    shown = frames_shown(policy.replan_rows, 0.0)
    return {name: partial(plan, n) for name, n in (("without", 0), ("shown", shown), ("all", None))}


def _film(policy: Cosmos3Policy, repeats: int) -> dict[str, Any]:
    cpu_ms = _alternate(_chunks(policy), repeats)
    return {
        "frames": frames_shown(policy.replan_rows, 0.0),
        "chunk_cpu_ms": cpu_ms,
        "ratio": cpu_ms["shown"] / cpu_ms["without"],
    }


def _batch(policy: Cosmos3Policy, repeats: int) -> dict[str, Any]:
    """Eight requests with pictures, states and seeds of their own, and eight noises of one
    request; actions alone.
    """
    requests = [_request(policy, seed) for seed in range(_BATCH)]
    backend = policy.backend
    each = itertools.cycle(requests)  # so that a picture is not the latest one again
    sides = {
        "one": lambda: backend.infer(next(each)),
        "one_by_one": lambda: [backend.infer(request) for request in requests],
        "together": lambda: backend.infer_batch(requests),
        "candidates": lambda: backend.infer_batch(_candidates(next(each))),
    }
    cpu_ms = _alternate(sides, repeats)
    return {
        "requests": _BATCH,
        "cpu_ms": cpu_ms,
        "throughput": cpu_ms["one_by_one"] / cpu_ms["together"],
        "candidates": cpu_ms["candidates"] / cpu_ms["one"],
    }


def _candidates(request: Request) -> list[Request]:
    return [replace(request, seed=seed) for seed in range(_BATCH)]


def _request(policy: Cosmos3Policy, seed: int) -> Request:
    """What the policy asks of its backend for another observation."""
    backend = policy.backend
    with patch.object(backend, "infer", wraps=backend.infer) as infer:
        policy.plan(_observation(seed), _TASK)
    return replace(infer.call_args.args[0], seed=seed)


def _observation(seed: int) -> Observation:
    rng = np.random.RandomState(seed)
    images = {name: rng.randint(0, 256, (180, 320, 3), dtype=np.uint8) for name in DROID_RIG.views}
    return Observation(
        t_capture_s=0.0, q_rad=HOME_Q + rng.uniform(-0.05, 0.05, 7), gripper=1.0, images=images
    )


def _alternate(sides: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU milliseconds of each side, warmed."""
    report.alternate(sides, 1)
    cpu_ms = report.alternate(sides, repeats)
    return {name: statistics.median(times) for name, times in cpu_ms.items()}


if __name__ == "__main__":
    report.run(run)
