"""Replicas on Ray: what each is given, and how often their ranks are asked. An evaluation on
replicas whose processes die is in ``evaluation/test_replica.py``.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.errors import ConfigError, EvaluationError, RankLostError, ReplicaLostError
from strands_cosmos3.fleet import replicas as module
from strands_cosmos3.fleet.replicas import MAX_STARTS, Replica, ReplicaClient, ReplicaPool
from strands_cosmos3.fleet.topology import Topology
from strands_cosmos3.parallel.config import ParallelConfig


class Ranks:
    """A group of ranks that fails as often as a test says."""

    def __init__(self, failures: int = 0, error: type[Exception] = RankLostError):
        self.failures, self.error = failures, error
        self.starts, self.asked = 0, list[bytes]()

    def start(self) -> None:
        self.starts += 1
        self._fail()

    def infer(self, payload: bytes) -> bytes:
        self.asked.append(payload)
        self._fail()
        return payload[::-1]

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise self.error("rank 1 is gone.")


@pytest.fixture
def replica_of(monkeypatch):
    """A replica whose ranks are given."""

    def make(ranks: Ranks, on_gpu: bool = False) -> Replica:
        monkeypatch.setattr(module, "rank_processes", lambda *arguments: ranks)
        return Replica("c", ParallelConfig(2), EngineOptions(), on_gpu)

    return make


@pytest.mark.parametrize("failures", [0, 1, MAX_STARTS - 1])
def test_a_request_is_repeated_only_where_ranks_fail(replica_of, failures):
    ranks = Ranks(failures)
    assert replica_of(ranks).infer(b"ab").unwrap() == b"ba"
    assert ranks.asked == [b"ab"] * (failures + 1)


def test_ranks_that_start_are_started_once(replica_of):
    ranks = Ranks()
    assert replica_of(ranks).start().kind == "done"
    assert ranks.starts == 1


def test_ranks_that_always_fail_are_given_up(replica_of):
    ranks = Ranks(99)
    with pytest.raises(EvaluationError, match=r"failed 3 times in a row; .*: rank 1 is gone\."):
        replica_of(ranks).infer(b"ab").unwrap()
    assert len(ranks.asked) == MAX_STARTS == 3


def test_an_error_of_the_request_is_not_repeated(replica_of):
    ranks = Ranks(1, ConfigError)
    with pytest.raises(ConfigError):
        replica_of(ranks).infer(b"ab").unwrap()
    assert ranks.asked == [b"ab"]


@pytest.mark.parametrize(
    ("on_gpu", "dtype", "chosen"),
    [
        (True, None, ("cuda", "bfloat16", None)),
        (False, None, ("cpu", "float32", 1)),
        (False, "bfloat16", ("cpu", "bfloat16", 1)),
    ],
)
def test_where_and_how_ranks_compute(monkeypatch, on_gpu, dtype, chosen):
    made = []
    monkeypatch.setattr(module, "rank_processes", lambda *arguments: made.append(arguments))
    Replica("c", ParallelConfig(2, 2), EngineOptions(dtype=dtype, compile=True), on_gpu)
    ((model, parallel, options, _),) = made
    assert (model, parallel) == ("c", ParallelConfig(2, 2))
    assert (options.engine.device, options.engine.dtype, options.threads) == chosen
    assert options.engine.compile


class Actors:
    """Ray, and actors that it would have placed."""

    def __init__(self) -> None:
        self.placed, self.made, self.killed = [], [], []
        self.gone: set[int] = set()

    def remote(self, **_):
        return lambda kind: self

    def options(self, **resources):
        self.placed.append(resources)
        make = lambda *arguments: self._actor(arguments)  # noqa: E731
        return SimpleNamespace(remote=make)

    def _actor(self, arguments):
        number = len(self.made)
        self.made.append(arguments)

        def restarts():
            return number

        method = SimpleNamespace(remote=restarts)
        return SimpleNamespace(number=number, restarts=method, start=method)

    def get(self, number, timeout=None):
        if number in self.gone:
            raise RayActorError
        return 2

    def wait(self, references, timeout):
        return references, []

    def kill(self, actor, no_restart):
        self.killed.append(actor.number)


@pytest.fixture
def actors(monkeypatch):
    made = Actors()
    monkeypatch.setattr(module, "ray", made)
    return made


@pytest.mark.parametrize(
    ("topology", "count", "gpus"),
    [
        (Topology(ParallelConfig(2, 2), 8), 2, 4),
        (Topology(ParallelConfig(2), 8), 4, 2),
        (Topology(ParallelConfig(), 3), 3, 1),
        (Topology(ParallelConfig(2, 2), 0, total_shard=2), 2, 0),
    ],
)
def test_a_replica_gets_a_core_and_a_gpu_for_each_rank(actors, topology, count, gpus):
    ReplicaPool("c", topology, EngineOptions())
    ranks = topology.parallel.ranks
    assert actors.placed == [{"num_cpus": ranks, "num_gpus": gpus, "max_restarts": 0}]
    assert actors.made == [("c", topology.parallel, EngineOptions(), gpus > 0)] * count


def test_workers_share_replicas_and_a_lost_one_is_replaced(actors):
    pool = ReplicaPool("c", Topology(ParallelConfig(2), 4), EngineOptions())
    assert [pool.of_worker(worker).number for worker in range(4)] == [0, 1, 0, 1]
    assert pool.restarts() == 4, "two of each"
    actors.gone.add(1)
    assert [pool.of_worker(worker).number for worker in range(4)] == [0, 2, 0, 2]
    assert pool.restarts() == 4 + 3, "the leader's own counts, too"
    pool.close()
    assert actors.killed == [0, 2]


def test_a_leader_that_is_gone_is_told_apart(actors):
    actors.gone.add(5)
    gone = SimpleNamespace(remote=lambda *_: 5)
    with pytest.raises(ReplicaLostError):
        ReplicaClient(SimpleNamespace(infer=gone)).infer(b"")
