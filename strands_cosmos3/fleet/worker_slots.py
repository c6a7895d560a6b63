"""Workers on Ray, each in a slot where it does one job of a queue after another; one that dies or
hangs is replaced.
"""

from __future__ import annotations

import os
import signal
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from strands_cosmos3 import __version__
from strands_cosmos3.errors import EvaluationError
from strands_cosmos3.fleet.cluster import WORKER_FAILURES, Reply
from strands_cosmos3.resources import Closeable

MAX_ATTEMPTS = 3
"""Deaths of workers with one job, or while one starts, after which no other tries it."""
_POLL_S = 0.25


class WorkerActor:
    """A process with one worker, any object, which only plain values and the text of errors leave.
    :meth:`open` makes it, so that a failure can give its reason.
    """

    _worker: Any  # made by open
    _version = 0  # of the weights it has

    def open(self, make: Callable[[], Any]) -> Reply:
        """Make the worker; reply with process, node and version of this package."""

        def made() -> tuple[int, str, str]:
            self._worker = make()
            return os.getpid(), ray.get_runtime_context().get_node_id(), __version__

        return Reply.of(made)

    def do(
        self, method: str, arguments: Sequence[Any], version: int = 0, weights: Sequence[Any] = ()
    ) -> Reply:
        """Do a job with weights of a version, which ``take_weights`` takes; reply with its
        result.
        """

        def done() -> Any:
            if version != self._version:
                self._worker.take_weights(ray.get(weights[0]))
                self._version = version
            return getattr(self._worker, method)(*arguments)

        return Reply.of(done)


RemoteWorker = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(WorkerActor)


@dataclass(eq=False)
class WorkerSlot:
    """A slot for a worker: its actor, the reference of the awaited reply, and its job."""

    number: int
    actor: Any = None
    pending: Any = None
    job: Any = None  # None while the worker opens
    pid: int = 0  # 0 if unknown
    node: str = ""  # Ray's id of the machine
    since_s: float = 0.0  # when the reply was asked for
    failed_starts: int = 0

    def opened(self, pid: int, node: str, version: str) -> None:
        """Take what a worker replies that has opened."""
        self.pid, self.node, self.failed_starts = pid, node, 0
        if version != __version__:
            raise EvaluationError(
                f"a worker runs version {version} of this package, the driver {__version__}."
            )

    def end(self) -> None:
        """End the worker at once. Idempotent.

        A stopped process ignores Ray, so one on this machine is killed by its id.
        """
        ray.kill(self.actor, no_restart=True)
        if self.pid and self.node == ray.get_runtime_context().get_node_id():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class WorkerPool(Closeable):
    """The places of a run, and the queue of its jobs, which count their ``attempts``.

    ``timeout_s``: Longest wall-clock time until a reply.
    """

    def __init__(self, timeout_s: float):
        self.slots: list[WorkerSlot] = []
        self.queue: deque[Any] = deque()
        self._timeout_s = timeout_s

    @abstractmethod
    def opening(self, slot: WorkerSlot) -> Any:
        """Have a slot's worker open; return the reference of its reply."""

    @abstractmethod
    def request(self, job: Any) -> tuple[Any, ...]:
        """Return what a worker is to do for a job, as :meth:`WorkerActor.do` takes it."""

    @abstractmethod
    def on_reply(self, slot: WorkerSlot, job: Any, reply: Reply) -> None:
        """Process a reply; without a job the worker has opened."""

    @abstractmethod
    def on_death(self, slot: WorkerSlot) -> None:
        """Do what follows from a worker's death, before :meth:`replace`."""

    @abstractmethod
    def on_timeout(self, slot: WorkerSlot) -> None:
        """Do what follows from a reply that does not come, before :meth:`replace`."""

    def open(self, slot: WorkerSlot) -> None:
        """Start a worker in a slot."""
        slot.actor = RemoteWorker.remote()
        slot.job, slot.pid, slot.since_s = None, 0, time.monotonic()
        slot.pending = self.opening(slot)

    def hand_out(self) -> None:
        """Give queued jobs to idle workers."""
        for slot in self.slots:
            if slot.pending is None and self.queue:
                job = self.queue.popleft()
                job.attempts += 1
                slot.job, slot.since_s = job, time.monotonic()
                slot.pending = slot.actor.do.remote(*self.request(job))

    def replace(self, slot: WorkerSlot) -> None:
        """End a slot's worker and start another; EvaluationError if none starts there."""
        slot.end()
        slot.failed_starts += slot.job is None
        if slot.failed_starts >= MAX_ATTEMPTS:
            raise EvaluationError(
                f"worker {slot.number} died {MAX_ATTEMPTS} times while it started; is there "
                "enough memory?"
            )
        self.open(slot)

    def collect(self) -> bool:
        """Wait briefly for replies, process them, and replace workers that died or hang; return
        whether one replied.
        """
        waiting = {slot.pending: slot for slot in self.slots if slot.pending is not None}
        if not waiting:
            time.sleep(_POLL_S)
        ready, _ = ray.wait(list(waiting), timeout=_POLL_S)
        for reference in ready:
            slot = waiting[reference]
            try:
                reply: Reply = ray.get(reference)
            except WORKER_FAILURES:
                slot.pid = 0  # another process may have the id by now
                self.on_death(slot)
                self.replace(slot)
            else:
                job, slot.pending, slot.job = slot.job, None, None
                self.on_reply(slot, job, reply)
        latest_s = time.monotonic() - self._timeout_s
        for slot in self.slots:
            if slot.pending is not None and slot.since_s < latest_s:
                self.on_timeout(slot)
                self.replace(slot)
        return bool(ready)

    def close(self) -> None:
        """End every worker; what they share belongs to the caller."""
        for slot in self.slots:
            slot.end()
        self.slots = []
