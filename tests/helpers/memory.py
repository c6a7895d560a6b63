"""How much anonymous memory a job needs beyond what was there before: a watcher reads /proc
while it runs.
"""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """What this process holds that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+)", STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak_growth(job: Callable[[], T]) -> tuple[T, int]:
    """The job's result, and the largest growth of anonymous memory [bytes] while it ran."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the heap could lend would not be counted
    baseline, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = job()
    finally:
        done.set()
        watcher.join()
    return result, max(peak, anonymous_bytes()) - baseline


def peak_rss_growth() -> Callable[[], int]:
    """Forget the largest resident memory so far; the returned function tells how far it has
    grown since [bytes].
    """
    Path("/proc/self/clear_refs").write_text("5")

    def resident(which: str) -> int:
        found = re.search(rf"{which}:\s+(\d+)", STATUS.read_text())
        assert found is not None
        return int(found[1]) * 1024

    before = resident("VmRSS")
    return lambda: resident("VmHWM") - before
