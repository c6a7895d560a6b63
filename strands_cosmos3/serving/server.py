"""The policy server: WebSockets on an event loop, inference on worker threads."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.server import ServerProtocol

from strands_cosmos3.errors import BackendError, ConfigError, Cosmos3Error
from strands_cosmos3.serving.admission import Client
from strands_cosmos3.serving.codec import encode
from strands_cosmos3.serving.connection import limit_frames
from strands_cosmos3.serving.http_server import JSON, HttpProtocol, Reply, RequestHead, serve_http
from strands_cosmos3.serving.metrics import Metrics
from strands_cosmos3.serving.places import Place, Places, Tally
from strands_cosmos3.serving.routes import is_json
from strands_cosmos3.serving.served import Answer, Message, ServedPolicy, Session
from strands_cosmos3.serving.server_config import ServerConfig
from strands_cosmos3.serving.server_websocket import ServerWebSocket
from strands_cosmos3.serving.wire import DEADLINE_HEADER, RETRY_AFTER, VLLM_PATH
from strands_cosmos3.serving.worker import Workers

logger = logging.getLogger(__name__)
_websockets_logger = logging.getLogger(f"{__name__}.websockets")
# a client's fault, with a traceback
_websockets_logger.addFilter(lambda record: record.msg != "opening handshake failed")

_INTERNAL_ERROR = 1011
_GOING_AWAY = 1001
_TRY_LATER = 1013
_FRAMES_WAITING = 2
_OPEN_S = 10.0  # for the first bytes of a connection, and again for the handshake
_SOONEST_S = 0.01  # after which a refused client may ask again
_PING_S, _PONG_S, _CLOSE_S = 20.0, 60.0, 2.0


class PolicyServer:
    """Serves a policy until it is stopped.

    ``run()`` blocks and handles SIGTERM and Ctrl-C. As a context manager, the server runs on its
    own thread.

    Args:
        policy: The policy, or replicas of it with a backend each, which answer requests at the same
            time.
        config: Options.

    Attributes:
        port: The port that the server listens on.
        metrics: Its counters.
    """

    def __init__(
        self, policy: ServedPolicy | Sequence[ServedPolicy], config: ServerConfig = ServerConfig()
    ):
        self._policies = (policy,) if isinstance(policy, ServedPolicy) else tuple(policy)
        self.config = config
        self.metrics = Metrics(self._policies[0].about | {"replicas": str(len(self._policies))})
        self.port = self.config.port
        self._tokens = self.config.tokens
        self._tls = self.config.tls()
        self._places = Places(self.config, self.metrics)
        self._not_accepted = Tally(
            "%d times so far no connection could be accepted, for the process has too many open "
            "files; raise its limit (ulimit -n), or lower --max-clients."
        )
        self._dialect = self._policies[0].dialect
        self._requests: set[asyncio.Task[Any]] = set()  # plain HTTP requests under way
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._workers: Workers[ServedPolicy, Message, Answer]

    def run(self, ready: Callable[[PolicyServer], None] | None = None) -> None:
        """Warm up, listen and serve; return after SIGTERM or Ctrl-C. A second Ctrl-C does not wait
        for the inference.

        ``ready`` is called when the server listens.

        Raises:
            Cosmos3Error: The warm-up failed, or the address cannot be used.
        """
        asyncio.run(self._serve(ready, signals=True))

    @property
    def busy_s(self) -> float:
        """Age of the oldest running inference; 0 if there is none. After
        ``run()``, it was abandoned.
        """
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
        ready = threading.Event()
        failed: list[Cosmos3Error] = []

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

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _signalled(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _serve(self, ready: Callable[[PolicyServer], None] | None, signals: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._loop_failed)
        if signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self._signalled)
        self._workers = Workers(
            self._policies,
            ServedPolicy.warm_up,
            self._answers,
            self.config.max_batch,
            lambda answer: answer.outcome == "ok",
        )
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
            reason = str(error) if isinstance(error, Cosmos3Error) else repr(error)
            raise BackendError(
                f"the warm-up of the backend failed, so it is not served: {reason}"
            ) from error
        logger.info("warmed up in %.2f s", time.monotonic() - started)

    async def _listen(self) -> Server:
        try:
            return await serve(
                self._handle,
                self.config.host,
                self.config.port,
                create_connection=cast("type[ServerConnection]", self._make_protocol),
                open_timeout=_OPEN_S,
                # refuses browsers, which send one: a web page must not move a robot
                origins=[None],
                compression=None,
                max_size=self._policies[0].limits.max_bytes,
                max_queue=_FRAMES_WAITING,
                ping_interval=_PING_S,
                ping_timeout=_PONG_S,
                close_timeout=_CLOSE_S,
                logger=_websockets_logger,
            )
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            problem = (
                "is in use; choose another --port" if taken else f"cannot be used: {error.strerror}"
            )
            raise ConfigError(f"{self.config.host}:{self.config.port} {problem}.") from None

    async def _drain(self, server: Server) -> None:
        """Accept nothing new, wait up to ``grace_s`` for running requests, then close all
        connections.
        """
        server.close(close_connections=False)
        deadline = time.monotonic() + self.config.grace_s
        while self.metrics.in_flight and time.monotonic() < deadline and not self._hurry.is_set():
            await asyncio.sleep(0.02)
        for connection in self._places.pending():
            connection.close()
        if self._requests:
            # they send their replies
            _, unsent = await asyncio.wait(self._requests, timeout=_CLOSE_S)
            for task in unsent:
                task.cancel()
        await asyncio.gather(
            *(
                client.close(_GOING_AWAY, "the server is stopping")
                for client in list(server.connections)
            )
        )
        await server.wait_closed()

    def _make_protocol(
        self, websocket: ServerProtocol, *arguments: Any, **options: Any
    ) -> HttpProtocol:
        def admit(connection: HttpProtocol, head: RequestHead) -> ServerWebSocket | Reply:
            place = self._get(head) or self._take_place(connection, head)
            if isinstance(place, Reply):
                return place
            limit_frames(websocket, self.config.max_fragments)
            client = ServerWebSocket(websocket, *arguments, **options)
            client.admit(place, self._places, self.metrics, self.config.message_s)
            return client

        return HttpProtocol(self._places.arrive, admit, self._http, _OPEN_S, self._tls)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Keep asyncio, which tries to accept a hundred times a second, from filling the log."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            self._places.make_room()
            self._not_accepted.add()
        else:
            loop.default_exception_handler(context)

    def _get(self, head: RequestHead) -> Reply | None:
        """The reply to a GET request for the server's state, or from a stranger."""
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
            return Reply(HTTPStatus.OK, self.metrics.text(self.busy_s), content)
        return None

    def _info(self, head: RequestHead) -> Reply:
        """The reply to any other plain GET request."""
        if self._dialect is None or head.path not in self._dialect.pages:
            return self._websockets_only()
        if "Origin" in head.headers:
            return self._no_web_pages()
        return Reply(HTTPStatus.OK, json.dumps(self._policies[0].page(head.path)), JSON)

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

    def _take_place(self, connection: HttpProtocol, head: RequestHead) -> Place | Reply:
        place = self._places.take(connection, self._owner(head.headers))
        if isinstance(place, Place):
            return place
        return self._refused(HTTPStatus.SERVICE_UNAVAILABLE, place)

    def _refused(self, status: HTTPStatus, text: str, headers: Mapping[str, str] = {}) -> Reply:
        self.metrics.handshakes_refused[str(status.value)] += 1
        return Reply(status, text, headers)

    def _check_http_request(self, head: RequestHead) -> Reply | None:
        """Answer a request without a body; None for a dialect's request whose body may be read."""
        match head.method:
            case "GET" | "HEAD":
                return self._get(head) or self._info(head)
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
        if self._dialect is None:
            return self._websockets_only()
        if head.path not in self._dialect.routes:
            paths = " and ".join(self._dialect.paths)
            return self._refused(HTTPStatus.NOT_FOUND, f"There are {paths}.\n")
        if not is_json(
            head.headers.get_all("Content-Type"), head.headers.get_all("Content-Encoding")
        ):
            text = "Content-Type must be application/json, in UTF-8 and not compressed.\n"
            return self._refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text)
        if self._stop.is_set():
            return self._refused(HTTPStatus.SERVICE_UNAVAILABLE, "The server is stopping.\n")
        return None

    async def _http(
        self,
        connection: HttpProtocol,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Handle a connection that is no WebSocket. A dialect's request counts as a client."""
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        with ExitStack() as stack:
            stack.callback(self._requests.discard, task)

            def check_request(head: RequestHead) -> Reply | None:
                if (reply := self._check_http_request(head)) is not None:
                    return reply
                place = self._take_place(connection, head)
                if isinstance(place, Reply):
                    return place
                stack.callback(self._places.give_back, place)
                return None

            await serve_http(
                reader,
                writer,
                check_request,
                partial(self._post, connection.address),
                self.config.body_s,
                self._policies[0].limits.max_bytes,
            )

    async def _post(
        self, address: str, head: RequestHead, body: bytes, left: asyncio.Future[None]
    ) -> Reply | None:
        """Answer a request of the HTTP dialect; None if the client leaves first."""
        assert self._dialect is not None
        arrived = time.monotonic()
        route = self._dialect.routes[head.path]
        self.metrics.received_bytes += len(body)
        try:
            items = await asyncio.to_thread(route.read_items, body)
            wait_s = float(", ".join(head.headers.get_all(DEADLINE_HEADER)) or math.inf) / 1e3
        except ValueError as error:  # WireFormatError is one
            self.metrics.requests["error"] += 1
            return Reply(HTTPStatus.BAD_REQUEST, json.dumps({"error": str(error)}), JSON)
        client = self._client(head.headers, address)
        messages = [Message(item, Session(), arrived) for item in items]
        async with self._answered(client, left, messages, wait_s) as answers:
            if answers is None:
                return None
            failed = next((answer for answer in answers if answer.failed), None)
            if refused := next((one for one in answers if one.outcome == "refused"), None):
                return _try_later(refused)
            if failed is None:
                text = route.join_replies([str(answer.frame) for answer in answers])
            else:
                text = route.encode_error(str(failed.frame))
            self.metrics.sent_bytes += len(text)
            return Reply(HTTPStatus.OK, text, JSON)

    def _why_not_ready(self) -> str:
        """Why a new request would not be answered in time, or empty."""
        if self._stop.is_set():
            return "stopping"
        if (
            len(busy_s := self._busy_s()) < len(self._policies)
            or min(busy_s) <= self.config.queue_s
        ):
            return ""
        return f"the running inference has taken {min(busy_s):.0f} s"

    async def _handle(self, client: ServerConnection) -> None:
        """Handle a connection: send metadata, then answer each request until either side closes."""
        assert isinstance(client, ServerWebSocket)
        assert client.request is not None
        session = Session(is_vllm=client.request.path.partition("?")[0] == VLLM_PATH)
        place = client.place
        asker = self._client(client.request.headers, place.address)
        left = asyncio.ensure_future(client.wait_closed())
        try:
            with suppress(ConnectionClosed):
                await client.send(encode(self._policies[0].metadata(session)))
                place.idle_since_s = time.monotonic()
                async for frame in client:
                    arrived = time.monotonic()
                    place.idle_since_s = math.inf
                    if self._stop.is_set() or not await self._exchange(
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
        client: ServerConnection,
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
        wait_s = self._policies[0].wait_s(frame)
        async with self._answered(asker, left, [message], wait_s) as answers:
            if answers is None:
                return False
            (answer,) = answers
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

    def _answers(self, policy: ServedPolicy, messages: list[Message]) -> list[Answer]:
        """The answers to messages that are inferred for together; those that waited too long are
        refused. On a worker.
        """
        now = time.monotonic()
        limit_s = self.config.queue_s
        timely = [message for message in messages if now - message.arrived_s <= limit_s]
        inferred = dict(zip(timely, policy.answer(timely), strict=True))
        return [
            replace(
                inferred.get(message) or _late(now - message.arrived_s, limit_s),
                waited_s=now - message.arrived_s,
            )
            for message in messages
        ]

    @asynccontextmanager
    async def _answered(
        self,
        client: Client,
        left: asyncio.Future[Any],
        messages: Sequence[Message],
        wait_s: float,
    ) -> AsyncGenerator[list[Answer] | None]:
        """The answers to a client's messages; None if it leaves first, and what is still queued
        is dropped. Until they are sent, or inferred for, the messages count as in flight.

        What would not be answered in the time that the client waits is refused: at once, and when
        that has passed before its turn.
        """
        until_s = messages[0].arrived_s + wait_s
        refusal = self._refusal(client, len(messages), until_s)
        loop = asyncio.get_running_loop()

        def landed(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed: an inference outlived the server
                loop.call_soon_threadsafe(self._end_flight)

        jobs = [] if refusal else [self._workers.submit(client, message) for message in messages]
        self.metrics.in_flight += len(jobs)
        try:
            answers = await asyncio.gather(*(_unless_left(left, job, until_s) for job in jobs))
            answers = answers or [refusal] * len(messages)
            if not left.done():  # those without an answer have expired
                now_s = time.monotonic()
                answers = [answer or self._refusal(client, 1, now_s) for answer in answers]
            for answer in answers:
                self._count(client, answer)
            whole = [answer for answer in answers if answer is not None]
            yield whole if len(whole) == len(answers) else None
        finally:
            for job in jobs:
                job.add_done_callback(landed)

    def _refusal(self, client: Client, count: int, until_s: float) -> Answer | None:
        """The refusal of so many messages of a client, which does not wait longer than until a time
        on the monotonic clock; None if they may be answered by then.
        """
        if until_s == math.inf:
            return None
        left_s = max(0.0, until_s - time.monotonic())
        expected_s = self._workers.expected_s(client, count)
        if expected_s < left_s:
            return None
        text = (
            f"ServiceBusyError: an answer takes about {expected_s:.2f} s now, and the request can "
            f"wait for {left_s:.2f} s."
        )
        return Answer(text, "refused", retry_after_s=max(expected_s - left_s, _SOONEST_S))

    def _end_flight(self) -> None:
        self.metrics.in_flight -= 1

    def _count(self, client: Client, answer: Answer | None) -> None:
        """Count a request that was answered, or whose client left."""
        outcome = "abandoned" if answer is None else answer.outcome
        self.metrics.requests[outcome] += 1
        self.metrics.by_class[client.priority, outcome] += 1
        if answer is None or outcome == "refused":
            return
        self.metrics.queue.observe(answer.waited_s)
        if answer.outcome == "ok":
            self.metrics.inference.observe(answer.infer_s)


async def _unless_left(
    left: asyncio.Future[Any], job: Future[Answer], until_s: float
) -> Answer | None:
    """Return a job's answer, or None if the client leaves first, or the job still waits at a time
    on the monotonic clock; a queued job is then dropped.
    """
    answered = asyncio.wrap_future(job)
    first = partial(asyncio.wait, {left, answered}, return_when=asyncio.FIRST_COMPLETED)
    try:
        done, _ = await first(timeout=until_s - time.monotonic())
        if not done and not job.cancel():
            await first()
        return answered.result() if answered.done() else None
    finally:
        answered.cancel()  # a job that runs goes on


def _try_later(refused: Answer) -> Reply:
    """The reply to an HTTP request that would be answered too late."""
    said = {"error": refused.frame, RETRY_AFTER: math.ceil(refused.retry_after_s * 1e3)}
    after = {"Retry-After": str(math.ceil(refused.retry_after_s))}
    return Reply(HTTPStatus.SERVICE_UNAVAILABLE, json.dumps(said), {**JSON, **after})


def _late(waited_s: float, limit_s: float) -> Answer:
    return Answer(
        f"BackendError: the request waited {waited_s:.1f} s for other clients' inferences; at most "
        f"{limit_s:g} s are useful.",
        "late",
    )
