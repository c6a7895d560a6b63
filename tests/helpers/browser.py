"""A headless Chromium driven over its DevTools protocol: load a page, look at it, read its text
and its console.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from PIL import Image
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--ignore-gpu-blocklist",
    "--remote-debugging-port=0",
    "--window-size=1360,860",
    "--no-first-run",
    "--disable-background-networking",
)


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    def __init__(self, program: str, home: Path):
        self.errors: list[str] = []
        self._n = 0
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={home}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        port_file, deadline = home / "DevToolsActivePort", time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().strip()):
            assert time.monotonic() < deadline, "Chromium did not start"
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            page = next(target for target in json.load(answer) if target["type"] == "page")
        self._socket = connect(page["webSocketDebuggerUrl"], max_size=2**26)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._n += 1
        self._socket.send(json.dumps({"id": self._n, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=120))
            if message.get("id") == self._n:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        """Keep errors: exceptions, console.error, failed requests."""
        params = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "assert",
        ):
            self.errors.append(json.dumps(params["args"])[:500])
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            if entry.get("url", "").startswith("blob:") and "ERR_FILE_NOT_FOUND" in entry["text"]:
                # viser puts the next picture in place before a slow browser has fetched the last
                # one
                return
            self.errors.append(f"{entry['text']} {entry.get('url')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def text(self, element: str) -> str:
        expression = f"(document.getElementById({element!r}) || {{}}).innerText || ''"
        return self.call("Runtime.evaluate", expression=expression)["result"]["value"]

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression)["result"].get("value")

    def click(self, element: str, times: int = 1) -> None:
        """Click on the middle of what a JavaScript expression finds."""
        place = f"(() => {{ const r = {element}.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] }})()"
        x, y = json.loads(self.evaluate(f"JSON.stringify({place})"))
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=times
            )

    def write(self, element: str, text: str) -> None:
        """Replace the text of an input field, and press Enter."""
        self.click(element, times=3)
        self.call("Input.insertText", text=text)
        for kind in ("rawKeyDown", "char", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key="Enter",
                code="Enter",
                windowsVirtualKeyCode=13,
                text="\r",
            )

    def picture(self) -> np.ndarray:
        """What is seen, [H, W, 3] uint8."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))

    def wait(self, condition: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, (
                f"never became true: {condition}; console: {self.errors}"
            )
            time.sleep(0.3)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(30)
