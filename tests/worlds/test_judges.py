"""No task succeeds by what the arm did not do: cubes teleported, thrown, pushed, held by links or
half lifted.

Every case runs the real simulation, and all but the last ones would have succeeded by their final
state alone.
"""

import numpy as np
import pytest

from helpers.cheats import (
    Carry,
    Creep,
    Hand,
    Motion,
    SlideUnder,
    Teleport,
    Throw,
    through,
    touching,
)
from strands_cosmos3.robots.panda import HOME_Q, T_hand_tcp, dh_forward
from strands_cosmos3.sim.scene import Layout
from strands_cosmos3.types import Outcome
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.scene import Bin
from strands_cosmos3.worlds.table.tasks import TASKS

CUBE_TASKS = ("reach", "pick", "place", "stack")
EDGE = 0.04
T_HOME_TCP = dh_forward(HOME_Q) @ T_hand_tcp
HOME_TCP = T_HOME_TCP[:3, 3]
HOME_YAW = float(np.arctan2(T_HOME_TCP[1, 0], T_HOME_TCP[0, 0]))
IN_BIN = np.array([*Bin().center_m, Bin().wall_m + EDGE / 2])
UNDER_HAND = Layout(  # the red cube below the hand at home, and turned like it
    ("cube_red", "cube_green", "cube_blue"),
    np.array([HOME_TCP[:2], [0.60, -0.15], [0.55, 0.15]]),
    np.array([HOME_YAW, 0.0, 0.0]),
)


@pytest.fixture(scope="module")
def robot():
    return Robot()


def tcp(robot):
    return robot.data.site_xpos[robot.scene.only.tcp_site].copy()


def on_blue(robot):
    return robot.data.xpos[robot.scene.bodies["cube_blue"].id] + [0, 0, EDGE]


GOALS = {"reach": tcp, "pick": tcp, "place": lambda _: IN_BIN, "stack": on_blue}


def fails(robot, task, hand, policy, duration=2.5, layout=UNDER_HAND):
    """Run an episode that looks done for long enough and must not succeed."""
    rollout = robot.run_policy(
        policy=policy, task=task, duration=duration, on_tick=hand, layout=layout
    )
    assert hand.looked_done_s >= TASKS[task].hold_s + 0.1
    assert rollout.outcome is Outcome.TIMEOUT, rollout.fault


def closes_at(robot, time_s):
    return Motion(robot, lambda t: (HOME_Q, float(t < time_s)))


@pytest.mark.parametrize("task", CUBE_TASKS)
def test_a_teleported_cube(robot, task):
    """Into the bin, onto the other cube, into the closing fingers, to the hand; the arm stays at
    home.
    """
    hand = Teleport(task, GOALS[task], until_s={"reach": 2.0, "pick": 0.9}.get(task, 0.32))
    fails(robot, task, hand, closes_at(robot, 0.4 if task == "pick" else 9.0))


@pytest.mark.parametrize("task", CUBE_TASKS)
def test_a_cube_carried_by_someone_else(robot, task):
    """Its velocity fits its motion."""

    def places(robot):
        goal = GOALS[task](robot)
        over = np.array([0, 0, 0.2])
        return (
            [hand.where(robot) + over, goal + over, goal] if task in ("place", "stack") else [goal]
        )

    hand = Carry(task, places, stay_s={"reach": 2.0, "pick": 0.8}.get(task, 0.0))
    fails(robot, task, hand, closes_at(robot, 1.8 if task == "pick" else 9.0), duration=4.0)


@pytest.mark.parametrize(("task", "flight_s"), [("place", 0.5), ("stack", 0.6)])
def test_a_cube_thrown_by_someone_else(robot, task, flight_s):
    fails(robot, task, Throw(task, GOALS[task], flight_s), Motion(robot))


# By the arm, but not as the task says

HAND_X = T_HOME_TCP[:3, 0] * [1, 1, 0]
LOW = np.array([*HOME_TCP[:2], EDGE / 2])
GRASP = [(0.0, HOME_TCP, 1.0), (1.4, LOW, 1.0), (1.6, LOW, 0.0), (1.9, LOW, 0.0)]
OVER_BIN = np.array([*Bin().center_m, 0.25])


def higher(z_m):
    return LOW + [0, 0, z_m]


def play(robot, task, points, hand=None, duration=3.5, layout=UNDER_HAND):
    """Lead the hand through points; return the rollout, and how long the task looked done."""
    hand = Hand(task) if hand is None else hand
    policy = Motion(robot, through(points))
    rollout = robot.run_policy(
        policy=policy, task=task, duration=duration, on_tick=hand, layout=layout
    )
    assert rollout.fault is None
    return rollout.outcome, hand.looked_done_s


def test_a_cube_lifted_half_way(robot):
    outcome, _ = play(robot, "pick", [*GRASP, (2.6, higher(0.09), 0.0)])
    assert outcome is Outcome.TIMEOUT
    assert touching(robot, "cube_red") == {"left_finger", "right_finger"}
    assert 0.08 < robot.data.xpos[robot.scene.bodies["cube_red"].id][2] - EDGE / 2 < 0.1
    assert (
        play(robot, "pick", [*GRASP, (2.6, higher(0.12), 0.0)], duration=5.0)[0] is Outcome.SUCCESS
    )


@pytest.mark.parametrize("task", ["pick", "place", "stack"])
def test_a_cube_let_go_half_way(robot, task):
    """Low over the table; beside the bin; beside the other cube, which it then leans against."""
    beside = {
        "pick": higher(0.06),
        "place": OVER_BIN + [0, -0.13, -0.10],
        "stack": np.array([0.508, 0.145, 0.06]),
    }[task]
    path = [
        (2.4, higher(0.10), 0.0),
        (3.6, beside + [0, 0, 0.04], 0.0),
        (4.0, beside, 0.0),
        (4.1, beside, 1.0),
    ]
    outcome, _ = play(robot, task, [*GRASP, *path, (4.8, beside + [0, 0, 0.15], 1.0)], duration=6.0)
    assert outcome is Outcome.TIMEOUT
    assert not {"left_finger", "right_finger"} & touching(robot, "cube_red")


@pytest.mark.parametrize("task", ["place", "stack"])
def test_a_cube_that_is_held_in_its_place(robot, task):
    """It is where it belongs, and the fingers still hold it."""
    down = (
        np.array([*Bin().center_m, 0.05])
        if task == "place"
        else np.array([0.55, 0.15, EDGE * 1.5 + 0.001])
    )
    path = [(2.6, higher(0.2), 0.0), (4.2, down + [0, 0, 0.15], 0.0), (5.0, down, 0.0)]
    outcome, _ = play(robot, task, [*GRASP, *path], duration=6.5)
    assert outcome is Outcome.TIMEOUT
    assert {"left_finger", "right_finger"} <= touching(robot, "cube_red")
    cube = robot.data.xpos[robot.scene.bodies["cube_red"].id]
    assert (
        robot.scene.bin.contains(cube)
        if task == "place"
        else np.linalg.norm((cube - on_blue(robot))[:2]) < 0.015
    )


def test_a_cube_that_lies_on_the_fingers(robot):
    """The hand lies on its side, and someone steadies the cube on both closed fingers, high
    above the table.
    """
    aside = HOME_Q + [0, 0, 0, 0, 0, np.pi / 2, np.pi / 4]
    T = dh_forward(aside) @ T_hand_tcp
    upwards = T[:3, 0] * np.sign(T[2, 0])
    hand = Teleport("pick", lambda robot: T[:3, 3] + 0.030 * upwards, at_s=0.0, until_s=3.0)
    hand.put = lambda robot, xyz, _: Hand.put(hand, robot, xyz, T[:3, :3])
    policy = Motion(robot, lambda t: (HOME_Q + min(t / 1.6, 1.0) * (aside - HOME_Q), 0.0))
    fails(robot, "pick", hand, policy, duration=3.0)
    assert touching(robot, "cube_red") == {"left_finger", "right_finger"}


@pytest.mark.parametrize("task", CUBE_TASKS)
def test_a_cube_that_is_pushed(robot, task):
    """By closed fingers, against the other cube, or against the wall of the bin."""
    start, way = (
        (LOW - 0.07 * HAND_X, HAND_X)
        if task != "place"
        else (np.array([0.42, 0.15, EDGE / 2]), np.array([0, 1.0, 0]))
    )
    red = start + 0.07 * way
    xy = np.array(
        [red[:2], [0.60, -0.15], (red + 0.10 * way)[:2] if task != "place" else [0.55, 0.0]]
    )
    layout = Layout(UNDER_HAND.names, xy, np.array([HOME_YAW, 0.0, HOME_YAW]) * (task != "place"))
    points = [
        (0.0, HOME_TCP, 0.0),
        (1.2, start, 0.0),
        (2.2, red + 0.04 * way, 0.0),
        (2.6, red + 0.04 * way, 0.0),
    ]
    outcome, _ = play(robot, task, points, duration=3.6, layout=layout)
    assert outcome is Outcome.TIMEOUT
    assert np.linalg.norm(robot.data.xpos[robot.scene.bodies["cube_red"].id] - red) > 0.04


def test_a_cube_that_someone_pushes_slowly_to_the_hand(robot):
    layout = Layout(
        UNDER_HAND.names,
        np.array([(LOW - 0.05 * HAND_X)[:2], *UNDER_HAND.xy_m[1:]]),
        UNDER_HAND.yaw_rad,
    )
    hand = Creep("reach", 0.04 * HAND_X, at_s=1.6)
    outcome, looked_done_s = play(
        robot, "reach", [(0.0, HOME_TCP, 1.0), (1.4, LOW, 1.0)], hand, 7.0, layout
    )
    assert looked_done_s > 1.0
    assert outcome is Outcome.TIMEOUT


def test_the_other_cube_put_under_the_one_that_is_held(robot):
    path = [
        (2.3, higher(0.043), 0.0),
        (2.7, higher(0.043), 0.0),
        (2.8, higher(0.043), 1.0),
        (3.3, higher(0.2), 1.0),
    ]
    outcome, looked_done_s = play(robot, "stack", [*GRASP, *path], SlideUnder("stack", 2.5), 4.5)
    assert looked_done_s > TASKS["stack"].hold_s + 0.1
    assert outcome is Outcome.TIMEOUT


def test_a_cube_that_the_arm_throws(robot):
    """Released at 0.6 m/s over the bin, where it stays."""
    near, far = OVER_BIN + [0.0, -0.41, 0.0], OVER_BIN + [0.05, 0.17, 0.0]
    swing = [
        (3.1 + 0.7 * s, near + s * (far - near), opening)
        for s, opening in ((0.6, 0.0), (0.63, 1.0), (1.0, 1.0))
    ]
    outcome, looked_done_s = play(
        robot, "place", [*GRASP, (2.9, near, 0.0), (3.1, near, 0.0), *swing], duration=6.0
    )
    assert looked_done_s > TASKS["place"].hold_s + 0.1
    assert outcome is Outcome.TIMEOUT


def test_a_cube_dropped_into_the_bin_is_placed(robot):
    """From 18 cm above the rim, at rest: the task says released above or in the bin, and not how
    high.
    """
    path = [
        (2.5, higher(0.2), 0.0),
        (4.2, OVER_BIN, 0.0),
        (4.6, OVER_BIN, 0.0),
        (4.7, OVER_BIN, 1.0),
    ]
    assert play(robot, "place", [*GRASP, *path], duration=7.5)[0] is Outcome.SUCCESS
