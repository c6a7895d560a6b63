"""Latency of a client that asks ten times a second beside many that ask again as soon as they are
answered, with and without classes, and how soon a hopeless request is refused.

The backend sleeps for the time of an inference, however many requests share it. The server is a
process of its own, and so are the many clients.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from websockets.asyncio.client import connect

import report
from service import NoOpBackend, process
from strands_cosmos3.embodiments import DROID_RIG, get_embodiment
from strands_cosmos3.observe.views import resize
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.serving.codec import decode, encode
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.serving.wire import PRIORITY_HEADER, ROBOLAB, encode_request
from strands_cosmos3.types import ActionChunk, Request

Pictures = Literal["none", "letterboxed", "raw", "jpeg"]
_PERIOD_S = 0.1
_HOPELESS = 40


def run(
    bulk: int = 32,
    inference_ms: float = 50.0,
    seconds: float = 15.0,
    rounds: int = 2,
    pictures: Pictures = "none",
) -> dict[str, Any]:
    """Measure one client alone, beside ``bulk`` others of its own class, and beside as many of the
    class ``bulk``, in turn.

    Args:
        bulk: Clients that ask again and again.
        inference_ms: What an inference takes.
        seconds: Duration of each part.
        rounds: In which the parts take turns.
        pictures: How requests send three views of 180 x 320, which the backend reads: letterboxed
            (2 MB), or as they were seen, raw (.5 MB) or as JPEG (.1 MB).
    """
    frame = request_frame(pictures=pictures)
    parts: dict[str, tuple[int, str]] = {
        "alone": (0, "realtime"),
        "one class": (bulk, "bulk"),
        "two classes": (bulk, "realtime"),
    }
    waits_s: dict[str, list[float]] = {part: [] for part in parts}
    chunks: dict[str, int] = dict.fromkeys(parts, 0)
    spawn = multiprocessing.get_context("spawn")
    with (
        process(_serve, inference_ms / 1e3, pictures) as port,
        ProcessPoolExecutor(1, mp_context=spawn) as pool,
    ):
        pool.submit(os.getpid).result()  # it is there before anything is timed
        for number in range(rounds):
            for part, (others, priority) in parts.items():
                report.progress(f"admission: round {number + 1} of {rounds}, {part}")
                own_s, theirs = asyncio.run(_measure(pool, port, frame, others, priority, seconds))
                waits_s[part] += own_s
                chunks[part] += theirs
        refused_s = asyncio.run(_hopeless(pool, port, pictures, bulk, 0.4e-3 * inference_ms))
    return {
        "bulk_clients": bulk,
        "inference_ms": inference_ms,
        "request_bytes": len(frame),
        "client_ms": {part: _figures(waits) for part, waits in waits_s.items()},
        "bulk_chunks_per_s": {part: n / (seconds * rounds) for part, n in chunks.items()},
        "bulk_ratio": chunks["two classes"] / max(chunks["one class"], 1),
        "refused_ms": _figures(refused_s),
        "load_average": os.getloadavg(),
    }


def _figures(waits_s: Sequence[float]) -> dict[str, float]:
    p50, p99, most = (np.percentile(waits_s, (50, 99, 100)) * 1e3).tolist()
    return {"p50": p50, "p99": p99, "max": most, "requests": len(waits_s)}


def request_frame(wait_s: float = np.inf, pictures: Pictures = "none") -> bytes:
    """A request as our client sends it; its pictures are soft, as a camera's are."""
    droid = get_embodiment("droid")
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 255, (len(DROID_RIG.views), 6, 8, 3), np.uint8)
    views = {
        view: np.clip(resize(picture, (180, 320), "bicubic"), 0, 255).astype(np.uint8)
        for view, picture in zip(DROID_RIG.views, coarse, strict=True)
    }
    space, images = droid.action_space("joint_pos"), {} if pictures == "none" else views
    request = Request(droid, space, "pick up the cube", 32, HOME_Q, 1.0, images=images)
    agreed = pictures if pictures in ("raw", "jpeg") else None
    return encode(encode_request(request, ROBOLAB, "", 1, wait_s=wait_s, pictures=agreed))


def _connected(port: int, priority: str) -> connect:
    return connect(
        f"ws://127.0.0.1:{port}",
        compression=None,
        ping_interval=None,
        additional_headers={PRIORITY_HEADER: priority},
    )


async def _keep_asking(port: int, frame: bytes, until_s: float) -> int:
    """Ask until then as a bulk client; return how many chunks came."""
    chunks = 0
    async with _connected(port, "bulk") as connection:
        await connection.recv()  # the metadata
        while time.perf_counter() < until_s:
            await connection.send(frame)
            await connection.recv()
            chunks += 1
    return chunks


def _many(port: int, frame: bytes, clients: int, until_s: float) -> int:
    """Let so many bulk clients ask until then; return how many chunks came."""

    async def all_of_them() -> int:
        asking = (_keep_asking(port, frame, until_s) for _ in range(clients))
        return sum(await asyncio.gather(*asking))

    return asyncio.run(all_of_them())


async def _measure(
    pool: Executor, port: int, frame: bytes, others: int, priority: str, seconds: float
) -> tuple[list[float], int]:
    """The waits of a client that asks ten times a second, and the chunks of the others."""
    until_s = time.perf_counter() + seconds
    asking = pool.submit(_many, port, frame, others, until_s)
    waits_s: list[float] = []
    async with _connected(port, priority) as connection:
        await connection.recv()
        await asyncio.sleep(0.5)
        due_s = time.perf_counter()
        while due_s < until_s - 1.0:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            began_s = time.perf_counter()
            await connection.send(frame)
            await connection.recv()
            waits_s.append(time.perf_counter() - began_s)
            due_s = max(due_s + _PERIOD_S, time.perf_counter())
    return waits_s, await asyncio.wrap_future(asking)


async def _hopeless(
    pool: Executor, port: int, pictures: Pictures, others: int, wait_s: float
) -> list[float]:
    """How long requests wait for their refusal that can wait for less than an inference."""
    often = request_frame(pictures=pictures)
    until_s = time.perf_counter() + _HOPELESS * _PERIOD_S + 1.0
    asking = pool.submit(_many, port, often, others, until_s)
    refused_s: list[float] = []
    async with _connected(port, "realtime") as connection:
        await connection.recv()
        frame = request_frame(wait_s, pictures)
        for _ in range(_HOPELESS):
            await asyncio.sleep(_PERIOD_S)
            began_s = time.perf_counter()
            await connection.send(frame)
            reply: Any = await connection.recv()
            assert "retry_after_ms" in decode(reply)
            refused_s.append(time.perf_counter() - began_s)
    await asyncio.wrap_future(asking)
    return refused_s


class SleepingBackend(NoOpBackend):
    """Takes as long for several requests as for one."""

    def __init__(self, inference_s: float, pictures: Pictures = "none"):
        self._inference_s = inference_s
        self.info = replace(self.info, requires_images=pictures != "none")

    def infer(self, request: Request) -> ActionChunk:
        return self.infer_batch([request])[0]

    def infer_batch(self, requests: Sequence[Request]) -> list[ActionChunk]:
        time.sleep(self._inference_s)
        return [super(SleepingBackend, self).infer(request) for request in requests]


def _serve(pipe: Any, inference_s: float, pictures: Pictures) -> None:
    policy = ServedPolicy(SleepingBackend(inference_s, pictures))
    PolicyServer(policy, ServerConfig(port=0)).run(ready=lambda server: pipe.send(server.port))


if __name__ == "__main__":
    report.run(run)
