"""NVIDIA's LIBERO server as its source has it, without a model, and with faults: the first part of
a URL's path names one.

Written from NVIDIA/cosmos-framework @5eee9ed5,
``cosmos_framework/scripts/action_policy_server_libero.py``: HTTP/1.0, paths, the checks of a
request, and errors with status 200. A row begins with the means of the picture's halves and the
item's number.
"""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

INFO = {
    "run_name": "fake",
    "num_steps": 30,
    "fps": 20,
    "seed": 0,
    "action_chunk_size": 16,
    "max_action_dim": 64,
    "raw_action_dim": 10,
}
VIDEO = np.stack([np.full((8, 16, 3), 10 * i, np.uint8) for i in range(17)])


def rows(item: dict[str, Any], number: int = 0) -> list[list[float]]:
    for key, kind in (("image", str), ("prompt", str), ("domain_name", str), ("image_size", int)):
        if not isinstance(item.get(key), kind):
            raise ValueError(f"{key!r} must be a {kind.__name__}")
    if item["prompt"].startswith("fail"):
        raise ValueError("no such luck")
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(item["image"]))).convert("RGB"))
    left, right = (float(half.mean()) / 255 for half in np.split(picture, 2, axis=1))
    return [[0.1 * left, 0.1 * right, 0.01 * number, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]] * 16


def png(frame: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


REPLIES: dict[str, object] = {
    "nan": {"action": [[float("nan")] * 10] * 16},
    "infinite": {"action": [[float("inf")] * 10] * 16},
    "narrow": {"action": [[0.0] * 9] * 16},
    "no_rows": {"action": []},
    "ragged": {"action": [[0.0] * 10, [0.0] * 9]},
    "words": {"action": [["0.0"] * 10] * 16},
    "flags": {"action": [[True] * 10] * 16},
    "numbers": {"action": [0.0] * 10},
    "huge_numbers": {"action": [[10**400] * 10] * 16},
    "wild": {"action": [[1e6] * 10] * 16},
    "nothing": {},
    "no_list": {"action": 7},
    "a_list": [1, 2],
    "error": {"action": [], "error": "CUDA out of memory", "request_id": 3},
    "wordy": {"action": [], "error": "x" * 10**6},
    "many_values": {"action": [0] * 70_000},
}
RAW: dict[str, bytes] = {
    "deep": b"[" * 60_000,
    "not_json": b"<html>hello</html>",
    "bad_utf8": b'{"action": "\xff"}',
    "digits": b'{"action": [[' + b"1" * 10_000 + b"]]}",
}
STATUS = {
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "too_large": 413,
    "crashed": 500,
    "full": 503,
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        fault, path = self.target()
        said = {**INFO, "raw_action_dim": 7} if fault == "other_width" else INFO
        self.send(
            *(
                (200, said)
                if path == "/info" and fault != "no_info"
                else (404, {"error": "Not found"})
            )
        )

    def do_POST(self) -> None:
        fault, path = self.target()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        if fault in ("", "no_info"):
            said = json.loads(body)
            self.server.asked.append((path, said, self.headers.get("Authorization")))  # pyright: ignore[reportAttributeAccessIssue]
            try:
                if path == "/predict_batch":
                    self.send(
                        200, {"actions": [rows(item, i) for i, item in enumerate(said["items"])]}
                    )
                else:
                    self.send(200, {"action": rows(said), "video": [png(frame) for frame in VIDEO]})
            except ValueError as error:
                self.send(
                    200,
                    {"actions" if path == "/predict_batch" else "action": [], "error": str(error)},
                )
        else:
            self.misbehave(fault)

    def target(self) -> tuple[str, str]:
        """The fault that the path names, and the rest of it."""
        fault, _, path = self.path[1:].rpartition("/")
        return fault, f"/{path}"

    def misbehave(self, fault: str) -> None:
        head = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n"
        if fault in REPLIES:
            self.send(200, REPLIES[fault])
        elif fault in RAW:
            self.wfile.write(head + b"\r\n" + RAW[fault])
        elif fault in STATUS:
            self.send(STATUS[fault], b"<html>no</html>")
        elif fault == "hang":
            time.sleep(2)
        elif fault == "drip":
            for _ in range(20):
                self.wfile.write(b"H" if _ else head)
                time.sleep(0.1)
        elif fault == "cut":
            self.wfile.write(head + b'Content-Length: 500\r\n\r\n{"action": [[')
        elif fault == "not_http":
            self.wfile.write(b"220 smtp.example ESMTP\r\n")
        elif fault == "endless_header":
            self.wfile.write(head + b"X: " + b"x" * 200_000)
        elif fault == "oversize":
            self.wfile.write(head + b"\r\n" + b" " * 200_000)
        else:
            assert fault == "hang_up"

    def send(self, status: int, said: object) -> None:
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    asked: list[tuple[str, Any, str | None]]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left."""


@contextmanager
def libero_server() -> Iterator[Server]:
    """Serve in a thread; ``server_port`` and ``asked``: path, message and token of each good
    request.
    """
    with Server(("127.0.0.1", 0), Handler) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()
