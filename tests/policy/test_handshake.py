"""Refusals of what a runner sets before a rollout: they name the method that was called, and the
state key that is missing.
"""

from __future__ import annotations

import numpy as np
import pytest

from helpers.spy import Spy, flat
from strands_cosmos3.embodiments import JOINT_POS
from strands_cosmos3.errors import InputError, ObservationError
from strands_cosmos3.policy import Cosmos3Policy

EIGHT = dict.fromkeys(JOINT_POS.columns, 0.1)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "50", None])
def test_a_control_frequency(policy, value):
    with pytest.raises(ValueError, match=r"^set_control_frequency: control_frequency must be a"):
        policy.set_control_frequency(value)


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_an_observed_delay(policy, value):
    with pytest.raises(
        ValueError,
        match=r"^set_rtc_observed_delay: rtc_observed_delay_steps must be a whole number",
    ):
        policy.set_rtc_observed_delay(value)


@pytest.mark.parametrize("value", [-1, 1.5, "2", 2**32])
def test_a_seed(policy, value):
    with pytest.raises(ValueError, match=r"^reset: seed must be a whole number"):
        policy.reset(value)


@pytest.mark.parametrize("value", ["joint_0", [], [1] * 8, ["a"] * 8, None, 3])
@pytest.mark.parametrize("embodiment", ["droid", "umi"])
def test_state_keys(value, embodiment):
    with pytest.raises(InputError, match=r"^set_robot_state_keys: "):
        Cosmos3Policy(embodiment, backend=Spy()).set_robot_state_keys(value)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (list(EIGHT)[:7], "7 state keys, without 'gripper'; "),
        (
            [name for name in EIGHT if name not in ("joint_2", "joint_5")],
            "6 state keys, without 'joint_2', 'joint_5'; ",
        ),
        (
            [*(f"joint{i}" for i in range(1, 7)), "finger_joint1"],
            "7 state keys, without 'joint7'; ",
        ),
        (["a", "b", "c", "d", "e", "f"], "6 state keys, none for joint_6, gripper; "),
        ([*EIGHT, "torso"], "9 state keys, 'torso' beyond the eighth; "),
    ],
)
def test_which_of_the_eight_state_keys_is_missing(keys, says):
    with pytest.raises(InputError, match=says + r".*must be eight, joint_0, .*gripper"):
        Cosmos3Policy(backend=Spy(), action_space="joint_pos").set_robot_state_keys(keys)


def test_an_observation_names_every_missing_state_key():
    policy = Cosmos3Policy(backend=Spy(joints_rad_s=np.zeros(7)), action_space="joint_pos")
    without = {name: value for name, value in EIGHT.items() if name not in ("joint_3", "gripper")}
    with pytest.raises(
        ObservationError, match=r"lacks 'joint_3', 'gripper'; it has: .*joint_3, gripper has none"
    ):
        policy.get_actions_sync(without, "go")
    panda = Cosmos3Policy(robot="panda", backend=Spy())
    observation = {name: value for name, value in flat().items() if name != "joint5"}
    with pytest.raises(
        ObservationError,
        match=r"lacks 'joint5'; it has: joint1, .*Of the 8 state keys, joint_4 has none",
    ):
        panda.get_actions_sync(observation, "go")
    with pytest.raises(ObservationError, match=r"joint_4 has none"):
        Cosmos3Policy.preflight(observation.keys(), robot="panda", backend="replay")
    with pytest.raises(
        ObservationError,
        match=r"Of the 16 state keys, left_joint_0, .* give the policy the robot whose names",
    ):
        Cosmos3Policy.preflight(
            observation.keys(),
            embodiment="robomind-franka-dual",
            robot="dual_panda",
            backend="replay",
        )
