"""The policy server: WebSockets on an event loop, inference on worker threads."""

from __future__ import annotations

import asyncio
import errno
import http
import ipaddress
import logging
import signal
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request as HttpRequest
from websockets.http11 import Response

from strands_cosmos3.checks import positive, whole_number
from strands_cosmos3.errors import BackendError, ConfigError, Cosmos3Error
from strands_cosmos3.serving.access import Tokens
from strands_cosmos3.serving.codec import encode
from strands_cosmos3.serving.metrics import Metrics
from strands_cosmos3.serving.served import Answer, Message, ServedPolicy, Session
from strands_cosmos3.serving.wire import SERVED_SPACE
from strands_cosmos3.serving.worker import Workers

logger = logging.getLogger(__name__)

_INTERNAL_ERROR, _GOING_AWAY, _TRY_LATER = 1011, 1001, 1013
_FRAMES_WAITING = 2
_PING_S, _PONG_S, _CLOSE_S = 20.0, 60.0, 2.0


@dataclass(frozen=True)
class ServerConfig:
    """Options of a server.

    Args:
        host: Interface to listen on; any but loopback requires a token.
        port: Port; 0 picks a free one.
        token: Token that clients must send as ``Authorization: Api-Key <token>`` or ``Bearer <token>``, or a token for each
            client by name; None is no authentication.
        grace_s: Time that a shutdown waits for the running inference.
        max_clients: Maximum number of connections. A further client takes the place of one that has been idle for
            ``idle_s``, or gets HTTP 503.
        idle_s: Time without a request after which a connection may lose its place.
        max_batch: Maximum number of waiting requests that share one inference.
        queue_s: Requests that have waited longer are refused without an inference: a late chunk is useless.
        tls_cert, tls_key: Certificate chain and private key (PEM) for ``wss://``; both or neither.

    Raises:
        ConfigError: The interface is not loopback and there is no token, or a value is invalid.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | Mapping[str, str] | None = field(default=None, repr=False)
    grace_s: float = 30.0
    max_clients: int = 128
    idle_s: float = 10.0
    queue_s: float = 30.0
    max_batch: int = 8
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        whole_number(self.port, "port", 0, 65535)
        whole_number(self.max_clients, "max_clients", 1)
        whole_number(self.max_batch, "max_batch", 1)
        for name in ("grace_s", "idle_s", "queue_s"):
            positive(getattr(self, name), name)
        _ = self.tokens
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both a certificate and its key (--tls-cert and --tls-key).")
        if self.token is None and not _is_loopback(self.host):
            raise ConfigError(
                f"host {self.host!r} can be reached from other machines, and any client of this server can move the robot. "
                "Set a token (serve --token-file FILE), or listen on 127.0.0.1 and run this on the "
                f"client's machine: ssh -L {self.port}:localhost:{self.port} HOST."
            )

    @property
    def tokens(self) -> Tokens | None:
        """The clients' tokens. Raises ConfigError if one is invalid."""
        if self.token is None:
            return None
        return Tokens({"any client": self.token} if isinstance(self.token, str) else self.token)

    def tls(self) -> ssl.SSLContext | None:
        """Load certificate and key, if there are any. Raises ConfigError if they cannot be used."""
        if self.tls_cert is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except OSError as error:  # ssl.SSLError is one
            pair = f"{str(self.tls_cert)!r} and {str(self.tls_key)!r}"
            raise ConfigError(f"{pair} are not a certificate and its key in PEM ({error}).") from None
        return context


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class PolicyServer:
    """Serves a policy until it is stopped.

    ``run()`` blocks and handles SIGTERM and Ctrl-C. As a context manager, the server runs on its own thread.

    Args:
        policy: The policy, or replicas of it with a backend each, which answer requests at the same time.
        config: Options.

    Attributes:
        port: The port that the server listens on.
        metrics: Its counters.
    """

    def __init__(self, policy: ServedPolicy | Sequence[ServedPolicy], config: ServerConfig | None = None):
        self._policies = (policy,) if isinstance(policy, ServedPolicy) else tuple(policy)
        if not self._policies:
            raise ConfigError("a server needs a policy, or several replicas of one; got an empty list.")
        self.config = config or ServerConfig()
        self.metrics = Metrics(self._policies[0].about | {"replicas": str(len(self._policies))})
        self.port = self.config.port
        self._tokens = self.config.tokens
        self._tls = self.config.tls()
        self._idle_since: dict[ServerConnection, float] = {}  # connections without a request under way
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._workers: Workers[ServedPolicy, Message, Answer]

    def run(self, ready: Callable[[PolicyServer], None] | None = None) -> None:
        """Warm up, listen and serve; return after SIGTERM or Ctrl-C. A second Ctrl-C does not wait for the inference.

        ``ready`` is called when the server listens.

        Raises:
            Cosmos3Error: The warm-up failed, or the address cannot be used.
        """
        asyncio.run(self._serve(ready, signals=True))

    @property
    def busy_s(self) -> float:
        """How long the oldest running inference has taken so far; 0 if there is none. After ``run()``, it was abandoned."""
        return max(self._busy_s(), default=0.0)

    def _busy_s(self) -> list[float]:
        """Ages of the running inferences."""
        now = time.monotonic()
        return [now - since for since in self._workers.busy_since if since is not None]

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
        self._workers = Workers(self._policies, ServedPolicy.warm_up, self._answers, self.config.max_batch)
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
            self._workers.close(timeout_s=0.1)

    async def _warm_up(self) -> None:
        """Let every worker run one inference before listening."""
        started = time.monotonic()
        warm = asyncio.gather(*map(asyncio.wrap_future, self._workers.started))
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({warm, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if warm.done() and (error := warm.exception()) is not None:
            said = str(error) if isinstance(error, Cosmos3Error) else repr(error)
            raise BackendError(f"the warm-up of the backend failed, so it is not served: {said}") from error
        logger.info("warmed up in %.2f s", time.monotonic() - started)

    async def _listen(self) -> Server:
        try:
            return await serve(
                self._handle,
                self.config.host,
                self.config.port,
                process_request=self._screen,
                ssl=self._tls,
                origins=[None],  # refuses browsers, which send one: a web page must not move a robot
                compression=None,
                max_size=self._policies[0].limits.max_bytes,
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
        if path == "/readyz":
            why_not = self._why_not_ready()
            status = http.HTTPStatus.SERVICE_UNAVAILABLE if why_not else http.HTTPStatus.OK
            return connection.respond(status, f"{why_not or 'OK'}\n")
        if self._tokens is not None and self._tokens.client_of(request.headers) is None:
            response = self._refuse(connection, http.HTTPStatus.UNAUTHORIZED, "Authorization: Api-Key <token> is required.\n")
            response.headers["WWW-Authenticate"] = "Api-Key"
            return response
        if path == "/metrics":
            response = connection.respond(http.HTTPStatus.OK, self.metrics.text(self.busy_s))
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = "text/plain; version=0.0.4; charset=utf-8"
            return response
        if "Upgrade" not in request.headers:
            response = self._refuse(connection, http.HTTPStatus.UPGRADE_REQUIRED, "This is a WebSocket policy server.\n")
            response.headers["Upgrade"] = "websocket"
            return response
        if self.metrics.clients >= self.config.max_clients and not self._evict_idle():
            text = "The maximum number of clients is connected.\n"
            return self._refuse(connection, http.HTTPStatus.SERVICE_UNAVAILABLE, text)
        return None

    def _refuse(self, connection: ServerConnection, status: http.HTTPStatus, text: str) -> Response:
        self.metrics.handshakes_refused[str(status.value)] += 1
        return connection.respond(status, text)

    def _why_not_ready(self) -> str:
        """Why a new request would not be answered in time, or empty."""
        if self._stop.is_set():
            return "stopping"
        if len(busy_s := self._busy_s()) < len(self._policies) or min(busy_s) <= self.config.queue_s:
            return ""
        return f"the running inference has taken {min(busy_s):.0f} s"

    def _evict_idle(self) -> bool:
        """Close the connection that has been idle for longest, if that is long enough; return whether there was one."""
        client = min(self._idle_since, key=lambda one: self._idle_since[one], default=None)
        if client is None or time.monotonic() - self._idle_since[client] < self.config.idle_s:
            return False
        del self._idle_since[client]
        client.transport.abort()
        self.metrics.evicted += 1
        return True

    async def _handle(self, client: ServerConnection) -> None:
        """Handle a connection: send metadata, then answer each request until either side closes."""
        session, left, name = Session(), asyncio.ensure_future(client.wait_closed()), self._name_of(client)
        self.metrics.clients += 1
        self.metrics.connections += 1
        try:
            await client.send(encode({SERVED_SPACE: self._policies[0].about["action_space"]}))
            self._idle_since[client] = time.monotonic()
            async for frame in client:
                arrived = time.monotonic()
                self._idle_since.pop(client, None)
                if self._stop.is_set() or not await self._exchange(client, name, left, frame, session):
                    break
                self._idle_since[client] = time.monotonic()
                session.previous_total_ms = (time.monotonic() - arrived) * 1e3
        except ConnectionClosed:
            pass
        finally:
            left.cancel()
            self._idle_since.pop(client, None)
            self.metrics.clients -= 1

    async def _exchange(
        self, client: ServerConnection, name: str, left: asyncio.Future[None], frame: bytes | str, session: Session
    ) -> bool:
        """Answer one request; return whether the connection stays open. ``left`` is done when the client leaves."""
        self.metrics.received_bytes += len(frame)
        self.metrics.in_flight += 1
        job = self._workers.submit(name, Message(frame, session, time.monotonic()))
        try:
            answer = await self._ask(left, job)
            self.metrics.requests["abandoned" if answer is None else answer.outcome] += 1
            if answer is None:
                return False
            await client.send(answer.frame)
            self.metrics.sent_bytes += len(answer.frame)
        finally:
            if job.done():
                self._end_flight()
            else:  # the client has left; an abandoned inference is in flight until it ends
                job.add_done_callback(self._landed)
        self.metrics.queue.observe(answer.waited_s)
        if answer.outcome == "ok":
            self.metrics.inference.observe(answer.infer_s)
        if answer.outcome in ("error", "late"):
            code = _INTERNAL_ERROR if answer.outcome == "error" else _TRY_LATER
            await client.close(code, "see the preceding text frame")
        return answer.outcome not in ("error", "late")

    def _name_of(self, client: ServerConnection) -> str:
        """Whose turn it is in the queue: the token's owner, else the client's address."""
        assert client.request is not None
        owner = None if self._tokens is None else self._tokens.client_of(client.request.headers)
        return owner or str(client.remote_address[0])

    def _answers(self, policy: ServedPolicy, messages: list[Message]) -> list[Answer]:
        """The answers to messages that are inferred for together; those that waited too long are refused. On a worker."""
        now, limit_s = time.monotonic(), self.config.queue_s
        late = [now - message.arrived_s > limit_s for message in messages]
        answers = iter(policy.answer([message for message, over in zip(messages, late, strict=True) if not over]))
        made: list[Answer] = []
        for message, over in zip(messages, late, strict=True):
            waited_s = now - message.arrived_s
            said = f"the request waited {waited_s:.1f} s for other clients' inferences; at most {limit_s:g} s are useful."
            made.append(replace(Answer(f"BackendError: {said}", "late") if over else next(answers), waited_s=waited_s))
        return made

    def _landed(self, _: Future[Answer]) -> None:
        """Count a request as ended, from any thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: an inference outlived the server
            self._loop.call_soon_threadsafe(self._end_flight)

    def _end_flight(self) -> None:
        self.metrics.in_flight -= 1

    async def _ask(self, left: asyncio.Future[None], job: Future[Answer]) -> Answer | None:
        """Return a job's answer, or None if the client leaves first; a queued job is then dropped."""
        assert self._loop is not None
        loop, answered = self._loop, self._loop.create_future()

        def settle(_: object) -> None:
            if not answered.done():
                answered.set_result(None)

        def landed(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed: an inference outlived the server
                loop.call_soon_threadsafe(settle, None)

        left.add_done_callback(settle)
        job.add_done_callback(landed)
        try:
            await answered
            return job.result() if job.done() else None
        finally:
            left.remove_done_callback(settle)
            job.cancel()
