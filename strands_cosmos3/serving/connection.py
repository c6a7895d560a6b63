"""WebSocket connections with bounded frame counts."""

from __future__ import annotations

import time
from typing import Any

from websockets.asyncio.connection import Connection
from websockets.exceptions import ProtocolError
from websockets.frames import Frame, Opcode

_FRAMES_PER_S = 2000
"""Reading a frame costs tens of microseconds, however short it is, and 256 kB of a socket hold
40,000 empty ones.
"""


class CountedFrames(Connection):
    """Mixin of a connection: it fails (1002) if its peer sends more than 2,000 frames, pings
    included, in a second.

    Attributes:
        begun: Messages that the peer has begun to send, and that were read so far.
    """

    def __init__(self, protocol: Any, *arguments: Any, **options: Any):
        super().__init__(protocol, *arguments, **options)
        self.begun = self._frames = 0
        self._since_s = time.monotonic()
        self._receive = protocol.recv_frame
        protocol.recv_frame = self._counted

    def data_received(self, data: bytes) -> None:
        if (now_s := time.monotonic()) - self._since_s > 1.0:
            self._since_s, self._frames = now_s, 0
        super().data_received(data)

    @property
    def between_frames(self) -> bool:
        """Whether all that was read is whole frames, and the peer has not ended the connection:
        websockets' parser, a generator, then waits for more.
        """
        inner: Any = self.protocol.parser
        while inner.gi_yieldfrom is not None:
            inner = inner.gi_yieldfrom
        return inner.__name__ == "at_eof"

    def _counted(self, frame: Frame) -> None:
        self._frames += 1
        if self._frames > _FRAMES_PER_S:
            raise ProtocolError(f"more than {_FRAMES_PER_S} frames in a second")
        self.begun += frame.opcode in (Opcode.TEXT, Opcode.BINARY)
        self._receive(frame)
