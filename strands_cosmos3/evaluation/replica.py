"""A replica on Ray: a gang of ranks in one placement group, and the actor in front of it that simulators share.

The actor in front gives all ranks the same requests in the same order, one at a time, so simulators need not know of each
other. Where a rank dies, hangs or fails it ends the whole gang, starts another in the same placement group and asks it the same
question: an inference has no memory, so the simulator waits longer and sees nothing else. Where the actor in front is itself
killed, its ranks end with it, and the driver puts another in its place.

Only bytes travel: what ``parallel.payload`` makes of a request and of a result. The actor in front does not look into them and
loads no torch; simulators and ranks do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from strands_cosmos3.errors import Cosmos3Error, EvaluationError, RankLostError, RanksError, ReplicaLostError
from strands_cosmos3.evaluation.cluster import DEATHS
from strands_cosmos3.evaluation.ranks import RankHost, RayMember
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.evaluation.worker import Reply
from strands_cosmos3.parallel.config import ParallelConfig, RankOptions
from strands_cosmos3.parallel.gang import Gang, GangLimits, revive

if TYPE_CHECKING:
    from strands_cosmos3.engine.checkpoint import Checkpoint
    from strands_cosmos3.parallel.engine import GangEngine

MAX_STARTS = 3
"""Gangs that one question may cost before the evaluation gives up."""
LIMITS = GangLimits(silent_s=12.0)  # simulators on the same cores may keep a rank's reporter waiting
"""How long ranks on Ray may take."""
_PLACEMENT_S = 120.0
_CALL_S = 30.0


def check_model(settings: Settings) -> Checkpoint:
    """The checkpoint's headers, read before anything is started.

    Raises:
        CheckpointError: It cannot be loaded.
        ConfigError: It cannot be split so.
    """
    from strands_cosmos3.engine.checkpoint import Checkpoint, locate
    from strands_cosmos3.parallel import tensor

    assert settings.policy.model is not None  # Settings saw to it
    checkpoint = Checkpoint.open(locate(settings.policy.model))
    tensor.check(checkpoint.config, settings.topology.tp_size)
    return checkpoint


class Replica:
    """The actor in front of a gang.

    Args:
        settings: What is evaluated: model, degrees, where ranks run.
        limits: How long ranks may take; None is a default.
    """

    def __init__(self, settings: Settings, limits: GangLimits | None = None):
        self._settings = settings
        self._limits = limits or LIMITS
        self._gang: Gang | None = None
        self._group: PlacementGroup | None = None
        self._starts = 0

    @ray.method(concurrency_group="look")
    def restarts(self) -> int:
        """How often the gang was started again."""
        return max(self._starts - 1, 0)

    @ray.method(concurrency_group="look")
    def ranks(self) -> list[int]:
        """Process ids of the ranks that live now."""
        gang = self._gang
        return [] if gang is None or gang.ended else [int(member._pid) for member in gang.members]  # pyright: ignore

    @ray.method(concurrency_group="ask")
    def start(self) -> Reply:
        """Start the gang, where it is not there; answers when every rank has loaded."""
        return self._insist(lambda gang: None)

    @ray.method(concurrency_group="ask")
    def infer(self, payload: bytes) -> Reply:
        """The gang's answer to a request."""
        return self._insist(lambda gang: gang.infer(payload))

    def _insist(self, ask: Callable[[Gang], Any]) -> Reply:
        """Ask, and where ranks fail start others and ask again."""
        failure: Cosmos3Error | None = None
        for _ in range(MAX_STARTS):
            try:
                if self._gang is None or self._gang.ended:
                    self._gang = self._start_gang()
                return Reply("done", ask(self._gang))
            except RanksError as error:
                failure = error
            except Cosmos3Error as error:
                return Reply("error", error=(type(error).__name__, str(error)))
        assert failure is not None
        return Reply(
            "error", error=("EvaluationError", f"a replica failed {MAX_STARTS} times in a row; the last time: {failure}")
        )

    def _start_gang(self) -> Gang:
        self._starts += 1
        topology, policy = self._settings.topology, self._settings.policy
        group = self._placed()
        host: Any = ray.remote(RankHost)
        needs = {"num_cpus": 1, "num_gpus": topology.gpus_per_rank, "max_restarts": 0, "max_concurrency": 2}
        members = []
        for rank in range(topology.gang_size):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            members.append(RayMember(rank, host.options(scheduling_strategy=where, **needs).remote()))
        gang = Gang(members, self._limits)
        met = False
        try:
            for member in members:
                member.meet()
            init_method = ray.get(members[0].actor.meeting_point.remote(), timeout=_CALL_S)
            met = True
        except (*DEATHS, GetTimeoutError):
            raise RankLostError(f"{members[0].name} ended while ranks were to meet.") from None
        finally:
            if not met:
                gang.kill()
        parallel = ParallelConfig(topology.tp_size, topology.cfg_size)
        kind, dtype = ("cuda:0", "bfloat16") if topology.num_gpus else ("cpu", "float32")
        options = RankOptions(kind, policy.dtype or dtype, threads=None if topology.num_gpus else 1)  # pyright: ignore[reportArgumentType]
        for rank, member in enumerate(members):
            member.open(policy.model, parallel, rank, init_method, options)
        gang.wait_ready()
        return gang

    def _placed(self) -> PlacementGroup:
        """A bundle for each rank, on one machine where one is large enough."""
        topology = self._settings.topology
        if self._group is None:
            bundle = {"CPU": 1.0, **({"GPU": 1.0} if topology.num_gpus else {})}
            kind = "GPU" if topology.num_gpus else "CPU"
            fits = any(node["Resources"].get(kind, 0) >= topology.gang_size for node in ray.nodes() if node["Alive"])
            bundles: list[dict[str, float]] = [dict(bundle) for _ in range(topology.gang_size)]
            self._group = placement_group(bundles, strategy="STRICT_PACK" if fits else "PACK")
        try:
            ray.get(self._group.ready(), timeout=_PLACEMENT_S)
        except GetTimeoutError:
            raise EvaluationError(
                f"the cluster has had no room for a replica of {topology.gang_size} for {_PLACEMENT_S:.0f} s; it has "
                f"{ray.cluster_resources().get('GPU', 0):.0f} GPUs and {ray.cluster_resources().get('CPU', 0):.0f} CPUs."
            ) from None
        return self._group


class Replicas:
    """The driver's view of all replicas.

    Args:
        settings: What is evaluated.
        limits: How long ranks may take; None is a default.
    """

    def __init__(self, settings: Settings, limits: GangLimits | None = None):
        self._settings, self._limits = settings, limits
        self._actors = [self._make() for _ in range(settings.topology.replicas)]
        self._known = [0] * len(self._actors)
        self._before = 0
        self._asked: dict[Any, int] = {}

    def _make(self) -> Any:
        remote: Any = ray.remote(concurrency_groups={"ask": 1, "look": 1})(Replica)  # pyright: ignore[reportCallIssue]
        actor = remote.options(num_cpus=0, max_restarts=0).remote(self._settings, self._limits)
        actor.start.remote()  # load while simulators start; what goes wrong is told to the first who asks
        return actor

    def handle(self, number: int) -> Any:
        """The replica that a worker asks; another one where the last is gone."""
        index = number % len(self._actors)
        try:
            ray.get(self._actors[index].restarts.remote(), timeout=_CALL_S)
        except DEATHS:
            self._before += self._known[index] + 1
            self._known[index] = 0
            self._actors[index] = self._make()
        except GetTimeoutError:
            pass  # slow, not gone
        return self._actors[index]

    def restarts(self) -> int:
        """How often any gang was started again, as far as replicas have told; it waits for nobody."""
        for index, actor in enumerate(self._actors):
            if index not in self._asked.values():
                self._asked[actor.restarts.remote()] = index
        ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for reference in ready:
            index = self._asked.pop(reference)
            try:
                self._known[index] = ray.get(reference)
            except DEATHS:
                continue  # whoever asks it next finds out, and replaces it
        return self._before + sum(self._known)

    def close(self) -> None:
        """End all replicas; their ranks end with them."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)


class RemoteGang:
    """A replica, as ``parallel.engine.GangEngine`` expects a gang.

    Args:
        replica: Handle of the actor in front.
    """

    ended = False

    def __init__(self, replica: Any):
        self._replica = replica

    def infer(self, payload: bytes, on_step: object = None) -> bytes:
        """The replica's answer.

        Raises:
            ReplicaLostError: The actor in front is gone.
            Cosmos3Error: It gave up, or the request cannot be answered.
        """
        return self._reply("infer", payload)

    def close(self) -> None:
        """Nothing: others ask it too."""

    def wait_ready(self) -> None:
        """Wait until its ranks have loaded, so that loading is not counted as latency.

        Raises:
            ReplicaLostError, Cosmos3Error: As :meth:`infer`.
        """
        self._reply("start")

    def _reply(self, method: str, *arguments: Any) -> Any:
        try:
            reply: Any = ray.get(getattr(self._replica, method).remote(*arguments))
        except DEATHS:
            raise ReplicaLostError("the process in front of a replica is gone.") from None
        if reply.kind == "error":
            raise revive(*reply.error)
        return reply.value


def remote_engine(settings: Settings, replica: Any) -> GangEngine:
    """An engine in a simulator's process whose ranks are a replica's.

    Raises:
        CheckpointError: The checkpoint's headers cannot be read on this machine.
    """
    from strands_cosmos3.parallel.engine import GangEngine

    gang: Any = RemoteGang(replica)
    engine = GangEngine(check_model(settings), False, lambda: gang)
    gang.wait_ready()
    return engine
