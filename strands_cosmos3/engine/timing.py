"""Time the parts of an inference without synchronising with the device before the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Times named parts of one call: wall-clock time on a CPU, events in the device's current
    stream on a GPU.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._cuda = device.type == "cuda"
        self._parts: list[tuple[str, Any, Any]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body of a ``with`` statement."""
        start = self._now()
        yield
        self._parts.append((name, start, self._now()))

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds of each part and their ``total``."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        spent = {
            p: start.elapsed_time(end) if self._cuda else (end - start) * 1e3
            for p, start, end in self._parts
        }
        return {**spent, "total": sum(spent.values())}

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        # a thread's own device may be another
        event.record(torch.cuda.current_stream(self._device))
        return event
