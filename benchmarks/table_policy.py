"""What a chunk of the bundled policy costs with a film, and what
candidates and batches save.

Each side is run once before, and the sides change their order from round to round. Figures are
medians of CPU time, one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

import report
from strands_cosmos3.embodiments import DROID_RIG
from strands_cosmos3.observe.views import Image, canvas_hw, compose, compose_for_tier, to_canvas
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.sim.film import frames_shown
from strands_cosmos3.types import Observation, Request

_TASK, _TIER, _BATCH = "pick up the red cube", 128, 8


def run(repeats: int = 9, threads: int = 1) -> dict[str, Any]:
    """Return CPU milliseconds of each side, and their ratios.

    Args:
        repeats: Rounds, of which the medians are reported.
        threads: Threads of torch.
    """
    torch.set_num_threads(threads)
    options: dict[str, Any] = {"device": "cpu", "seed": 0}
    with (
        Cosmos3Policy("droid", "panda", decode_video="preview", **options) as policy,
        Cosmos3Policy("droid", "panda", options={"policy_frames": 1}, **options) as quick,
    ):
        report.progress("the bundled policy with and without a film")
        film = _film(policy, repeats)
        report.progress("composing its pictures")
        pictures = _compose(repeats)
        report.progress("batches of the bundled policy")
        batch = _batch(quick, repeats)
    return {
        "repeats": repeats,
        "threads": threads,
        "film": film,
        "compose": pictures,
        "batch": batch,
    }


def _film(policy: Cosmos3Policy, repeats: int) -> dict[str, Any]:
    """Chunks, from views to joint angles, without a film, with the frames that it shows, and
    with all frames.
    """
    observation, shown = _observation(0), frames_shown(policy.replan_rows, 0.0)
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
        "target": 2.5,
    }


def _compose(repeats: int) -> dict[str, Any]:
    """Three views to the model's canvas: the composite and then the canvas, and both at once."""
    figures: dict[str, Any] = {}
    for hw in ((180, 320), (360, 640)):
        views = _observation(0, hw).images
        sides = {"two_steps": partial(_two_steps, views), "one_step": partial(_one_step, views)}
        cpu_ms = _alternate(sides, repeats)
        figures[f"{hw[1]}x{hw[0]}"] = {
            "cpu_ms": cpu_ms,
            "ratio": cpu_ms["one_step"] / cpu_ms["two_steps"],
        }
    return figures


def _two_steps(views: Mapping[str, Image]) -> None:
    _on_canvas(compose(views, DROID_RIG))


def _one_step(views: Mapping[str, Image]) -> None:
    _on_canvas(compose_for_tier(views, DROID_RIG, _TIER))


def _on_canvas(picture: Image) -> None:
    to_canvas(picture[None], canvas_hw(picture.shape[0], picture.shape[1], _TIER))


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
        "target_throughput": 2.0,
        "candidates": cpu_ms["candidates"] / cpu_ms["one"],
        "target_candidates": 3.0,
    }


def _request(policy: Cosmos3Policy, seed: int) -> Request:
    """What the policy asks of its backend for another observation."""
    asked: list[Request] = []
    backend, infer = policy.backend, policy.backend.infer
    backend.infer = lambda request: asked.append(request) or infer(request)
    policy.plan(_observation(seed), _TASK)
    del backend.infer
    return replace(asked[0], seed=seed)


def _observation(seed: int, hw: tuple[int, int] = (180, 320)) -> Observation:
    rng = np.random.RandomState(seed)
    images = {name: rng.randint(0, 256, (*hw, 3), dtype=np.uint8) for name in DROID_RIG.views}
    return Observation(
        t_capture_s=0.0, q_rad=HOME_Q + rng.uniform(-0.05, 0.05, 7), gripper=1.0, images=images
    )


def _alternate(sides: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median CPU milliseconds of each side, warmed; every other round runs them in the opposite
    order.
    """
    for run in sides.values():
        run()
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(repeats):
        for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
            start = time.process_time()
            sides[name]()
            spent[name].append((time.process_time() - start) * 1e3)
    return {name: statistics.median(times) for name, times in spent.items()}


if __name__ == "__main__":
    report.run(run)
