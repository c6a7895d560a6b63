"""A server that speaks as much of the Hugging Face hub's protocol as uploads and downloads of
datasets need.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """What was uploaded, and what can be downloaded.

    ``created``: the repositories made; ``files``: (repository, path) -> content; ``status``:
    answered instead, if any. ``datasets``: name -> commit -> path -> content, whose last commit is
    ``main``; ``gated``: names that ask for a log-in. ``downloads``: paths of the files that were
    sent.
    """

    def __init__(self) -> None:
        self.datasets: dict[str, dict[str, dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.downloads: list[str] = []
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
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in json.loads(body)["files"]
                ]
            }
        if "commit" in parts:
            repository = "/".join(parts[1 : parts.index("commit")])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[repository, line["value"]["path"]] = base64.b64decode(
                        line["value"]["content"]
                    )
            url = f"{self.endpoint}/{repository.removeprefix('models/')}/commit/{'0' * 40}"
            return {"commitUrl": url, "commitOid": "0" * 40, "success": True, "hookOutput": ""}
        return {"errors": [], "warnings": []}

    def serve(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a look-up, ``/api/datasets/...``, or a file,
        ``/datasets/.../resolve/...``.
        """
        parts = path.split("?")[0].strip("/").removeprefix("api/").split("/")
        name, verb, revision, file = "/".join(parts[1:3]), parts[3], parts[4], "/".join(parts[5:])
        if (commits := self.datasets.get(name)) is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"  # as the hub says to a stranger
        commit = list(commits)[-1] if revision == "main" else revision
        if commit not in commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = commits[commit]
        if verb == "revision":
            return (
                200,
                {},
                json.dumps({"id": name, "sha": commit, "gated": name in self.gated}).encode(),
            )
        if verb == "tree":
            listed = [
                {"type": "file", "path": p, "size": len(b), "oid": _digest(b)}
                for p, b in files.items()
            ]
            return 200, {}, json.dumps(listed).encode()
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        return 200, {"ETag": f'"{_digest(files[file])}"', "X-Repo-Commit": commit}, files[file]


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


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

        def do_GET(self) -> None:
            if not any(f"/{verb}/" in self.path for verb in ("revision", "tree", "resolve")):
                self.do_POST()
                return
            status, headers, body = hub.serve(self.path)
            if self.command == "GET" and "/resolve/" in self.path:
                hub.downloads.append(self.path.rpartition("/resolve/")[2].partition("/")[2])
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

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
