"""The queue of episodes, and what happens when a worker dies or hangs.

Only the driver writes files. An idle worker takes the next assignment, so slow episodes delay no
other worker; its record returns through Ray and is stored at once. A worker that dies is replaced
and its assignment goes to the front of the queue; an assignment whose workers died ``MAX_ATTEMPTS``
times is given up and named. A worker that exceeds ``Settings.episode_timeout`` is killed and its
assignment runs once more; the second time it is stored as a failure. Films of failures follow the
episodes. They are chosen by index, so they too are the same with any number of workers.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from strands_cosmos3 import __version__
from strands_cosmos3.errors import ConfigError, EvaluationError
from strands_cosmos3.evaluation.cluster import WORKER_FAILURES, Reply, end_actor
from strands_cosmos3.evaluation.folder import Record, RunFolder, without_times
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.runner import AssignmentRunner, failed_record
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.evaluation.statistics import achieved
from strands_cosmos3.sim.interrupt import deferred_interrupt

if TYPE_CHECKING:
    from strands_cosmos3.evaluation.replica import ReplicaPool

MAX_ATTEMPTS = 3
MAX_HANGS = 2
_POLL_S = 0.25
_CHECK_AFTER_SILENCE_S = 5.0


class SimulatorActor:
    """A simulator in a process of its own, which only plain values and the text of errors leave.
    :meth:`open` makes it, so that a failure can give its reason.
    """

    _runner: AssignmentRunner  # made by open

    def __init__(self, number: int):
        self._number = number

    def open(self, settings: Settings, replica: Any) -> Reply:
        """Make robot and policy; reply with process, node and version."""

        def make() -> tuple[int, str, str]:
            engine = None
            if replica is not None:
                from strands_cosmos3.evaluation.replica import replica_engine

                engine = replica_engine(settings, replica)
            self._runner = AssignmentRunner(settings, engine)
            return os.getpid(), ray.get_runtime_context().get_node_id(), __version__

        return Reply.of(make)

    def run(self, assignment: Assignment) -> Reply:
        """Reply with an episode's record."""

        def episode() -> Any:
            record = self._runner.run(assignment)
            record["times"]["worker"] = self._number
            return record

        return Reply.of(episode)

    def film(self, assignment: Assignment) -> Reply:
        """Reply with the record of the same episode again, and its video as bytes."""
        return Reply.of(lambda: self._runner.film(assignment))


RemoteSimulator = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(SimulatorActor)


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


@dataclass
class _Slot:
    """A place for a worker: its current actor and job."""

    number: int
    actor: Any
    pending: Any  # reference of the awaited reply
    job: _Job | None = None  # None while the worker opens
    failed_starts: int = 0
    pid: int = 0
    node: str = ""
    since_s: float = 0.0  # when the job was given out


@dataclass(eq=False)
class _Job:
    assignment: Assignment
    film: bool = False
    attempts: int = 0
    hangs: int = 0

    @property
    def label(self) -> str:
        return f"{'film of ' if self.film else ''}{self.assignment.label}"


class Driver:
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
        report: Callable[[Progress], None] | None = None,
    ):
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
        self._queue = deque(_Job(a) for a in self.plan if a.key not in self.records)
        self._report = report or (lambda progress: None)
        self._slots: list[_Slot] = []
        self._busy_since_s: float | None = None
        self._last_reply_s = time.monotonic()
        self._answered_by = {
            r.get("model_sha256") for r in self.records.values() if "hung" not in r["times"]
        }

    @property
    def missing(self) -> int:
        """Number of episodes and films that are not stored yet."""
        return len(self.plan) - len(self.records) + len(self._missing_films())

    @property
    def busy(self) -> dict[int, Assignment]:
        """Current assignment by process id."""
        return {slot.pid: slot.job.assignment for slot in self._slots if slot.job is not None}

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
                    self._queue.extend(_Job(a, film=True) for a in self._missing_films())
                    progress.films_total = len(self._queue)
                while self._queue or any(slot.job for slot in self._slots):
                    if phase == "running" and self._busy_since_s is not None:
                        progress.busy_s = time.monotonic() - self._busy_since_s
                    self._assign()
                    self._report(progress)
                    if interrupt.requested:
                        progress.interrupted = True
                        return
                    self._collect()
        progress.phase = "done"
        self._report(progress)

    def close(self) -> None:
        """End every worker. Replicas belong to the caller."""
        for slot in self._slots:
            ray.kill(slot.actor, no_restart=True)
        self._slots = []

    def _assign(self) -> None:
        """Start missing workers, and give jobs to idle ones."""
        while len(self._slots) < min(
            self.progress.workers_total, len(self._queue) + sum(bool(s.job) for s in self._slots)
        ):
            number = len(self._slots)
            actor = RemoteSimulator.remote(number)
            self._slots.append(_Slot(number, actor, self._open(actor, number)))
        for slot in self._slots:
            if slot.pending is None and self._queue:
                slot.job = self._queue.popleft()
                slot.job.attempts += 1
                method = slot.actor.film if slot.job.film else slot.actor.run
                slot.pending = method.remote(slot.job.assignment)
                slot.since_s = time.monotonic()

    def _open(self, actor: Any, number: int) -> Any:
        return actor.open.remote(
            self.settings, None if self.replicas is None else self.replicas.handle(number)
        )

    def _collect(self) -> None:
        """Wait briefly for replies, process them, and end workers that exceed the time limit."""
        waiting = {slot.pending: slot for slot in self._slots if slot.pending is not None}
        ready, _ = ray.wait(list(waiting), timeout=_POLL_S)
        self._check_ray(bool(ready))
        for reference in ready:
            self._process(waiting[reference])
        latest_s = time.monotonic() - self.settings.episode_timeout
        for slot in self._slots:
            if slot.job is not None and slot.since_s < latest_s:
                self._end_hung(slot, slot.job)
        if self.replicas is not None:
            self.progress.replica_restarts = self.replicas.restarts()

    def _check_ray(self, replied: bool) -> None:
        """Raise if the cluster has no machine left; Ray itself would wait for another one
        forever.
        """
        now = time.monotonic()
        if replied:
            self._last_reply_s = now
        elif now - self._last_reply_s > _CHECK_AFTER_SILENCE_S:
            self._last_reply_s = now
            if not any(node["Alive"] for node in ray.nodes()):
                raise EvaluationError(
                    "Ray's own processes died. Finished episodes are stored; --resume continues."
                )

    def _process(self, slot: _Slot) -> None:
        job = slot.job
        try:
            reply: Reply = ray.get(slot.pending)
        except WORKER_FAILURES:
            self._replace_dead(slot)
            return
        slot.pending = None
        slot.job = None
        if reply.kind == "error":
            if job is None:
                reply.unwrap()
            else:
                raise EvaluationError(f"{reply.error[1]} ({reply.error[0]} in {job.label})")
        if reply.kind == "lost":
            if job is not None:
                self._requeue(job)
                self.progress.workers -= 1
            slot.pending = self._open(slot.actor, slot.number)
        elif job is None:
            slot.failed_starts = 0
            slot.pid, slot.node, version = reply.value
            self.progress.workers += 1
            self._busy_since_s = self._busy_since_s or time.monotonic()
            if version != __version__:
                raise EvaluationError(
                    f"a worker runs version {version} of this package, the driver {__version__}."
                )
        elif job.film:
            record, film = reply.value
            self.require_same(record["model_sha256"])
            self._store_film(job.assignment, record, film)
        else:
            self.require_same(reply.value["model_sha256"])
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

    def _replace_dead(self, slot: _Slot) -> None:
        """Replace a worker that died, and queue its job again."""
        self.progress.worker_failures += 1
        slot.pid = 0  # another process may have the id by now
        if slot.job is not None:
            self._requeue(slot.job)
        else:
            slot.failed_starts += 1
            if slot.failed_starts >= MAX_ATTEMPTS:
                raise EvaluationError(
                    f"worker {slot.number} died {MAX_ATTEMPTS} times while it started; is there "
                    "enough memory?"
                )
        self._restart(slot)

    def _end_hung(self, slot: _Slot, job: _Job) -> None:
        """Kill a worker that exceeds the time limit; queue its job again, or store that it
        failed.
        """
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
        self._restart(slot)

    def _restart(self, slot: _Slot) -> None:
        """End a slot's worker and start another one."""
        end_actor(slot.actor, slot.pid, slot.node)
        if slot.job is not None:
            self.progress.workers -= 1
        slot.actor = RemoteSimulator.remote(slot.number)
        slot.pending = self._open(slot.actor, slot.number)
        slot.job = None
        slot.pid = 0

    def _requeue(self, job: _Job) -> None:
        if job.attempts < MAX_ATTEMPTS:
            self.progress.requeued += 1
            self._queue.appendleft(job)
        else:
            self.progress.given_up.append(job.label)

    def _missing_films(self) -> list[Assignment]:
        failures = failures_to_film(self.plan, self.records, self.settings.films)
        return [assignment for assignment in failures if self.folder.film_of(assignment) is None]


def failures_to_film(
    plan: Sequence[Assignment], records: Mapping[tuple[str, str, int], Record], films: int
) -> list[Assignment]:
    """Return the first ``films`` failures of each row, by index. Following the policy's
    instruction is no failure; an episode without an answer shows nothing.
    """
    failures: list[Assignment] = []
    count: Counter[tuple[str, str]] = Counter()
    for assignment in plan:
        record = records.get(assignment.key)
        if record is None or achieved(record) or not record["times"].get("answer_ms"):
            continue
        if count[assignment.row] < films:
            count[assignment.row] += 1
            failures.append(assignment)
    return failures
