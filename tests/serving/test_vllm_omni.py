"""vLLM-Omni: our client calls a fake of its server, and its clients' frames on its path reach
ours.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from helpers.fake_vllm_omni import CONFIG, PATH, vllm_omni
from helpers.options import backend_options
from helpers.serving import Echo, observation, request, until
from helpers.transcripts import listening
from strands_cosmos3.backends import make_backend
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.errors import (
    ConfigError,
    ServiceClosedError,
    ServiceRefusedError,
    ServiceUnreadableError,
)
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.codec import decode, encode


def service(
    port: int, num_steps: int | None = None, action_space: str | None = None, **config
) -> ServiceBackend:
    client = PolicyClient(
        ClientConfig("127.0.0.1", port, path=PATH, **config), sleep=lambda s: None
    )
    return ServiceBackend(client, "vllm-omni", action_space=action_space, num_steps=num_steps)


def test_seed_steps_and_session_arrive_and_the_bare_array_is_read():
    with vllm_omni() as (port, fake):
        options = backend_options(num_steps=7, host="127.0.0.1", port=port, dialect="vllm-omni")
        backend = make_backend("service", options=options)
        for seed in (2**32 - 1, 5):
            chunk = backend.infer(request(seed=seed))
            np.testing.assert_allclose(chunk.action[3, :7], request().q_rad + 0.03, atol=1e-6)
            np.testing.assert_allclose(chunk.action[:, 7], 0.2, atol=1e-6)
        backend.reset()
        backend.infer(request(seed=1))
        backend.close()
        first, second, third = fake.asked
    assert (first["seed"], second["seed"]) == (2**32 - 1, 5)
    assert first["steps"] == 7
    assert (first["reset"], second["reset"], third["reset"]) == (True, False, True)
    assert first["session"] == second["session"] != third["session"]
    assert fake.connections == 1


def test_without_num_steps_the_server_keeps_its_own():
    with vllm_omni() as (port, fake):
        backend = service(port)
        backend.infer(request())
        backend.close()
    assert fake.asked[0]["steps"] == 4


def test_an_error_is_refused_and_names_what_the_server_said():
    with vllm_omni() as (port, _):
        backend = service(port)
        with pytest.raises(ServiceRefusedError, match="Internal inference error"):
            backend.infer(replace(request(), instruction="fail"))
        assert backend.infer(request()).action.shape == (32, 8)
        backend.close()


def test_an_idle_close_is_reconnected_quietly():
    with vllm_omni() as (port, fake):
        backend = service(port)
        for seed in (1, 2):
            backend.infer(request(seed=seed))
            fake.close_idle()
        assert backend.counters["reconnects"] == fake.connections - 1 == 1
        assert backend.counters["failures"] == 0
        backend.close()


@pytest.mark.parametrize("idle_s", [0.1, 20.0])
def test_a_request_that_crosses_an_idle_close_is_sent_again(idle_s: float):
    """Only on a connection that was idle: elsewhere a close instead of a reply is an error."""
    connections = 0

    async def crossing(client: ServerConnection) -> None:
        nonlocal connections
        connections += 1
        await client.send(encode({}))
        await client.recv()
        await client.send(encode(np.zeros((4, 8), np.float32)))
        await client.recv()
        await client.close(1000)

    with listening(crossing) as port:
        backend = service(port, idle_s=idle_s)
        backend.infer(request())
        time.sleep(0.2)
        if idle_s == 0.1:
            assert backend.infer(request()).action.shape == (4, 8)
        else:
            with pytest.raises(ServiceClosedError):
                backend.infer(request())
        assert (connections, backend.counters["failures"]) == ((2, 0) if idle_s == 0.1 else (1, 1))
        backend.close()


@pytest.mark.parametrize("code", [1012, 1011])
@pytest.mark.parametrize("times", [1, 2])
def test_a_request_that_a_fleet_did_not_infer_for_is_sent_once_more(code: int, times: int):
    """It says so by closing with 1012 (docs/fleet.md); twice in a row is an error."""
    requests = 0

    async def restarting(client: ServerConnection) -> None:
        nonlocal requests
        await client.send(encode({}))
        while True:
            await client.recv()
            requests += 1
            if 1 < requests <= 1 + times:
                await client.close(code, "the server is to end: connect again")
                return
            await client.send(encode(np.zeros((4, 8), np.float32)))

    with listening(restarting) as port, closing(service(port)) as backend:
        backend.infer(request())
        if (code, times) == (1012, 1):
            assert backend.infer(request()).action.shape == (4, 8)
            assert (requests, backend.counters["failures"]) == (3, 0)
        else:
            with pytest.raises(ServiceClosedError, match=str(code)):
                backend.infer(request())
            assert requests == (3 if code == 1012 else 2)


@pytest.mark.parametrize("stated", ["joint_velocity", "cartesian_position", 7])
def test_a_server_with_other_actions_is_refused_unless_it_is_said_to_be_mistaken(stated: object):
    with vllm_omni(config={**CONFIG, "action_space": stated}) as (port, _):
        backend = service(port)
        with pytest.raises(ServiceUnreadableError, match="joint_position"):
            backend.infer(request())
        backend.close()
        told = service(port, action_space="joint_pos")
        assert told.infer(request()).action.shape == (32, 8)
        told.close()


def test_num_steps_belong_to_its_dialect():
    with pytest.raises(ConfigError, match="vllm-omni"):
        make_backend("service", options=backend_options(num_steps=3, host="127.0.0.1", port=1))


def test_our_server_answers_on_its_path_as_it_does(serve):
    backend = Echo()
    server = serve(backend)

    def ask(message: object) -> object:
        client.send(encode(message) if isinstance(message, dict) else message)
        return decode(client.recv(timeout=20))

    with connect(f"ws://127.0.0.1:{server.port}{PATH}?model=x", compression=None) as client:
        assert decode(client.recv(timeout=5)) == {
            **CONFIG,
            "needs_session_id": False,
            "cosmos3/action_space": "joint_pos",
        }
        assert ask(
            observation(session_id="a", seed=41, sampling_params={"num_inference_steps": 4})
        ).shape == (4, 8)
        assert backend.requests[-1].seed == 41
        assert ask(observation(session_id="a")).dtype == np.float32
        assert backend.requests[-1].seed == 1  # the second call of the session, counted here
        for bad, says in (
            ({"prompt": "no state"}, "lacks 'observation/joint_position'"),
            (b"\xc1", "WireFormatError"),
            (
                observation(endpoint="restart"),
                "'endpoint' must be 'infer' or 'reset', got 'restart'",
            ),
            ({"endpoint": "reset", "session_id": {"a": 1}}, "'session_id' must be text, got dict"),
        ):
            error = ask(bad)
            assert error["type"] == "error"
            assert says in error["message"]
        # the socket is open; another session starts from the first seed
        ask(observation(session_id="b"))
        assert backend.requests[-1].seed == 0
        assert ask({"endpoint": "reset"}) == {"status": "reset successful"}
        assert "seed" in ask(observation(seed="x"))["message"]
    until(lambda: server.metrics.clients == 0)
    assert +server.metrics.requests == {"ok": 3, "error": 5, "reset": 1}


def test_on_any_other_path_an_error_still_closes(serve):
    with connect(f"ws://127.0.0.1:{serve().port}/v1/other", compression=None) as client:
        assert decode(client.recv(timeout=5)) == {"cosmos3/action_space": "joint_pos"}
        client.send(b"\xc1")
        assert "WireFormatError" in client.recv(timeout=5)
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=5)


def test_our_client_and_our_server_in_its_dialect(serve):
    backend = Echo()
    own = service(serve(backend).port)
    assert own.infer(request(seed=77)).action.shape == (4, 8)
    assert backend.requests[-1].seed == 77
    with pytest.raises(ServiceRefusedError, match="InputError"):
        own.infer(replace(request(), instruction="x" * 5000))
    own.reset()
    own.close()
