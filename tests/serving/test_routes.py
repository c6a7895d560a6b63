"""An HTTP dialect beside LIBERO's, as a file of one's own has it: served, asked and refused."""

from __future__ import annotations

import http.client
import json
from dataclasses import replace

import numpy as np
import pytest
from test_server import ask, get
from websockets.sync.client import connect

from helpers.serving import DROID, Echo, libero_request, observation, request
from strands_cosmos3.backends.base import BackendInfo
from strands_cosmos3.backends.service import HttpServiceBackend
from strands_cosmos3.errors import (
    BackendError,
    InputError,
    ServiceRefusedError,
    ServiceUnreadableError,
    UnknownNameError,
)
from strands_cosmos3.serving.client import ClientConfig
from strands_cosmos3.serving.codec import decode
from strands_cosmos3.serving.http_client import HttpPolicyClient
from strands_cosmos3.serving.routes import HttpDialect, Route, read_json, read_object
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.types import ActionChunk, Request


def decode_request(item, model) -> Request:
    if len(joints := item.get("joints", ())) != 7:
        raise InputError(f"'joints' must be 7 numbers, got {len(joints)}.")
    q_rad, space = np.array(joints), model.embodiment.action_space("joint_pos")
    return Request(model.embodiment, space, "go on", 4, q_rad, item["gripper"], seed=model.seed)


def encode_requests(requests):
    (asked,) = requests
    if asked.q_rad is None:
        raise BackendError("an /act server requires joint angles.")
    return "/act", {"joints": asked.q_rad.tolist(), "gripper": asked.gripper}


def decode_replies(rows, requests):
    if isinstance(rows, dict):
        raise ServiceRefusedError(rows["error"])
    (asked,) = requests
    return [ActionChunk(np.array(rows), asked.action_space, asked.embodiment)]


def model_of(info, asked) -> object:
    if info["embodiment"] != asked.embodiment.name:
        raise ServiceUnreadableError(f"the server is for {info['embodiment']}.")
    return info["digest"]


ACT = HttpDialect(
    name="act",
    routes={
        "/act": Route(
            lambda body: [read_object(body)],
            lambda replies: replies[0],
            lambda message: json.dumps({"error": message}),
        )
    },
    pages={
        "/about": lambda model, digest: {
            "embodiment": model.embodiment.name,
            "digest": digest,
            "server": [model.name, model.seed, model.chunk_rows],
        }
    },
    decode_request=decode_request,
    encode_reply=lambda chunk: json.dumps(chunk.action.tolist()),
    info_path="/about",
    model_of=model_of,
    encode_requests=encode_requests,
    decode_replies=decode_replies,
    read_reply=read_json,
)


class Known(Echo):
    info = BackendInfo(name="echo", requires_images=False, model_sha256="ab" * 32)


@pytest.fixture
def act(serve):
    """A server of the dialect, and a client of it."""
    server = serve(Known(), http=ACT)
    client = HttpPolicyClient(ClientConfig("127.0.0.1", server.port))
    return server, HttpServiceBackend(client, ACT)


def post(port: int, path: str, said: object) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", path, json.dumps(said), {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_rows_come_back_and_websockets_are_answered_beside_them(act):
    server, backend = act
    asked = request()
    chunk = backend.infer(asked)
    np.testing.assert_allclose(chunk.action, Echo().infer(asked).action)
    assert backend.info.model_sha256 == Known.info.model_sha256
    assert server.metrics.requests["ok"] == 1
    with connect(f"ws://127.0.0.1:{server.port}") as other:
        assert decode(other.recv())["cosmos3/model_sha256"] == Known.info.model_sha256
        assert ask(other, observation())["action"].shape == (4, 8)


def test_a_dialect_without_an_info_page_is_asked_at_once(serve):
    bare = replace(ACT, pages={}, info_path="", model_of=lambda info, asked: info.get("digest"))
    client = HttpPolicyClient(ClientConfig("127.0.0.1", serve(http=bare).port))
    backend = HttpServiceBackend(client, bare)
    assert backend.infer(request()).action.shape == (4, 8)
    assert backend.info.model_sha256 is None
    assert backend.counters["dials"] == 1


def test_without_batches_each_request_is_posted_by_itself(act):
    server, backend = act
    turned = [request(q_rad=np.full(7, angle)) for angle in (0.1, 0.2, 0.3)]
    chunks = backend.infer_batch(turned)
    np.testing.assert_allclose([chunk.action[0, 0] for chunk in chunks], [0.1, 0.2, 0.3])
    assert server.metrics.requests["ok"] == 3
    assert backend.counters["dials"] == 4  # one for /about


def test_only_the_dialect_s_own_paths_are_served(act):
    port = act[0].port
    status, said = get(port, "/about")
    name, *numbers = json.loads(said)["server"]
    assert (status, numbers) == (200, [0, None])
    assert name.startswith("strands-cosmos3 ")
    assert name.endswith(" echo")
    for path in ("/", "/info", "/act"):
        assert get(port, path)[0] == 426
    for path in ("/", "/predict", "/about"):
        assert post(port, path, {}) == (404, "There are /act.\n")


def test_errors_are_said_in_the_dialect_s_words(act):
    server, backend = act
    status, said = post(server.port, "/act", {"joints": [0.0]})
    assert (status, json.loads(said)) == (
        200,
        {"error": "InputError: 'joints' must be 7 numbers, got 1."},
    )
    assert server.metrics.requests["error"] == 1
    with pytest.raises(ServiceUnreadableError, match="the server is for droid"):
        backend.infer(replace(libero_request(), q_rad=np.zeros(7)))
    asked_before = dict(backend.counters)
    with pytest.raises(BackendError, match="joint angles"):
        backend.infer(libero_request())
    assert backend.counters == asked_before


def test_a_dialect_is_chosen_by_value_by_name_or_by_the_embodiment():
    assert ServedPolicy(Echo(), DROID, http=ACT).dialect is ACT
    assert ServedPolicy(Echo(), "libero", http=ACT).dialect is ACT
    with pytest.raises(UnknownNameError, match=r"HTTP dialect 'act'.*libero"):
        ServedPolicy(Echo(), DROID, http="act")
