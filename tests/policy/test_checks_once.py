"""Values of the six types are checked when they are made and trusted afterwards."""

import sys

import numpy as np
import pytest

from strands_cosmos3 import Cosmos3Policy, checks
from strands_cosmos3.robots.panda import HOME_Q

STATE = {f"joint{i + 1}": float(q) for i, q in enumerate(HOME_Q)} | {"finger_joint1": 0.04}
MOST = 20
"""Arrays of one call that are checked outside ``actions`` and ``control``."""


@pytest.fixture
def checked(monkeypatch):
    """Names of the arrays that ``finite_array`` checks, and the modules that ask it to."""
    seen, original = [], checks.finite_array

    def counted(value, name, shape):
        frame = sys._getframe(1)
        while frame.f_globals["__name__"] == "strands_cosmos3.checks":
            frame = frame.f_back
        seen.append((frame.f_globals["__name__"].removeprefix("strands_cosmos3."), name))
        return original(value, name, shape)

    for module in list(sys.modules.values()):
        if getattr(module, "finite_array", None) is original:
            monkeypatch.setattr(module, "finite_array", counted)
    return seen


@pytest.mark.parametrize("hz", [None, 50.0])
def test_one_call_checks_each_value_once(request, hz):
    from strands_cosmos3.backends.replay import load_recording

    with Cosmos3Policy(
        backend="replay", model=load_recording("tests/assets/droid_episode_48330.json"), robot="panda"
    ) as policy:
        if hz:
            policy.set_control_frequency(hz)
        policy.get_actions_sync(STATE, "replay")
        checked = request.getfixturevalue("checked")
        policy.reset()
        assert len(policy.get_actions_sync(STATE, "replay")) >= 16
    inside = [name for module, name in checked if module.split(".")[0] in ("types", "policy", "backends", "observe")]
    assert 0 < len(inside) <= MOST, inside
    per_observation = [name for name in inside if name in ("qd_rad_s", "action")]
    assert sorted(per_observation) == ["action", "qd_rad_s"], "one observation and one chunk, each made once"
    assert np.isfinite(policy.last_rollout["action"]).all()
