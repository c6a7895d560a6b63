"""Every fault, in every phase, from a server process that is not ours: each ends in its declared
error and leaves nothing.
"""

from __future__ import annotations

import gc
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from helpers.fault_table import HANDSHAKE, PHASES, TABLE, cells
from helpers.faulty_server import CHUNKS, FRAMES, HTTP
from helpers.faulty_service import ENDS_THE_SERVER, backend, held, named, patience, start
from helpers.serving import Echo, picture, request, until
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.errors import ServiceClosedError, ServiceTimeoutError, ServiceUnavailableError
from strands_cosmos3.serving.client import ClientConfig, PolicyClient

pytestmark = pytest.mark.usefixtures("few_collected")
ANYWHERE = ("kill", "restart", "hang", "drip", "garbage", "cut", "hang_up", "reset")


@pytest.fixture(scope="module")
def shared() -> Iterator[int]:
    process, port = start()
    yield port
    process.kill()
    process.communicate()


def test_the_table_is_complete():
    """Every fault of the server in every phase, or why not (pytest -s prints it); most in all
    three of an exchange's parts.
    """
    assert set(TABLE) == {*HTTP, *FRAMES, *CHUNKS, *ANYWHERE, "unread"}
    whole = set()
    for fault, row in TABLE.items():
        assert tuple(row) == PHASES
        parts = [
            any(not isinstance(row[phase], str) for phase in part)
            for part in (HANDSHAKE, ["inference"], ["midchunk"])
        ]
        whole |= {fault} if all(parts) else set()
        for phase, cell in row.items():
            print(f"{fault:15} {phase:10} {cell if isinstance(cell, str) else cell.__name__}")
            assert not isinstance(cell, str) or len(cell.split()) > 3, "a reason is a sentence"
    print(
        f"{len(TABLE)} faults, {len(cells(*PHASES))} cells with a meaning, {len(whole)} faults in "
        "all three phases"
    )
    assert len(whole) >= 20
    named = {
        "kill",
        "hang",
        "drip",
        "garbage",
        "oversize",
        "wrong_dtype",
        "object_dtype",
        "restart",
        "unauthorized",
    }
    assert named <= whole
    assert all(
        not isinstance(TABLE[fault][phase], str)
        for fault in TABLE
        for phase in ("inference", "midchunk")
    )


@pytest.mark.parametrize(("phase", "fault", "error"), cells(*HANDSHAKE, "inference"), ids=named)
def test_a_fault_ends_in_its_declared_error_and_leaves_nothing(
    shared: int, phase: str, fault: str, error: type[Exception]
):
    process, port = start() if fault in ENDS_THE_SERVER else (None, shared)
    before = held()
    service, asked = (
        backend(port, f"{phase}/{fault}", patience(phase, fault, error)),
        request(images={}, composite=picture()),
    )
    # it hangs up on the request; what is asked for is the answer to the next dial
    if phase == "inference" and fault in HTTP:
        with pytest.raises(ServiceClosedError):
            service.infer(asked)
    started = time.monotonic()
    with pytest.raises(error) as caught:
        service.infer(asked)
    assert type(caught.value) is error
    # bounded: the deadlines that pass are of one to three seconds
    assert time.monotonic() - started < 15
    assert "Traceback" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    if fault == "restart" and process is not None:
        process.wait()
        again, _ = start(port, "well")
        assert service.infer(asked).action.shape == (4, 8)
        again.kill()
        again.communicate()
    service.close()
    until(lambda: held() == before)
    if process is not None:
        process.communicate()


def test_the_faulty_server_is_right_where_it_is_not_asked_to_be_wrong(shared: int):
    for fault in ("none", "pinged"):
        service = backend(shared, f"inference/{fault}")
        for value in (0.1, 0.2, 0.3):
            np.testing.assert_allclose(
                service.infer(request(q_rad=np.full(7, value))).action[:, :7], value, atol=1e-6
            )
        service.close()


def test_a_reply_too_many_answers_nobody_else(shared: int):
    service = backend(shared, "inference/twice")
    for value in (0.1, 0.2, 0.3):
        np.testing.assert_allclose(
            service.infer(request(q_rad=np.full(7, value))).action[:, :7], value, atol=1e-6
        )
        time.sleep(0.05)  # let the second one arrive
    service.close()


def test_a_late_reply_cannot_answer_the_next_request(serve):

    gate = threading.Event()
    late = serve(Echo(lambda asked: asked.seed == 1 and gate.wait(10)))
    service = ServiceBackend(PolicyClient(ClientConfig("127.0.0.1", late.port, read_s=1.5)))
    with pytest.raises(ServiceTimeoutError):
        service.infer(request(q_rad=np.full(7, 0.1), seed=1))
    threading.Timer(0.1, gate.set).start()
    np.testing.assert_allclose(
        service.infer(request(q_rad=np.full(7, 0.2), seed=2)).action[0, :7], 0.2, atol=1e-6
    )
    service.close()


@pytest.mark.parametrize("when", ["idle", "connecting", "greeting", "inference"])
def test_an_exchange_that_is_broken_off_harms_no_other(
    serve, monkeypatch: pytest.MonkeyPatch, caplog, when: str
):

    import strands_cosmos3.serving.client as client_module

    asked, gate = threading.Event(), threading.Event()

    def hang(request) -> None:
        if request.seed == 1:
            asked.set()
            gate.wait(10)

    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1] if when == "greeting" else serve(Echo(hang)).port
        client = PolicyClient(ClientConfig("127.0.0.1", port, handshake_s=20.0, read_s=20.0))
        service, dial = ServiceBackend(client), socket.create_connection

        def cancel_and_dial(*arguments, **more):
            monkeypatch.setattr(client_module.socket, "create_connection", dial)
            client.cancel()
            return dial(*arguments, **more)

        if when == "connecting":
            monkeypatch.setattr(client_module.socket, "create_connection", cancel_and_dial)
        elif when == "greeting":
            threading.Timer(0.3, client.cancel).start()
        elif when == "inference":
            threading.Thread(target=lambda: (asked.wait(10), client.cancel())).start()
        else:
            client.cancel()
        started = time.monotonic()
        if when == "idle":
            service.infer(request(q_rad=np.full(7, 0.1), seed=2))
        else:
            with pytest.raises(ServiceClosedError, match="on this side"):
                service.infer(request(q_rad=np.full(7, 0.1), seed=1))
        assert time.monotonic() - started < 10.0  # the deadlines are twenty seconds
        gate.set()
        if when != "greeting":
            np.testing.assert_allclose(
                service.infer(request(q_rad=np.full(7, 0.2), seed=2)).action[0, :7], 0.2, atol=1e-6
            )
        service.close()
        gc.collect()
        # it complains of what was left behind
        assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_cancellation_before_the_request_leaves_counts(serve):
    client = PolicyClient(ClientConfig("127.0.0.1", serve(Echo()).port))
    with pytest.raises(ServiceClosedError, match="on this side"):
        client.exchange(lambda metadata: client.cancel(), lambda reply: reply)
    client.close()


def test_ctrl_c_during_a_handshake_gives_up_its_socket():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = PolicyClient(ClientConfig("127.0.0.1", mute.getsockname()[1], handshake_s=60.0))
        main = threading.main_thread().ident
        assert main == threading.get_ident(), "signals reach the main thread only"
        # a shell's background jobs ignore it
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
        try:
            with pytest.raises(KeyboardInterrupt):
                client.exchange({}, lambda reply: reply)
        finally:
            signal.signal(signal.SIGINT, before)
        reader, _ = mute.accept()
        with reader:
            reader.settimeout(20)
            while reader.recv(4096):
                pass  # the handshake's request
        client.close()


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
    # the latter where it is noticed in sending only
    with pytest.raises((ServiceUnavailableError, ServiceClosedError)):
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
        service = ServiceBackend(
            PolicyClient(ClientConfig(host, attempts=2, connect_s=1.0), sleep=lambda s: None)
        )
        with pytest.raises(ServiceUnavailableError):
            service.infer(request())
        service.close()
        assert held() == before


def test_a_listener_that_accepts_nobody_is_silent():
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        service = backend(listener.getsockname()[1], "dial/hang", 1.0)
        with pytest.raises(ServiceTimeoutError):
            service.infer(request())
        service.close()
