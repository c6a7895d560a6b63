"""The client of a server that answers JSON over HTTP: one connection, one deadline for each
request, typed errors.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from strands_cosmos3.errors import (
    ServiceClosedError,
    ServiceError,
    ServiceRefusedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
    ServiceUnreadableError,
    WireFormatError,
)
from strands_cosmos3.serving.client import ClientConfig, untrusted
from strands_cosmos3.serving.libero import INFO, PREDICT, PREDICT_BATCH, parse
from strands_cosmos3.serving.wire import short

_T = TypeVar("_T")
_PIECE = 2**18


class HttpPolicyClient:
    """Client of NVIDIA's LIBERO server, or of one that answers as it does.

    ``read_s`` covers a whole request once there is a connection: TLS, sending, inference and reply.

    Args:
        config: Address and timeouts; ``handshake_s`` and ``idle_s`` are not used.

    Attributes:
        counters: ``dials`` (connection attempts), complete ``exchanges`` and ``failures``.
        metadata: What the server's ``/info`` said; empty if it has none.
    """

    def __init__(
        self, config: ClientConfig | None = None, sleep: Callable[[float], None] = time.sleep
    ):
        self.config = config or ClientConfig()
        self.counters: Counter[str] = Counter()
        self.metadata: dict[str, Any] | None = None
        self._url, self._host, self._port = self.config.http_address
        self._sleep = sleep
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cancelled = self._expired = False

    def exchange(self, message: Any, read: Callable[[Any], _T]) -> _T:
        """Post a message, or what a function makes of ``metadata``, and return what ``read`` makes
        of the reply.

        Raises:
            WireFormatError: The message cannot be encoded.
            ServiceError: The exchange failed; the subclass says how.
        """
        with self._lock:
            complete = self._cancelled = False
            try:
                if self.metadata is None:
                    self.metadata = self._info()
                body = cast(
                    "Mapping[str, Any]", message(self.metadata) if callable(message) else message
                )
                path = PREDICT_BATCH if "items" in body else PREDICT
                value = read(self._json(*self._call("POST", path, _encoded(body))))
                complete = True
                return value
            finally:
                self.counters["exchanges" if complete else "failures"] += 1

    def cancel(self) -> None:
        """Cancel an exchange that runs in another thread: it raises :class:`ServiceClosedError`.
        No-op if there is none.
        """
        if self._lock.locked():
            self._cancelled = True
            self._hang_up()

    def close(self) -> None:
        """Do nothing: no connection outlives its exchange."""

    def _info(self) -> dict[str, Any]:
        status, body = self._call("GET", INFO, b"")
        return {} if status == 404 else self._json(status, body)

    def _call(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """The status and the body of a response."""
        self._expired = False
        self._socket = self._dial()
        deadline = threading.Timer(self.config.read_s, self._expire)
        deadline.daemon = True
        deadline.start()
        connection = http.client.HTTPConnection(self._host, self._port)
        try:
            if self._cancelled:
                raise OSError
            connection.sock = self._secured(self._socket)
            headers = {
                "Content-Type": "application/json",
                "Connection": "close",
                "User-Agent": "strands-cosmos3",
            }
            if self.config.token:
                headers["Authorization"] = f"{self.config.scheme} {self.config.token}"
            # a server that refuses a body may have said why
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(
                    method, urlsplit(self._url).path.rstrip("/") + path, body or None, headers
                )
            with connection.getresponse() as response:
                return response.status, self._body(response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._named(error) from None
        finally:
            deadline.cancel()
            deadline.join()
            connection.close()
            self._socket.close()
            self._socket = None

    def _dial(self) -> socket.socket:
        pause, failure = self.config.first_pause_s, ""
        for attempt in range(self.config.attempts):
            if attempt:
                self._sleep(pause)
                pause = min(2 * pause, self.config.longest_pause_s)
            if self._cancelled:
                raise self._named(OSError())
            self.counters["dials"] += 1
            try:
                return socket.create_connection(
                    (self._host, self._port), timeout=self.config.connect_s
                )
            except (OSError, UnicodeError) as error:
                failure = short(error)
        tried = f"no policy server at {self._url} after {self.config.attempts} attempts ({failure})"
        raise ServiceUnavailableError(
            f"{tried}. Is it running? Ours is strands-cosmos3 serve --libero --port {self._port}."
        )

    def _secured(self, tcp: socket.socket) -> socket.socket:
        """The socket, after TLS' handshake if the server's URL asks for one."""
        tcp.settimeout(self.config.read_s)
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._url.startswith("https:"):
            return tcp
        context = ssl.create_default_context()
        self._socket = tls = context.wrap_socket(
            tcp, server_hostname=self._host, do_handshake_on_connect=False
        )
        tls.do_handshake()
        return tls

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        most, length = self.config.max_reply_bytes, response.length
        pieces, count = list[bytes](), 0
        while piece := response.read(_PIECE):
            pieces.append(piece)
            count += len(piece)
            if count > most:
                raise ServiceUnreadableError(
                    f"{self._url} sent more than is read ({most} bytes; raise "
                    "ClientConfig.max_reply_bytes)."
                )
        if self._expired or self._cancelled or (length is not None and count < length):
            raise http.client.IncompleteRead(b"")
        return b"".join(pieces)

    def _json(self, status: int, body: bytes) -> dict[str, Any]:
        """The object in a response, whatever its status if it has an ``error``."""
        if status in (401, 403):
            raise ServiceRefusedError(
                f"{self._url} refused access (HTTP {status}); pass api_key= the server's token."
            )
        try:
            content = parse(body)
        except WireFormatError as error:
            if status != 200:
                text = short(body[:2000].decode("utf-8", "replace"))
                refusal = (
                    (ServiceRefusedError, "refused the request")
                    if status in (408, 413, 503)
                    else None
                )
                kind, problem = refusal or (ServiceUnreadableError, "is not a LIBERO server")
                raise kind(f"{self._url} {problem} (HTTP {status}: {text}).") from None
            raise ServiceUnreadableError(
                f"the answer of {self._url} cannot be read: {error}"
            ) from None
        if status != 200:
            raise ServiceRefusedError(
                f"{self._url} refused the request (HTTP {status}: "
                f"{short(content.get('error', ''))})."
            )
        return content

    def _expire(self) -> None:
        self._expired = True
        self._hang_up()

    def _hang_up(self) -> None:
        """Shut the connection down, which ends what waits for it in another thread."""
        if (open_socket := self._socket) is not None:
            with suppress(OSError):
                # not SSLSocket's, which would go on without TLS
                socket.socket.shutdown(open_socket, socket.SHUT_RDWR)

    def _named(self, error: Exception) -> ServiceError:
        """The typed error for a failure."""
        if isinstance(error, ServiceError):
            return error
        if self._cancelled:
            return ServiceClosedError(f"the exchange with {self._url} was cancelled on this side.")
        if self._expired or isinstance(error, TimeoutError):
            return ServiceTimeoutError(
                f"{self._url} did not answer within {self.config.read_s:g} s."
            )
        if isinstance(error, ssl.SSLError):
            return untrusted(self._url, error)
        closed = http.client.RemoteDisconnected, http.client.IncompleteRead, OSError
        if isinstance(error, closed):
            return ServiceClosedError(
                f"{self._url} closed the connection before the answer was complete."
            )
        return ServiceUnreadableError(
            f"{self._url} is not an HTTP server ({type(error).__name__}: {short(error)})."
        )


def _encoded(message: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(message, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise WireFormatError(f"this message cannot be encoded: {error}.") from None
