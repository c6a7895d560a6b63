"""A world outside the package: the example's, by the file's name, in rollout, view's checks and
Gymnasium.
"""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mujoco")

from strands_cosmos3.cli import main
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.worlds import RunOptions, Start, get_world

EXAMPLE = Path(__file__).parents[2] / "examples/14_your_own_world.py"
PUCK = f"{EXAMPLE}:PuckWorld"
pytestmark = pytest.mark.filterwarnings(
    "ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning"
)


class RandomJoints:
    """Random targets near the present angles."""

    requires_images, actions_per_step = False, None

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def set_robot_state_keys(self, keys):
        self.keys = keys

    def set_control_frequency(self, hz):
        pass

    def reset(self, seed=None):
        self.rng = np.random.default_rng(seed)

    def get_actions_sync(self, observation, instruction):
        q = np.array([observation[key] for key in self.keys])
        steps = q + np.cumsum(self.rng.normal(0, 0.01, (50, len(q))), axis=0)
        return [dict(zip(self.keys, row, strict=True)) for row in steps]


def test_it_is_small_and_needs_neither_of_our_worlds():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 150
    assert "worlds.table" not in text
    assert "worlds.libero" not in text


def test_its_expert_passes_and_a_random_policy_fails():
    world = get_world(PUCK)
    with world.open() as session:
        arguments = session.policy_arguments() | {"options": session.policy_options()}
        with Cosmos3Policy(backend=world.expert(), **arguments) as policy:
            for seed in range(2):
                session.reset(Start("push", seed))
                assert session.run(policy).success
        for seed in range(2):
            session.reset(Start("push", seed))
            rollout = session.run(RandomJoints(), RunOptions(duration_s=6.0))
            assert rollout.success is False


def test_rollout_takes_it(tmp_path):
    out = tmp_path / "a.json"
    arguments = ["--backend", "scripted", "--seed", "1", "--json", str(out)]
    assert main(["rollout", "--world", PUCK, *arguments]) == 0
    (episode,) = json.loads(out.read_text())["episodes"]
    assert (episode["task"], episode["instruction"]) == ("push", "push the puck into the zone")


def test_gymnasium_takes_it():
    gymnasium = pytest.importorskip("gymnasium", reason="pip install 'strands-cosmos3[gym]'")
    import strands_cosmos3.environments  # noqa: F401 - registers

    with gymnasium.make("strands_cosmos3/Table-v0", world=PUCK, pictures=False) as env:
        observation, info = env.reset(seed=0)
        assert observation["joint_pos"].shape == (6,)
        assert info["instruction"] == "push the puck into the zone"
        _, reward, *_ = env.step(np.append(observation["joint_pos"], 1.0))
        assert reward == 0.0
