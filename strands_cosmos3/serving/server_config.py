"""Options of a policy server."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from strands_cosmos3.checks import positive, whole_number
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.serving.access import Tokens


@dataclass(frozen=True)
class ServerConfig:
    """Options of a server.

    Args:
        host: Interface to listen on; any but loopback requires a token.
        port: Port; 0 picks a free one.
        token: Token that clients must send as ``Authorization: Api-Key <token>`` or ``Bearer
            <token>``, or a token for each client by name; None is no authentication.
        grace_s: Time that a shutdown waits for the running inference.
        max_clients: Maximum number of connections. A further client takes the place of one that has
            been idle for ``idle_s``, or gets HTTP 503.
        idle_s: Time without a request after which a connection may lose its place.
        max_batch: Maximum number of waiting requests that share one inference.
        body_s: Time in which an HTTP request with a body must have arrived.
        queue_s: Requests that have waited longer are refused without an inference: a late chunk is
            useless.
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
    body_s: float = 10.0

    def __post_init__(self) -> None:
        whole_number(self.port, "port", 0, 65535)
        whole_number(self.max_clients, "max_clients", 1)
        whole_number(self.max_batch, "max_batch", 1)
        for name in ("grace_s", "idle_s", "queue_s", "body_s"):
            positive(getattr(self, name), name)
        _ = self.tokens
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                "TLS needs both a certificate and its key (--tls-cert and --tls-key)."
            )
        if self.token is None and not _is_loopback(self.host):
            raise ConfigError(
                f"host {self.host!r} can be reached from other machines, and any client of this "
                "server can move the robot. "
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
            raise ConfigError(
                f"{pair} are not a certificate and its key in PEM ({error})."
            ) from None
        return context


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
