"""The worker threads of the server."""

from __future__ import annotations

import threading
import time
import weakref

from helpers.serving import until
from strands_cosmos3.serving.admission import Client
from strands_cosmos3.serving.worker import Workers


class Job:
    """Stands for a request of two megabytes."""


def test_nothing_of_a_job_is_held_while_the_thread_waits_for_the_next_one():
    workers = Workers((0,), lambda tool: None, lambda tool, jobs: [0] * len(jobs), 8)
    job = Job()
    held = weakref.ref(job)
    assert workers.submit(Client("client"), job).result(timeout=20) == 0
    del job
    until(lambda: held() is None)
    workers.close(timeout_s=5.0)


def test_a_cancelled_job_delays_nobody():
    gate = threading.Event()
    gate.set()
    client = Client("client")

    def work(tool: int, jobs: list[int]) -> list[int]:
        time.sleep(0.05)
        assert gate.wait(20)
        return jobs

    workers = Workers((0,), lambda tool: None, work, 1)
    assert workers.expected_s(client, 1) == 0.0  # nothing is known
    assert workers.submit(client, 0).result(timeout=20) == 0
    gate.clear()
    running = workers.submit(client, 1)
    until(lambda: workers.busy_since[0] is not None)
    waiting = [workers.submit(client, number) for number in range(2, 10)]
    crowded_s = workers.expected_s(client, 1)
    for job in waiting:
        assert job.cancel()
    assert workers.expected_s(client, 1) < crowded_s / 3
    gate.set()
    assert running.result(timeout=20) == 1
    workers.close(timeout_s=5.0)
