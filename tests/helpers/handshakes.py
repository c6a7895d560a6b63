"""Sockets that shake hands with a server in one instant, or say nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

HANDSHAKE = (
    "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


def raw(port: int, said: bytes | str = b"", source: str = "127.0.0.1") -> socket.socket:
    """Return a socket that has connected from ``source`` and said something."""
    one = socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(source, 0))
    one.sendall(said.encode() if isinstance(said, str) else said)
    return one


def status(one: socket.socket) -> int:
    """Return the status of the response that a socket is sent."""
    said = b""
    while b"\r\n" not in said and (more := one.recv(1)):
        said += more
    return int(said.split(b" ")[1])


@contextmanager
def together(port: int, headers: Sequence[Mapping[str, str]]) -> Iterator[list[int]]:
    """Hold a WebSocket for each of ``headers``; their requests end when all have begun. The value
    is what they were answered.
    """
    with ExitStack() as held:
        sockets = [
            held.enter_context(
                raw(port, HANDSHAKE + "".join(f"{name}: {own[name]}\r\n" for name in own))
            )
            for own in headers
        ]
        for one in sockets:
            one.sendall(b"\r\n")
        yield [status(one) for one in sockets]


def still_open(sockets: Sequence[socket.socket]) -> list[bool]:
    """Return which of the sockets their peer, which sends nothing, has not closed."""

    def is_open(one: socket.socket) -> bool:
        one.setblocking(False)
        try:
            return one.recv(1) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    return [is_open(one) for one in sockets]
