"""The client's side of the wire: one connection, one exchange at a time, every wait bounded, every failure named.

The connection lives on an event loop of its own thread, so that a single deadline covers everything an exchange waits
for: a server that accepts and says nothing, that drips bytes, or that does not read. A connection survives only a complete
exchange; after anything else it is aborted, so a late reply cannot answer the next request.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar
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
from strands_cosmos3.serving.codec import DEFAULT_LIMITS, Limits, decode, encode
from strands_cosmos3.serving.wire import short

_T = TypeVar("_T")
_CLOSE_S = 0.2  # how long a peer that was told to close may take before its connection is cut
_OURS = {1002: "broke the WebSocket protocol", 1007: "sent text that is no UTF-8", 1009: "sent more than is read"}
"""Close codes that this side sends, and what the other side did."""


@dataclass(frozen=True)
class ClientConfig:
    """Where a server is, and how long to wait for it.

    Args:
        host: A name or address, or a whole ``ws://`` or ``wss://`` address.
        port: Its port; None takes the address's own, or 8000.
        token: Shown as ``Authorization: <scheme> <token>``.
        scheme: ``Api-Key`` (openpi) or ``Bearer`` (RoboLab).
        connect_s: For the TCP connection, each address of the host.
        handshake_s: For the WebSocket handshake and the server's first frame.
        read_s: For a whole exchange: sending, inference and the reply. Long enough for the slowest inference.
        attempts: Dials before a server counts as absent; between them the pause doubles.
        first_pause_s, longest_pause_s: Those pauses.

    Raises:
        ConfigError: The address cannot be read.
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

    def __post_init__(self) -> None:
        for name in ("connect_s", "handshake_s", "read_s", "first_pause_s", "longest_pause_s"):
            positive(getattr(self, name), name)
        whole_number(self.attempts, "attempts", 1)
        if self.port is not None:
            whole_number(self.port, "port", 1, 65535)
        if self.scheme not in ("Api-Key", "Bearer"):
            raise ConfigError(f"scheme {self.scheme!r} is unknown; valid: Api-Key, Bearer.")
        if self.token is not None and (not self.token.isprintable() or not self.token.isascii()):
            raise ConfigError("a token must be printable ASCII.")
        _ = self.address

    @property
    def address(self) -> tuple[str, str, int]:
        """The whole URI, the host and the port.

        Raises:
            ConfigError: They cannot be read.
        """
        bare = f"[{self.host}]" if self.host.count(":") > 1 and not self.host.startswith(("[", "ws")) else self.host
        text = bare if "://" in bare else f"ws://{bare}"
        try:
            parts = urlsplit(text)
            port = self.port or parts.port or (443 if parts.scheme == "wss" else 8000)
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise ConfigError(f"host {self.host!r} is no address; write e.g. localhost, or wss://gpu.example:443/policy.")
        name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return f"{parts.scheme}://{name}:{port}{parts.path}", parts.hostname, port


class PolicyClient:
    """Asks a policy server. It connects when it is first used, and again after a failure.

    Args:
        config: Where the server is.
        limits: Of replies and requests.
        sleep: How to pause between dials.

    Attributes:
        counters: ``dials``, ``reconnects``, ``exchanges`` that were complete and ``failures`` that were not.
        metadata: The server's first frame.
    """

    def __init__(
        self,
        config: ClientConfig | None = None,
        limits: Limits = DEFAULT_LIMITS,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.config = config or ClientConfig()
        self.limits = limits
        self.counters: Counter[str] = Counter()
        self.metadata: dict[str, Any] = {}
        self._uri, self._host, self._port = self.config.address
        self._sleep = sleep
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._connection: ClientConnection | None = None
        self._waiting: Future[Any] | None = None
        self._cancelled = False

    def exchange(self, message: Any, read: Callable[[Any], _T]) -> _T:
        """Send a message, wait for its reply, and read it.

        Args:
            message: What to ask.
            read: Makes a value of the decoded reply (of a text frame, the text). What it raises breaks the exchange.

        Raises:
            WireFormatError: The message cannot be sent.
            ServiceUnavailableError, ServiceTimeoutError, ServiceClosedError, ServiceUnreadableError, ServiceRefusedError: As
                they say; the connection is gone.
        """
        frame = encode(message, self.limits)
        with self._lock:
            complete = self._cancelled = False
            try:
                value = read(self._decoded(self._ask(frame)))
                complete = True
            finally:  # whatever it was, Ctrl-C included
                self.counters["exchanges" if complete else "failures"] += 1
                if not complete:
                    self._abort()
            return value

    def cancel(self) -> None:
        """Break off an exchange under way in another thread: it raises :class:`ServiceClosedError`. Harmless without one."""
        if self._lock.locked():
            self._cancelled = True
            if (waiting := self._waiting) is not None:
                waiting.cancel()

    def close(self) -> None:
        """Say goodbye and end the thread. Calling it twice is harmless; the next exchange would connect again."""
        with self._lock:
            if self._loop is None or self._thread is None:
                return
            self._wait(_goodbye(self._connection), may_cancel=False)
            self._connection = None
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None

    def _ask(self, frame: bytes) -> bytes | str:
        """The reply, over a fresh connection where there is none or where the old one ended while nobody asked."""
        if self._connection is not None:
            reply = self._wait(self._pass(self._connection, frame, fresh=False))
            if reply is not None:
                return reply
            self._abort()
        self.counters["reconnects"] += bool(self.counters["dials"])
        reply = self._wait(self._pass(self._dial(), frame, fresh=True))
        assert reply is not None  # a fresh connection is not judged
        return reply

    def _dial(self) -> ClientConnection:
        pause, failure = self.config.first_pause_s, ""
        for attempt in range(self.config.attempts):
            if attempt:
                self._sleep(pause)
                pause = min(2 * pause, self.config.longest_pause_s)
            if self._cancelled:
                break
            self.counters["dials"] += 1
            try:
                tcp = socket.create_connection((self._host, self._port), timeout=self.config.connect_s)
            except (OSError, UnicodeError) as error:
                failure = short(error)
                continue
            if self._cancelled:
                tcp.close()
                break
            return self._wait(self._greet(tcp))
        if self._cancelled:
            raise self._broken_off()
        raise ServiceUnavailableError(
            f"no policy server at {self._uri} after {self.config.attempts} attempts ({failure}). "
            "Is it running? strands-cosmos3 serve starts one."
        )

    async def _greet(self, tcp: socket.socket) -> ClientConnection:
        """Handshake and metadata, within their deadline."""
        headers = {"Authorization": f"{self.config.scheme} {self.config.token}"} if self.config.token else None
        made: list[ClientConnection] = []

        class Remembered(ClientConnection):  # to be found even if the handshake ends badly
            def __init__(self, *args: Any, **kwargs: Any):
                super().__init__(*args, **kwargs)
                made.append(self)

        try:
            async with asyncio.timeout(self.config.handshake_s):
                tcp.setblocking(False)
                tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = await connect(
                    self._uri,
                    sock=tcp,
                    additional_headers=headers,
                    compression=None,
                    proxy=None,  # the environment is not read here
                    open_timeout=None,
                    ping_interval=None,  # a server that infers may not answer pings; the read deadline judges it
                    close_timeout=_CLOSE_S,
                    max_size=self.limits.max_bytes,
                    max_queue=2,
                    create_connection=Remembered,
                )
                metadata = self._decoded(await _receive(connection))
            if isinstance(metadata, str):
                raise ServiceRefusedError(f"the server at {self._uri} turned us away: {short(metadata)}")
            if not isinstance(metadata, dict):
                raise ServiceUnreadableError(f"the first frame from {self._uri} is no map of metadata.")
            self.metadata, self._connection = metadata, connection  # whoever breaks off now knows what to hang up
            return connection
        except (OSError, ValueError, InvalidHandshake, ConnectionClosed, ServiceError) as error:
            broken = made[0].protocol.handshake_exc if made else None  # it said something wrong, then nothing
            for connection in made:
                connection.transport.abort()
            tcp.close()
            raise self._named(broken or error, "shaking hands", self.config.handshake_s) from None
        except asyncio.CancelledError:
            for connection in made:
                connection.transport.abort()
            tcp.close()
            raise

    async def _pass(self, connection: ClientConnection, frame: bytes, fresh: bool) -> bytes | str | None:
        """Send a frame and wait for the next; None, and nothing sent, where the connection is of no use any more."""
        try:
            async with asyncio.timeout(self.config.read_s):
                if not fresh and not await _usable(connection):
                    return None
                await connection.send(frame)
                return await _receive(connection)
        except (OSError, ConnectionClosed) as error:
            raise self._named(error, "waiting for the chunk", self.config.read_s) from None

    def _decoded(self, frame: bytes | str) -> Any:
        if isinstance(frame, str):
            return frame
        try:
            return decode(frame, self.limits)
        except WireFormatError as error:
            raise ServiceUnreadableError(f"what {self._uri} answers is no message of this protocol: {error}") from None

    def _named(self, error: Exception, doing: str, deadline_s: float) -> ServiceError:
        """Which kind of failure that was."""
        match error:
            case ServiceError():
                return error
            case TimeoutError():
                return ServiceTimeoutError(f"{self._uri} did not answer within {deadline_s:g} s while {doing}.")
            case InvalidStatus():
                return self._http(error.response.status_code, bytes(error.response.body or b""))
            case InvalidMessage() if _cut_short(error):
                return ServiceClosedError(f"{self._uri} hung up while {doing}.")
            case InvalidHandshake() | ValueError():  # a ValueError is a redirect, which is not followed
                return ServiceUnreadableError(f"what answers at {self._uri} is no WebSocket server ({short(error)}).")
            case ConnectionClosed() if error.rcvd is None and error.sent is not None and error.sent.code in _OURS:
                return ServiceUnreadableError(f"{self._uri} {_OURS[error.sent.code]} while {doing}.")
            case ConnectionClosed() if error.rcvd is not None and error.rcvd.code == 1009:
                return ServiceRefusedError(f"{self._uri} takes no request that large; send smaller pictures.")
            case ConnectionClosed() if error.rcvd is not None:
                said = f"code {error.rcvd.code}" + (f", {short(error.rcvd.reason)}" if error.rcvd.reason else "")
                return ServiceClosedError(f"{self._uri} hung up while {doing} ({said}).")
            case _:
                return ServiceClosedError(f"{self._uri} hung up while {doing}.")

    def _http(self, status: int, body: bytes) -> ServiceError:
        if status in (401, 403):
            return ServiceRefusedError(f"{self._uri} refused access (HTTP {status}); pass api_key= the server's token.")
        if status == 503:
            return ServiceRefusedError(f"{self._uri} takes no client now (HTTP 503: {short(body.decode('utf-8', 'replace'))}).")
        return ServiceUnreadableError(f"what answers at {self._uri} is no policy server (HTTP {status}).")

    def _broken_off(self) -> ServiceClosedError:
        return ServiceClosedError(f"the exchange with {self._uri} was broken off on this side.")

    def _wait(self, work: Coroutine[Any, Any, _T], may_cancel: bool = True) -> _T:
        """Run a coroutine on the connection's thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="policy-client", daemon=True)
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        if may_cancel:
            self._waiting = future
            if self._cancelled:  # cancel() came when there was nothing to wait for yet
                future.cancel()
        try:
            return future.result()
        except CancelledError:
            raise self._broken_off() from None
        finally:
            self._waiting = None
            future.cancel()  # Ctrl-C in the caller's thread

    def _abort(self) -> None:
        """Drop the connection without a word."""
        if self._connection is not None and self._loop is not None:
            self._wait(_hang_up(self._connection), may_cancel=False)
        self._connection = None


def _cut_short(error: BaseException | None) -> bool:
    """Whether a malformed HTTP response is one that stopped too early."""
    while error is not None:
        if isinstance(error, EOFError) and str(error).startswith("stream ends"):
            return True
        error = error.__cause__
    return False


async def _receive(connection: ClientConnection) -> bytes | str:
    """The next message. A peer that broke the protocol, or said goodbye, is not waited for until it hangs up."""
    while True:
        try:
            async with asyncio.timeout(_CLOSE_S):
                return await connection.recv()
        except TimeoutError:
            if connection.state is not State.OPEN:
                connection.transport.abort()


async def _usable(connection: ClientConnection) -> bool:
    """Whether it is open and nothing came in that nobody asked for."""
    try:
        async with asyncio.timeout(0):
            await connection.recv()
    except TimeoutError:
        return True
    except ConnectionClosed:
        return False
    return False


async def _hang_up(connection: ClientConnection) -> None:
    connection.transport.abort()
    await connection.wait_closed()


async def _goodbye(connection: ClientConnection | None) -> None:
    if connection is not None:
        await connection.close()
    if broken_off := asyncio.all_tasks() - {asyncio.current_task()}:  # their sockets are still to be closed
        await asyncio.wait(broken_off, timeout=_CLOSE_S)
