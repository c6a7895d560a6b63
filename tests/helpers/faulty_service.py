"""Clients of the faulty server, and what a failed exchange must not leave behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import uuid
from dataclasses import replace

import numpy as np

from helpers.environments import TESTS
from helpers.fault_table import HANDSHAKE
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.embodiments import DROID_RIG
from strands_cosmos3.errors import ServiceTimeoutError
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.types import ActionChunk, Request

ENDS_THE_SERVER = ("kill", "restart")


def named(value: object) -> str:
    return value if isinstance(value, str) else ""


def start(port: int = 0, *how: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "helpers.faulty_server", str(port), *how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


class Laden(ServiceBackend):
    """Sends more with a request than sockets buffer; in mid-chunk with every second, for a
    connection's first is answered.
    """

    first_is_light, asked = False, 0

    def infer(self, request: Request) -> ActionChunk:
        self.asked += 1
        if self.first_is_light and self.asked % 2:
            return super().infer(request)
        pictures = {view: np.zeros((1200, 1200, 3), np.uint8) for view in DROID_RIG.views}
        return super().infer(replace(request, images=pictures))


def backend(port: int, path: str, read_s: float = 20.0) -> ServiceBackend:
    """Asks the faulty server as somebody whom it does not know."""
    address = f"ws://127.0.0.1:{port}/{path}/{uuid.uuid4().hex}"
    handshake_s = read_s if path.startswith(HANDSHAKE) else 20.0
    config = ClientConfig(
        address, handshake_s=handshake_s, read_s=read_s, connect_s=5.0, attempts=2
    )
    kind = Laden if path.endswith("unread") else ServiceBackend
    service = kind(PolicyClient(config, sleep=lambda s: None), requires_images=False)
    if isinstance(service, Laden):
        service.first_is_light = path.startswith("midchunk")
    return service


def patience(phase: str, fault: str, error: type[Exception]) -> float:
    """A deadline: short where it is bound to pass, long where a busy machine must not make it."""
    if (phase, fault) == ("dial", "garbage"):
        return 3.0  # known for no HTTP at once, and given its time to hang up all the same
    return 1.0 if error is ServiceTimeoutError else 20.0


def held() -> tuple[int, int]:
    """Threads and open files of this process."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))
