"""The policy of an episode: pictures of a condition, times, and the whole contract passed on."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mujoco")

from strands_cosmos3 import Cosmos3Policy
from strands_cosmos3.backends.base import BackendInfo
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError, ServiceClosedError
from strands_cosmos3.evaluation import policies
from strands_cosmos3.evaluation.plan import Condition
from strands_cosmos3.evaluation.policies import ConditionedBackend, ConditionedPolicy, load_policy
from strands_cosmos3.types import Outcome, Request
from strands_cosmos3.worlds import RunOptions, Start, get_world
from strands_cosmos3.worlds.table.expert import ScriptedBackend

PLAIN, BLANK = Condition(), Condition.parse("blank")


class Reconnects(ScriptedBackend):
    """The expert behind a connection that is lost before every answer but the first."""

    calls = 0

    @property
    def counters(self):
        return {"reconnects": max(0, self.calls - 1)}

    def infer(self, request):
        self.calls += 1
        return super().infer(request)


class Hangs(ScriptedBackend):
    """The expert, which from its second answer on waits until it is cancelled."""

    def __init__(self):
        self.calls, self.gate = 0, threading.Event()

    def infer(self, request):
        self.calls += 1
        if self.calls > 1:
            assert self.gate.wait(30.0), "nobody cancelled it"
            raise ServiceClosedError("cancelled")
        return super().infer(request)

    def cancel(self):
        self.gate.set()
        return True


class OfDroid(ScriptedBackend):
    info = BackendInfo(preferred_space="joint_pos")


def test_the_whole_contract_is_passed_on():
    inner = OfDroid()
    outer = ConditionedBackend(inner, PLAIN)
    assert outer.info is inner.info
    assert outer.info.action_space_for(get_embodiment("droid")) == "joint_pos"
    assert outer.info.action_space_for(get_embodiment("robomind-ur")) is None


@pytest.fixture(scope="module")
def session():
    with get_world("table").open(task="reach") as session:
        yield session


def run(session, inner, **options):
    session.reset(Start("reach"))
    backend = ConditionedBackend(inner, PLAIN)
    with Cosmos3Policy(backend=backend, robot="panda") as policy:
        return session.run(policy, RunOptions(**options))


def test_an_evaluation_counts_a_services_reconnects(session):
    inner = Reconnects()
    rollout = run(session, inner, duration_s=3.0)
    assert inner.calls > 1
    assert rollout.counters["reconnects"] == inner.calls - 1


def test_an_evaluation_cancels_a_pending_inference(session):
    inner = Hangs()
    rollout = run(session, inner, duration_s=2.5, realtime=True)
    assert inner.calls > 1
    assert inner.gate.is_set()
    assert rollout.counters["abandoned_inferences"] == 0
    assert rollout.outcome in (Outcome.TIMEOUT, Outcome.FAULT)


class Keeps(ScriptedBackend):
    """Keeps the request, after some seconds of a clock that stands still otherwise."""

    def __init__(self, clock, seconds=()):
        self.clock, self.seconds = clock, iter(seconds)

    def infer(self, request):
        self.request = request
        self.clock[0] += next(self.seconds, 0.0)


def request(**values):
    droid = get_embodiment("droid")
    grey = np.full((8, 8, 3), 99, np.uint8)
    return Request(
        droid,
        droid.action_space(None),
        "reach the red cube",
        4,
        np.zeros(7),
        1.0,
        composite=grey,
        images={"left": grey},
        **values,
    )


def test_blank_pictures_are_black_and_nothing_else_changes():
    def received(condition):
        inner = Keeps([0.0])
        ConditionedBackend(inner, condition).infer(request(seed=3))
        return inner.request

    plain, blank = received(PLAIN), received(BLANK)
    assert plain.composite.min() == plain.images["left"].min() == 99
    assert blank.composite.shape == plain.composite.shape
    assert blank.composite.max() == blank.images["left"].max() == 0
    for name in ("instruction", "seed", "n_rows", "gripper"):
        assert getattr(blank, name) == getattr(plain, name)


def test_answers_are_timed_in_milliseconds(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(policies, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    timed = ConditionedBackend(Keeps(clock, (0.25, 0.5)), PLAIN)
    timed.infer(request())
    timed.infer(request())
    assert timed.answer_ms == [250.0, 500.0]


def test_another_projects_policy_sees_black_pictures_and_its_steps_are_timed():
    class Looks:
        def get_actions_sync(self, observation, instruction):
            self.observation, self.instruction = observation, instruction
            return [{"x": 0.5}] * 3

    observation = {"image": np.full((4, 4, 3), 9, np.uint8), "state": np.arange(3.0)}
    for condition, bright in ((PLAIN, True), (BLANK, False)):
        inner = Looks()
        policy = ConditionedPolicy(inner, condition, 2)
        assert policy.get_actions_sync(observation, "lift that") == [{"x": 0.5}] * 3
        assert bool(inner.observation["image"].any()) is bright
        assert (inner.instruction, inner.observation["state"].tolist()) == ("lift that", [0, 1, 2])
        assert len(policy.answer_ms) == 1


def test_a_name_that_makes_no_policy_is_refused():
    with pytest.raises(ConfigError, match="get_actions_sync"):
        load_policy("builtins:dict")
    with pytest.raises(ConfigError, match=r"module:name.*set PYTHONPATH=\..*No module named"):
        load_policy("no_such_module:Policy")


def test_another_projects_policy_is_set_up_by_its_runner():
    """Members that it has are called; the contract's defaults stand in for the others."""

    class SetUp:
        requires_images, actions_per_step = False, 3

        def __init__(self):
            self.calls = []
            self.reset = self.set_control_frequency = self.set_robot_state_keys = self.calls.append

    def set_up(inner, replan_rows):
        policy = ConditionedPolicy(inner, PLAIN, replan_rows)
        policy.set_robot_state_keys(["a"])
        policy.set_control_frequency(20.0)
        policy.reset(7)
        return policy.requires_images, policy.actions_per_step, policy.control_frequency

    inner = SetUp()
    assert set_up(inner, None) == (False, 3, 20.0)
    assert inner.calls == [["a"], 20.0, 7]
    assert set_up(inner, 2) == (False, 2, 20.0)
    assert set_up(object(), None) == (True, None, 20.0)
