"""Milliseconds by part, without waiting for the device until the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Times named parts of one call: wall time on a CPU, events on a CUDA device, which are read once, at the end.

    Args:
        device: Where the work runs.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._parts: list[tuple[str, object, object]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        start = self._now()
        yield
        self._parts.append((name, start, self._now()))

    def milliseconds(self) -> dict[str, float]:
        """Every part's time, and their ``total``."""
        if self._cuda:
            torch.cuda.synchronize()
        spent = {name: self._between(start, end) for name, start, end in self._parts}
        return {**spent, "total": sum(spent.values())}

    def _now(self) -> object:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _between(start: object, end: object) -> float:
        if isinstance(start, float) and isinstance(end, float):
            return (end - start) * 1e3
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end)
