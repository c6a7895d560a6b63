"""Every fault, in every phase, from a server process that is not ours: each ends in its declared error and leaves nothing."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import HERE, until
from faulty_server import CHUNKS, FRAMES, HTTP
from test_wire import request

from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.errors import (
    ServiceAbsentError,
    ServiceChunkError,
    ServiceClosedError,
    ServiceRefusedError,
    ServiceSilentError,
    ServiceUnreadableError,
)
from strands_cosmos3.serving.client import ClientConfig, PolicyClient

ABSENT, SILENT, CLOSED = ServiceAbsentError, ServiceSilentError, ServiceClosedError
UNREADABLE, REFUSED, CHUNK = ServiceUnreadableError, ServiceRefusedError, ServiceChunkError

EVERYWHERE = {
    "kill": CLOSED,
    "hang": SILENT,
    "drip": SILENT,
    "garbage": UNREADABLE,
    "cut": CLOSED,
    "hang_up": CLOSED,
    "reset": CLOSED,
}
IN_HTTP = dict.fromkeys(HTTP, UNREADABLE) | dict.fromkeys(("unauthorized", "forbidden", "full"), REFUSED)
IN_FRAMES = (
    dict.fromkeys(FRAMES, UNREADABLE)
    | dict.fromkeys(("text", "traceback"), REFUSED)
    | dict.fromkeys(("closed_1000", "closed_1008", "closed_1011"), CLOSED)
)
IN_CHUNKS = dict.fromkeys(CHUNKS, CHUNK) | {
    "lists": UNREADABLE,
    "nothing": UNREADABLE,
    "stale_id": UNREADABLE,
    "error_map": REFUSED,
}
CASES = [
    *(("dial", fault, error) for fault, error in {**EVERYWHERE, **IN_HTTP}.items()),
    *(("greeting", fault, error) for fault, error in {**EVERYWHERE, **IN_FRAMES}.items()),
    *(("inference", fault, error) for fault, error in {**EVERYWHERE, **IN_FRAMES, **IN_CHUNKS, "unread": SILENT}.items()),
]


def start(port: int = 0) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "faulty_server.py", str(port)], stdout=subprocess.PIPE, text=True, cwd=HERE)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.fixture(scope="module")
def shared() -> Iterator[int]:
    process, port = start()
    yield port
    process.kill()
    process.communicate()


def backend(port: int, path: str, read_s: float = 1.0) -> ServiceBackend:
    config = ClientConfig(f"ws://127.0.0.1:{port}/{path}", handshake_s=1.0, read_s=read_s, connect_s=1.0, attempts=2)
    return ServiceBackend(PolicyClient(config, sleep=lambda s: None))


def held() -> tuple[int, int]:
    """Threads and open files of this process."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("phase", "fault", "error"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_fault_ends_in_its_declared_error_and_leaves_nothing(shared: int, phase: str, fault: str, error: type[Exception]):
    process, port = start() if fault == "kill" else (None, shared)
    before = held()
    service = backend(port, f"{phase}/{fault}")
    large = {view: np.zeros((1200, 1200, 3), np.uint8) for view in request().images} if fault == "unread" else request().images
    started = time.monotonic()
    with pytest.raises(error) as caught:
        service.infer(request(images=large))
    assert type(caught.value) is error
    assert time.monotonic() - started < 10  # bounded; the deadlines are one second
    assert "Traceback" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    service.close()
    until(lambda: held() == before)
    if process is not None:
        process.communicate()


def test_the_faulty_server_is_right_where_it_is_not_asked_to_be_wrong(shared: int):
    for fault in ("none", "pinged"):
        service = backend(shared, f"inference/{fault}")
        for value in (0.1, 0.2, 0.3):
            np.testing.assert_allclose(service.infer(request(q_rad=np.full(7, value))).action[:, :7], value, atol=1e-6)
        service.close()


def test_a_reply_too_many_answers_nobody_else(shared: int):
    service = backend(shared, "inference/twice")
    for value in (0.1, 0.2, 0.3):
        np.testing.assert_allclose(service.infer(request(q_rad=np.full(7, value))).action[:, :7], value, atol=1e-6)
        time.sleep(0.05)  # let the second one arrive
    service.close()


def test_a_late_reply_cannot_answer_the_next_request(serve):
    from conftest import Echo

    gate = threading.Event()
    late = serve(Echo(lambda asked: asked.seed == 1 and gate.wait(10)))
    service = ServiceBackend(PolicyClient(ClientConfig("127.0.0.1", late.port, read_s=0.3)))
    with pytest.raises(ServiceSilentError):
        service.infer(request(q_rad=np.full(7, 0.1), seed=1))
    threading.Timer(0.1, gate.set).start()
    np.testing.assert_allclose(service.infer(request(q_rad=np.full(7, 0.2), seed=2)).action[0, :7], 0.2, atol=1e-6)
    service.close()


@pytest.mark.parametrize("when", ["idle", "inference"])
def test_a_server_that_restarts_serves_again(when: str):
    process, port = start()
    service = backend(port, "inference/none")
    service.infer(request())
    if when == "inference":
        stuck = backend(port, "inference/hang", read_s=10.0)
        timer = threading.Timer(0.3, lambda: process.send_signal(signal.SIGKILL))
        timer.start()
        with pytest.raises(ServiceClosedError):
            stuck.infer(request())
        stuck.close()
        timer.join()
    process.kill()
    process.communicate()
    with pytest.raises(ServiceAbsentError):
        service.infer(request())
    process, _ = start(port)
    assert service.infer(request()).action.shape == (4, 8)
    service.close()
    process.kill()
    process.communicate()


def test_nobody_there_and_no_such_host_are_absent():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for host in (f"ws://127.0.0.1:{port}", "no-such-host.invalid"):
        before = held()
        service = ServiceBackend(PolicyClient(ClientConfig(host, attempts=2, connect_s=1.0), sleep=lambda s: None))
        with pytest.raises(ServiceAbsentError):
            service.infer(request())
        service.close()
        assert held() == before


def test_a_listener_that_accepts_nobody_is_silent():
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        service = backend(listener.getsockname()[1], "x/y")
        with pytest.raises(ServiceSilentError):
            service.infer(request())
        service.close()
