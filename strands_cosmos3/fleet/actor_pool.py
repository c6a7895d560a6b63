"""A pool of workers on Ray that do jobs on any object, with weights that change while they run.

A thread hands out the jobs, so that the caller can compute meanwhile. Weights of a version are put
into the object store once; a worker fetches those that its job names when it has others. A worker
that dies is replaced, and its job goes to the front of the queue; one whose workers died
``MAX_ATTEMPTS`` times ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import ray

from strands_cosmos3.errors import ConfigError, EvaluationError
from strands_cosmos3.fleet.cluster import Reply
from strands_cosmos3.fleet.worker_slots import MAX_ATTEMPTS, WorkerPool, WorkerSlot

_VERSIONS = 2  # whose weights are kept


@dataclass(eq=False)
class PoolJob:
    """A method of the worker to call, with weights of a published version; it has those of version
    0 from the start.
    """

    key: Hashable
    method: str
    arguments: tuple[Any, ...]
    version: int
    attempts: int = 0


class ActorPool(WorkerPool):
    """Workers that ``make`` makes, each in a process of its own.

    Args:
        timeout_s: Longest wall-clock time of a job; a worker that exceeds it is replaced.

    Raises:
        ConfigError: The cluster has fewer CPUs than workers.

    Attributes:
        deaths: Workers that were replaced so far.
    """

    def __init__(self, make: Callable[[], Any], workers: int, timeout_s: float):
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if workers > cpus:
            raise ConfigError(f"--workers {workers}: the cluster has {cpus} CPUs; ask for fewer.")
        super().__init__(timeout_s)
        self._make, self.deaths = make, 0
        self._weights: dict[int, Any] = {}
        self._answers: dict[Hashable, Future[Any]] = {}
        self._closed = False
        self.slots = [WorkerSlot(number) for number in range(workers)]
        for slot in self.slots:
            self.open(slot)
        self._executor = ThreadPoolExecutor(1)
        self._running = self._executor.submit(self._run)

    def publish(self, version: int, weights: Mapping[str, Any]) -> None:
        """Offer the weights of a version; those of older ones than the last two are dropped."""
        if version not in self._weights:
            self._weights[version] = ray.put(dict(weights))
        for old in [known for known in self._weights if known <= version - _VERSIONS]:
            del self._weights[old]

    def submit(self, job: PoolJob) -> None:
        """Queue a job."""
        self._answers[job.key] = Future()
        self.queue.append(job)

    def result(self, key: Hashable) -> Any:
        """Wait for a job's result.

        Raises:
            EvaluationError, Cosmos3Error: Workers die repeatedly; a job failed with that error.
        """
        answer = self._answers[key]
        wait((answer, self._running), return_when=FIRST_COMPLETED)
        if not answer.done():
            self._running.result()  # raises what ended it
        return self._answers.pop(key).result()

    def results(
        self, key: Hashable, method: str, calls: Sequence[tuple[Any, ...]], version: int
    ) -> list[Any]:
        """Queue calls of a method by their arguments; wait for their results. Errors: as
        :meth:`result`.
        """
        for k, arguments in enumerate(calls):
            self.submit(PoolJob((key, k), method, arguments, version))
        return [self.result((key, k)) for k in range(len(calls))]

    def close(self) -> None:
        """End every worker."""
        self._closed = True
        self._executor.shutdown(wait=True)
        super().close()

    def opening(self, slot: WorkerSlot) -> Any:
        """Have a worker open."""
        return slot.actor.open.remote(self._make)

    def request(self, job: PoolJob) -> tuple[Any, ...]:
        """Return a job with the weights that it names."""
        weights = self._weights.get(job.version)
        return job.method, job.arguments, job.version, [] if weights is None else [weights]

    def _run(self) -> None:
        while not self._closed:
            self.hand_out()
            self.collect()

    def on_reply(self, slot: WorkerSlot, job: PoolJob | None, reply: Reply) -> None:
        """Keep a job's result; an error of it ends the run."""
        value = reply.unwrap()
        if job is None:
            slot.opened(*value)
        else:
            self._answers[job.key].set_result(value)

    def on_death(self, slot: WorkerSlot) -> None:
        """Queue the job of a worker that died again."""
        self.deaths += 1
        job: PoolJob | None = slot.job
        if job is None:
            return
        if job.attempts >= MAX_ATTEMPTS:
            raise EvaluationError(
                f"a worker died {MAX_ATTEMPTS} times while job {job.key}; is there enough memory?"
            )
        self.queue.appendleft(job)

    on_timeout = on_death
