"""Workers: threads that run inferences from one fair queue, each with a backend of its own that
no other thread uses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from strands_cosmos3.serving.admission import Client, Durations, Turns

Tool = TypeVar("Tool")
Job = TypeVar("Job")
Result = TypeVar("Result")


class Workers(Generic[Tool, Job, Result]):
    """Daemon threads, one for each tool, that share a queue. Cancelled jobs are skipped.

    As daemons, they do not keep the process alive if an inference never returns.

    Args:
        tools: What each thread works with, e.g. a policy.
        first: What each thread does with its tool before it takes jobs.
        work: Does jobs with a tool, and returns their results in order.
        most: How many jobs a thread takes at a time, of those that wait.
        inferred: Whether a result took an inference, whose duration is remembered.
        name: Of the threads.

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
        inferred: Callable[[Result], bool] = lambda result: True,
        name: str = "inference",
    ):
        self.busy_since: list[float | None] = [None] * len(tools)
        self.started: list[Future[Any]] = [Future() for _ in tools]
        self._first = first
        self._work = work
        self._most = most
        self._inferred = inferred
        self._lock = threading.Lock()
        self._turns: Turns[tuple[Future[Result], Job]] = Turns()
        self._durations = Durations()
        # a token for each job; it wakes a thread sooner than a condition does
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._closed = False
        self._takers = 0  # threads that wait for jobs
        self._sizes = [0] * len(tools)  # how many jobs each thread took last
        self._threads = [
            threading.Thread(
                target=self._run, args=(number, tool), name=f"{name}-{number}", daemon=True
            )
            for number, tool in enumerate(tools)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, client: Client, job: Job) -> Future[Result]:
        """Append a job of a client to the queue, which it leaves when it is cancelled."""
        future: Future[Result] = Future()

        def drop(done: Future[Result]) -> None:
            if done.cancelled():
                with self._lock:
                    self._turns.discard(client, lambda waiting: waiting[0] is done)

        with self._lock:
            self._turns.put(client, (future, job))
        future.add_done_callback(drop)
        self._wake.put(None)
        return future

    def expected_s(self, client: Client, count: int) -> float:
        """Return the time in which ``count`` jobs that a client adds now will be done, if no other
        ones come before them; 0 if no inference was measured lately.
        """
        now_s = time.monotonic()
        with self._lock:
            free_in_s = [
                0.0
                if since_s is None
                else max(0.0, since_s + self._durations.expected_s(size, now_s) - now_s)
                for since_s, size in zip(self.busy_since, self._sizes, strict=True)
            ]
            ahead, waiting = self._turns.ahead(client, count), len(self._turns) + count
            return self._durations.until_done_s(free_in_s, ahead, waiting, self._most, now_s)

    def close(self, timeout_s: float) -> None:
        """End the threads after the queued jobs; wait for at most ``timeout_s``."""
        with self._lock:
            self._closed = True
        self._wake.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, number: int, tool: Tool) -> None:
        self._do(number, [self.started[number]], lambda: [self._first(tool)])
        while self._do_next(number, tool):
            pass  # nothing of a job is held while the thread waits for the next one

    def _do_next(self, number: int, tool: Tool) -> bool:
        """Wait for jobs and do them; False once the queue is closed and empty."""
        taken = self._take()
        running = [(future, job) for future, job in taken if future.set_running_or_notify_cancel()]
        if running:
            jobs = [job for _, job in running]
            self._sizes[number] = len(jobs)
            self._do(number, [future for future, _ in running], lambda: self._timed(tool, jobs))
        return bool(taken)

    def _take(self) -> list[tuple[Future[Result], Job]]:
        """Wait for a job, and return it with this thread's share of what else waits, up to the
        most; nothing once the queue is closed and empty.
        """
        taken: list[tuple[Future[Result], Job]] = []
        while not taken:
            with self._lock:
                self._takers += 1
            self._wake.get()  # in vain if the token's job was taken with another one
            with self._lock:
                # threads that are free too take the rest
                share = -(-len(self._turns) // self._takers)
                self._takers -= 1
                taken = [self._turns.pop() for _ in range(min(share, self._most))]
                if self._closed and not self._turns:
                    self._wake.put(None)  # for the next thread
                    break
        return taken

    def _timed(self, tool: Tool, jobs: list[Job]) -> list[Result]:
        """The results of jobs, whose duration is remembered."""
        started_s = time.monotonic()
        results = self._work(tool, jobs)
        now_s = time.monotonic()
        if size := sum(map(self._inferred, results)):
            with self._lock:
                self._durations.observe(size, now_s - started_s, now_s)
        return results

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
