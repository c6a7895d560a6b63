"""A fleet's parts, without Ray: settings, what replicas are sent and answer, what becomes of lost
requests, and the front as an ASGI application. ``test_ray_fleet.py`` runs them on Ray Serve.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import pickle
import signal
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
pytest.importorskip("uvicorn", reason="ray[serve] is not installed (extra scale)")

import yaml
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve import Application
from ray.serve.exceptions import BackPressureError
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from helpers.code_blocks import blocks
from helpers.serving import Echo, Several, libero_request, observation
from helpers.stand_in import Counted
from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3.commands import serve_fleet
from strands_cosmos3.commands.progress import WaitNotice
from strands_cosmos3.errors import BackendError, ConfigError, InputError, RankLostError
from strands_cosmos3.serving import libero
from strands_cosmos3.serving.admission import Client
from strands_cosmos3.serving.codec import DEFAULT_LIMITS, decode, encode
from strands_cosmos3.serving.front import Front
from strands_cosmos3.serving.inference_queue import InferenceQueue
from strands_cosmos3.serving.metrics import Metrics
from strands_cosmos3.serving.places import Places
from strands_cosmos3.serving.ray_app import FleetSettings, app, build, run
from strands_cosmos3.serving.ray_app.asgi import FrontApp
from strands_cosmos3.serving.ray_app.ingress import DescribedBackend
from strands_cosmos3.serving.ray_app.remote import RemoteReplicas
from strands_cosmos3.serving.ray_app.replica import (
    PolicyReplica,
    RemoteAnswer,
    RemoteRequest,
    ReplicaModel,
)
from strands_cosmos3.serving.served import Answer, Episode, Message, ServedPolicy, Session
from strands_cosmos3.serving.server_config import ServerConfig
from strands_cosmos3.serving.wire import DEADLINE, REQUEST_ID, SERVED_MODEL

FACTORY = {"factory": "helpers.stand_in:counted", "action_space": "joint_pos"}
SERVED = ReplicaModel(Echo.info, "a" * 64, "joint_pos")
ME = Client("me")
CONFIG_FILES = [block for block in blocks() if block.language == "yaml"]


# Settings


def test_settings_have_the_names_of_flags():
    settings = FleetSettings.of({"embodiment": "libero", "tp": 2, "cfg": 2, "max_queued": 3})
    assert settings.policy.parallel.ranks == 4
    assert settings.backend == "distributed"
    assert (settings.embodiment, settings.max_queued) == ("libero", 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"modle": "x"}, "unknown option 'modle'; valid: .*model"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 3, "max_replicas": 2}, r"max_replicas \(replicas is 3\) .* got 2"),
        ({"ingresses": 0}, "ingresses"),
        ({"replicas": "two"}, "replicas"),
        ({"backend": "service", "port": 1}, "not served by a fleet; valid: native"),
        ({"backend": "native", "tp": 2}, "belongs to backend distributed"),
        ({"stalled_after": -1.0}, "stalled_after"),
    ],
)
def test_settings_that_make_no_fleet_are_refused(arguments, says):
    with pytest.raises((ConfigError, InputError), match=says):
        FleetSettings.of(arguments)


@pytest.mark.parametrize("place", ["nowhere:x", "helpers.stand_in:missing", "helpers stand in"])
def test_a_factory_that_cannot_be_imported_is_named(place):
    with pytest.raises(ConfigError, match="is no module:function that can be imported"):
        FleetSettings(factory=place).make_backend()


def test_tokens_come_from_a_file_that_others_cannot_read(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("robot 0123456789abcdef realtime\n")
    path.chmod(0o600)
    settings = FleetSettings(token_file=str(path))
    assert settings.server_config().realtime == ["robot"]
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        build({**FACTORY, "token_file": str(path)})


@pytest.mark.parametrize("block", CONFIG_FILES, ids=str)
def test_the_config_files_of_the_page_are_valid(block, monkeypatch):
    config = ServeDeploySchema.model_validate(yaml.safe_load(block.code))
    (application,) = config.applications
    monkeypatch.setattr(FleetSettings, "server_config", lambda self: None)  # its token file
    built = resolve_name(application.import_path)(application.args)
    names = {deployment.name for deployment in application.deployments}
    assert (
        names
        <= {"Policy", "Ingress"}
        == {one.name for one in (built._bound_deployment, *parts(built))}
    )


# Deployments


def parts(application: Any) -> list[Any]:
    """The deployments that the ingress is bound to."""
    return [
        arg._bound_deployment
        for arg in application._bound_deployment.init_args
        if isinstance(arg, Application)
    ]


def deployments(monkeypatch, gpus: int = 0, **arguments: Any) -> tuple[Any, Any]:
    monkeypatch.setattr(app.ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": float(gpus)})
    application = build(arguments)
    (policy,) = parts(application)
    return application._bound_deployment, policy


def test_sockets_are_apart_from_the_slots_of_inference(monkeypatch):
    ingress, policy = deployments(monkeypatch, **FACTORY, max_clients=100, max_batch=4)
    assert ingress.max_ongoing_requests > 100, "more than sockets: pages are answered too"
    assert policy.max_ongoing_requests == 8, "a batch that is inferred for, and the next one"
    assert policy.max_queued_requests == 64
    assert ingress.num_replicas == 2
    assert ingress.ray_actor_options["num_cpus"] > 0, "else Ray may place both on one machine"
    assert policy.num_replicas == 1


def test_replicas_scale_between_limits(monkeypatch):
    _, policy = deployments(monkeypatch, **FACTORY, replicas=2, max_replicas=5)
    scaling = policy._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
    assert scaling.target_ongoing_requests == 4


def test_a_checkpoint_that_cannot_be_read_replaces_no_replica(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "model")
    renewed: list[None] = []

    @contextmanager
    def running(*_: Any):
        folder.rename(tmp_path / "elsewhere")
        yield lambda: renewed.append(None)

    signals = iter([signal.SIGHUP, signal.SIGTERM])
    arrived = SimpleNamespace(get=lambda: next(signals))
    monkeypatch.setattr(run, "running_fleet", running)
    monkeypatch.setattr(serve_fleet, "SimpleQueue", {int: lambda: arrived})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    settings = FleetSettings.of({"model": str(folder)})
    http = {"host": "::1", "port": 1}
    assert serve_fleet.serve_fleet(settings, None, http, console, WaitNotice(console)) == 0
    assert "the replicas stay as they are: " in printed.getvalue()
    assert not renewed


@pytest.mark.parametrize("slow", [False, True])
def test_a_command_closes_the_sockets_before_the_proxies_that_hold_them_end(monkeypatch, slow):
    """``serve.shutdown`` begins with the proxies: clients would see no close frame (1006)."""
    ended: list[str] = []

    def delete(name: str) -> None:
        ended.append(f"delete {name}")
        if slow:
            raise TimeoutError("not deleted after 60s")

    stopped = SimpleNamespace(applications={}, proxies={})
    fake = SimpleNamespace(
        status=lambda: stopped, delete=delete, shutdown=lambda: ended.append("shutdown")
    )
    monkeypatch.setattr(run, "serve", fake)
    monkeypatch.setattr(run, "cluster", lambda address, cpus: nullcontext())
    monkeypatch.setattr(run, "on_gpus", lambda settings: False)
    for name in ("_require_free", "_require_room", "deploy"):
        monkeypatch.setattr(run, name, lambda *_: None)
    monkeypatch.setattr(run, "_start", lambda **_: None)
    with run.running_fleet(FleetSettings.of(FACTORY), None, {"host": "::1", "port": 1}):
        assert ended == []
    assert ended == [f"delete {run.NAME}", "shutdown"]


@pytest.mark.parametrize(
    ("gpus", "degrees", "bundle"),
    [
        (8, {"tp": 2, "cfg": 2}, {"CPU": 4, "GPU": 4}),
        (0, {"tp": 2}, {"CPU": 2}),
        (8, {"tp": 2, "device": "cpu"}, {"CPU": 2}),
        (0, {"sp": 2, "device": "cuda"}, {"CPU": 2, "GPU": 2}),
        (8, {}, None),
    ],
)
def test_the_ranks_of_a_replica_are_placed_on_one_machine(monkeypatch, gpus, degrees, bundle):
    _, policy = deployments(monkeypatch, gpus, **degrees)
    placed = policy._replica_config.placement_group_bundles
    assert placed == (None if bundle is None else [bundle])
    actor = policy.ray_actor_options
    ranks = 1 if bundle is None else bundle["CPU"]
    assert actor["num_cpus"] == ranks
    assert actor.get("num_gpus", 0) == (bundle or {"GPU": 1}).get("GPU", 0)
    if bundle:
        assert policy._replica_config.placement_group_strategy == "STRICT_PACK"


# Replicas


@pytest.fixture
def replica():
    return PolicyReplica(FleetSettings.of({**FACTORY, "model": "one"}))


def remote(message: object, session: Session | None = None, **changes: Any) -> RemoteRequest:
    asked = RemoteRequest(encode(message), session or Session(), ME, math.inf, "joint_pos", None)
    return pickle.loads(pickle.dumps(replace(asked, **changes)))


def ask(replica: PolicyReplica, request: RemoteRequest) -> RemoteAnswer:
    return pickle.loads(pickle.dumps(asyncio.run(replica.answer(request))))


def test_a_replica_answers_as_one_process_does_and_states_its_model(replica):
    message = observation(**{REQUEST_ID: 7, "cosmos3/seed": 5})
    reply = ask(replica, remote(message))
    (alone,) = ServedPolicy(Counted("one")).answer([Message(encode(message), Session(), 0.0)])
    got, wanted = decode(reply.answer.frame), decode(alone.frame)
    np.testing.assert_array_equal(got["action"], wanted["action"])
    assert got[SERVED_MODEL] == Counted("one").info.model_sha256 == reply.served.model_sha256
    known = ask(replica, remote(message, known_sha256=got[SERVED_MODEL]))
    assert known.served is None, "told once"


def test_a_session_goes_to_a_replica_and_back(replica):
    session = Session()
    seeds = []
    for _ in range(3):
        sent = session.sent("a")
        assert list(sent.episodes) == ["a"]
        reply = ask(replica, remote(observation(session_id="a"), sent))
        session.returned(reply.session)
        seeds.append(replica._backend.requests[-1].seed)
    assert seeds == [0, 1, 2], "each call of an episode has the next seed, on whichever replica"
    assert 0 < time.monotonic() - session.episodes["a"].started_s < 60, "on this clock again"


def test_the_clock_of_a_session_does_not_depend_on_the_machine():
    session = Session()
    session.episode("a").started_s = time.monotonic() - 5.0
    elsewhere = session.sent("a").moved(1e6)  # its monotonic clock is another one
    assert elsewhere.episodes["a"].started_s == pytest.approx(1e6 - 5.0, abs=0.5)
    session.returned(elsewhere.moved(-1e6))
    assert session.episodes["a"].started_s == pytest.approx(time.monotonic() - 5.0, abs=0.5)


def test_only_the_episode_that_is_asked_for_travels():
    session = Session()
    for name in "abc":
        session.episode(name).calls = ord(name)
    assert list(session.sent("a").episodes) == ["a"]
    assert session.sent("").episodes["a"].calls == ord("a"), "without a name the last one"
    assert set(session.episodes) == {"a", "b", "c"}


def test_a_client_that_was_told_of_other_rows_is_sent_away(replica):
    inferred = len(replica._backend.requests)
    reply = ask(replica, remote(observation(), action_space="midtrain"))
    assert reply.answer.outcome == "moved"
    assert reply.served.action_space == "joint_pos"
    assert len(replica._backend.requests) == inferred, "nothing is inferred for it"


def test_a_replica_that_fails_again_and_again_is_sick(replica, monkeypatch):
    replica.check_health()

    def fail(request):
        raise RankLostError("a rank is gone.")

    well = replica._backend.infer
    monkeypatch.setattr(replica._backend, "infer", fail)
    for _ in range(3):
        assert ask(replica, remote(observation())).answer.outcome == "error"
    with pytest.raises(BackendError, match="the last 3 inferences failed"):
        replica.check_health()
    monkeypatch.setattr(replica._backend, "infer", well)
    ask(replica, remote(observation()))
    replica.check_health()


def test_errors_of_clients_make_no_replica_sick(replica):
    for _ in range(5):
        assert ask(replica, remote({"nonsense": 1})).answer.outcome == "error"
    replica.check_health()


def test_a_replica_whose_inference_does_not_end_is_sick(replica, monkeypatch):
    monkeypatch.setattr(replica._queue, "busy_s", lambda: [601.0])
    with pytest.raises(BackendError, match="an inference has taken 601 s"):
        replica.check_health()


# What becomes of requests


class Response:
    """Ray Serve's response: awaited, or cancelled."""

    def __init__(self, outcome: Any):
        self.outcome, self.cancelled, self.times = outcome, False, 0

    def __await__(self):
        if self.outcome is None:
            yield from asyncio.sleep(60).__await__()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def cancel(self):
        self.cancelled = True


def asked(
    outcome: Any,
    message: Any,
    wait_s: float = math.inf,
    left: bool = False,
    given_up_after_s: float = math.inf,
):
    """The answer of replicas that reply so, the response, the metrics, and what was changed."""
    response, metrics, changes = Response(outcome), Metrics(), []

    def send(request: RemoteRequest) -> Response:
        response.times += 1
        return response

    async def run():
        replicas = RemoteReplicas(send, SERVED, metrics, DEFAULT_LIMITS, 5.0, changes.append)
        gone = asyncio.get_running_loop().create_future()
        if left:
            gone.set_result(None)
        if given_up_after_s < math.inf:
            asyncio.get_running_loop().call_later(given_up_after_s, replicas.give_up)
        sent = response.message = Message(encode(message), Session(), time.monotonic())
        async with replicas.answered(ME, gone, [sent], wait_s) as answers:
            assert metrics.in_flight == 1
        return answers

    answers = asyncio.run(run())
    assert metrics.in_flight == 0
    assert response.times == 1, "no inference is asked for twice"
    return answers and answers[0], response, metrics, changes


ACTOR = b"0" * 16
LOST = [ActorDiedError(), ActorUnavailableError("gone", ACTOR)]


@pytest.mark.parametrize(
    ("failure", "outcome"), [(BackPressureError(1, 1), "refused"), *((e, "lost") for e in LOST)]
)
def test_a_request_that_nobody_answers_is_refused_in_the_words_of_the_wire(failure, outcome):
    answer, _, metrics, _ = asked(failure, observation(**{REQUEST_ID: 1}))
    assert (answer.outcome, answer.retry_after_s > 0) == (outcome, True)
    said = decode(answer.sent(Session()))
    assert said["type"] == "error"
    assert said["message"].startswith("ServiceBusyError: ")
    assert said["retry_after_ms"] >= 1
    assert metrics.requests[outcome] == 1


@pytest.mark.parametrize(
    ("failure", "outcome"), [(BackPressureError(1, 1), "late"), (LOST[0], "error")]
)
def test_a_client_of_another_make_gets_a_text_and_a_close(failure, outcome):
    answer, *_ = asked(failure, observation())
    assert answer.outcome == outcome
    assert answer.failed
    assert isinstance(answer.sent(Session()), str)


def test_a_request_whose_time_has_passed_is_cancelled_and_refused():
    answer, response, *_ = asked(None, observation(**{DEADLINE: 50}), wait_s=0.05)
    assert response.cancelled
    assert (answer.outcome, answer.retry_after_s > 0) == ("refused", True)


def test_a_request_that_no_replica_answers_before_the_fleet_ends_is_refused():
    answer, response, *_ = asked(None, observation(**{REQUEST_ID: 1}), given_up_after_s=0.05)
    assert response.cancelled
    assert (answer.outcome, answer.retry_after_s > 0) == ("lost", True), "a replica may have it"


def test_the_request_of_a_client_that_leaves_is_cancelled():
    answers, response, metrics, _ = asked(None, observation(), left=True)
    assert answers is None
    assert response.cancelled
    assert metrics.requests["abandoned"] == 1


def test_a_replaced_model_is_told_to_clients_that_connect_later():
    other = replace(SERVED, model_sha256="b" * 64)
    reply = RemoteAnswer(Answer(b"", "ok"), Session(bare=True), other)
    *_, changes = asked(reply, observation())
    assert changes == [other]


def test_the_session_after_an_answer_is_the_clients():
    after = Session(bare=True, episodes=OrderedDict(a=Episode(started_s=-2.0, calls=4)))
    reply = RemoteAnswer(Answer(b"", "ok"), after, None)
    _, response, *_ = asked(reply, observation(session_id="a"))
    session = response.message.session
    assert session.bare
    assert session.episodes["a"].calls == 4
    assert session.episodes["a"].started_s == pytest.approx(time.monotonic() - 2.0, abs=1.0)


# The front as an ASGI application


class Peer:
    """A client's end of an ASGI connection."""

    def __init__(self, application: FrontApp, kind: str, path: str = "/", **scope: Any):
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.got: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        extensions = {"websocket.http.response": {}} if kind == "websocket" else {}
        headers = [(k.lower().encode(), v.encode()) for k, v in scope.pop("headers", {}).items()]
        self.scope = {"type": kind, "path": path, "root_path": "", "headers": headers}
        self.scope |= {"query_string": b"", "server": ("127.0.0.1", 80), "scheme": "ws"}
        self.scope |= {"client": ("10.0.0.1", 5000), "extensions": extensions, **scope}
        self.task = asyncio.create_task(application.asgi(self.scope, self.sent.get, self.got.put))

    def say(self, **message: Any) -> None:
        self.sent.put_nowait(message)

    def send(self, message: Any) -> None:
        frame = message if isinstance(message, bytes | str) else encode(message)
        self.say(type="websocket.receive", bytes=frame)

    async def hear(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.got.get(), 10)

    async def frame(self) -> Any:
        message = await self.hear()
        assert message["type"] == "websocket.send", message
        return decode(message["bytes"]) if "bytes" in message else message["text"]


def conversation(work, backend: Any = None, embodiment: str = "droid", **config: Any):
    """Run ``work(application, connect, front)`` with a front whose policy infers here."""

    async def run():
        options = ServerConfig(**config)
        metrics = Metrics()
        policy = ServedPolicy(backend or Echo(), embodiment)
        queue = InferenceQueue([policy], metrics, 8, 30.0)
        places = Places(options, metrics)
        front = Front(policy, options, metrics, places, queue, asyncio.Event())
        application = FrontApp(front)

        async def connect(**scope: Any) -> Peer:
            peer = Peer(application, "websocket", **scope)
            peer.say(type="websocket.connect")
            assert (await peer.hear())["type"] == "websocket.accept"
            peer.metadata = await peer.frame()
            return peer

        try:
            await asyncio.gather(*map(asyncio.wrap_future, queue.started))
            return await work(application, connect, front)
        finally:
            queue.close(1.0)

    return asyncio.run(run())


def held() -> tuple[Echo, threading.Event, threading.Event]:
    """A backend that waits in an inference for "slow", when that begins, and until it goes on."""
    began, goes_on = threading.Event(), threading.Event()

    def before(request: Any) -> None:
        if request.instruction == "slow":
            began.set()
            goes_on.wait(20)

    return Echo(before), began, goes_on


def test_a_websocket_gets_metadata_and_answers():
    async def work(application, connect, front):
        peer = await connect()
        assert peer.metadata["cosmos3/action_space"] == "joint_pos"
        for number in range(2):
            peer.send(observation(**{REQUEST_ID: number}))
            assert (await peer.frame())[REQUEST_ID] == number
        assert front.metrics.clients == 1
        peer.say(type="websocket.disconnect", code=1000)
        await peer.task
        assert front.metrics.clients == 0

    conversation(work)


def test_a_websocket_that_asks_is_told_how_pictures_are_read():
    async def work(application, connect, front):
        peer = await connect(headers={"cosmos3-pictures": "jpeg"})
        assert peer.metadata["cosmos3/pictures"] == "jpeg"
        assert "cosmos3/pictures" not in (await connect()).metadata

    conversation(work)


def test_sockets_are_closed_with_reconnect_when_the_ingress_ends():
    async def work(application, connect, front):
        idle, busy = await connect(), await connect()
        busy.send(observation(prompt="slow"))
        await asyncio.to_thread(began.wait, 10)
        application.end_sockets()
        said = await idle.hear()
        assert (said["type"], said["code"]) == ("websocket.close", 1012)
        goes_on.set()
        assert "action" in await busy.frame(), "what is inferred for is answered"
        assert (await busy.hear())["code"] == 1012
        await asyncio.gather(idle.task, busy.task)
        assert front.metrics.clients == 0

    backend, began, goes_on = held()
    conversation(work, backend)


def test_a_request_that_crosses_the_close_is_not_inferred_for():
    backend = Echo()

    async def work(application, connect, front):
        peer = await connect()
        inferred = len(backend.requests)
        application.end_sockets()
        peer.send(observation())
        assert (await peer.hear())["code"] == 1012
        await peer.task
        assert len(backend.requests) == inferred

    conversation(work, backend)


def test_who_connects_to_an_ingress_that_ends_is_sent_on():
    async def work(application, connect, front):
        application.end_sockets()
        late = await connect()
        late.send(observation())
        assert (await late.hear())["code"] == 1012
        await late.task

    conversation(work)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b"x" * (DEFAULT_LIMITS.max_bytes + 1)], 1009),
        ([observation()] * 8, 1008),
        (["text"], 1011),
    ],
    ids=["too large", "too many", "text"],
)
def test_what_no_client_may_send_closes_the_connection(frames, code):
    async def work(application, connect, front):
        peer = await connect()
        for frame in frames:
            peer.send(frame)
        messages = []
        while not messages or messages[-1]["type"] != "websocket.close":
            messages.append(await peer.hear())
        assert messages[-1]["code"] == code
        await peer.task

    conversation(work, Echo(before=lambda request: time.sleep(0.05)))


@pytest.mark.parametrize(
    ("scope", "config", "status"),
    [
        ({"headers": {"Origin": "https://web.page"}}, {}, 403),
        ({}, {"token": "0123456789abcdef"}, 401),
        ({"headers": {"Authorization": "Bearer 0123456789abcdee"}},
         {"token": "0123456789abcdef"}, 401),
        ({}, {"max_clients": 1}, 503),
    ],
)  # fmt: skip
def test_a_handshake_is_refused_with_a_status(scope, config, status):
    async def work(application, connect, front):
        if status == 503:
            await connect()
        peer = Peer(application, "websocket", **scope)
        peer.say(type="websocket.connect")
        start, body = await peer.hear(), await peer.hear()
        assert (start["type"], start["status"]) == ("websocket.http.response.start", status)
        assert body["body"]
        await peer.task
        assert front.metrics.handshakes_refused[str(status)] == 1

    conversation(work, **config)


def test_a_token_opens_the_door():
    async def work(application, connect, front):
        assert (await connect(headers={"Authorization": "Bearer 0123456789abcdef"})).metadata

    conversation(work, token="0123456789abcdef")


def test_an_idle_client_makes_room_for_another_and_may_come_again():
    async def work(application, connect, front):
        first = await connect()
        next(iter(front.places._held)).idle_since_s -= 60.0
        await connect()
        assert (await first.hear())["code"] == 1012
        assert front.metrics.evicted == 1

    conversation(work, max_clients=1)


def test_a_client_that_leaves_in_mid_request_frees_its_place():
    async def work(application, connect, front):
        peer = await connect()
        peer.send(observation(prompt="slow"))
        await asyncio.to_thread(began.wait, 10)
        peer.say(type="websocket.disconnect", code=1006)
        await asyncio.wait_for(peer.task, 10)
        goes_on.set()
        assert front.metrics.requests["abandoned"] == 1
        assert front.metrics.clients == 0

    backend, began, goes_on = held()
    conversation(work, backend)


async def http(application: FrontApp, path: str, method: str = "GET", body: bytes = b"", **headers):
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    peer = Peer(application, "http", path, method=method, headers=names)
    peer.say(type="http.request", body=body)
    start, end = await peer.hear(), await peer.hear()
    await peer.task
    return start["status"], end["body"].decode(), dict(start["headers"])


def test_pages_and_refusals_over_http():
    async def work(application, connect, front):
        pages = {path: (await http(application, path))[:2] for path in ("/healthz", "/readyz", "/")}
        assert pages["/healthz"] == (200, "OK\n")
        assert pages["/readyz"] == (200, "OK\n")
        assert pages["/"][0] == 426
        assert "strands_cosmos3_clients" in (await http(application, "/metrics"))[1]
        assert (await http(application, "/x", "DELETE"))[0] == 405

    conversation(work)


def test_an_http_dialect_is_answered():
    async def work(application, connect, front):
        body = json.dumps(libero.encode_request(libero_request())).encode()
        kind = {"Content_Type": "application/json", "Content_Length": str(len(body))}
        status, said, _ = await http(application, "/predict", "POST", body, **kind)
        assert status == 200
        assert np.shape(json.loads(said)["action"]) == (16, 10)
        kind["Content_Length"] = str(DEFAULT_LIMITS.max_bytes + 1)
        assert (await http(application, "/predict", "POST", body, **kind))[0] == 413
        assert front.metrics.clients == 0

    conversation(work, Several(), "libero")


def test_an_ingress_describes_a_backend_that_it_does_not_have():
    described = ServedPolicy(DescribedBackend(SERVED), "droid", "joint_pos")
    assert described.metadata(Session())[SERVED_MODEL] == "a" * 64
    with pytest.raises(BackendError):
        described.warm_up()
