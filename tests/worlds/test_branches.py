"""A branch from a saved state equals the original to the bit: 20 branch points, many in contact,
with and without latency, and with errors of the plant.
"""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("mujoco")

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.sim.plant import ALL_ERRORS
from strands_cosmos3.sim.simulated_arm import ControlConfig, SimulatedArmOptions
from strands_cosmos3.worlds import RunOptions, Start, get_world

POINTS = 10
"""Branch points of each of the two latencies."""


def figures(rollout):
    """Everything of a rollout but wall-clock times."""
    values = rollout.to_dict()
    del values["inference_ms"], values["realtime_factor"]
    return values


def policy_of(session, world):
    arguments = session.policy_arguments()
    return Cosmos3Policy(
        backend=world.expert(), options={"replan_rows": 8, **session.policy_options()}, **arguments
    )


@pytest.mark.parametrize(
    ("latency", "every"),
    [(0.0, 2), (0.2, 2), *(pytest.param(s, 1, marks=pytest.mark.slow) for s in (0.0, 0.2))],
)
def test_a_branch_equals_the_original_to_the_bit(latency, every):
    """From each of ten states, or from every other one."""
    world = get_world("table")
    with world.open(task="pick") as session, policy_of(session, world) as policy:
        states, contacts = [], []
        tick = 0

        def save(session):
            nonlocal tick
            tick += 1
            if tick % 18 == 0 and len(states) < POINTS:
                states.append(session.save())
                contacts.append(any(force.size for force in _cube_forces(session)))

        session.reset(Start("pick", seed=3))
        options = RunOptions(latency=latency, on_tick=save)
        original = session.run(policy, options)
        assert original.success
        assert len(states) == POINTS
        assert sum(contacts) > 2
        assert {True, False} == set(contacts[::every]), "some branch points are in contact"
        for state in reversed(states[::every]):
            session.reset(Start("place", seed=11))  # another episode in between
            session.restore(state)
            branch = session.resume(policy, dataclasses.replace(options, on_tick=None))
            assert figures(branch) == figures(original)
            for name, values in original.arrays.items():
                np.testing.assert_array_equal(branch.arrays[name], values, err_msg=name)


def _cube_forces(session):
    scene, data = session.robot.scene, session.robot.data
    fingers = {body for limb in scene.limbs.values() for body in limb.finger_bodies}
    forces = scene.forces_on(data, scene.bodies["cube_red"].id)
    return [force for body, force in forces.items() if body in fingers]


@pytest.mark.parametrize(
    "arm",
    [
        SimulatedArmOptions(plant=ALL_ERRORS, compensate="known"),
        SimulatedArmOptions(control=ControlConfig(feed_forward="computed_torque")),
    ],
)
def test_delayed_controls_and_computed_torque_are_restored(arm):
    world = get_world("table")
    with world.open(task="reach", arm=arm) as session, policy_of(session, world) as policy:
        states = []
        session.reset(Start("reach", seed=1))
        options = RunOptions(
            duration_s=1.2,
            on_tick=lambda session: states.append(session.save()) if not states else None,
        )
        original = session.run(policy, options)
        session.restore(states[0])
        branch = session.resume(policy, dataclasses.replace(options, on_tick=None))
        np.testing.assert_array_equal(
            branch.arrays["q_achieved_rad"], original.arrays["q_achieved_rad"]
        )
        assert figures(branch) == figures(original)


def test_chunks_that_are_executed_one_by_one_are_the_run():
    """Without latency; and from a state between two chunks they go on as before."""
    world = get_world("table")
    with world.open(task="pick") as session, policy_of(session, world) as policy:
        start = Start("pick", seed=3)
        session.reset(start)
        rollout = session.run(policy)
        session.reset(start)
        policy.reset(start.seed)
        executed, states = [], []
        while not (executed and executed[-1].ended):
            if len(executed) == 3:
                states.append((session.save(policy), session.robot.data.qpos.copy()))
            plan = policy.plan(session.observation(images=False), "pick up the red cube")
            executed.append(session.execute(plan, policy.replan_rows))
        assert executed[-1].success
        duration_s = sum(part.duration_s for part in executed)
        end = session.robot.data.qpos[session.robot.scene.arm_qpos].copy()
        steps = round(duration_s * 600)
        np.testing.assert_array_equal(end, rollout.arrays["q_achieved_rad"][steps - 1])
        state, qpos = states[0]
        session.restore(state, policy)
        np.testing.assert_array_equal(session.robot.data.qpos, qpos)
        again = []
        while not (again and again[-1].ended):
            plan = policy.plan(session.observation(images=False), "pick up the red cube")
            again.append(session.execute(plan, policy.replan_rows))
        assert again == executed[3:]
        np.testing.assert_array_equal(session.robot.data.qpos[session.robot.scene.arm_qpos], end)


def test_what_cannot_be_saved_says_so():
    world = get_world("table")
    with world.open(task="reach") as session, policy_of(session, world) as policy:
        session.reset(Start("reach"))
        with pytest.raises(ConfigError, match="no state of a run"):
            session.resume(policy)
        options = RunOptions(duration_s=0.1, realtime=True, on_tick=lambda session: session.save())
        with pytest.raises(ConfigError, match="real time"):
            session.run(policy, options)
