"""HTTP requests, on the port of the WebSockets.

websockets reads GET requests without a body and no others. The head of a request therefore decides
who reads it: one that asks for a WebSocket is handed to websockets, any other is answered here.
Head and body are bounded in size and time, one request ends its connection, and nothing of a body
is read for a client that may not send one.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import cast

from websockets.datastructures import Headers

_GET = b"GET "
_END = b"\r\n\r\n"
_HEAD_BYTES = 16 * 2**10
_LINE_BYTES = 8 * 2**10
_HEADERS = 64
_LINGER_S = 1.0
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\t]*)")
JSON: Mapping[str, str] = {
    "Content-Type": "application/json",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Reply:
    """A response: its status, text and headers beside ``Content-Length`` and ``Connection:
    close``. Without another ``Content-Type`` it is plain text.
    """

    status: HTTPStatus
    text: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def encoded(self, method: str = "") -> bytes:
        """Return it as it is sent; to a HEAD request without the text."""
        body = self.text.encode()
        headers = {
            "Content-Type": "text/plain; charset=utf-8",
            **self.headers,
            "Content-Length": str(len(body)),
            "Connection": "close",
        }
        lines = [
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode("ascii") + (b"" if method == "HEAD" else body)


@dataclass(frozen=True)
class RequestHead:
    """Method, path (without a query) and headers of a request."""

    method: str
    path: str
    headers: Headers

    @property
    def wants_websocket(self) -> bool:
        """Whether it asks for a WebSocket, and has no body."""
        upgrade = ",".join(self.headers.get_all("Upgrade")).strip().lower()
        empty = "Content-Length" not in self.headers and "Transfer-Encoding" not in self.headers
        return (self.method, upgrade, empty) == ("GET", "websocket", True)

    def body_length(self, most: int) -> int | Reply:
        """Return the length of the body, or the reply that refuses it. ``most`` bytes are read."""
        lengths = self.headers.get_all("Content-Length")
        if "Transfer-Encoding" in self.headers or len(lengths) != 1:
            return Reply(
                HTTPStatus.LENGTH_REQUIRED,
                "Send the body with one Content-Length, and in no transfer coding.\n",
            )
        if not re.fullmatch(r"[0-9]{1,12}", lengths[0]) or len(self.headers.get_all("Expect")) > 1:
            return Reply(HTTPStatus.BAD_REQUEST, "Content-Length must be a number.\n")
        if int(lengths[0]) > most:
            text = f"The body has {int(lengths[0])} bytes; at most {most} are read.\n"
            return Reply(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        return int(lengths[0])


_NO_HEAD = RequestHead("", "", Headers())
CheckRequest = Callable[[RequestHead], Reply | None]
"""Answers a request without its body, or refuses it; None: read the body."""
Respond = Callable[[RequestHead, bytes, "asyncio.Future[None]"], Awaitable[Reply | None]]
"""Answers a request with a body; the future is done when the client leaves."""


class HttpProtocol(asyncio.Protocol):
    """Hand a connection to the protocol that ``websocket`` returns if its request asks for one,
    else to ``http``.

    Args:
        arrived: Told of the connection before anything of it is read.
        websocket: Makes the other protocol, or refuses the client, before anything that follows
            the request is read.
        http: Reads and answers any other request.
        wait_s: Time for TLS' handshake, and again for the head of a GET request; then the
            connection is closed.
        tls: Certificate and key; TLS is spoken here, so that a connection can be closed before its
            handshake has ended.

    Attributes:
        address: The client's address.
    """

    def __init__(
        self,
        arrived: Callable[[HttpProtocol], None],
        websocket: Callable[[HttpProtocol, RequestHead], asyncio.Protocol | Reply],
        http: Callable[[HttpProtocol, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        wait_s: float,
        tls: ssl.SSLContext | None,
    ):
        self._arrived = arrived
        self._websocket = websocket
        self._http = http
        self._wait_s = wait_s
        self._tls = tls
        self._first = b""
        self.address = ""
        self._socket: asyncio.Transport
        self._transport: asyncio.Transport | None = None  # none until TLS' handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)
        self.address = str(transport.get_extra_info("peername", [""])[0])
        self._arrived(self)
        if self._tls is None:
            self._begin(self._socket)
        else:
            self._socket.pause_reading()
            self._handshake = asyncio.ensure_future(self._start_tls(self._tls))

    async def _start_tls(self, tls: ssl.SSLContext) -> None:
        with suppress(OSError):  # no TLS, too slow, or gone
            transport = await asyncio.get_running_loop().start_tls(
                self._socket,
                self,
                tls,
                server_side=True,
                ssl_handshake_timeout=self._wait_s,
                ssl_shutdown_timeout=_LINGER_S,
            )
            if transport is not None and not self.is_closing():
                self._begin(transport)

    def _begin(self, transport: asyncio.Transport) -> None:
        """Read the request, of which a part may have come with TLS' last bytes."""
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._give_up)
        self.data_received(b"")

    def data_received(self, data: bytes) -> None:
        self._first += data
        if self._transport is None or self._transport.is_closing():
            return
        size = self._first.find(_END) + len(_END)
        is_get = self._first[: len(_GET)] == _GET[: len(self._first)]
        if is_get and size < len(_END) and len(self._first) < _HEAD_BYTES:
            return
        self._timer.cancel()
        whole = is_get and len(_END) <= size <= _HEAD_BYTES
        head = _parsed(self._first[:size]) if whole else None
        if head is None or not head.wants_websocket:
            reader = asyncio.StreamReader(_HEAD_BYTES)
            protocol = asyncio.StreamReaderProtocol(reader, partial(self._http, self))
        else:
            protocol = self._websocket(self, head)
        if isinstance(protocol, Reply):
            self._end(protocol)
            return
        first, self._first = self._first, b""
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(first)

    def is_closing(self) -> bool:
        """Whether the connection is closed or being closed."""
        return self._socket.is_closing()

    def abort(self) -> None:
        """Close the connection at once, whatever it is used for."""
        self._socket.abort()

    def close_unread(self) -> None:
        """Abort the connection if nobody reads it yet."""
        if self._transport is None or self._transport.get_protocol() is self:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._timer.cancel()

    def _give_up(self) -> None:
        self._end(too_slow(self._wait_s) if self._first else None)

    def _end(self, reply: Reply | None) -> None:
        assert self._transport is not None
        if reply is not None:
            self._transport.write(reply.encoded())
        self._transport.close()


async def serve_http(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    check_request: CheckRequest,
    respond: Respond,
    wait_s: float,
    max_bytes: int,
) -> None:
    """Read a request, answer it, and close the connection.

    A client that closes its sending side before the answer counts as one that left.

    Args:
        reader, writer: The connection.
        check_request, respond: As above.
        wait_s: Time in which the request must have arrived, and in which the client must have read
            the reply.
        max_bytes: Largest body that is read.
    """
    left: asyncio.Future[None] | None = None
    head = _NO_HEAD
    body = None
    try:
        try:
            async with asyncio.timeout(wait_s):
                head, body, reply = await _request(reader, writer, check_request, max_bytes)
        except TimeoutError:
            reply = too_slow(wait_s)
        if body is not None:
            left = asyncio.ensure_future(_drained(reader))
            reply = await respond(head, body, left)
        if reply is not None:
            async with asyncio.timeout(wait_s):
                writer.write(reply.encoded(head.method))
                await writer.drain()
            if body is None and head.method not in ("GET", "HEAD"):
                # closing at once would reset the connection before a refused client, which still
                # sends, reads the reply
                if writer.can_write_eof():
                    writer.write_eof()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LINGER_S):
                        await _drained(reader)
    except (OSError, EOFError):  # TimeoutError is an OSError: the client left, or does not read
        writer.transport.abort()
    except asyncio.CancelledError:
        # the server stops; a task that ends as cancelled is logged by asyncio
        writer.write(Reply(HTTPStatus.SERVICE_UNAVAILABLE, "The server is stopping.\n").encoded())
    finally:
        if left is not None:
            left.cancel()
        writer.close()


async def _request(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    check_request: CheckRequest,
    max_bytes: int,
) -> tuple[RequestHead, bytes | None, Reply | None]:
    """The head and the body of a request, or the reply to one whose body is not read."""
    try:
        head = _parsed(await reader.readuntil(_END))
    except asyncio.LimitOverrunError:
        text = f"The headers have more than {_HEAD_BYTES} bytes.\n"
        return _NO_HEAD, None, Reply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)
    if head is None:
        return _NO_HEAD, None, Reply(HTTPStatus.BAD_REQUEST, "This is not an HTTP/1.1 request.\n")
    if (reply := check_request(head)) is not None:
        return head, None, reply
    if isinstance(length := head.body_length(max_bytes), Reply):
        return head, None, length
    if head.headers.get("Expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return head, await reader.readexactly(length), None


def _parsed(raw: bytes) -> RequestHead | None:
    """The head of a request; None if it is none."""
    first, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = first.split(" ")
    fields = [_HEADER.fullmatch(line) for line in lines]
    if (
        len(words) != 3
        or words[2] not in ("HTTP/1.1", "HTTP/1.0")
        or None in fields
        or len(fields) > _HEADERS
        # websockets reads no longer ones
        or max(map(len, [first, *lines])) > _LINE_BYTES - len("\r\n")
    ):
        return None
    headers = Headers([(match[1], match[2].rstrip()) for match in fields if match is not None])
    return RequestHead(words[0], words[1].partition("?")[0], headers)


def too_slow(wait_s: float) -> Reply:
    """Return the reply to a client whose request is not complete in time."""
    return Reply(HTTPStatus.REQUEST_TIMEOUT, f"No whole request came within {wait_s:g} s.\n")


async def _drained(reader: asyncio.StreamReader) -> None:
    """Discard what a client sends after its request, e.g. another one, until it leaves."""
    while await reader.read(_HEAD_BYTES):
        pass
