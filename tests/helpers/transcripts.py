"""Transcripts: the frames of a session between this package and a peer's program, both ways, as zip
files.

``tests/serving/test_peer_sources.py`` records them where the peer's source is available, and
``tests/serving/test_transcripts.py`` replays them without it. A zip holds ``source.json`` (the
peer's repository, commit and file) and one file for each frame: ``CONNECTION-NUMBER-SENDER``,
``.bin`` for binary frames and ``.txt`` for text. Of HTTP, a frame is a whole request or response.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import socketserver
import threading
import zipfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as dial

from strands_cosmos3.serving.codec import decode

FOLDER = Path(__file__).resolve().parents[1] / "serving/transcripts"
_TIMES = ("server_timing",)
_HTTP = (b"HTTP/1.", b"GET /", b"POST /")
_OPTIONS: dict[str, Any] = {"compression": None, "max_size": None, "ping_interval": None}


@dataclass(frozen=True)
class Frame:
    sender: str
    """client or server"""
    data: bytes | str

    @property
    def said(self) -> Any:
        """What the frame says: of measured times their names, of a traceback the last line."""
        if isinstance(self.data, str):
            return self.data.splitlines()[-1]
        if self.data.startswith(_HTTP):
            head, _, body = self.data.partition(b"\r\n\r\n")
            said = json.loads(body) if body[:1] == b"{" else body
            return {"asked": head.split()[1], "said": said}  # the path, or the status
        said = decode(self.data)
        return (
            {key: sorted(said[key]) if key in _TIMES else said[key] for key in said}
            if isinstance(said, dict)
            else said
        )


@dataclass
class Transcript:
    source: Mapping[str, str]
    connections: list[list[Frame]] = field(default_factory=list)

    @classmethod
    def load(cls, name: str) -> Transcript:
        with zipfile.ZipFile(FOLDER / f"{name}.zip") as stored:
            found = cls(json.loads(stored.read("source.json")))
            for entry in stored.namelist()[1:]:
                connection, _, sender = entry.partition(".")[0].split("-")
                while len(found.connections) <= int(connection):
                    found.connections.append([])
                data = stored.read(entry)
                found.connections[-1].append(
                    Frame(sender, data.decode() if entry.endswith(".txt") else data)
                )
        return found

    def save(self, name: str) -> None:
        with zipfile.ZipFile(
            FOLDER / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9
        ) as stored:
            stored.writestr(zipfile.ZipInfo("source.json"), json.dumps(self.source, indent=2))
            for i, frames in enumerate(self.connections):
                for j, frame in enumerate(frames):
                    kind = "txt" if isinstance(frame.data, str) else "bin"
                    # no date: the same session, the same file
                    entry = zipfile.ZipInfo(f"{i}-{j:03d}-{frame.sender}.{kind}")
                    stored.writestr(entry, frame.data, zipfile.ZIP_DEFLATED, 9)

    def sent_by(self, sender: str) -> list[Any]:
        return [
            frame.said for frames in self.connections for frame in frames if frame.sender == sender
        ]


def assert_same(found: Any, wanted: Any, ignored: tuple[str, ...] = ()) -> None:
    """Compare what frames say, to the bit and the type; maps without the ignored keys."""
    assert type(found) is type(wanted), (found, wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            if key not in ignored:
                assert_same(found[key], wanted[key], ignored)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other, ignored)
    elif isinstance(wanted, np.ndarray):
        np.testing.assert_array_equal(found, wanted, strict=True)
    else:
        assert found == wanted


@contextmanager
def listening(handle: Callable[[ServerConnection], Coroutine[Any, Any, None]]) -> Iterator[int]:
    """Serve websockets in a thread; the port."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []

    async def main() -> None:
        async with serve(handle, "127.0.0.1", 0, **_OPTIONS) as server:
            ports.append(server.sockets[0].getsockname()[1])
            started.set()
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert started.wait(10)
    yield ports[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


@contextmanager
def recorded(port: int, transcript: Transcript) -> Iterator[int]:
    """Pass on all frames to and from the server at ``port``, and write them down; the port to
    call instead.
    """

    async def handle(client: ServerConnection) -> None:
        frames: list[Frame] = []
        transcript.connections.append(frames)
        async with connect(f"ws://127.0.0.1:{port}", **_OPTIONS) as server:

            async def passed_on(source: Any, sink: Any, sender: str) -> None:
                try:
                    async for data in source:
                        frames.append(Frame(sender, data))
                        await sink.send(data)
                except ConnectionClosed:
                    pass
                await sink.close()

            await asyncio.gather(
                passed_on(client, server, "client"), passed_on(server, client, "server")
            )

    with listening(handle) as here:
        yield here


def replay_client(transcript: Transcript, port: int) -> list[Any]:
    """Send a recorded client's frames to the server at ``port``; what it answered."""
    answers = []
    for frames in transcript.connections:
        with dial(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as connection:
            try:
                for frame in frames:
                    if frame.sender == "client":
                        connection.send(frame.data)
                    else:
                        answers.append(Frame("server", connection.recv(timeout=20)).said)
            except ConnectionClosed as end:  # after a refusal
                answers.append({"closed": end.rcvd and end.rcvd.code})
    return answers


def exchange_http(port: int, request: bytes) -> bytes:
    """Send a whole HTTP request; all that comes back before the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(2**16), b""))


@contextmanager
def recorded_http(port: int, transcript: Transcript) -> Iterator[int]:
    """As :func:`recorded`, for HTTP with a connection for each request."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = b"".join(iter(self.rfile.readline, b"\r\n")) + b"\r\n"
            length = re.search(rb"(?i)content-length: (\d+)", head)
            request = head + self.rfile.read(int(length[1]) if length else 0)
            frames = [Frame("client", request)]
            transcript.connections.append(frames)
            frames.append(Frame("server", exchange_http(port, request)))
            self.wfile.write(frames[1].data)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
        yield proxy.server_address[1]
        proxy.shutdown()


def replay_http_client(transcript: Transcript, port: int) -> list[Any]:
    """Send a recorded client's requests to the server at ``port``; what it answered."""
    requests = [
        frame.data
        for frames in transcript.connections
        for frame in frames
        if frame.sender == "client"
    ]
    return [Frame("server", exchange_http(port, request)).said for request in requests]


@contextmanager
def replay_server(transcript: Transcript) -> Iterator[tuple[int, list[Any]]]:
    """Answer as a recorded server did, one recorded connection after another; the port, and what
    clients say.
    """
    heard: list[Any] = []
    connections = iter(transcript.connections)

    async def handle(client: ServerConnection) -> None:
        for frame in next(connections):
            if frame.sender == "server":
                await client.send(frame.data)
            else:
                heard.append(Frame("client", await client.recv()).said)

    with listening(handle) as port:
        yield port, heard
