"""The backend contract: what a minimal backend gets by default, what is passed on, and what is
refused.
"""

import inspect

import numpy as np
import pytest

from strands_cosmos3 import Cosmos3Policy
from strands_cosmos3.backends import make_backend
from strands_cosmos3.backends.base import Backend, BackendInfo, WrappedBackend
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.input_monitor import InputMonitor
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


def test_a_backend_needs_only_infer():
    backend = make_backend(Minimal())
    assert backend.info.modes == (Mode.POLICY,)
    watched = dict.fromkeys(InputMonitor.counters, 0)  # whatever the backend is
    assert dict(backend.counters) == watched
    assert backend.cancel() is False
    with Cosmos3Policy(backend=backend) as policy:
        steps = policy.get_actions_sync(STATE, "reach the red cube")
        policy.reset(4)
        policy.cancel()
        assert (policy.model_sha256, policy.prefix_rows, dict(policy.counters)) == (
            None,
            0,
            watched,
        )
    assert len(steps) == 16
    assert set(steps[0].values()) == {0.25}
    with pytest.raises(TypeError, match="infer"):
        Backend()


def test_every_member_of_the_contract_is_passed_on():
    methods = [
        name
        for name, member in vars(Backend).items()
        if inspect.isfunction(member) or isinstance(member, property)
    ]
    assert set(methods) <= set(vars(WrappedBackend)), "a member that would not be passed on"
    inner = Minimal()
    assert WrappedBackend(inner).info is inner.info


@pytest.mark.parametrize("other", [object(), 7, print])
def test_what_is_no_backend_is_refused(other):
    with pytest.raises(ConfigError, match=r"is no backend; subclass .*Backend and implement infer"):
        Cosmos3Policy(backend=other)
