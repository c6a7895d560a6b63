"""The backend contract: what a minimal backend gets by default, and how objects of another make
are adapted or refused.
"""

import inspect
from dataclasses import fields

import numpy as np
import pytest

from strands_cosmos3 import Cosmos3Policy
from strands_cosmos3.backends import make_backend
from strands_cosmos3.backends.base import AdaptedBackend, Backend, BackendInfo
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.types import ActionChunk, Mode

STATE = {f"joint_{i}": 0.1 * i for i in range(7)} | {"gripper": 1.0}


def rows(request):
    return ActionChunk(
        np.full((request.n_rows, request.action_space.width), 0.25),
        request.action_space,
        request.embodiment,
    )


class Minimal(Backend):
    """All that a backend has to write."""

    info = BackendInfo(name="minimal", requires_images=False)

    def infer(self, request):
        return rows(request)


class Duck:
    """A backend that subclasses nothing."""

    name = "duck"
    requires_images = False
    action_space = "joint_pos"
    counters = {"reconnects": 3}  # noqa: RUF012 - an instance's would do as well

    def __init__(self):
        self.seen = []

    def infer(self, request):
        self.seen.append("infer")
        return rows(request)

    def cancel(self):
        self.seen.append("cancel")

    def reset(self, seed=None):
        self.seen.append(("reset", seed))

    def close(self):
        self.seen.append("close")


def test_a_backend_needs_only_infer():
    backend = make_backend(Minimal())
    assert backend.info.modes == (Mode.POLICY,)
    assert dict(backend.counters) == {}
    assert backend.cancel() is False
    with Cosmos3Policy(backend=backend) as policy:
        steps = policy.get_actions_sync(STATE, "reach the red cube")
        policy.reset(4)
        policy.cancel()
        assert (policy.model_sha256, policy.takes_action_prefix, dict(policy.counters)) == (
            None,
            False,
            {},
        )
    assert len(steps) == 16
    assert set(steps[0].values()) == {0.25}
    with pytest.raises(TypeError, match="infer"):
        Backend()


def test_an_object_that_keeps_the_contract_without_the_class_is_adapted():
    duck = Duck()
    with Cosmos3Policy(backend=duck) as policy:
        assert isinstance(policy.backend, AdaptedBackend)
        assert policy.action_space.name == "joint_pos"
        assert policy.counters == {"reconnects": 3}
        assert policy.info.takes_views is False
        policy.get_actions_sync(STATE, "reach the red cube")
        policy.reset(4)
        policy.cancel()
    assert duck.seen == ["infer", ("reset", 4), "cancel", "close"]


def test_every_member_of_the_contract_is_adapted():
    values = {field.name: object() for field in fields(BackendInfo)}
    assert vars(AdaptedBackend(type("Other", (Duck,), values)()).info) == values
    info = BackendInfo(name="other", chunk_rows=8)
    assert AdaptedBackend(type("Informed", (Duck,), {"info": info})()).info is info
    methods = [
        name
        for name, member in vars(Backend).items()
        if inspect.isfunction(member) or isinstance(member, property)
    ]
    assert set(methods) <= set(vars(AdaptedBackend)), "a member that would not be passed on"


@pytest.mark.parametrize("other", [object(), 7, print])
def test_what_is_no_backend_is_refused(other):
    with pytest.raises(ConfigError, match=r"no backend: it lacks .*infer.*Subclass .*Backend"):
        Cosmos3Policy(backend=other)


def test_a_cancel_that_returns_nothing_counts_as_heard():
    assert AdaptedBackend(Duck()).cancel() is True
    assert AdaptedBackend(type("Deaf", (Duck,), {"cancel": lambda self: False})()).cancel() is False
