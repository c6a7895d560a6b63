"""The queue of episodes, and what happens when a worker dies or hangs.

Only the driver writes files. An idle worker takes the next assignment, so slow episodes delay no
other worker; its record returns through Ray and is stored at once. A worker that dies is replaced
and its assignment goes to the front of the queue; an assignment whose workers died ``MAX_ATTEMPTS``
times is given up and named. A worker that exceeds ``Settings.episode_timeout`` is killed and its
assignment runs once more; the second time it is stored as a failure. Films of failures follow the
episodes. They are chosen by index, so they too are the same with any number of workers.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from strands_cosmos3.errors import ConfigError, EvaluationError
from strands_cosmos3.evaluation.folder import RunFolder, without_times
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.runner import AssignmentRunner, failed_record
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.evaluation.statistics import Record, achieved, disagrees
from strands_cosmos3.fleet.cluster import Reply, machines_alive
from strands_cosmos3.fleet.replicas import ReplicaPool, replica_engine
from strands_cosmos3.fleet.worker_slots import MAX_ATTEMPTS, WorkerPool, WorkerSlot
from strands_cosmos3.sim.interrupt import deferred_interrupt

MAX_HANGS = 2
_CHECK_AFTER_SILENCE_S = 5.0


def simulator(settings: Settings, replica: Any) -> AssignmentRunner:
    """Make a simulator's robot and policy, in its process."""
    engine = None if replica is None else replica_engine(str(settings.policy.model), replica)
    return AssignmentRunner(settings, engine)


@dataclass
class Progress:
    """Progress of an evaluation, updated while it runs.

    ``total``, ``done`` and ``successes`` are counted by (condition, task). ``workers`` of the
    ``workers_total`` workers are ready. ``busy_s`` is the wall-clock time since the first worker
    was ready, while episodes remain [s].
    """

    total: dict[tuple[str, str], int] = field(default_factory=dict)
    done: Counter[tuple[str, str]] = field(default_factory=Counter)
    successes: Counter[tuple[str, str]] = field(default_factory=Counter)
    resumed: int = 0
    films: int = 0
    films_total: int = 0
    workers: int = 0
    workers_total: int = 0
    worker_failures: int = 0
    hangs: int = 0
    requeued: int = 0
    replica_restarts: int = 0
    given_up: list[str] = field(default_factory=list)
    busy_s: float = 0.0
    phase: str = "starting"
    interrupted: bool = False

    @property
    def new(self) -> int:
        """Episodes of this run."""
        return self.done.total() - self.resumed

    @property
    def a_minute(self) -> float | None:
        """Episodes a minute, start-up excluded."""
        return 60 * self.new / self.busy_s if self.new and self.busy_s else None

    def count(self, assignment: Assignment, record: Record) -> None:
        """Count a stored episode."""
        self.done[assignment.row] += 1
        self.successes[assignment.row] += bool(record["success"])


@dataclass(eq=False)
class _Job:
    assignment: Assignment
    film: bool = False
    attempts: int = 0
    hangs: int = 0

    @property
    def label(self) -> str:
        return f"{'film of ' if self.film else ''}{self.assignment.label}"


class Driver(WorkerPool):
    """Runs the episodes that are missing from a folder on a number of simulators.

    ``report`` is called several times a second with the progress.

    Attributes:
        records: The stored episodes by key.
        replicas: What the simulators share, if anything; set before :meth:`run`.
    """

    def __init__(
        self,
        folder: RunFolder,
        workers: int,
        report: Callable[[Progress], None] = lambda _: None,
    ):
        super().__init__(folder.settings.episode_timeout)
        self.folder = folder
        self.settings = folder.settings
        self.replicas: ReplicaPool | None = None
        self.plan = self.settings.plan()
        self.records = folder.read_all(self.plan)
        self.progress = Progress(
            total=dict(Counter(a.row for a in self.plan)), workers_total=workers
        )
        for assignment in self.plan:
            if assignment.key in self.records:
                self.progress.count(assignment, self.records[assignment.key])
        self.progress.resumed = len(self.records)
        self.queue.extend(_Job(a) for a in self.plan if a.key not in self.records)
        self._report = report
        self._busy_since_s: float | None = None
        self._last_reply_s = time.monotonic()
        self._answered_by = {
            r.get("model_sha256") for r in self.records.values() if "hung" not in r["times"]
        }

    @property
    def missing(self) -> int:
        """Number of episodes and films that are not stored yet."""
        return len(self.plan) - len(self.records) + len(self._missing_films())

    def run(self) -> None:
        """Run every missing episode, then film failures. Ctrl-C stops it between two replies;
        finished episodes are stored.

        Raises:
            EvaluationError, ConfigError: Workers do not start, a service is gone, or the folder
                belongs to another checkpoint.
        """
        progress = self.progress
        with deferred_interrupt() as interrupt:
            for phase in ("running", "filming failures"):
                progress.phase = phase
                if phase != "running":
                    self.queue.extend(_Job(a, film=True) for a in self._missing_films())
                    progress.films_total = len(self.queue)
                while self.queue or any(slot.job for slot in self.slots):
                    if phase == "running" and self._busy_since_s is not None:
                        progress.busy_s = time.monotonic() - self._busy_since_s
                    self._start_missing()
                    self.hand_out()
                    self._report(progress)
                    if interrupt.requested:
                        progress.interrupted = True
                        return
                    self._check_ray(self.collect())
                    if self.replicas is not None:
                        progress.replica_restarts = self.replicas.restarts()
        progress.phase = "done"
        self._report(progress)

    def _start_missing(self) -> None:
        """Start as many workers as there are jobs, up to the number of all."""
        jobs = len(self.queue) + sum(slot.job is not None for slot in self.slots)
        while len(self.slots) < min(self.progress.workers_total, jobs):
            self.slots.append(WorkerSlot(len(self.slots)))
            self.open(self.slots[-1])

    def request(self, job: _Job) -> tuple[Any, ...]:
        """Have an episode run or filmed."""
        return "film" if job.film else "run", (job.assignment,)

    def opening(self, slot: WorkerSlot) -> Any:
        """Have a simulator open, however long it takes: a replica may be loading."""
        slot.since_s = math.inf
        replica = None if self.replicas is None else self.replicas.of_worker(slot.number)
        return slot.actor.open.remote(partial(simulator, self.settings, replica))

    def _check_ray(self, replied: bool) -> None:
        """Raise if the cluster has no machine left; Ray itself would wait for another one
        forever.
        """
        now = time.monotonic()
        if replied:
            self._last_reply_s = now
        elif now - self._last_reply_s > _CHECK_AFTER_SILENCE_S:
            self._last_reply_s = now
            if not machines_alive():
                raise EvaluationError(
                    "Ray's own processes died. Finished episodes are stored; --resume continues."
                )

    def on_reply(self, slot: WorkerSlot, job: _Job | None, reply: Reply) -> None:
        """Store what a simulator replies."""
        if reply.kind == "lost":
            if job is not None:
                self._requeue(job)
                self.progress.workers -= 1
            slot.pending = self.opening(slot)
        elif job is None:
            slot.opened(*reply.unwrap())
            self.progress.workers += 1
            self._busy_since_s = self._busy_since_s or time.monotonic()
        elif reply.kind == "error":
            raise EvaluationError(f"{reply.error[1]} ({reply.error[0]} in {job.label})")
        elif job.film:
            record, film = reply.value
            self.require_same(record["model_sha256"])
            self._store_film(job.assignment, record, film)
        else:
            self.require_same(reply.value["model_sha256"])
            reply.value["times"]["worker"] = slot.number
            self._store(job, reply.value)

    def require_same(self, model_sha256: str | None) -> None:
        """Raise a ConfigError unless the stored episodes were answered by the same."""
        if different := self._answered_by - {model_sha256}:
            raise ConfigError(
                f"the episodes in {self.folder.path} were run with another checkpoint or policy "
                f"(SHA-256 {str(different.pop())[:12]}, now {str(model_sha256)[:12]}); choose "
                "another --out."
            )
        self._answered_by.add(model_sha256)

    def _store(self, job: _Job, record: Record) -> None:
        record["times"]["attempt"] = job.attempts
        self.records[job.assignment.key] = self.folder.write(job.assignment, record)
        self.progress.count(job.assignment, record)

    def _store_film(self, assignment: Assignment, record: Record, film: bytes) -> None:
        self.progress.films += 1
        stored = without_times(self.records[assignment.key])
        if film:
            equal = all(stored.get(name) == value for name, value in without_times(record).items())
            self.folder.write_film(assignment, film, equal)

    def on_death(self, slot: WorkerSlot) -> None:
        """Queue the job of a worker that died again."""
        self.progress.worker_failures += 1
        if slot.job is not None:
            self.progress.workers -= 1
            self._requeue(slot.job)

    def on_timeout(self, slot: WorkerSlot) -> None:
        """Queue the job of a worker that exceeds the time limit again, or store that it failed."""
        job: _Job = slot.job
        self.progress.workers -= 1
        self.progress.hangs += 1
        job.hangs += 1
        if job.hangs < MAX_HANGS:
            self._requeue(job)
        elif job.film:
            self.progress.given_up.append(job.label)
        else:
            limit = f"did not end within {self.settings.episode_timeout:g} s of wall-clock time"
            record = failed_record(
                job.assignment, f"{limit}, {MAX_HANGS} times; its simulator was killed"
            )
            record["times"]["hung"] = MAX_HANGS
            self._store(job, record)

    def _requeue(self, job: _Job) -> None:
        if job.attempts < MAX_ATTEMPTS:
            self.progress.requeued += 1
            self.queue.appendleft(job)
        else:
            self.progress.given_up.append(job.label)

    def _missing_films(self) -> list[Assignment]:
        failures = failures_to_film(self.plan, self.records, self.settings.films)
        return [assignment for assignment in failures if self.folder.film_of(assignment) is None]


def failures_to_film(
    plan: Sequence[Assignment], records: Mapping[tuple[str, str, int], Record], films: int
) -> list[Assignment]:
    """Return the first ``films`` failures of each row, by index, before them those that a judge
    took for another outcome, successes too. Following the policy's instruction is no failure; an
    episode without an answer shows nothing.
    """
    failures: list[Assignment] = []
    count: Counter[tuple[str, str]] = Counter()
    known = [(a, records[a.key]) for a in plan if a.key in records]
    for assignment, record in sorted(known, key=lambda pair: not disagrees(pair[1])):
        wanted = disagrees(record) or not achieved(record)
        if not wanted or not record["times"].get("answer_ms"):
            continue
        if count[assignment.row] < films:
            count[assignment.row] += 1
            failures.append(assignment)
    return failures
