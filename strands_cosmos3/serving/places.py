"""Who is connected to a policy server: clients, which have a place, and connections without one."""

from __future__ import annotations

import logging
import math
import resource
import statistics
import time
from dataclasses import dataclass
from typing import Protocol

from strands_cosmos3.serving.http_server import HttpProtocol
from strands_cosmos3.serving.metrics import Metrics
from strands_cosmos3.serving.server_config import ServerConfig

logger = logging.getLogger(__name__)

_SPARE_FILES = 384  # for what else is open, and for sockets that are accepted or closed right now
_FEW = 64
_LINE_EVERY_S = 60.0


class Connection(Protocol):
    """A client's connection, of whichever protocol: its address, and how it is ended."""

    address: str

    def abort(self) -> None: ...


@dataclass(eq=False)
class Place:
    """A client's place.

    Attributes:
        connection: Its connection.
        owner: Whose token it has shown, empty without tokens.
        address: Where it comes from.
        idle_since_s: Since when it has no request under way, on the monotonic clock; infinite while
            it has one.
    """

    connection: Connection
    owner: str
    address: str
    idle_since_s: float = math.inf


@dataclass
class Tally:
    """Counts what others can make happen as often as they like, and logs it once a minute at most.

    Args:
        line: What is logged, with ``%d`` for how often it has happened so far.
    """

    line: str
    _count: int = 0
    _next_line_s: float = -math.inf

    def add(self, count: int = 1) -> None:
        """Count, and log if the last line is old enough."""
        self._count += count
        now_s = time.monotonic()
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + _LINE_EVERY_S
            logger.warning(self.line, self._count)


class Places:
    """The open connections of a server. Only its event loop uses them.

    A place is checked and taken in one call, so that handshakes that come together cannot take more
    than there are. Connections without a place (their request has not come yet, or they are being
    refused) are bounded too, for whoever keeps them open need not say who it is.
    """

    def __init__(self, config: ServerConfig, metrics: Metrics):
        self._config = config
        self._metrics = metrics
        self._per_token = config.places_per_token
        # oldest first; may hold some that have closed
        self._pending: dict[Connection, HttpProtocol] = {}
        self._held: set[Place] = set()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_pending = config.max_pending
        if files != resource.RLIM_INFINITY:
            spare = files - config.max_clients - _SPARE_FILES
            self._max_pending = min(config.max_pending, max(_FEW, spare))
        self._crowded = Tally(
            "%d connections without a request were closed so far to make room for newer ones; at "
            f"most {self._max_pending} are kept."
        )

    def arrive(self, connection: HttpProtocol) -> None:
        """Count a new connection. If too many have no place, the oldest of these are closed."""
        if len(self._pending) >= self._max_pending:
            self._pending = {one: one for one in self.pending()}
            if len(self._pending) >= self._max_pending:
                self.make_room()
        self._pending[connection] = connection

    def pending(self) -> list[HttpProtocol]:
        """Return the open connections without a place, the oldest one first."""
        return [one for one in self._pending.values() if not one.is_closing()]

    def make_room(self) -> None:
        """Close an eighth of the connections that have no place: the oldest ones of the address
        that has most of them.
        """
        if not (pending := self.pending()):
            return
        address = statistics.mode(one.address for one in pending)
        crowd = [one for one in pending if one.address == address]
        crowd = crowd[: max(1, self._max_pending // 8)]
        for one in crowd:
            one.abort()
        self._metrics.cut_off["crowded"] += len(crowd)
        self._crowded.add(len(crowd))

    def take(self, connection: Connection, owner: str) -> Place | str:
        """Give a connection a place; if there is none, return a sentence that says why."""
        place = Place(connection, owner, connection.address)
        for name, most, taken in (
            (owner, self._per_token, [held.owner for held in self._held]),
            (place.address, self._config.max_per_address, [held.address for held in self._held]),
        ):
            if name and most is not None and taken.count(name) >= most:
                return f"{name} has {most} connections, as many as it may.\n"
        if len(self._held) >= self._config.max_clients and not self._evict_idle():
            return "The maximum number of clients is connected.\n"
        self._pending.pop(connection, None)
        self._held.add(place)
        self._metrics.connections += 1
        self._metrics.clients = len(self._held)
        return place

    def give_back(self, place: Place) -> None:
        """Free a place; once is enough."""
        self._held.discard(place)
        self._metrics.clients = len(self._held)

    def _evict_idle(self) -> bool:
        """Close the connection that has been idle for longest, if that is long enough; return
        whether there was one.
        """
        place = min(self._held, key=lambda place: place.idle_since_s)
        if time.monotonic() - place.idle_since_s < self._config.idle_s:
            return False
        self.give_back(place)
        place.connection.abort()
        self._metrics.evicted += 1
        return True
