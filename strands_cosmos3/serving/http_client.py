"""The client of a server that answers JSON over HTTP."""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from strands_cosmos3.errors import (
    ServiceClosedError,
    ServiceError,
    ServiceRefusedError,
    ServiceUnreadableError,
    WireFormatError,
)
from strands_cosmos3.serving.client import ClientConfig, ServiceClient
from strands_cosmos3.serving.routes import HttpDialect, read_object
from strands_cosmos3.serving.wire import DEADLINE_HEADER, short, stated_error


@dataclass(frozen=True)
class Post:
    """A message of an HTTP dialect.

    Args:
        dialect: The dialect.
        path, content: Where the object is posted.
        check_info: Is told the object of the dialect's ``info_path`` before; whatever it raises
            ends the exchange.
        wait_s: Time for which the answer is waited for.
    """

    dialect: HttpDialect
    path: str
    content: Mapping[str, Any]
    check_info: Callable[[Mapping[str, Any]], None]
    wait_s: float = math.inf


class HttpPolicyClient(ServiceClient):
    """Client of a server of any HTTP dialect; an exchange's message is a :class:`Post`. Each
    request has a connection of its own.

    ``read_s`` covers a whole request once there is a connection: TLS, sending, inference and reply.

    Args:
        config: Address and timeouts; ``handshake_s`` and ``idle_s`` are not used.

    Attributes:
        metadata: What the server said at ``info_path``; empty if it has none.
    """

    def __init__(
        self, config: ClientConfig = ClientConfig(), sleep: Callable[[float], None] = time.sleep
    ):
        super().__init__(config, config.http_address, sleep)
        self.metadata: dict[str, Any] | None = None

    def _answer(self, message: Post) -> Any:
        self._command = f"strands-cosmos3 serve --http {message.dialect.name}"
        if self.metadata is None and message.dialect.info_path:
            status, body = self._call("GET", message.dialect.info_path, b"")
            self.metadata = {} if status == 404 else self._read(status, body, read_object)
        message.check_info(self.metadata or {})
        more = {DEADLINE_HEADER: str(message.wait_s * 1e3)} if message.wait_s < math.inf else {}
        status, body = self._call("POST", message.path, _encoded(message.content), more)
        return self._read(status, body, message.dialect.read_reply)

    def _call(
        self, method: str, path: str, body: bytes, more: Mapping[str, str] = {}
    ) -> tuple[int, bytes]:
        """The status and the body of a response."""
        self._dial()
        connection = http.client.HTTPConnection(self._host, self._port)
        headers = {
            "Content-Type": "application/json",
            "Connection": "close",
            "User-Agent": "strands-cosmos3",
            **self._introduction,
            **more,
        }
        address = urlsplit(self._url)
        path = address.path.rstrip("/") + path
        if self._forwarded:
            path = f"http://{address.netloc}{path}"
            headers |= self._proxy_headers
        try:
            with self._within(self.config.read_s, "waiting for the chunk"):
                connection.sock = self._secured()
                # a server that refuses a body may have said why
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, path, body or None, headers)
                with connection.getresponse() as response:
                    return response.status, self._body(response)
        finally:
            connection.close()
            self._abort()

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        most = self.config.max_reply_bytes
        length = response.length or 0
        body = response.read(most + 1)
        if len(body) > most:
            raise ServiceUnreadableError(
                f"{self._url} sent more than is read ({most} bytes; raise "
                "ClientConfig.max_reply_bytes)."
            )
        if self._expired or self._cancelled or len(body) < length:
            raise http.client.IncompleteRead(b"")
        return body

    def _read(self, status: int, body: bytes, read: Callable[[bytes], Any]) -> Any:
        """What a response holds. One of another status than 200 may say an ``error``."""
        if status in (401, 403):
            raise self._access_error(status)
        try:
            content = read(body) if status == 200 else read_object(body)
        except WireFormatError as error:
            if status == 200:
                raise ServiceUnreadableError(
                    f"the answer of {self._url} cannot be read: {error}"
                ) from None
            text = f"(HTTP {status}: {short(body[:2000].decode('utf-8', 'replace'))})"
            if status in (408, 413, 503):
                raise ServiceRefusedError(f"{self._url} refused the request {text}.") from None
            raise ServiceUnreadableError(
                f"{self._url} is not an HTTP policy server {text}."
            ) from None
        if status != 200:
            said = f"(HTTP {status}: {short(content.get('error', ''))})"
            raise stated_error(content, f"{self._url} refused the request {said}.")
        return content

    def _interpreted(self, error: Exception, doing: str) -> ServiceError:
        if isinstance(error, http.client.RemoteDisconnected | http.client.IncompleteRead | OSError):
            return ServiceClosedError(f"{self._url} closed the connection while {doing}.")
        return ServiceUnreadableError(
            f"{self._url} is not an HTTP server ({type(error).__name__}: {short(error)})."
        )


def _encoded(message: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(message, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise WireFormatError(f"this message cannot be encoded: {error}.") from None
