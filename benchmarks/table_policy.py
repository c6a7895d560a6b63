"""What a chunk of the bundled policy costs, against another checkpoint's (``--against``) or with a
film, and what candidates and batches save.

Each side is run once before, and the sides change their order from round to round. Figures are
medians of CPU time, one thread.
"""

from __future__ import annotations

import statistics
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


def run(repeats: int = 9, threads: int = 1, against: Path | None = None) -> dict[str, Any]:
    """Return CPU milliseconds of each side, and their ratios.

    Args:
        repeats: Rounds, of which the medians are reported.
        threads: Threads of torch.
        against: Instead, compare actions alone with those of another checkpoint for the table, each
            with its own preset.
    """
    torch.set_num_threads(threads)
    options: dict[str, Any] = {"device": "cpu", "seed": 0}
    if against is not None:
        return _against(against, repeats, options)
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


def _film(policy: Cosmos3Policy, repeats: int) -> dict[str, Any]:
    """Chunks, from views to joint angles, without a film, with the frames that it shows, and
    with all frames.
    """
    observation = _observation(0)
    shown = frames_shown(policy.replan_rows, 0.0)
    inference: dict[str, list[float]] = {}

    def plan(name: str, frames: int | None) -> Callable[[], Any]:
        def run() -> None:
            policy.decode_frames = frames
            policy.plan(observation, _TASK)
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
    candidates = [replace(requests[0], seed=seed) for seed in range(_BATCH)]
    backend = policy.backend
    sides = {
        "one": lambda: backend.infer(requests[0]),
        "one_by_one": lambda: [backend.infer(request) for request in requests],
        "together": lambda: backend.infer_batch(requests),
        "candidates": lambda: backend.infer_batch(candidates),
    }
    cpu_ms = _alternate(sides, repeats)
    return {
        "requests": _BATCH,
        "cpu_ms": cpu_ms,
        "throughput": cpu_ms["one_by_one"] / cpu_ms["together"],
        "candidates": cpu_ms["candidates"] / cpu_ms["one"],
    }


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
