"""A worker thread that runs inference while the arm moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")
_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
_CANCEL_EVERY_S = 0.1


def _work(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        future, call = item
        try:
            future.set_result(call())
        except BaseException as error:  # raised again by Future.result, in the thread that reads it
            future.set_exception(error)


class Worker:
    """One daemon thread, started by the first call, that runs one call after another.

    A ``ThreadPoolExecutor`` is joined at exit, but a call into a user's policy may never return and
    must not block that.
    """

    def __init__(self) -> None:
        self._calls: _Calls = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Run a call on the thread, after those submitted before it."""
        if self._thread is None:
            self._calls = SimpleQueue()  # an abandoned thread keeps its own
            self._thread = threading.Thread(
                target=_work, args=(self._calls,), name="planner", daemon=True
            )
            self._thread.start()
        future: Future[_T] = Future()
        self._calls.put((future, call))
        return future

    def close(self, timeout_s: float, cancel: Callable[[], None] = lambda: None) -> bool:
        """Return whether the thread ended, i.e. its call returned within ``timeout_s``; it is
        abandoned otherwise.

        ``cancel`` asks the call to end. It is called repeatedly, because the call may only just be
        starting.
        """
        if self._thread is None:
            return True
        self._calls.put(None)
        deadline_s = time.monotonic() + timeout_s
        while self._thread.is_alive():
            cancel()
            left_s = deadline_s - time.monotonic()
            self._thread.join(max(min(left_s, _CANCEL_EVERY_S), 0.0))
            if left_s <= 0:
                break
        ended = not self._thread.is_alive()
        self._thread = None
        return ended
