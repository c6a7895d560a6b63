"""Frames that nobody asked for: before, beside and after replies, and in floods, from either
side.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from websockets.frames import Frame, Opcode
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as serve_raw

from helpers.serving import LIBERO, Several, libero_request, request, until
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.errors import ServiceUnreadableError
from strands_cosmos3.serving import libero
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.codec import decode, encode

OLD = encode({"action": np.full((4, 8), 0.9, np.float32)})
HANDSHAKE = (
    "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
PINGS = Frame(Opcode.PING, b"").serialize(mask=True) * 5000


def frame(data: bytes, fin: bool = True) -> bytes:
    return Frame(Opcode.BINARY, data, fin=fin).serialize(mask=False)


def answer(asked: bytes) -> bytes:
    """A chunk of the joint angles that were sent, without an echo of the request's number."""
    q = np.append(decode(asked)["observation/joint_position"], 0.0)
    return frame(encode({"action": np.tile(q, (4, 1)).astype(np.float32)}))


@contextmanager
def server(greeting: bytes, surplus: bytes) -> Iterator[int]:
    """A policy server that sends ``greeting``, and ``surplus`` in one packet with the first
    reply of each connection.
    """

    def handle(connection: ServerConnection) -> None:
        connection.socket.sendall(greeting)
        with suppress(Exception):
            connection.socket.sendall(answer(connection.recv()) + surplus)
            while True:
                connection.socket.sendall(answer(connection.recv()))

    with serve_raw(handle, "127.0.0.1", 0, compression=None, max_size=None) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield listening.socket.getsockname()[1]
        listening.shutdown()
        thread.join()


def service(port: int) -> ServiceBackend:
    return ServiceBackend(PolicyClient(ClientConfig("127.0.0.1", port, read_s=20.0)))


def test_a_chunk_beside_the_metadata_answers_nothing():
    with server(frame(encode({})) + frame(OLD), b"") as port:
        own = service(port)
        with pytest.raises(ServiceUnreadableError, match="before it was asked"):
            own.infer(request(q_rad=np.full(7, 0.1)))
        own.close()


@pytest.mark.parametrize("cut", [0, 1, 2, 50, "fragment"])
def test_a_surplus_reply_or_a_part_of_it_answers_nothing(cut):
    surplus = frame(OLD, fin=False) if cut == "fragment" else frame(OLD)[: cut or None]
    with server(frame(encode({})), surplus) as port:
        own = service(port)
        for value in (0.1, 0.2, 0.3):
            np.testing.assert_allclose(
                own.infer(request(q_rad=np.full(7, value))).action[:, :7], value, atol=1e-6
            )
        assert own.counters["dials"] == 3  # each time anew, for the server does it each time
        own.close()


def test_a_server_that_sends_pings_without_end_is_given_up():
    pings = Frame(Opcode.PING, b"").serialize(mask=False) * 5000
    with server(frame(encode({})) + pings, b"") as port:
        own = service(port)
        with pytest.raises(ServiceUnreadableError, match="broke the WebSocket protocol"):
            own.infer(request())
        own.close()


def read_all(connection: socket.socket) -> bytes:
    with suppress(OSError):
        return b"".join(iter(lambda: connection.recv(2**16), b""))
    return b""


def test_nothing_of_a_stranger_is_read_after_its_request(serve):
    port = serve(token="s3cret-s3cret-s3cret").port
    with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
        stranger.sendall((HANDSHAKE + "\r\n").encode() + PINGS[:3000])
        said = read_all(stranger)
    assert said.startswith(b"HTTP/1.1 401 ")
    assert b"\x8a\x00" not in said  # no pong


def test_a_client_that_floods_with_pings_is_cut_off(serve):
    port = serve().port
    with socket.create_connection(("127.0.0.1", port), timeout=20) as flooding:
        flooding.sendall((HANDSHAKE + "\r\n").encode())
        with suppress(OSError):
            flooding.sendall(PINGS)
        assert read_all(flooding).count(b"\x8a\x00") <= 2000
    own = service(port)
    assert own.infer(request()).action.shape == (4, 8)
    own.close()


BAD_HEADS: dict[str, Callable[[], str]] = {
    "a name of escape codes": lambda: HANDSHAKE + "\x1b[2J\x1b[31mEVIL\x07: x\r\n\r\n",
    "a name with a space": lambda: HANDSHAKE + " a: b\r\n\r\n",
    "a hundred headers": lambda: HANDSHAKE + "a: b\r\n" * 100 + "\r\n",
    "a line of 8,193 bytes": lambda: HANDSHAKE + f"a: {'b' * (8193 - 5)}\r\n\r\n",
    "20 kB": lambda: HANDSHAKE + f"a: {'b' * 20_000}\r\n\r\n",
    "a body": lambda: HANDSHAKE + "Content-Length: 5\r\n\r\nhello",
    "no key": lambda: HANDSHAKE.replace("Sec-WebSocket-Key", "X") + "\r\n",
    "another version": lambda: HANDSHAKE.replace("13", "12") + "\r\n",
    "no upgrade of the connection": lambda: (
        HANDSHAKE.replace("Connection: Upgrade\r\n", "") + "\r\n"
    ),
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_a_bad_handshake_gets_a_status_and_no_line_in_the_log(serve, caplog, name: str):
    port = serve().port
    with (
        caplog.at_level(logging.WARNING),
        socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
    ):
        connection.sendall(BAD_HEADS[name]().encode())
        said = read_all(connection)
    assert said[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 426", b"HTTP/1.1 431"), said[:60]
    assert not caplog.records


def test_a_client_that_is_gone_before_its_handshake_is_answered_leaves_no_line_in_the_log(
    serve, caplog
):
    server = serve()
    for _ in range(20):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        connection.sendall((HANDSHAKE + "\r\n").encode())
        # close() resets
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    own = service(server.port)
    assert own.infer(request()).action.shape == (4, 8)
    own.close()
    assert not caplog.records


POST = (
    "POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    "{}\r\n\r\n{}"
)
WHOLE = json.dumps(libero.encode_request(libero_request()))
PARTS = {
    "half a head": "POST /pr",
    "half a body": POST.format(1000, "{"),
    "a waiting request": POST.format(len(WHOLE), WHOLE),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_server_that_stops_says_so_to_http_clients(serve, caplog, part: str):
    gate = threading.Event()
    server = serve(
        Several(lambda asked: asked.embodiment is LIBERO and gate.wait(20)),
        http="libero",
        grace_s=0.2,
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(PARTS[part].encode())
        until(lambda: server._requests)
        until(lambda: server.metrics.clients or part == "half a head")
        server.stop()
        said = read_all(connection)
        gate.set()
    assert said.startswith(b"HTTP/1.1 503 ")
    assert not [record for record in caplog.records if record.name == "asyncio"]
