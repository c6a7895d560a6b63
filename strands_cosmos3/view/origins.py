"""Which web pages may open the live page's connection. viser itself accepts every one that the
browser shows.
"""

from __future__ import annotations

import http
import ipaddress
import re
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio import server

from strands_cosmos3.errors import ConfigError, RenderError

_HOST = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::\d{1,5})?")
_starting = threading.Lock()


def require_origins(origins: Collection[str]) -> None:
    """Raise ConfigError unless all are origins, ``scheme://host[:port]`` and nothing more."""
    for origin in origins:
        try:
            parts = urlsplit(origin)
            valid = parts.hostname and origin in (
                f"http://{parts.netloc}",
                f"https://{parts.netloc}",
            )
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(
                f"{origin!r} is not an origin; write scheme and host, "
                "e.g. https://robots.example:8443."
            )


def refused(host: str, origin: str | None, allowed: Collection[str]) -> str | None:
    """Return why a request is refused, or None.

    Args:
        host: Its ``Host``. It must be an IP address, localhost, this machine's name or an allowed
            origin's: another name may be one that somebody points at this address (DNS rebinding).
        origin: Its ``Origin``; programs other than browsers send none. It must be the page's own,
            or allowed.
        allowed: Further origins.
    """
    if not _is_ours(host, allowed):
        return (
            f"host {host!r} is not this machine's; open the page by its IP address, or allow the "
            "name with --page-origin."
        )
    if origin is None or origin in allowed or origin in (f"http://{host}", f"https://{host}"):
        return None
    return f"pages of {origin!r} may not read this one; allow them with --page-origin."


def _is_ours(host: str, allowed: Collection[str]) -> bool:
    if host in {urlsplit(origin).netloc for origin in allowed}:
        return True
    match = _HOST.fullmatch(host.lower())
    name = "" if match is None else match["six"] or match["name"]
    if name in ("localhost", socket.gethostname().lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@contextmanager
def only_own_pages(allowed: Collection[str]) -> Iterator[None]:
    """Within, a ``websockets`` server that starts in any thread answers only requests that
    :func:`refused` lets pass.

    viser has no such option and starts its server itself. If it starts none within, RenderError is
    raised: nothing must be served without this check.
    """
    serve = server.serve
    started = []

    def guarded(*args: Any, process_request: Any = None, **kwargs: Any) -> Any:
        started.append(True)

        def check(connection: Any, request: Any) -> Any:
            hosts = request.headers.get_all("Host")
            origins = request.headers.get_all("Origin")
            # one header given several times
            why = refused(", ".join(hosts), ", ".join(origins) or None, allowed)
            if why is not None:
                return connection.respond(http.HTTPStatus.FORBIDDEN, f"Forbidden: {why}\n")
            return None if process_request is None else process_request(connection, request)

        return serve(*args, process_request=check, **kwargs)

    with _starting:
        server.serve = guarded  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            server.serve = serve
    if not started:
        raise RenderError(
            "this version of viser starts its server in another way, so foreign pages could not "
            "be refused."
        )
