"""One thread on which every inference runs, one after another: models and GPUs are not shared between threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Worker:
    """A daemon thread with a queue of jobs. A job must not raise; one that was cancelled while it waited is skipped.

    Being a daemon, it cannot keep a process alive whose inference never returns.
    """

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Put a job at the queue's end."""
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def close(self, timeout_s: float) -> bool:
        """Finish what was submitted; returns whether it ended in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            if future.set_running_or_notify_cancel():
                future.set_result(job())
