"""HTTP requests, on the port of the WebSockets.

websockets reads GET requests without a body and no others. The head of a request therefore decides
who reads it: one that asks for a WebSocket is handed to websockets, any other is answered here.
RequestHead and body are bounded in size and time, one request ends its connection, and nothing of a
body is read for a client that may not send one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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
    """Method, path (without a query) and headers of a request, and its client's address."""

    method: str
    path: str
    headers: Headers
    address: str = ""

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
        websocket: Makes the other protocol.
        check_handshake: Refuses a WebSocket, before anything that follows the request is read.
        http: Reads and answers any other request.
        wait_s: Time for the head of a GET request; then the connection is closed.
    """

    def __init__(
        self,
        websocket: Callable[[], asyncio.Protocol],
        check_handshake: CheckRequest,
        http: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        wait_s: float,
    ):
        self._websocket = websocket
        self._check_handshake = check_handshake
        self._http = http
        self._wait_s = wait_s
        self._first = b""
        self.transport: asyncio.Transport | None = None  # none until TLS' handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._give_up)

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        if self.transport.is_closing():  # TLS still hands over what came
            return
        self._first += data
        size = self._first.find(_END) + len(_END)
        is_get = self._first[: len(_GET)] == _GET[: len(self._first)]
        if is_get and size < len(_END) and len(self._first) < _HEAD_BYTES:
            return
        self._timer.cancel()
        whole = is_get and len(_END) <= size <= _HEAD_BYTES
        head = _parsed(self._first[:size], self.transport) if whole else None
        if head is None or not head.wants_websocket:
            reader = asyncio.StreamReader(_HEAD_BYTES)
            protocol = asyncio.StreamReaderProtocol(reader, self._http)
        elif (refusal := self._check_handshake(head)) is None:
            protocol = self._websocket()
        else:
            self._end(refusal)
            return
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        protocol.data_received(self._first)

    def close(self) -> None:
        """Abort the connection if nobody reads it yet."""
        if self.transport is not None and self.transport.get_protocol() is self:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()

    def _give_up(self) -> None:
        self._end(_too_slow(self._wait_s) if self._first else None)

    def _end(self, reply: Reply | None) -> None:
        assert self.transport is not None
        if reply is not None:
            self.transport.write(reply.encoded())
        self.transport.close()


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
            reply = _too_slow(wait_s)
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
        head = _parsed(await reader.readuntil(_END), writer.transport)
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


def _parsed(raw: bytes, transport: asyncio.BaseTransport) -> RequestHead | None:
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
    address = str(transport.get_extra_info("peername", [""])[0])
    return RequestHead(words[0], words[1].partition("?")[0], headers, address)


def _too_slow(wait_s: float) -> Reply:
    return Reply(HTTPStatus.REQUEST_TIMEOUT, f"No whole request came within {wait_s:g} s.\n")


async def _drained(reader: asyncio.StreamReader) -> None:
    """Discard what a client sends after its request, e.g. another one, until it leaves."""
    while await reader.read(_HEAD_BYTES):
        pass
