"""Outcome and errors of an episode, and its summary as a line of text or as HTML for notebooks."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_INLINE_BYTES = 16 << 20
"""A larger film is linked from a notebook and not embedded in it."""


class Outcome(StrEnum):
    """Outcome of an episode."""

    SUCCESS = "success"
    TIMEOUT = "timeout"
    FOLLOWED = "followed"
    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    FAULT = "fault"

    @property
    def message(self) -> str:
        """One sentence for a person."""
        return _OUTCOME_MESSAGES[self]


_OUTCOME_MESSAGES = {
    "success": "The task's success condition held.",
    "timeout": "The time was up before the task's success condition held.",
    "followed": "The policy did what its own instruction asks, which is not the goal.",
    "completed": "The motion was played to its end, or the time was up; there was no task "
    "to judge.",
    "interrupted": "The user stopped the episode; the arm was brought to rest first.",
    "fault": "A fault stopped the episode; the arm was brought to rest.",
}


@dataclass(frozen=True)
class ErrorSummary:
    """An error between two motions: millimetres and degrees, over every sample compared."""

    mean_mm: float
    max_mm: float
    mean_deg: float
    max_deg: float

    @classmethod
    def of(cls, distance_m: NDArray[np.float64], angle_rad: NDArray[np.float64]) -> ErrorSummary:
        """Summarise [N] distances and [N] angles."""
        mm = np.asarray(distance_m) * 1e3
        deg = np.rad2deg(angle_rad)
        return cls(float(mm.mean()), float(mm.max()), float(deg.mean()), float(deg.max()))


def text_of(rollout: Any) -> str:
    """Return a Rollout as one line: what was to be done, how it ended, and how well the arm
    followed.
    """
    figures = f"seed={rollout.seed}, {rollout.duration_s:.2f} s simulated"
    if rollout.tracking is not None:
        figures += f", tracking {_mean_and_max(rollout.tracking)}"
    task = rollout.task or "no task"
    return f"Rollout({task}: {rollout.outcome}, {rollout.instruction!r}, {figures})"


def html_of(rollout: Any) -> str:
    """Return a Rollout's outcome, a few figures and the film, embedded if it is at most
    ``MAX_INLINE_BYTES`` long.
    """
    rows = {
        "outcome": f"{rollout.outcome}: {rollout.outcome.message}"
        + (f" {rollout.fault}" if rollout.fault else ""),
        "task": f"{rollout.task or 'none'}, seed {rollout.seed}",
        "duration": f"{rollout.duration_s:.2f} s simulated, {rollout.realtime_factor:.2g} "
        "simulated seconds per second",
        "tracking": "" if rollout.tracking is None else _mean_and_max(rollout.tracking),
        "inference": f"median {rollout.inference_ms['p50']:.0f} ms"
        if "p50" in rollout.inference_ms
        else "",
    }
    cells = "".join(
        f"<tr><th style='text-align:left'>{k}</th><td>{escape(v)}</td></tr>"
        for k, v in rows.items()
        if v
    )
    title = escape(rollout.instruction) or "replay"
    return f"<b>{title}</b><table>{cells}</table>{_film(rollout.video)}"


def _mean_and_max(error: ErrorSummary) -> str:
    return f"mean {error.mean_mm:.3f} mm, max {error.max_mm:.3f} mm"


def _film(path: Path | None) -> str:
    if path is None:
        return ""
    if not path.is_file():
        return f"<p>The film {escape(str(path))} no longer exists.</p>"
    if path.stat().st_size > MAX_INLINE_BYTES:
        link = f"<a href='{escape(path.as_uri(), quote=True)}'>{escape(str(path))}</a>"
        return f"<p>The film is too long to embed: {link}</p>"
    if path.suffix.lower() != ".mp4":
        return f"<p>The film is {escape(str(path))}.</p>"
    content = base64.b64encode(path.read_bytes()).decode()
    return (
        "<video controls muted style='max-width:100%' "
        f"src='data:video/mp4;base64,{content}'></video>"
    )
