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
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    return {
        "repeats": repeats,
        "threads": threads,
        "film": film,
        "batch": batch,
    }


def _against(other: Path, repeats: int, options: dict[str, Any]) -> dict[str, Any]:
    with (
        Cosmos3Policy("droid", "panda", **options) as bundled,
        Cosmos3Policy("droid", "panda", model=other, **options) as reference,
    ):
        requests = [
            (policy.backend, replace(_request(policy, 0), decode_frames=0))
            for policy in (bundled, reference)
        ]
        infer = [lambda b=backend, r=request: b.infer(r) for backend, request in requests]
        cpu_ms = _alternate(dict(zip(("bundled", "other"), infer, strict=True)), repeats)
    return {"repeats": repeats, "cpu_ms": cpu_ms, "ratio": cpu_ms["bundled"] / cpu_ms["other"]}


def _before(other: Path, repeats: int) -> dict[str, Any]:
    """CPU milliseconds of a chunk, with and without its predicted video, of both trees."""
    package = Path(__file__).parents[1]
    trees = {"now": package, "before": other.resolve()}
    processes: dict[str, subprocess.Popen[str]] = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--answers"],
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, tree in trees.items()
    }
    spent: dict[str, list[float]] = {}
    for i in range(repeats + 1):
        for side in ("chunk", "chunk with video"):
            for name in list(processes)[:: 1 if i % 2 == 0 else -1]:
                stdin, stdout = processes[name].stdin, processes[name].stdout
                assert stdin is not None
                assert stdout is not None
                print(side, file=stdin, flush=True)
                spent.setdefault(f"{side}, {name}", []).append(float(stdout.readline()))
    for process in processes.values():
        process.communicate()
    cpu_ms = {name: statistics.median(times[1:]) for name, times in spent.items()}
    return {
        "repeats": repeats,
        "cpu_ms": cpu_ms,
        "ratio": cpu_ms["chunk, now"] / cpu_ms["chunk, before"],
        "ratio_video": cpu_ms["chunk with video, now"] / cpu_ms["chunk with video, before"],
        "video_now": cpu_ms["chunk with video, now"] / cpu_ms["chunk, now"],
        "video_before": cpu_ms["chunk with video, before"] / cpu_ms["chunk, before"],
    }


def _answer(options: dict[str, Any]) -> dict[str, Any]:
    """Print the CPU milliseconds of a chunk for each line of standard input; a line names the
    kind of chunk.
    """
    with Cosmos3Policy("droid", "panda", decode_video="preview", **options) as policy:
        shown = frames_shown(policy.replan_rows, 0.0)
        for seed, line in enumerate(sys.stdin):
            policy.decode_frames = shown if "video" in line else 0
            observation = _observation(seed)  # what was computed of an earlier one is of no use
            start = time.process_time()
            policy.plan(observation, _TASK)
            print((time.process_time() - start) * 1e3, flush=True)
    return {}


def _film(policy: Cosmos3Policy, repeats: int) -> dict[str, Any]:
    """Chunks, from views to joint angles, without a film, with the frames that it shows, and
    with all frames.
    """
    observations = map(_observation, itertools.count())  # each picture is new to the engine
    shown = frames_shown(policy.replan_rows, 0.0)
    inference: dict[str, list[float]] = {}

    def plan(name: str, frames: int | None) -> Callable[[], Any]:
        def run() -> None:
            policy.decode_frames = frames
            policy.plan(next(observations), _TASK)
            inference.setdefault(name, []).append(policy.last_rollout["timing"]["total_ms"])

        return run

    cpu_ms = _alternate(
        {"without": plan("without", 0), "shown": plan("shown", shown), "all": plan("all", None)},
        repeats,
    )
    wall_ms = {name: statistics.median(runs[1:]) for name, runs in inference.items()}
    return {
        "frames": shown,
        "chunk_cpu_ms": cpu_ms,
        "inference_wall_ms": wall_ms,
        "ratio": cpu_ms["shown"] / cpu_ms["without"],
        "ratio_inference": wall_ms["shown"] / wall_ms["without"],
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
    asked: list[Request] = []
    backend = policy.backend
    infer = policy.backend.infer
    backend.infer = lambda request: asked.append(request) or infer(request)
    policy.plan(_observation(seed), _TASK)
    del backend.infer
    return replace(asked[0], seed=seed)


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
