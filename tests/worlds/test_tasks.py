"""Every task's condition, true and false, by placing things and naming their past; and how long
it must hold.
"""

from dataclasses import replace

import mujoco
import numpy as np
import pytest

from strands_cosmos3.errors import UnknownNameError
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.sim.scene import Layout
from strands_cosmos3.worlds.table.grammar import parse_instruction
from strands_cosmos3.worlds.table.scene import TableScene
from strands_cosmos3.worlds.table.tasks import (
    DISTURBED_M,
    LIFT_M,
    RELEASE_M_S,
    CubeHistory,
    Situation,
    TableJudge,
    cube_state,
    get_task,
)

CUBE_TASKS = ("reach", "pick", "place", "stack")
SCENE = TableScene()
EDGE = SCENE.cubes["cube_red"].edge_m
AWAY = Layout(tuple(SCENE.cubes), np.array([[0.6, 0.1], [0.6, -0.1], [0.4, -0.2]]), np.zeros(3))
IN_BIN = np.array([*SCENE.bin.center_m, SCENE.bin.wall_m + EDGE / 2])


@pytest.fixture
def data():
    data = mujoco.MjData(SCENE.model)
    SCENE.reset(data, AWAY)
    return data


def put(data, cube, xyz, speed=0.0):
    at = SCENE.bodies[cube].qpos
    data.qpos[at : at + 7] = [*xyz, 1, 0, 0, 0]
    data.qvel[SCENE.bodies[cube].dof] = 0.0
    settle(data)
    data.qvel[SCENE.bodies[cube].dof] = speed
    mujoco.mj_forward(SCENE.model, data)


def settle(data, steps=60):
    for _ in range(steps):
        mujoco.mj_step(SCENE.model, data)


def where(data, cube="cube_red"):
    return data.xpos[SCENE.bodies[cube].id].copy()


def holds(name, data, instruction=None, **past):
    task = get_task(name)
    goal = parse_instruction(instruction or task.instruction)
    now = cube_state(SCENE, data, goal.cube)
    history = CubeHistory(now=now, **past)
    return task.holds(Situation(SCENE, goal, data, now, history))


def brought(data, release_m, speed=0.1, taken_m=(0.6, 0.1, EDGE / 2)):
    """The past of a cube that two fingers took and released."""
    released = replace(
        cube_state(SCENE, data, "cube_red"), position_m=np.array(release_m), speed_m_s=speed
    )
    return {"taken_m": np.array(taken_m), "released": released, "base_m": where(data, "cube_blue")}


def tcp(data):
    return data.site_xpos[SCENE.only.tcp_site].copy()


def grasp(data, cube="cube_red", fingers_m=None):
    """The cube between the fingers of the arm at home: its faces along the hand's axes."""
    at = SCENE.bodies[cube].qpos
    quat = np.zeros(4)
    mujoco.mju_mat2Quat(quat, data.site_xmat[SCENE.only.tcp_site])
    data.qpos[at : at + 7] = [*tcp(data), *quat]
    data.qpos[SCENE.finger_qpos] = EDGE / 2 - 0.0003 if fingers_m is None else fingers_m
    data.ctrl[SCENE.only.gripper_actuator] = 0.0
    mujoco.mj_forward(SCENE.model, data)


def test_reach_needs_a_cube_that_lay_there_before(data):
    settle(data)
    lay = where(data)
    assert not holds("reach", data, alone_m=lay)
    data.site_xpos[SCENE.only.tcp_site] = lay + [0.0, 0.0, 0.029]
    assert holds("reach", data, alone_m=lay)
    assert not holds("reach", data, "reach the green cube", alone_m=lay)
    assert not holds("reach", data)  # never seen apart from the hand
    assert not holds("reach", data, alone_m=lay + [DISTURBED_M + 0.001, 0.0, 0.0])
    data.site_xpos[SCENE.only.tcp_site] = lay + [0.0, 0.0, 0.031]
    assert not holds("reach", data, alone_m=lay)
    put(data, "cube_red", lay, speed=0.02)
    data.site_xpos[SCENE.only.tcp_site] = where(data)
    assert not holds("reach", data, alone_m=lay)  # sliding past
    put(data, "cube_red", lay)
    data.qpos[SCENE.bodies["cube_red"].qpos + 2] += 0.01
    mujoco.mj_forward(SCENE.model, data)
    data.site_xpos[SCENE.only.tcp_site] = where(data)
    assert not holds("reach", data, alone_m=where(data))  # lies on nothing


def test_pick_needs_two_fingers_that_took_the_cube(data):
    grasp(data)
    low = tcp(data) - [0, 0, LIFT_M + 0.001]
    assert cube_state(SCENE, data, "cube_red").gripped
    assert holds("pick", data, held=True, taken_m=low)
    assert not holds("pick", data, held=True, taken_m=low + [0, 0, 0.002])  # half lifted
    assert not holds("pick", data, "pick up the blue cube", held=True, taken_m=low)
    assert not holds("pick", data, held=False, taken_m=low)
    assert not holds("pick", data)
    grasp(data, fingers_m=0.04)
    assert not holds("pick", data, held=True, taken_m=low)  # in the air, held by nobody
    data.qpos[SCENE.finger_qpos] = [EDGE / 2 - 0.0003, 0.04]
    mujoco.mj_forward(SCENE.model, data)
    assert not cube_state(SCENE, data, "cube_red").gripped
    assert not holds("pick", data, held=True, taken_m=low)  # one finger


def test_pick_needs_nothing_else_to_touch_the_cube(data):
    grasp(data)
    low = np.zeros(3)
    assert holds("pick", data, held=True, taken_m=low)
    put(data, "cube_blue", tcp(data) + [0, 0, -EDGE + 0.0003])
    grasp(data)
    at = SCENE.bodies["cube_blue"].qpos
    data.qpos[at : at + 3] = tcp(data) - [0, 0, EDGE - 0.0003]
    data.qpos[at + 3 : at + 7] = data.qpos[SCENE.bodies["cube_red"].qpos + 3 :][:4]
    mujoco.mj_forward(SCENE.model, data)
    assert SCENE.bodies["cube_blue"].id in cube_state(SCENE, data, "cube_red").force_n
    assert not holds("pick", data, held=True, taken_m=low)


def test_place(data):
    put(data, "cube_red", IN_BIN)
    over = [*SCENE.bin.center_m, 0.15]
    assert holds("place", data, **brought(data, over))
    assert not holds("place", data)
    assert not holds("place", data, "place the green cube in the bin", **brought(data, over))
    assert not holds("place", data, **brought(data, over, speed=RELEASE_M_S + 0.01))  # thrown
    # released elsewhere, and pushed or thrown
    assert not holds("place", data, **brought(data, [0.42, 0.2, 0.15]))
    assert not holds("place", data, **brought(data, over, taken_m=IN_BIN))  # it lay there
    put(data, "cube_red", IN_BIN, speed=0.02)
    assert not holds("place", data, **brought(data, over))  # still moving
    put(data, "cube_red", IN_BIN + [0.25, 0.0, 0.0])
    assert not holds("place", data, **brought(data, over))  # beside it
    put(data, "cube_red", IN_BIN)
    data.qpos[SCENE.bodies["cube_red"].qpos + 2] += 0.01
    mujoco.mj_forward(SCENE.model, data)
    assert not holds("place", data, **brought(data, over))  # lies on nothing


@pytest.mark.parametrize("name", ["place", "stack"])
def test_place_and_stack_need_the_robot_gone(name, data):
    settle(data)
    goal = IN_BIN if name == "place" else where(data, "cube_blue") + [0, 0, EDGE]
    put(data, "cube_red", goal)
    task, past = get_task(name), brought(data, goal)
    aim = parse_instruction(task.instruction)
    now = cube_state(SCENE, data, "cube_red")
    for touches in (False, True):
        at = Situation(SCENE, aim, data, replace(now, robot_touches=touches), CubeHistory(**past))
        assert task.holds(at) is not touches


@pytest.mark.parametrize("part", ["left_finger", "right_finger", "hand", "link5", "link3"])
def test_every_part_of_the_robot_touches(data, part):
    body = SCENE.model.body(part).id
    geom = int(
        np.flatnonzero((SCENE.model.geom_bodyid == body) & (SCENE.model.geom_contype > 0))[-1]
    )
    data.qpos[SCENE.bodies["cube_red"].qpos :][:3] = data.geom_xpos[geom]
    mujoco.mj_forward(SCENE.model, data)
    state = cube_state(SCENE, data, "cube_red")
    assert body in state.force_n
    assert state.robot_touches
    assert not state.supported


def test_stack(data):
    settle(data)
    below = where(data, "cube_blue")
    past = brought(data, below + [0, 0, EDGE + 0.01])
    put(data, "cube_red", below + [0.014, 0.0, EDGE])
    assert holds("stack", data, **past)
    assert not holds("stack", data)
    assert not holds("stack", data, "stack the blue cube on the red cube", **past)
    assert not holds("stack", data, "stack the red cube on the green cube", **past)
    assert not holds("stack", data, **brought(data, below + [0.021, 0, EDGE]))
    assert not holds("stack", data, **brought(data, below + [0, 0, EDGE], speed=RELEASE_M_S + 0.01))
    assert not holds(
        "stack", data, **brought(data, below + [0, 0, EDGE], taken_m=below + [0, 0, EDGE])
    )
    put(data, "cube_red", below + [0.016, 0.0, EDGE])
    assert not holds("stack", data, **past)
    put(data, "cube_red", below + [0.0, 0.0, EDGE])
    data.qpos[SCENE.bodies["cube_red"].qpos + 2] += 0.006
    mujoco.mj_forward(SCENE.model, data)
    assert not holds("stack", data, **past)
    put(data, "cube_red", below + [0.0, 0.0, EDGE], speed=0.02)
    assert not holds("stack", data, **past)


def test_stack_needs_a_base_that_lies_on_something(data):
    settle(data)
    high = np.array([0.6, -0.2, 0.3])
    at = SCENE.bodies["cube_blue"].qpos
    put(data, "cube_red", where(data, "cube_blue") + [0, 0, EDGE])
    past = brought(data, where(data))
    assert holds("stack", data, **past)
    for cube, up in (("cube_blue", 0.0), ("cube_red", EDGE - 2e-3)):
        at = SCENE.bodies[cube].qpos
        data.qpos[at : at + 3] = high + [0, 0, up]
    mujoco.mj_forward(SCENE.model, data)
    assert cube_state(SCENE, data, "cube_red").supported
    assert not holds("stack", data, **brought(data, where(data)))


def history(states, tcp_m=(1.0, 1.0, 1.0)):
    past = CubeHistory()
    for state in states:
        past.update(state, np.array(tcp_m))
    return past


@pytest.fixture
def lying(data):
    settle(data)
    return cube_state(SCENE, data, "cube_red")


def later(state, time_s, up_m=0.0, **changes):
    return replace(
        state, time_s=state.time_s + time_s, position_m=state.position_m + [0, 0, up_m], **changes
    )


AIR = {"supported": False, "robot_touches": True}


def test_a_grip_counts_where_the_cube_lay(lying):
    """Taken from the table, lifted, released; a short slip is no release."""
    taken = [
        lying,
        later(lying, 0.02, gripped=True),
        later(lying, 0.04, 0.005, gripped=True, **AIR),
    ]
    past = history(taken)
    assert past.held
    np.testing.assert_allclose(past.taken_m, lying.position_m)
    past = history(
        [*taken, later(lying, 0.06, 0.01, **AIR), later(lying, 0.10, 0.015, gripped=True, **AIR)]
    )
    assert past.held
    assert past.released is None
    past = history([*taken, *(later(lying, 0.04 + 0.02 * k, 0.005, **AIR) for k in range(1, 8))])
    assert not past.held
    assert past.released.position_m[2] == pytest.approx(lying.position_m[2] + 0.005)


def test_a_cube_caught_in_the_air_was_not_taken(lying):
    flying = [later(lying, 0.02 * k, 0.04 * k, speed_m_s=2.0, **AIR) for k in range(1, 5)]
    past = history([lying, *flying, later(lying, 0.1, 0.18, gripped=True, **AIR)])
    assert not past.held
    assert past.taken_m is None


def test_a_jump_starts_the_history_again(lying):
    taken = [lying, later(lying, 0.02, gripped=True)]
    assert history(taken).held
    past = history([*taken, later(lying, 0.04, 0.03, gripped=True, **AIR)])  # 1.5 m/s at rest
    assert not past.held
    assert past.lay_m is None
    assert history([*taken, later(lying, 0.04, 0.03, gripped=True, speed_m_s=1.4, **AIR)]).held


def test_a_cube_is_alone_with_the_hand_out_of_reach(lying):
    assert history([lying]).alone_m is not None
    assert history([lying], lying.position_m + [0, 0, 0.029]).alone_m is None
    assert history([replace(lying, speed_m_s=0.02)]).alone_m is None


@pytest.mark.parametrize("name", CUBE_TASKS)
def test_a_condition_must_hold_without_a_break(name, data):
    now = {"holds": True}
    task = get_task(name)
    judge = TableJudge(
        replace(task, holds=lambda _: now["holds"]), SCENE, parse_instruction(task.instruction)
    )

    def first_success(from_s):
        for tick in range(200):
            data.time = from_s + tick * 0.01
            if judge.succeeded(data):
                return data.time - from_s
        return None

    assert first_success(0.0) == pytest.approx(task.hold_s, abs=0.0101)
    now["holds"] = False
    assert not judge.succeeded(data)
    now["holds"] = True
    assert first_success(10.0) == pytest.approx(task.hold_s, abs=0.0101)
    assert first_success(0.0) == pytest.approx(task.hold_s, abs=0.0101)  # a new episode


def test_a_new_episode_forgets_the_last_one(data):
    settle(data)
    histories = []
    task = replace(get_task("pick"), holds=lambda at: histories.append(at.history) or False)
    judge = TableJudge(task, SCENE, parse_instruction(task.instruction))
    judge.succeeded(data)
    assert histories[-1].lay_m is not None
    SCENE.reset(data, AWAY, HOME_Q)
    data.qpos[SCENE.bodies["cube_red"].qpos + 2] = 0.3
    mujoco.mj_forward(SCENE.model, data)
    judge.succeeded(data)
    assert histories[-1].lay_m is None


def test_unknown_tasks_list_the_known():
    with pytest.raises(UnknownNameError, match=r"pick, place, reach, stack"):
        get_task("juggle")
