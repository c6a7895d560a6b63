"""A pool's workers die, hang and fail; its jobs are done all the same, with the weights they name."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("ray")

import numpy as np
from ray import cloudpickle

from strands_cosmos3.errors import ConfigError, EvaluationError
from strands_cosmos3.fleet.actor_pool import ActorPool, PoolJob


class Worker:
    """Does things once that leave a mark in a folder."""

    def __init__(self, folder: Path):
        self.folder, self.weights = folder, {"w": np.zeros(1)}

    def take_weights(self, weights):
        self.weights = weights

    def answer(self, number: int) -> float:
        return number + float(self.weights["w"][0])

    def die(self, name: str, times: int) -> int:
        marks = len(list(self.folder.glob(f"{name}*")))
        if marks < times:
            (self.folder / f"{name}{marks}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return marks

    def hang(self) -> bool:
        mark = self.folder / "hung"
        if not mark.exists():
            mark.touch()
            time.sleep(600)
        return True

    def refuse(self) -> None:
        raise ConfigError("this cannot be done.")


@pytest.fixture
def pool(tmp_path, local_ray):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
    pool = ActorPool(partial(Worker, tmp_path), 2, timeout_s=15.0)
    try:
        yield pool
    finally:
        pool.close()


def test_jobs_survive_their_workers_and_name_their_weights(pool):
    pool.publish(1, {"w": np.array([10.0])})
    pool.publish(2, {"w": np.array([20.0])})
    for k, version in enumerate((0, 1, 2, 1)):
        pool.submit(PoolJob(("answer", k), "answer", (k,), version))
    pool.submit(PoolJob("death", "die", ("death", 2), 1))
    pool.submit(PoolJob("hang", "hang", (), 2))
    assert [pool.result(("answer", k)) for k in range(4)] == [0, 11, 22, 13]
    assert pool.result("death") == 2
    assert pool.result("hang") is True
    assert pool.deaths >= 3  # a slow start counts as a hang
    pool.submit(PoolJob("late", "answer", (5,), 2))
    assert pool.result("late") == 25
    calls = [(number,) for number in (3, 1, 2)]
    assert pool.results("row", "answer", calls, 1) == [13, 11, 12], "in the order of the calls"


def test_a_crew_that_the_cluster_has_no_room_for_is_refused(local_ray):
    with pytest.raises(ConfigError, match=r"--workers 999: the cluster has \d+ CPUs"):
        ActorPool(dict, 999, timeout_s=15.0)


def test_a_job_that_kills_its_workers_ends_the_run(pool):
    pool.submit(PoolJob("always", "die", ("always", 99), 0))
    with pytest.raises(EvaluationError, match="died 3 times"):
        pool.result("always")


def test_an_error_of_a_job_is_raised_where_its_result_is_awaited(pool):
    pool.submit(PoolJob("refused", "refuse", (), 0))
    with pytest.raises(ConfigError, match="cannot be done"):
        pool.result("refused")
