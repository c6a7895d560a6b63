"""Ctrl-C between two control ticks instead of in the middle of one, so that arm and reference never part."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupt:
    """Whether the user has asked to stop, and whether a second time."""

    requested: bool = False
    forced: bool = False


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """While it lasts, the first Ctrl-C is noted and the second raises KeyboardInterrupt at once.

    Signals belong to the main thread; in another one, nothing changes and nothing is ever noted.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.requested:
            interrupt.forced = True
            raise KeyboardInterrupt
        interrupt.requested = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
