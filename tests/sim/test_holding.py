"""Chunks depart from the reference: a sagging arm that is told to stay does not sink from
inference to inference.
"""

from dataclasses import replace

import numpy as np
import pytest

from helpers.holding import Stays, StaysByAngles, sunk_mm
from helpers.ideal_arm import DT, IdealArm
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.control.executor import Executor
from strands_cosmos3.control.loop import ControlLoop, LoopConfig
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.model import kinematics_of
from strands_cosmos3.robots.panda import FER, HOME_Q, dh_forward
from strands_cosmos3.sim.episode import EpisodeRunner
from strands_cosmos3.sim.film import VideoRecorder
from strands_cosmos3.sim.plant import ALL_ERRORS, PlantErrors
from strands_cosmos3.sim.policy_planner import planner_for
from strands_cosmos3.sim.simulated_arm import ControlConfig
from strands_cosmos3.types import ActionChunk, Observation, Outcome
from strands_cosmos3.worlds.arms import Robot

PAYLOAD = PlantErrors(payload_kg=0.5)
T_HAND_COSMOS = get_embodiment("droid").tool_frame.T_parent_cosmos


@pytest.fixture(scope="module")
def scene():
    return Robot().scene


def staying(rows, backend=None):
    return Cosmos3Policy(backend=backend or Stays(), robot="panda", actions_per_step=rows)


def hold(scene, plant, policy, seconds):
    with policy:
        return Robot(scene=scene, plant=plant).run_policy(policy=policy, duration=seconds)


def assert_held(rollout, most_mm):
    """Sunk by the servos' sag once, and by no more than that later."""
    sunk = sunk_mm(rollout.arrays["q_achieved_rad"], HOME_Q)
    half = len(sunk) // 2
    assert sunk.max() < most_mm
    assert sunk[half:].max() < sunk[half // 2 : half].max() + 0.03
    assert rollout.loop_drift.max_mm == pytest.approx(sunk.max(), abs=0.02)
    assert rollout.counters["anchored_on_measurement"] == 0


@pytest.mark.parametrize(
    "rows", [2, 16, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))]
)
def test_an_unknown_payload_does_not_make_the_arm_sink(scene, rows):
    assert_held(hold(scene, PAYLOAD, staying(rows), 3.0), 0.6)


def test_nor_do_all_errors_together(scene):
    assert_held(hold(scene, ALL_ERRORS, staying(2), 3.0), 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 4, 8, 16])
@pytest.mark.parametrize(("plant", "most_mm"), [(PAYLOAD, 0.6), (ALL_ERRORS, 1.5)])
def test_it_holds_for_a_minute(scene, plant, most_mm, rows):
    assert_held(hold(scene, plant, staying(rows), 60.0), most_mm)


@pytest.mark.parametrize(("steps", "plant", "most_mm"), [(1, ALL_ERRORS, 1.5), (4, PAYLOAD, 0.6)])
def test_a_policy_of_another_make_holds_still_too(scene, steps, plant, most_mm):
    assert_held(hold(scene, plant, StaysByAngles(steps), 1.2), most_mm)


class Commands(Backend):
    """``joint_pos`` rows that say home, whatever is measured."""

    info = BackendInfo(name="commands", requires_images=False, action_space="joint_pos")

    def infer(self, request):
        rows = np.tile([*HOME_Q, 1.0], (request.n_rows, 1))
        return ActionChunk(rows, request.action_space, request.embodiment)


def test_joint_pos_rows_are_commanded_as_they_come(scene):
    rollout = hold(scene, PAYLOAD, staying(4, Commands()), 1.0)
    assert np.abs(rollout.arrays["q_commanded_rad"] - HOME_Q).max() < 1e-9


class Sagging(IdealArm):
    """An arm of the user's own, 2 mrad off its reference in every joint."""

    def joint_state(self):
        return self.q - 2e-3, self.qd.copy(), self.gripper


class Eyes:
    """The planner of ``examples/07_your_own_arm.py``."""

    def __init__(self, policy, arm):
        self.policy, self.arm = policy, arm

    def observe(self, action_prefix):
        q, qd, gripper = self.arm.joint_state()
        return Observation(q, gripper, {}, qd, t_capture_s=self.arm.now_s())

    def plan(self, observation):
        return self.policy.plan(observation, "stay")


@pytest.mark.parametrize("latency_s", [0.0, 0.1])
def test_an_arm_of_ones_own_holds_still_too(latency_s):
    arm = Sagging()
    with staying(None) as policy:
        loop = ControlLoop(
            arm,
            Eyes(policy, arm),
            Executor(FER, DT, HOME_Q),
            LoopConfig(latency_s=latency_s, replan_rows=4),
        )
        for _ in range(200):
            loop.tick()
        loop.close()
    assert loop.counters["requested"] > 12
    assert np.abs(arm.q - HOME_Q).max() < 1e-5


def episode(robot, config, policy, seconds, each_tick=lambda robot: None, instruction="stay"):
    """An episode, and its runner, with settings of the loop that ``run_policy`` does not show."""
    film = VideoRecorder(robot.scene, None, config.hz)
    runner = EpisodeRunner(
        robot,
        planner_for(robot, policy, instruction, film, config.hz),
        None,
        film,
        config,
        round(seconds * config.hz),
        on_tick=lambda: each_tick(robot),
    )
    return runner.run(0, None), runner


def test_anchored_on_the_measurement_it_would_sink_and_only_loop_drift_would_say_so(scene):
    config = LoopConfig(replan_rows=4, anchor_tolerance_rad=1e-9)
    with staying(4) as policy:
        rollout, _ = episode(Robot(scene=scene, plant=PAYLOAD), config, policy, 4.0)
    sunk = sunk_mm(rollout.arrays["q_achieved_rad"], HOME_Q)
    assert sunk[-1] > 3.0
    assert rollout.loop_drift.max_mm == pytest.approx(sunk.max(), abs=0.1)
    assert rollout.to_dict()["loop_drift"]["max_mm"] == rollout.loop_drift.max_mm
    assert rollout.tracking.max_mm < 0.6
    assert rollout.path.max_mm < 0.6
    assert rollout.counters["anchored_on_measurement"] >= 13


def test_the_model_is_told_the_measured_state_and_its_chunk_departs_from_the_reference(scene):
    backend = Stays()
    rollout = hold(scene, PAYLOAD, staying(4, backend), 2.0)
    request, q_measured = backend.seen[-1], rollout.arrays["q_achieved_rad"][-1]
    np.testing.assert_allclose(request.q_rad, q_measured, atol=1e-6)
    np.testing.assert_allclose(
        request.T_base_cosmos, dh_forward(q_measured) @ T_HAND_COSMOS, atol=1e-6
    )
    np.testing.assert_allclose(
        request.limb_anchors["arm"], dh_forward(HOME_Q) @ T_HAND_COSMOS, atol=1e-6
    )
    assert np.abs(request.q_rad - HOME_Q).max() > 5e-4


def test_an_arm_that_was_pushed_away_departs_from_where_it_is(scene):
    """Until the reference has come within the tolerance, chunks depart from the measurement,
    without an action prefix.
    """
    pushed = HOME_Q + np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.3])
    seen, prefixes = [], []

    def push(robot):
        seen.append(robot.data.time)
        if len(seen) == 50:
            robot.data.qpos[scene.arm_qpos] = pushed

    class Prefixed(Stays):
        info = replace(Stays.info, prefix_rows=None)

        def infer(self, request):
            prefixes.append(request.action_prefix)
            return super().infer(request)

    backend = Prefixed()
    with staying(4, backend) as policy:
        rollout, _ = episode(
            Robot(scene=scene), LoopConfig(replan_rows=1, latency_s=0.02), policy, 1.6, push
        )
    off = [
        i
        for i, request in enumerate(backend.seen)
        if np.array_equal(request.limb_anchors["arm"], request.T_base_cosmos)
    ]
    off = [i for i in off if i]  # the first is at home, on its reference
    assert 1 <= len(off) == rollout.counters["anchored_on_measurement"] <= 5
    assert np.abs(backend.seen[off[0]].q_rad - HOME_Q).max() > 0.1
    assert [prefixes[i] for i in off] == [None] * len(off)
    assert prefixes[off[0] - 1] is not None
    # it stays where it was pushed and does not go back
    assert rollout.arrays["q_commanded_rad"][-1, 6] - HOME_Q[6] > 0.05
    assert rollout.loop_drift.max_deg > 5


def hold_hand(robot, until_s, spring_n_m=20_000.0):
    """Let a spring hold the hand from 0.6 s on; return a list of how far the reference leads it."""
    model, data = robot.scene.model, robot.data
    (limb,) = robot.scene.limbs.values()
    hand = model.body(limb.limb.frame).id
    kinematics, grip, leads = kinematics_of(model, limb.limb), [], []

    def step(q_rad, gripper):
        data.xfrc_applied[hand] = 0
        if 0.6 <= data.time < until_s:
            grip.append(data.xpos[hand].copy())
            data.xfrc_applied[hand, :3] = spring_n_m * (grip[0] - data.xpos[hand])
            both = np.stack((q_rad, data.qpos[robot.scene.arm_qpos]))
            leads.append(np.linalg.norm(np.diff(kinematics.forward(both)[:, :3, 3], axis=0)))

    robot.on_step = step
    return leads


def reach(robot, duration_s, **arguments):
    return robot.run_policy(
        policy_config={"backend": "scripted"}, task="reach", duration=duration_s, **arguments
    )


@pytest.mark.parametrize(
    ("robot", "bound_m", "latency"), [("panda", 0.02, 0.3), ("ur5e", 0.05, 0.0)]
)
def test_a_hand_that_is_held_is_waited_for(robot, bound_m, latency):
    """The reference leads it by no more than the bound and its stop; set free, it goes on."""
    arm = Robot(robot, ControlConfig(following_m=bound_m))
    leads = hold_hand(arm, 2.4)
    rollout = reach(arm, 12.0, latency=latency)
    assert bound_m < max(leads) < bound_m + 0.025
    assert np.ptp(leads[len(leads) // 2 :]) < 0.01, "it waits; the spring swings"
    assert rollout.counters["following_waits"] == 1
    assert rollout.success


def assert_given_up(rollout, leads, patience_s):
    assert rollout.counters["following_waits"] == 3
    assert max(leads) < 0.08
    assert rollout.outcome is Outcome.FAULT
    assert "does not follow its reference" in rollout.fault
    assert rollout.final_state == "hold"
    assert 3 * patience_s < rollout.duration_s < 3 * patience_s + 5.0


def test_a_hand_that_stays_held_is_tried_again_and_then_given_up(scene):
    robot = Robot(scene=scene)
    leads = hold_hand(robot, 60.0)
    with Cosmos3Policy(backend="scripted", robot="panda") as policy:
        rollout, _ = episode(
            robot, LoopConfig(patience_s=1.0), policy, 30.0, instruction="reach the red cube"
        )
    assert_given_up(rollout, leads, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["panda", "ur5e"])
def test_a_hand_that_stays_held_is_tried_every_five_seconds(name):
    robot = Robot(name)
    leads = hold_hand(robot, 60.0)
    assert_given_up(reach(robot, 30.0), leads, 5.0)


def test_loop_drift_joins_the_chunks_motions_end_to_end(scene):
    """Each chunk's motion, in the axes of the hand that it departs from, set at the end of the
    one before.
    """
    with staying(2) as policy:
        _, played = episode(Robot(scene=scene), LoopConfig(replan_rows=2), policy, 1.0)
    log, rng = played.log, np.random.default_rng(0)
    q_commanded, chunk_of = log.arrays()["q_commanded_rad"], np.concatenate(log.chunk_of)
    q_commanded += np.cumsum(rng.normal(0, 0.01, q_commanded.shape), axis=0)
    blocks = [tick.block for tick in log.ticks]
    for block, q in zip(
        blocks, np.split(q_commanded, np.cumsum([len(b) for b in blocks])[:-1]), strict=True
    ):
        block.q_rad[:] = q
    joined, before = np.empty((len(q_commanded), 4, 4)), dh_forward(HOME_Q)
    for index, chunk in enumerate(log.chunks):
        steps = np.flatnonzero(chunk_of == index)
        q_reference = q_commanded[max(steps[0] - 1, 0)]
        anchors = {"arm": dh_forward(q_reference + rng.normal(0, 0.2, 7))}
        chunk = replace(chunk, q_reference_rad=q_reference, limb_anchors=anchors)
        log.chunks[index] = chunk
        before = dh_forward(chunk.q_reference_rad) if index == 0 else before
        moved = np.linalg.inv(chunk.limb_anchors["arm"]) @ dh_forward(q_commanded[steps])
        joined[steps] = before @ moved
        before = joined[steps[-1]]
    gap = joined[:, :3, 3] - dh_forward(log.arrays()["q_achieved_rad"])[:, :3, 3]
    assert log.errors()["loop_drift"].mean_mm == pytest.approx(
        np.linalg.norm(gap, axis=1).mean() * 1e3, rel=1e-6
    )
