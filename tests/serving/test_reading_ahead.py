"""Requests are read, and their pictures composed, while the inference before runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from test_libero_server import GOOD, post
from test_server import ask, dial, get
from websockets.exceptions import ConnectionClosed

from helpers.serving import DROID, Several, observation, picture, until
from strands_cosmos3.observe.views import compose
from strands_cosmos3.serving.codec import DEFAULT_LIMITS, decode, encode
from strands_cosmos3.serving.jpeg import MAX_PIXELS, encode_jpeg
from strands_cosmos3.serving.served import Message, ServedPolicy, Session

REALTIME = {"Cosmos3-Priority": "realtime"}


def views(shade: int, **more):
    """A request whose pictures are of one colour."""
    return observation(**dict.fromkeys(DROID.rig.wire_names, picture() * 0 + shade), **more)


class Gated(Several):
    """Composes and infers; both can be held, and what was composed and inferred for is noted by
    the colour of its pictures.
    """

    def __init__(self):
        super().__init__(lambda _: self._pass(self.inferring))
        self.composed: list[int] = []
        self.composing, self.inferring = threading.Event(), threading.Event()
        self.let_go()

    @staticmethod
    def _pass(gate: threading.Event) -> None:
        assert gate.wait(20)

    def let_go(self) -> None:
        self.composing.set()
        self.inferring.set()

    @property
    def inferred(self) -> list[int]:
        return [int(asked.composite[0, 320, 0]) for asked in self.requests]

    def compose(self, views, rig):
        shade = int(views["wrist"][0, 0, 0])
        self.composed.append(shade)
        self._pass(self.composing)
        if shade == 66:
            raise ZeroDivisionError("/secret/path is in here")
        return compose(views, rig)


@pytest.fixture
def backend() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.let_go()


@contextmanager
def running(backend: Gated, server):
    """An inference for a request of colour 1, which goes on until the backend's gate opens."""
    backend.composed.clear()
    backend.requests.clear()
    with dial(server.port) as client:
        backend.inferring.clear()
        client.send(encode(views(1)))
        until(lambda: server.busy_s > 0 and backend.composed == [1])
        yield
        backend.let_go()
        assert "action" in decode(client.recv(timeout=20))


def test_pictures_are_composed_while_the_inference_before_runs(serve, backend):
    server = serve(backend)
    with dial(server.port) as second:
        with running(backend, server):
            second.send(encode(views(2)))
            until(lambda: backend.composed == [1, 2])
            assert not backend.requests
        assert "action" in decode(second.recv(timeout=20))
    assert backend.inferred == [1, 2]
    assert backend.composed == [1, 2]


def test_realtime_requests_are_composed_first_and_get_the_turn_of_their_class(serve, backend):
    server = serve(backend, max_batch=1)
    with (
        dial(server.port) as first,
        dial(server.port) as bulk,
        dial(server.port, additional_headers=REALTIME) as robot,
        running(backend, server),
    ):
        backend.composing.clear()
        for shade, client in ((2, first), (3, bulk), (4, robot)):
            client.send(encode(views(shade)))
            until(lambda shade=shade: server.metrics.in_flight == shade)
            until(lambda: backend.composed == [1, 2])
        backend.let_go()
        for client in (first, bulk, robot):
            assert "action" in decode(client.recv(timeout=20))
    assert backend.composed == [1, 2, 4, 3]
    assert backend.inferred == [1, 4, 2, 3]


def test_a_request_that_nobody_waits_for_is_not_composed(serve, backend):
    server = serve(backend)
    with dial(server.port) as second, dial(server.port) as gone, running(backend, server):
        backend.composing.clear()
        second.send(encode(views(2)))
        until(lambda: backend.composed == [1, 2])
        gone.send(encode(views(3)))
        until(lambda: server.metrics.in_flight == 3)
        gone.close()
        until(lambda: server.metrics.requests["abandoned"] == 1)
        backend.let_go()
        assert "action" in decode(second.recv(timeout=20))
    assert backend.composed == [1, 2]


def test_a_hopeless_request_is_not_composed(serve, backend):
    server = serve(backend)
    with dial(server.port) as client:
        with running(backend, server):
            threading.Event().wait(0.2)  # what an inference takes
        assert "retry_after_ms" in ask(client, views(2, **{"cosmos3/deadline_ms": 50}))
    assert backend.composed == [1]


def test_the_server_says_that_it_is_well_while_pictures_are_composed(serve, backend):
    server = serve(backend)
    with dial(server.port) as client:
        backend.composing.clear()
        client.send(encode(views(1)))
        until(lambda: 1 in backend.composed)
        assert get(server.port, "/healthz")[0] == 200
        backend.let_go()
        assert "action" in decode(client.recv(timeout=20))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (views(66), "InternalError: inference failed (ZeroDivisionError)"),
        ({**views(2), DROID.rig.wire_names[0]: np.zeros((4, 4, 3), np.uint8)}, "4 x 4"),
        ({**views(2), DROID.rig.wire_names[0]: b"\xff\xd8no"}, "JPEG"),
    ],
)
def test_an_error_of_reading_is_that_client_s_alone(serve, backend, bad, says):
    server = serve(backend)
    with dial(server.port) as wrong, dial(server.port) as right:
        with running(backend, server):
            for number, (client, message) in enumerate(((wrong, bad), (right, views(3)))):
                client.send(encode(message))
                until(lambda number=number: server.metrics.in_flight == 2 + number)
        told = wrong.recv(timeout=20)
        assert says in told
        assert "secret" not in told
        with pytest.raises(ConnectionClosed):
            wrong.recv(timeout=5)
        assert "action" in decode(right.recv(timeout=20))
    assert backend.inferred == [1, 3]


def test_an_episode_is_reset_between_inferences(serve, backend):
    server = serve(backend)
    with dial(server.port) as client:
        assert "action" in ask(client, views(2))
        with running(backend, server):
            resets = backend.resets
            client.send(encode({"endpoint": "reset"}))
            client.send(encode(views(3)))
            until(lambda: server.metrics.in_flight == 2)
            threading.Event().wait(0.1)  # for what must not happen
            assert backend.resets == resets
            assert backend.composed == [1]  # the next request of a session is read after its answer
        assert "status" in decode(client.recv(timeout=20))
        assert "action" in decode(client.recv(timeout=20))
    assert [asked.seed for asked in backend.requests] == [0, 0]
    assert backend.resets == resets + 1


def test_items_of_an_http_request_are_read_ahead_too(serve, backend):
    server = serve(backend, http="libero")
    replies = []
    with running(backend, server):
        asking = threading.Thread(target=lambda: replies.append(post(server.port, GOOD)))
        asking.start()
        until(lambda: server.metrics.in_flight == 2)
    asking.join(20)
    assert replies[0][0] == 200


def test_pictures_that_wait_are_no_larger_than_a_frame_and_a_composite():
    side = int(MAX_PIXELS**0.5)
    pictures = [encode_jpeg(picture(side, side)) for _ in DROID.rig.views]
    frame = encode(observation(**dict(zip(DROID.rig.wire_names, pictures, strict=True))))
    asked = ServedPolicy(Gated()).read(Message(frame, Session(), 0.0)).request
    assert asked.composite.shape == (*DROID.rig.composite_hw, 3)
    assert sum(view.nbytes for view in asked.images.values()) <= DEFAULT_LIMITS.max_bytes
