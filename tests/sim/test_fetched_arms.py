"""The simulation with robots whose models are fetched; `make test-robots` fetches them."""

import warnings

import numpy as np
import pytest

from strands_cosmos3.robots.catalogue import get_robot, is_present, packaged_robots, source_of
from strands_cosmos3.robots.limits import LimitsAssumedWarning
from strands_cosmos3.sim.plant import PlantErrors
from strands_cosmos3.worlds.arms import ROBOTS, Robot

pytestmark = pytest.mark.robots
ARMS = sorted(
    name
    for name, robot in packaged_robots().items()
    if source_of(robot) is not None and len(robot.limbs) == 1
)


@pytest.mark.parametrize("name", ARMS)
def test_a_fetched_arm_takes_and_places_a_cube(name):
    if not is_present(get_robot(name)):
        pytest.skip(f"not fetched; run `strands-cosmos3 robot fetch {name}`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        robot = Robot(name)
    rollout = robot.run_policy(
        policy_config={"backend": "scripted"}, task="place", seed=1, duration=20.0
    )
    assert name in ROBOTS
    assert rollout.success, rollout
    assert rollout.ik.max_mm < 0.01
    speed = np.abs(np.diff(rollout.arrays["q_commanded_rad"], axis=0)) * 600
    assert (speed / robot.limits.velocity).max() <= 1.001


@pytest.mark.parametrize("name", ["iiwa7", "iiwa14"])
def test_a_low_hand_is_identified_in_free_space(name):
    """From home its sway would hit the table, which weighed as much as 16 kg."""
    if not is_present(get_robot(name)):
        pytest.skip(f"not fetched; run `strands-cosmos3 robot fetch {name}`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        found = Robot(name, plant=PlantErrors(payload_kg=0.5, actuation_delay_s=0.010)).identify()
    assert found.payload_kg == pytest.approx(0.5, rel=0.1)
    assert found.delay_s == pytest.approx(0.010, abs=0.002)
