"""What 8 bits change in a policy's actions on the simulated table: the error against float32 as a
share of the variance between seeds, the bytes kept, and the time.

    python benchmarks/quantised.py > quantised.json         # the bundled policy, some minutes

The error of a form is the mean square of what it changes, divided by the variance of float32's
actions between seeds, each summed over rows and columns and averaged over scenes.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch

import report
from strands_cosmos3.embedded import WORLD, embedded_checkpoint
from strands_cosmos3.engine.options import QUANTIZE
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.worlds.world import Start, get_world

FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    **{scheme: {"quantize": scheme} for scheme in QUANTIZE},
    "int8 with the text tower": {"quantize": "int8", "quantize_text": True},
}


def measure(
    model: str | None = None, scenes: int = 6, seeds: int = 8, threads: int = 1
) -> dict[str, Any]:
    """Ask for the same chunks in every form.

    Args:
        model: A checkpoint of the simulated table; None is the bundled policy.
        scenes: Starts of each task.
        seeds: Chunks for each.
        threads: Threads of torch.
    """
    torch.set_num_threads(threads)
    world = get_world(WORLD)
    observed: list[tuple[str, Any, dict[str, Any]]] = []
    for task in world.tasks().values():
        if task.name not in ("reach", "pick", "place"):
            continue
        with world.open(task=task.name) as session:
            for seed in range(scenes):
                session.reset(Start(task.name, seed=seed))
                arguments = session.policy_arguments()
                observed.append((task.instruction, session.observation(), arguments))
    path = model or str(embedded_checkpoint())
    forms: dict[str, Any] = {}
    exact = np.zeros(0)
    for name, options in FORMS.items():
        report.progress(name)
        actions, times, kept = _actions(path, options, observed, seeds)
        exact = actions if name == "float32" else exact
        variance = exact.var(axis=1, ddof=1).sum(axis=(1, 2)).mean()
        error = np.square(actions - exact).sum(axis=(2, 3)).mean()
        forms[name] = {
            "error_percent": 100 * float(error / variance),
            "kept_mb": kept / 1e6,
            "chunk_ms": {part: statistics.median(t[part] for t in times) for part in times[0]},
        }
    return {"model": path, "chunks": len(observed) * seeds, "threads": threads, "forms": forms}


def _actions(
    path: str, options: dict[str, Any], observed: list[tuple[str, Any, dict[str, Any]]], seeds: int
) -> tuple[np.ndarray, list[dict[str, float]], int]:
    """Actions [scenes, seeds, rows, columns], milliseconds of each chunk, and bytes kept."""
    chunks, times = [], []
    arguments = observed[0][2]
    made = PolicyOptions.of(options)
    with Cosmos3Policy(model=path, options=made, **arguments) as policy:
        for instruction, observation, _ in observed:
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
