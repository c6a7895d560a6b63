"""Hardware and wall time of a training run."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np

from strands_cosmos3.training.loop import read_curve


def machine() -> str:
    """Return the processor, its cores that may be used, and the GPU, if there is one."""
    import torch

    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores{gpu}; "
        f"torch {torch.__version__}"
    )


def duration(seconds: float) -> str:
    """Return a duration as seconds, minutes, or hours and minutes."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return (
        f"{hours} h {minutes:02d} min"
        if hours
        else f"{minutes} min"
        if minutes > 1
        else f"{seconds:.0f} s"
    )


def seconds_of(curve: Path) -> float:
    """Return the time that a curve's steps took [s], 0 without a curve; a gap of over ten
    medians is an interruption.
    """
    gaps = np.diff([point["time"] for point in read_curve(curve)])
    return float(gaps[gaps <= 10 * np.median(gaps)].sum()) if len(gaps) else 0.0
