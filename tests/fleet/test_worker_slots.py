"""Slots and their workers: who gets which job, and what is told of a worker that dies or hangs."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray.exceptions import RayActorError

from strands_cosmos3 import __version__
from strands_cosmos3.errors import EvaluationError
from strands_cosmos3.fleet import worker_slots
from strands_cosmos3.fleet.cluster import ONE_THREAD, Reply
from strands_cosmos3.fleet.worker_slots import (
    MAX_ATTEMPTS,
    RemoteWorker,
    WorkerPool,
    WorkerSlot,
)


def test_workers_have_one_thread(local_ray):
    """numpy, torch and software OpenGL would each take every core, and two workers would stand
    in each other's way.
    """
    worker = RemoteWorker.remote()
    seen = ray.get(
        worker.__ray_call__.remote(
            lambda self, names: [os.environ.get(name) for name in names], list(ONE_THREAD)
        )
    )
    ray.kill(worker)
    assert {"OMP_NUM_THREADS", "LP_NUM_THREADS"} <= set(ONE_THREAD)
    assert seen == ["1"] * len(ONE_THREAD)


class Asked:
    """A reference: what an actor was asked for, answered when a test says so."""

    def __init__(self, actor: Actor, job: Any):
        self.actor, self.job, self.answer = actor, job, None


class Actor:
    """A worker that answers when a test says so."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.do = self.open = SimpleNamespace(remote=self._ask)
        self.killed = False

    def _ask(self, job: Any = None) -> Asked:
        self.asked.append(Asked(self, job))
        return self.asked[-1]


class Scripted:
    """Ray, whose replies are what a test gives the references."""

    def wait(self, references, timeout):
        return [each for each in references if each.answer is not None], []

    def get(self, reference):
        if isinstance(reference.answer, Exception):
            raise reference.answer
        return reference.answer

    def kill(self, actor, no_restart):
        assert no_restart
        actor.killed = True

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "here")


class Pool(WorkerPool):
    """A pool that writes down what it is told."""

    def __init__(self, slots: int):
        super().__init__(timeout_s=10.0)
        self.told: list[tuple[str, int, Any]] = []
        self.slots = [WorkerSlot(number) for number in range(slots)]
        for slot in self.slots:
            self.open(slot)

    def opening(self, slot):
        return slot.actor.open.remote()

    def request(self, job):
        return (job,)

    def on_reply(self, slot, job, reply):
        self.told.append(("reply", slot.number, job))
        if job is None:
            slot.opened(*reply.unwrap())

    def on_death(self, slot):
        self.told.append(("death", slot.number, slot.job))

    def on_timeout(self, slot):
        self.told.append(("timeout", slot.number, slot.job))


@pytest.fixture
def clock(monkeypatch):
    """The time [s], which a test sets."""
    made = SimpleNamespace(now_s=100.0, sleep=lambda _: None)
    made.monotonic = lambda: made.now_s
    monkeypatch.setattr(worker_slots, "time", made)
    return made


@pytest.fixture
def pool(monkeypatch, clock):
    """Two slots whose workers have opened, on machines elsewhere, so that no process is killed."""
    monkeypatch.setattr(worker_slots, "ray", Scripted())
    monkeypatch.setattr(worker_slots, "RemoteWorker", SimpleNamespace(remote=Actor))
    made = Pool(2)
    for slot in made.slots:
        slot.pending.answer = Reply("done", (17, "elsewhere", __version__))
    assert made.collect()
    assert made.told == [("reply", 0, None), ("reply", 1, None)]
    made.told.clear()
    return made


def jobs(count: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(number=k, attempts=0) for k in range(count)]


def test_a_slot_has_one_job_at_a_time(pool):
    first, second, third = jobs(3)
    pool.queue.extend((first, second, third))
    for _ in range(3):
        pool.hand_out()
    assert [slot.job for slot in pool.slots] == [first, second]
    assert list(pool.queue) == [third]
    assert [len(slot.actor.asked) for slot in pool.slots] == [2, 2], "opened, and asked once"
    assert [job.attempts for job in (first, second, third)] == [1, 1, 0]
    pool.slots[1].pending.answer = Reply("done")
    pool.collect()
    assert pool.told == [("reply", 1, second)]
    pool.hand_out()
    assert [slot.job for slot in pool.slots] == [first, third]
    assert not pool.queue


def test_a_death_is_told_with_the_job_before_another_worker_starts(pool):
    (job,) = jobs(1)
    pool.queue.append(job)
    pool.hand_out()
    dead = pool.slots[0].actor
    pool.slots[0].pending.answer = RayActorError()
    assert pool.collect()
    assert pool.told == [("death", 0, job)]
    assert dead.killed
    assert pool.slots[0].actor is not dead
    assert pool.slots[0].job is None
    assert pool.slots[0].pending.job is None, "it opens, and the job is the pool's to queue again"
    assert not pool.slots[1].actor.killed


def test_only_a_reply_that_is_late_is_told_as_such(pool, clock):
    job, later = jobs(2)
    pool.queue.append(job)
    pool.hand_out()
    clock.now_s += 9.0
    pool.queue.append(later)
    pool.hand_out()
    assert not pool.collect()
    assert pool.told == []
    clock.now_s += 2.0
    hung = pool.slots[0].actor
    pool.collect()
    assert pool.told == [("timeout", 0, job)]
    assert hung.killed
    assert pool.slots[1].job is later


def test_a_slot_where_no_worker_starts_ends_the_run(pool):
    def lose() -> None:
        pool.slots[0].pending.answer = RayActorError()
        pool.collect()

    pool.queue.extend(jobs(1))
    pool.hand_out()
    for _ in range(MAX_ATTEMPTS):
        lose()  # the first one had a job: it had started
    with pytest.raises(EvaluationError, match=f"worker 0 died {MAX_ATTEMPTS} times while it st"):
        lose()


def test_a_worker_of_another_version_is_refused(pool):
    with pytest.raises(EvaluationError, match=r"version 0\.0 of this package"):
        pool.slots[0].opened(17, "elsewhere", "0.0")


def test_closing_ends_every_worker(pool):
    actors = [slot.actor for slot in pool.slots]
    pool.close()
    assert all(actor.killed for actor in actors)
    assert pool.slots == []
