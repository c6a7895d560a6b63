"""Values of the six types are checked when they are made and trusted afterwards."""

import sys
from pathlib import Path

import numpy as np
import pytest

from strands_cosmos3 import Cosmos3Policy, checks
from strands_cosmos3.backends.replay import load_recording

EPISODE = Path(__file__).parents[1] / "assets" / "droid_episode_48330.json"
MOST = {None: 21, 50.0: 24}
"""Arrays, and the rate of rows, of one call that the six types may check, by control frequency
(resampling makes a second trajectory).
"""


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
    recording = load_recording(EPISODE)
    state = {f"joint{i + 1}": float(q) for i, q in enumerate(recording.q_start_rad)} | {
        "finger_joint1": 0.04
    }
    with Cosmos3Policy(backend="replay", model=recording, robot="panda") as policy:
        if hz:
            policy.set_control_frequency(hz)
        policy.get_actions_sync(state, "replay")
        checked = request.getfixturevalue("checked")
        policy.reset()
        assert len(policy.get_actions_sync(state, "replay")) >= 16
    inside = [
        name
        for module, name in checked
        if module.split(".")[0] in ("types", "policy", "backends", "observe")
    ]
    assert 0 < len(inside) <= MOST[hz], inside
    per_observation = [name for name in inside if name in ("qd_rad_s", "action", "fps")]
    assert sorted(per_observation) == ["action", "fps", "qd_rad_s"], (
        "one observation and one chunk, each made once"
    )
    assert np.isfinite(policy.last_rollout["action"]).all()
