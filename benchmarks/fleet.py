"""A fleet on two raylets of this machine, with clients that check every answer, while a replica and
then the second raylet are killed and the checkpoint is replaced; before that, its throughput
against that of a server with as many replicas in one process.

The stand-in for a model sleeps as long as an inference takes, and its rows follow from the request
and from the "checkpoint", a text. What a reply must be is answered once more in this process.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

import report
from service import process
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.serving.codec import decode, encode
from strands_cosmos3.serving.served import Message, ServedPolicy, Session
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.serving.wire import ROBOLAB, SERVED_MODEL, encode_request
from strands_cosmos3.types import ActionChunk, Request

_PIDS = "STAND_IN_PIDS"  # folder where replicas leave their process ids
_DROID = get_embodiment("droid")
_SPACE = _DROID.action_space("joint_pos")
_PICTURE = (54, 64, 3)
_CHECKPOINTS = "first", "second"
_KILL_REPLICA, _KILL_RAYLET, _UPDATE = 0.2, 0.45, 0.7  # of the time
_CLOSED_LOOP = 16  # clients while throughput is measured
_RECONNECT_S = 5.0  # by then a client is to be connected again
_SLACK_S = 300.0  # for a process of clients to start and end on a busy machine
_PAUSE_S = 0.05  # between two attempts to connect


class StandIn(Backend):
    """Sleeps; its rows follow from the request and the checkpoint."""

    def __init__(self, checkpoint: str, inference_s: float):
        digest = hashlib.sha256(checkpoint.encode()).hexdigest()
        self.info = BackendInfo(name="stand-in", requires_images=True, model_sha256=digest)
        self._offset = int(digest[:4], 16) / 2**16
        self._inference_s = inference_s

    def infer(self, request: Request) -> ActionChunk:
        time.sleep(self._inference_s)
        assert request.q_rad is not None
        assert request.composite is not None
        noise = np.random.default_rng(request.seed).uniform(-0.01, 0.01, (4, 8))
        seen = float(request.composite.mean()) / 255
        rows = noise + 0.01 * self._offset + 0.001 * seen
        rows[:, :7] += request.q_rad
        rows[:, 7] = request.gripper
        return ActionChunk(rows, request.action_space, request.embodiment)


def stand_in(model: str) -> StandIn:
    """Make a replica's backend of ``checkpoint:seconds``."""
    checkpoint, _, inference_s = model.partition(":")
    Path(os.environ[_PIDS], str(os.getpid())).touch()
    return StandIn(checkpoint, float(inference_s))


def run(
    minutes: float = 10.0,
    clients: int = 64,
    period_s: float = 6.0,
    inference_ms: float = 100.0,
    seconds: float = 15.0,
    rounds: int = 2,
    port: int = 8765,
) -> dict[str, Any]:
    """Measure throughput for ``rounds`` times ``seconds``, then let the clients ask for minutes.

    Args:
        minutes: Duration of the trial.
        clients: Connections; each asks once in a period.
        period_s: The period.
        inference_ms: What an inference takes; a replica has one at a time.
        seconds: Duration of each part of the measurement of throughput.
        rounds: In which the fleet and the server take turns.
        port: Where the fleet listens.
    """
    inference_s = inference_ms / 1e3
    figures: dict[str, Any] = {
        "clients": clients,
        "requests_per_s": clients / period_s,
        "inference_ms": inference_ms,
        "load_before": os.getloadavg(),
    }
    with _fleet(inference_s, port) as fleet, process(_serve, inference_s) as other:
        chunks: dict[str, list[int]] = {"fleet": [], "server": []}
        for number in range(rounds):
            for name, address in (("fleet", port), ("server", other)):
                report.progress(f"throughput: round {number + 1} of {rounds}, {name}")
                chunks[name].append(_in_process(_closed_loop, address, seconds))
        figures["chunks_per_s"] = {name: sum(n) / rounds / seconds for name, n in chunks.items()}
        figures["ratio"] = sum(chunks["fleet"]) / sum(chunks["server"])
        report.progress(f"ratio {figures['ratio']:.2f}; {minutes:g} minutes of trial")
        trial = _Trial(port, clients, period_s, 60 * minutes)
        figures |= fleet.disturb(trial)
    return {**figures, "load_after": os.getloadavg()}


@dataclass
class _Outcomes:
    """What clients saw."""

    answers: Counter[str] = field(default_factory=Counter[str])  # by checkpoint
    wrong: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])  # by type, with the wire's words
    untyped: list[str] = field(default_factory=list[str])
    closed: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Of sockets: when, and with which code."""
    reconnect_s: list[float] = field(default_factory=list[float])
    waits_s: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class _Trial:
    """Clients that ask once in a period."""

    port: int
    clients: int
    period_s: float
    duration_s: float

    def run(self) -> _Outcomes:
        """Let them ask; return what they saw."""
        return asyncio.run(self._all())

    async def _all(self) -> _Outcomes:
        seen = _Outcomes()
        until_s = time.monotonic() + self.duration_s
        await asyncio.gather(*(self._client(n, until_s, seen) for n in range(self.clients)))
        return seen

    async def _client(self, number: int, until_s: float, seen: _Outcomes) -> None:
        rng = np.random.default_rng(number)
        await asyncio.sleep(rng.uniform(0, self.period_s))
        lost_s: float | None = None
        while time.monotonic() < until_s:
            try:
                async with _connected(self.port) as socket:
                    await socket.recv()  # the metadata
                    if lost_s is not None:
                        seen.reconnect_s.append(time.monotonic() - lost_s)
                        lost_s = None
                    await self._ask(socket, rng, until_s, seen)
            except (OSError, WebSocketException, TimeoutError) as error:
                if isinstance(error, ConnectionClosed) and lost_s is None:
                    code = error.rcvd.code if error.rcvd is not None else 1006
                    seen.closed.append((time.monotonic() - until_s + self.duration_s, code))
                if lost_s is None:
                    lost_s = time.monotonic()
                await asyncio.sleep(_PAUSE_S)
        if lost_s is not None and time.monotonic() - lost_s > _RECONNECT_S:
            seen.untyped.append("not connected at the end")

    async def _ask(
        self, socket: ClientConnection, rng: np.random.Generator, until_s: float, seen: _Outcomes
    ) -> None:
        """Ask once in a period, as long as the connection lasts."""
        while time.monotonic() < until_s:
            frame = _frame(rng)
            began_s = time.monotonic()
            await socket.send(frame)
            reply = await socket.recv()
            seen.waits_s.append(time.monotonic() - began_s)
            _check(frame, reply, seen)
            rest_s = self.period_s * rng.uniform(0.9, 1.1) - (time.monotonic() - began_s)
            with suppress(TimeoutError):  # a socket that closes meanwhile is noticed at once
                async with asyncio.timeout(max(0.0, rest_s)):
                    await socket.wait_closed()
                await socket.recv()  # raises why


def _check(frame: bytes, reply: bytes | str, seen: _Outcomes) -> None:
    if isinstance(reply, str):
        seen.refused[reply.partition(":")[0]] += 1
        return
    content = decode(reply)
    if content.get("type") == "error":
        if "retry_after_ms" in content:
            seen.refused[content["message"]] += 1
        else:
            seen.untyped.append(str(content)[:200])
        return
    for name, policy in _ORACLES.items():
        if content[SERVED_MODEL] == policy.backend.model_sha256:
            (answer,) = policy.answer([Message(frame, Session(), 0.0)])
            right = np.array_equal(decode(bytes(answer.frame))["action"], content["action"])
            seen.answers[name] += right
            seen.wrong += not right
            return
    seen.wrong += 1


_ORACLES = {name: ServedPolicy(StandIn(name, 0.0)) for name in _CHECKPOINTS}


def _frame(rng: np.random.Generator) -> bytes:
    picture = rng.integers(0, 255, _PICTURE, dtype=np.uint8)
    q_rad = rng.uniform(-0.5, 0.5, 7)
    seed = int(rng.integers(2**31))
    request = Request(_DROID, _SPACE, "lift the cube", 32, q_rad, 1.0, composite=picture, seed=seed)
    return encode(encode_request(request, ROBOLAB, "", 1))


def _connected(port: int) -> Any:
    return connect(f"ws://127.0.0.1:{port}", compression=None, ping_interval=None, open_timeout=5)


def _closed_loop(port: int, seconds: float) -> int:
    """Chunks that clients get which ask again as soon as they are answered."""

    async def ask(number: int, until_s: float) -> int:
        rng = np.random.default_rng(number)
        chunks = 0
        async with _connected(port) as socket:
            await socket.recv()
            while time.monotonic() < until_s:
                await socket.send(_frame(rng))
                chunks += isinstance(await socket.recv(), bytes)
        return chunks

    async def all_of_them() -> int:
        until_s = time.monotonic() + seconds
        return sum(await asyncio.gather(*(ask(number, until_s) for number in range(_CLOSED_LOOP))))

    return asyncio.run(all_of_them())


def _in_process(work: Any, *arguments: Any) -> Any:
    """What ``work`` returns in a process of its own, whose interpreter the clients have alone."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _serve(pipe: Any, inference_s: float) -> None:
    policies = [ServedPolicy(StandIn(_CHECKPOINTS[0], inference_s)) for _ in range(2)]
    PolicyServer(policies, ServerConfig(port=0, max_batch=1)).run(
        ready=lambda server: pipe.send(server.port)
    )


class _Fleet:
    """The fleet under trial."""

    def __init__(self, cluster: Any, second: Any, inference_s: float, pids: Path):
        self._cluster, self._second, self._pids = cluster, second, pids
        self._inference_s = inference_s

    def deploy(self, checkpoint: str) -> None:
        """Start it, or replace its checkpoint."""
        from strands_cosmos3.serving.ray_app import FleetSettings
        from strands_cosmos3.serving.ray_app.run import deploy

        model = f"{checkpoint}:{self._inference_s}"
        named = {"factory": "fleet:stand_in", "model": model, "action_space": "joint_pos"}
        limits = {"replicas": 2, "max_batch": 1, "max_queued": 32, "max_surge_percent": 100}
        deploy(FleetSettings.of({**named, **limits}))

    def disturb(self, trial: _Trial) -> dict[str, Any]:
        """Run a trial; kill and update meanwhile."""
        began_s = time.monotonic()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            running = pool.apply_async(trial.run)
            happened: dict[str, float] = {}
            with_raylet: list[str] = []
            for share, name, act in (
                (_KILL_REPLICA, "replica killed", self._kill_replica),
                (_KILL_RAYLET, "raylet killed", self._kill_raylet),
                (_UPDATE, "checkpoint replaced", lambda: self.deploy(_CHECKPOINTS[1])),
            ):
                time.sleep(max(0.0, began_s + share * trial.duration_s - time.monotonic()))
                happened[name] = round(time.monotonic() - began_s, 1)
                report.progress(f"{name} after {happened[name]} s")
                with_raylet += act() or ()
            happened["all replaced"] = round(time.monotonic() - began_s, 1)
            seen: _Outcomes = running.get(trial.duration_s + _SLACK_S)
        return {
            "happened_at_s": happened,
            "died_with_raylet": with_raylet,
            "answers": dict(seen.answers),
            "wrong_answers": seen.wrong,
            "refused": dict(seen.refused),
            "untyped": seen.untyped,
            "sockets_closed_by_code": dict(Counter(str(code) for _, code in seen.closed)),
            "sockets_closed_at_s": dict(sorted(Counter(round(s) for s, _ in seen.closed).items())),
            "reconnections": len(seen.reconnect_s),
            "reconnect_s_max": max(seen.reconnect_s, default=0.0),
            "wait_ms": report.quantiles([1e3 * wait_s for wait_s in seen.waits_s]),
            "wait_ms_max": 1e3 * max(seen.waits_s),
        }

    def _kill_replica(self) -> None:
        alive = [int(file.name) for file in self._pids.iterdir()]
        os.kill(next(pid for pid in alive if Path(f"/proc/{pid}").exists()), signal.SIGKILL)

    def _kill_raylet(self) -> list[str]:
        """Kill it; return which deployments had a replica there."""
        raylet = psutil.Process(self._second.all_processes["raylet"][0].process.pid)
        titles = [" ".join(child.cmdline()) for child in raylet.children()]
        self._cluster.remove_node(self._second, allow_graceful=False)
        return [kind for kind in ("Policy", "Ingress") for title in titles if kind in title]


@contextmanager
def _fleet(inference_s: float, port: int) -> Iterator[_Fleet]:
    """A fleet on a head and a second raylet."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from strands_cosmos3.fleet.cluster import ONE_THREAD

    with tempfile.TemporaryDirectory(prefix="sc3-pids-") as folder:
        own = {_PIDS: folder, "PYTHONPATH": str(Path(__file__).parent)}
        os.environ.update({**ONE_THREAD, **own, "RAY_USAGE_STATS_ENABLED": "0"})
        os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"
        # else the head's ingress would have all sockets, and the second raylet's death cut none off
        os.environ["RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING"] = "0"
        store = {"object_store_memory": 128 * 2**20}
        head = {"num_cpus": 8, "include_dashboard": False, **store}
        # Ray's default slows the workers down
        head["_system_config"] = {"worker_niceness": 0}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            second = cluster.add_node(num_cpus=2, **store)
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
            serve.start(proxy_location="HeadOnly", http_options={"port": port})
            fleet = _Fleet(cluster, second, inference_s, Path(folder))
            report.progress("starting the fleet")
            fleet.deploy(_CHECKPOINTS[0])
            yield fleet
            serve.shutdown()
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    report.run(run)
