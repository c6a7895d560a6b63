"""The server's end of a WebSocket, which a client can neither fill nor keep waiting."""

from __future__ import annotations

import asyncio

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import PayloadTooBig, ProtocolError
from websockets.frames import DATA_OPCODES, CloseCode, Frame
from websockets.protocol import Event

from strands_cosmos3.serving.metrics import Metrics
from strands_cosmos3.serving.places import Place, Places


class ServerWebSocket(ServerConnection):
    """A client's connection, with a place that it gives back at its end.

    An unfinished message, be it a frame or a row of fragments, has a deadline. Nothing is read of a
    client that does not read what it was sent, so that the pongs of its pings do not pile up.
    """

    place: Place
    _places: Places
    _metrics: Metrics
    _message_s: float
    _deadline: asyncio.TimerHandle | None = None

    def admit(self, place: Place, places: Places, metrics: Metrics, message_s: float) -> None:
        """Say whose the connection is, before it is made.

        Args:
            place: The client's place, one of ``places``.
            places: Where it is given back.
            metrics: Counts messages that are cut off.
            message_s: Time in which a message must have arrived.
        """
        self.place, self._places, self._metrics = place, places, metrics
        self._message_s = message_s

    def data_received(self, data: bytes) -> None:
        """Take in bytes of the client."""
        super().data_received(data)
        # websockets keeps a part of a frame in this buffer
        if self.protocol.current_size is None and not self.protocol.reader.buffer:
            self._disarm()
        elif self._deadline is None:
            self._arm()

    def process_event(self, event: Event) -> None:
        """Take in a whole message, or a frame of control."""
        super().process_event(event)
        if isinstance(event, Frame) and event.opcode in DATA_OPCODES:
            self._disarm()  # what follows is another message

    def pause_writing(self) -> None:
        """Wait until the client has read."""
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on when the client has read, unless messages wait for the server."""
        super().resume_writing()
        if not self.recv_messages.paused:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        if isinstance(self.protocol.parser_exc, ProtocolError | PayloadTooBig):
            self._metrics.cut_off["protocol"] += 1
        self._disarm()
        super().connection_lost(exc)
        self._places.give_back(self.place)

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self._message_s, self._unfinished)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _unfinished(self) -> None:
        if not self.transport.is_reading():  # it is the server that does not read
            self._arm()
            return
        self._metrics.cut_off["unfinished"] += 1
        self.protocol.fail(
            CloseCode.POLICY_VIOLATION,
            f"a message did not arrive within {self._message_s:g} s",
        )
        self.send_data()
        assert self.close_timeout is not None
        self.loop.call_later(self.close_timeout, self.transport.abort)
