"""Round-trip time of the policy server with a no-op backend, compared with bare websockets; or
with ``--clients`` many clients against one, at a server of the bundled policy.

Round trips are of three servers in turn, each in its own process: ours, through our client; a bare
websockets server that sends the same reply without decoding the request; and a bare server that
echoes the request.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
from websockets.asyncio.client import connect as connect_async
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as bare_serve
from websockets.sync.client import connect as bare_connect

import report
from strands_cosmos3.actions.rotations import se3
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.embodiments import DROID_RIG, get_embodiment
from strands_cosmos3.errors import BackendError
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.codec import encode
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.serving.wire import ROBOLAB, encode_reply, encode_request
from strands_cosmos3.types import ActionChunk, Request

_WARM_UP = 20
_ALONE_S, _FLEET_S = 8.0, 20.0  # of a round


def run(
    exchanges: int = 200, seed: int = 0, clients: int | None = None, rounds: int = 3
) -> dict[str, Any]:
    """Measure round trips in milliseconds, and their ratios, for requests of three sizes.

    Args:
        exchanges: Round trips of each kind.
        seed: Seed of the pictures.
        clients: Instead, chunks per second of so many clients and of one.
        rounds: In which one client and all of them take turns.
    """
    return _round_trips(exchanges, seed) if clients is None else _fleet(clients, rounds, seed)


def _round_trips(exchanges: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    h, w = DROID_RIG.view_hw
    views = {view: rng.integers(0, 255, (h, w, 3), dtype=np.uint8) for view in DROID_RIG.views}
    composite = rng.integers(0, 255, (h * 3 // 2, w, 3), dtype=np.uint8)
    cases = {
        "composite": _request(composite=composite),
        "three_views": _request(images=views),
        "no_pictures": _request(),
    }
    plain = cases["no_pictures"]
    reply = encode(encode_reply(NoOpBackend().infer(plain), plain, {}, (0.0, 0.0), bare=False))
    figures = {}
    with (
        process(_serve_policy) as ours,
        process(_serve_bare, reply) as bare,
        process(_serve_bare, None) as echo,
    ):
        for name, request in cases.items():
            report.progress(f"service: {name}")
            compared = _compare(request, exchanges, ours, bare, echo)
            figures[name] = {**compared, "reply_bytes": len(reply)}
    return {"exchanges": exchanges, "seed": seed, **figures}


def _request(**pictures: Any) -> Request:
    droid = get_embodiment("droid")
    return Request(
        droid, droid.action_space("joint_pos"), "pick up the red cube", 32, HOME_Q, 1.0, **pictures
    )


def _compare(request: Request, exchanges: int, ours: int, bare: int, echo: int) -> dict[str, Any]:
    """Measure the servers at three ports with one request."""
    frame = encode(encode_request(request, ROBOLAB, "", 1))
    # the same bytes for all
    backend = ServiceBackend(PolicyClient(ClientConfig("127.0.0.1", ours, pictures="raw")))
    options: dict[str, Any] = {"compression": None, "max_size": None, "proxy": None}
    with (
        bare_connect(f"ws://127.0.0.1:{bare}", **options) as a,
        bare_connect(f"ws://127.0.0.1:{echo}", **options) as b,
    ):
        calls = {
            "ours_ms": lambda: backend.infer(request),
            "bare_ms": _exchange(a, frame),
            "echo_ms": _exchange(b, frame),
        }
        report.alternate(calls, _WARM_UP)
        times_ms = report.alternate(calls, exchanges, time.perf_counter)
    backend.close()
    figures = {name: report.quantiles(times) for name, times in times_ms.items()}
    ours_ms, bare_ms, echo_ms = (figure["p50"] for figure in figures.values())
    return {
        "request_bytes": len(frame),
        **figures,
        "ratio_to_bare": ours_ms / bare_ms,
        "ratio_to_echo": ours_ms / echo_ms,
    }


def _exchange(connection: Any, frame: bytes) -> Callable[[], object]:
    def call() -> object:
        connection.send(frame)
        return connection.recv()

    return call


class NoOpBackend(Backend):
    """Backend that returns the measured joint angles in every row."""

    info = BackendInfo(name="nothing", requires_images=False)

    def infer(self, request: Request) -> ActionChunk:
        assert request.q_rad is not None
        rows = np.tile(np.append(request.q_rad, request.gripper), (request.n_rows, 1))
        return ActionChunk(rows, request.action_space, request.embodiment)


@contextmanager
def process(target: Callable[..., None], *arguments: Any):
    """Run a server in its own process and yield its port."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=target, args=(sender, *arguments), daemon=True)
    process.start()
    try:
        yield receiver.recv()
    finally:
        process.terminate()
        process.join()


def _serve_policy(pipe: Any) -> None:
    PolicyServer(ServedPolicy(NoOpBackend()), ServerConfig(port=0)).run(
        ready=lambda server: pipe.send(server.port)
    )


def _serve_bare(pipe: Any, reply: bytes | None) -> None:
    async def handle(client: ServerConnection) -> None:
        async for frame in client:
            await client.send(frame if reply is None else reply)

    async def main() -> None:
        async with bare_serve(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
            pipe.send(server.sockets[0].getsockname()[1])
            await server.serve_forever()

    asyncio.run(main())


def _fleet(clients: int, rounds: int, seed: int) -> dict[str, Any]:
    """Chunks per second of one client and of all, and how evenly these are served.

    The server has one replica for each core. Each client shows pictures of its own and asks again
    as soon as it is answered; all share one event loop, since they share the server's cores.
    """
    replicas = str(len(os.sched_getaffinity(0)))
    serve = ["serve", "--port", "0", "--policy-frames", "1", "--replicas", replicas]
    frames = [_frame(seed + number) for number in range(clients)]
    report.progress("fleet: starting the server")
    groups = {"alone": (frames[:1], _ALONE_S), "fleet": (frames, _FLEET_S)}
    measured: dict[str, list[list[list[float]]]] = {name: [] for name in groups}
    with _serving(serve) as port:
        asyncio.run(_together(port, frames, _ALONE_S))  # warms every connection's prompt up
        for number in range(rounds):
            for name, group in groups.items():
                report.progress(f"fleet: round {number + 1} of {rounds}, {name}")
                measured[name].append(asyncio.run(_together(port, *group)))
    chunks = {name: np.array([list(map(len, r)) for r in runs]) for name, runs in measured.items()}
    per_s = {name: chunks[name].sum(axis=1) / seconds for name, (_, seconds) in groups.items()}
    served = chunks["fleet"].sum(axis=0)
    waits_ms = [1e3 * wait_s for group in measured["fleet"] for waits in group for wait_s in waits]
    return {
        "clients": clients,
        "server": " ".join(serve),
        "chunks_per_s": {name: float(rates.mean()) for name, rates in per_s.items()},
        "ratio": float(per_s["fleet"].mean() / per_s["alone"].mean()),
        "ratio_by_round": (per_s["fleet"] / per_s["alone"]).tolist(),
        "slowest_to_fastest": float(served.min() / served.max()),
        "wait_ms": report.quantiles(waits_ms),
    }


def _frame(seed: int) -> bytes:
    """A composite as RoboLab's client sends it, with a pose and a seed of its own."""
    droid = get_embodiment("droid")
    rng = np.random.default_rng(seed)
    h, w = DROID_RIG.view_hw
    blocks = rng.integers(0, 255, (h * 3 // 40, w // 20, 3), dtype=np.uint8)
    facing_down = np.diag([1.0, -1.0, -1.0])
    T_base_cosmos = se3(facing_down, np.array([0.4, 0.0, 0.4]) + rng.uniform(-0.05, 0.05, 3))
    request = Request(
        droid,
        droid.action_space("midtrain"),
        "pick up the red cube",
        16,
        None,
        1.0,
        limb_poses={"arm": T_base_cosmos},
        composite=np.kron(blocks, np.ones((20, 20, 1), np.uint8)),
        seed=seed,
    )
    return encode(encode_request(request, ROBOLAB, "", 1))


async def _together(port: int, frames: list[bytes], seconds: float) -> list[list[float]]:
    """Let a client ask for each frame again and again; their waits for chunks in seconds."""
    until = time.perf_counter() + seconds

    async def ask(frame: bytes) -> list[float]:
        waits_s: list[float] = []
        async with connect_async(
            f"ws://127.0.0.1:{port}", compression=None, max_size=None, ping_interval=None
        ) as connection:
            await connection.recv()  # the metadata
            while (began := time.perf_counter()) < until:
                await connection.send(frame)
                reply = await connection.recv()
                if isinstance(reply, str):
                    raise BackendError(f"the server refuses the benchmark's request: {reply}")
                waits_s.append(time.perf_counter() - began)
        return waits_s

    return await asyncio.gather(*map(ask, frames))


@contextmanager
def _serving(command: list[str]):
    """Run a server in its own process and yield its port."""
    line = [sys.executable, "-m", "strands_cosmos3", *command]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = re.search(r"ws://127\.0\.0\.1:(\d+)", process.stdout.readline())
            if address is None:
                raise BackendError("the server did not start; its reason stands above.")
            yield int(address[1])
        finally:
            process.terminate()


if __name__ == "__main__":
    report.run(run)
