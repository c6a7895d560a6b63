"""No task succeeds by what the arm did not do: cubes teleported, thrown, pushed, held by links or half lifted.

Every case runs the real simulation, and all but the last ones would have succeeded by their final state alone.
"""

import numpy as np
import pytest

from helpers.cheats import Carry, Motion, Teleport, Throw
from strands_cosmos3.robots.panda import HOME_Q, T_hand_tcp, dh_forward
from strands_cosmos3.sim.robot import Robot
from strands_cosmos3.sim.scene import BIN, Layout
from strands_cosmos3.sim.tasks import TASKS
from strands_cosmos3.types import Outcome

EDGE = 0.04
T_HOME_TCP = dh_forward(HOME_Q) @ T_hand_tcp
HOME_TCP = T_HOME_TCP[:3, 3]
HOME_YAW = float(np.arctan2(T_HOME_TCP[1, 0], T_HOME_TCP[0, 0]))
IN_BIN = np.array([*BIN.center_m, BIN.wall_m + EDGE / 2])
UNDER_HAND = Layout(  # the red cube below the hand at home, and turned like it
    ("cube_red", "cube_green", "cube_blue"),
    np.array([HOME_TCP[:2], [0.60, -0.15], [0.55, 0.15]]),
    np.array([HOME_YAW, 0.0, 0.0]),
)


@pytest.fixture(scope="module")
def robot():
    return Robot()


def tcp(robot):
    return robot.data.site_xpos[robot.scene.tcp_site].copy()


def on_blue(robot):
    return robot.data.xpos[robot.scene.cube_body["cube_blue"]] + [0, 0, EDGE]


GOALS = {"reach": tcp, "pick": tcp, "place": lambda _: IN_BIN, "stack": on_blue}


def fails(robot, task, hand, policy, duration=2.5, layout=UNDER_HAND):
    """Run an episode that looks done for long enough and must not succeed."""
    rollout = robot.run_policy(policy=policy, task=task, duration=duration, on_tick=hand, layout=layout)
    assert hand.looked_done_s >= TASKS[task].hold_s + 0.1
    assert rollout.outcome is Outcome.TIMEOUT, rollout.fault


def closes_at(robot, time_s):
    return Motion(robot, lambda t: (HOME_Q, float(t < time_s)))


@pytest.mark.parametrize("task", TASKS)
def test_a_teleported_cube(robot, task):
    """Into the bin, onto the other cube, into the closing fingers, to the hand; the arm stays at home."""
    hand = Teleport(task, GOALS[task], until_s={"reach": 2.0, "pick": 0.9}.get(task, 0.32))
    fails(robot, task, hand, closes_at(robot, 0.4 if task == "pick" else 9.0))


@pytest.mark.parametrize("task", TASKS)
def test_a_cube_carried_by_someone_else(robot, task):
    """Its velocity fits its motion."""

    def places(robot):
        goal = GOALS[task](robot)
        over = np.array([0, 0, 0.2])
        return [hand.where(robot) + over, goal + over, goal] if task in ("place", "stack") else [goal]

    hand = Carry(task, places, stay_s={"reach": 2.0, "pick": 0.8}.get(task, 0.0))
    fails(robot, task, hand, closes_at(robot, 1.8 if task == "pick" else 9.0), duration=4.0)


@pytest.mark.parametrize(("task", "flight_s"), [("place", 0.5), ("stack", 0.6)])
def test_a_cube_thrown_by_someone_else(robot, task, flight_s):
    fails(robot, task, Throw(task, GOALS[task], flight_s), Motion(robot))
