"""Places: never more than the limits however many handshakes come together, and connections
without a request are few, whatever they say.
"""

from __future__ import annotations

import errno
import json
import math
import resource
import socket
import struct
import time
from contextlib import ExitStack

import pytest
from test_server import ask, certificate, dial, get  # noqa: F401

from helpers.handshakes import HANDSHAKE, raw, still_open, together
from helpers.serving import libero_request, observation, until
from strands_cosmos3.serving import libero, places
from strands_cosmos3.serving.metrics import Metrics
from strands_cosmos3.serving.places import Places
from strands_cosmos3.serving.server_config import ServerConfig

TOKENS = {name: name + "-0123456789abcdef" for name in ("fleet", "single")}
BODY = json.dumps(libero.encode_request(libero_request()))
POST = (
    f"POST /predict HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n"
)


def shown(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[name]}"}


LIMITS = {
    "of the server": ({"max_clients": 5}, None, 5),
    "of a token": ({"max_clients": 14, "token": TOKENS}, "fleet", 7),
    "of an address": ({"max_per_address": 3}, None, 3),
    "of an address, with a token": ({"max_per_address": 4, "token": TOKENS}, "single", 4),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_handshakes_that_come_together_take_no_more_places_than_there_are(serve, limit):
    config, name, most = LIMITS[limit]
    server = serve(**config)
    headers = shown(name) if name else {}
    for _ in range(3):
        with together(server.port, [headers] * 40) as answers:
            assert sorted(answers) == [101] * most + [503] * (40 - most)
            assert server.metrics.clients == most
        until(lambda: server.metrics.clients == 0)
    assert server.metrics.handshakes_refused["503"] == 3 * (40 - most)


def test_a_token_that_shakes_hands_many_times_at_once_leaves_the_other_one_its_places(serve):
    server = serve(token=TOKENS)
    mixed = [shown("fleet")] * 4 + [shown("single")]
    with together(server.port, mixed * 40) as answers:
        taken = [answers[i::5].count(101) for i in range(5)]
        assert sum(taken[:4]) == 64
        assert taken[4] == 40
    until(lambda: server.metrics.clients == 0)
    with (
        together(server.port, [shown("fleet")] * 200),
        dial(server.port, additional_headers=shown("single")) as client,
    ):
        assert "action" in ask(client, observation())


def test_requests_over_http_and_handshakes_share_the_places(serve):
    server = serve(http="libero", max_clients=6, body_s=5.0)
    with ExitStack() as held:
        for _ in range(4):  # their bodies do not come
            held.enter_context(raw(server.port, POST + "\r\n"))
        until(lambda: server.metrics.clients == 4)
        with together(server.port, [{}] * 20) as answers:
            assert sorted(answers) == [101] * 2 + [503] * 18
    until(lambda: server.metrics.clients == 0)


def test_clients_that_lost_their_places_make_room_for_as_many(serve):
    server = serve(max_clients=3, idle_s=0.2)
    counts, take = [], server._places.take

    def watched(*arguments):
        taken = take(*arguments)
        counts.append(server.metrics.clients)
        return taken

    server._places.take = watched
    with together(server.port, [{}] * 3) as answers:
        assert answers == [101] * 3
        places_held = list(server._places._held)
        until(lambda: all(math.isfinite(place.idle_since_s) for place in places_held))
        last_s = max(place.idle_since_s for place in places_held)
        until(lambda: time.monotonic() > last_s + 0.3)
        with together(server.port, [{}] * 30) as later:
            assert sorted(later) == [101] * 3 + [503] * 27
    assert max(counts) == 3
    assert server.metrics.evicted == 3


def test_a_client_that_leaves_during_its_handshake_leaves_no_place_taken(serve):
    server = serve(max_clients=4, max_per_address=4)
    for _ in range(30):
        with raw(server.port, HANDSHAKE + "\r\n") as one:
            # close() resets
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def all_enter() -> bool:
        with together(server.port, [{}] * 4) as answers:
            return answers == [101] * 4

    until(all_enter)


SAID = {
    "nothing": "",
    "half of a handshake": HANDSHAKE,
    "half of another request": "POST /predict HTTP/1.1\r\nHost: x\r\n",
    "half of a method": "G",
}


@pytest.mark.parametrize("said", SAID)
def test_connections_without_a_request_are_few_and_leave_one_line(serve, caplog, said):
    server = serve(max_pending=8, token=TOKENS)
    with ExitStack() as held:
        silent = [held.enter_context(raw(server.port, SAID[said])) for _ in range(40)]
        until(lambda: sum(still_open(silent)) <= 8)
        assert still_open(silent)[-7:] == [True] * 7  # the oldest ones make room
        for _ in range(3):
            with dial(server.port, additional_headers=shown("single")) as client:
                assert "action" in ask(client, observation())
        _, text = get(server.port, "/metrics", **shown("single"))
    closed = server.metrics.cut_off["crowded"]
    assert closed >= 40 - 8
    assert f'cut_off_total{{reason="crowded"}} {closed}' in text
    assert len([one for one in caplog.records if "to make room" in one.message]) == 1


def test_sockets_that_never_speak_tls_are_few(serve, certificate):  # noqa: F811
    server = serve(max_pending=8, tls_cert=certificate[0], tls_key=certificate[1])
    with ExitStack() as held:
        silent = [held.enter_context(raw(server.port, b"\x16\x03\x01"[:i])) for i in [0, 3] * 20]
        until(lambda: sum(still_open(silent)) <= 8)
        assert still_open(silent)[-1]
    assert server.metrics.cut_off["crowded"] >= 32


def test_a_crowd_of_one_address_leaves_others_alone(serve):
    server = serve(max_pending=16)
    with ExitStack() as held:
        slow = [held.enter_context(raw(server.port, HANDSHAKE)) for _ in range(4)]
        crowd = [held.enter_context(raw(server.port, "", "127.0.0.2")) for _ in range(60)]
        until(lambda: sum(still_open(crowd)) <= 12)
        assert all(still_open(slow))
        slow[0].setblocking(True)
        slow[0].sendall(b"\r\n")
        assert slow[0].recv(12) == b"HTTP/1.1 101"


def test_connections_that_are_closed_again_count_no_more(serve):
    server = serve(max_pending=8)
    for _ in range(40):
        raw(server.port).close()
        assert get(server.port, "/healthz") == (200, "OK\n")
    assert server.metrics.cut_off["crowded"] == 0
    assert len(server._places._pending) <= 8


@pytest.mark.parametrize(("files", "most"), [(1024, 512), (700, 188), (64, 64), (-1, 512)])
def test_connections_without_a_place_leave_files_for_the_others(monkeypatch, files, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, -1))
    assert Places(ServerConfig(), Metrics())._max_pending == most


def test_sockets_that_cannot_be_accepted_leave_one_line_a_minute(serve, caplog, monkeypatch):
    server = serve()

    def failed(number: int) -> None:
        context = {"message": "accept", "exception": OSError(number, "x")}
        server._loop.call_soon_threadsafe(server._loop.call_exception_handler, context)

    for number in [errno.EMFILE] * 300 + [errno.EIO]:
        failed(number)
    until(lambda: len(caplog.records) == 2)
    assert "raise its limit (ulimit -n)" in caplog.records[0].message
    monkeypatch.setattr(places, "_LINE_EVERY_S", 0.0)
    server._not_accepted._next_line_s = 0.0
    failed(errno.ENFILE)
    until(lambda: len(caplog.records) == 3)
    assert caplog.records[2].message.startswith("301 times so far")
