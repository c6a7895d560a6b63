"""The plugin's server leaves out no motion that an arm in radians makes. LeRobot's own modules are
stubs here, with the rule of its 0.6.1; test_lerobot_plugin.py asks the real ones.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from helpers.environments import ROOT

NAMES = (*(f"joint_{i}" for i in range(7)), "gripper")
SERVER = ROOT / "plugins/lerobot_policy_cosmos3/lerobot_policy_cosmos3/policy_server.py"


@dataclass
class TimedObservation:
    timestep: int
    observation: dict[str, Any]

    def get_observation(self) -> dict[str, Any]:
        return self.observation


class PolicyServer:
    """What decides in lerobot 0.6.1."""

    def __init__(self, policy_type: str):
        self.policy_type = policy_type
        self.lerobot_features = {"observation.state": {"names": list(NAMES)}}

    def _obs_sanity_checks(self, obs: TimedObservation, previous_obs: TimedObservation) -> bool:
        states = [[seen.observation[name] for name in NAMES] for seen in (obs, previous_obs)]
        return bool(np.linalg.norm(np.subtract(*states)) >= 1)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    members = {
        "lerobot": {},
        "lerobot.async_inference": {},
        "lerobot.async_inference.policy_server": {"PolicyServer": PolicyServer},
        "lerobot.async_inference.constants": {"SUPPORTED_POLICIES": ["act"]},
        "lerobot.async_inference.helpers": {"TimedObservation": TimedObservation},
        "lerobot.utils": {},
        "lerobot.utils.import_utils": {"register_third_party_plugins": lambda: None},
    }
    for name, given in members.items():
        module = ModuleType(name)
        vars(module).update(given)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    spec = importlib.util.spec_from_file_location("policy_server_of_the_plugin", SERVER)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def seen(*moved: tuple[int, float]) -> TimedObservation:
    state = np.array([0.0, -0.6, 0.0, -2.5, 0.0, 1.9, 0.0, 0.5])
    for i, by in moved:
        state[i] += by
    values = dict(zip(NAMES, state.tolist(), strict=True))
    return TimedObservation(0, {**values, "wrist": np.zeros((4, 4, 3), np.uint8)})


@pytest.mark.parametrize(
    ("moved", "kept"),
    [
        ([(i, np.radians(20)) for i in range(7)], True),
        ([(3, -0.03)], True),  # 1.7 degrees of one joint
        ([(0, 0.013), (5, -0.013)], True),
        ([(7, 0.25)], True),  # the gripper alone
        ([(6, 0.01)], False),  # 0.6 degrees: an arm that stands
        ([(7, 0.004)], False),
        ([], False),
    ],
)
def test_what_moved_is_seen(plugin: ModuleType, moved: list[tuple[int, float]], kept: bool):
    server = plugin.Cosmos3PolicyServer("cosmos3")
    before = seen()
    assert server._obs_sanity_checks(seen(*moved), before) is kept
    assert before.observation == seen().observation | {"wrist": before.observation["wrist"]}


def test_policies_of_others_keep_their_units(plugin: ModuleType):
    server = plugin.Cosmos3PolicyServer("act")
    assert not server._obs_sanity_checks(seen((0, 0.9)), seen())
    assert server._obs_sanity_checks(seen((0, 2.0)), seen())


def test_the_server_that_is_started_is_this_one(plugin: ModuleType):
    made = []
    plugin.policy_server.serve = lambda: made.append(plugin.policy_server.PolicyServer("cosmos3"))
    plugin.main()
    assert type(made[0]) is plugin.Cosmos3PolicyServer
    assert plugin.SUPPORTED_POLICIES == ["act", "cosmos3"]
