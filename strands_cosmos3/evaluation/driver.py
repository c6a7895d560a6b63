"""The queue: who runs which episode, and what happens when a process dies.

The driver alone writes. A worker takes the next assignment when it is idle, so slow episodes hold nobody up; its record comes
back through Ray and is stored at once. A worker that dies is replaced and its assignment goes to the front of the queue again;
one that kills its worker ``MAX_ATTEMPTS`` times is left out and named. A worker that does not come back from an episode within
``Settings.episode_timeout`` is killed, and its episode given out once more; the second time it is stored as a failure. After
the episodes come the films of failures, chosen by their index, so that they too are the same on any number of workers.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from strands_cosmos3 import __version__
from strands_cosmos3.errors import ConfigError, EvaluationError
from strands_cosmos3.evaluation.cluster import DEATHS, end_actor
from strands_cosmos3.evaluation.folder import Record, RunFolder, without_times
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.evaluation.simulator import fault
from strands_cosmos3.evaluation.worker import Reply, Worker
from strands_cosmos3.sim.interrupt import deferred_interrupt

if TYPE_CHECKING:
    from strands_cosmos3.evaluation.replica import Replicas

MAX_ATTEMPTS = 3
MAX_HANGS = 2
_POLL_S = 0.25
_QUIET_S = 5.0

RemoteWorker = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(Worker)


@dataclass
class Progress:
    """How far an evaluation is; it changes while it runs.

    Attributes:
        done, successes: By (condition, task).
        total: Episodes of each (condition, task).
        resumed: Episodes that were there before.
        films, films_total: Of failures.
        workers: How many are ready; wanted: how many there should be.
        deaths: Workers that died; hangs: that did not come back; requeued: assignments that were given out again;
            restarts: of gangs.
        lost: Assignments that were given up.
        busy_s: Since the first worker was ready, while there were episodes to run.
        stage: What it is doing.
    """

    total: dict[tuple[str, str], int] = field(default_factory=dict)
    done: Counter[tuple[str, str]] = field(default_factory=Counter)
    successes: Counter[tuple[str, str]] = field(default_factory=Counter)
    resumed: int = 0
    films: int = 0
    films_total: int = 0
    workers: int = 0
    wanted: int = 0
    deaths: int = 0
    hangs: int = 0
    requeued: int = 0
    restarts: int = 0
    lost: list[str] = field(default_factory=list)
    busy_s: float = 0.0
    stage: str = "starting"
    interrupted: bool = False

    @property
    def new(self) -> int:
        """Episodes that this run did."""
        return self.done.total() - self.resumed

    @property
    def a_minute(self) -> float | None:
        """Episodes a minute since the first worker was ready, starting not counted."""
        return 60 * self.new / self.busy_s if self.new and self.busy_s else None

    def count(self, assignment: Assignment, record: Record) -> None:
        """An episode is there."""
        row = assignment.condition.name, assignment.task
        self.done[row] += 1
        self.successes[row] += bool(record["success"])


@dataclass
class _Slot:
    """A place for a worker: the actor in it now, and what it is doing."""

    number: int
    actor: Any
    pending: Any  # the reference that is awaited
    job: _Job | None = None  # None while it opens
    failed_starts: int = 0
    pid: int = 0
    node: str = ""
    since_s: float = 0.0  # when it got the job


@dataclass(frozen=True)
class _Job:
    assignment: Assignment
    film: bool = False


class Driver:
    """Runs what is missing from a folder.

    Args:
        folder: Where episodes are kept.
        workers: How many simulators.
        report: Called several times a second with the progress.

    Attributes:
        progress: How far it is.
        records: Every episode that is there, by key.
    """

    def __init__(
        self,
        folder: RunFolder,
        workers: int,
        report: Callable[[Progress], None] | None = None,
    ):
        self.folder, self.settings = folder, folder.settings
        self.plan = self.settings.plan()
        self.records = folder.read_all(self.plan)
        self.progress = Progress(total=dict(Counter((a.condition.name, a.task) for a in self.plan)), wanted=workers)
        for assignment in self.plan:
            if assignment.key in self.records:
                self.progress.count(assignment, self.records[assignment.key])
        self.progress.resumed = len(self.records)
        self._queue = deque(_Job(a) for a in self.plan if a.key not in self.records)
        self._attempts: Counter[_Job] = Counter()
        self._hangs: Counter[_Job] = Counter()
        self._replicas: Replicas | None = None
        self._report = report or (lambda progress: None)
        self._slots: list[_Slot] = []
        self._busy_since_s: float | None = None
        self._heard_s = time.monotonic()
        self._model_sha256: str | None = next((r["model_sha256"] for r in self.records.values() if r.get("model_sha256")), None)

    @property
    def missing(self) -> int:
        """Episodes that are not there."""
        return len(self.plan) - len(self.records)

    def share(self, replicas: Replicas) -> None:
        """Let simulators ask shared replicas instead of policies of their own."""
        self._replicas = replicas

    def films_missing(self) -> int:
        """Failures that are to be filmed and are not."""
        return len(self._unfilmed())

    def run(self) -> None:
        """Run every missing episode, then film failures. Ctrl-C ends it between two answers; what is finished is stored.

        Raises:
            EvaluationError: Workers do not start, or what they ask is gone. What is finished is stored.
            ConfigError: The checkpoint is not the one that stored episodes were run with.
        """
        with deferred_interrupt() as interrupt:
            for stage, fill in (("running", lambda: None), ("filming failures", self._queue_films)):
                fill()
                self.progress.stage = stage
                while self._queue or any(slot.job for slot in self._slots):
                    if stage == "running":
                        self._look_at_the_clock()
                    self._give_out()
                    self._report(self.progress)
                    if interrupt.requested:
                        self.progress.interrupted = True
                        return
                    self._take_back()
        self.progress.stage = "done"
        self._report(self.progress)

    @property
    def busy(self) -> dict[int, Assignment]:
        """Which process (its id on its own machine) is at which episode."""
        return {slot.pid: slot.job.assignment for slot in self._slots if slot.job is not None}

    def close(self) -> None:
        """End every worker. Replicas are for whoever made them to end."""
        for slot in self._slots:
            ray.kill(slot.actor, no_restart=True)
        self._slots = []

    def _look_at_the_clock(self) -> None:
        if self._busy_since_s is None and self.progress.workers:
            self._busy_since_s = time.monotonic()
        if self._busy_since_s is not None:
            self.progress.busy_s = time.monotonic() - self._busy_since_s

    def _give_out(self) -> None:
        """Start workers that are wanted, and give work to the idle."""
        while len(self._slots) < min(self.progress.wanted, len(self._queue) + sum(bool(s.job) for s in self._slots)):
            self._slots.append(self._start(len(self._slots)))
        for slot in self._slots:
            if slot.pending is None and self._queue:
                slot.job = self._queue.popleft()
                self._attempts[slot.job] += 1
                method = slot.actor.film if slot.job.film else slot.actor.run
                slot.pending, slot.since_s = method.remote(slot.job.assignment), time.monotonic()

    def _take_back(self) -> None:
        """Wait a moment for answers, take them, and end whoever owes one for too long."""
        waiting = {slot.pending: slot for slot in self._slots if slot.pending is not None}
        ready, _ = ray.wait(list(waiting), timeout=_POLL_S)
        self._look_after_ray(bool(ready))
        for reference in ready:
            self._take(waiting[reference])
        for slot in self._slots:
            if slot.job is not None and time.monotonic() - slot.since_s > self.settings.episode_timeout:
                self._end_hung(slot, slot.job)
        if self._replicas is not None:
            self.progress.restarts = self._replicas.restarts()

    def _look_after_ray(self, heard: bool) -> None:
        """Where the last machine of the cluster is gone, Ray would wait for another one for ever."""
        now = time.monotonic()
        if heard:
            self._heard_s = now
        elif now - self._heard_s > _QUIET_S:
            self._heard_s = now
            if not any(node["Alive"] for node in ray.nodes()):
                raise EvaluationError("Ray's own processes died. What is finished is kept; --resume goes on.")

    def _start(self, number: int) -> _Slot:
        actor = RemoteWorker.remote(number)
        return _Slot(number, actor, self._opening(actor, number))

    def _opening(self, actor: Any, number: int) -> Any:
        replica = None if self._replicas is None else self._replicas.handle(number)
        return actor.open.remote(self.settings, replica)

    def _take(self, slot: _Slot) -> None:
        job = slot.job
        try:
            reply: Reply = ray.get(slot.pending)
        except DEATHS:
            self._replace(slot)
            return
        slot.pending, slot.job = None, None
        if reply.kind == "error":
            kind, message = reply.error or ("", "")
            raise EvaluationError(f"{message} ({kind}{f' in episode {job.assignment.label}' if job else ', at a start'})")
        if reply.kind == "lost":
            if job is not None:
                self._requeue(job)
                self.progress.workers -= 1
            slot.pending = self._opening(slot.actor, slot.number)
        elif job is None:
            slot.failed_starts = 0
            self._greet(slot, reply.value)
        elif job.film:
            self._keep_film(job.assignment, *reply.value)
        else:
            self._keep(job, reply.value)

    def _keep(self, job: _Job, record: Record) -> None:
        record["times"]["attempt"] = self._attempts[job]
        self.records[job.assignment.key] = self.folder.write(job.assignment, record)
        self.progress.count(job.assignment, record)

    def _keep_film(self, assignment: Assignment, record: Record, film: bytes) -> None:
        self.progress.films += 1
        stored = self.records[assignment.key]
        same = all(without_times(stored)[name] == value for name, value in without_times(record).items())
        if film:
            self.folder.write_film(assignment, film, same)

    def _greet(self, slot: _Slot, who: dict[str, Any]) -> None:
        """A worker is ready."""
        self.progress.workers += 1
        slot.pid, slot.node = who["pid"], who["node"]
        if who["version"] != __version__:
            raise EvaluationError(f"a worker runs version {who['version']} of this package, the driver {__version__}.")
        if self._model_sha256 is None:
            self._model_sha256 = who["model_sha256"]
        elif who["model_sha256"] != self._model_sha256:
            raise ConfigError(
                f"the checkpoint is not the one that {self.folder.path}'s episodes were run with (SHA-256 "
                f"{str(who['model_sha256'])[:12]}... instead of {self._model_sha256[:12]}...); choose another --out."
            )

    def _replace(self, slot: _Slot) -> None:
        """A worker is gone: put another in its place, and its assignment at the front of the queue."""
        self.progress.deaths += 1
        slot.pid = 0  # by now it may be another process's
        if slot.job is not None:
            self._requeue(slot.job)
        else:
            slot.failed_starts += 1
            if slot.failed_starts >= MAX_ATTEMPTS:
                raise EvaluationError(
                    f"worker {slot.number} died {MAX_ATTEMPTS} times while it started; is there memory enough?"
                )
        self._start_again(slot)

    def _end_hung(self, slot: _Slot, job: _Job) -> None:
        """A worker does not come back: kill it, and give its assignment out again, or store that it failed."""
        self.progress.hangs += 1
        self._hangs[job] += 1
        if self._hangs[job] < MAX_HANGS:
            self._requeue(job)
        elif job.film:
            self.progress.lost.append(f"film of {job.assignment.label}")
        else:
            limit = f"no end within {self.settings.episode_timeout:g} s on the wall"
            record = fault(job.assignment, f"{limit}, {MAX_HANGS} times; its simulator was killed")
            record["times"]["hung"] = MAX_HANGS
            self._keep(job, record)
        self._start_again(slot)

    def _start_again(self, slot: _Slot) -> None:
        """Another worker in a place; whoever is there is ended."""
        end_actor(slot.actor, slot.pid, slot.node)
        if slot.job is not None:
            self.progress.workers -= 1
        fresh = self._start(slot.number)
        slot.actor, slot.pending, slot.job, slot.pid = fresh.actor, fresh.pending, None, 0

    def _requeue(self, job: _Job) -> None:
        if self._attempts[job] < MAX_ATTEMPTS:
            self.progress.requeued += 1
            self._queue.appendleft(job)
        else:
            self.progress.lost.append(f"{'film of ' if job.film else ''}{job.assignment.label}")

    def _queue_films(self) -> None:
        self._queue.extend(_Job(assignment, film=True) for assignment in self._unfilmed())
        self.progress.films_total = len(self._queue)

    def _unfilmed(self) -> list[Assignment]:
        chosen = failures_to_film(self.plan, self.records, self.settings)
        return [assignment for assignment in chosen if self.folder.film_of(assignment) is None]


def failures_to_film(
    plan: Sequence[Assignment], records: dict[tuple[str, str, int], Record], settings: Settings
) -> list[Assignment]:
    """The first ``settings.films`` failures of each condition and task, by index; doing what was told is no failure."""
    chosen: list[Assignment] = []
    taken: Counter[tuple[str, str]] = Counter()
    for assignment in plan:
        record, row = records.get(assignment.key), (assignment.condition.name, assignment.task)
        if record is None or record["success"] or record["success_told"] or not record["times"].get("answer_ms"):
            continue
        if taken[row] < settings.films:
            taken[row] += 1
            chosen.append(assignment)
    return chosen
