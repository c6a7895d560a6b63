"""The policy client: one connection, one exchange at a time, a deadline on every wait, a typed
error for every failure.

The connection runs on an event loop in its own thread, so that one deadline covers the whole
exchange, including servers that accept and stay silent, send slowly or do not read. A connection is
reused only after a complete exchange. After anything else it is aborted, so that a late reply
cannot answer the next request.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.protocol import State

from strands_cosmos3.checks import positive, whole_number
from strands_cosmos3.errors import (
    ConfigError,
    ServiceClosedError,
    ServiceError,
    ServiceRefusedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
    ServiceUnreadableError,
    WireFormatError,
)
from strands_cosmos3.serving.codec import DEFAULT_LIMITS, Limits, decode, encode_view
from strands_cosmos3.serving.connection import CountedFrames
from strands_cosmos3.serving.wire import short

_T = TypeVar("_T")
_CLOSE_S = 0.2  # time for the peer to complete a close before the connection is aborted
_OURS = {
    1002: "broke the WebSocket protocol",
    1007: "sent text that is no UTF-8",
    1009: "sent more than is read (raise ClientConfig.max_reply_bytes)",
}
"""Close codes that the client sends, and what the server did."""


@dataclass(frozen=True)
class ClientConfig:
    """Address of a server, and timeouts.

    Args:
        host: Host name or IP address, or a URI with ``ws://`` or ``wss://`` (for NVIDIA's LIBERO
            server ``http://`` or ``https://``).
        port: Port; None means the URI's port, or 8000.
        token: Token for ``Authorization: <scheme> <token>``.
        scheme: ``Api-Key`` (openpi) or ``Bearer`` (RoboLab).
        connect_s: Timeout of the TCP connection, for each address of the host.
        handshake_s: Timeout of the WebSocket handshake and the server's first frame.
        read_s: Timeout of a whole exchange: sending, inference and reply.
        attempts: Connection attempts before the server counts as unavailable.
        first_pause_s, longest_pause_s: First and longest pause between attempts; it doubles each
            time.
        idle_s: A connection that was idle for this long and is closed (1000) instead of answered is
            dialled anew and asked again: vLLM-Omni closes idle ones after 30 s.
        max_reply_bytes: Largest reply that is read. The default has room for NVIDIA's servers with
            ``decode_video`` (40 MB).
        path: Path of the server, if ``host`` has none.

    Raises:
        ConfigError: The address is invalid.
        InputError: A number is out of range.
    """

    host: str = "localhost"
    port: int | None = None
    token: str | None = field(default=None, repr=False)
    scheme: str = "Api-Key"
    connect_s: float = 3.0
    handshake_s: float = 10.0
    read_s: float = 120.0
    attempts: int = 4
    first_pause_s: float = 0.1
    longest_pause_s: float = 2.0
    max_reply_bytes: int = 64 * 2**20
    idle_s: float = 20.0
    path: str = ""

    def __post_init__(self) -> None:
        for name in (
            "connect_s",
            "handshake_s",
            "read_s",
            "first_pause_s",
            "longest_pause_s",
            "idle_s",
        ):
            positive(getattr(self, name), name)
        whole_number(self.attempts, "attempts", 1)
        whole_number(self.max_reply_bytes, "max_reply_bytes", 1024, 2**30)
        if self.port is not None:
            whole_number(self.port, "port", 1, 65535)
        if self.scheme not in ("Api-Key", "Bearer"):
            raise ConfigError(f"scheme {self.scheme!r} is unknown; valid: Api-Key, Bearer.")
        if self.token is not None and (not self.token.isprintable() or not self.token.isascii()):
            raise ConfigError("a token must be printable ASCII.")
        _ = self.http_address if self.host.startswith("http") else self.address

    @property
    def address(self) -> tuple[str, str, int]:
        """URI, host and port of a WebSocket. Raises ConfigError if the address is invalid."""
        return self._address("ws", "wss")

    @property
    def http_address(self) -> tuple[str, str, int]:
        """URL, host and port of an HTTP server. Raises ConfigError if the address is invalid."""
        return self._address("http", "https")

    def _address(self, plain: str, encrypted: str) -> tuple[str, str, int]:
        bare = (
            f"[{self.host}]"
            if self.host.count(":") > 1 and not self.host.startswith(("[", plain))
            else self.host
        )
        text = bare if "://" in bare else f"{plain}://{bare}"
        try:
            parts = urlsplit(text)
            port = self.port or parts.port or (443 if parts.scheme == encrypted else 8000)
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme not in (plain, encrypted) or not parts.hostname:
            raise ConfigError(
                f"host {self.host!r} is not an address; write e.g. localhost, or "
                f"{encrypted}://gpu.example:443/policy."
            )
        name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        path = parts.path if parts.path.strip("/") else self.path or parts.path
        return f"{parts.scheme}://{name}:{port}{path}", parts.hostname, port


class PolicyClient:
    """Client of a policy server. It connects on first use, and again after a failure.

    Attributes:
        counters: ``dials`` (connection attempts), ``reconnects``, complete ``exchanges`` and
            ``failures``.
        metadata: The server's first frame.
    """

    def __init__(
        self,
        config: ClientConfig | None = None,
        limits: Limits = DEFAULT_LIMITS,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.config = config or ClientConfig()
        self.limits = limits  # of what is sent; of a reply all but its size
        self._reply_limits = replace(limits, max_bytes=self.config.max_reply_bytes)
        self.counters: Counter[str] = Counter()
        self.metadata: dict[str, Any] = {}
        self._uri, self._host, self._port = self.config.address
        self._sleep = sleep
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._connection: _Connection | None = None
        self._idle_since = 0.0
        self._cancel_wait: Callable[[], object] | None = None
        self._cancelled = False

    def exchange(self, message: Any, read: Callable[[Any], _T]) -> _T:
        """Send a message and return what ``read`` makes of the decoded reply, or of the text of a
        text frame.

        ``message`` may be a function of the server's metadata. If it or ``read`` raises, the
        connection is dropped.

        Raises:
            WireFormatError: The message cannot be encoded.
            ServiceError: The exchange failed; the subclass says how. The connection is closed.
        """
        if not callable(message):
            encode_view(message, self.limits)  # raises before anything is dialled
        with self._lock:
            complete = self._cancelled = False
            try:
                value = read(self._decoded(self._ask(message)))
                complete, self._idle_since = True, time.monotonic()
            finally:  # on any exception, KeyboardInterrupt included
                self.counters["exchanges" if complete else "failures"] += 1
                if not complete:
                    self._abort()
            return value

    def cancel(self) -> None:
        """Cancel an exchange that runs in another thread: it raises :class:`ServiceClosedError`.
        No-op if there is none.
        """
        if self._lock.locked():
            self._cancelled = True
            if (cancel := self._cancel_wait) is not None:
                cancel()

    def close(self) -> None:
        """Close the connection and end the thread. Idempotent; the next exchange connects again."""
        with self._lock:
            if self._loop is None or self._thread is None:
                return
            self._wait(_close(self._connection), may_cancel=False)
            self._connection = None
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None

    def _frame(self, message: Any) -> memoryview:
        return encode_view(message(self.metadata) if callable(message) else message, self.limits)

    def _ask(self, message: Any) -> bytes | str:
        """Return the reply; reconnect if there is no connection or it ended since the last
        exchange.
        """
        if self._connection is not None:
            if (
                reply := self._wait(self._pass(self._connection, self._frame(message), fresh=False))
            ) is not None:
                return reply
            self._abort()
        self.counters["reconnects"] += bool(self.counters["dials"])
        connection = self._dial()
        reply = self._wait(self._pass(connection, self._frame(message), fresh=True))
        assert reply is not None  # a fresh connection is always used
        return reply

    def _dial(self) -> _Connection:
        pause, failure = self.config.first_pause_s, ""
        for attempt in range(self.config.attempts):
            if attempt:
                self._sleep(pause)
                pause = min(2 * pause, self.config.longest_pause_s)
            if self._cancelled:
                break
            self.counters["dials"] += 1
            try:
                tcp = socket.create_connection(
                    (self._host, self._port), timeout=self.config.connect_s
                )
            except (OSError, UnicodeError) as error:
                failure = short(error)
                continue
            if self._cancelled:
                tcp.close()
                break
            return self._wait(self._greet(tcp))
        if self._cancelled:
            raise self._cancelled_error()
        tried = f"no policy server at {self._uri} after {self.config.attempts} attempts ({failure})"
        raise ServiceUnavailableError(
            f"{tried}. Is it running? Start one there with strands-cosmos3 serve --port "
            f"{self._port}."
        )

    async def _greet(self, tcp: socket.socket) -> _Connection:
        """Complete the handshake and read the metadata, within the handshake timeout."""
        connections: list[_Connection] = []

        # so that a failed handshake can be aborted
        def remember(*args: Any, **kwargs: Any) -> _Connection:
            connections.append(_Connection(*args, **kwargs))
            return connections[0]

        try:
            async with asyncio.timeout(self.config.handshake_s):
                connection = await self._shake_hands(tcp, cast("type[_Connection]", remember))
                metadata = self._decoded(await connection.receive())
            if isinstance(metadata, str):
                raise ServiceRefusedError(
                    f"the server at {self._uri} refused the connection: {short(metadata)}"
                )
            if not isinstance(metadata, dict):
                raise ServiceUnreadableError(
                    f"the first frame from {self._uri} is not a map of metadata."
                )
            self.metadata, self._connection = metadata, connection
            return connection
        except (
            OSError,
            ValueError,
            InvalidHandshake,
            ConnectionClosed,
            ServiceError,
            asyncio.CancelledError,
        ) as error:
            # a malformed response, followed by silence
            broken = connections[0].protocol.handshake_exc if connections else None
            for connection in connections:
                connection.abort()
            tcp.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise self._named(broken or error, "shaking hands", self.config.handshake_s) from None

    async def _shake_hands(self, tcp: socket.socket, create: type[_Connection]) -> _Connection:
        tcp.setblocking(False)
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        token = self.config.token
        connection = await connect(
            self._uri,
            sock=tcp,
            additional_headers={"Authorization": f"{self.config.scheme} {token}"}
            if token
            else None,
            compression=None,
            proxy=None,  # the environment is not read here
            open_timeout=None,
            # released servers do not answer pings during inference; read_s applies instead
            ping_interval=None,
            close_timeout=_CLOSE_S,
            max_size=self.config.max_reply_bytes,
            max_queue=2,
            create_connection=create,
        )
        return cast("_Connection", connection)

    async def _pass(
        self, connection: _Connection, frame: memoryview, fresh: bool
    ) -> bytes | str | None:
        """Send a frame and return the reply; None, with nothing answered, if the old connection
        is no longer usable.
        """
        if connection.surplus and not fresh:
            return None
        idle_s = 0.0 if fresh else time.monotonic() - self._idle_since
        try:
            async with asyncio.timeout(self.config.read_s):
                unasked = connection.surplus
                if not unasked:
                    await connection.send(frame)
                reply = await connection.receive()
                if unasked and isinstance(reply, bytes):
                    raise ServiceUnreadableError(
                        f"{self._uri} sent more than its metadata before it was asked."
                    )
        except (OSError, ConnectionClosed) as error:
            done = (
                isinstance(error, ConnectionClosed)
                and error.rcvd is not None
                and error.rcvd.code == 1000
            )
            if done and idle_s >= self.config.idle_s:
                return None
            raise self._named(error, "waiting for the chunk", self.config.read_s) from None
        return reply

    def _decoded(self, frame: bytes | str) -> Any:
        if isinstance(frame, str):
            return frame
        try:
            return decode(frame, self._reply_limits, writable=True, strict=True)
        except WireFormatError as error:
            raise ServiceUnreadableError(
                f"the answer of {self._uri} is not a message of this protocol: {error}"
            ) from None

    def _named(self, error: Exception, doing: str, deadline_s: float) -> ServiceError:
        """Return the typed error for a failure."""
        match error:
            case ServiceError():
                return error
            case TimeoutError():
                return ServiceTimeoutError(
                    f"{self._uri} did not answer within {deadline_s:g} s while {doing}."
                )
            case ssl.SSLError():
                return untrusted(self._uri, error)
            case InvalidStatus():
                return self._http(error.response.status_code, bytes(error.response.body or b""))
            case InvalidMessage() if _cut_short(error):
                return ServiceClosedError(f"{self._uri} closed the connection while {doing}.")
            # a ValueError is a redirect, which is not followed
            case InvalidHandshake() | ValueError():
                return ServiceUnreadableError(
                    f"{self._uri} is not a WebSocket server ({short(error)})."
                )
            case ConnectionClosed(rcvd=None) if error.sent is not None and error.sent.code in _OURS:
                return ServiceUnreadableError(
                    f"{self._uri} {_OURS[error.sent.code]} while {doing}."
                )
            case ConnectionClosed() if error.rcvd is not None and error.rcvd.code == 1009:
                return ServiceRefusedError(
                    f"{self._uri} does not accept a request that large; send smaller pictures."
                )
            case ConnectionClosed() if error.rcvd is not None:
                reason = f"code {error.rcvd.code}" + (
                    f", {short(error.rcvd.reason)}" if error.rcvd.reason else ""
                )
                return ServiceClosedError(
                    f"{self._uri} closed the connection while {doing} ({reason})."
                )
            case _:
                return ServiceClosedError(f"{self._uri} closed the connection while {doing}.")

    def _http(self, status: int, body: bytes) -> ServiceError:
        if status in (401, 403):
            return ServiceRefusedError(
                f"{self._uri} refused access (HTTP {status}); pass api_key= the server's token."
            )
        if status == 503:
            reason = short(body.decode("utf-8", "replace"))
            return ServiceRefusedError(f"{self._uri} accepts no more clients (HTTP 503: {reason}).")
        return ServiceUnreadableError(f"{self._uri} is not a policy server (HTTP {status}).")

    def _cancelled_error(self) -> ServiceClosedError:
        return ServiceClosedError(f"the exchange with {self._uri} was cancelled on this side.")

    def _wait(self, work: Coroutine[Any, Any, _T], may_cancel: bool = True) -> _T:
        """Run a coroutine on the event loop's thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="policy-client", daemon=True
            )
            self._thread.start()
        loop, ended, task = self._loop, SimpleQueue[asyncio.Task[_T]](), list[asyncio.Task[_T]]()

        def start() -> None:
            task.append(loop.create_task(work))
            task[0].add_done_callback(ended.put)

        def cancel() -> None:
            loop.call_soon_threadsafe(lambda: task[0].cancel())  # the loop has run start() by then

        loop.call_soon_threadsafe(start)
        if may_cancel:
            self._cancel_wait = cancel
            if self._cancelled:  # cancel() came before there was anything to cancel
                cancel()
        try:
            return ended.get().result()
        except asyncio.CancelledError:
            raise self._cancelled_error() from None
        except KeyboardInterrupt:
            cancel()
            raise
        finally:
            self._cancel_wait = None

    def _abort(self) -> None:
        """Abort the connection without a closing handshake."""
        if self._connection is not None and self._loop is not None:
            self._wait(_hang_up(self._connection), may_cancel=False)
        self._connection = None


class _Connection(CountedFrames, ClientConnection):
    """A connection that ends ``_CLOSE_S`` after it began to close, whatever the peer does."""

    _received = 0
    _closing = False

    def abort(self) -> None:
        """End the connection without a closing handshake."""
        if hasattr(self, "transport"):  # not before the handshake of TLS
            self.transport.abort()

    async def receive(self) -> bytes | str:
        """Return the next message."""
        self._received += 1
        return await self.recv()

    @property
    def surplus(self) -> bool:
        """Whether the connection ended, or the peer has sent a message, or a part of one, that
        nobody asked for yet.
        """
        return self.begun > self._received or not self.between_frames

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if (
            not self._closing
            and self.state is not State.OPEN
            and self.state is not State.CONNECTING
        ):
            self._closing = True
            self.loop.call_later(_CLOSE_S, self.transport.abort)


def untrusted(url: str, error: ssl.SSLError) -> ServiceUnreadableError:
    """Return the error for a server whose certificate is not trusted, or that does not speak
    TLS.
    """
    return ServiceUnreadableError(
        f"{url} has no valid certificate or no TLS ({short(error)}). "
        "Trust a certificate of your own with SSL_CERT_FILE=FILE.pem in the environment."
    )


def _cut_short(error: BaseException | None) -> bool:
    """Whether a malformed HTTP response is a truncated one."""
    while error is not None:
        if isinstance(error, EOFError) and str(error).startswith("stream ends"):
            return True
        error = error.__cause__
    return False


async def _hang_up(connection: ClientConnection) -> None:
    connection.transport.abort()
    await connection.wait_closed()


async def _close(connection: ClientConnection | None) -> None:
    if connection is not None:
        await connection.close()
    # they still have sockets to close
    if cancelled := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(cancelled, timeout=_CLOSE_S)
