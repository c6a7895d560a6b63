"""A replica on Ray: a group of ranks in one placement group, led by an actor that simulators share.

The leader gives all ranks the same requests in the same order, one at a time, so simulators need
not coordinate. If a rank dies, hangs or fails, the leader ends all of them, starts others in the
same placement group and repeats the request: an inference has no memory, so a simulator only waits
longer. If the leader itself is killed, its ranks end with it, and the driver starts another one.

Requests and results travel as the bytes of ``parallel.payload``. The leader does not decode them
and loads no torch.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from strands_cosmos3.errors import EvaluationError, RankLostError, RanksError, ReplicaLostError
from strands_cosmos3.evaluation.cluster import WORKER_FAILURES, Reply, end_actor
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.parallel.config import RankOptions
from strands_cosmos3.parallel.group import (
    HEARTBEAT_S,
    RankGroup,
    RankHandle,
    RankStatus,
    RankTimeouts,
)
from strands_cosmos3.parallel.rank import Rank

if TYPE_CHECKING:
    from strands_cosmos3.parallel.rank_engine import RankGroupEngine

MAX_STARTS = 3
"""How often one request may start ranks before the evaluation gives up."""
TIMEOUTS = RankTimeouts(silent_s=12.0)  # simulators on the same cores may delay a heartbeat
"""How long to wait for ranks on Ray."""
START_S = 120.0
"""Time limit for a rank's process to start, once there is room for it."""
_PLACEMENT_S = 120.0
_CALL_S = 30.0


class RayRank(Rank):
    """A rank in a Ray actor. One thread works, another reports progress."""

    def process(self) -> tuple[int, str]:
        """Return process id and Ray node id."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def rendezvous(self) -> str:
        """Return an address where ranks can connect if this one is rank 0."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def heartbeat(self) -> RankStatus:
        """Return the progress so far."""
        return RankStatus("heartbeat", self.progress)


class RayRankHandle(RankHandle):
    """Handle of the actor of a :class:`RayRank`."""

    def __init__(self, rank: int, actor: Any):
        self.actor = actor
        self.pid, self._node = 0, ""
        self.name = f"rank {rank} (process unknown)"
        self._rank = rank
        self._work: Any = None
        self._heartbeat: Any = None
        self._next_heartbeat_s = 0.0

    def connect(self) -> None:
        """Wait for the process and learn its id; raise a RankLostError if it does not start."""
        try:
            self.pid, self._node = ray.get(self.actor.process.remote(), timeout=START_S)
        except (*WORKER_FAILURES, GetTimeoutError):
            raise self._lost() from None
        self.name = f"rank {self._rank} (process {self.pid})"

    def load(self, *arguments: Any) -> None:
        """Begin :meth:`Rank.load`; the rank reports when it is ready."""
        self._work = self.actor.load.remote(*arguments)

    def submit(self, payload: bytes) -> None:
        """See :meth:`RankHandle.submit`."""
        self._work = self.actor.infer.remote(payload)

    def statuses(self, wait_s: float) -> Sequence[RankStatus]:
        """See :meth:`RankHandle.statuses`."""
        if self._heartbeat is None and time.monotonic() >= self._next_heartbeat_s:
            self._heartbeat, self._next_heartbeat_s = (
                self.actor.heartbeat.remote(),
                time.monotonic() + HEARTBEAT_S,
            )
        waiting = [
            reference for reference in (self._work, self._heartbeat) if reference is not None
        ]
        if not waiting:
            time.sleep(wait_s)
            return []
        ready, _ = ray.wait(waiting, timeout=wait_s)
        return [self._take(reference) for reference in ready]

    def _take(self, reference: Any) -> RankStatus:
        try:
            status: RankStatus = ray.get(reference)
        except WORKER_FAILURES:
            raise self._lost() from None
        if reference is self._heartbeat:
            self._heartbeat = None
        else:
            self._work = None
        return status

    def _lost(self) -> RankLostError:
        return RankLostError(
            f"{self.name} ended. All ranks of its replica were ended, and start again."
        )

    def kill(self) -> None:
        """See :meth:`RankHandle.kill`."""
        end_actor(self.actor, self.pid, self._node)


class Replica:
    """The actor that leads a group of ranks."""

    def __init__(self, settings: Settings, timeouts: RankTimeouts = TIMEOUTS):
        self._settings = settings
        self._ranks = RankGroup(self._start_ranks, timeouts)
        self._placement: PlacementGroup | None = None

    @ray.method(concurrency_group="status")
    def restarts(self) -> int:
        """Return how often the ranks were restarted."""
        return max(self._ranks.starts - 1, 0)

    @ray.method(concurrency_group="status")
    def ranks(self) -> list[int]:
        """Return the process ids of the running ranks."""
        return [handle.pid for handle in self._ranks.handles if isinstance(handle, RayRankHandle)]

    @ray.method(concurrency_group="inference")
    def start(self) -> Reply:
        """Start the ranks, if they are not running, and wait until all have loaded."""
        return self._retry(self._ranks.start)

    @ray.method(concurrency_group="inference")
    def infer(self, payload: bytes) -> Reply:
        """Answer a request."""
        return self._retry(lambda: self._ranks.infer(payload))

    def _retry(self, work: Callable[[], Any]) -> Reply:
        """Run ``work``, again with new ranks if some fail."""

        def attempts() -> Any:
            failure = ""
            for _ in range(MAX_STARTS):
                try:
                    return work()
                except RanksError as error:
                    failure = str(error)
            raise EvaluationError(
                f"a replica failed {MAX_STARTS} times in a row; the last time: {failure}"
            )

        return Reply.of(attempts)

    def _start_ranks(self, end: ExitStack) -> list[RayRankHandle]:
        topology, policy = self._settings.topology, self._settings.policy
        placement = self._placed()
        actor: Any = ray.remote(RayRank)
        resources = {
            "num_cpus": 1,
            "num_gpus": topology.gpus_per_rank,
            "max_restarts": 0,
            "max_concurrency": 2,
        }
        handles: list[RayRankHandle] = []
        for rank in range(topology.ranks_per_replica):
            bundle = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank)
            handles.append(
                RayRankHandle(rank, actor.options(scheduling_strategy=bundle, **resources).remote())
            )
            end.callback(handles[-1].kill)
        for handle in handles:
            handle.connect()
        try:
            init_method = ray.get(handles[0].actor.rendezvous.remote(), timeout=_CALL_S)
        except (*WORKER_FAILURES, GetTimeoutError):
            raise RankLostError(f"{handles[0].name} ended before ranks could connect.") from None
        parallel = policy.parallel
        device, dtype = ("cuda:0", "bfloat16") if topology.num_gpus else ("cpu", "float32")
        options = RankOptions(
            replace(policy.engine, device=device, dtype=policy.engine.dtype or dtype),
            threads=None if topology.num_gpus else 1,
        )
        for rank, handle in enumerate(handles):
            handle.load(policy.model, parallel, rank, init_method, options)
        return handles

    def _placed(self) -> PlacementGroup:
        """Return one bundle for each rank, on one machine if one is large enough."""
        topology, resource = (
            self._settings.topology,
            "GPU" if self._settings.topology.num_gpus else "CPU",
        )
        count = topology.ranks_per_replica
        if self._placement is None:
            fits = any(
                node["Resources"].get(resource, 0) >= count for node in ray.nodes() if node["Alive"]
            )
            bundles: list[dict[str, float]] = [{"CPU": 1.0, resource: 1.0} for _ in range(count)]
            self._placement = placement_group(bundles, strategy="STRICT_PACK" if fits else "PACK")
        try:
            ray.get(self._placement.ready(), timeout=_PLACEMENT_S)
        except GetTimeoutError:
            resources = ray.cluster_resources()
            raise EvaluationError(
                f"the cluster has had no room for a replica of {count} for {_PLACEMENT_S:.0f} s; "
                f"it has {resources.get('GPU', 0):.0f} GPUs and {resources.get('CPU', 0):.0f} CPUs."
            ) from None
        return self._placement


class ReplicaPool:
    """All replicas of an evaluation, as its driver sees them."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._actors = [self._make() for _ in range(settings.topology.replicas)]
        self._restarts = [0] * len(self._actors)
        self._restarts_before = 0  # of leaders that are gone, themselves included
        self._pending: dict[Any, int] = {}

    def _make(self) -> Any:
        groups = {"inference": 1, "status": 1}
        remote: Any = ray.remote(concurrency_groups=groups)(Replica)  # pyright: ignore
        actor = remote.options(num_cpus=0, max_restarts=0).remote(self._settings)
        actor.start.remote()  # load while simulators start; the first request reports any error
        return actor

    def handle(self, worker: int) -> Any:
        """Return the replica of a worker, replaced if it is gone."""
        index = worker % len(self._actors)
        try:
            ray.get(self._actors[index].restarts.remote(), timeout=_CALL_S)
        except WORKER_FAILURES:
            self._restarts_before += self._restarts[index] + 1
            self._restarts[index] = 0
            self._actors[index] = self._make()
        except GetTimeoutError:
            pass  # slow, not gone
        return self._actors[index]

    def restarts(self) -> int:
        """Return how often ranks of any replica were restarted, as far as known; waits for
        nothing.
        """
        for index, actor in enumerate(self._actors):
            if index not in self._pending.values():
                self._pending[actor.restarts.remote()] = index
        ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        for reference in ready:
            index = self._pending.pop(reference)
            try:
                self._restarts[index] = ray.get(reference)
            except WORKER_FAILURES:
                continue  # the next call of ``handle`` replaces it
        return self._restarts_before + sum(self._restarts)

    def close(self) -> None:
        """End all replicas; their ranks end with them."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)


class ReplicaClient:
    """A replica's actor, as ``parallel.engine.RankGroupEngine`` uses a group of ranks."""

    def __init__(self, replica: Any):
        self._replica = replica

    def start(self) -> None:
        """Wait until the ranks have loaded, so that loading does not count as latency.

        Raises:
            ReplicaLostError, Cosmos3Error: The leader is gone, or the ranks failed repeatedly.
        """
        self._call(self._replica.start)

    def infer(self, payload: bytes, on_step: object = None) -> bytes:
        """Return the replica's answer. Errors: as :meth:`start`, or the request is invalid."""
        return self._call(self._replica.infer, payload)

    def close(self) -> None:
        """Do nothing: other simulators use the replica too."""

    def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            reply: Reply = ray.get(method.remote(*arguments))
        except WORKER_FAILURES:
            raise ReplicaLostError("the leader of a replica is gone.") from None
        return reply.unwrap()


def replica_engine(settings: Settings, replica: Any) -> RankGroupEngine:
    """Return an engine whose ranks are a replica's; a CheckpointError if its headers cannot be
    read here.
    """
    from strands_cosmos3.engine.checkpoint import Checkpoint, locate
    from strands_cosmos3.parallel.rank_engine import RankGroupEngine

    checkpoint = Checkpoint.open(locate(str(settings.policy.model)))
    return RankGroupEngine(checkpoint, False, ReplicaClient(replica))
