"""What stands between a policy and its backend in an evaluation passes the whole contract on."""

import threading

import pytest

from strands_cosmos3 import Cosmos3Policy
from strands_cosmos3.backends.base import Backend
from strands_cosmos3.errors import ServiceClosedError
from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.evaluation.perturbed_backend import PerturbedBackend
from strands_cosmos3.types import Outcome
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.expert import ScriptedBackend


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


def perturbed(inner):
    return PerturbedBackend(inner, Perturbation(), "reach the red cube")


def test_the_whole_contract_is_passed_on():
    inner = ScriptedBackend()
    values = {name: object() for name in Backend.__annotations__ if name != "modes"}
    for name, value in values.items():
        setattr(inner, name, value)
    outer = perturbed(inner)
    assert {name: getattr(outer, name) for name in values} == values


@pytest.fixture(scope="module")
def robot():
    return Robot("panda")


def test_an_evaluation_counts_a_services_reconnects(robot):
    inner = Reconnects()
    with Cosmos3Policy(backend=perturbed(inner), robot="panda") as policy:
        rollout = robot.run_policy(policy=policy, instruction="reach the red cube", duration=3.0)
    assert inner.calls > 2
    assert rollout.counters["reconnects"] == inner.calls - 1


def test_an_evaluation_cancels_a_pending_inference(robot):
    inner = Hangs()
    with Cosmos3Policy(backend=perturbed(inner), robot="panda") as policy:
        rollout = robot.run_policy(
            policy=policy, instruction="reach the red cube", duration=4.0, realtime=True
        )
    assert inner.calls > 1
    assert inner.gate.is_set()
    assert rollout.counters["abandoned"] == 0
    assert rollout.outcome in (Outcome.COMPLETED, Outcome.FAULT)
