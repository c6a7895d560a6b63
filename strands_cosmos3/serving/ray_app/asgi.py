"""A server's front as an ASGI application, as Ray Serve's proxies call it.

The proxy reads frames, of at most 16 MiB, and HTTP. Of a client that sends faster than it is
answered, a few requests wait here; then it is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from websockets.datastructures import Headers

from strands_cosmos3.fleet.cluster import WORKER_FAILURES
from strands_cosmos3.serving.front import SERVICE_RESTART, Front
from strands_cosmos3.serving.http_server import Reply, RequestHead, too_slow

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_FRAMES_WAITING = 2
_POLICY_VIOLATION, _TOO_BIG = 1008, 1009


class AsgiConnection:
    """A connection behind an ASGI server, as it is counted.

    Attributes:
        address: The client's address, or that of the proxy before the fleet.
        left: Done when nothing is to be sent to the client any more.
    """

    def __init__(self, scope: Scope):
        self.address = str((scope.get("client") or ("",))[0])
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def is_closing(self) -> bool:
        """Whether the client has left, or is cut off."""
        return self.left.done()

    def abort(self) -> None:
        """Count the client as one that has left."""
        if not self.left.done():
            self.left.set_result(None)

    close_unread = abort


class AsgiWebSocket(AsgiConnection):
    """A client's WebSocket behind an ASGI server."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_bytes: int):
        super().__init__(scope)
        self._receive, self._send, self._max_bytes = receive, send, max_bytes
        self._frames: asyncio.Queue[bytes | str | None] = asyncio.Queue()
        self._ending = (SERVICE_RESTART, "the server is to end: connect again")
        self._is_open = True
        self._reader: asyncio.Task[None]

    async def accept(self) -> None:
        """Complete the handshake."""
        await self._send({"type": "websocket.accept"})
        self._reader = asyncio.create_task(self._read())

    async def __aiter__(self) -> AsyncIterator[bytes | str]:
        while (frame := await self._frames.get()) is not None:
            yield frame

    async def send(self, message: bytes | str) -> None:
        """Send a frame, unless the client has left."""
        if self._is_open:
            kind = "text" if isinstance(message, str) else "bytes"
            await self._send({"type": "websocket.send", kind: message})

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close the connection, unless that is done or the client has left."""
        if self._is_open:
            self._is_open = False
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def wait_closed(self) -> None:
        """Wait until the client has left, or is cut off."""
        await asyncio.shield(self.left)

    def abort(self) -> None:
        """Send an idle client away."""
        self.end("another client has the place of this one, which was idle")

    def end(self, reason: str) -> None:
        """Read no more requests; the client is to connect again."""
        self._ending = SERVICE_RESTART, reason
        self._frames.put_nowait(None)

    async def finish(self) -> None:
        """Close the connection with the code that its end has."""
        self._reader.cancel()
        await self.close(*self._ending)

    async def _read(self) -> None:
        try:
            while (message := await self._receive())["type"] == "websocket.receive":
                text = message.get("text")
                frame: bytes | str = message["bytes"] if text is None else text
                if len(frame) > self._max_bytes:
                    self._ending = _TOO_BIG, f"a message may have {self._max_bytes} bytes"
                    return
                if self._frames.qsize() >= _FRAMES_WAITING:
                    self._ending = _POLICY_VIOLATION, "wait for the answer before you ask again"
                    return
                self._frames.put_nowait(frame)
            self._is_open = False
        except WORKER_FAILURES:  # the proxy, and the client with it
            self._is_open = False
        finally:
            super().abort()
            self._frames.put_nowait(None)


class FrontApp:
    """The ASGI application.

    Args:
        front: What it says to clients.
    """

    def __init__(self, front: Front):
        self._front = front
        self._sockets: set[AsgiWebSocket] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "websocket":
                await self._websocket(scope, receive, send)
            case "http":
                await self._http(scope, receive, send)
            case _:
                await _lifespan(receive, send)

    def end_sockets(self) -> None:
        """Let requests under way be answered, then close every socket: connect again (1012)."""
        self._front.stopping.set()
        for socket in self._sockets:
            socket.end("the server is to end: connect again")

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        front, head = self._front, _head("GET", scope)
        await receive()  # that the client connects
        socket = AsgiWebSocket(scope, receive, send, front.policy.limits.max_bytes)
        place = front.page(head) or front.admit(socket, head)
        if isinstance(place, Reply):
            await _reply(send, place, "websocket.http.response")
            return
        self._sockets.add(socket)
        try:
            await socket.accept()
            await front.converse(socket, head.path, head.headers, place)
            await socket.finish()
        finally:
            self._sockets.discard(socket)
            front.places.give_back(place)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        front, head = self._front, _head(scope["method"], scope)
        connection = AsgiConnection(scope)
        reply = front.check_http_request(head)
        place = reply or front.take_place(connection, head)
        if isinstance(place, Reply):
            await _reply(send, place, "http.response", head.method)
            return
        try:
            body = await self._body(head, receive)
            if isinstance(body, bytes):
                leaves = asyncio.create_task(_disconnected(receive, connection))
                reply = await front.post(connection.address, head, body, connection.left)
                leaves.cancel()
            else:
                reply = body
            if reply is not None:
                await _reply(send, reply, "http.response", head.method)
        finally:
            front.places.give_back(place)

    async def _body(self, head: RequestHead, receive: Receive) -> bytes | Reply | None:
        """The body of a request, the reply that refuses it, or None if the client leaves."""
        wait_s = self._front.config.body_s
        length = head.body_length(self._front.policy.limits.max_bytes)
        if isinstance(length, Reply):
            return length
        body, more = b"", True
        try:
            async with asyncio.timeout(wait_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body, more = body + message.get("body", b""), message.get("more_body", False)
        except TimeoutError:
            return too_slow(wait_s)
        return body


def _head(method: str, scope: Scope) -> RequestHead:
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return RequestHead(method, path or "/", Headers(pairs))


async def _reply(send: Send, reply: Reply, kind: str, method: str = "") -> None:
    body = reply.text.encode()
    headers = {"Content-Type": "text/plain; charset=utf-8", **reply.headers}
    headers["Content-Length"] = str(len(body))
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": f"{kind}.start", "status": reply.status.value, "headers": pairs})
    await send({"type": f"{kind}.body", "body": b"" if method == "HEAD" else body})


async def _disconnected(receive: Receive, connection: AsgiConnection) -> None:
    with suppress(*WORKER_FAILURES):
        while (await receive())["type"] != "http.disconnect":
            pass
    connection.abort()


async def _lifespan(receive: Receive, send: Send) -> None:
    for moment in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{moment}.complete"})
