"""The policy server: WebSockets on an event loop, inference on worker threads."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.server import ServerProtocol

from strands_cosmos3.errors import BackendError, ConfigError, Cosmos3Error
from strands_cosmos3.serving.connection import limit_frames
from strands_cosmos3.serving.front import Front
from strands_cosmos3.serving.http_server import HttpProtocol, Reply, RequestHead, serve_http
from strands_cosmos3.serving.inference_queue import InferenceQueue
from strands_cosmos3.serving.metrics import Metrics
from strands_cosmos3.serving.places import Places, Tally
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server_config import ServerConfig
from strands_cosmos3.serving.server_websocket import ServerWebSocket

logger = logging.getLogger(__name__)
_websockets_logger = logging.getLogger(f"{__name__}.websockets")
# a client's fault, with a traceback
_websockets_logger.addFilter(lambda record: record.msg != "opening handshake failed")

_GOING_AWAY = 1001
_FRAMES_WAITING = 2
_OPEN_S = 10.0  # for the first bytes of a connection, and again for the handshake
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
        self._tls = self.config.tls()
        self._places = Places(self.config, self.metrics)
        self._not_accepted = Tally(
            "%d times so far no connection could be accepted, for the process has too many open "
            "files; raise its limit (ulimit -n), or lower --max-clients."
        )
        self._requests: set[asyncio.Task[Any]] = set()  # plain HTTP requests under way
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._queue: InferenceQueue
        self._front: Front

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
        return max(self._queue.busy_s())

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
        config, metrics, places = self.config, self.metrics, self._places
        self._queue = queue = InferenceQueue(
            self._policies, metrics, config.max_batch, config.queue_s
        )
        self._front = Front(self._policies[0], config, metrics, places, queue, self._stop)
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
            self._queue.close(timeout_s=0.1)

    async def _warm_up(self) -> None:
        """Let every worker run one inference before listening."""
        started = time.monotonic()
        warm = asyncio.gather(*map(asyncio.wrap_future, self._queue.started))
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
            connection.close_unread()
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

    async def _handle(self, client: ServerConnection) -> None:
        assert isinstance(client, ServerWebSocket)
        assert client.request is not None
        path = client.request.path.partition("?")[0]
        await self._front.converse(client, path, client.request.headers, client.place)

    def _make_protocol(
        self, websocket: ServerProtocol, *arguments: Any, **options: Any
    ) -> HttpProtocol:
        def admit(connection: HttpProtocol, head: RequestHead) -> ServerWebSocket | Reply:
            place = self._front.page(head) or self._front.take_place(connection, head)
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
                if (reply := self._front.check_http_request(head)) is not None:
                    return reply
                place = self._front.take_place(connection, head)
                if isinstance(place, Reply):
                    return place
                stack.callback(self._places.give_back, place)
                return None

            await serve_http(
                reader,
                writer,
                check_request,
                partial(self._front.post, connection.address),
                self.config.body_s,
                self._policies[0].limits.max_bytes,
            )
