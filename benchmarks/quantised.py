"""What 8 bits change in a policy's actions on the simulated table: the error against float32 as a
share of the variance between seeds, the bytes kept, and the time.

    python benchmarks/quantised.py > quantised.json         # the bundled policy, some minutes
    python benchmarks/quantised.py --steps 10 > steps.json  # where NVIDIA's policy of steps differs

The error of a form is the mean square of what it changes, divided by the variance of float32's
actions between seeds, each summed over rows and columns and averaged over scenes. NVIDIA's figures
are divided by the mean square of what two seeds differ by, which is twice their variance.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import report
from strands_cosmos3.embedded import WORLD, embedded_checkpoint
from strands_cosmos3.engine.options import QUANTIZE
from strands_cosmos3.engine.precision import StepPolicy
from strands_cosmos3.engine.quantised import Quantization
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.worlds.world import Start, get_world

FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    **{scheme: {"quantize": scheme} for scheme in QUANTIZE},
    "int8 with the text tower": {"quantize": "int8", "quantize_text": True},
    "int8 as on a GPU": {"quantize": "int8"},
    "int8 as on a GPU, NVIDIA's steps": {"quantize": "int8"},
    "fp8, NVIDIA's steps": {"quantize": "fp8"},
}
GPU = {"_packs": lambda *_: False}
STEPS = {"policy": StepPolicy(3, 3, "a16", "a16")}
"""Of NVIDIA's FP8 revisions: the first and the last three steps in W8A16, the rest in W8A8."""
CHANGED: dict[str, dict[str, Any]] = {
    "int8 as on a GPU": GPU,
    "int8 as on a GPU, NVIDIA's steps": GPU | STEPS,
    "fp8, NVIDIA's steps": STEPS,
}
"""What a form has otherwise than on this machine and in this checkpoint."""


def measure(
    model: str | None = None,
    scenes: int = 6,
    seeds: int = 8,
    steps: int | None = None,
    threads: int = 1,
) -> dict[str, Any]:
    """Ask for the same chunks in every form.

    Args:
        model: A checkpoint of the simulated table; None is the bundled policy.
        scenes: Starts of each task.
        seeds: Chunks for each.
        steps: Denoising steps; None is the checkpoint's number.
        threads: Threads of torch.
    """
    torch.set_num_threads(threads)
    world = get_world(WORLD)
    observed: list[tuple[str, Any]] = []
    common: dict[str, Any] = {"model": model or str(embedded_checkpoint()), "num_steps": steps}
    for name in ("reach", "pick", "place"):
        with world.open(task=name) as session:
            common |= session.policy_arguments()
            for seed in range(scenes):
                session.reset(Start(name, seed=seed))
                observed.append((world.tasks()[name].instruction, session.observation()))
    forms: dict[str, Any] = {}
    exact = np.zeros(0)
    for name, options in FORMS.items():
        report.progress(name)
        with ExitStack() as changed:
            for attribute, value in CHANGED.get(name, {}).items():
                changed.enter_context(patch.object(Quantization, attribute, value))
            actions, times, kept = _actions(common, options, observed, seeds)
        exact = actions if name == "float32" else exact
        variance = exact.var(axis=1, ddof=1).sum(axis=(1, 2)).mean()
        error = np.square(actions - exact).sum(axis=(2, 3)).mean()
        forms[name] = {
            "error_percent": 100 * float(error / variance),
            "kept_mb": kept / 1e6,
            "chunk_ms": report.medians(times),
        }
    chunks = len(observed) * seeds
    about = {"model": common["model"], "chunks": chunks, "steps": steps, "threads": threads}
    return {**about, "forms": forms}


def _actions(
    common: dict[str, Any],
    options: dict[str, Any],
    observed: list[tuple[str, Any]],
    seeds: int,
) -> tuple[np.ndarray, list[dict[str, float]], int]:
    """Actions [scenes, seeds, rows, columns], milliseconds of each chunk, and bytes kept."""
    chunks, times = [], []
    with Cosmos3Policy(options=PolicyOptions.of(options), **common) as policy:
        for instruction, observation in observed:
            for seed in range(seeds):
                policy.reset(seed)
                policy.plan(observation, instruction)
                chunks.append(np.asarray(policy.last_rollout["action"]))
                times.append(policy.last_rollout["timing"])
        backend: Any = policy.backend
        kept = backend.engine.kept_bytes
    rows = np.stack(chunks)
    return rows.reshape(len(observed), seeds, *rows.shape[1:]), times, kept


if __name__ == "__main__":
    report.run(measure)
