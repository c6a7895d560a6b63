"""How many GPUs a number of robots need, by a model of queues; or that model beside a server.

    python benchmarks/queueing.py                               # 1,000 robots on H100s, by formula
    python benchmarks/queueing.py --measure                     # the model and a server here
    python benchmarks/queueing.py --measure --address HOST:PORT --workers N   # one that runs

The server here has a worker for each replica, as ``serve --replicas 2 --max-batch 1`` has, but its
inference only sleeps. Requests come from connections of this process, at random times (Poisson) and
from robots with a period. A server that runs is asked in the same way; give it ``--max-batch 1``,
or ``--batch`` here.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect

import report
from admission import SleepingBackend, request_frame
from queueing_model import Robots, Station, robots_served, simulated_waits_s, workers_needed
from service import process
from strands_cosmos3.serving.codec import decode
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig

FORWARDS = {
    "4 steps, guidance at each": 8,
    "4 steps, guidance at the first": 5,
    "2 steps, guidance at each": 4,
    "2 steps, guidance at the first": 3,
}
UTILISATIONS = (0.3, 0.6, 0.8, 0.9)
_ALONE = 20  # requests
_CONNECTIONS = 100
_SHARES = (0.5, 0.9, 0.99)


def run(
    measure: bool = False,
    robots: int = 1000,
    horizon: int = 32,
    rows_hz: float = 15.0,
    forward_ms: float = 115.0,
    other_ms: float = 20.0,
    network_ms: float = 20.0,
    gpus_a_server: int = 8,
    address: str | None = None,
    workers: int = 2,
    batch: int = 1,
    inference_ms: float = 50.0,
    seconds: float = 60.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Tell how many GPUs robots need, or measure.

    Args:
        measure: Compare the model with a server instead.
        robots: Number of robots. horizon, rows_hz: Rows of a chunk, and how many are executed a
            second.
        forward_ms: One forward pass. other_ms: All else of an inference, e.g. encoding pictures.
        network_ms: From the observation to the server and back.
        gpus_a_server: GPUs that share a queue, if not all do.
        address: HOST:PORT of a server that runs; without it one is started here.
        workers: Its workers (replicas).
        batch: Requests that a worker takes at a time, at most.
        inference_ms: How long the inference of the server here sleeps.
        seconds: Duration of each part. seed: Of the times of arrival.
    """
    if measure:
        return measured(address, workers, batch, inference_ms / 1e3, seconds, seed)
    rows = []
    for sampling, forwards in FORWARDS.items():
        service_s = (forwards * forward_ms + other_ms) / 1e3
        for executed in (horizon // 4, horizon // 2, horizon * 3 // 4):
            fleet = Robots(robots, horizon, executed, rows_hz)
            arguments = service_s, network_ms / 1e3
            one_queue = workers_needed(fleet, *arguments)
            each = robots_served(gpus_a_server, fleet, *arguments) if one_queue else 0
            rows.append(
                {
                    "sampling": sampling,
                    "inference_ms": service_s * 1e3,
                    "executed_rows": executed,
                    "requests_a_second": fleet.rate,
                    "slack_ms": fleet.slack_s * 1e3,
                    "busy_gpus": fleet.rate * service_s,
                    "gpus_with_one_queue": one_queue,
                    "robots_a_server": each,
                    "gpus_in_servers": -(-robots // each) * gpus_a_server if each else None,
                }
            )
    return {"robots": robots, "gpus_a_server": gpus_a_server, "late_chunks": 0.01, "needs": rows}


def measured(
    address: str | None, workers: int, batch: int, inference_s: float, seconds: float, seed: int
) -> dict[str, Any]:
    """Latencies of a server, and those of the model."""
    serving = nullcontext() if address else process(_serve, workers, batch, inference_s)
    with serving as port:
        url = f"ws://{address or f'127.0.0.1:{port}'}"
        report.progress("queueing: one request at a time, and as many as the server takes")
        alone = asyncio.run(_one_by_one(url))
        busiest = asyncio.run(_busiest(url, workers, batch, seconds / 6))
        rng = np.random.default_rng(seed)
        parts = []
        for utilisation in UTILISATIONS:
            rate = utilisation * workers * batch / busiest.service_s
            for kind in ("poisson", "periodic"):
                report.progress(f"queueing: utilisation {utilisation}, {kind}")
                due_s = _arrivals(kind, rate, seconds, rng)
                answers = asyncio.run(_answered(url, due_s))
                part = {"aimed_at": utilisation, "arrivals": kind}
                parts.append(part | _compared(answers, alone, busiest, rate, workers, batch))
    return {
        "server": address or f"here, an inference sleeps {inference_s * 1e3:g} ms",
        "workers": workers,
        "batch": batch,
        "alone_ms": alone.latency_s * 1e3,
        "busiest_service_ms": busiest.service_s * 1e3,
        "parts": parts,
        "load_average": os.getloadavg(),
    }


@dataclass(frozen=True)
class _Typical:
    """Latency of a request, how long a worker is kept by an inference, and how long the inference
    itself takes, as the server says.
    """

    latency_s: float
    service_s: float
    inference_s: float


def _compared(
    answers: NDArray[np.float64],
    alone: _Typical,
    busiest: _Typical,
    rate: float,
    workers: int,
    batch: int,
) -> dict[str, Any]:
    """The latencies of a part, of the same arrivals in the model, and of the formula.

    Inferences last as long as they did in this part on average, and a worker is kept as much longer
    as when it was busiest.
    """
    sent_s, latencies_s, inferences_s = answers.T
    service_s = inferences_s.mean() + busiest.service_s - busiest.inference_s
    beside_s = alone.latency_s - alone.inference_s + inferences_s.mean()
    waits_s = simulated_waits_s(sent_s, lambda _: service_s, workers, batch)
    found, simulated = _figures(latencies_s), _figures(waits_s + beside_s)
    part = {
        "utilisation": rate * service_s / (workers * batch),
        "requests": len(answers),
        "service_ms": service_s * 1e3,
        "measured_ms": found,
        "simulated_ms": simulated,
        "difference_ms": {name: found[name] - simulated[name] for name in found},
    }
    if batch == 1 and part["utilisation"] < 1:
        station = Station(workers, service_s, rate)
        quantiles = {f"p{share * 100:.0f}": station.quantile_s(share) for share in _SHARES}
        waits = {"mean": station.mean_s, **quantiles}
        part["formula_ms"] = {name: (wait_s + beside_s) * 1e3 for name, wait_s in waits.items()}
    return part


def _figures(latencies_s: NDArray[np.float64]) -> dict[str, float]:
    quantiles = np.quantile(latencies_s, _SHARES) * 1e3
    names = [f"p{share * 100:.0f}" for share in _SHARES]
    return {"mean": latencies_s.mean() * 1e3, **dict(zip(names, quantiles.tolist(), strict=True))}


def _arrivals(
    kind: str, rate: float, seconds: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Times of arrival: at random, or of robots that each ask once a second, in phases of their
    own.
    """
    if kind == "poisson":
        count = int(rate * seconds * 2)
        arrivals = np.cumsum(rng.exponential(1 / rate, count))
    else:
        phases = rng.uniform(0, 1, round(rate)) / (rate / round(rate))
        periods = np.arange(int(seconds) + 1) * round(rate) / rate
        arrivals = np.sort((phases[:, None] + periods).ravel())
    return arrivals[arrivals < seconds]


async def _open(url: str) -> ClientConnection:
    connection = await connect(url, compression=None, ping_interval=None, max_size=None)
    await connection.recv()  # the metadata
    return connection


async def _ask(connection: ClientConnection, frame: bytes) -> tuple[float, float]:
    """Ask once; return how long the answer took, and the inference alone, as the server says."""
    began_s = time.perf_counter()
    await connection.send(frame)
    reply: Any = await connection.recv()
    took_s = time.perf_counter() - began_s
    return took_s, decode(reply)["server_timing"]["infer_ms"] / 1e3


async def _one_by_one(url: str) -> _Typical:
    connection, frame = await _open(url), request_frame()
    latency_s, inference_s = np.median([await _ask(connection, frame) for _ in range(_ALONE)], 0)
    await connection.close()
    return _Typical(latency_s, latency_s, inference_s)


async def _busiest(url: str, workers: int, batch: int, seconds: float) -> _Typical:
    """Figures while requests wait all the time; a worker is kept for as long as it has by their
    number.
    """
    frame = request_frame()
    connections = [await _open(url) for _ in range(3 * workers * batch)]
    began_s = time.perf_counter()

    async def keep_asking(connection: ClientConnection) -> list[tuple[float, float]]:
        answers = []
        while time.perf_counter() < began_s + seconds:
            answers.append(await _ask(connection, frame))
        return answers

    answers = np.concatenate(await asyncio.gather(*map(keep_asking, connections)))
    took_s = time.perf_counter() - began_s
    for connection in connections:
        await connection.close()
    latency_s, inference_s = answers.mean(axis=0)
    return _Typical(latency_s, workers * batch * took_s / len(answers), inference_s)


async def _answered(url: str, due_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """[requests, 3]: when each was sent, from the start, how long its answer took, and the
    inference. A request waits for a connection where all are taken.
    """
    frame = request_frame()
    free: asyncio.Queue[ClientConnection] = asyncio.Queue()
    for _ in range(_CONNECTIONS):
        free.put_nowait(await _open(url))
    began_s = time.perf_counter()

    async def ask(due_s: float) -> tuple[float, float, float]:
        await asyncio.sleep(began_s + due_s - time.perf_counter())
        connection = await free.get()
        sent_s = time.perf_counter() - began_s
        answer = await _ask(connection, frame)
        free.put_nowait(connection)
        return sent_s, *answer

    answers = np.array(await asyncio.gather(*map(ask, due_s)))
    while not free.empty():
        await free.get_nowait().close()
    return answers[answers[:, 0].argsort(kind="stable")]


def _serve(pipe: Any, workers: int, batch: int, inference_s: float) -> None:
    policies = [ServedPolicy(SleepingBackend(inference_s)) for _ in range(workers)]
    config = ServerConfig(port=0, max_batch=batch)
    PolicyServer(policies, config).run(ready=lambda server: pipe.send(server.port))


if __name__ == "__main__":
    report.run(run)
