"""What pictures cost on the wire: bytes and time of a chunk over a slow link, by the way in which
three rendered views of 180 x 320 travel; and how far JPEG moves the bundled policy's actions.

``letterboxed`` is what servers of others, and of this package before it composed, are sent: raw
views of 360 x 640. The link is a proxy on this machine that passes so many bits a second each way;
the server composes the views and infers nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

import report
from service import NoOpBackend, process
from strands_cosmos3.backends.base import BackendInfo
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.codec import encode
from strands_cosmos3.serving.jpeg import decode_jpeg, encode_jpeg
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.serving.wire import ROBOLAB, Encoding, decode_reply, encode_request
from strands_cosmos3.types import Observation, Request
from strands_cosmos3.worlds.table.world import TableWorld
from strands_cosmos3.worlds.world import Start

_TASK = "pick up the red cube"
_PIECE_BYTES = 4096
_CATCH_UP_S = 0.01
_WAYS: Mapping[str, Encoding | None] = {"letterboxed": None, "raw": "raw", "jpeg": "jpeg"}


def run(
    exchanges: int = 20, mbit: float = 20.0, scenes: int = 50, seeds: int = 8, seed: int = 0
) -> dict[str, Any]:
    """Return bytes and milliseconds of each way, and the error of actions by JPEG.

    Args:
        exchanges: Chunks of each way, in turn.
        mbit: Megabits per second of the link.
        scenes: Of which the policy is asked with and without JPEG; 0 leaves the actions out.
        seeds: Noises of each scene, between which the actions vary.
        seed: Seed of the first scene.
    """
    observations = _observations(max(scenes, 1), seed)
    with Cosmos3Policy("droid", "panda", device="cpu", options={"policy_frames": 1}) as policy:
        report.progress(f"a link of {mbit:g} Mbit/s")
        figures = {"link": _over_a_link(policy, observations[0], mbit, exchanges)}
        if scenes:
            report.progress("actions with and without JPEG")
            figures["actions"] = _action_errors(policy, observations, seeds)
    return {"exchanges": exchanges, "mbit": mbit, "seed": seed, **figures}


def _observations(count: int, seed: int) -> list[Observation]:
    with TableWorld().open(task="pick") as session:
        made: list[Observation] = []
        for number in range(count):
            session.reset(Start("pick", seed + number, number))
            made.append(session.observation())
    return made


def _over_a_link(
    policy: Cosmos3Policy, observation: Observation, mbit: float, exchanges: int
) -> dict[str, Any]:
    asked = replace(
        _asked(policy, observation),
        action_space=policy.embodiment.action_space("joint_pos"),
        composite=None,
        images=observation.images,
    )
    with process(_serve) as port, process(_link, port, mbit * 1e6 / 8) as narrow:
        clients = {name: PolicyClient(ClientConfig("127.0.0.1", narrow)) for name in _WAYS}
        calls = {name: _call(clients[name], asked, way) for name, way in _WAYS.items()}
        report.alternate(calls, 2)
        times_ms = report.alternate(calls, exchanges, time.perf_counter)
        for client in clients.values():
            client.close()
    figures = {
        name: {
            "request_bytes": len(encode(encode_request(asked, ROBOLAB, "", 1, pictures=way))),
            **report.quantiles(times_ms[name]),
        }
        for name, way in _WAYS.items()
    }
    whole_ms = figures["letterboxed"]["p50"]
    return {name: {**each, "ratio": each["p50"] / whole_ms} for name, each in figures.items()}


def _call(client: PolicyClient, asked: Request, way: Encoding | None) -> Callable[[], object]:
    """Encode a request, and wait for its chunk."""

    def call() -> object:
        message = encode_request(asked, ROBOLAB, "", 1, pictures=way)
        return client.exchange(message, lambda reply: decode_reply(reply, asked, 1))

    return call


class _Composing(NoOpBackend):
    """Answers at once, after its server has composed the views."""

    info = BackendInfo(name="nothing")


def _serve(pipe: Any) -> None:
    policy = ServedPolicy(_Composing(), action_space="joint_pos")
    PolicyServer(policy, ServerConfig(port=0)).run(ready=lambda server: pipe.send(server.port))


def _link(pipe: Any, port: int, bytes_per_s: float) -> None:
    """Pass connections on to a port, at a rate each way."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        due_s = 0.0
        while piece := await reader.read(_PIECE_BYTES):
            # what a busy machine kept the link from passing on follows, as from its queue
            due_s = max(due_s, time.monotonic() - _CATCH_UP_S) + len(piece) / bytes_per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, server_writer), pump(server_reader, writer))

    async def main() -> None:
        server = await asyncio.start_server(pass_on, "127.0.0.1", 0, limit=_PIECE_BYTES)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def _action_errors(
    policy: Cosmos3Policy, observations: Sequence[Observation], seeds: int
) -> dict[str, float]:
    """Mean squared difference of normalised actions by JPEG, their variance between seeds, and
    the share of the one in the other.
    """
    torch.set_num_threads(1)
    squared, varied, sizes = [], [], []
    for observation in observations:
        asked = _asked(policy, observation)
        seen = {name: decode_jpeg(encode_jpeg(p), name) for name, p in observation.images.items()}
        sizes.append(sum(len(encode_jpeg(picture)) for picture in observation.images.values()))
        composed = policy.backend.compose(seen, policy.embodiment.rig)
        sides = [
            _chunks(policy, replace(asked, composite=c), seeds) for c in (asked.composite, composed)
        ]
        squared.append(np.square(sides[1] - sides[0]).mean())
        varied.append(sides[0].var(axis=0, ddof=1).mean())
    error, variance = float(np.mean(squared)), float(np.mean(varied))
    return {
        "scenes": len(observations),
        "seeds": seeds,
        "squared_error": error,
        "variance_between_seeds": variance,
        "share": error / variance,
        "largest_share_of_a_scene": float(np.max(np.divide(squared, varied))),
        "largest_jpegs_bytes": max(sizes),
    }


def _chunks(policy: Cosmos3Policy, asked: Request, seeds: int) -> NDArray[np.float64]:
    """Actions [seeds, T, D]."""
    batch = [replace(asked, seed=seed) for seed in range(seeds)]
    return np.stack([chunk.action for chunk in policy.backend.infer_batch(batch)])


def _asked(policy: Cosmos3Policy, observation: Observation) -> Request:
    """What the policy asks of its backend for an observation."""
    backend = policy.backend
    with patch.object(backend, "infer", wraps=backend.infer) as infer:
        policy.plan(observation, _TASK)
    return infer.call_args.args[0]


if __name__ == "__main__":
    report.run(run)
