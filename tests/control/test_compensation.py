"""Compensation of a known delay, payload and friction, and their identification from a short
motion.
"""

from functools import cache

import numpy as np
import pytest

from motions import BRISK_DEG, BRISK_M, recording_of_motion
from strands_cosmos3.control.executor import Executor, ReferenceBlock
from strands_cosmos3.control.identification import SWAY_RAD, fit, identify, sway
from strands_cosmos3.control.trajectory import JointState
from strands_cosmos3.errors import ControlError, Cosmos3Error, InputError
from strands_cosmos3.robots.model import load_panda
from strands_cosmos3.robots.panda import FER, HOME_Q, T_hand_tcp, dh_forward
from strands_cosmos3.robots.servo import (
    NO_COMPENSATION,
    Compensation,
    FeedForward,
    JointServo,
    Payload,
)
from strands_cosmos3.sim.plant import ALL_ERRORS, PlantErrors
from strands_cosmos3.sim.simulated_arm import ControlConfig
from strands_cosmos3.types import JointTrajectory
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.scene import TableScene

SCENE = TableScene()
BOTH = pytest.mark.parametrize("feed_forward", ["velocity", "computed_torque"])


def robot(plant=None, compensation=NO_COMPENSATION, feed_forward="velocity"):
    return Robot(
        control=ControlConfig(feed_forward=feed_forward, compensation=compensation),
        scene=SCENE,
        plant=plant,
    )


@cache
def brisk_motions(chunks):
    rng = np.random.default_rng(0)
    return [recording_of_motion(rng, BRISK_M, BRISK_DEG) for _ in range(chunks)]


def brisk(arm, chunks):
    """Mean and greatest tracking error in mm over brisk chunks, replayed in the closed loop."""
    rollouts = [
        arm.run_policy(
            policy_config={"embodiment": "droid", "backend": "replay", "model": motion},
            duration=60.0,
        )
        for motion in brisk_motions(chunks)
    ]
    return np.mean([r.tracking.mean_mm for r in rollouts]), max(r.tracking.max_mm for r in rollouts)


def hold(arm, steps=900):
    """How far in mm the hand ends from where it is held."""
    zeros = np.zeros((steps, 7))
    block = ReferenceBlock(
        np.tile(HOME_Q, (steps, 1)), zeros, zeros, np.ones(steps), np.full(steps, np.nan)
    )
    arm.reset(0)
    q, _ = arm.execute(block, JointState.at_rest(HOME_Q))
    return np.linalg.norm((dh_forward(q[-1]) - dh_forward(HOME_Q))[:3, 3]) * 1e3


@BOTH
@pytest.mark.parametrize("chunks", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_a_known_delay_is_led(feed_forward, chunks):
    late = PlantErrors(actuation_delay_s=0.010)
    mean_mm, max_mm = brisk(robot(late, Compensation(delay_s=0.010), feed_forward), chunks)
    assert mean_mm < 0.6
    assert max_mm < 2.5
    assert brisk(robot(late, NO_COMPENSATION, feed_forward), 1)[0] > 2.0


def test_the_lead_is_the_reference_after_the_delay():
    jerk_free = Compensation(delay_s=0.02)
    q0, qd0, qdd = HOME_Q, np.linspace(-1, 1, 7), np.linspace(2, -3, 7)
    q, qd = jerk_free.lead(q0, qd0, qdd)
    np.testing.assert_allclose(q, q0 + 0.02 * qd0 + qdd * 0.02**2 / 2)
    np.testing.assert_allclose(qd, qd0 + 0.02 * qdd)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
def test_a_lead_stays_inside_the_range_and_the_velocity_limit(delay_s):
    """Led by 0.1 s, it would be 0.09 rad beyond the range as the joint brakes for its end."""
    start, dt_s, known = (
        np.where(np.arange(7) == 6, FER.q_max - 1.5, HOME_Q),
        1 / 600,
        Compensation(delay_s),
    )
    executor, sent = Executor(FER, dt_s, start), start
    executor.accept(
        JointTrajectory(np.where(np.arange(7) == 6, FER.q_max - 1e-3, start)[None], np.array([0.1]))
    )
    outside = changed = 0
    for _ in range(60):
        block = executor.advance(20)
        rows = block.q_rad, block.qd_rad_s, block.qdd_rad_s2
        q, qd, clipped = known.lead_within(rows, FER, dt_s, sent)
        assert FER.outside(q.max(axis=0)) is FER.outside(q.min(axis=0)) is None
        assert (np.abs(qd) <= FER.velocity).all()
        assert (
            np.abs(np.diff(q, axis=0, prepend=sent[None])) <= FER.velocity * dt_s * 1.0011
        ).all()
        np.testing.assert_allclose(q[~clipped], known.lead(*rows)[0][~clipped], atol=2e-6)
        outside = max(outside, (known.lead(*rows)[0] - FER.q_max).max())
        changed, sent = changed + clipped.sum(), q[-1]
    assert (outside > 0.05) == (delay_s > 0.05)
    assert (changed > 0) == (delay_s > 0)
    np.testing.assert_allclose(sent, executor.reference.q_rad, atol=1e-9)


@pytest.mark.parametrize("speed", [0.1, 1.0])
def test_the_simulated_servo_keeps_a_lead_inside_the_range_and_the_velocity_limit(speed):
    arm = robot(compensation=Compensation(delay_s=0.1), feed_forward="none")
    start, ctrl = np.where(np.arange(7) == 6, FER.q_max - 1.5, HOME_Q), []
    arm.reset(0, q_rad=start)
    arm.on_step = lambda *_: ctrl.append(arm.data.ctrl[arm.scene.arm_actuators].copy())
    arm.executor.accept(
        JointTrajectory(
            np.where(np.arange(7) == 6, FER.q_max - 1e-3, start)[None], np.array([0.6 / speed])
        )
    )
    for _ in range(30):
        before, block = arm.executor.reference, arm.executor.advance(20)
        arm.execute(block, before)
    assert ("lead_clipped" in arm.counters()) == (speed == 1.0)
    assert (np.abs(np.diff(ctrl, axis=0)) <= FER.velocity * arm.dt_s * 1.0011).all()


@pytest.mark.parametrize("feed_forward", list(FeedForward))
def test_a_known_payload_is_carried(feed_forward):
    plant = PlantErrors(payload_kg=1.0)
    sunk = hold(robot(plant, feed_forward=feed_forward))
    carried = hold(robot(plant, Compensation(payload_kg=1.0), feed_forward))
    assert sunk > 0.8
    assert carried < 0.02
    # it pushes upwards
    assert hold(robot(None, Compensation(payload_kg=1.0), feed_forward)) == pytest.approx(
        sunk, rel=0.05
    )


def test_a_payload_weighs_as_its_height_changes():
    """The torque is the gradient of m g h, by the Denavit-Hartenberg product, which the
    payload's Jacobian does not use.
    """
    q, step = HOME_Q + np.linspace(-0.4, 0.4, 7), 1e-6

    def height_m(at):
        return (dh_forward(at) @ T_hand_tcp)[..., 2, 3]

    gradient = (height_m(q + step * np.eye(7)) - height_m(q - step * np.eye(7))) / (2 * step)
    np.testing.assert_allclose(
        Payload(load_panda(), 0.7).torque(q[None])[0], 0.7 * 9.81 * gradient, atol=1e-6
    )


def test_a_payload_that_falls_weighs_nothing():
    model, q = load_panda(), HOME_Q[None]
    payload, at_rest = Payload(model, 0.7), Payload(model, 0.7).torque(q)
    np.testing.assert_allclose(payload.torque(q, model.opt.gravity), 0.0, atol=1e-12)
    np.testing.assert_allclose(payload.torque(q, -model.opt.gravity), 2 * at_rest)


def test_known_friction_is_compensated():
    plant, known = PlantErrors(joint_friction_nm=1.0), Compensation(friction_nm=1.0)
    rubbing, compensated = (
        brisk(robot(plant, what, "computed_torque"), 1)[0] for what in (NO_COMPENSATION, known)
    )
    assert compensated < 0.3 * rubbing


def test_friction_is_added_in_the_direction_of_motion_and_not_at_rest():
    servo = JointServo(load_panda(), Compensation(friction_nm=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)))
    qd = np.array([[1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0]])
    np.testing.assert_allclose(
        servo.load_torque(HOME_Q[None], qd)[0], [0.1, -0.2, 0.0, 0.4, -0.5, 0.0, 0.7], atol=1e-9
    )


def test_all_that_is_known_of_every_error_together():
    without, known = (
        brisk(robot(ALL_ERRORS), 1)[0],
        brisk(robot(ALL_ERRORS, ALL_ERRORS.compensation()), 1)[0],
    )
    assert known < 0.5 * without


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(
            PlantErrors(payload_kg=0.5, actuation_delay_s=0.010, sensor_noise_rad=0.0005),
            id="payload and delay",
            marks=pytest.mark.slow,
        ),
        pytest.param(ALL_ERRORS, id="all errors"),
    ],
)
def test_a_short_motion_identifies_delay_and_payload(plant):
    # whatever it does now
    found = robot(plant, Compensation(delay_s=0.05, payload_kg=2.0), "computed_torque").identify()
    assert found.delay_s == pytest.approx(plant.actuation_delay_s, abs=0.002)
    assert found.payload_kg == pytest.approx(plant.payload_kg, rel=0.1)
    assert np.abs(np.array(found.friction_nm) - plant.joint_friction_nm).max() < 0.25


def test_an_estimate_beyond_what_is_compensated_is_an_error_of_the_identification():
    """Its record is of servos that sink by as much as 4.5 kg pull them down."""
    kp, kd, q_ref = np.full(7, 600.0), np.full(7, 50.0), sway(HOME_Q, FER)
    sunk = Payload(SCENE.model, 4.5).torque(q_ref.q_rad) / kp
    with pytest.raises(
        ControlError,
        match=r"fits a payload of 4\.\d+ kg .*payload_kg must lie between 0 and 3.*--compensate known",
    ):
        fit(q_ref.q_rad, q_ref.q_rad - sunk, np.diff(q_ref.t_s)[0], SCENE.model, kp, kd)


def test_friction_is_identified_joint_by_joint_and_nothing_else():
    arm, rubbing = Robot(scene=TableScene()), np.array([0.0, 0.0, 1.0, 0.0, 0.0, 0.5, 0.0])
    arm.model.dof_frictionloss[arm.scene.arm_dof], arm.model.dof_solimp[arm.scene.arm_dof, :2] = (
        rubbing,
        0.9999,
    )
    found = identify(arm, arm.executor, SCENE.model, arm.servo.kp, arm.servo.damping)
    friction_nm = np.array(found.friction_nm)
    assert np.abs(friction_nm - rubbing).max() < 0.25
    assert friction_nm[rubbing == 0].max() < 0.1
    assert found.delay_s < 0.001
    assert found.payload_kg < 0.03


def test_the_motion_is_short_small_and_inside_the_range():
    for q in (HOME_Q, FER.q_min + 0.01, FER.q_max - 0.05):
        rows = sway(q, FER)
        assert rows.t_s[-1] <= 6.0
        assert (rows.q_rad >= FER.q_min).all()
        assert (rows.q_rad <= FER.q_max).all()
        assert np.abs(rows.q_rad - q).max() <= SWAY_RAD
    away_m = (dh_forward(sway(HOME_Q, FER).q_rad) - dh_forward(HOME_Q))[:, :3, 3]
    assert np.abs(away_m).max() < 0.2


def test_a_still_arm_identifies_nothing():
    still = np.tile(HOME_Q, (300, 1))
    with pytest.raises(ControlError, match="too little"):
        fit(still, still, 0.01, SCENE.model, np.full(7, 600.0), np.full(7, 50.0))


@pytest.mark.parametrize(
    "values",
    [
        {"delay_s": -0.001},
        {"delay_s": 0.2},
        {"payload_kg": np.nan},
        {"payload_kg": 30.0},
        {"friction_nm": (1.0, 2.0)},
        {"friction_nm": (1.0,) * 6 + (-1.0,)},
        {"friction_nm": "much"},
    ],
)
def test_impossible_compensation_is_refused(values):
    with pytest.raises(Cosmos3Error, match=next(iter(values))):
        Compensation(**values)


def test_compensation_must_be_one():
    with pytest.raises(InputError, match="compensation"):
        Robot(control=ControlConfig(compensation=0.01), scene=SCENE)  # pyright: ignore[reportArgumentType]
