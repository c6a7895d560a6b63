"""Statistics of a feature: min, max, mean, std, count and quantiles, per episode and merged.

Quantiles cannot be merged exactly. Like LeRobot, :func:`merged` averages the episodes' quantiles,
weighted by frames. Closing a writer replaces those of numeric columns by exact ones; those of
pictures stay averages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Stats = dict[str, NDArray[Any]]
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
STATISTICS = ("min", "max", "mean", "std", "count", *QUANTILES)
"""Names of a feature's statistics."""
_SAMPLED_SIDE = 150


def column_stats(values: NDArray[Any]) -> Stats:
    """Return the statistics [n] of numbers [N, n], in float64; ``count`` is [1]."""
    values = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    return {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
        "count": np.array([len(values)], np.int64),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


class PictureStats:
    """Statistics of a camera from sampled frames at a lower resolution; exact for the sampled
    pixels.
    """

    def __init__(self) -> None:
        self._histogram = np.zeros((3, 256), np.int64)
        self._frames = 0

    def add(self, frame: NDArray[np.uint8]) -> None:
        """Add a frame [H, W, 3]."""
        step = max(1, max(frame.shape[:2]) // _SAMPLED_SIDE)
        for channel in range(3):
            self._histogram[channel] += np.bincount(
                frame[::step, ::step, channel].ravel(), minlength=256
            )
        self._frames += 1

    def result(self) -> Stats:
        """Return the statistics [3, 1, 1] of the channels, scaled to [0, 1]; ``count`` is the
        number of sampled frames, [1].
        """
        levels = np.arange(256) / 255.0
        total = self._histogram.sum(axis=1)
        mean = (self._histogram @ levels) / total
        variance = (self._histogram @ levels**2) / total - mean**2
        fractions = [0.0, 1.0, *QUANTILES.values()]
        low, high, *quantiles = np.transpose(
            [
                np.quantile(np.repeat(levels, counts), fractions, method="lower")
                for counts in self._histogram
            ]
        )
        channels = {
            "min": low,
            "max": high,
            "mean": mean,
            "std": np.sqrt(np.maximum(variance, 0.0)),
            **dict(zip(QUANTILES, quantiles, strict=True)),
        }
        shaped: Stats = {name: value.reshape(3, 1, 1) for name, value in channels.items()}
        return {**shaped, "count": np.array([self._frames], np.int64)}


def merged(parts: Sequence[Stats]) -> Stats:
    """Return the statistics of several episodes together; quantiles are averages weighted by
    count.
    """
    if len(parts) == 1:
        return dict(parts[0])
    count = np.array([part["count"][0] for part in parts], np.float64)
    weight = count / count.sum()

    def average(values: list[NDArray[Any]]) -> NDArray[np.float64]:
        return np.tensordot(weight, np.stack(values), axes=1)

    mean = average([part["mean"] for part in parts])
    variance = average([part["std"] ** 2 + (part["mean"] - mean) ** 2 for part in parts])
    shared = [name for name in QUANTILES if all(name in part for part in parts)]
    return {
        "min": np.min([part["min"] for part in parts], axis=0),
        "max": np.max([part["max"] for part in parts], axis=0),
        "mean": mean,
        "std": np.sqrt(variance),
        "count": np.array([int(count.sum())], np.int64),
        **{name: average([part[name] for part in parts]) for name in shared},
    }


def merged_features(parts: Sequence[Mapping[str, Stats]]) -> dict[str, Stats]:
    """Return :func:`merged` for each feature."""
    return {key: merged([part[key] for part in parts]) for key in parts[0]} if parts else {}


def to_json(stats: Mapping[str, Stats]) -> dict[str, dict[str, Any]]:
    """Return the contents of ``meta/stats.json``."""
    return {
        key: {name: value.tolist() for name, value in figures.items()}
        for key, figures in stats.items()
    }
