"""A worker thread that answers questions beside the motion, one after another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_NUDGE_S = 0.1


class Job(Generic[_T]):
    """A call that a worker makes; its value or its exception is kept for whoever asks.

    Attributes:
        wall_s: How long the call took, once it is done.
    """

    def __init__(self, call: Callable[[], _T]):
        self._call = call
        self._done = threading.Event()
        self._value: _T | None = None
        self._error: BaseException | None = None
        self.wall_s = 0.0

    def run(self) -> None:
        """Make the call. Whatever it raises is the asker's, so nothing is caught for good here."""
        started = time.perf_counter()
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        self.wall_s = time.perf_counter() - started
        self._done.set()

    @property
    def done(self) -> bool:
        """Whether :meth:`result` would return at once."""
        return self._done.is_set()

    def wait(self, longest_s: float | None = None) -> bool:
        """Wait until it is done, or for ``longest_s``; says whether it is."""
        return self._done.wait(longest_s)

    def result(self) -> _T:
        """The call's value, waited for; or what it raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value  # pyright: ignore[reportReturnType]


def _work(jobs: SimpleQueue[Job[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()


class Worker:
    """One thread that makes one call after another. It starts with the first."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], _T]) -> Job[_T]:
        """Have a call made beside whatever this thread does next."""
        if self._thread is None:
            # A call into somebody's policy may never return; leaving the program must not wait for it.
            self._jobs = SimpleQueue()  # one that was left to itself keeps its own
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="planner", daemon=True)
            self._thread.start()
        job = Job(call)
        self._jobs.put(job)
        return job

    def close(self, longest_s: float, break_off: Callable[[], None] = lambda: None) -> bool:
        """End the thread once its call has returned; False where that takes longer and the thread is left to itself.

        Args:
            longest_s: How long to wait.
            break_off: Asks the call to end; more than once, for it may just be beginning.
        """
        if self._thread is None:
            return True
        self._jobs.put(None)
        until_s = time.monotonic() + longest_s
        while self._thread.is_alive():
            break_off()
            left_s = until_s - time.monotonic()
            self._thread.join(max(min(left_s, _NUDGE_S), 0.0))
            if left_s <= 0:
                break
        ended = not self._thread.is_alive()
        self._thread = None
        return ended
