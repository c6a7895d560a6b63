"""Every task's condition, true and false, by placing things; and how long it must hold."""

from dataclasses import replace

import mujoco
import numpy as np
import pytest

from strands_cosmos3.errors import UnknownNameError
from strands_cosmos3.instruction import parse_instruction
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.sim.scene import Layout, Scene
from strands_cosmos3.sim.tasks import LIFT_M, TASKS, Judge, fingers_touching, get_task

SCENE = Scene()
EDGE = SCENE.cubes["cube_red"].edge_m
AWAY = Layout(tuple(SCENE.cubes), np.array([[0.6, 0.1], [0.6, -0.1], [0.4, -0.2]]), np.zeros(3))


@pytest.fixture
def data():
    data = mujoco.MjData(SCENE.model)
    SCENE.reset(data, AWAY)
    return data


def put(data, cube, xyz, speed=0.0):
    at = SCENE.cube_qpos[cube]
    data.qpos[at : at + 7] = [*xyz, 1, 0, 0, 0]
    data.qvel[SCENE.cube_dof[cube]] = speed
    mujoco.mj_forward(SCENE.model, data)


def holds(name, data, instruction=None):
    task = get_task(name)
    return task.holds(SCENE, data, parse_instruction(instruction or task.instruction))


def tcp(data):
    return data.site_xpos[SCENE.tcp_site].copy()


def grasp(data, cube="cube_red", fingers_m=None):
    """The cube between the fingers of the arm at home: its faces along the hand's axes."""
    at = SCENE.cube_qpos[cube]
    quat = np.zeros(4)
    mujoco.mju_mat2Quat(quat, data.site_xmat[SCENE.tcp_site])
    data.qpos[at : at + 7] = [*tcp(data), *quat]
    data.qpos[SCENE.finger_qpos] = EDGE / 2 - 0.0003 if fingers_m is None else fingers_m
    mujoco.mj_forward(SCENE.model, data)


def test_reach(data):
    assert not holds("reach", data)
    put(data, "cube_red", tcp(data) + [0.0, 0.0, -0.029])
    assert holds("reach", data)
    assert not holds("reach", data, "reach the green cube")
    put(data, "cube_red", tcp(data) + [0.0, 0.031, 0.0])
    assert not holds("reach", data)


def test_pick(data):
    assert not holds("pick", data)
    grasp(data)
    assert fingers_touching(SCENE, data, "cube_red") == 2
    assert tcp(data)[2] - EDGE / 2 > LIFT_M
    assert holds("pick", data)
    assert not holds("pick", data, "pick up the blue cube")
    grasp(data, fingers_m=0.04)
    assert fingers_touching(SCENE, data, "cube_red") == 0
    assert not holds("pick", data)  # in the air, held by nobody
    data.qpos[SCENE.finger_qpos] = [EDGE / 2 - 0.0003, 0.04]
    mujoco.mj_forward(SCENE.model, data)
    assert fingers_touching(SCENE, data, "cube_red") == 1
    assert not holds("pick", data)


def test_pick_counts_from_where_the_cube_lay(data):
    """Held, and just below or above ten centimetres."""
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(400):
        q = HOME_Q + rng.normal(0, 0.25, 7)
        data.qpos[SCENE.arm_qpos] = np.clip(q, [-2.8, -1.7, -2.8, -3.0, -2.8, 0.0, -2.8], [2.8, 1.7, 2.8, -0.1, 2.8, 3.7, 2.8])
        mujoco.mj_forward(SCENE.model, data)
        if tcp(data)[2] < 0.04:
            continue
        grasp(data)
        high = data.xpos[SCENE.cube_body["cube_red"]][2] - EDGE / 2 >= 0.10
        assert holds("pick", data) == (high and fingers_touching(SCENE, data, "cube_red") == 2)
        seen.add(high)
    assert seen == {True, False}


def test_place(data):
    floor = SCENE.bin
    inside = np.array([*floor.center_m, EDGE / 2 + 0.005])
    assert not holds("place", data)
    put(data, "cube_red", inside)
    assert holds("place", data)
    assert not holds("place", data, "place the green cube in the bin")
    put(data, "cube_red", inside, speed=0.02)
    assert not holds("place", data)  # still moving
    put(data, "cube_red", [*floor.center_m, floor.height_m + 0.03])
    assert not holds("place", data)  # above it
    put(data, "cube_red", inside + [0.25, 0.0, 0.0])
    assert not holds("place", data)  # beside it


def test_place_needs_the_fingers_gone(data, monkeypatch):
    put(data, "cube_red", [*SCENE.bin.center_m, EDGE / 2 + 0.005])
    assert holds("place", data)
    monkeypatch.setattr("strands_cosmos3.sim.tasks.fingers_touching", lambda *_: 1)
    assert not holds("place", data)


def test_stack(data):
    below = data.xpos[SCENE.cube_body["cube_blue"]].copy()
    assert not holds("stack", data)
    put(data, "cube_red", below + [0.014, 0.0, EDGE])
    assert holds("stack", data)
    assert not holds("stack", data, "stack the blue cube on the red cube")
    assert not holds("stack", data, "stack the red cube on the green cube")
    for off in ([0.016, 0.0, EDGE], [0.0, 0.0, EDGE + 0.006], [0.0, 0.0, EDGE - 0.006], [0.0, 0.2, 0.0]):
        put(data, "cube_red", below + off)
        assert not holds("stack", data), off
    put(data, "cube_red", below + [0.0, 0.0, EDGE], speed=0.02)
    assert not holds("stack", data)


@pytest.mark.parametrize("name", list(TASKS))
def test_a_condition_must_hold_without_a_break(name, data, monkeypatch):
    now = {"holds": True}
    task = get_task(name)
    judge = Judge(replace(task, holds=lambda *_: now["holds"]), SCENE, parse_instruction(task.instruction))

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


def test_unknown_tasks_list_the_known():
    with pytest.raises(UnknownNameError, match=r"pick, place, reach, stack"):
        get_task("juggle")
