"""Attacks over a socket: each ends in a typed refusal within 2 s, others are served meanwhile, and
memory stays within 200 MB.

The slow form attacks ``strands-cosmos3 serve`` with the bundled policy, and kills its inference
process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgpack
import numpy as np
import pytest
from test_server import dial, get
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from helpers.environments import TESTS
from helpers.serving import libero_request, observation
from helpers.transcripts import exchange_http
from strands_cosmos3.serving import libero
from strands_cosmos3.serving.codec import decode, encode

DEADLINE_S, BUSY_S, GROWTH = 2.0, 20.0, 200 << 20
PLACES = 24
STUB = ["-m", "helpers.slow_server", "0", "look"]
BUNDLED = [
    "-m",
    "strands_cosmos3",
    "serve",
    "--port",
    "0",
    "--policy-frames",
    "1",
    "--replicas",
    "2",
    "--max-clients",
    str(PLACES),
]
PICTURE = np.random.default_rng(0).integers(0, 256, (540, 640, 3), dtype=np.uint8)
NAN = {"observation/eef_pos": np.full(3, np.nan), "observation/eef_quat": np.full(4, np.nan)}
POSE = {
    "observation/eef_pos": np.array([0.4, 0.0, 0.4]),
    "observation/eef_quat": np.array([1.0, 0.0, 0.0, 0.0]),
}
GOOD = encode(observation(**POSE, **{"observation/image": PICTURE}))


def family(pid: int) -> list[int]:
    """A process and all its descendants (Linux)."""
    found = [pid]
    for member in found:
        for children in Path(f"/proc/{member}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def array(dtype: str, shape: list[int], data: bytes) -> bytes:
    """A request with a picture as openpi writes arrays, whatever its header claims."""
    claimed = {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}
    return msgpack.packb({"prompt": "x", "observation/image": claimed})


def with_picture(height: int, width: int) -> bytes:
    return encode(
        observation(**POSE, **{"observation/image": np.zeros((height, width, 3), np.uint8)})
    )


# name -> the frame, and what its refusal says
FRAMES: dict[str, tuple[Callable[[], bytes | str], str]] = {
    "a picture of 1 x 4,000,000": (lambda: with_picture(1, 4_000_000), "(Shape|Input)Error.*4096"),
    "a picture of 4,097 x 1": (lambda: with_picture(4097, 1), "(Shape|Input)Error.*4096"),
    "a prompt of 240 kB": (
        lambda: encode(observation(**POSE) | {"prompt": "x" * 240_000}),
        "(Shape|Input)Error.*4096",
    ),
    "a shape of 10^12 pixels": (lambda: array("<u1", [10**6, 10**6, 3], b"abc"), "WireFormatError"),
    "a negative shape": (lambda: array("<u1", [-1, 3], b"abc"), "WireFormatError"),
    "an array of objects": (
        lambda: array("|O", [1], b"\x80\x04N."),
        "WireFormatError|ObservationError",
    ),
    "a thousand lists in each other": (lambda: b"\x91" * 1000 + b"\xc0", "WireFormatError"),
    "a map that claims 4 billion keys": (lambda: b"\xdf\xff\xff\xff\xff", "WireFormatError"),
    "a million small values": (lambda: msgpack.packb([0] * 1_000_000), "WireFormatError"),
    "a pose and joint angles that are no numbers": (
        lambda: encode(observation([np.nan] * 7) | NAN),
        "NonFiniteError",
    ),
    "16 MiB and a byte": (lambda: bytes((16 << 20) + 1), "closed with 1009"),
    "text": (lambda: "\x1b[31mhello\n", "WireFormatError"),
    "noise": (lambda: np.random.default_rng(1).bytes(100_000), "WireFormatError"),
}


class Server:
    """A server's process and those it started, and a client that goes on all the time."""

    def __init__(self, command: list[str]):
        # the default tests run on busy machines
        self.deadline_s = DEADLINE_S if command is BUNDLED else BUSY_S
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, text=True, cwd=TESTS
        )
        found = re.search(r"(\d+)\D*$|127\.0\.0\.1:(\d+)", self.process.stdout.readline())
        self.port = int(found[2] or found[1])
        self.served = self.failed = 0
        self.longest_s = 0.0
        self.client = threading.Thread(target=self.go_on)
        self.stopped = threading.Event()
        with dial(self.port) as client:
            for _ in range(6):
                client.send(GOOD)
                client.recv(timeout=60)
        self.idle = self.resident()
        self.client.start()

    def go_on(self) -> None:
        while not self.stopped.is_set():
            with dial(self.port) as client:
                answered = True
                while answered and not self.stopped.wait(0.02):
                    started = time.monotonic()
                    client.send(GOOD)
                    answered = isinstance(client.recv(timeout=60), bytes)
                    self.served += answered
                    self.failed += not answered
                    self.longest_s = max(self.longest_s, time.monotonic() - started)

    def resident(self) -> int:
        return (
            sum(
                int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                for pid in family(self.process.pid)
            )
            * 4096
        )

    def close(self) -> None:
        self.stopped.set()
        self.client.join(30)
        self.process.terminate()
        assert self.process.wait(60) == 0


@pytest.fixture(scope="module", params=["stub", pytest.param("bundled", marks=pytest.mark.slow)])
def server(request) -> Iterator[Server]:
    running = Server(STUB if request.param == "stub" else BUNDLED)
    yield running
    running.close()


@pytest.fixture
def unharmed(server: Server) -> Iterator[None]:
    """The other client is served while the test runs, without an error, and memory does not
    grow.
    """
    served, server.longest_s, peak, done = server.served, 0.0, [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], server.resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    deadline = time.monotonic() + 5
    while server.served < served + 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    done.set()
    watcher.join()
    assert server.served >= served + 3
    assert server.failed == 0
    assert server.longest_s < server.deadline_s
    assert peak[0] - server.idle < GROWTH
    assert get(server.port, "/healthz") == (200, "OK\n")


def refusal(client: ClientConnection, frame: bytes | str, deadline_s: float) -> str:
    """The text that a frame is answered with, in time; the status if the connection is closed
    without an answer.
    """
    started = time.monotonic()
    try:
        client.send(frame)
        said = client.recv(timeout=deadline_s)
    except ConnectionClosed as closed:
        said = f"closed with {closed.rcvd.code if closed.rcvd else None}"
    assert time.monotonic() - started < deadline_s
    assert isinstance(said, str)
    return said


@pytest.mark.parametrize("attack", FRAMES)
@pytest.mark.usefixtures("unharmed")
def test_a_hostile_frame_is_refused_in_time(server: Server, attack: str):
    make, says = FRAMES[attack]
    frame = make()
    with dial(server.port) as client:
        said = refusal(client, frame, server.deadline_s)
        assert re.search(says, said), said
        assert said.isprintable()
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=server.deadline_s)


def item(**change: object) -> dict[str, object]:
    return libero.encode_request(libero_request()) | change


BOMB = libero._to_png(np.zeros((700, 700, 3), np.uint8))
HUGE = libero._to_png(np.zeros((3000, 3000), np.bool_))
SPACES = " " * (12 << 20)
# name -> the body, and the status and text of its refusal
BODIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "16 pictures of 700 x 700": (
        lambda: json.dumps({"items": [item(image=BOMB)] * 16}).encode(),
        "200.*Error",
    ),
    "16 pictures to be enlarged": (
        lambda: json.dumps({"items": [item(image_size=500)] * 16}).encode(),
        "200.*Error",
    ),
    "a picture of 3000 x 3000": (
        lambda: json.dumps(item(image=HUGE)).encode(),
        "200.*InputError.*pixels",
    ),
    "12 MiB of white space as base64": (
        lambda: json.dumps(item(image=SPACES)).encode(),
        "200.*InputError.*PNG",
    ),
    "12 MiB of prompt": (lambda: json.dumps(item(prompt=SPACES)).encode(), "200.*InputError.*4096"),
    "12 MiB of domain": (
        lambda: json.dumps(item(domain_name=SPACES)).encode(),
        "200.*InputError.*libero",
    ),
    "a million lists": (lambda: b"[" * 1_000_000, "400.*65536 values"),
    "a million values": (lambda: b'{"items": [' + b"0," * 1_000_000 + b"0]}", "400.*65536 values"),
    "16 MiB and a byte": (lambda: bytes((16 << 20) + 1), "413.*16777216"),
    "noise": (
        lambda: np.random.default_rng(1).bytes(1_000_000),
        "400.*WireFormatError|400.*JSON|400.*values",
    ),
}


@pytest.mark.parametrize("server", ["stub"], indirect=True)
@pytest.mark.parametrize("attack", BODIES)
@pytest.mark.usefixtures("unharmed")
def test_a_hostile_body_is_refused_in_time(server: Server, attack: str):
    make, says = BODIES[attack]
    body, started = make(), time.monotonic()
    path = "/predict_batch" if attack.startswith("16 pictures") else "/predict"
    head = (
        f"POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(body)}\r\n\r\n"
    )
    reply = exchange_http(server.port, head.encode() + body).decode()
    assert time.monotonic() - started < server.deadline_s
    assert re.search(says, reply, re.DOTALL), reply
    assert len(reply) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("server", ["bundled"], indirect=True)
@pytest.mark.usefixtures("unharmed")
def test_a_short_prompt_of_words_unknown_to_the_policy_is_refused_in_time(server: Server):
    with dial(server.port) as client:
        frame = encode(decode(GOOD) | {"prompt": "\U0001f980 " * 2000})
        assert "InstructionError" in refusal(client, frame, server.deadline_s)


@pytest.mark.usefixtures("unharmed")
def test_who_sends_without_reading_gets_one_turn_at_a_time(server: Server):
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(0.2)
        raw.sendall(
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        frame = b"\x82\xff" + len(GOOD).to_bytes(8, "big") + b"\0\0\0\0" + GOOD
        with suppress(TimeoutError):  # the server takes no more than it has answered
            for _ in range(60):
                raw.sendall(frame)


@pytest.mark.usefixtures("unharmed")
def test_silent_sockets_and_half_handshakes_keep_nobody_out(server: Server):
    with ExitStack() as held:
        for said in (b"", b"GET / HTTP/1.1\r\nUpgrade: websocket\r\n", b"\x16\x03\x01" * 99) * 30:
            one = held.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=2)
            )
            one.sendall(said)
        started = time.monotonic()
        with dial(server.port) as client:
            client.send(GOOD)
            assert isinstance(client.recv(timeout=server.deadline_s), bytes)
        assert time.monotonic() - started < server.deadline_s


@pytest.mark.slow
@pytest.mark.parametrize("server", ["bundled"], indirect=True)
def test_idle_clients_lose_their_places_after_ten_seconds(server: Server):
    with ExitStack() as held:
        with suppress(InvalidStatus):  # all places are taken
            for _ in range(PLACES + 1):
                held.enter_context(dial(server.port))
        started, refused = time.monotonic(), 0
        while True:
            try:
                with dial(server.port):
                    break
            except InvalidStatus as full:
                refused += full.response.status_code == 503
                time.sleep(0.2)
        assert refused > 0
        assert time.monotonic() - started < 12
    assert server.failed == 0


@pytest.mark.slow
@pytest.mark.parametrize("server", ["bundled"], indirect=True)
def test_killing_the_bundled_policy_s_inference_costs_one_request(server: Server):
    with ExitStack() as held:
        others = [held.enter_context(connect(f"ws://127.0.0.1:{server.port}")) for _ in range(3)]
        for one in others:
            decode(one.recv(timeout=5))
        before, failed, started = server.served, server.failed, time.monotonic()
        ranks = inference_processes(server)
        assert len(ranks) == 2
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)  # so that none answers before it is killed
        others[0].send(GOOD)
        time.sleep(0.3)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        said = others[0].recv(timeout=DEADLINE_S)
        assert isinstance(said, str)
        assert said.startswith("RankLostError"), said
        for one in others[1:]:  # these connections stay, and new processes answer
            one.send(GOOD)
            assert isinstance(one.recv(timeout=60), bytes)
        assert set(inference_processes(server)).isdisjoint(ranks)
        assert time.monotonic() - started < 60
    assert server.served + server.failed > before + failed
    server.failed = 0  # the steady client's request was under way, too


def inference_processes(server: Server) -> list[int]:
    def is_rank(pid: int) -> bool:
        return b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()

    return [pid for pid in family(server.process.pid) if is_rank(pid)]
