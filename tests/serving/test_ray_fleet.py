"""Fleets on Ray Serve: our clients, a replica that dies in an inference, full queues, and a
checkpoint that is replaced.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
pytest.importorskip("uvicorn", reason="ray[serve] is not installed (extra scale)")

from ray import serve
from test_wire import request
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from helpers.environments import TESTS
from helpers.serving import observation, until
from helpers.stand_in import Counted
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.errors import ServiceBusyError
from strands_cosmos3.fleet.cluster import cluster
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.codec import decode, encode
from strands_cosmos3.serving.ray_app import FleetSettings
from strands_cosmos3.serving.ray_app.run import NAME, deploy
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.serving.wire import REQUEST_ID, SERVED_MODEL


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where Ray Serve listens, on a Ray of its own, whose processes find the tests' helpers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        with cluster(None, cpus=8):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            yield port
            serve.shutdown()


def settings(checkpoint: str, folder: Path, **limits: Any) -> FleetSettings:
    made = {"factory": "helpers.stand_in:counted", "model": f"{checkpoint}@{folder}"}
    return FleetSettings.of({**made, "action_space": "joint_pos", "replicas": 2, **limits})


@contextmanager
def service(port: int, **config: Any) -> Iterator[ServiceBackend]:
    backend = ServiceBackend(PolicyClient(ClientConfig("127.0.0.1", port, **config)))
    with closing(backend):
        yield backend


def test_a_fleet_from_its_first_answer_to_its_next_checkpoint(port: int, tmp_path: Path):
    """One test, since a fleet takes seconds to start."""
    limits = {"max_batch": 1, "max_queued": 1, "max_surge_percent": 100}
    deploy(settings("old", tmp_path, **limits))
    clients_are_answered_as_by_one_process(port)
    full_queues_refuse(port)
    a_replica_dies_in_an_inference(port, tmp_path)
    a_checkpoint_is_replaced(port, settings("new", tmp_path, **limits))
    sockets_are_closed_at_the_end(port)


def answer_of_one_process(checkpoint: str) -> np.ndarray:
    policy = ServedPolicy(Counted(checkpoint), action_space="joint_pos")
    with PolicyServer(policy, ServerConfig(port=0)) as server, service(server.port) as backend:
        return backend.infer(request(seed=5)).action


def clients_are_answered_as_by_one_process(port: int) -> None:
    alone = answer_of_one_process("old")
    with service(port) as backend:
        for _ in range(4):  # of either replica
            np.testing.assert_array_equal(backend.infer(request(seed=5)).action, alone)
        assert backend.info.model_sha256 == Counted("old").info.model_sha256
        assert backend.counters["dials"] == 1


def full_queues_refuse(port: int) -> None:
    def ask(number: int) -> str:
        with service(port) as backend:
            try:
                backend.infer(replace(request(seed=number), instruction="sleep 5"))
            except ServiceBusyError as error:
                return "refused" if error.retry_after_s > 0 else "untyped"
            return "answered"

    with ThreadPoolExecutor(16) as pool:
        said = list(pool.map(ask, range(16)))
    # each of two replicas holds two, each of two ingresses one more
    assert 4 <= said.count("answered") <= 8, said
    assert said.count("answered") + said.count("refused") == 16


def a_replica_dies_in_an_inference(port: int, folder: Path) -> None:
    with connect(f"ws://127.0.0.1:{port}", compression=None) as client:
        client.recv()
        client.send(encode(observation(prompt="sleep 60", **{REQUEST_ID: 1, "cosmos3/seed": 777})))
        until(lambda: list(folder.glob("seed-777-*")), 30)
        (began,) = folder.glob("seed-777-*")
        os.kill(int(began.name.split("-")[2]), signal.SIGKILL)
        said = decode(client.recv(timeout=30))
        assert said["message"].startswith("ServiceBusyError: the replica that had this request")
        assert said["retry_after_ms"] > 0
        # the connection is as good as before, and the other replica answers
        client.send(encode(observation(**{REQUEST_ID: 2})))
        assert decode(client.recv(timeout=30))[REQUEST_ID] == 2
    time.sleep(2.0)
    assert len(list(folder.glob("seed-777-*"))) == 1, "nobody inferred for it again"


def a_checkpoint_is_replaced(port: int, renewed: FleetSettings) -> None:
    """A client asks all the time, and notices nothing but the digest."""
    alone = {name: answer_of_one_process(name) for name in ("old", "new")}
    digests = {name: Counted(name).info.model_sha256 for name in alone}
    with service(port) as backend, ThreadPoolExecutor(1) as pool:
        seen = []

        def ask_until_new() -> None:
            deadline = time.monotonic() + 240
            while seen[-3:] != ["new"] * 3 and time.monotonic() < deadline:
                chunk = backend.infer(request(seed=5))
                stated = backend.info.model_sha256
                (name,) = (name for name, digest in digests.items() if digest == stated)
                np.testing.assert_array_equal(chunk.action, alone[name])
                seen.append(name)
                time.sleep(0.05)

        asking = pool.submit(ask_until_new)
        deploy(renewed)
        asking.result()
    assert seen[0] == "old"
    assert seen[-3:] == ["new"] * 3


def sockets_are_closed_at_the_end(port: int) -> None:
    with connect(f"ws://127.0.0.1:{port}", compression=None) as client:
        assert decode(client.recv())[SERVED_MODEL] == Counted("new").info.model_sha256
        serve.delete(NAME, _blocking=False)
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=60)
        assert closed.value.rcvd is not None, "no close frame"
        assert closed.value.rcvd.code == 1012
