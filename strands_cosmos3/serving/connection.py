"""WebSocket connections that a peer cannot keep busy."""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from websockets.client import ClientProtocol
from websockets.exceptions import ProtocolError
from websockets.frames import DATA_OPCODES, Frame, Opcode
from websockets.http11 import USER_AGENT
from websockets.protocol import Protocol, State
from websockets.uri import parse_uri

_FRAMES_PER_S = 2000
"""Reading a frame costs tens of microseconds, however short it is, and 256 kB of a socket hold
40,000 empty ones.
"""
MAX_FRAGMENTS = 8192
"""A message of 16 MiB in frames of 2 kB."""
_PIECE = 2**18


def limit_frames(protocol: Protocol, max_fragments: int = MAX_FRAGMENTS) -> None:
    """Let a connection fail (1002) if its peer sends more than 2,000 frames, pings included, in a
    second, or a message of more than ``max_fragments``.

    The events of the connection are whole messages: fragments are joined as they arrive, since
    every frame that is kept costs 200 bytes, empty ones too.
    """
    receive = protocol.recv_frame
    arrived_s = deque[float](maxlen=_FRAMES_PER_S)
    opcode, whole, fragments = Opcode.BINARY, bytearray(), 0  # of the message that has begun

    def counted(frame: Frame) -> None:
        nonlocal opcode, whole, fragments
        now_s = time.monotonic()
        if len(arrived_s) == _FRAMES_PER_S and now_s - arrived_s[0] < 1.0:
            raise ProtocolError(f"more than {_FRAMES_PER_S} frames in a second")
        arrived_s.append(now_s)
        receive(frame)
        if frame.opcode not in DATA_OPCODES or (frame.fin and frame.opcode is not Opcode.CONT):
            return
        protocol.events.pop()
        if frame.opcode is not Opcode.CONT:
            opcode, whole, fragments = frame.opcode, bytearray(), 0
        fragments += 1
        if fragments > max_fragments:
            raise ProtocolError(f"more than {max_fragments} frames in a message")
        whole += frame.data
        if frame.fin:
            protocol.events.append(Frame(opcode, bytes(whole)))
            whole = bytearray()

    protocol.recv_frame = counted


class WebSocket:
    """A client's end of a WebSocket, on a socket that is connected. One thread at a time uses it.

    websockets' own blocking client reads on a second thread, which OpenSSL forbids.

    Args:
        connected: The socket, after TLS' handshake if there is one.
        uri: The server's.
        max_bytes: Largest message that is read.
    """

    def __init__(self, connected: socket.socket, uri: str, max_bytes: int):
        self._socket = connected
        self._protocol = ClientProtocol(parse_uri(uri), max_size=max_bytes)
        limit_frames(self._protocol)
        self._messages: deque[Frame] = deque()

    def shake_hands(self, headers: Mapping[str, str]) -> None:
        """Send the request and read the server's response. Raises websockets' InvalidHandshake."""
        request = self._protocol.connect()
        request.headers.update({"User-Agent": USER_AGENT, **headers})
        self._protocol.send_request(request)
        self._flush()
        while self._protocol.state is State.CONNECTING and self._protocol.handshake_exc is None:
            self._read()
        if self._protocol.handshake_exc is not None:
            raise self._protocol.handshake_exc

    def send(self, message: memoryview) -> None:
        """Send a binary message. A failure shows in :meth:`receive`: the peer may have said why."""
        self._protocol.send_binary(message)
        self._flush()

    def receive(self) -> bytes | str:
        """Return the next message. Raises websockets' ConnectionClosed if there is none."""
        while not self._messages:
            if self._protocol.state is State.CLOSED:
                raise self._protocol.close_exc
            self._read()
        message = self._messages.popleft()
        data = bytes(message.data)
        return data.decode() if message.opcode is Opcode.TEXT else data

    def is_quiet(self) -> bool:
        """Answer pings, and return whether the connection is open and the peer has sent no message,
        or a part of one, that nobody received yet.
        """
        while self._has_nothing() and self._read(wait=False):
            pass
        return self._has_nothing()

    def close(self) -> None:
        """Close the connection, and wait until the peer has done so."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(1000)
            self._flush()
        while self._protocol.state is not State.CLOSED:
            self._read()

    def _has_nothing(self) -> bool:
        # between two frames websockets' parser, a generator, waits for the end or for more
        parser: Any = self._protocol.parser
        while parser.gi_yieldfrom is not None:
            parser = parser.gi_yieldfrom
        begun = self._protocol.current_size is not None  # a message of several frames
        unread = self._messages or begun or parser.__name__ != "at_eof"
        return self._protocol.state is State.OPEN and not unread

    def _read(self, wait: bool = True) -> bool:
        """Take in what has arrived. Without waiting, False if that is nothing."""
        self._socket.setblocking(wait)
        try:
            data = self._socket.recv(_PIECE)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:  # the peer is gone
            data = b""
        if data:
            self._protocol.receive_data(data)
        if not data or self._protocol.close_expected():
            self._protocol.receive_eof()  # nothing that follows counts
        for event in self._protocol.events_received():
            if isinstance(event, Frame) and event.opcode in DATA_OPCODES:
                self._messages.append(event)
        self._flush()
        return True

    def _flush(self) -> None:
        with suppress(OSError):  # the peer is gone, and what it sent before is still to be read
            for data in filter(None, self._protocol.data_to_send()):
                self._socket.sendall(data)
