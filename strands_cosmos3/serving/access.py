"""Tokens of a server: one for each client, compared in constant time."""

from __future__ import annotations

import hmac
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from websockets.datastructures import Headers

from strands_cosmos3.errors import ConfigError, ResourceNotFoundError

MIN_CHARACTERS = 16
_SCHEMES = ("api-key", "bearer")


@dataclass(frozen=True)
class Tokens:
    """Client's name -> its token.

    Raises:
        ConfigError: A token is shorter than 16 characters, has spaces or is not ASCII, or two
            clients have the same.
    """

    by_client: Mapping[str, str] = field(repr=False)

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
        """Read a file with one token per line, each with the client's name before it or without:
        ``robot-1 3f9c...``.

        Blank lines and lines that start with # are skipped.

        Raises:
            ResourceNotFoundError: It cannot be read.
            ConfigError: Other users may read it, or it holds no valid tokens.
        """
        try:
            lines, mode = path.read_text().splitlines(), path.stat().st_mode
        except (OSError, UnicodeDecodeError):
            raise ResourceNotFoundError(f"no token can be read from {str(path)!r}.") from None
        if mode & stat.S_IROTH:
            raise ConfigError(
                f"{str(path)!r} can be read by every user of this machine; run: chmod 600 {path}"
            )
        words = [
            line.split() for line in lines if line.strip() and not line.strip().startswith("#")
        ]
        if not words or any(len(line) > 2 for line in words):
            raise ConfigError(
                f"{str(path)!r} must have one token per line, with or without the client's name "
                "before it."
            )
        named = [
            (line[0] if len(line) == 2 else f"client {i}", line[-1])
            for i, line in enumerate(words, 1)
        ]
        if len(dict(named)) < len(named):
            raise ConfigError(f"{str(path)!r} names a client twice.")
        return cls(dict(named))

    def client_of(self, headers: Headers) -> str | None:
        """Return whose token ``Authorization: Api-Key <token>`` or ``Bearer <token>`` has; None
        if no client has it.
        """
        shown = headers.get_all("Authorization")
        scheme, _, given = shown[0].partition(" ") if len(shown) == 1 else ("", "", "")
        found = None
        for client, token in self.by_client.items():  # compare all, so that the time tells nothing
            if hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode()):
                found = client
        return found if scheme.lower() in _SCHEMES else None
