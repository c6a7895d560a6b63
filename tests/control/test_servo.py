"""Feed-forward: what it is worth in dynamics over the closed loop, and that nothing but numbers
reaches ctrl.
"""

from dataclasses import replace
from functools import cache
from types import MappingProxyType

import mujoco
import numpy as np
import pytest

from motions import BRISK_DEG, BRISK_M, SLOW_DEG, SLOW_M, feasible_chunk
from strands_cosmos3.control.executor import Executor, ReferenceBlock
from strands_cosmos3.control.ik import MinkIKBridge
from strands_cosmos3.control.trajectory import JointState
from strands_cosmos3.errors import ActuatorGuardError, ControlError, Cosmos3Error
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.model import load_panda, load_robot
from strands_cosmos3.robots.panda import FER, HOME_Q, dh_forward
from strands_cosmos3.robots.servo import NO_COMPENSATION, Compensation, JointServo
from strands_cosmos3.robots.spec import ModelPart
from strands_cosmos3.sim.simulated_arm import ControlConfig
from strands_cosmos3.types import JointTrajectory
from strands_cosmos3.worlds.arms import Robot

BRIDGE = MinkIKBridge(load_panda())


def in_free_air(rng, steps_m, steps_deg):
    """A chunk whose hand stays off the table, the cubes and the arm's own base."""
    while True:
        q_start, T = feasible_chunk(rng, 32, steps_m, steps_deg)
        if T[:, 2, 3].min() > 0.25 and np.hypot(*T[:, :2, 3].T).min() > 0.25:
            return q_start, T


@cache
def solved(seed, steps_m, steps_deg):
    """A chunk in free air: its start [7] and its rows [32, 7]."""
    q_start, T = in_free_air(np.random.default_rng(seed), steps_m, steps_deg)
    return q_start, BRIDGE.solve(T, np.r_[q_start, 0.04, 0.04], 1 / 15).q_rad[:, :7]


def track(robot, steps_m, steps_deg, seeds):
    """Distances [N] in mm, hand achieved against hand commanded, at every physics step of a few
    chunks.
    """
    out = []
    for seed in seeds:
        q_start, q = solved(seed, steps_m, steps_deg)
        robot.reset(0, q_start)
        robot.executor.accept(JointTrajectory(q, (np.arange(32) + 1) / 15))
        for _ in range(32 * 40 // 12 + 30):  # and some way into holding
            before = robot.executor.reference
            block = robot.executor.advance(12)
            achieved, _ = robot.execute(block, before)
            out.append(
                np.linalg.norm((dh_forward(achieved) - dh_forward(block.q_rad))[:, :3, 3], axis=1)
                * 1e3
            )
    return np.concatenate(out)


@pytest.fixture(scope="module")
def robots():
    return {
        name: Robot(control=ControlConfig(feed_forward=name))
        for name in ("none", "velocity", "computed_torque")
    }


@pytest.fixture(scope="module")
def errors_without(robots):
    """Distances [N] in mm without feed-forward, of a slow and of a brisk motion."""
    motions = (SLOW_M, SLOW_DEG), (BRISK_M, BRISK_DEG)
    return {motion: track(robots["none"], *motion, range(1)) for motion in motions}


@pytest.mark.parametrize(
    ("name", "motion", "mean_mm", "max_mm"),
    [
        ("velocity", (SLOW_M, SLOW_DEG), 0.05, 0.5),
        ("velocity", (BRISK_M, BRISK_DEG), 0.2, 1.8),
        ("computed_torque", (SLOW_M, SLOW_DEG), 0.2, 1.5),
        ("computed_torque", (BRISK_M, BRISK_DEG), 0.2, 1.5),
    ],
)
def test_tracking_error(robots, errors_without, name, motion, mean_mm, max_mm):
    error = track(robots[name], *motion, range(2))
    assert error.mean() < mean_mm
    assert error.max() < max_mm
    assert errors_without[motion].mean() > 8 * error.mean()


@pytest.mark.parametrize("name", ["none", "velocity", "computed_torque"])
@pytest.mark.parametrize("field", ["q_rad", "qd_rad_s", "qdd_rad_s2", "gripper"])
@pytest.mark.parametrize("where", [0, 5, 11])
def test_no_control_that_is_not_a_number(robots, name, field, where):
    robot = robots[name]
    robot.reset(0)
    good = robot.executor.advance(12)
    fields = {
        k: getattr(good, k).copy()
        for k in ("q_rad", "qd_rad_s", "qdd_rad_s2", "gripper", "nominal_s")
    }
    fields[field][where] = np.nan
    ctrl, qpos = robot.data.ctrl.copy(), robot.data.qpos.copy()
    with pytest.raises(ActuatorGuardError):
        robot.execute(ReferenceBlock(**fields), JointState.at_rest(HOME_Q))
    assert np.array_equal(robot.data.ctrl, ctrl)
    assert np.array_equal(robot.data.qpos, qpos)


def test_a_state_that_is_not_a_number_stops_the_robot(robots):
    robot = robots["velocity"]
    robot.reset(0)
    robot.execute(robot.executor.advance(12), JointState.at_rest(HOME_Q))
    robot.data.qvel[0] = np.inf
    with pytest.raises(ControlError, match="diverged"):
        robot.execute(robot.executor.advance(12), JointState.at_rest(HOME_Q))
    robot.reset(0)


def test_controls_stay_in_range():
    model = load_panda()
    servo, data = JointServo(model), mujoco.MjData(model)
    data.qpos[:7] = HOME_Q
    mujoco.mj_step1(model, data)
    far = np.where(np.arange(7) % 2, FER.q_max, FER.q_min)
    for target in (
        servo.velocity_feed_forward(
            far, np.sign(far) * FER.velocity, np.sign(far) * FER.acceleration * 10
        ),
        servo.no_feed_forward(far * 2),
        servo.computed_torque(
            data, far, np.sign(far) * FER.velocity, np.sign(far) * FER.acceleration * 10
        ),
    ):
        ctrl, _, n_clipped = servo.controls(target[None], HOME_Q)
        assert (ctrl >= servo.law.ctrl_min).all()
        assert (ctrl <= servo.law.ctrl_max).all()
        assert n_clipped == 1


def test_velocity_leads_by_what_the_servo_loses():
    """kp (ctrl - q) must cancel kd qd and the joint's damping at the reference's own speed."""
    model = load_panda()
    servo, qd = JointServo(model), np.linspace(-1, 1, 7)
    lost = -model.actuator_biasprm[:7, 2] + model.dof_damping[:7]
    lead = servo.velocity_feed_forward(HOME_Q, qd, np.zeros(7)) - HOME_Q
    np.testing.assert_allclose(lead * model.actuator_gainprm[:7, 0], lost * qd, atol=1e-9)


def test_acceleration_leads_by_each_joints_own_inertia():
    """At home, accelerating one joint alone takes the torque that MuJoCo's inverse dynamics
    finds beyond gravity.
    """
    model = load_panda()
    servo, data, resting = JointServo(model), mujoco.MjData(model), mujoco.MjData(model)
    for joint in range(7):
        qdd = np.zeros(7)
        qdd[joint] = 2.0
        for one in (data, resting):
            one.qpos[:7] = HOME_Q
        data.qacc[:], resting.qacc[:] = 0, 0
        data.qacc[joint] = 2.0
        mujoco.mj_inverse(model, data)
        mujoco.mj_inverse(model, resting)
        lead = servo.velocity_feed_forward(HOME_Q, np.zeros(7), qdd) - HOME_Q
        torque = data.qfrc_inverse[joint] - resting.qfrc_inverse[joint]
        assert lead[joint] * servo.kp[joint] == pytest.approx(torque, rel=1e-6)


def test_the_models_own_friction_is_overcome_in_the_direction_of_motion():
    model = load_panda()
    qd = np.array([[1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0]])
    assert not JointServo(model).load_torque(HOME_Q[None], qd).any()
    model.dof_frictionloss[:7] = 1.0
    servo = JointServo(model, Compensation(friction_nm=0.5))
    np.testing.assert_allclose(servo.load_torque(HOME_Q[None], qd), 1.5 * qd, atol=1e-9)


RESISTANCES = {
    "springs": ({"elbow_joint": 'stiffness="40 5 3" springref="0.4"'}, ""),
    "progressive damping": ({"shoulder_lift_joint": 'damping="2 0 40"'}, ""),
    "an actuator that damps": (
        {},
        '<actuator><motor name="brake" joint="wrist_1_joint" damping="3 9"/></actuator>',
    ),
    "a cable with a spring between two joints": (
        {},
        '<tendon><fixed name="cable" stiffness="4 0 1" springlength="0.1 0.3" damping="1 0.2">'
        '<joint joint="elbow_joint" coef="1"/><joint joint="wrist_1_joint" coef="-0.5"/>'
        "</fixed></tendon>",
    ),
    "a rope from the base to the forearm": (
        {},
        '<worldbody><site name="from" pos="0.3 0.1 0.9"/></worldbody>'
        '<tendon><spatial name="rope" stiffness="50" springlength="0.2"><site site="from"/>'
        '<site site="tcp"/></spatial></tendon>',
    ),
    "weight that the actuators carry": (
        dict.fromkeys(
            ("shoulder_lift_joint", "elbow_joint", "wrist_1_joint"), 'actuatorgravcomp="true"'
        ),
        "",
    ),
}


@pytest.fixture
def resisting(request, tmp_path) -> tuple[mujoco.MjModel, JointServo]:
    """A simulated UR5e whose joints resist, and its servos."""
    return ur5e(tmp_path, *RESISTANCES[request.param])


def ur5e(folder, of_joints=MappingProxyType({}), more="") -> tuple[mujoco.MjModel, JointServo]:
    """A simulated UR5e whose joints have further attributes, and more elements; and its servos."""
    text = resource("assets/ur5e.xml").read_text().replace("</mujoco>", f"{more}</mujoco>")
    for joint, attributes in of_joints.items():
        text = text.replace(f'<joint name="{joint}"', f'<joint name="{joint}" {attributes}')
    path = folder / "arm.xml"
    path.write_text(text)
    robot = get_robot("ur5e")
    model = load_robot(replace(robot, model=(ModelPart(str(path)),)), simulated=True)
    return model, JointServo(model, NO_COMPENSATION, *robot.limbs)


def moving(model: mujoco.MjModel, servo: JointServo, seed: int) -> mujoco.MjData:
    """A state near the UR5e's home."""
    rng, data = np.random.default_rng(seed), mujoco.MjData(model)
    data.qpos[servo.q_address] = get_robot("ur5e").home_rad + rng.uniform(-0.5, 0.5, 6)
    data.qvel[:6] = rng.uniform(-1, 1, 6)
    mujoco.mj_step1(model, data)
    return data


@pytest.mark.parametrize("resisting", RESISTANCES, indirect=True)
def test_computed_torque_accelerates_an_arm_as_if_nothing_resisted(resisting, tmp_path):
    """And as referenced, but for the fingers, which are not commanded and swing along."""
    for seed in range(5):
        qdd = np.random.default_rng(seed).uniform(-3, 3, 6)
        accelerations = []
        for model, servo in (resisting, ur5e(tmp_path)):
            data = moving(model, servo, seed)
            state = data.qpos[servo.q_address].copy(), data.qvel[:6].copy()
            data.ctrl[servo.actuator_ids] = servo.computed_torque(data, *state, qdd)
            mujoco.mj_forward(model, data)
            accelerations.append(data.qacc[:6].copy())
        np.testing.assert_allclose(accelerations[0], accelerations[1], atol=1e-8)
        np.testing.assert_allclose(accelerations[0], qdd, atol=0.01)


@pytest.mark.parametrize("resisting", RESISTANCES, indirect=True)
def test_the_velocity_feed_forward_takes_what_resists(resisting):
    """What is left is the weight, which the simulation takes from the arm."""
    model, servo = resisting
    for seed in range(5):
        data = moving(model, servo, seed)
        q, qd = data.qpos[servo.q_address].copy(), data.qvel[:6].copy()
        data.ctrl[servo.actuator_ids] = servo.velocity_feed_forward(q, qd, np.zeros(6))
        mujoco.mj_forward(model, data)
        left = (data.qfrc_actuator + data.qfrc_passive)[:6]
        data.qvel[:] = 0.0
        mujoco.mj_forward(model, data)
        np.testing.assert_allclose(left, data.qfrc_bias[:6], atol=1e-8)


@pytest.mark.parametrize(
    "resisting", ["springs", "a rope from the base to the forearm"], indirect=True
)
def test_a_held_arm_bears_its_springs(resisting):
    model, servo = resisting
    data, home = mujoco.MjData(model), get_robot("ur5e").home_rad
    data.qpos[servo.q_address] = home
    servo.hold(data, home)
    mujoco.mj_step(model, data, 300)
    np.testing.assert_allclose(data.qpos[servo.q_address], home, atol=1e-6)


def test_reset_outside_the_range_changes_nothing(robots):
    robot = robots["velocity"]
    robot.reset(0)
    qpos = robot.data.qpos.copy()
    with pytest.raises(Cosmos3Error):
        robot.reset(0, np.zeros(7))
    assert np.array_equal(robot.data.qpos, qpos)
    assert isinstance(robot.executor, Executor)
