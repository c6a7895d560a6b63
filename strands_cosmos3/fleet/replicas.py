"""A replica on Ray: an actor that leads a group of rank processes on its machine, which clients,
simulators for instance, share.

The leader gives all ranks the same requests in the same order, one at a time, so clients need not
coordinate. If a rank dies, hangs or fails, the leader ends all of them, starts others and repeats
the request: an inference has no memory, so a client only waits longer. If the leader itself is
killed, its ranks end with it, and the pool starts another one.

Requests and results travel as the bytes of ``parallel.payload``. The leader does not decode them
and loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError

from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.errors import EvaluationError, RanksError, ReplicaLostError
from strands_cosmos3.fleet.cluster import WORKER_FAILURES, Reply
from strands_cosmos3.fleet.topology import Topology
from strands_cosmos3.parallel.config import ParallelConfig, RankOptions
from strands_cosmos3.parallel.group import RankTimeouts
from strands_cosmos3.parallel.rank import rank_processes

if TYPE_CHECKING:
    from strands_cosmos3.parallel.rank_engine import RankGroupEngine

MAX_STARTS = 3
"""How often one request may start ranks before the run gives up."""
TIMEOUTS = RankTimeouts(silent_s=12.0)  # clients on the same cores may delay a heartbeat
"""How long to wait for ranks."""
_PLACEMENT_S = 120.0
_CALL_S = 30.0


class Replica:
    """The actor that leads a group of ranks, on GPUs or with one thread each on the CPU."""

    def __init__(self, model: str, parallel: ParallelConfig, engine: EngineOptions, on_gpu: bool):
        device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
        engine = replace(engine, device=device, dtype=engine.dtype or dtype)
        options = RankOptions(engine, threads=None if on_gpu else 1)
        self._ranks = rank_processes(model, parallel, options, TIMEOUTS)

    @ray.method(concurrency_group="status")
    def restarts(self) -> int:
        """Return how often the ranks were restarted."""
        return max(self._ranks.starts - 1, 0)

    @ray.method(concurrency_group="inference")
    def start(self) -> Reply:
        """Start the ranks, if they are not running, and wait until all have loaded."""
        return Reply.of(lambda: _retry(self._ranks.start))

    @ray.method(concurrency_group="inference")
    def infer(self, payload: bytes) -> Reply:
        """Answer a request."""
        return Reply.of(lambda: _retry(self._ranks.infer, payload))


def _retry(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Ask ranks, again where some fail: they have then been ended, and others start."""
    failure = ""
    for _ in range(MAX_STARTS):
        try:
            return ask(*arguments)
        except RanksError as error:
            failure = str(error)
    raise EvaluationError(f"a replica failed {MAX_STARTS} times in a row; the last time: {failure}")


@dataclass(eq=False)
class _Leader:
    """The actor of a replica, and how often its ranks were restarted."""

    actor: Any
    count: Any  # reference of the next number of restarts
    restarts: int = 0


class ReplicaPool:
    """All replicas of a model, as whoever gives them work sees them.

    Args:
        model: A checkpoint's folder or hub repository, which every machine can read.
        topology: Number and degrees of the replicas, and their GPUs.
        engine: Options of each rank. Its device follows from the topology, and so does the dtype
            unless it is given: bfloat16 on GPUs, else float32.
    """

    def __init__(self, model: str, topology: Topology, engine: EngineOptions):
        parallel, on_gpu = topology.parallel, topology.num_gpus > 0
        groups = {"inference": 1, "status": 1}
        remote: Any = ray.remote(concurrency_groups=groups)(Replica)  # pyright: ignore
        gpus = parallel.ranks if on_gpu else 0
        remote = remote.options(num_cpus=parallel.ranks, num_gpus=gpus, max_restarts=0)
        self._place = partial(remote.remote, model, parallel, engine, on_gpu)
        self._leaders = [self._make() for _ in range(topology.replicas)]
        self._restarts_before = 0  # of leaders that are gone, themselves included

    def _make(self) -> _Leader:
        actor = self._place()
        actor.start.remote()  # load while clients start; the first request reports any error
        return _Leader(actor, actor.restarts.remote())

    def of_worker(self, worker: int) -> Any:
        """Return the replica of a worker, replaced if it is gone."""
        index = worker % len(self._leaders)
        leader = self._leaders[index]
        try:
            ray.get(leader.actor.restarts.remote(), timeout=_CALL_S)
        except WORKER_FAILURES:
            self._restarts_before += leader.restarts + 1
            leader = self._leaders[index] = self._make()
        except GetTimeoutError:
            pass  # slow, not gone
        return leader.actor

    def restarts(self) -> int:
        """Return how often ranks of any replica were restarted, as far as known; waits for
        nothing.
        """
        for leader in self._leaders:
            if ray.wait([leader.count], timeout=0)[0]:
                with suppress(*WORKER_FAILURES):  # the next call of ``of_worker`` replaces it
                    leader.restarts = ray.get(leader.count)
                leader.count = leader.actor.restarts.remote()
        return self._restarts_before + sum(leader.restarts for leader in self._leaders)

    def close(self) -> None:
        """End all replicas; their ranks end with them."""
        for leader in self._leaders:
            ray.kill(leader.actor, no_restart=True)


class ReplicaClient:
    """A replica's actor, as ``parallel.rank_engine.RankGroupEngine`` uses a group of ranks."""

    def __init__(self, replica: Any):
        self._replica = replica

    def start(self) -> None:
        """Wait until the ranks have loaded, so that loading does not count as latency.

        Raises:
            EvaluationError: No machine of the cluster has had room for the replica.
            ReplicaLostError, Cosmos3Error: The leader is gone, or the ranks failed repeatedly.
        """
        try:
            self._call(self._replica.restarts, timeout_s=_PLACEMENT_S)
        except GetTimeoutError:
            resources = ray.cluster_resources()
            raise EvaluationError(
                f"no machine of the cluster has had room for a replica for {_PLACEMENT_S:.0f} s; "
                f"together they have {resources.get('GPU', 0):.0f} GPUs and "
                f"{resources.get('CPU', 0):.0f} CPUs. Use smaller degrees of parallelism."
            ) from None
        self._call(self._replica.start).unwrap()

    def infer(self, payload: bytes, on_step: object = None) -> bytes:
        """Return the replica's answer. Errors: as :meth:`start`, or the request is invalid."""
        return self._call(self._replica.infer, payload).unwrap()

    def close(self) -> None:
        """Do nothing: others use the replica too."""

    def _call(self, method: Any, *arguments: Any, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(method.remote(*arguments), timeout=timeout_s)
        except WORKER_FAILURES:
            raise ReplicaLostError("the leader of a replica is gone.") from None


def replica_engine(model: str, replica: Any) -> RankGroupEngine:
    """Return an engine whose ranks are a replica's; a CheckpointError if its headers cannot be
    read here.
    """
    from strands_cosmos3.engine.checkpoint import Checkpoint, locate
    from strands_cosmos3.parallel.rank_engine import RankGroupEngine

    checkpoint = Checkpoint.open(locate(model))
    return RankGroupEngine(checkpoint, False, ReplicaClient(replica))
