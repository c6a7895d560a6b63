"""Ctrl-C that takes effect between two control ticks, so that arm and reference stay together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed once (``requested``) and twice (``forced``)."""

    requested: bool = False
    forced: bool = False


_open: list[Interrupt] = []


def interrupt_requested() -> bool:
    """Return whether Ctrl-C was pressed in the innermost :func:`deferred_interrupt` that is
    open.
    """
    return bool(_open) and _open[-1].requested


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Note the first Ctrl-C in the block; the second raises KeyboardInterrupt at once.

    Only the main thread receives signals; in another one this has no effect.
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
    _open.append(interrupt)
    try:
        yield interrupt
    finally:
        _open.pop()
        signal.signal(signal.SIGINT, before)
