"""Round-trip time of the policy server with a no-op backend, compared with bare
websockets.

It calls three servers in turn, each in its own process: ours, through our client; a bare websockets
server that sends the same reply without decoding the request; and a bare server that echoes the
request.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as bare_serve
from websockets.sync.client import connect as bare_connect

import report
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.embodiments import DROID_RIG, get_embodiment
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.codec import encode
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.serving.wire import ROBOLAB, encode_request, encode_rows
from strands_cosmos3.types import ActionChunk, Request

_WARM_UP = 20


def run(exchanges: int = 200, seed: int = 0) -> dict[str, Any]:
    """Measure round trips in milliseconds, and their ratios, for requests of three sizes.

    Args:
        exchanges: Round trips of each kind.
        seed: Seed of the pictures.
    """
    rng = np.random.default_rng(seed)
    h, w = DROID_RIG.view_hw
    views = {view: rng.integers(0, 255, (h, w, 3), dtype=np.uint8) for view in DROID_RIG.views}
    composite = rng.integers(0, 255, (h * 3 // 2, w, 3), dtype=np.uint8)
    out: dict[str, Any] = {"exchanges": exchanges, "seed": seed}
    cases = {
        "composite": _request(composite=composite),
        "three_views": _request(images=views),
        "no_pictures": _request(),
    }
    rows = encode_rows(_NoOpBackend().infer(cases["no_pictures"]), cases["no_pictures"])
    reply = encode(
        {"action": rows, "actions": rows, "server_timing": {"infer_ms": 0.0, "prev_total_ms": 0.0}}
    )
    with (
        _process(_serve_policy) as ours,
        _process(_serve_bare, reply) as bare,
        _process(_serve_bare, None) as echo,
    ):
        for name, request in cases.items():
            report.progress(f"service: {name}")
            out[name] = {
                **_compare(request, exchanges, ours, bare, echo),
                "reply_bytes": len(reply),
            }
    return out


def _request(**pictures: Any) -> Request:
    droid = get_embodiment("droid")
    return Request(
        droid, droid.action_space("joint_pos"), "pick up the red cube", 32, HOME_Q, 1.0, **pictures
    )


def _compare(request: Request, exchanges: int, ours: int, bare: int, echo: int) -> dict[str, Any]:
    """Measure the servers at three ports with one request."""
    frame = encode(encode_request(request, ROBOLAB, "", 1))
    backend = ServiceBackend(PolicyClient(ClientConfig("127.0.0.1", ours)))
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
        times_ms: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(_WARM_UP + exchanges):
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                times_ms[name].append((time.perf_counter() - started) * 1e3)
    backend.close()
    quantiles = {
        name: np.percentile(times[_WARM_UP:], [50, 95]).tolist() for name, times in times_ms.items()
    }
    figures = {name: {"p50": p50, "p95": p95} for name, (p50, p95) in quantiles.items()}
    p50 = {name: figure["p50"] for name, figure in figures.items()}
    ratios = {
        "ratio_to_bare": p50["ours_ms"] / p50["bare_ms"],
        "ratio_to_echo": p50["ours_ms"] / p50["echo_ms"],
    }
    return {"request_bytes": len(frame), **figures, **ratios}


def _exchange(connection: Any, frame: bytes) -> Callable[[], object]:
    def call() -> object:
        connection.send(frame)
        return connection.recv()

    return call


class _NoOpBackend(Backend):
    """Backend that returns the measured joint angles in every row."""

    info = BackendInfo(name="nothing", requires_images=False)

    def infer(self, request: Request) -> ActionChunk:
        assert request.q_rad is not None
        rows = np.tile(np.append(request.q_rad, request.gripper), (request.n_rows, 1))
        return ActionChunk(rows, request.action_space, request.embodiment)


@contextmanager
def _process(target: Callable[..., None], *arguments: Any):
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
    PolicyServer(ServedPolicy(_NoOpBackend()), ServerConfig(port=0)).run(
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


if __name__ == "__main__":
    report.run(run)
