"""A server's front as an ASGI application, as Ray Serve's proxies call it.

The proxy reads frames, of at most 16 MiB, and HTTP. Of a client that sends more than it waits
answers for, a few requests are kept; then it is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketState
from websockets.datastructures import Headers

from strands_cosmos3.fleet.cluster import WORKER_FAILURES
from strands_cosmos3.serving.front import SERVICE_RESTART, Front
from strands_cosmos3.serving.http_server import Reply, RequestHead, too_slow
from strands_cosmos3.serving.places import Place

_FRAMES_WAITING = 2
_POLICY_VIOLATION, _TOO_BIG = 1008, 1009
_END = "the server is to end: connect again"
_ANY_PATH = "/{path:path}"


class SocketClient:
    """A client's WebSocket behind an ASGI server.

    Attributes:
        address: The client's address, or that of the proxy before the fleet.
    """

    def __init__(self, socket: WebSocket, max_bytes: int):
        self.address = _address(socket)
        self._socket = socket
        self._max_bytes = max_bytes
        self._frames: asyncio.Queue[bytes | str | None] = asyncio.Queue()
        self._ending = SERVICE_RESTART, _END
        self._reading: asyncio.Task[None]

    async def accept(self) -> None:
        """Complete the handshake."""
        await self._socket.accept()
        self._reading = asyncio.create_task(self._read())

    async def __aiter__(self) -> AsyncIterator[bytes | str]:
        while (frame := await self._frames.get()) is not None:
            yield frame

    async def send(self, message: bytes | str) -> None:
        """Send a frame, unless the client has left."""
        if self._is_open:
            kind = "text" if isinstance(message, str) else "bytes"
            await self._socket.send({"type": "websocket.send", kind: message})

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close the connection, unless that is done or the client has left."""
        self._reading.cancel()
        if self._is_open:
            await self._socket.close(code, reason)

    async def wait_closed(self) -> None:
        """Wait until nothing more is read of the client: it has left, or is cut off."""
        await asyncio.shield(self._reading)

    def abort(self) -> None:
        """Send the client away, which is idle."""
        self.end("another client has the place of this one, which was idle")

    def end(self, reason: str = _END) -> None:
        """Read no more requests; the client is to connect again."""
        self._ending = SERVICE_RESTART, reason
        self._frames.put_nowait(None)

    async def finish(self) -> None:
        """Close the connection with the code that its end has."""
        await self.close(*self._ending)

    @property
    def _is_open(self) -> bool:
        states = self._socket.client_state, self._socket.application_state
        return states == (WebSocketState.CONNECTED,) * 2

    async def _read(self) -> None:
        with suppress(*WORKER_FAILURES):  # the proxy is gone, and the client with it
            while (message := await self._socket.receive())["type"] == "websocket.receive":
                text = message.get("text")
                frame: bytes | str = message["bytes"] if text is None else text
                if len(frame) > self._max_bytes:
                    self._ending = _TOO_BIG, f"a message may have {self._max_bytes} bytes"
                    break
                if self._frames.qsize() >= _FRAMES_WAITING:
                    self._ending = _POLICY_VIOLATION, "wait for the answer before you ask again"
                    break
                self._frames.put_nowait(frame)
        self._frames.put_nowait(None)


@dataclass(eq=False)
class _HttpClient:
    """A client that waits for the response to its request."""

    address: str

    def abort(self) -> None:
        """Do nothing: only idle clients are sent away."""


class FrontApp:
    """The application.

    Args:
        front: What it says to clients.

    Attributes:
        asgi: What an ASGI server calls.
    """

    def __init__(self, front: Front):
        self._front = front
        self._clients: set[SocketClient] = set()
        pages = Route(_ANY_PATH, self._page, methods=["GET", "HEAD", "POST"])
        self.asgi = Starlette(routes=[WebSocketRoute(_ANY_PATH, self._websocket), pages])

    def end_sockets(self) -> None:
        """Let requests under way be answered, then close every socket: connect again (1012)."""
        self._front.stopping.set()
        for client in self._clients:
            client.end()

    async def _websocket(self, socket: WebSocket) -> None:
        front, head = self._front, _head("GET", socket)
        client = SocketClient(socket, front.policy.limits.max_bytes)
        place = front.page(head) or front.admit(client, head)
        if isinstance(place, Reply):
            await socket.send_denial_response(_response(place))
            return
        self._clients.add(client)
        try:
            await client.accept()
            await front.converse(client, head.path, head.headers, place)
            await client.finish()
        finally:
            self._clients.discard(client)
            front.places.give_back(place)

    async def _page(self, request: Request) -> Response:
        front, head = self._front, _head(request.method, request)
        client = _HttpClient(_address(request))
        place = front.check_http_request(head) or front.take_place(client, head)
        if isinstance(place, Reply):
            return _response(place)
        try:
            return _response(await self._post(request, head, place))
        finally:
            front.places.give_back(place)

    async def _post(self, request: Request, head: RequestHead, place: Place) -> Reply:
        front, wait_s = self._front, self._front.config.body_s
        length = head.body_length(front.policy.limits.max_bytes)
        if isinstance(length, Reply):
            return length
        try:
            async with asyncio.timeout(wait_s):
                body = await request.body()
        except (TimeoutError, ClientDisconnect):
            return too_slow(wait_s)
        # Ray Serve cancels this call when the client leaves
        stays = asyncio.get_running_loop().create_future()
        reply = await front.post(place.address, head, body, stays)
        assert reply is not None
        return reply


def _address(connection: HTTPConnection) -> str:
    return "" if connection.client is None else connection.client.host


def _head(method: str, connection: HTTPConnection) -> RequestHead:
    path = connection.scope["path"].removeprefix(connection.scope.get("root_path", ""))
    return RequestHead(method, path or "/", Headers(connection.headers.items()))


def _response(reply: Reply) -> Response:
    headers = {"Content-Type": "text/plain; charset=utf-8", **reply.headers}
    return Response(reply.text, reply.status.value, headers)
