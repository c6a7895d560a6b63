"""HTTP requests with a body, on the port of the WebSockets.

websockets reads GET requests without a body and no others. The first bytes of a connection therefore decide who reads it:
``POST`` is read here, anything else by websockets. A request's head and body are bounded in size and time, one request ends
its connection, and nothing of a body is read for a client that may not send one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import cast

from websockets.datastructures import Headers

_POST = b"POST "
_HEAD_BYTES, _HEADERS = 16 * 2**10, 64
_LINGER_S = 1.0
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\t]*)")
JSON: Mapping[str, str] = MappingProxyType({"Content-Type": "application/json", "Cache-Control": "no-store"})


@dataclass(frozen=True)
class Reply:
    """A response: its status, text and headers beside ``Content-Length`` and ``Connection: close``."""

    status: HTTPStatus
    text: str
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "text/plain; charset=utf-8"})

    def encoded(self) -> bytes:
        """Return it as it is sent."""
        body = self.text.encode()
        headers = {**self.headers, "Content-Length": str(len(body)), "Connection": "close"}
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("ascii") + body


@dataclass(frozen=True)
class Head:
    """Path (without a query), headers and length of the body of a POST request."""

    path: str
    headers: Headers
    length: int


Screen = Callable[[Head], Reply | None]
"""Refuses a request before its body is read."""
Respond = Callable[[Head, bytes, "asyncio.Future[bytes]", str], Awaitable[Reply | None]]
"""Answers a request; the future is done when the client leaves, the text is its address."""


class Door(asyncio.Protocol):
    """Hand a connection to ``post`` if it begins with a POST request, else to the protocol that ``websocket`` returns.

    Args:
        websocket: Makes the other protocol.
        post: Reads and answers a POST request.
        wait_s: Time for the first bytes; then the connection is aborted.
    """

    def __init__(
        self,
        websocket: Callable[[], asyncio.Protocol],
        post: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        wait_s: float,
    ):
        self._websocket, self._post, self._wait_s = websocket, post, wait_s
        self._first = b""
        self.transport: asyncio.Transport | None = None  # none until TLS' handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(self._wait_s, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        self._first += data
        if len(self._first) < len(_POST) and _POST.startswith(self._first):
            return
        self._timer.cancel()
        assert self.transport is not None
        if self._first.startswith(_POST):
            protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(_HEAD_BYTES), self._post)
        else:
            protocol = self._websocket()
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        protocol.data_received(self._first)

    def close(self) -> None:
        """Abort the connection if nobody reads it yet."""
        if self.transport is not None and self.transport.get_protocol() is self:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()


async def serve_post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, screen: Screen, respond: Respond, wait_s: float, max_bytes: int
) -> None:
    """Read a POST request, answer it, and close the connection.

    Args:
        reader, writer: The connection.
        screen, respond: As above.
        wait_s: Time in which the request must have arrived, and in which the client must have read the reply.
        max_bytes: Largest body that is read.
    """
    left: asyncio.Future[bytes] | None = None
    try:
        try:
            async with asyncio.timeout(wait_s):
                head, body, reply = await _request(reader, writer, screen, max_bytes)
        except TimeoutError:
            head, body, reply = None, None, Reply(HTTPStatus.REQUEST_TIMEOUT, f"No whole request came within {wait_s:g} s.\n")
        if head is not None and body is not None:
            left = asyncio.ensure_future(reader.read(1))
            reply = await respond(head, body, left, str(writer.get_extra_info("peername")[0]))
        if reply is not None:
            async with asyncio.timeout(wait_s):
                writer.write(reply.encoded())
                await writer.drain()
            if body is None:
                await _linger(reader, writer)
    except (OSError, EOFError):  # TimeoutError is an OSError: the client left, or does not read
        writer.transport.abort()
    except asyncio.CancelledError:  # the server stops
        writer.transport.abort()
        raise
    finally:
        if left is not None:
            left.cancel()
        writer.close()


async def _request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, screen: Screen, max_bytes: int
) -> tuple[Head | None, bytes | None, Reply | None]:
    """The head and the body of a request, or the reply that refuses it."""
    try:
        head = _parsed(await reader.readuntil(b"\r\n\r\n"))
    except asyncio.LimitOverrunError:
        head = Reply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"The headers have more than {_HEAD_BYTES} bytes.\n")
    if isinstance(head, Reply):
        return None, None, head
    if (refusal := screen(head)) is not None:
        return head, None, refusal
    if head.length > max_bytes:
        text = f"The body has {head.length} bytes; at most {max_bytes} are read.\n"
        return head, None, Reply(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
    if head.headers.get("Expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return head, await reader.readexactly(head.length), None


def _parsed(raw: bytes) -> Head | Reply:
    """The head of a POST request, or the reply that refuses it."""
    first, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words, fields = first.split(" "), [_HEADER.fullmatch(line) for line in lines]
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0") or None in fields or len(fields) > _HEADERS:
        return Reply(HTTPStatus.BAD_REQUEST, "This is not an HTTP/1.1 request.\n")
    headers = Headers([(found[1], found[2].rstrip()) for found in fields if found is not None])
    lengths = headers.get_all("Content-Length")
    if "Transfer-Encoding" in headers or len(lengths) != 1:
        return Reply(HTTPStatus.LENGTH_REQUIRED, "Send the body with one Content-Length, and in no transfer coding.\n")
    if not re.fullmatch(r"[0-9]{1,12}", lengths[0]) or len(headers.get_all("Expect")) > 1:
        return Reply(HTTPStatus.BAD_REQUEST, "Content-Length must be a number.\n")
    return Head(words[1].partition("?")[0], headers, int(lengths[0]))


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Discard what a refused client still sends; closing at once would reset the connection before it reads the reply."""
    if writer.can_write_eof():
        writer.write_eof()
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while await reader.read(_HEAD_BYTES):
                pass
