"""A policy server, written by hand from RFC 6455, that misbehaves as its client's path asks:
/PHASE/FAULT/WHO.

Phases: ``dial`` (instead of the HTTP upgrade), ``greeting`` (instead of the metadata),
``inference`` (instead of the reply), ``midchunk`` (instead of the second reply of a connection). A
fault of HTTP in the last two hangs up there and is the answer to the next dial of the same WHO.
faulty_server.py PORT [well]; it prints the port, which 0 leaves open, and with ``well`` does
nothing wrong.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import socket
import struct
import sys

import msgpack
import numpy as np

_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def frame(payload: bytes, opcode: int = 2, length: int | None = None, first: int = 0x80) -> bytes:
    n = len(payload) if length is None else length
    head = (
        struct.pack(">BB", first | opcode, n)
        if n < 126
        else struct.pack(">BBQ", first | opcode, 127, n)
    )
    return head + payload


def array(a: np.ndarray, **other: object) -> dict[bytes, object]:
    known = {b"__ndarray__": True, b"data": a.tobytes(), b"dtype": a.dtype.str, b"shape": a.shape}
    return known | {key.encode(): value for key, value in other.items()}


def pack(value: object) -> bytes:
    return frame(msgpack.packb(value))


def close(code: int, reason: str = "") -> bytes:
    return frame(struct.pack(">H", code) + reason.encode(), opcode=8)


def nested(depth: int) -> object:
    return {"a": nested(depth - 1)} if depth else 0


ROWS = np.zeros((4, 8), np.float32)
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/secret/path.py", line 1\nValueError: bad prompt'
)
FRAMES = {
    "not_msgpack": frame(b"\xc1\xc1"),
    "cut_msgpack": frame(msgpack.packb({"action": array(ROWS)})[:-9]),
    "trailing": frame(msgpack.packb({}) + b"\x00"),
    "text": frame(b"no, thank you", opcode=1),
    "traceback": frame(TRACEBACK.encode(), opcode=1) + close(1011),
    "bad_utf8": frame(b"\xff\xfe", opcode=1),
    "oversize": frame(b"x" * 100_000, length=2**40),
    "oversize_65M": frame(b"x" * 100_000, length=65 * 2**20),
    "object_dtype": pack({"action": array(ROWS, dtype="|O")}),
    "void_dtype": pack({"action": array(ROWS, dtype="|V8")}),
    "wrong_dtype": pack({"action": array(ROWS, dtype="<c8")}),
    "misfit": pack({"action": array(ROWS, shape=(4, 9))}),
    "huge_shape": pack({"action": array(ROWS, shape=(2**40, 2**40))}),
    "deep": pack(nested(12)),
    "wide": pack({str(i): i for i in range(100)}),
    "extension": pack({"a": msgpack.ExtType(1, b"cos\nsystem\n")}),
    "a_list": pack([1, 2]),
    "reserved_opcode": frame(b"", opcode=7),
    "reserved_bit": frame(b"x", first=0xF0),
    "masked": b"\x82\x82\x00\x00\x00\x00ab",
    "closed_1000": close(1000),
    "closed_1008": close(1008, "not you"),
    "closed_1011": close(1011, "internal error"),
}
CHUNKS = {
    "nan": {"action": array(np.full((4, 8), np.nan, np.float32))},
    "infinite": {"action": array(np.full((4, 8), np.inf))},
    "wrong_width": {"action": array(np.zeros((4, 7), np.float32))},
    "midtrain_width": {"action": array(np.zeros((4, 10), np.float32))},
    "wrong_rank": {"action": array(np.zeros((1, 4, 8), np.float32))},
    "no_rows": {"action": array(np.zeros((0, 8), np.float32))},
    "booleans": {"action": array(np.zeros((4, 8), bool))},
    "lists": {"action": [[0.0] * 8] * 4},
    "nothing": {},
    "error_map": {"type": "error", "message": "out of memory"},
    "stale_id": {"action": array(ROWS), "cosmos3/request_id": 10**6},
}


def http(status: str, *headers: str, body: str = "") -> bytes:
    return "\r\n".join(
        [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", body]
    ).encode()


HTTP = {
    "not_http": b"220 smtp.example ESMTP\r\n",
    "html": http("200 OK", body="<html>hello</html>"),
    "unauthorized": http("401 Unauthorized"),
    "forbidden": http("403 Forbidden"),
    "not_found": http("404 Not Found"),
    "crashed": http("500 Internal Server Error"),
    "full": http("503 Service Unavailable"),
    "redirect": http("302 Found", "Location: ws://example.com/"),
    "wrong_key": http(
        "101 Switching Protocols",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Accept: bad",
    ),
    "endless_header": b"HTTP/1.1 101 Switching Protocols\r\nX: " + b"x" * 200_000,
}


async def misbehave(fault: str, good: bytes, writer: asyncio.StreamWriter) -> None:
    """What may happen in every phase, to the bytes that would have been right."""
    match fault:
        case "kill" | "restart":
            os._exit(1)
        case "hang":
            await asyncio.sleep(60)
        case "drip":
            for byte in good:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.7)
        case "garbage":
            writer.write(np.random.default_rng(0).bytes(2000))
            await writer.drain()
            await asyncio.sleep(60)
        case "cut":
            writer.write(good[: len(good) // 2])
        case "hang_up":
            pass
        case "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        case _:
            writer.write(
                (HTTP | FRAMES | {name: pack(chunk) for name, chunk in CHUNKS.items()})[fault]
            )
            await writer.drain()
            await asyncio.sleep(1 if fault in HTTP else 60)
    writer.close()


refused: set[str] = set()
"""Who was hung up on and is not let in again."""


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The payload of the next data frame; other frames are passed over."""
    first, second = await reader.readexactly(2)
    n = second & 0x7F
    if n >= 126:
        n = int.from_bytes(await reader.readexactly(2 if n == 126 else 8), "big")
    mask = np.frombuffer(await reader.readexactly(4), np.uint8)
    data = np.frombuffer(await reader.readexactly(n), np.uint8)
    if first & 0x0F == 8:
        raise asyncio.IncompleteReadError(b"", 1)
    if first & 0x0F > 2:
        return await read_frame(reader)
    return (data ^ np.resize(mask, n)).tobytes()


async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, well: bool) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    _, phase, fault, who = head.split(" ")[1].split("/")
    if well:
        fault = "none"
    if who in refused:
        phase = "dial"
    key = next(
        line.split(": ")[1]
        for line in head.splitlines()
        if line.lower().startswith("sec-websocket-key")
    )
    accept = base64.b64encode(hashlib.sha1((key + _GUID).encode()).digest()).decode()
    steps = [
        http(
            "101 Switching Protocols",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Accept: {accept}",
        )
    ]
    steps[0] = steps[0].replace(b"Content-Length: 0\r\n", b"")
    for now, good in (("dial", steps[0]), ("greeting", pack({}))):
        if phase == now and fault != "none":
            await misbehave(fault, good, writer)
            return
        writer.write(good)
    answered = 0
    while True:
        if fault == "unread" and answered == (phase == "midchunk"):
            await asyncio.sleep(60)
        request = msgpack.unpackb(await read_frame(reader), strict_map_key=False)
        rows = np.zeros((4, 8), np.float32)
        rows[:, :7] = np.frombuffer(request["observation/joint_position"][b"data"], np.float32)
        # two seconds of motion; the first answer of a connection is right, and then something
        # happens
        if phase == "midchunk":
            rows = np.repeat(rows[:1], 32, axis=0)
            rows[:, 0] += 0.004 * np.arange(32, dtype=np.float32)
        reply = pack({"action": array(rows)})
        answered += 1
        if phase == "midchunk" and answered == 1:
            writer.write(reply)
        elif fault == "twice":
            writer.write(reply + reply)
        elif fault in ("none", "pinged"):
            writer.write(frame(b"are you there", opcode=9) * (fault == "pinged") + reply)
        elif fault in HTTP:
            refused.add(who)
            writer.close()
            return
        else:
            await misbehave(fault, reply, writer)
            return


async def session(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, well: bool) -> None:
    try:
        await client(reader, writer, well)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main(port: int, well: bool) -> None:
    listener = socket.create_server(("127.0.0.1", port))
    # so that an unread request fills the pipe
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    server = await asyncio.start_server(
        lambda *streams: session(*streams, well), sock=listener, limit=4096
    )
    print(listener.getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:] == ["well"]))
