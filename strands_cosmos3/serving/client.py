"""Clients of policy servers: one exchange at a time, a deadline on every wait, a typed error for
every failure.

A timer shuts the connection down when its deadline has passed, so that one deadline covers the
whole exchange, including servers that accept and stay silent, send slowly or do not read. A
connection is reused only after a complete exchange. After anything else it is aborted, so that a
late reply cannot answer the next request.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidMessage,
    InvalidStatus,
    WebSocketException,
)

from strands_cosmos3.checks import known_name, positive, whole_number
from strands_cosmos3.errors import (
    ConfigError,
    ServiceBusyError,
    ServiceClosedError,
    ServiceError,
    ServiceRefusedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
    ServiceUnreadableError,
    WireFormatError,
)
from strands_cosmos3.serving.admission import Priority
from strands_cosmos3.serving.codec import Limits, decode, encode_view
from strands_cosmos3.serving.connection import WebSocket
from strands_cosmos3.serving.wire import (
    ENCODINGS,
    PICTURES_HEADER,
    PRIORITY_HEADER,
    Encoding,
    encodable,
    short,
)

_T = TypeVar("_T")
_CLOSE_S = 0.2  # time for the peer to complete a close before the connection is aborted
_PONG_S = 5.0  # interval at which pings are answered between exchanges
_RESTART = 1012
"""Code with which a fleet closes a connection whose request it did not infer for."""
_OURS = {
    1002: "broke the WebSocket protocol",
    1009: "sent more than is read (raise ClientConfig.max_reply_bytes)",
}
"""Close codes that the client sends, and what the server did."""


@dataclass(frozen=True)
class ClientConfig:
    """Address of a server, and timeouts.

    Args:
        host: Host name or IP address, or a URI with ``ws://`` or ``wss://`` (for an HTTP dialect
            ``http://`` or ``https://``).
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
            dialled anew and asked again: vLLM-Omni closes idle ones after 30 s. One that a fleet
            closes (1012) is so in any case.
        max_reply_bytes: Largest reply that is read. The default has room for NVIDIA's servers with
            ``decode_video`` (40 MB).
        path: Path of the server, if ``host`` has none.
        priority: Class in which our server is asked, ``realtime`` or ``bulk``; None is the one that
            it gives to the token, else ``bulk``.
        deadline_s: Time after which an answer is useless; a server of ours then refuses the request
            at once. None is the request's own.
        pictures: How views as they were seen are sent to a server that reads them, ``jpeg`` or
            ``raw``; None is JPEG where Pillow is installed.

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
    priority: str | None = None
    deadline_s: float | None = None
    pictures: Encoding | None = None

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self) if item.name.endswith("_s")):
            if (value := getattr(self, name)) is not None:
                positive(value, name)
        whole_number(self.attempts, "attempts", 1)
        whole_number(self.max_reply_bytes, "max_reply_bytes", 1024, 2**30)
        if self.port is not None:
            whole_number(self.port, "port", 1, 65535)
        if self.priority is not None:
            known_name(self.priority, "priority", list(Priority))
        if self.pictures is not None:
            known_name(self.pictures, "encoding of pictures", ENCODINGS)
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
        text = self.host
        if "://" not in text:
            if text.count(":") > 1 and not text.startswith("["):  # an IPv6 address
                text = f"[{text}]"
            text = f"{plain}://{text}"
        parts, stated = _split(text)
        if parts.scheme not in (plain, encrypted) or not parts.hostname or stated == 0:
            raise ConfigError(
                f"host {self.host!r} is not an address; write e.g. localhost, or "
                f"{encrypted}://gpu.example:443/policy."
            )
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise ConfigError(
                f"host {parts.hostname!r} has a query, a fragment or a login, which are not sent; "
                "an address is a host, a port and a path, and a token is passed as api_key."
            )
        port = self.port or stated or (443 if parts.scheme == encrypted else 8000)
        name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        path = parts.path if parts.path.strip("/") else self.path or parts.path
        return f"{parts.scheme}://{name}:{port}{path}", parts.hostname, port


def _split(url: str) -> tuple[SplitResult, int | None]:
    """A URL's parts and its port; no parts if it is none."""
    try:
        parts = urlsplit(url)
        return parts, parts.port
    except ValueError:
        return urlsplit(""), None


class ServiceClient(ABC):
    """One server, one exchange at a time. It connects on first use, and again after a failure.

    Attributes:
        counters: ``dials`` (connection attempts), ``reconnects``, complete ``exchanges`` and
            ``failures``.
    """

    _command: str  # starts a server of ours

    def __init__(
        self, config: ClientConfig, address: tuple[str, str, int], sleep: Callable[[float], None]
    ):
        self.config = config
        self.counters: Counter[str] = Counter()
        self._url, self._host, self._port = address
        self._proxy, self._proxy_headers = _proxy_of(self._url)
        # a plain request is passed on by the proxy, instead of a connection
        self._forwarded = self._proxy is not None and self._url.startswith("http:")
        self._sleep = sleep
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cancelled = self._expired = False

    def exchange(self, message: Any, read: Callable[[Any], _T]) -> _T:
        """Send a message and return what ``read`` makes of the decoded reply, or of the text of a
        text frame.

        The subclass says what a message is. If ``read`` raises anything but ServiceBusyError, the
        connection is dropped.

        Raises:
            WireFormatError: The message cannot be encoded.
            ServiceError: The exchange failed; the subclass says how. The connection is closed.
        """
        with self._lock:
            complete = self._cancelled = False
            try:
                value = read(self._answer(message))
                complete = True
                return value
            except ServiceBusyError:
                complete = True
                raise
            finally:  # on any exception, KeyboardInterrupt included
                self.counters["exchanges" if complete else "failures"] += 1
                if not complete:
                    self._abort()

    @abstractmethod
    def _answer(self, message: Any) -> Any:
        """The decoded reply to a message."""

    @abstractmethod
    def _interpreted(self, error: Exception, doing: str) -> ServiceError:
        """The typed error for a failure of the protocol or of the connection."""

    def cancel(self) -> None:
        """Cancel an exchange that runs in another thread: it raises :class:`ServiceClosedError`.
        No-op if there is none.
        """
        if self._lock.locked():
            self._cancelled = True
            self._hang_up()

    def close(self) -> None:
        """Close the connection, if one is open. Idempotent; the next exchange connects again."""
        with self._lock:
            self._abort()

    def _dial(self) -> None:
        pause = self.config.first_pause_s
        failure = ""
        for attempt in range(self.config.attempts):
            if attempt:
                self._sleep(pause)
                pause = min(2 * pause, self.config.longest_pause_s)
            if self._cancelled:
                raise self._cancelled_error()
            self.counters["dials"] += 1
            try:
                self._socket = self._connected()
                return
            except (OSError, UnicodeError, http.client.HTTPException) as error:
                failure = short(error)
        via = f" through the proxy {self._proxy[0]}" if self._proxy else ""
        attempts = self.config.attempts
        tried = f"no policy server at {self._url}{via} after {attempts} attempts ({failure})"
        raise ServiceUnavailableError(
            f"{tried}. Is it running? Start one there with {self._command} --port {self._port}."
        )

    def _connected(self) -> socket.socket:
        """A new connection to the server, or to the environment's proxy for it."""
        host, port = self._proxy or (self._host, self._port)
        connection = http.client.HTTPConnection(host, port, timeout=self.config.connect_s)
        if self._proxy and not self._forwarded:
            connection.set_tunnel(self._host, self._port, self._proxy_headers)
        connection.connect()
        return connection.sock

    @contextmanager
    def _within(self, limit_s: float, doing: str) -> Generator[None]:
        """Shut the connection down if a part of an exchange takes longer, and raise its failures as
        typed errors.
        """
        self._expired = False
        deadline = threading.Timer(limit_s, self._expire)
        deadline.daemon = True
        deadline.start()
        try:
            if self._cancelled:
                raise self._cancelled_error()
            yield
        except (OSError, ValueError, http.client.HTTPException, WebSocketException) as error:
            if self._cancelled:
                raise self._cancelled_error() from None
            if self._expired:
                raise ServiceTimeoutError(
                    f"{self._url} did not answer within {limit_s:g} s while {doing}."
                ) from None
            if isinstance(error, ssl.SSLError):
                raise ServiceUnreadableError(
                    f"{self._url} has no valid certificate or no TLS ({short(error)}). Trust a "
                    "certificate of your own with SSL_CERT_FILE=FILE.pem in the environment."
                ) from None
            raise self._interpreted(error, doing) from None
        finally:
            deadline.cancel()
            deadline.join()

    def _secured(self) -> socket.socket:
        """The socket, after TLS' handshake if the server's URL asks for one."""
        connected = self._socket
        assert connected is not None
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._url.startswith(("wss:", "https:")):
            return connected
        self._socket = tls = ssl.create_default_context().wrap_socket(
            connected, server_hostname=self._host, do_handshake_on_connect=False
        )
        tls.do_handshake()
        return tls

    @property
    def _introduction(self) -> dict[str, str]:
        """Headers that say who asks."""
        config = self.config
        token = {"Authorization": f"{config.scheme} {config.token}"} if config.token else {}
        return token | ({PRIORITY_HEADER: config.priority} if config.priority else {})

    def _expire(self) -> None:
        self._expired = True
        self._hang_up()

    def _hang_up(self) -> None:
        """Shut the connection down, which ends what waits for it in another thread."""
        if (open_socket := self._socket) is not None:
            with suppress(OSError):
                # not SSLSocket's, which would go on without TLS
                socket.socket.shutdown(open_socket, socket.SHUT_RDWR)

    def _abort(self) -> None:
        """Drop the connection, if there is one."""
        if self._socket is not None:
            self._hang_up()
            self._socket.close()
            self._socket = None

    def _cancelled_error(self) -> ServiceClosedError:
        return ServiceClosedError(f"the exchange with {self._url} was cancelled on this side.")

    def _access_error(self, status: int) -> ServiceRefusedError:
        return ServiceRefusedError(
            f"{self._url} refused access (HTTP {status}); pass api_key= the server's token."
        )


def _proxy_of(url: str) -> tuple[tuple[str, int] | None, dict[str, str]]:
    """Host and port of the proxy that HTTPS_PROXY (with TLS), HTTP_PROXY or ALL_PROXY names, unless
    NO_PROXY has the server, and the headers for it. Raises ConfigError if it is not ``http://``.
    """
    server, proxies = urlsplit(url), getproxies()
    text = proxies.get("https" if server.scheme in ("wss", "https") else "http")
    text = text or proxies.get("all")
    if not text or proxy_bypass(server.netloc):
        return None, {}
    proxy, port = _split(text if "://" in text else f"http://{text}")
    if proxy.scheme != "http" or not proxy.hostname:
        address = f"{proxy.scheme}://{proxy.hostname or ''}" if proxy.scheme else "no address"
        raise ConfigError(
            f"the environment's proxy is {address}; only http:// proxies are used: change it, or "
            "add the server to NO_PROXY."
        )
    login = b64encode(unquote(f"{proxy.username}:{proxy.password or ''}").encode()).decode()
    headers = {"Proxy-Authorization": f"Basic {login}"} if proxy.username else {}
    return (proxy.hostname, port or 80), headers


class PolicyClient(ServiceClient):
    """Client of a policy server, over a WebSocket that stays open between exchanges. A message is a
    map, or a function that makes it of the server's metadata.

    Attributes:
        metadata: The server's first frame.
    """

    _command = "strands-cosmos3 serve"

    def __init__(
        self,
        config: ClientConfig = ClientConfig(),
        sleep: Callable[[float], None] = time.sleep,
    ):
        super().__init__(config, config.address, sleep)
        self._reply_limits = Limits(max_bytes=config.max_reply_bytes)
        self.metadata: dict[str, Any] = {}
        self._connection: WebSocket | None = None
        self._idle_since = 0.0
        self._left = threading.Event()
        self._attendant: threading.Thread | None = None

    @property
    def _introduction(self) -> dict[str, str]:
        return super()._introduction | {PICTURES_HEADER: encodable(self.config.pictures)}

    def close(self) -> None:
        """Close the connection, if one is open. Idempotent; the next exchange connects again."""
        with self._lock:
            self._cancelled = False
            if self._connection is not None:
                with suppress(ServiceError), self._within(_CLOSE_S, "closing"):
                    self._connection.close()
            self._abort()

    def _abort(self) -> None:
        super()._abort()
        self._connection = None
        if self._attendant is not None:
            self._left.set()
            self._attendant.join()
            self._attendant = None

    def _answer(self, message: Any) -> Any:
        """The decoded reply, or the text of a text frame; reconnects if there is no connection or
        it ended since the last exchange.
        """
        if self._connection is not None:
            reply = self._pass(self._connection, message, fresh=False)
            if reply is not None:
                return self._decoded(reply)
            self._abort()
        self.counters["reconnects"] += bool(self.counters["dials"])
        reply = self._pass(self._greeted(), message, fresh=True)
        assert reply is not None  # a fresh connection is always used
        return self._decoded(reply)

    def _greeted(self) -> WebSocket:
        """A new connection, after the handshake and the server's metadata."""
        self._dial()
        with self._within(self.config.handshake_s, "shaking hands"):
            connection = WebSocket(self._secured(), self._url, self.config.max_reply_bytes)
            connection.shake_hands(self._introduction)
            metadata = self._decoded(connection.receive())
        if isinstance(metadata, str):
            raise ServiceRefusedError(
                f"the server at {self._url} refused the connection: {short(metadata)}"
            )
        if not isinstance(metadata, dict):
            raise ServiceUnreadableError(
                f"the first frame from {self._url} is not a map of metadata."
            )
        self.metadata = metadata
        self._connection = connection
        self._left.clear()
        self._attendant = threading.Thread(
            target=self._attend, args=(connection,), name="policy-client", daemon=True
        )
        self._attendant.start()
        return connection

    def _attend(self, connection: WebSocket) -> None:
        """Answer the server's pings between exchanges, on a thread of the connection."""
        while not self._left.wait(_PONG_S):
            if self._lock.acquire(blocking=False):  # an exchange answers them itself
                try:
                    connection.is_quiet()
                finally:
                    self._lock.release()

    def _pass(self, connection: WebSocket, message: Any, fresh: bool) -> bytes | str | None:
        """Send a message and return the reply; None, with nothing answered, if the old connection
        is no longer usable.
        """
        if callable(message):
            message = message(self.metadata)
        frame = encode_view(message)
        idle_s = 0.0 if fresh else time.monotonic() - self._idle_since
        with self._within(self.config.read_s, "waiting for the chunk"):
            quiet = connection.is_quiet()
            if not quiet and not fresh:
                return None
            try:
                if quiet:
                    connection.send(frame)
                reply = connection.receive()
            except ConnectionClosed as error:
                code = None if error.rcvd is None else error.rcvd.code
                crossed = code == 1000 and idle_s >= self.config.idle_s
                if crossed or (code == _RESTART and not fresh):
                    return None
                raise
        if not quiet and isinstance(reply, bytes):
            raise ServiceUnreadableError(
                f"{self._url} sent more than its metadata before it was asked."
            )
        self._idle_since = time.monotonic()
        return reply

    def _decoded(self, frame: bytes | str) -> Any:
        if isinstance(frame, str):
            return frame
        try:
            return decode(frame, self._reply_limits, writable=True, strict=True)
        except WireFormatError as error:
            raise ServiceUnreadableError(
                f"the answer of {self._url} is not a message of this protocol: {error}"
            ) from None

    def _interpreted(self, error: Exception, doing: str) -> ServiceError:
        match error:
            case InvalidStatus():
                return self._http(error.response.status_code, bytes(error.response.body or b""))
            case InvalidMessage() if _cut_short(error):
                reason = ""
            case InvalidHandshake():
                return ServiceUnreadableError(
                    f"{self._url} is not a WebSocket server ({short(error)})."
                )
            case UnicodeDecodeError():
                return ServiceUnreadableError(f"{self._url} sent text that is no UTF-8.")
            case ConnectionClosed(rcvd=None) if error.sent is not None and error.sent.code in _OURS:
                return ServiceUnreadableError(
                    f"{self._url} {_OURS[error.sent.code]} while {doing}."
                )
            case ConnectionClosed() if error.rcvd is not None:
                if error.rcvd.code == 1009:
                    return ServiceRefusedError(
                        f"{self._url} does not accept a request that large; send smaller pictures."
                    )
                said = f", {short(error.rcvd.reason)}" if error.rcvd.reason else ""
                reason = f" (code {error.rcvd.code}{said})"
            case _:
                reason = ""
        return ServiceClosedError(f"{self._url} closed the connection while {doing}{reason}.")

    def _http(self, status: int, body: bytes) -> ServiceError:
        if status in (401, 403):
            return self._access_error(status)
        if status == 503:
            reason = short(body.decode("utf-8", "replace"))
            return ServiceRefusedError(f"{self._url} accepts no more clients (HTTP 503: {reason}).")
        return ServiceUnreadableError(f"{self._url} is not a policy server (HTTP {status}).")


def _cut_short(error: BaseException | None) -> bool:
    """Whether a malformed HTTP response is a truncated one."""
    while error is not None:
        if isinstance(error, EOFError) and str(error).startswith("stream ends"):
            return True
        error = error.__cause__
    return False
