"""The protocol's own implementations, unmodified: openpi-client 0.1.2 calls our server, our client
calls openpi-server 0.1.0.

They want numpy < 2, so they live in an environment of their own, made once in pytest's cache
(`.pytest_cache/d/peers`).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from helpers.environments import environment
from helpers.serving import Echo, request, until
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.errors import (
    ServiceChunkError,
    ServiceClosedError,
    ServiceRefusedError,
    ServiceUnavailableError,
)
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.codec import decode, encode
from strands_cosmos3.types import ActionChunk

pytestmark = pytest.mark.peers
PEERS = ("openpi-client==0.1.2", "openpi-server==0.1.0", "typing_extensions", "numpy<2")
SCRIPTS = Path(__file__).parent / "peers"


@pytest.fixture(scope="session")
def peer(pytestconfig: pytest.Config) -> str:
    """Python of the peers' environment."""
    return environment(pytestconfig, "peers", sys.executable, PEERS)


def run(peer: str, script: str, *arguments: object, given: bytes = b"") -> bytes:
    done = subprocess.run(
        [peer, str(SCRIPTS / script), *map(str, arguments)],
        input=given,
        capture_output=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_what_openpi_writes_we_read_and_what_we_write_it_reads(peer: str):
    samples = [decode(frame) for frame in decode(run(peer, "openpi_codec.py", "write"))]
    assert samples[0] == {
        "prompt": "é",
        "n": 3,
        "x": 0.5,
        "none": None,
        "yes": True,
        "list": [1, "a", {"b": b"c"}],
    }
    for name in ("u1", "i4", "i8", "f4", "f8", "?"):
        np.testing.assert_array_equal(
            samples[1][name], np.arange(24).reshape(2, 3, 4).astype(name), strict=True
        )
    assert [type(value).__name__ for value in samples[2]["scalars"]] == [
        "float32",
        "int64",
        "uint8",
        "bool",
        "float",
    ]
    assert (
        run(peer, "openpi_codec.py", "check", given=encode([encode(sample) for sample in samples]))
        == b"same\n"
    )


@pytest.mark.parametrize("token", [(), ("s3cret-s3cret-s3cret",)])
def test_openpi_client_is_served(serve, peer: str, token: tuple[str, ...]):
    backend = Echo()
    backend.info = BackendInfo(name="echo")
    server = serve(backend, token=token[0] if token else None)
    metadata, first, second, error = map(
        json.loads, run(peer, "openpi_calls.py", server.port, *token).splitlines()
    )
    assert metadata == {"cosmos3/action_space": "joint_pos"}
    np.testing.assert_allclose(
        np.array(first["rows"])[:, :7], np.arange(7) / 10 + 0.01 * np.arange(4)[:, None], atol=1e-6
    )
    np.testing.assert_allclose(np.array(second["rows"])[:, 7], 0.2, atol=1e-6)
    assert backend.requests[-1].gripper == pytest.approx(0.8)
    assert [
        int(backend.requests[-1].images[view][0, 0, 0])
        for view in ("wrist", "exterior_1", "exterior_2")
    ] == [1, 2, 3]
    assert set(second["timing"]) == {"infer_ms", "prev_total_ms"}
    assert "observation/joint_position" in error["error"]
    assert "Traceback" not in error["error"]


class Tuned(Backend):
    """Answers rows that count up, with statistics of its own."""

    info = BackendInfo(name="tuned")

    def infer(self, request):
        columns = np.linspace(-0.9, 0.9, request.action_space.width)
        rows = columns + 0.01 * np.arange(request.n_rows)[:, None]
        own = (np.full(len(columns), -1.0), np.full(len(columns), 1.0))
        return ActionChunk(rows, request.action_space, request.embodiment, quantiles=own)


@pytest.mark.parametrize("domain", ["bridge", "umi", "fractal", "robomind-franka-dual", "libero"])
def test_openpi_s_broker_plays_a_chunk_to_its_end(serve, peer: str, domain: str):
    server = serve(Tuned(), "midtrain", domain)
    rows = [
        json.loads(line) for line in run(peer, "openpi_broker.py", server.port, 12).splitlines()
    ]
    columns = np.linspace(-0.9, 0.9, len(rows[0]))
    expected = columns + 0.01 * np.array([*range(12), 0])[:, None]
    np.testing.assert_allclose(rows, expected, atol=1e-6)


@pytest.mark.slow
def test_openpi_client_s_default_pings_survive_a_minute_of_inference(spawn, peer: str):
    _, port = spawn("-m", "helpers.slow_server", "62", "spin")
    out = run(peer, "openpi_calls.py", port)
    assert len(out.splitlines()) == 4


@pytest.fixture
def their_server(peer: str):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [peer, str(SCRIPTS / "openpi_serves.py"), str(port)], stderr=subprocess.PIPE
    )

    def listening() -> bool:
        assert process.poll() is None, process.communicate()[1]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    until(listening, 30)
    yield process, port
    process.kill()
    process.communicate()


def asked(prompt: str, **more):
    from dataclasses import replace

    return replace(request(**more), instruction=prompt)


def test_openpi_server_is_asked(their_server):
    process, port = their_server
    service = ServiceBackend(PolicyClient(ClientConfig("127.0.0.1", port)))
    for value in (0.1, 0.2):
        chunk = service.infer(asked("pick", q_rad=np.full(7, value), gripper=0.2))
        assert chunk.action.shape == (8, 8)
        np.testing.assert_allclose(chunk.action[:, :7], value, atol=1e-6)
        np.testing.assert_allclose(chunk.action[:, 7], 0.2, atol=1e-6)
        assert chunk.timing["server_infer_ms"] >= 0
    for prompt, error, says in (
        ("fail", ServiceRefusedError, "ValueError: no such luck"),
        ("nan", ServiceChunkError, "nan"),
        ("narrow", ServiceChunkError, "7"),
    ):
        with pytest.raises(error, match=says) as caught:
            service.infer(asked(prompt))
        assert "Traceback" not in str(caught.value)
        assert service.infer(asked("pick")).action.shape == (8, 8)  # dialled again
    started = time.monotonic()
    service.infer(asked("slow"))
    assert time.monotonic() - started >= 3
    process.kill()
    # as the kernel is quick or slow to tell
    with pytest.raises((ServiceClosedError, ServiceUnavailableError)):
        service.infer(asked("slow"))
    service.close()
