"""Workers: threads that run inferences from one fair queue, each with a backend of its own that
no other thread uses.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Tool = TypeVar("Tool")
Job = TypeVar("Job")
Result = TypeVar("Result")


class FairQueue(Generic[Job]):
    """Jobs by client. Clients take turns, however many jobs one of them has; its own jobs keep
    their order.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._lock = threading.Lock()
        # a token for each job; it wakes a thread sooner than a condition does
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._closed = False
        self._count = 0  # of jobs
        self._takers = 0  # threads in take()

    def put(self, client: str, job: Job) -> None:
        """Append a job to a client's."""
        with self._lock:
            self._waiting.setdefault(client, deque()).append(job)
            self._count += 1
        self._wake.put(None)

    def take(self, most: int) -> list[Job]:
        """Wait for a job, and return it with this thread's share of what else waits, up to
        ``most``.

        Nothing is returned once the queue is closed and empty.
        """
        taken: list[Job] = []
        while not taken:
            with self._lock:
                self._takers += 1
            self._wake.get()  # in vain if the token's job was taken with another one
            with self._lock:
                share = -(-self._count // self._takers)  # threads that are free too take the rest
                self._takers -= 1
                while len(taken) < min(share, most):
                    client, jobs = self._waiting.popitem(last=False)
                    taken.append(jobs.popleft())
                    if jobs:
                        self._waiting[client] = jobs  # behind all others
                self._count -= len(taken)
                if self._closed and not self._count:
                    self._wake.put(None)  # for the next thread
                    break
        return taken

    def close(self) -> None:
        """Let :meth:`take` return nothing when the last job is taken."""
        with self._lock:
            self._closed = True
        self._wake.put(None)


class Workers(Generic[Tool, Job, Result]):
    """Daemon threads, one for each tool, that share a queue. Cancelled jobs are skipped.

    As daemons, they do not keep the process alive if an inference never returns.

    Args:
        tools: What each thread works with, e.g. a policy.
        first: What each thread does with its tool before it takes jobs.
        work: Does jobs with a tool, and returns their results in order.
        most: How many jobs a thread takes at a time, of those that wait.

    Attributes:
        started: The outcomes of ``first``.
        busy_since: For each thread the start of its running jobs on the monotonic clock, or None.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        first: Callable[[Tool], Any],
        work: Callable[[Tool, list[Job]], list[Result]],
        most: int,
    ):
        self.busy_since: list[float | None] = [None] * len(tools)
        self.started: list[Future[Any]] = [Future() for _ in tools]
        self._first = first
        self._work = work
        self._most = most
        self._queue: FairQueue[tuple[Future[Result], Job]] = FairQueue()
        self._threads = [
            threading.Thread(
                target=self._run, args=(number, tool), name=f"inference-{number}", daemon=True
            )
            for number, tool in enumerate(tools)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, client: str, job: Job) -> Future[Result]:
        """Append a job of a client to the queue."""
        future: Future[Result] = Future()
        self._queue.put(client, (future, job))
        return future

    def close(self, timeout_s: float) -> None:
        """End the threads after the queued jobs; wait for at most ``timeout_s``."""
        self._queue.close()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, number: int, tool: Tool) -> None:
        self._do(number, [self.started[number]], lambda: [self._first(tool)])
        while self._do_next(number, tool):
            pass  # nothing of a job is held while the thread waits for the next one

    def _do_next(self, number: int, tool: Tool) -> bool:
        """Wait for jobs and do them; False once the queue is closed and empty."""
        taken = self._queue.take(self._most)
        running = [(future, job) for future, job in taken if future.set_running_or_notify_cancel()]
        if running:
            jobs = [job for _, job in running]
            self._do(number, [future for future, _ in running], lambda: self._work(tool, jobs))
        return bool(taken)

    def _do(
        self, number: int, futures: Sequence[Future[Any]], work: Callable[[], Sequence[Any]]
    ) -> None:
        self.busy_since[number] = time.monotonic()
        try:
            results = list(zip(futures, work(), strict=True))
        except Exception as error:  # whoever waits for the jobs must be told
            self.busy_since[number] = None
            for future in futures:
                future.set_exception(error)
        else:
            # before anyone is told: who hears of the result finds the thread free
            self.busy_since[number] = None
            for future, result in results:
                future.set_result(result)
