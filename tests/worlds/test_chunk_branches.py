"""Chunks that are executed from one saved state, physics only: what reinforcement learning
compares.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("mujoco")

import mujoco

from strands_cosmos3.backends.base import WrappedBackend
from strands_cosmos3.control.executor import ExecutorState
from strands_cosmos3.errors import ControlError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.training.rl.exploration import displaced
from strands_cosmos3.worlds import Start, get_world
from strands_cosmos3.worlds.table import potential
from strands_cosmos3.worlds.table import world as table_world
from strands_cosmos3.worlds.table.grammar import Verb
from strands_cosmos3.worlds.table.tasks import cube_state
from strands_cosmos3.worlds.table.world import TableVariation

TABLE = get_world("table")
PICK = "pick up the red cube"


@pytest.fixture(scope="module")
def driven():
    with TABLE.open(task="pick") as session:
        options = {"replan_rows": 16, **session.policy_options()}
        with Cosmos3Policy(
            backend=TABLE.expert(), options=options, **session.policy_arguments()
        ) as policy:
            yield session, policy


def begin(driven, chunks: int = 0, **variation) -> None:
    session, policy = driven
    session.reset(Start("pick", 3, 0, PICK, TableVariation(**variation)))
    policy.reset(3)
    for _ in range(chunks):
        session.execute(policy.plan(session.observation(images=False), PICK))


def outcome(session) -> tuple[np.ndarray, ...]:
    """Everything that a chunk left: the physics, contact forces and the potential."""
    data, scene = session.robot.data, session.robot.scene
    forces = [scene.forces_on(data, body.id) for body in scene.bodies.values()]
    flat = np.array([v for by_body in forces for force in by_body.values() for v in force])
    state = np.array([data.time, *data.qpos, *data.qvel, *data.ctrl, *data.qacc_warmstart])
    return state, flat, np.array([session.potential()])


def test_a_branch_with_the_original_chunk_is_the_original_with_contacts(driven):
    session, policy = driven
    begin(driven)
    touched = 0
    for _ in range(5):
        state, remembered = session.save(policy), repr(policy.snapshot())
        plan = policy.plan(session.observation(images=False), PICK)
        original, after = session.execute(plan), outcome(session)
        touched += after[1].size > 9
        session.execute(policy.plan(session.observation(images=False), PICK), 3)  # another branch
        session.restore(state, policy)
        assert repr(policy.snapshot()) == remembered
        again = policy.plan(session.observation(images=False), PICK)
        # success is seen at a look; where there is none, fewer looks change nothing
        assert session.execute(again, ticks=1 if original.success else 4) == original
        for ours, theirs in zip(outcome(session), after, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert original.rows == 16 or original.success
    assert touched, "some chunks end with the cube between the fingers"


def test_rows_that_were_executed_are_counted_up_to_a_goal_and_a_fault(driven):
    session, policy = driven
    begin(driven)
    rows = [session.execute(policy.plan(session.observation(images=False), PICK), 3).rows]
    ended = session.execute(policy.plan(session.observation(images=False), PICK))
    while not ended.ended:
        rows.append(ended.rows)
        ended = session.execute(policy.plan(session.observation(images=False), PICK))
    assert set(rows) == {3, 16}
    assert ended.success
    assert ended.rows == -(-ended.duration_s * 15 // 1) < 16
    begin(driven)
    plan = policy.plan(session.observation(images=False), PICK)
    moved = session.robot.execute

    def execute(block, reference):
        if session.robot.now_s() > 0.45:
            raise ControlError("it is stuck")
        moved(block, reference)

    session.robot.execute = execute
    try:
        fault = session.execute(plan)
    finally:
        del session.robot.execute
    assert fault.fault == "it is stuck"
    assert fault.rows == 8, "the row on the way counts"
    assert session.robot.executor.state is ExecutorState.FAULT


class Deeper(WrappedBackend):
    """The expert, 15 cm lower at the end of each chunk."""

    def infer(self, request):
        chunk, offset = self._inner.infer(request), np.array([0, 0, 0.15, 0, 0, 0])
        rows = displaced(chunk, request.limb_poses, {"arm": offset}, len(chunk.action))
        return replace(chunk, action=rows)


def test_a_chunk_that_presses_the_hand_on_the_table_is_told_from_one_that_does_not(driven):
    session, policy = driven
    begin(driven)
    plan = policy.plan(session.observation(images=False), PICK)
    assert session.execute(plan, ticks=4).touched == 0
    arguments = session.policy_arguments() | {"options": session.policy_options()}
    with Cosmos3Policy(backend=Deeper(TABLE.expert()), **arguments) as pressing:
        touched = [
            session.execute(pressing.plan(session.observation(images=False), PICK), ticks=4).touched
            for _ in range(4)
        ]
    assert 0 < max(touched) <= 1


def test_a_branch_is_cheap(driven):
    session, policy = driven
    begin(driven, chunks=1)
    state = session.save(policy)
    plan = policy.plan(session.observation(images=False), PICK)
    costs_s = []
    for _ in range(8):
        before_s = time.process_time()
        session.restore(state, policy)
        session.execute(plan, ticks=4)
        session.potential()
        costs_s.append(time.process_time() - before_s)
    assert min(costs_s) < 0.060


def test_the_potential_rises_with_the_task_and_falls_with_a_push(driven):
    session, policy = driven
    begin(driven)
    values, ended = [session.potential()], False
    while not ended:
        ended = session.execute(policy.plan(session.observation(images=False), PICK)).ended
        values.append(session.potential())
    assert values[-1] == pytest.approx(2.0, abs=0.1)
    assert np.diff(values).min() > -0.05, "no step of the expert is punished"
    begin(driven)
    before, body = session.potential(), session.robot.scene.bodies["cube_green"]
    session.robot.data.qpos[body.qpos] += 0.05
    session.robot.data.xpos[body.id, 0] += 0.05
    assert session.potential() == pytest.approx(before - 1.0)


def test_the_plain_views_are_those_without_the_mount(driven):
    session, _ = driven
    begin(driven, chunks=1)
    plain = session.draw()["wrist"]
    begin(driven, chunks=1, mount=7)
    moved = session.draw()["wrist"]
    assert (moved != plain).any()
    np.testing.assert_array_equal(session.plain_views()["wrist"], plain)
    np.testing.assert_array_equal(session.draw()["wrist"], moved)
    state = session.save()
    begin(driven)
    session.restore(state)
    np.testing.assert_array_equal(session.draw()["wrist"], moved)
    begin(driven, light=0.5)
    assert session.plain_views() is None


def test_a_verb_without_a_potential_has_none(driven, monkeypatch):
    monkeypatch.setattr(table_world, "POTENTIAL_VERBS", (Verb.REACH,))
    session, _ = driven
    begin(driven)
    assert session.potential() is None


@pytest.mark.parametrize(("task", "text", "most"), [
    ("reach", "reach the red cube", 0.0),
    ("place", "place the red cube in the bin", 5.0),
    ("stack", "stack the red cube on the blue cube", 5.0),
])  # fmt: skip
def test_other_tasks_have_potentials_that_their_experts_climb(driven, task, text, most):
    session, policy = driven
    session.reset(Start(task, 3, 0, text))
    policy.reset(3)
    first, ended = session.potential(), False
    while not ended:
        ended = session.execute(policy.plan(session.observation(images=False), text)).ended
    assert session.potential() == pytest.approx(most, abs=0.5)
    assert session.potential() > first + 1.0


@pytest.mark.parametrize(("task", "text", "onto"), [
    ("place", "place the red cube in the bin", None),
    ("stack", "stack the red cube on the blue cube", "cube_blue"),
])  # fmt: skip
def test_lowering_over_the_target_costs_nothing(driven, monkeypatch, task, text, onto):
    session, _ = driven
    session.reset(Start(task, 3, 0, text, TableVariation()))
    data, scene = session.robot.data, session.robot.scene
    target_m = scene.bin.center_m if onto is None else data.xpos[scene.bodies[onto].id][:2]
    lying = cube_state(scene, data, "cube_red")

    def potential_at(offset_m: float, height_m: float) -> float:
        position_m = np.array([target_m[0] + offset_m, target_m[1], height_m])
        cube = replace(lying, position_m=position_m, gripped=True, robot_touches=True)
        monkeypatch.setattr(potential, "cube_state", lambda *_: cube)
        return session.potential()

    assert potential_at(0.0, 0.06) == pytest.approx(4.0)
    assert potential_at(0.0, 0.15) == pytest.approx(4.0)
    assert potential_at(0.25, 0.06) < potential_at(0.25, 0.15) - 0.4


def test_a_bar_has_none():
    with TABLE.open("dual_panda", task="lift_bar") as session:
        session.reset(Start("lift_bar"))
        assert session.potential() is None


def test_a_cube_that_is_pushed_against_another_is_not_stacked(driven):
    session, _ = driven
    session.reset(Start("stack", 3, 0, "stack the red cube on the blue cube", TableVariation()))
    data, scene = session.robot.data, session.robot.scene
    red, blue = scene.bodies["cube_red"], scene.bodies["cube_blue"]
    edge_m = scene.cubes["cube_red"].edge_m

    def potential_at(offset_m) -> float:
        pose = slice(red.qpos, red.qpos + 7)
        data.qpos[pose] = np.concatenate([data.xpos[blue.id] + offset_m, data.xquat[blue.id]])
        mujoco.mj_forward(session.robot.model, data)
        assert blue.id in scene.forces_on(data, red.id)
        return session.potential()

    turned = data.xmat[blue.id].reshape(3, 3)
    assert potential_at(turned @ [edge_m - 5e-4, 0, 0]) < 0
    assert potential_at(np.array([0, 0, edge_m - 5e-4])) == pytest.approx(5.0)
