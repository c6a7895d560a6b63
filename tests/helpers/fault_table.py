"""What a server does wrong, phase by phase: every fault in every phase with how it ends, or why
it has no meaning there.
"""

from __future__ import annotations

from helpers.faulty_server import CHUNKS, FRAMES, HTTP
from strands_cosmos3.errors import (
    ServiceChunkError,
    ServiceClosedError,
    ServiceError,
    ServiceRefusedError,
    ServiceTimeoutError,
    ServiceUnreadableError,
)

Error = type[ServiceError]
SILENT, CLOSED = ServiceTimeoutError, ServiceClosedError
UNREADABLE, REFUSED, CHUNK = ServiceUnreadableError, ServiceRefusedError, ServiceChunkError

HANDSHAKE = ("dial", "greeting")
"""Instead of the HTTP upgrade, and instead of the metadata."""
PHASES = (*HANDSHAKE, "inference", "midchunk")
"""``inference`` is the first of an episode, with the arm at rest; in ``midchunk`` the arm
follows a chunk.
"""

NO_FRAMES_YET = "a dial is answered in HTTP, there are no frames yet: see garbage and not_http"
HTTP_IS_OVER = "HTTP is over when a server greets"
NO_ROWS_YET = "metadata hold no rows; a map of anything is lawful there"
NOTHING_TO_READ = "what a dial sends fits into any socket's buffer: read or not, it is a hang"
NOTHING_SENT = "a client sends nothing before it is greeted: read or not, it is a hang"

_ANY = {
    "kill": CLOSED,
    "restart": CLOSED,
    "hang": SILENT,
    "drip": SILENT,
    "garbage": UNREADABLE,
    "cut": CLOSED,
    "hang_up": CLOSED,
    "reset": CLOSED,
}
_HTTP = dict.fromkeys(HTTP, UNREADABLE) | dict.fromkeys(
    ("unauthorized", "forbidden", "full"), REFUSED
)
_FRAMES = (
    dict.fromkeys(FRAMES, UNREADABLE)
    | dict.fromkeys(("text", "traceback"), REFUSED)
    | dict.fromkeys(("closed_1000", "closed_1008", "closed_1011"), CLOSED)
)
_CHUNKS = dict.fromkeys(CHUNKS, CHUNK) | {
    "lists": UNREADABLE,
    "nothing": UNREADABLE,
    "stale_id": UNREADABLE,
    "error_map": REFUSED,
}


def _row(*cells: Error | str) -> dict[str, Error | str]:
    return dict(zip(PHASES, cells, strict=True))


TABLE: dict[str, dict[str, Error | str]] = {
    **{fault: _row(error, error, error, error) for fault, error in _ANY.items()},
    # from the inference on: the server hangs up on a request and answers the next dial like this
    **{fault: _row(error, HTTP_IS_OVER, error, error) for fault, error in _HTTP.items()},
    **{fault: _row(NO_FRAMES_YET, error, error, error) for fault, error in _FRAMES.items()},
    **{fault: _row(NO_FRAMES_YET, NO_ROWS_YET, error, error) for fault, error in _CHUNKS.items()},
    "unread": _row(NOTHING_TO_READ, NOTHING_SENT, SILENT, SILENT),
}
"""Fault -> phase -> the error that it is declared as, or why there is none."""


def cells(*phases: str) -> list[tuple[str, str, Error]]:
    """(phase, fault, error) of every cell that has a meaning."""
    return [
        (phase, fault, row[phase])
        for phase in phases
        for fault, row in TABLE.items()
        if not isinstance(row[phase], str)
    ]  # pyright: ignore[reportReturnType]
