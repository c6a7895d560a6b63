"""A single thread that runs every inference: models and GPUs are not shared between threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Worker:
    """A daemon thread with a queue of jobs. Cancelled jobs are skipped.

    As a daemon, it does not keep the process alive if an inference never returns.

    Attributes:
        busy_since: Start of the running job on the monotonic clock, or None.
    """

    def __init__(self, name: str):
        self.busy_since: float | None = None
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Append a job to the queue."""
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def close(self, timeout_s: float) -> None:
        """End the thread after the queued jobs; wait for at most ``timeout_s``."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            if future.set_running_or_notify_cancel():
                self.busy_since = time.monotonic()
                try:
                    future.set_result(job())
                except Exception as error:  # whoever waits for the job must be told
                    future.set_exception(error)
                finally:
                    self.busy_since = None
