"""Workers: threads that run inferences from one fair queue, each with a backend of its own that no other thread uses."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Tool = TypeVar("Tool")
Job = tuple["Future[Any]", Callable[[Any], Any]]


class FairQueue:
    """Jobs by client. Clients take turns, however many jobs one of them has; its own jobs keep their order."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, client: str, job: Job) -> None:
        """Append a job to a client's."""
        with self._changed:
            self._waiting.setdefault(client, deque()).append(job)
            self._changed.notify()

    def get(self) -> Job | None:
        """Wait for the next job; None once the queue is closed and empty."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            client, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs  # behind all others
            return job

    def close(self) -> None:
        """Let :meth:`get` return None when the last job is taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Workers(Generic[Tool]):
    """Daemon threads, one for each tool, that share a queue. Cancelled jobs are skipped.

    As daemons, they do not keep the process alive if an inference never returns.

    Args:
        name: Name of the threads.
        tools: What each thread works with, e.g. a policy.
        first: What each thread does with its tool before it takes jobs.

    Attributes:
        started: The outcomes of ``first``.
        busy_since: For each thread the start of its running job on the monotonic clock, or None.
    """

    def __init__(self, name: str, tools: Sequence[Tool], first: Callable[[Tool], Any]):
        self.busy_since: list[float | None] = [None] * len(tools)
        self.started: list[Future[Any]] = [Future() for _ in tools]
        self._queue = FairQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(number, tool, first), name=f"{name}-{number}", daemon=True)
            for number, tool in enumerate(tools)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, client: str, job: Callable[[Tool], Any]) -> Future[Any]:
        """Append a job of a client to the queue."""
        future: Future[Any] = Future()
        self._queue.put(client, (future, job))
        return future

    def close(self, timeout_s: float) -> None:
        """End the threads after the queued jobs; wait for at most ``timeout_s``."""
        self._queue.close()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, number: int, tool: Tool, first: Callable[[Tool], Any]) -> None:
        item: Job | None = self.started[number], first
        while item is not None:
            future, job = item
            if future.set_running_or_notify_cancel():
                self.busy_since[number] = time.monotonic()
                try:
                    future.set_result(job(tool))
                except Exception as error:  # whoever waits for the job must be told
                    future.set_exception(error)
                finally:
                    self.busy_since[number] = None
            item = self._queue.get()
