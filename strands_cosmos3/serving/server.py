"""The policy server: WebSockets on an event loop, inference on one worker thread."""

from __future__ import annotations

import asyncio
import errno
import hmac
import http
import ipaddress
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request as HttpRequest
from websockets.http11 import Response

from strands_cosmos3.checks import positive, whole_number
from strands_cosmos3.errors import BackendError, ConfigError, Cosmos3Error
from strands_cosmos3.serving.codec import encode
from strands_cosmos3.serving.metrics import Metrics
from strands_cosmos3.serving.served import Answer, ServedPolicy, Session
from strands_cosmos3.serving.worker import Worker

logger = logging.getLogger(__name__)

_INTERNAL_ERROR, _GOING_AWAY = 1011, 1001
_FRAMES_WAITING = 2
_PING_S, _PONG_S, _CLOSE_S = 20.0, 60.0, 2.0


@dataclass(frozen=True)
class ServerConfig:
    """Options of a server.

    Args:
        host: Interface to listen on; any but loopback requires a token.
        port: Port; 0 picks a free one.
        token: Token that clients must send as ``Authorization: Api-Key <token>`` or ``Bearer <token>``; None disables it.
        grace_s: Time that a shutdown waits for the running inference.
        max_clients: Maximum number of connections; further clients get HTTP 503.

    Raises:
        ConfigError: The interface is not loopback and there is no token, or a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    grace_s: float = 30.0
    max_clients: int = 128

    def __post_init__(self) -> None:
        whole_number(self.port, "port", 0, 65535)
        whole_number(self.max_clients, "max_clients", 1)
        positive(self.grace_s, "grace_s")
        if self.token is not None and (not self.token or not self.token.isascii() or any(c.isspace() for c in self.token)):
            raise ConfigError("a token must be ASCII without spaces and not be empty.")
        if self.token is None and not _is_loopback(self.host):
            raise ConfigError(
                f"host {self.host!r} can be reached from other machines, and any client of this server can move the robot. "
                "Set a token (serve --token-file FILE), or listen on 127.0.0.1 and forward the port with ssh -L."
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class PolicyServer:
    """Serves a policy until it is stopped.

    ``run()`` blocks and handles SIGTERM and Ctrl-C. As a context manager, the server runs on its own thread.

    Attributes:
        port: The port that the server listens on.
        metrics: Its counters.
    """

    def __init__(self, policy: ServedPolicy, config: ServerConfig | None = None):
        self.policy = policy
        self.config = config or ServerConfig()
        self.metrics = Metrics()
        self.port = self.config.port
        self._expected = [f"{scheme} {self.config.token}".encode() for scheme in ("Api-Key", "Bearer")]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._worker: Worker

    def run(self, ready: Callable[[PolicyServer], None] | None = None) -> None:
        """Warm up, listen and serve; return after SIGTERM or Ctrl-C. A second Ctrl-C does not wait for the inference.

        ``ready`` is called when the server listens.

        Raises:
            Cosmos3Error: The warm-up failed, or the address cannot be used.
        """
        asyncio.run(self._serve(ready, signals=True))

    def stop(self) -> None:
        """Stop the server, from any thread, after the running inference."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._signalled)

    def __enter__(self) -> PolicyServer:
        ready, failed = threading.Event(), list[Cosmos3Error]()

        def body() -> None:
            try:
                asyncio.run(self._serve(lambda _: ready.set(), signals=False))
            except Cosmos3Error as error:
                failed.append(error)
            finally:
                ready.set()

        self._thread = threading.Thread(target=body, name="policy-server", daemon=True)
        self._thread.start()
        ready.wait()
        if failed:
            raise failed[0]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _signalled(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _serve(self, ready: Callable[[PolicyServer], None] | None, signals: bool) -> None:
        self._loop = asyncio.get_running_loop()
        if signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self._signalled)
        self._worker = Worker("inference")
        try:
            await self._warm_up()
            if self._stop.is_set():
                return
            server = await self._listen()
            self.port = server.sockets[0].getsockname()[1]
            if ready is not None:
                ready(self)
            await self._stop.wait()
            await self._drain(server)
        finally:
            self._worker.close(timeout_s=0.1)

    async def _warm_up(self) -> None:
        """Run one inference on the worker before listening."""
        started = time.monotonic()
        warm = asyncio.wrap_future(self._worker.submit(self.policy.warm_up))
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({warm, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if warm.done() and isinstance(error := warm.exception(), Cosmos3Error):
            raise BackendError(f"the warm-up of the backend failed, so it is not served: {error}") from error
        logger.info("warmed up in %.2f s", time.monotonic() - started)

    async def _listen(self) -> Server:
        try:
            return await serve(
                self._handle,
                self.config.host,
                self.config.port,
                process_request=self._screen,
                origins=[None],  # refuses browsers, which send one: a web page must not move a robot
                compression=None,
                max_size=self.policy.limits.max_bytes,
                max_queue=_FRAMES_WAITING,
                ping_interval=_PING_S,
                ping_timeout=_PONG_S,
                close_timeout=_CLOSE_S,
                logger=logging.getLogger(f"{__name__}.websockets"),
            )
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            what = "is in use; choose another --port" if taken else f"cannot be used: {error.strerror}"
            raise ConfigError(f"{self.config.host}:{self.config.port} {what}.") from None

    async def _drain(self, server: Server) -> None:
        """Accept nothing new, wait up to ``grace_s`` for running requests, then close all connections."""
        server.close(close_connections=False)
        deadline = time.monotonic() + self.config.grace_s
        while self.metrics.in_flight and time.monotonic() < deadline and not self._hurry.is_set():
            await asyncio.sleep(0.02)
        await asyncio.gather(*(client.close(_GOING_AWAY, "the server is stopping") for client in list(server.connections)))
        await server.wait_closed()

    def _screen(self, connection: ServerConnection, request: HttpRequest) -> Response | None:
        """Answer plain HTTP requests, and refuse clients that may not connect."""
        path = request.path.partition("?")[0]
        if path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if self.config.token is not None and not self._is_authorized(request.headers):
            response = self._refuse(connection, http.HTTPStatus.UNAUTHORIZED, "Authorization: Api-Key <token> is required.\n")
            response.headers["WWW-Authenticate"] = "Api-Key"
            return response
        if path == "/metrics":
            response = connection.respond(http.HTTPStatus.OK, self.metrics.text())
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = "text/plain; version=0.0.4; charset=utf-8"
            return response
        if "Upgrade" not in request.headers:
            response = self._refuse(connection, http.HTTPStatus.UPGRADE_REQUIRED, "This is a WebSocket policy server.\n")
            response.headers["Upgrade"] = "websocket"
            return response
        if self.metrics.clients >= self.config.max_clients:
            text = "The maximum number of clients is connected.\n"
            return self._refuse(connection, http.HTTPStatus.SERVICE_UNAVAILABLE, text)
        return None

    def _refuse(self, connection: ServerConnection, status: http.HTTPStatus, text: str) -> Response:
        self.metrics.handshakes_refused[str(status.value)] += 1
        return connection.respond(status, text)

    def _is_authorized(self, headers: Headers) -> bool:
        shown = headers.get_all("Authorization")
        given = shown[0].encode("utf-8", "replace") if len(shown) == 1 else b""
        matches = [hmac.compare_digest(given, expected) for expected in self._expected]  # compare all, in constant time
        return any(matches)

    async def _handle(self, client: ServerConnection) -> None:
        """Handle a connection: send metadata, then answer each request until either side closes."""
        session = Session()
        self.metrics.clients += 1
        self.metrics.connections += 1
        try:
            await client.send(encode({}))
            async for frame in client:
                arrived = time.monotonic()
                if self._stop.is_set() or not await self._exchange(client, frame, session):
                    break
                session.previous_total_ms = (time.monotonic() - arrived) * 1e3
        except ConnectionClosed:
            pass
        finally:
            self.metrics.clients -= 1

    async def _exchange(self, client: ServerConnection, frame: bytes | str, session: Session) -> bool:
        """Answer one request; return whether the connection stays open."""
        self.metrics.received_bytes += len(frame)
        self.metrics.in_flight += 1
        try:
            answer = await self._ask(client, frame, session)
            self.metrics.requests["abandoned" if answer is None else answer.outcome] += 1
            if answer is None:
                return False
            await client.send(answer.frame)
            self.metrics.sent_bytes += len(answer.frame)
        finally:
            self.metrics.in_flight -= 1
        if answer.outcome == "ok":
            self.metrics.observe(answer.infer_s)
        if answer.outcome == "error":
            await client.close(_INTERNAL_ERROR, "see the preceding text frame")
        return answer.outcome != "error"

    async def _ask(self, client: ServerConnection, frame: bytes | str, session: Session) -> Answer | None:
        """Return the worker's answer, or None if the client leaves first; a queued job is then dropped."""
        future = asyncio.wrap_future(self._worker.submit(lambda: self.policy.answer(frame, session)))
        left = asyncio.ensure_future(client.wait_closed())
        try:
            await asyncio.wait({future, left}, return_when=asyncio.FIRST_COMPLETED)
            return future.result() if future.done() else None
        finally:
            left.cancel()
            future.cancel()
