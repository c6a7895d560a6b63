"""A WebSocket's messages end in time and in few frames, and pongs do not pile up."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress

import pytest
from test_server import ask, dial
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from helpers.handshakes import HANDSHAKE, raw, status
from helpers.serving import Echo, observation, until
from strands_cosmos3.serving.codec import decode, encode
from strands_cosmos3.serving.connection import limit_frames

REQUEST = encode(observation())


def frame(data: bytes = b"", opcode: Opcode = Opcode.CONT, fin: bool = False) -> bytes:
    return Frame(opcode, data, fin=fin).serialize(mask=True)


BEGIN = frame(REQUEST[:10], Opcode.BINARY)
# name -> what is sent, again and again
UNFINISHED = {
    "half a frame": [frame(REQUEST, Opcode.BINARY, True)[:50]],
    "half a header": [b"\x82"],
    "a first fragment": [BEGIN],
    "empty fragments": itertools.chain([BEGIN], itertools.repeat(frame())),
    "fragments and pings": itertools.chain(
        [BEGIN], itertools.cycle([frame(b"x"), frame(b"x", Opcode.PING, True)])
    ),
    "a byte at a time": (bytes([byte]) for byte in frame(bytes(10_000), Opcode.BINARY, True)),
}


@pytest.mark.parametrize("name", UNFINISHED)
def test_a_message_that_does_not_end_is_cut_off(serve, name):
    server = serve(message_s=0.3)
    with raw(server.port, HANDSHAKE + "\r\n") as client:
        assert status(client) == 101
        said = threading.Event()

        def speak() -> None:
            with suppress(OSError):
                for data in UNFINISHED[name]:
                    client.sendall(data)
                    if said.wait(0.01):
                        break

        speaking = threading.Thread(target=speak)
        speaking.start()
        until(lambda: server.metrics.cut_off["unfinished"] == 1)
        said.set()
        speaking.join()
        assert b"a message did not arrive within 0.3 s" in b"".join(
            iter(lambda: client.recv(2**16), b"")
        )
    until(lambda: server.metrics.clients == 0)


def test_a_client_that_was_cut_off_and_stays_loses_its_place(serve):
    server = serve(message_s=0.3)
    with raw(server.port, HANDSHAKE + "\r\n") as client:
        client.sendall(BEGIN)
        until(lambda: server.metrics.cut_off["unfinished"] == 1)
        until(lambda: server.metrics.clients == 0)


def test_messages_that_end_in_time_are_answered_however_long_they_take_together(serve):
    server = serve(message_s=1.0)
    with dial(server.port) as client:
        for _ in range(4):
            client.send(iter([REQUEST[:9], REQUEST[9:20], REQUEST[20:]]))
            time.sleep(0.3)
            client.ping()
            assert "action" in decode(client.recv(timeout=20))
    assert server.metrics.cut_off["unfinished"] == 0


def test_a_message_that_the_server_does_not_read_is_not_late(serve):
    gate = threading.Event()
    server = serve(
        Echo(lambda asked: asked.instruction == "warm up" or gate.wait(20)), message_s=0.3
    )
    whole = frame(REQUEST, Opcode.BINARY, True)
    with raw(server.port, HANDSHAKE + "\r\n") as client:
        assert status(client) == 101
        client.sendall(whole * 6 + whole[:20])
        until(lambda: server.metrics.in_flight == 1)
        time.sleep(0.8)
        assert server.metrics.cut_off["unfinished"] == 0
        client.sendall(whole[20:])
        gate.set()
        until(lambda: server.metrics.requests["ok"] == 7)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_request_in_many_frames_is_the_same_request(serve, size):
    parts = [REQUEST[i : i + size] for i in range(0, len(REQUEST), size)]
    with dial(serve(max_fragments=len(parts) + 1).port) as client:
        whole = ask(client, REQUEST)
        client.send(parts)  # and an empty last one
        reply = decode(client.recv(timeout=20))
        assert (reply["action"] == whole["action"]).all()
        client.send([b"", *parts])  # one frame too many
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=20)
    assert closed.value.rcvd.code == 1002
    assert "frames in a message" in closed.value.rcvd.reason


def test_text_in_several_frames_is_text():
    protocol = ServerProtocol(state=State.OPEN)
    limit_frames(protocol)
    for data, opcode in ((b"caf", Opcode.TEXT), (b"\xc3", Opcode.CONT)):
        protocol.receive_data(frame(data, opcode))
    protocol.receive_data(frame(b"\xa9", fin=True))
    assert protocol.events_received() == [Frame(Opcode.TEXT, "caf\u00e9".encode())]


def test_the_deadline_begins_anew_with_each_message(serve):
    server = serve(message_s=1.5)
    whole = frame(REQUEST, Opcode.BINARY, True)
    with raw(server.port, HANDSHAKE + "\r\n") as client:
        assert status(client) == 101
        client.sendall(whole[:20])
        for i in range(1, 8):  # the end of one and the beginning of the next, in one packet
            time.sleep(0.4)
            client.sendall(whole[20:] + whole[:20])
            until(lambda i=i: server.metrics.requests["ok"] == i)
        assert server.metrics.cut_off["unfinished"] == 0


@pytest.mark.parametrize("data", [b"", b"x", bytes(100)], ids=["empty", "one byte", "many"])
@pytest.mark.parametrize("between", [b"", frame(b"x", Opcode.PING, True)], ids=["alone", "ping"])
def test_no_fragment_is_kept(data, between):
    protocol = ServerProtocol(state=State.OPEN)
    limit_frames(protocol)
    for i in range(500):
        protocol.receive_data(
            frame(data, Opcode.CONT if i else Opcode.BINARY, fin=i == 499) + between
        )
        messages = [one for one in protocol.events_received() if one.opcode is not Opcode.PING]
        assert len(messages) == (i == 499)
    assert messages == [Frame(Opcode.BINARY, data * 500)]


@pytest.mark.parametrize("size", [0, 1, 125])
def test_a_client_that_does_not_read_its_pongs_is_not_read(serve, size):
    server = serve()
    pings = frame(bytes(size), Opcode.PING, True) * 100
    with raw(server.port, HANDSHAKE + "\r\n") as client:
        assert status(client) == 101
        (place,) = server._places._held
        transport = place.connection._transport
        limit = transport.get_write_buffer_limits()[1]
        reads = transport.get_protocol()
        server._loop.call_soon_threadsafe(reads.pause_writing)  # as for a full socket
        until(lambda: not transport.is_reading())
        for _ in range(10):
            client.sendall(pings)
        assert transport.get_write_buffer_size() <= limit
        server._loop.call_soon_threadsafe(reads.resume_writing)
        said = b""
        while said.count(b"\x8a") < 1000:
            more = client.recv(2**16)
            assert more, f"{said.count(0x8A)} pongs, and no more"
            said += more


def test_reading_goes_on_only_where_neither_side_waits(serve):
    gate = threading.Event()
    server = serve(Echo(lambda asked: asked.instruction == "warm up" or gate.wait(20)))
    with raw(server.port, HANDSHAKE + "\r\n") as client:
        assert status(client) == 101
        client.sendall(frame(REQUEST, Opcode.BINARY, True) * 6)
        (place,) = server._places._held
        transport = place.connection._transport
        until(lambda: not transport.is_reading())
        for change in ("pause_writing", "resume_writing"):
            done = threading.Event()
            server._loop.call_soon_threadsafe(getattr(transport.get_protocol(), change))
            server._loop.call_soon_threadsafe(done.set)
            assert done.wait(20)
            assert not transport.is_reading(), change
        gate.set()
        until(lambda: server.metrics.requests["ok"] == 6)
        until(transport.is_reading)
