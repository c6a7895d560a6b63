"""The worker threads of the server."""

from __future__ import annotations

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
