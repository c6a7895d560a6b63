"""Small episodes whose every number and picture is known."""

from __future__ import annotations

from typing import Any

import numpy as np

from strands_cosmos3.datasets import (
    ACTION,
    EE_POSE,
    STATE,
    DatasetSpec,
    DatasetWriter,
    arm_spec,
    camera_key,
)

SIZE = (48, 64)
VIEWS = ("wrist", "exterior_1")


def spec() -> DatasetSpec:
    return arm_spec(dict.fromkeys(VIEWS, SIZE))


def columns(n: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    last = np.arange(n) == n - 1
    return {
        STATE: rng.normal(size=(n, 8)),
        EE_POSE: np.tile([0.5, 0.0, 0.3, 0.0, 0.0, 0.0, 1.0], (n, 1)),
        ACTION: rng.normal(size=(n, 10)) * 0.01,
        "next.done": last,
        "next.success": last & bool(seed % 2),
    }


def picture(episode: int, row: int, view: int) -> np.ndarray:
    """A grey wall and a square whose colour names the episode and whose place names the row and
    the view.
    """
    frame = np.full((*SIZE, 3), 90, np.uint8)
    x, y = 2 + 3 * (row % 18), 2 + 20 * view + 2 * (row // 18)
    frame[y : y + 16, x : x + 10] = [
        (40 * episode + 20) % 256,
        (100 + 60 * episode) % 256,
        200 - 30 * (episode % 5),
    ]
    return frame


def pictures(episode: int, n: int) -> dict[str, np.ndarray]:
    return {
        camera_key(name): np.stack([picture(episode, row, view) for row in range(n)])
        for view, name in enumerate(VIEWS)
    }


def which(frames: np.ndarray, episode: int, n: int, view: int = 0) -> list[int]:
    """Which rows of an episode these pictures are, by likeness."""
    truth = np.stack([picture(episode, row, view) for row in range(n)]).astype(int)
    return [int(np.abs(truth - frame).mean(axis=(1, 2, 3)).argmin()) for frame in frames]


def fill(writer: DatasetWriter, lengths: list[int], first: int = 0) -> None:
    for k, n in enumerate(lengths, first):
        writer.add_episode(
            columns(n, k), pictures(k, n), task=f"pick up cube {k % 3}", note={"seed": k}
        )
