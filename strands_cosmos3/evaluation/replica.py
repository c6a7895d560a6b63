"""A replica on Ray: an actor that leads a group of rank processes on its machine, which simulators
share.

The leader gives all ranks the same requests in the same order, one at a time, so simulators need
not coordinate. If a rank dies, hangs or fails, the leader ends all of them, starts others and
repeats the request: an inference has no memory, so a simulator only waits longer. If the leader
itself is killed, its ranks end with it, and the driver starts another one.

Requests and results travel as the bytes of ``parallel.payload``. The leader does not decode them
and loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError

from strands_cosmos3.errors import EvaluationError, RanksError, ReplicaLostError
from strands_cosmos3.evaluation.cluster import WORKER_FAILURES, Reply
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.parallel.config import RankOptions
from strands_cosmos3.parallel.group import RankTimeouts
from strands_cosmos3.parallel.rank import rank_processes

if TYPE_CHECKING:
    from strands_cosmos3.parallel.rank_engine import RankGroupEngine

MAX_STARTS = 3
"""How often one request may start ranks before the evaluation gives up."""
TIMEOUTS = RankTimeouts(silent_s=12.0)  # simulators on the same cores may delay a heartbeat
"""How long to wait for ranks."""
_PLACEMENT_S = 120.0
_CALL_S = 30.0


class Replica:
    """The actor that leads a group of ranks."""

    def __init__(self, settings: Settings):
        policy = settings.policy
        on_gpu = settings.topology.num_gpus > 0
        device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
        engine = replace(policy.engine, device=device, dtype=policy.engine.dtype or dtype)
        options = RankOptions(engine, threads=None if on_gpu else 1)
        self._ranks = rank_processes(str(policy.model), policy.parallel, options, TIMEOUTS)

    @ray.method(concurrency_group="status")
    def restarts(self) -> int:
        """Return how often the ranks were restarted."""
        return max(self._ranks.starts - 1, 0)

    @ray.method(concurrency_group="inference")
    def start(self) -> Reply:
        """Start the ranks, if they are not running, and wait until all have loaded."""
        return Reply.of(lambda: _repeated(self._ranks.start))

    @ray.method(concurrency_group="inference")
    def infer(self, payload: bytes) -> Reply:
        """Answer a request."""
        return Reply.of(lambda: _repeated(lambda: self._ranks.infer(payload)))


def _repeated(work: Callable[[], Any]) -> Any:
    """Run ``work``, again with new ranks if some fail."""
    failure = ""
    for _ in range(MAX_STARTS):
        try:
            return work()
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
    """All replicas of an evaluation, as its driver sees them."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._leaders = [self._make() for _ in range(settings.topology.replicas)]
        self._restarts_before = 0  # of leaders that are gone, themselves included

    def _make(self) -> _Leader:
        groups = {"inference": 1, "status": 1}
        topology = self._settings.topology
        remote: Any = ray.remote(concurrency_groups=groups)(Replica)  # pyright: ignore
        count = topology.ranks_per_replica
        gpus = topology.num_gpus // topology.replicas
        actor = remote.options(num_cpus=count, num_gpus=gpus, max_restarts=0).remote(self._settings)
        actor.start.remote()  # load while simulators start; the first request reports any error
        return _Leader(actor, actor.restarts.remote())

    def handle(self, worker: int) -> Any:
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
                with suppress(*WORKER_FAILURES):  # the next call of ``handle`` replaces it
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
                f"{resources.get('CPU', 0):.0f} CPUs. Use a smaller tp or cfg."
            ) from None
        self._call(self._replica.start).unwrap()

    def infer(self, payload: bytes, on_step: object = None) -> bytes:
        """Return the replica's answer. Errors: as :meth:`start`, or the request is invalid."""
        return self._call(self._replica.infer, payload).unwrap()

    def close(self) -> None:
        """Do nothing: other simulators use the replica too."""

    def _call(self, method: Any, *arguments: Any, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(method.remote(*arguments), timeout=timeout_s)
        except WORKER_FAILURES:
            raise ReplicaLostError("the leader of a replica is gone.") from None


def replica_engine(settings: Settings, replica: Any) -> RankGroupEngine:
    """Return an engine whose ranks are a replica's; a CheckpointError if its headers cannot be
    read here.
    """
    from strands_cosmos3.engine.checkpoint import Checkpoint, locate
    from strands_cosmos3.parallel.rank_engine import RankGroupEngine

    checkpoint = Checkpoint.open(locate(str(settings.policy.model)))
    return RankGroupEngine(checkpoint, False, ReplicaClient(replica))
