"""The server as a client on the network sees it, in this process and as a process of its own."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgpack
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from helpers.serving import DROID, Echo, observation, picture, until
from strands_cosmos3.backends.base import BackendInfo
from strands_cosmos3.backends.replay import Recording, ReplayBackend
from strands_cosmos3.errors import (
    BackendError,
    ConfigError,
    InputError,
    InstructionError,
    ServiceTimeoutError,
    ServiceUnreadableError,
)
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.codec import decode, encode
from strands_cosmos3.serving.http_client import HttpPolicyClient, Post
from strands_cosmos3.serving.libero import LIBERO
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.serving.server_config import Tokens
from strands_cosmos3.types import ActionChunk
from strands_cosmos3.worlds.table.expert import ScriptedBackend

TOKEN = "s3cret-s3cret-s3cret"


@contextmanager
def dial(port: int, **options) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{port}", compression=None, **options) as client:
        assert decode(client.recv(timeout=5)).keys() == {"cosmos3/action_space"}
        yield client


def ask(client: ClientConnection, message: object) -> object:
    client.send(message if isinstance(message, bytes | str) else encode(message))
    reply = client.recv(timeout=20)
    return reply if isinstance(reply, str) else decode(reply)


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def listening(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


def test_a_chunk_comes_back_under_both_names_with_its_timing(serve):
    with dial(serve().port) as client:
        first = ask(client, observation())
        second = ask(client, observation())
    assert first["action"].dtype == np.float32
    np.testing.assert_allclose(
        first["action"][:, :7], np.linspace(0.1, 0.7, 7) + 0.01 * np.arange(4)[:, None], atol=1e-6
    )
    np.testing.assert_array_equal(first["action"], first["actions"])
    assert set(first["server_timing"]) == {"infer_ms"}
    assert set(second["server_timing"]) == {"infer_ms", "prev_total_ms"}


def test_the_gripper_flips_in_both_directions(serve):
    backend = Echo()
    with dial(serve(backend).port) as client:
        reply = ask(client, observation(gripper=0.2))
    # 0.2 closed on the wire is 0.8 open inside
    assert backend.requests[-1].gripper == pytest.approx(0.8)
    # and the echo of 0.8 open is 0.2 closed again
    np.testing.assert_allclose(reply["action"][:, 7], 0.2, atol=1e-6)


@pytest.mark.parametrize(
    "gripper",
    [0.2, np.float64(0.2), [0.2], [[0.2]], np.array([0.9, 0.2]), np.array([[0.9], [0.2]])],
)
def test_a_gripper_is_a_number_or_a_history(serve, gripper):
    backend = Echo()
    with dial(serve(backend).port) as client:
        history = np.arange(7) / 10 + np.array([[0.3], [0.1], [0.0]])  # the newest last
        ask(client, {**observation(history), "observation/gripper_position": gripper})
    assert backend.requests[-1].gripper == pytest.approx(0.8)
    np.testing.assert_allclose(backend.requests[-1].q_rad, np.arange(7) / 10)


def test_views_a_composite_and_roboarena_s_names_arrive_as_pictures(serve):
    backend = Echo()
    backend.info = BackendInfo(name="echo")
    pictures = [picture(), picture() + 1, picture() + 2]
    with dial(serve(backend).port) as client:
        for keys in (
            DROID.rig.wire_names,
            (DROID.rig.wire_names[0], *(f"observation/exterior_image_{i}_left" for i in (0, 1))),
        ):
            ask(client, observation(**dict(zip(keys, pictures, strict=True))))
            seen = backend.requests[-1].images
            assert [int(seen[view][0, 0, 0]) for view in DROID.rig.views] == [100, 101, 102]
        ask(client, observation(**{"observation/image": picture(540, 640)}))
        assert backend.requests[-1].composite.shape == (540, 640, 3)
        assert "exterior_image_2_left" in ask(
            client, observation(**dict(zip(DROID.rig.wire_names[:2], pictures, strict=False)))
        )


def test_unknown_keys_and_a_session_are_ignored(serve):
    with dial(serve().port) as client:
        reply = ask(
            client, observation(session_id="x", nonsense={"a": [1, None]}, empty=np.zeros(0))
        )
    assert reply["action"].shape == (4, 8)


def test_seed_clock_and_request_id_are_taken_and_the_id_comes_back(serve):
    backend = Echo()
    more = {"cosmos3/seed": 5, "cosmos3/t_motion_s": 1.5, "cosmos3/request_id": 42}
    with dial(serve(backend).port) as client:
        assert ask(client, observation(**more))["cosmos3/request_id"] == 42
        assert (backend.requests[-1].seed, backend.requests[-1].t_motion_s) == (5, 1.5)
        ask(client, observation())
    assert backend.requests[-1].seed == 1  # the second call of the episode, counted here
    assert 0 <= backend.requests[-1].t_motion_s < 60


def test_reset_is_answered_in_both_dialects_and_starts_a_new_episode(serve):
    backend = Echo()
    server = serve(backend)
    with dial(server.port) as client:
        ask(client, observation())
        ask(client, observation())
        resets = backend.resets
        assert ask(client, {"endpoint": "reset", "session_id": "x"}) == {
            "status": "reset successful"
        }
        assert backend.resets == resets + 1
        ask(client, observation())
        assert backend.requests[-1].seed == 0
    # roboarena's clients name the endpoint, want bare arrays and a text
    with dial(server.port) as client:
        assert ask(client, observation(endpoint="infer")).shape == (4, 8)
        assert ask(client, {"endpoint": "reset"}) == "reset successful"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"\xc1", "WireFormatError"),
        ("hello", "binary"),
        (encode([1]), "map"),
        ({"prompt": "x"}, "observation/joint_position"),
        ({**observation(), "prompt": 3}, "text"),
        (observation(np.full(7, np.nan)), "finite"),
        (observation(np.zeros(6)), "shape"),
        (observation(np.zeros((0, 7))), "shape"),
        (observation(gripper=np.inf), "finite"),
        ({**observation(), "observation/gripper_position": np.zeros((2, 2))}, "T, 1"),
        ({**observation(), "observation/gripper_position": "open"}, "numbers"),
        (observation(**{"observation/image": np.zeros((4, 4, 3), np.float32)}), "uint8"),
        (observation(**{"observation/image": "picture"}), "uint8"),
        (observation(**{"cosmos3/seed": "x"}), "numbers"),
    ],
)
def test_a_bad_request_is_a_line_of_text_then_1011_and_the_next_dial_works(serve, message, says):
    server = serve()
    with dial(server.port) as client:
        reply = ask(client, message)
        assert isinstance(reply, str)
        assert says in reply
        assert "Traceback" not in reply
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=5)
        assert closed.value.rcvd.code == 1011
    with dial(server.port) as client:
        assert "action" in ask(client, observation())


class Wrong(Echo):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def infer(self, request):
        return super().infer(request) if request.instruction == "warm up" else self.answer(request)


def forged(rows):
    """A chunk that no check has seen, as a careless backend might build it."""

    def answer(request):
        chunk = Echo().infer(request)
        object.__setattr__(chunk, "action", np.asarray(rows))
        return chunk

    return answer


def explode(request):
    raise ZeroDivisionError("/secret/path is in here")


def pose_rows(request):
    return ActionChunk([[0.4, 0, 0.4, 1, 0, 0, 0, 0.5]], DROID.spaces["pose_abs"], DROID)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda request: None, "BackendError"),
        (
            lambda request: ActionChunk(np.full((4, 8), np.nan), request.action_space, DROID),
            "finite",
        ),
        (lambda request: ActionChunk(np.zeros((4, 7)), request.action_space, DROID), "columns"),
        (forged(np.full((4, 8), np.nan)), "float32"),
        (forged(np.full((4, 8), 1e300)), "float32"),
        (pose_rows, "ActionSpaceError"),
        (explode, "InternalError: inference failed (ZeroDivisionError)"),
    ],
)
def test_what_a_backend_must_not_answer_is_never_sent(serve, answer, says):
    server = serve(Wrong(answer))
    with dial(server.port) as client:
        reply = ask(client, observation())
    assert isinstance(reply, str)
    assert says in reply
    assert "secret" not in reply
    assert "Traceback" not in reply
    assert server.metrics.requests["error"] == 1


def test_an_instruction_that_the_backend_does_not_understand_is_the_client_s_error(serve):
    def understand(request):
        if request.instruction != "warm up":
            raise InstructionError("instruction 'sing' is not understood.")

    with dial(serve(Echo(understand)).port) as client:
        assert (
            ask(client, observation()) == "InstructionError: instruction 'sing' is not understood."
        )


def test_a_message_beyond_the_limit_closes_with_1009(serve):
    with dial(serve().port) as client:
        with suppress(ConnectionClosed):
            client.send(bytes(17 * 2**20))
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=10)
        assert closed.value.rcvd.code == 1009


def test_http_has_health_metrics_and_nothing_else(serve):
    server = serve()
    with dial(server.port) as client:
        ask(client, observation())
        status, text = get(server.port, "/metrics")
    assert get(server.port, "/healthz") == (200, "OK\n")
    assert get(server.port, "/healthz?x=1")[0] == 200
    assert status == 200
    assert 'strands_cosmos3_requests_total{outcome="ok"} 1' in text
    assert 'strands_cosmos3_inference_seconds_bucket{le="+Inf"} 1' in text
    assert "# TYPE strands_cosmos3_inference_seconds histogram" in text
    assert [line for line in text.splitlines() if line.startswith("strands_cosmos3_clients ")] == [
        "strands_cosmos3_clients 1"
    ]
    for path in ("/", "/anything", "/metricss"):
        assert get(server.port, path)[0] == 426
    with suppress(http.client.RemoteDisconnected):  # websockets 15 hangs up on what is not GET
        assert get(server.port, "/", "POST")[0] == 426


@pytest.mark.parametrize("header", [f"Api-Key {TOKEN}", f"Bearer {TOKEN}", f"bearer {TOKEN}"])
def test_with_a_token_only_who_shows_it_comes_in(serve, header):
    server = serve(token=TOKEN)
    with dial(server.port, additional_headers={"Authorization": header}) as client:
        assert "action" in ask(client, observation())
    for wrong in (
        {},
        {"Authorization": f"Api-Key {TOKEN[:-1]}"},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
    ):
        with pytest.raises(InvalidStatus) as refused, dial(server.port, additional_headers=wrong):
            pass
        assert refused.value.response.status_code == 401
        assert get(server.port, "/metrics", **wrong)[0] == 401
    assert get(server.port, "/metrics", Authorization=header)[0] == 200
    assert get(server.port, "/healthz")[0] == 200


def test_a_web_page_is_refused(serve):
    with pytest.raises(InvalidStatus) as refused, dial(serve().port, origin="http://evil.example"):
        pass
    assert refused.value.response.status_code == 403


def test_more_clients_than_places_are_turned_away(serve):
    server = serve(max_clients=1)
    with dial(server.port):
        with pytest.raises(InvalidStatus) as refused, dial(server.port):
            pass
        assert refused.value.response.status_code == 503
    until(lambda: server.metrics.clients == 0)
    with dial(server.port):
        pass


def test_a_client_idle_for_long_gives_its_place_to_another(serve):
    server = serve(max_clients=2, idle_s=0.3)
    with dial(server.port) as idle:
        time.sleep(0.35)
        with dial(server.port) as active:
            assert "action" in ask(active, observation())
            with dial(server.port) as third:
                assert "action" in ask(third, observation())
                assert "action" in ask(active, observation())
        with pytest.raises(ConnectionClosed):
            ask(idle, observation())
    assert server.metrics.evicted == 1


def test_a_request_that_waited_too_long_is_not_inferred_for(serve):
    gate = threading.Event()
    backend = Echo(lambda request: request.instruction != "warm up" and gate.wait(20))
    server = serve(backend, queue_s=1.0)
    with dial(server.port) as first, dial(server.port) as second:
        first.send(encode(observation()))
        until(lambda: server.metrics.in_flight == 1 and server.busy_s > 0)
        second.send(encode(observation()))
        until(lambda: server.metrics.in_flight == 2)
        time.sleep(1.1)
        assert get(server.port, "/readyz")[0] == 503
        assert "has taken" in get(server.port, "/readyz")[1]
        assert get(server.port, "/healthz") == (200, "OK\n")
        gate.set()
        assert "action" in decode(first.recv(timeout=10))
        assert "at most 1 s are useful" in second.recv(timeout=10)
        with pytest.raises(ConnectionClosed) as closed:
            second.recv(timeout=5)
        assert closed.value.rcvd.code == 1013
    assert server.metrics.requests["late"] == 1
    assert len(backend.requests) == 2  # the warm-up and the first
    until(lambda: get(server.port, "/readyz")[0] == 200)


def test_clients_take_turns_however_many_connections_one_of_them_has(serve):
    """`fleet` asks on four connections before `single` asks once, and is served once before it."""
    gate, served = threading.Event(), list[str]()

    def before(request):
        if request.instruction != "warm up":
            served.append(request.instruction)
            gate.wait(20)

    server = serve(Echo(before), token={"fleet": "fleet" + TOKEN, "single": "single" + TOKEN})
    keys = [("fleet", n) for n in range(4)] + [("single", 0)]
    with ExitStack() as stack:
        for waiting, (owner, n) in enumerate(keys, 1):
            client = stack.enter_context(
                dial(server.port, additional_headers={"Authorization": f"Api-Key {owner}{TOKEN}"})
            )
            client.send(encode(observation(prompt=f"{owner} {n}")))
            until(lambda waiting=waiting: server.metrics.in_flight == waiting and server.busy_s > 0)
        gate.set()
        until(lambda: len(served) == 5)
    assert served == ["fleet 0", "fleet 1", "single 0", "fleet 2", "fleet 3"]


class Batching(Echo):
    """Waits for the gate in its first inference; refuses a batch with a request that is spoilt."""

    def __init__(self):
        self.gate, self.batches = threading.Event(), list[int]()
        super().__init__(self._wait)

    def _wait(self, request):
        if request.instruction == "first":
            self.gate.wait(20)
        if request.instruction == "spoilt":
            raise BackendError("this one is spoilt")

    def infer_batch(self, requests):
        self.batches.append(len(requests))
        return super().infer_batch(requests)


def test_what_waits_is_inferred_for_together_and_each_gets_its_own_answer(serve):
    backend = Batching()
    server = serve(backend, max_batch=3)
    with ExitStack() as stack:
        clients = [stack.enter_context(dial(server.port)) for _ in range(6)]
        for n, client in enumerate(clients):
            client.send(
                encode(observation(np.full(7, n / 10), prompt="first" if n == 0 else "next"))
            )
            until(lambda n=n: server.metrics.in_flight == n + 1 and (n or server.busy_s > 0))
        backend.gate.set()
        for n, client in enumerate(clients):
            np.testing.assert_allclose(decode(client.recv(timeout=10))["action"][0, :7], n / 10)
    assert backend.batches == [3, 2]


def test_a_request_that_fails_costs_no_other_of_its_batch(serve):
    backend = Batching()
    server = serve(backend)
    with ExitStack() as stack:
        clients = [stack.enter_context(dial(server.port)) for _ in range(4)]
        for n, (client, prompt) in enumerate(
            zip(clients, ("first", "next", "spoilt", "next"), strict=True)
        ):
            client.send(encode(observation(np.full(7, n / 10), prompt=prompt)))
            until(lambda n=n: server.metrics.in_flight == n + 1 and (n or server.busy_s > 0))
        backend.gate.set()
        assert clients[2].recv(timeout=10) == "BackendError: this one is spoilt"
        for n in (0, 1, 3):
            np.testing.assert_allclose(decode(clients[n].recv(timeout=10))["action"][0, :7], n / 10)


def test_replicas_answer_side_by_side_each_with_a_backend_of_its_own():
    both = threading.Barrier(2, timeout=10)
    backends = [
        Echo(lambda request: request.instruction != "warm up" and both.wait()) for _ in range(2)
    ]
    server = PolicyServer(
        [ServedPolicy(backend, "droid", "joint_pos") for backend in backends], ServerConfig(port=0)
    )
    with server, dial(server.port) as one, dial(server.port) as other:
        for client in (one, other):
            client.send(encode(observation()))
        for client in (one, other):
            assert "action" in decode(client.recv(timeout=10))
        assert 'replicas="2"' in get(server.port, "/metrics")[1]
    # a warm-up and one of the requests each
    assert [len(backend.requests) for backend in backends] == [2, 2]


def test_a_server_is_ready_while_one_replica_is_free():
    gate = threading.Event()
    backends = [
        Echo(lambda request: request.instruction != "warm up" and gate.wait(20)) for _ in range(2)
    ]
    policies = [ServedPolicy(backend, "droid", "joint_pos") for backend in backends]
    server = PolicyServer(policies, ServerConfig(port=0, queue_s=0.05))
    with server, dial(server.port) as one, dial(server.port) as other:
        one.send(encode(observation()))
        until(lambda: server.busy_s > 0.1)
        assert get(server.port, "/readyz")[0] == 200
        other.send(encode(observation()))
        until(lambda: get(server.port, "/readyz")[0] == 503)
        gate.set()
        until(lambda: get(server.port, "/readyz")[0] == 200)


def test_an_abandoned_inference_counts_as_in_flight_until_it_ends(serve):
    gate = threading.Event()
    server = serve(Echo(lambda request: request.instruction != "warm up" and gate.wait(20)))
    with dial(server.port) as client:
        client.send(encode(observation()))
        until(lambda: server.busy_s > 0)
    until(lambda: server.metrics.requests["abandoned"] == 1)
    assert server.metrics.in_flight == 1
    busy = next(
        line
        for line in get(server.port, "/metrics")[1].splitlines()
        if line.startswith("strands_cosmos3_busy_seconds ")
    )
    assert float(busy.split()[1]) > 0
    gate.set()
    until(lambda: server.metrics.in_flight == 0)


def test_metrics_say_what_is_served_and_how_long_requests_waited(serve):
    server = serve()
    with dial(server.port) as client:
        ask(client, observation())
    text = get(server.port, "/metrics")[1]
    assert 'backend="echo"' in text
    assert f'embodiment="{DROID.name}"' in text
    assert 'strands_cosmos3_queue_seconds_bucket{le="+Inf"} 1' in text
    assert "strands_cosmos3_busy_seconds 0" in text


def test_names_from_the_wire_reach_no_log_as_commands(serve, caplog):
    with dial(serve().port) as client:
        reply = ask(client, {"a\n2026-01-01 CRITICAL forged\x1b[31m": 1})
    (record,) = [record for record in caplog.records if "refused" in record.message]
    for said in (reply, record.message):
        assert "forged" in said
        assert said.isprintable()


def test_a_picture_that_would_exhaust_memory_and_an_endless_prompt_are_refused(serve):
    server = serve()
    line = np.zeros((1, 4_000_000, 3), np.uint8)
    for message, says in (
        (observation(**{"observation/image": line}), "4096 x 4096"),
        ({**observation(), "prompt": "a" * 5000}, "4096"),
    ):
        with dial(server.port) as client:
            assert says in ask(client, message)


def test_an_unsupported_array_is_ignored_where_nobody_reads_it(serve):
    depth = {b"__ndarray__": True, b"dtype": "<u2", b"shape": (2, 2), b"data": bytes(8)}
    with dial(serve().port) as client:
        assert "action" in ask(
            client,
            msgpack.packb({**msgpack.unpackb(encode(observation())), "observation/depth": depth}),
        )
        said = ask(
            client,
            msgpack.packb({**msgpack.unpackb(encode(observation())), "observation/image": depth}),
        )
        assert "'observation/image': arrays of dtype '<u2' are not supported" in said


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, so there is no certificate to test with")
    folder = tmp_path_factory.mktemp("certificate")
    files = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command = ["openssl", "req", "-x509", *curve, "-nodes", "-days", "2", *subject]
    subprocess.run(
        [*command, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True
    )
    return files


def test_tls_is_spoken_with_a_certificate(serve, certificate, monkeypatch):
    """With this package's client: websockets' own sync one uses a TLS connection from two
    threads, which OpenSSL forbids.
    """
    server = serve(tls_cert=certificate[0], tls_key=certificate[1])
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    client = PolicyClient(ClientConfig(f"wss://127.0.0.1:{server.port}"))
    assert "action" in client.exchange(observation(), dict)
    told = {"cosmos3/action_space": "joint_pos", "cosmos3/pictures": "jpeg"}
    assert client.metadata == told
    client.close()


@pytest.mark.parametrize(
    ("client", "message"),
    [(PolicyClient, {}), (HttpPolicyClient, Post(LIBERO, "/predict", {}, lambda info: None))],
)
def test_a_server_that_cannot_be_trusted_has_a_typed_error(serve, certificate, client, message):
    scheme = "wss" if client is PolicyClient else "https"
    port = serve(tls_cert=certificate[0], tls_key=certificate[1]).port
    with pytest.raises(ServiceUnreadableError, match=r"certificate verify failed.*SSL_CERT_FILE"):
        client(ClientConfig(f"{scheme}://127.0.0.1:{port}")).exchange(message, dict)
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer() -> None:
            with plain.accept()[0] as peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ServiceUnreadableError, match="no TLS"):
            client(ClientConfig(f"{scheme}://127.0.0.1:{plain.getsockname()[1]}")).exchange(
                message, dict
            )


def test_a_peer_that_never_answers_tls_is_left_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ServiceTimeoutError, match=r"0\.5 s"):
            PolicyClient(ClientConfig(f"wss://127.0.0.1:{port}", handshake_s=0.5)).exchange(
                {}, dict
            )


def test_each_client_has_a_token_of_its_own(serve, tmp_path):
    path = tmp_path / "tokens"
    path.write_text("# the lab's arms\nrobot-1 aaaaaaaaaaaaaaaaaaaa\n\nbbbbbbbbbbbbbbbbbbbb\n")
    path.chmod(0o600)
    tokens = Tokens.read(path)
    assert tokens.by_client == {"robot-1": "a" * 20, "client 2": "b" * 20}
    assert "aaaa" not in repr(tokens)
    server = serve(token=tokens.by_client)
    for letter, status in (("a", 200), ("b", 200), ("c", 401)):
        assert get(server.port, "/metrics", Authorization=f"api-key {letter * 20}")[0] == status


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("a" * 20, 0o644, "chmod 600"),
        ("", 0o600, "one token per line"),
        ("a b c", 0o600, "one token per line"),
        ("robot x", 0o600, "openssl rand"),
        (f"one {'a' * 20}\none {'b' * 20}", 0o600, "names a client twice"),
        (f"one {'a' * 20}\ntwo {'a' * 20}", 0o600, "same token"),
    ],
)
def test_a_careless_token_file_is_refused(tmp_path, text, mode, says):
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        Tokens.read(path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "robot.example", ""])
def test_another_interface_wants_a_token(host):
    with pytest.raises(ConfigError, match="token"):
        ServerConfig(host=host)
    ServerConfig(host=host, token=TOKEN)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_does_not(host):
    ServerConfig(host=host)


@pytest.mark.parametrize(
    "bad",
    [
        {"token": ""},
        {"token": "a" * 15},
        {"token": "a b" * 9},
        {"token": "é" * 20},
        {"tls_cert": "x"},
        {"port": 70000},
        {"max_clients": 0},
        {"max_per_address": 0},
        {"max_per_address": 1.5},
        {"grace_s": -1},
    ],
)
def test_a_configuration_out_of_range_is_refused(bad):
    with pytest.raises((ConfigError, InputError)):
        ServerConfig(**bad)


def test_a_backend_that_sees_the_simulator_s_state_is_not_served():
    with pytest.raises(ConfigError, match="never leaves its process"):
        ServedPolicy(ScriptedBackend(), "droid", "midtrain")


def test_a_backend_that_cannot_answer_is_not_served_and_a_taken_port_is_named(serve):
    class Broken(Echo):
        def infer(self, request):
            raise BackendError("no weights")

    with pytest.raises(BackendError, match=r"warm-up.*no weights"):
        serve(Broken())
    port = serve().port
    with pytest.raises(ConfigError, match="in use"):
        serve(port=port)


def test_the_warm_up_comes_before_the_first_client(serve):
    backend = Echo()
    serve(backend)
    assert [request.instruction for request in backend.requests] == ["warm up"]


def recording() -> Recording:
    T = np.tile(np.eye(4), (31, 1, 1))
    T[:, :3, :3] = np.diag([1.0, -1.0, -1.0])
    T[:, :3, 3] = [0.4, 0.0, 0.4]
    T[:, 0, 3] += 0.005 * np.arange(31)
    return Recording(T, np.linspace(1, 0.2, 31), 15.0, np.zeros(7))


def test_midtrain_is_answered_as_absolute_poses_that_are_denormalised_and_integrated(serve):
    motion = recording()
    backend = ReplayBackend(motion)
    server = serve(backend, action_space="midtrain")
    pose = {
        "observation/eef_pos": np.array([0.4, 0, 0.4]),
        "observation/eef_quat": np.array([1.0, 0, 0, 0]),
    }
    request = {"prompt": "", **pose, "observation/gripper_position": 0.0, "cosmos3/t_motion_s": 0.0}
    with dial(server.port) as client:
        rows = ask(client, request)["action"]
        assert rows.shape == (16, 8)
        np.testing.assert_allclose(rows[:, :3], motion.T_base_cosmos[1:17, :3, 3], atol=1e-6)
        np.testing.assert_allclose(np.abs(rows[:, 3:7]), [[1, 0, 0, 0]] * 16, atol=1e-6)
        np.testing.assert_allclose(rows[:, 7], 1 - motion.gripper[1:17], atol=1e-6)
        assert "eef_pos" in ask(
            client, {"prompt": "", "observation/eef_quat": pose["observation/eef_quat"]}
        )
    with dial(server.port) as client:
        assert "norm" in ask(client, {**request, "observation/eef_quat": np.array([1.0, 1, 0, 0])})


def test_sixty_four_clients_at_once_get_their_own_replies(serve):
    server = serve()
    wrong: list[int] = []

    def one(number: int) -> None:
        q = np.full(7, number / 64)
        with dial(server.port) as client:
            for _ in range(4):
                rows = ask(
                    client,
                    observation(
                        q, **{"cosmos3/request_id": number, "observation/image": picture()}
                    ),
                )
                if rows["cosmos3/request_id"] != number or not np.allclose(
                    rows["action"][0, :7], q
                ):
                    wrong.append(number)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert server.metrics.requests["ok"] == 256
    until(lambda: server.metrics.clients == 0)


def test_the_memory_of_a_crowded_server_stays_flat(spawn):
    process, port = spawn("-m", "helpers.slow_server", "0", "sleep")
    large = encode(observation(**{"observation/image": picture(540, 640)}))

    def crowd() -> None:
        def one() -> None:
            with dial(port) as client:
                for _ in range(2):
                    assert "action" in ask(client, large)

        threads = [threading.Thread(target=one) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    held: list[int] = []
    for _ in range(3):
        crowd()
        held.append(round(resident(process.pid) / 2**20))
    # the allocator keeps some pages
    assert held[-1] - held[0] < 100, f"{held} MiB after each 63 MiB of requests"


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_client_that_leaves_while_it_waits_is_not_inferred_for(serve):
    gate = threading.Event()
    backend = Echo(lambda request: request.instruction != "warm up" and gate.wait(20))
    server = serve(backend)
    with dial(server.port) as first:
        first.send(encode(observation()))
        until(lambda: server.metrics.in_flight == 1 and server.busy_s > 0)
        with dial(server.port) as second:
            second.send(encode(observation()))
            until(lambda: server.metrics.in_flight == 2)
        until(lambda: server.metrics.requests["abandoned"] == 1)
        gate.set()
        assert "action" in decode(first.recv(timeout=10))
    assert len(backend.requests) == 2  # the warm-up and the first


@pytest.mark.parametrize("how", [pytest.param("sleep", marks=pytest.mark.slow), "spin"])
def test_health_and_pings_are_answered_during_a_long_inference(spawn, how):
    """A process of its own at a small scale: 1.3 s of inference, pings every 0.4 s that must be
    answered in 0.4 s.
    """
    _, port = spawn("-m", "helpers.slow_server", "1.3", how)
    with dial(port, ping_interval=0.4, ping_timeout=0.4) as client:
        client.send(encode(observation()))
        took, end = list[float](), time.monotonic() + 1.0
        while time.monotonic() < end:
            started = time.monotonic()
            assert get(port, "/healthz") == (200, "OK\n")
            took.append(time.monotonic() - started)
            time.sleep(0.05)
        assert "action" in decode(client.recv(timeout=20))
    # one answer may wait for another process of this machine
    p90, slowest = np.quantile(took, [0.9, 1.0])
    assert p90 < 0.1, f"/healthz took {p90 * 1e3:.0f} ms during inference"
    assert slowest < 0.5


@pytest.mark.slow
def test_a_minute_of_inference_survives_default_pings(spawn):
    _, port = spawn("-m", "helpers.slow_server", "60", "spin")
    with dial(port) as client:
        client.send(encode(observation()))
        slowest, end = 0.0, time.monotonic() + 58
        while time.monotonic() < end:
            started = time.monotonic()
            assert get(port, "/healthz")[0] == 200
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.5)
        assert "action" in decode(client.recv(timeout=30))
    assert slowest < 0.1, f"/healthz took {slowest * 1e3:.0f} ms"


# the server does the same for both; a first SIGINT that ends nothing is below, too
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_lets_the_running_inference_finish_and_exits_with_zero(spawn, number):
    process, port = spawn("-m", "helpers.slow_server", "1", "sleep")
    with dial(port) as client:
        client.send(encode(observation()))
        assert process.stdout.readline() == "inferring\n"
        process.send_signal(number)
        assert "action" in decode(client.recv(timeout=10))
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=10)
        assert closed.value.rcvd.code == 1001
    out, error = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "bye\n")
    assert "Traceback" not in error
    assert not listening(port)


@pytest.mark.slow  # test_serve_command.py abandons one, and sees that it is said
def test_an_inference_that_never_returns_cannot_keep_the_server_from_ending(spawn):
    process, port = spawn("-m", "helpers.slow_server", "3600", "sleep", "0.3")
    with dial(port) as client:
        client.send(encode(observation()))
        assert process.stdout.readline() == "inferring\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20)[0] == "bye\n"
    assert process.returncode == 0


def test_a_second_ctrl_c_does_not_wait(spawn):
    process, port = spawn("-m", "helpers.slow_server", "3600", "sleep", "3600")
    with dial(port) as client:
        client.send(encode(observation()))
        assert process.stdout.readline() == "inferring\n"
        process.send_signal(signal.SIGINT)
        until(lambda: not listening(port))
        assert process.poll() is None, "the first lets the running inference finish"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20)[0] == "bye\n"
    assert process.returncode == 0


def test_nothing_is_left_behind():
    before = threading.active_count()
    with (
        PolicyServer(ServedPolicy(Echo()), ServerConfig(port=0)) as server,
        dial(server.port) as client,
    ):
        ask(client, observation())
    until(lambda: threading.active_count() == before)


@pytest.mark.parametrize("places", [2, 4, 7])
def test_one_token_of_several_takes_half_of_the_places_at_most(serve, places):
    tokens = {name: name + TOKEN for name in ("fleet", "single")}
    server = serve(token=tokens, max_clients=places)

    def entered(name):
        headers = {"Authorization": f"Bearer {tokens[name]}"}
        return dial(server.port, additional_headers=headers)

    with ExitStack() as held:
        for _ in range(places // 2):
            held.enter_context(entered("fleet"))
        with pytest.raises(InvalidStatus) as refused, entered("fleet"):
            pass
        assert refused.value.response.status_code == 503
        with entered("single") as client:
            assert "action" in ask(client, observation())
    until(lambda: server.metrics.clients == 0)
    with entered("fleet"):
        pass


@pytest.mark.parametrize("places", [1, 2, 5])
@pytest.mark.parametrize("token", [None, {"fleet": TOKEN, "single": TOKEN[::-1]}])
def test_an_address_has_its_own_number_of_places(serve, places, token):
    server = serve(token=token, max_per_address=places)
    shown = [TOKEN, TOKEN[::-1]]

    def entered(number):
        headers = {"Authorization": f"Bearer {shown[number % 2]}"} if token else {}
        return dial(server.port, additional_headers=headers)

    with ExitStack() as held:
        for number in range(places):
            held.enter_context(entered(number))
        with pytest.raises(InvalidStatus) as refused, entered(places):
            pass
        assert refused.value.response.status_code == 503
        assert f"127.0.0.1 has {places} connections" in refused.value.response.body.decode()
    until(lambda: server.metrics.clients == 0)
    with entered(0) as client:
        assert "action" in ask(client, observation())


def test_without_a_limit_an_address_has_all_places(serve):
    server = serve(max_clients=66)
    with ExitStack() as held:
        for _ in range(66):
            held.enter_context(dial(server.port))
        with pytest.raises(InvalidStatus), dial(server.port):
            pass
