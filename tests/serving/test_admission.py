"""Classes, turns, deadlines and refusals: as pure data, and at a server in this process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_libero_server import GOOD, post
from test_server import TOKEN, ask, dial, get
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus

from helpers.serving import VIEWS, Several, libero_request, observation, picture, request, until
from strands_cosmos3.backends.service import HttpServiceBackend, ServiceBackend
from strands_cosmos3.errors import ConfigError, InputError, ServiceBusyError, UnknownNameError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.serving import libero
from strands_cosmos3.serving.admission import Client, Durations, Priority, Turns
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.codec import decode, encode, peek
from strands_cosmos3.serving.http_client import HttpPolicyClient
from strands_cosmos3.serving.server_config import ServerConfig, Tokens
from strands_cosmos3.types import ActionChunk, Observation

CLIENTS = st.builds(Client, st.sampled_from("abcd"), st.sampled_from(Priority))
OTHER = "r0b0t-r0b0t-r0b0t"


def queue(clients: list[Client]) -> Turns[tuple[Client, int]]:
    turns: Turns[tuple[Client, int]] = Turns()
    for number, client in enumerate(clients):
        turns.put(client, (client, number))
    return turns


@given(st.lists(CLIENTS))
def test_every_job_is_served_once_realtime_before_bulk_and_a_client_s_own_in_order(clients):
    turns = queue(clients)
    served = [turns.pop() for _ in range(len(turns))]
    assert sorted(number for _, number in served) == list(range(len(clients)))
    assert not turns
    classes = [client.priority for client, _ in served]
    assert classes == sorted(classes, key=list(Priority).index)
    for client in set(clients):
        own = [number for asked, number in served if asked == client]
        assert own == sorted(own)


@given(st.lists(CLIENTS, min_size=1))
def test_no_client_gets_a_second_turn_while_another_one_of_its_class_waits_for_its_first(clients):
    turns, had = queue(clients), Counter()
    waiting = Counter(clients)
    while turns:
        client, _ = turns.pop()
        had[client] += 1
        waiting[client] -= 1
        others = [one for one in waiting if waiting[one] and one.priority is client.priority]
        assert all(had[one] >= had[client] - 1 for one in others)


@given(st.lists(CLIENTS), st.lists(CLIENTS), CLIENTS, st.integers(1, 3))
def test_jobs_ahead_are_those_that_are_served_before(before, served, client, count):
    turns = queue([*served, *before])
    for _ in served:  # turns that have gone round
        turns.pop()
    ahead = turns.ahead(client, count)
    for _ in range(count):
        turns.put(client, (client, -1))
    order = [number for _, number in (turns.pop() for _ in range(len(turns)))]
    assert ahead == max(place for place, number in enumerate(order) if number == -1)


def test_a_job_that_nobody_waits_for_leaves_the_queue():
    a, b = Client("a"), Client("b")
    turns = queue([a, a, b])
    turns.discard(a, lambda job: job[1] == 0)
    turns.discard(b, lambda job: True)
    assert [turns.pop() for _ in range(len(turns))] == [(a, 1)]


def test_an_inference_is_expected_to_take_what_those_of_its_size_took():
    durations = Durations()
    assert durations.expected_s(1, 0.0) == 0.0  # nothing is known
    for seconds in (0.4, 0.1, 0.5):
        durations.observe(4, seconds, 10.0)
    assert durations.expected_s(4, 10.0) == 0.4
    assert durations.expected_s(8, 10.0) == 0.4  # at least
    assert durations.expected_s(1, 10.0) == 0.1  # its share
    durations.observe(1, 0.2, 35.0)
    assert durations.expected_s(2, 35.0) == 0.2
    assert durations.expected_s(4, 39.0) == 0.4
    assert durations.expected_s(4, 41.0) == 0.2  # the others are forgotten
    assert durations.expected_s(4, 66.0) == 0.0


@pytest.mark.parametrize(
    ("free_in_s", "ahead", "waiting", "done_s"),
    [
        ([0.0], 0, 1, 1.0),
        ([0.5], 0, 8, 2.5),  # it shares the first inference, of eight
        ([0.5], 7, 8, 2.5),
        ([0.5], 8, 9, 3.5),  # it is inferred for alone, after eight
        ([0.5, 0.2], 8, 9, 1.5),
        ([0.5, 0.2], 16, 17, 3.2),
    ],
)
def test_a_job_is_done_after_the_inferences_before_its_own(free_in_s, ahead, waiting, done_s):
    durations = Durations()
    durations.observe(1, 1.0, 0.0)
    durations.observe(8, 2.0, 0.0)
    assert durations.until_done_s(free_in_s, ahead, waiting, 8, 0.0) == pytest.approx(done_s)


def test_one_value_of_a_frame_is_read_alone():
    frame = encode({"a": [1, {"cosmos3/deadline_ms": 1}], "cosmos3/deadline_ms": 20, "b": None})
    assert peek(frame, "cosmos3/deadline_ms") == 20
    assert peek(frame, "b") is None
    assert peek(encode([1, "b"]), "b") is None
    with pytest.raises(InputError):
        peek(frame[:-1], "b")


def seen(**more):
    return observation(**{"observation/image": picture(540, 640), **more})


class Slow(Several):
    """Takes 0.2 s for an inference, or until it is let go."""

    def __init__(self):
        super().__init__(self.wait)
        self.gate = threading.Event()
        self.held = False

    def wait(self, request) -> None:
        if self.held:
            assert self.gate.wait(20)
        else:
            time.sleep(0.2)


def test_a_request_that_cannot_be_answered_in_time_is_refused_at_once_and_may_ask_again(serve):
    server = serve(Slow())
    hopeless = seen(**{"cosmos3/deadline_ms": 100})
    with dial(server.port) as client:
        assert "action" in ask(client, hopeless)  # nothing is known yet
        began = time.monotonic()
        refused = ask(client, hopeless)
        assert time.monotonic() - began < 0.15
        assert refused["type"] == "error"
        assert "ServiceBusyError" in refused["message"]
        assert 50 <= refused["retry_after_ms"] <= 1000
        # the connection is open, and whoever has time is answered
        assert "action" in ask(client, seen(**{"cosmos3/deadline_ms": 20_000}))
        assert "action" in ask(client, seen())
        assert "numbers" in ask(client, seen(**{"cosmos3/deadline_ms": "soon"}))
    _, text = get(server.port, "/metrics")
    assert 'strands_cosmos3_requests_total{outcome="refused"} 1' in text
    assert 'strands_cosmos3_class_requests_total{class="bulk",outcome="ok"} 3' in text


def test_a_request_whose_time_passes_in_the_queue_is_refused_then(serve):
    backend = Slow()
    server = serve(backend)
    backend.held = True
    with dial(server.port) as first, dial(server.port) as second:
        first.send(encode(seen()))
        until(lambda: server.busy_s > 0)
        began = time.monotonic()
        refused = ask(second, seen(**{"cosmos3/deadline_ms": 300}))
        assert 0.25 <= time.monotonic() - began < 5.0
        assert refused["retry_after_ms"] >= 10
        backend.gate.set()
        assert "action" in decode(first.recv(timeout=10))
        assert "action" in ask(second, seen())
    assert len(backend.requests) == 3  # the warm-up, the first and the last


@pytest.mark.parametrize("by", ["header", "token"])
def test_realtime_clients_go_before_bulk_ones_that_came_first(serve, by):
    backend = Slow()
    tokens = {"sweep": TOKEN, "robot": OTHER}
    server = serve(
        backend, max_batch=1, **({"token": tokens, "realtime": ("robot",)} if by == "token" else {})
    )
    realtime = {"Cosmos3-Priority": "realtime"}
    headers = (
        ({}, realtime)
        if by == "header"
        else (
            {"Authorization": f"Bearer {TOKEN}", **realtime},  # which is not its to say
            {"Authorization": f"Bearer {OTHER}"},
        )
    )
    backend.held = True
    with (
        dial(server.port, additional_headers=headers[0]) as running,
        dial(server.port, additional_headers=headers[0]) as bulk,
        dial(server.port, additional_headers=headers[1]) as robot,
    ):
        running.send(encode(seen()))
        until(lambda: server.busy_s > 0)
        for number, client in enumerate((bulk, robot)):
            client.send(encode(seen(**{"cosmos3/seed": 7 + number})))
            until(lambda number=number: server.metrics.in_flight == 2 + number)
        backend.gate.set()
        for client in (running, bulk, robot):
            assert "action" in decode(client.recv(timeout=20))
    assert [asked.seed for asked in backend.requests[2:]] == [8, 7]
    assert server.metrics.by_class["realtime", "ok"] == 1
    assert server.metrics.by_class["bulk", "ok"] == 2


@pytest.mark.parametrize("asked", ["urgent", "Realtime", ""])
def test_an_unknown_class_is_refused(asked, serve):
    """A robot whose class is misspelt would wait behind all bulk requests, and not know why."""
    server = serve(Several())
    with (
        pytest.raises(InvalidStatus) as refused,
        dial(server.port, additional_headers={"Cosmos3-Priority": asked}),
    ):
        pass
    response = refused.value.response
    assert response.status_code == 400
    assert response.body == b"Cosmos3-Priority is realtime or bulk.\n"
    assert server.metrics.handshakes_refused["400"] == 1


def test_a_realtime_token_may_ask_for_bulk(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"robot {OTHER} realtime\nsweep {TOKEN}\n")
    path.chmod(0o600)
    tokens = Tokens.read(path)
    config = ServerConfig(token=tokens.by_client, realtime=tokens.realtime)
    assert tokens.by_client == {"robot": OTHER, "sweep": TOKEN}
    for owner, headers, priority in (
        ("robot", {}, Priority.REALTIME),
        ("robot", {"Cosmos3-Priority": "bulk"}, Priority.BULK),
        ("sweep", {"Cosmos3-Priority": "realtime"}, Priority.BULK),
    ):
        assert config.priority_of(owner, Headers(headers)) is priority
    path.write_text(f"robot {OTHER} fast\n")
    with pytest.raises(ConfigError, match="realtime"):
        Tokens.read(path)
    with pytest.raises(UnknownNameError, match="rob0t"):
        ServerConfig(token=tokens.by_client, realtime=("rob0t",))


@pytest.fixture
def backends(serve):
    """backends(**config): our clients of a slow server, over a WebSocket and over HTTP."""
    made = []

    def make(**config):
        port = serve(Slow(), http="libero").port
        config = ClientConfig("127.0.0.1", port, **config)
        made.extend(
            [
                (ServiceBackend(PolicyClient(config)), request),
                (HttpServiceBackend(HttpPolicyClient(config), libero.LIBERO), libero_request),
            ]
        )
        return made

    yield make
    for backend, _ in made:
        backend.close()


def test_our_clients_raise_what_says_when_to_ask_again_and_stay_connected(backends):
    for backend, asked in backends(priority="realtime"):
        backend.infer(asked())
        with pytest.raises(ServiceBusyError, match="takes about") as busy:
            backend.infer(asked(wait_s=0.05))
        assert 0.05 <= busy.value.retry_after_s <= 2.0
        dials = backend.counters["dials"]
        assert backend.infer(asked(wait_s=20.0)).action.size
        assert backend.counters["failures"] == 0
        assert backend.counters["dials"] == dials + isinstance(backend, HttpServiceBackend)


def test_a_client_s_deadline_counts_where_the_request_has_a_later_one(backends):
    for backend, asked in backends(deadline_s=0.05):
        with suppress(ServiceBusyError):
            backend.infer(asked())
        with pytest.raises(ServiceBusyError):
            backend.infer(asked(wait_s=20.0))


def test_a_policy_asks_in_its_class_and_for_as_long_as_the_loop_can_wait(serve):
    backend = Slow()
    server = serve(backend)
    where = {"host": "127.0.0.1", "port": server.port, "action_space": "joint_pos"}
    policy = Cosmos3Policy("droid", backend="service", options={"priority": "realtime"}, **where)
    at_rest = Observation(np.linspace(0.1, 0.7, 7), 0.5, VIEWS)
    assert isinstance(policy.plan(at_rest, "lift the cube"), ActionChunk)
    with pytest.raises(ServiceBusyError):
        policy.plan(replace(at_rest, wait_s=0.05), "lift the cube")
    policy.close()
    hasty = Cosmos3Policy("droid", backend="service", options={"deadline_s": 0.05}, **where)
    with pytest.raises(ServiceBusyError):
        hasty.plan(at_rest, "lift the cube")
    hasty.close()
    assert server.metrics.by_class == {
        ("realtime", "ok"): 1,
        ("realtime", "refused"): 1,
        ("bulk", "refused"): 1,
    }


def test_over_http_a_refusal_is_503_with_the_time_to_retry_after(serve):
    port = serve(Slow(), http="libero").port
    assert post(port, GOOD)[0] == 200
    status, said = post(port, GOOD, Cosmos3_Deadline_Ms="50", Cosmos3_Priority="realtime")
    assert status == 503
    assert said["retry_after_ms"] >= 50
    assert "takes about" in said["error"]
    several = {"items": [GOOD] * 3}
    assert post(port, several, "/predict_batch", Cosmos3_Deadline_Ms="20000")[0] == 200
    assert post(port, several, "/predict_batch", Cosmos3_Deadline_Ms="400")[0] == 503
    for bad in ("soon", "nan", "inf", "1e99"):
        assert post(port, GOOD, Cosmos3_Deadline_Ms=bad)[0] == 400, bad
    assert post(port, GOOD, Cosmos3_Deadline_Ms="20000")[0] == 200


@pytest.mark.parametrize("bad", [{"priority": "fast"}, {"deadline_s": 0}, {"deadline_s": -1.0}])
def test_a_client_s_class_and_deadline_are_checked(bad):
    with pytest.raises(InputError):
        ClientConfig(**bad)
