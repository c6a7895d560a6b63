"""Scores of chunks from the backend to its counters, the policy, the wire and an episode's report."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from helpers.serving import Echo, observation, request
from strands_cosmos3 import Cosmos3Policy
from strands_cosmos3.backends.base import BackendInfo, WrappedBackend
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.errors import Cosmos3Error, InputError, NonFiniteError
from strands_cosmos3.monitors import ScoreLimit, Watch
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.codec import encode
from strands_cosmos3.serving.served import Message, ServedPolicy, Session
from strands_cosmos3.serving.server import PolicyServer
from strands_cosmos3.serving.server_config import ServerConfig
from strands_cosmos3.serving.wire import REQUEST_ID, SCORES, decode_reply, encode_reply
from strands_cosmos3.types import Observation
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.expert import ScriptedBackend


class DarkWarning(UserWarning):
    pass


LIMITS = (ScoreLimit("darkness", 0.5, "dark_pictures", "it is dark ({score:.2f})", DarkWarning),)
SEEN = Observation(q_rad=HOME_Q, gripper=1.0)


class Sees(Echo):
    """Echoes, with the scores that it is told to find."""

    info = BackendInfo(name="echo", requires_images=False, action_space="joint_pos", scores=LIMITS)

    def __init__(self, *found):
        super().__init__()
        self.found = iter(found)

    def infer(self, request):
        return replace(super().infer(request), scores={"darkness": next(self.found), "other": 9})


class Dim(ScriptedBackend):
    """The expert, to whom every picture is dark."""

    info = replace(ScriptedBackend.info, scores=LIMITS)

    def infer(self, request):
        return replace(super().infer(request), scores={"darkness": 0.75})


def test_scores_beyond_the_limit_are_counted_and_the_first_is_warned_of():
    backend = Sees(0.25, 0.5, 0.75, 0.9)
    with Cosmos3Policy(backend=WrappedBackend(backend)) as policy:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for usual in (0.25, 0.5):  # the limit itself is usual
                policy.plan(SEEN, "reach")
                assert policy.last_rollout["darkness"] == usual
                assert policy.counters["dark_pictures"] == 0
        with pytest.warns(DarkWarning, match=r"it is dark \(0\.75\)"):
            policy.plan(SEEN, "reach")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            policy.plan(SEEN, "reach")
        assert policy.counters == backend.counters
        assert policy.counters["dark_pictures"] == 2


def test_each_item_of_a_batch_is_watched():
    state = {f"joint_{i}": float(q) for i, q in enumerate(HOME_Q)} | {"gripper": 1.0}
    with Cosmos3Policy(backend=Sees(0.75, 0.25, 0.75)) as policy:
        policy.set_robot_state_keys(list(state))
        with pytest.warns(DarkWarning):
            policy.get_actions_batch([state] * 3, "reach")
        assert policy.counters["dark_pictures"] == 2


class Follows:
    """A monitor that remembers what it is shown."""

    counters = ("plans",)

    def __init__(self):
        self.shown = []

    def events(self, request, chunk, plan):
        self.shown.append((request, chunk, plan))
        return [("plans", UserWarning("a plan"))]


def test_a_monitor_sees_request_chunk_and_plan():
    backend, monitor = Sees(0.0), Follows()
    backend.watch = Watch(monitor)
    with (
        Cosmos3Policy(backend=backend, robot="panda") as policy,
        pytest.warns(UserWarning, match="a plan"),
    ):
        plan = policy.plan(SEEN, "reach")
    ((request, chunk, seen),) = monitor.shown
    assert request is backend.requests[0]
    assert chunk.scores == {"darkness": 0.0, "other": 9.0}
    assert seen is plan
    assert policy.counters["plans"] == 1


def test_a_server_counts_and_warns_and_its_client_reads_the_scores():
    backend = Sees(0.0, 0.75)  # the first answer warms up
    served = ServedPolicy(backend, "droid", "joint_pos")
    with PolicyServer(served, ServerConfig(port=0)) as server:
        client = PolicyClient(ClientConfig("127.0.0.1", server.port))
        service = ServiceBackend(client, requires_images=False)
        with Cosmos3Policy(backend=service) as policy, pytest.warns(DarkWarning):
            policy.plan(SEEN, "reach")
    assert (policy.last_rollout["darkness"], policy.last_rollout["other"]) == (0.75, 9.0)
    assert backend.counters["dark_pictures"] == 1


def test_a_server_watches_each_request_of_a_batch():
    backend = Sees(0.75, 0.25, 0.9)
    served = ServedPolicy(backend, "droid", "joint_pos")
    messages = [Message(encode(observation()), Session(), 0.0) for _ in range(3)]
    with pytest.warns(DarkWarning, match=r"0\.75"):
        answers = served.answer(messages)
    assert [answer.outcome for answer in answers] == ["ok"] * 3
    assert backend.counters["dark_pictures"] == 2


def test_an_episode_reports_its_own_events():
    robot = Robot("panda")
    with Cosmos3Policy(robot="panda", backend=Dim()) as policy, pytest.warns(DarkWarning):
        first, second = (
            robot.run_policy(instruction="reach the red cube", policy=policy, duration=duration)
            for duration in (3.0, 0.3)
        )
    assert first.counters["dark_pictures"] == first.counters["requested"] > 1
    assert second.counters["dark_pictures"] == 1
    assert second.counters["reconnects"] == 0


@pytest.mark.parametrize("score", [float("nan"), "0.5", [0.5]])
def test_a_malformed_score_is_refused(score):
    chunk = Sees(0.0).infer(request())
    with pytest.raises((InputError, NonFiniteError), match="score 'darkness'"):
        replace(chunk, scores={"darkness": score})


def test_scores_cannot_be_changed():
    chunk = Sees(0.25).infer(request())
    with pytest.raises(TypeError):
        chunk.scores["darkness"] = 1.0  # type: ignore[index]


def test_a_chunk_that_the_arm_cannot_follow_is_watched_too():
    class Off(Sees):
        def infer(self, request):
            chunk = super().infer(request)
            return replace(chunk, action=chunk.action + 50.0)  # rad

    with Cosmos3Policy(backend=Off(0.75), robot="panda") as policy:
        with pytest.warns(DarkWarning), pytest.raises(Cosmos3Error):
            policy.plan(SEEN, "reach")
        assert policy.counters["dark_pictures"] == 1


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"dim": 0.5, "count": 2, "lost": np.nan, "text": "1"}, {"dim": 0.5, "count": 2.0}),
        ([0.5], {}),
        (None, {}),
    ],
)
def test_a_client_reads_the_finite_scores_of_a_reply(sent, read):
    reply = {"action": np.zeros((4, 8), np.float32), SCORES: sent}
    assert decode_reply(reply, request(), 1).scores == read


@pytest.mark.parametrize(("key", "sent"), [(REQUEST_ID, True), ("other", False)])
def test_scores_are_sent_to_clients_that_know_our_keys(key, sent):
    chunk = Sees(0.25).infer(request())
    reply = encode_reply(chunk, request(), {key: 1}, (1.0, None), bare=False)
    assert reply.get(SCORES) == ({"darkness": 0.25, "other": 9.0} if sent else None)
