"""A server that speaks as much of the Hugging Face hub's protocol as an upload needs, and keeps what it was sent."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """``created``: the repositories made; ``files``: (repository, path) -> content; ``status``: answered instead, if any."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.files: dict[tuple[str, str], bytes] = {}
        self.status: int | None = None
        self.endpoint = ""

    def answer(self, path: str, body: bytes) -> Any:
        parts = path.split("?")[0].strip("/").split("/")
        if parts[:3] == ["api", "repos", "create"]:
            self.created.append(json.loads(body))
            name = f"{self.created[-1].get('organization', 'me')}/{self.created[-1]['name']}"
            kind = "datasets/" if self.created[-1].get("type") == "dataset" else ""
            return {"url": f"{self.endpoint}/{kind}{name}", "name": name, "id": name}
        if "preupload" in parts:
            return {
                "files": [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
                ]
            }
        if "commit" in parts:
            repository = "/".join(parts[1 : parts.index("commit")])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[repository, line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.endpoint}/{repository.removeprefix('models/')}/commit/{'0' * 40}"
            return {"commitUrl": url, "commitOid": "0" * 40, "success": True, "hookOutput": ""}
        return {"errors": [], "warnings": []}


@contextmanager
def fake_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = hub.answer(self.path, body) if hub.status is None else {"error": "no"}
            said = json.dumps(answer).encode()
            self.send_response(hub.status or 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
