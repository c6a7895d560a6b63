"""What a policy server says to its clients, whatever carries the frames: who is admitted, pages,
refusals, and one exchange after the other. No sockets here.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from http import HTTPStatus
from typing import Any, Protocol

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed

from strands_cosmos3.serving.admission import Client, Priority
from strands_cosmos3.serving.codec import encode
from strands_cosmos3.serving.http_server import JSON, Reply, RequestHead
from strands_cosmos3.serving.metrics import Metrics
from strands_cosmos3.serving.places import Connection, Place, Places
from strands_cosmos3.serving.routes import is_json
from strands_cosmos3.serving.served import Answer, Message, ServedPolicy, Session
from strands_cosmos3.serving.server_config import ServerConfig
from strands_cosmos3.serving.wire import (
    DEADLINE_HEADER,
    PICTURES_HEADER,
    PRIORITY_HEADER,
    RETRY_AFTER,
    VLLM_PATH,
    offered_pictures,
    read_wait_s,
)

SERVICE_RESTART = 1012
"""Closes a connection whose last request, if there is one, was not inferred for: connect again."""
_INTERNAL_ERROR = 1011
_TRY_LATER = 1013


class WebSocket(Protocol):
    """A client's WebSocket, as :class:`Front` uses it; websockets' ServerConnection is one."""

    def __aiter__(self) -> AsyncIterator[bytes | str]: ...
    async def send(self, message: bytes | str) -> None: ...
    async def close(self, code: int = 1000, reason: str = "") -> None: ...
    async def wait_closed(self) -> None: ...


class Answering(Protocol):
    """Who answers a front's requests, here or elsewhere."""

    def answered(
        self,
        client: Client,
        left: asyncio.Future[Any],
        messages: Sequence[Message],
        wait_s: float,
    ) -> AbstractAsyncContextManager[list[Answer] | None]: ...
    def busy_s(self) -> Sequence[float]: ...


class Front:
    """A server's front.

    Args:
        policy: The served policy; of it only what it says of itself is asked.
        config: Options.
        metrics: Counters.
        places: Who is connected.
        queue: Answers requests.
        stopping: Set when nothing new is accepted.
    """

    def __init__(
        self,
        policy: ServedPolicy,
        config: ServerConfig,
        metrics: Metrics,
        places: Places,
        queue: Answering,
        stopping: asyncio.Event,
    ):
        self.policy = policy
        self.config = config
        self.metrics = metrics
        self.stopping = stopping
        self.places = places
        self._queue = queue
        self._tokens = config.tokens

    def page(self, head: RequestHead) -> Reply | None:
        """Return the reply to a GET request for the server's state, or from a stranger."""
        if head.path == "/healthz":
            return Reply(HTTPStatus.OK, "OK\n")
        if head.path == "/readyz":
            why_not = self._why_not_ready()
            return Reply(
                HTTPStatus.SERVICE_UNAVAILABLE if why_not else HTTPStatus.OK, f"{why_not or 'OK'}\n"
            )
        if (refusal := self._authenticate(head)) is not None:
            return refusal
        if head.path == "/metrics":
            content = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
            return Reply(
                HTTPStatus.OK, self.metrics.text(max(self._queue.busy_s(), default=0.0)), content
            )
        return None

    def _info(self, head: RequestHead) -> Reply:
        """The reply to any other plain GET request."""
        if self.policy.dialect is None or head.path not in self.policy.dialect.pages:
            return self._websockets_only()
        if "Origin" in head.headers:
            return self._no_web_pages()
        return Reply(HTTPStatus.OK, json.dumps(self.policy.page(head.path)), JSON)

    def _authenticate(self, head: RequestHead) -> Reply | None:
        if self._tokens is None or self._tokens.client_of(head.headers) is not None:
            return None
        text = "Authorization: Api-Key <token> is required.\n"
        return self._refused(HTTPStatus.UNAUTHORIZED, text, {"WWW-Authenticate": "Api-Key"})

    def _websockets_only(self) -> Reply:
        return self._refused(
            HTTPStatus.UPGRADE_REQUIRED,
            "This is a WebSocket policy server.\n",
            {"Upgrade": "websocket"},
        )

    def _no_web_pages(self) -> Reply:
        return self._refused(HTTPStatus.FORBIDDEN, "Web pages may not use this server.\n")

    def take_place(self, connection: Connection, head: RequestHead) -> Place | Reply:
        """Give a client a place, or return the reply that refuses it."""
        asked = head.headers.get_all(PRIORITY_HEADER)
        if asked and asked not in [[name] for name in Priority]:
            text = f"{PRIORITY_HEADER} is {' or '.join(Priority)}.\n"
            return self._refused(HTTPStatus.BAD_REQUEST, text)
        place = self.places.take(connection, self._owner(head.headers))
        if isinstance(place, Place):
            return place
        return self._refused(HTTPStatus.SERVICE_UNAVAILABLE, place)

    def _refused(self, status: HTTPStatus, text: str, headers: Mapping[str, str] = {}) -> Reply:
        self.metrics.handshakes_refused[str(status.value)] += 1
        return Reply(status, text, headers)

    def admit(self, connection: Connection, head: RequestHead) -> Place | Reply:
        """Give a WebSocket a place, unless a web page opens it: none must move a robot."""
        return (
            self._no_web_pages() if "Origin" in head.headers else self.take_place(connection, head)
        )

    def check_http_request(self, head: RequestHead) -> Reply | None:
        """Answer a request without a body; None for a dialect's request whose body may be read."""
        match head.method:
            case "GET" | "HEAD":
                return self.page(head) or self._info(head)
            case "POST":
                return self._check_post(head)
            case _:
                allowed = {"Allow": "GET, HEAD, POST"}
                return self._refused(
                    HTTPStatus.METHOD_NOT_ALLOWED, "There are GET, HEAD and POST.\n", allowed
                )

    def _check_post(self, head: RequestHead) -> Reply | None:
        if (refusal := self._authenticate(head)) is not None:
            return refusal
        if "Origin" in head.headers:
            return self._no_web_pages()
        if self.policy.dialect is None:
            return self._websockets_only()
        if head.path not in self.policy.dialect.routes:
            paths = " and ".join(self.policy.dialect.paths)
            return self._refused(HTTPStatus.NOT_FOUND, f"There are {paths}.\n")
        if not is_json(
            head.headers.get_all("Content-Type"), head.headers.get_all("Content-Encoding")
        ):
            text = "Content-Type must be application/json, in UTF-8 and not compressed.\n"
            return self._refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text)
        if self.stopping.is_set():
            return self._refused(HTTPStatus.SERVICE_UNAVAILABLE, "The server is stopping.\n")
        return None

    async def post(
        self, address: str, head: RequestHead, body: bytes, left: asyncio.Future[None]
    ) -> Reply | None:
        """Answer a request of the HTTP dialect; None if the client leaves first."""
        assert self.policy.dialect is not None
        arrived = time.monotonic()
        route = self.policy.dialect.routes[head.path]
        self.metrics.received_bytes += len(body)
        try:
            items = await asyncio.to_thread(route.read_items, body)
            stated = ", ".join(head.headers.get_all(DEADLINE_HEADER))
            wait_s = read_wait_s(float(stated) if stated else None)
        except ValueError as error:  # InputError is one
            self.metrics.requests["error"] += 1
            return Reply(HTTPStatus.BAD_REQUEST, json.dumps({"error": str(error)}), JSON)
        client = self._client(head.headers, address)
        messages = [Message(item, Session(), arrived) for item in items]
        async with self._queue.answered(client, left, messages, wait_s) as answers:
            if answers is None:
                return None
            failed = next((answer for answer in answers if answer.failed), None)
            if refused := next((one for one in answers if one.retry_after_s), None):
                return _try_later(refused)
            if failed is None:
                text = route.join_replies([str(answer.frame) for answer in answers])
            else:
                text = route.encode_error(str(failed.frame))
            self.metrics.sent_bytes += len(text)
            return Reply(HTTPStatus.OK, text, JSON)

    def _why_not_ready(self) -> str:
        """Why a new request would not be answered in time, or empty."""
        if self.stopping.is_set():
            return "stopping"
        busy_s = min(self._queue.busy_s(), default=0.0)
        if busy_s <= self.config.queue_s:
            return ""
        return f"the running inference has taken {busy_s:.0f} s"

    async def converse(self, client: WebSocket, path: str, headers: Headers, place: Place) -> None:
        """Send metadata, then answer each request until either side closes.

        ``path``, without a query, and ``headers`` are of the client's handshake.
        """
        pictures = offered_pictures(headers.get_all(PICTURES_HEADER))
        session = Session(is_vllm=path == VLLM_PATH, pictures=pictures)
        asker = self._client(headers, place.address)
        left = asyncio.ensure_future(client.wait_closed())
        try:
            with suppress(ConnectionClosed):
                await client.send(encode(self.policy.metadata(session)))
                place.idle_since_s = time.monotonic()
                async for frame in client:
                    arrived = time.monotonic()
                    place.idle_since_s = math.inf
                    if self.stopping.is_set() or not await self._exchange(
                        client, asker, left, frame, session
                    ):
                        break
                    place.idle_since_s = time.monotonic()
                    session.previous_total_ms = (time.monotonic() - arrived) * 1e3
                    frame = b""  # its memory is for the next one
        finally:
            left.cancel()

    async def _exchange(
        self,
        client: WebSocket,
        asker: Client,
        left: asyncio.Future[None],
        frame: bytes | str,
        session: Session,
    ) -> bool:
        """Answer one request; return whether the connection stays open. ``left`` is done when
        the client leaves.
        """
        self.metrics.received_bytes += len(frame)
        message = Message(frame, session, time.monotonic())
        wait_s = self.policy.wait_s(frame)
        async with self._queue.answered(asker, left, [message], wait_s) as answers:
            if answers is None:
                return False
            (answer,) = answers
            if answer.outcome == "moved":
                await client.close(SERVICE_RESTART, str(answer.frame))
                return False
            frame = answer.sent(session)
            await client.send(frame)
            self.metrics.sent_bytes += len(frame)
        if answer.failed and not session.is_vllm:
            code = _INTERNAL_ERROR if answer.outcome == "error" else _TRY_LATER
            await client.close(code, "see the preceding text frame")
            return False
        return True

    def _owner(self, headers: Headers) -> str:
        """Whose token a request has, empty without tokens."""
        return "" if self._tokens is None else self._tokens.client_of(headers) or ""

    def _client(self, headers: Headers, address: str) -> Client:
        """Who asks."""
        owner = self._owner(headers)
        return Client(owner or address, self.config.priority_of(owner, headers))


def _try_later(refused: Answer) -> Reply:
    """The reply to an HTTP request that would be answered too late."""
    said = {"error": refused.frame, RETRY_AFTER: math.ceil(refused.retry_after_s * 1e3)}
    after = {"Retry-After": str(math.ceil(refused.retry_after_s))}
    return Reply(HTTPStatus.SERVICE_UNAVAILABLE, json.dumps(said), {**JSON, **after})
