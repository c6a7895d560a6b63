"""Many clients against one, at ``strands-cosmos3 serve`` with the
bundled policy.

The server has one replica for each core. One client and the fleet take turns; each client shows
pictures of its own and asks again as soon as it is answered. Only chunks count. Requests are packed
beforehand and all clients share one event loop, since they share the server's cores.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

import report
from strands_cosmos3.actions.rotations import se3
from strands_cosmos3.embodiments import DROID_RIG, get_embodiment
from strands_cosmos3.errors import BackendError
from strands_cosmos3.serving.codec import encode
from strands_cosmos3.serving.wire import ROBOLAB, encode_request
from strands_cosmos3.types import Request

_ALONE_S, _FLEET_S, _LEAST_ROUNDS = 8.0, 20.0, 3
_WARM_UP = 4  # requests of each client before anything is measured
_POLL_S = 0.25


def run(clients: int, requests: int = 5000, seed: int = 0) -> dict[str, Any]:
    """Return chunks per second of one client and of all, how evenly they are served, the
    server's memory and /healthz.

    Args:
        clients: Clients at once.
        requests: Chunks to serve before the server's memory is compared.
        seed: Seed of the pictures.
    """
    serve = [
        "serve",
        "--port",
        "0",
        "--policy-frames",
        "1",
        "--replicas",
        str(len(os.sched_getaffinity(0))),
    ]
    report.progress("fleet: starting the server")
    with _serving(serve) as (pid, port):
        figures = asyncio.run(_Fleet(clients, port, pid, seed).measure(requests))
    return {"clients": clients, "seed": seed, "server": " ".join(serve), **figures}


class _Client:
    """One connection, a packed request, and what came back."""

    def __init__(self, uri: str, frame: bytes):
        self._uri, self._frame = uri, frame
        self._connection: ClientConnection | None = None
        self.chunks = 0
        self.refusals: list[str] = []
        self.waits_s: list[float] = []

    async def ask(self) -> bool:
        """Ask once; whether a chunk came. After a refusal, or a lost connection, the next call
        connects again.
        """
        started = time.perf_counter()
        try:
            if self._connection is None:
                self._connection = await connect(
                    self._uri, compression=None, max_size=None, ping_interval=None
                )
                await self._connection.recv()
            await self._connection.send(self._frame)
            reply = await self._connection.recv()
        except (OSError, WebSocketException) as error:
            reply = repr(error)
        if isinstance(reply, bytes):
            self.chunks += 1
            self.waits_s.append(time.perf_counter() - started)
            return True
        self.refusals.append(reply)
        await self.close()
        return False

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        self._connection = None


class _Fleet:
    def __init__(self, clients: int, port: int, pid: int, seed: int):
        self._port, self._pid = port, pid
        self._clients = [
            _Client(f"ws://127.0.0.1:{port}", frame) for frame in _frames(clients, seed)
        ]
        self._health_s: list[float] = []
        self._unhealthy = 0

    async def measure(self, requests: int) -> dict[str, Any]:
        polling = asyncio.create_task(self._poll())
        if not await self._clients[0].ask():
            raise BackendError(
                f"the server refuses the bench's request: {self._clients[0].refusals[0]}"
            )
        await asyncio.gather(*(self._ask(client, _WARM_UP) for client in self._clients))
        warm_mb, served = _resident_mb(self._pid), 0
        alone, fleet, shares = list[float](), list[float](), np.zeros(len(self._clients))
        waits: dict[str, list[float]] = {"alone": [], "fleet": []}
        while served < requests or len(fleet) < _LEAST_ROUNDS:
            for name, group, seconds, rates in (
                ("alone", self._clients[:1], _ALONE_S, alone),
                ("fleet", self._clients, _FLEET_S, fleet),
            ):
                counts = await self._phase(group, seconds)
                rates.append(sum(counts) / seconds)
                served += sum(counts)
                waits[name] += [wait for client in group for wait in client.waits_s]
                if name == "fleet":
                    shares += counts
            report.progress(
                f"fleet: {served} of {requests} chunks, {alone[-1]:.1f}/s alone, "
                f"{fleet[-1]:.1f}/s together"
            )
        grown_mb = _resident_mb(self._pid) - warm_mb
        polling.cancel()
        await asyncio.gather(*(client.close() for client in self._clients))
        refusals = [said for client in self._clients for said in client.refusals]
        return {
            "rounds": len(fleet),
            "chunks": served,
            "rejected": len(refusals),
            **({"last_refusal": refusals[-1]} if refusals else {}),
            "chunks_per_s": {"alone": float(np.mean(alone)), "fleet": float(np.mean(fleet))},
            "ratio": float(np.mean(fleet) / np.mean(alone)),
            "ratio_by_round": {
                str(i): b / a for i, (a, b) in enumerate(zip(alone, fleet, strict=True))
            },
            "slowest_to_fastest": float(shares.min() / shares.max()) if shares.max() else 0.0,
            "wait_ms": {
                f"{name}_{q}": float(np.percentile(times, q)) * 1e3
                for name, times in waits.items()
                if times
                for q in (50, 95)
            },
            "memory_mb": {"warm": warm_mb, "growth": grown_mb},
            "healthz": {
                "answers": len(self._health_s),
                "failures": self._unhealthy,
                "slowest_ms": max(self._health_s) * 1e3,
            },
        }

    async def _phase(self, group: list[_Client], seconds: float) -> list[int]:
        """Let clients ask for some seconds; the chunks that each got in them."""
        until = time.perf_counter() + seconds
        before = [client.chunks for client in group]
        for client in group:
            client.waits_s.clear()
        asking = [asyncio.create_task(self._ask(client, None, until)) for client in group]
        await asyncio.sleep(seconds)
        counts = [client.chunks - start for client, start in zip(group, before, strict=True)]
        await asyncio.gather(*asking)
        return counts

    async def _ask(self, client: _Client, times: int | None, until: float = np.inf) -> None:
        while times != 0 and time.perf_counter() < until:
            if not await client.ask():
                await asyncio.sleep(0.1)
            times = times and times - 1

    async def _poll(self) -> None:
        while True:
            started = time.perf_counter()
            try:
                reader, writer = await asyncio.wait_for(
                    asyncio.open_connection("127.0.0.1", self._port), 5
                )
                writer.write(
                    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                )
                healthy = b" 200 " in await asyncio.wait_for(reader.readline(), 5)
                writer.close()
            except (OSError, TimeoutError):
                healthy = False
            self._health_s.append(time.perf_counter() - started)
            self._unhealthy += not healthy
            await asyncio.sleep(_POLL_S)


def _frames(clients: int, seed: int) -> list[bytes]:
    """A request of each client: a composite as RoboLab's client sends it, a pose and a seed of
    its own.
    """
    droid, rng = get_embodiment("droid"), np.random.default_rng(seed)
    space, facing_down = droid.action_space("midtrain"), np.diag([1.0, -1.0, -1.0])
    h, w = DROID_RIG.view_hw
    frames = []
    for number in range(clients):
        picture = np.kron(
            rng.integers(0, 255, (h * 3 // 40, w // 20, 3), dtype=np.uint8),
            np.ones((20, 20, 1), np.uint8),
        )
        T_base_cosmos = se3(facing_down, np.array([0.4, 0.0, 0.4]) + rng.uniform(-0.05, 0.05, 3))
        shown: dict[str, Any] = {
            "limb_poses": {"arm": T_base_cosmos},
            "composite": picture,
            "seed": number,
        }
        request = Request(droid, space, "pick up the red cube", 16, None, 1.0, **shown)
        frames.append(encode(encode_request(request, ROBOLAB, "", 1)))
    return frames


@contextmanager
def _serving(command: list[str]):
    """Run a server in its own process; its process id and port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "strands_cosmos3", *command], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"ws://127\.0\.0\.1:(\d+)", process.stdout.readline())
        if found is None:
            raise BackendError("the server did not start; its reason stands above.")
        yield process.pid, int(found[1])
    finally:
        process.terminate()
        process.wait()


def family(pid: int) -> list[int]:
    """A process and all its descendants (Linux)."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(
                int(stat.parent.name)
            )
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _resident_mb(pid: int) -> float:
    pages = 0
    for one in family(pid):
        with suppress(OSError):
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    report.run(run)
