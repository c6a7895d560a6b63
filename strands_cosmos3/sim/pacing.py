"""Pacing: simulated or recorded time that runs no faster than wall-clock time."""

from __future__ import annotations

import time


class Pacer:
    """Keeps a clock from running ahead of wall-clock time.

    A delay up to ``tolerance_s`` is made up for by running faster; beyond, the clock goes on at
    real speed from there.
    """

    def __init__(self, now_s: float, tolerance_s: float = 0.0):
        self._offset_s = time.monotonic() - now_s
        self._tolerance_s = tolerance_s

    def wait(self, now_s: float) -> bool:
        """Sleep until wall-clock time has caught up with ``now_s``; return whether the clock was
        late instead.
        """
        ahead_s = now_s + self._offset_s - time.monotonic()
        if ahead_s > 0:
            time.sleep(ahead_s)
            return False
        if ahead_s < -self._tolerance_s:
            self._offset_s -= ahead_s
        return True
