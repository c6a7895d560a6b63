"""Options and tokens of a policy server."""

from __future__ import annotations

import hmac
import ipaddress
import ssl
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from websockets.datastructures import Headers

from strands_cosmos3.checks import known_name, positive, whole_number
from strands_cosmos3.errors import ConfigError, ResourceNotFoundError
from strands_cosmos3.serving.admission import Priority
from strands_cosmos3.serving.connection import MAX_FRAGMENTS
from strands_cosmos3.serving.wire import PRIORITY_HEADER

MIN_CHARACTERS = 16
_SCHEMES = ("api-key", "bearer")


@dataclass(frozen=True)
class Tokens:
    """Client's name -> its token, and the clients whose requests go before all others.

    Raises:
        ConfigError: A token is shorter than 16 characters, has spaces or is not ASCII, or two
            clients have the same.
    """

    by_client: Mapping[str, str] = field(repr=False)
    realtime: Collection[str] = ()

    def __post_init__(self) -> None:
        for client, token in self.by_client.items():
            if (
                not token.isascii()
                or any(not c.isprintable() or c.isspace() for c in token)
                or len(token) < MIN_CHARACTERS
            ):
                raise ConfigError(
                    f"the token of {client!r} must have at least {MIN_CHARACTERS} printable ASCII "
                    "characters and no spaces. "
                    "Make one with: openssl rand -hex 16."
                )
        if len(set(self.by_client.values())) < len(self.by_client):
            raise ConfigError(
                "two clients have the same token; each needs its own, so that one can be withdrawn."
            )

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Read a file with one token per line, each with the client's name before it or without,
        and after both maybe ``realtime``: ``robot-1 3f9c... realtime``.

        Blank lines and lines that start with # are skipped.

        Raises:
            ResourceNotFoundError: It cannot be read.
            ConfigError: Other users may read it, or it holds no valid tokens.
        """
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            mode = path.stat().st_mode
        except (OSError, UnicodeDecodeError):
            raise ResourceNotFoundError(f"no token can be read from {str(path)!r}.") from None
        if mode & stat.S_IROTH:
            raise ConfigError(
                f"{str(path)!r} can be read by every user of this machine; run: chmod 600 {path}"
            )
        words = [
            line.split() for line in lines if line.strip() and not line.strip().startswith("#")
        ]
        if not words or any(len(line) > 2 and line[2:] != [Priority.REALTIME] for line in words):
            raise ConfigError(
                f"{str(path)!r} must have one token per line, with or without the client's name "
                "before it, and after both maybe: realtime."
            )
        pairs = [
            (line[0], line[1]) if len(line) > 1 else (f"client {i}", line[0])
            for i, line in enumerate(words, 1)
        ]
        if len(dict(pairs)) < len(pairs):
            raise ConfigError(f"{str(path)!r} names a client twice.")
        return cls(dict(pairs), [line[0] for line in words if len(line) > 2])

    def client_of(self, headers: Headers) -> str | None:
        """Return whose token ``Authorization: Api-Key <token>`` or ``Bearer <token>`` has; None
        if no client has it.
        """
        values = headers.get_all("Authorization")
        scheme, _, presented = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        owner = None
        for client, token in self.by_client.items():  # compare all, so that the time tells nothing
            if hmac.compare_digest(presented.strip().encode("utf-8", "replace"), token.encode()):
                owner = client
        return owner if scheme.lower() in _SCHEMES else None


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
        max_per_address: Maximum number of connections of one address; None is no limit, since
            machines behind a proxy share one.
        idle_s: Time without a request after which a connection may lose its place.
        max_batch: Maximum number of waiting requests that share one inference.
        body_s: Time in which an HTTP request with a body must have arrived.
        message_s: Time in which a WebSocket message must have arrived, from its first byte to its
            last.
        max_fragments: Maximum number of frames of a WebSocket message.
        max_pending: Maximum number of connections without a place, whose request has not arrived
            yet or is refused; the oldest ones make room. Fewer if the process may open too few
            files (``ulimit -n``).
        queue_s: Requests that have waited longer are refused without an inference: a late chunk is
            useless.
        realtime: Names of the tokens' clients whose requests go before all others. If there are
            none, each client says whether it is one.
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
    max_per_address: int | None = None
    message_s: float = 30.0
    max_fragments: int = MAX_FRAGMENTS
    max_pending: int = 512
    realtime: Collection[str] = ()

    def __post_init__(self) -> None:
        whole_number(self.port, "port", 0, 65535)
        for name in ("max_clients", "max_batch", "max_fragments", "max_pending"):
            whole_number(getattr(self, name), name, 1)
        if self.max_per_address is not None:
            whole_number(self.max_per_address, "max_per_address", 1)
        for name in ("grace_s", "idle_s", "queue_s", "body_s", "message_s"):
            positive(getattr(self, name), name)
        known = () if self.tokens is None else self.tokens.by_client
        for client in self.realtime:
            known_name(client, "token's client", known)
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

    @property
    def places_per_token(self) -> int:
        """Connections that one token may have: half of all, if there are several tokens."""
        several = self.tokens is not None and len(self.tokens.by_client) > 1
        return max(1, self.max_clients // 2) if several else self.max_clients + 1

    def priority_of(self, owner: str, headers: Headers) -> Priority:
        """Return the class of a token's owner, or of any client: realtime if its headers say so. A
        realtime owner may ask for bulk.
        """
        asked = headers.get_all(PRIORITY_HEADER)
        if self.realtime:
            realtime = owner in self.realtime and asked != [Priority.BULK]
        else:
            realtime = asked == [Priority.REALTIME]
        return Priority.REALTIME if realtime else Priority.BULK

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
