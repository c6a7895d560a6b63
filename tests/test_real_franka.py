"""The driver of a real Franka, against a fake of franky's API."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from helpers import fake_franky
from helpers.environments import ROOT, environment
from strands_cosmos3.actions.rotations import so3_exp
from strands_cosmos3.control.executor import Executor, ReferenceBlock
from strands_cosmos3.control.loop import ControlLoop, LoopConfig
from strands_cosmos3.control.trajectory import JointState
from strands_cosmos3.errors import ActuatorGuardError, ConfigError, ControlError
from strands_cosmos3.robots.panda import FER, HOME_Q
from strands_cosmos3.robots.servo import Compensation
from strands_cosmos3.sim.simulated_arm import ControlConfig
from strands_cosmos3.types import JointTrajectory

spec = importlib.util.spec_from_file_location("real_franka", ROOT / "examples/10_real_franka.py")
assert spec is not None
assert spec.loader is not None
real_franka = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real_franka)


@pytest.fixture
def arm():
    with real_franka.FrankaArm(fake_franky, "fake", FER, Compensation(delay_s=0.0)) as made:
        yield made


def still(rows, q=HOME_Q, **changes):
    zeros = np.zeros((rows, 7))
    fields = {
        "q_rad": np.tile(q, (rows, 1)),
        "qd_rad_s": zeros,
        "qdd_rad_s2": zeros,
        "gripper": np.ones(rows),
    }
    return ReferenceBlock(**{**fields, **changes}, nominal_s=np.full(rows, np.nan))


class Circling:
    """Plans rows that sway joint 1, from the arm's clock."""

    def __init__(self, arm):
        self.arm, self.start_s = arm, arm.now_s()

    def observe(self, action_prefix):
        return self.arm.now_s() - self.start_s

    def plan(self, observation):
        t_s = np.arange(1, 17) / 15
        q = np.tile(HOME_Q, (16, 1))
        q[:, 0] += 0.1 * np.sin(2.0 * (observation + t_s))
        return JointTrajectory(q, t_s, np.full(16, 0.2))


@pytest.mark.parametrize("dt_s", [2e-3, 1.25e-3, 1 / 300])
def test_references_below_1_khz_are_refused(monkeypatch, dt_s):
    monkeypatch.setattr(real_franka.FrankaArm, "dt_s", dt_s)
    with pytest.raises(ConfigError, match=r"joint-position interface.*use dt_s=0\.001"):
        real_franka.FrankaArm(fake_franky, "fake", FER)


@pytest.mark.parametrize(
    ("limits", "offset"),
    [(FER, 0.0), (FER, 0.5), (ControlConfig("fr3", 0.3).joint_limits(), 0.3)],
)
def test_what_is_sent_each_millisecond_holds_acceleration_and_jerk(arm, limits, offset):
    goal = HOME_Q + np.array([0.3, -0.2, 0.2, 0.3, -0.4, 0.4, 0.5])
    block = planned(limits, HOME_Q, goal, lambda at: at.rests)
    arm.rows = block.q_rad, block.qd_rad_s, 0.0
    sent = np.stack(
        [
            arm.reference_at(1e-3 * (row + offset))[0]
            for row in range(round(len(block) * arm.dt_s * 1e3))
        ]
    )
    for order, bound in ((2, limits.acceleration), (3, limits.jerk)):
        rate = np.abs(np.diff(sent, n=order, axis=0)) / 1e-3**order
        assert (rate <= 1.02 * bound).all()


def test_the_loop_drives_it(arm, monkeypatch):
    monkeypatch.setattr(real_franka, "BUFFER_S", 0.4)  # the machine that runs this may be busy
    loop = ControlLoop(
        arm, Circling(arm), Executor(FER, arm.dt_s, HOME_Q), LoopConfig(hz=50, latency_s=None)
    )
    measured, references = [], []
    try:
        for _ in range(60):
            tick = loop.tick()
            measured.append(tick.q_rad)
            references.append(tick.block.q_rad)
    finally:
        loop.close()
    behind = round(0.4 / arm.dt_s)
    off_rad = np.abs(np.concatenate(measured)[behind:] - np.concatenate(references)[:-behind]).max(
        axis=1
    )
    assert loop.counters["failed"] == loop.counters["rejected"] == 0
    assert np.ptp([q[0] for _, q, _ in arm.tracker.sent]) > 0.05
    assert np.median(off_rad) < 0.01
    assert arm.gripper.commands[0] == ("grasp", 0.0)


def test_an_open_fraction_is_a_share_of_the_gripper_s_width(arm):
    assert arm.joint_state()[2] == 1.0
    for wanted in (0.0, 0.75):
        for _ in range(15):
            arm.execute(still(10, gripper=np.full(10, wanted)), JointState.at_rest(HOME_Q))
    assert arm.gripper.commands == [("grasp", 0.0), ("move", 0.75 * 0.08)]
    assert arm.joint_state()[2] == 0.75


def test_what_the_fingers_hold_is_not_dropped_on_the_way_through_the_checklist(monkeypatch, capsys):
    monkeypatch.setattr(real_franka, "BUFFER_S", 1.0)  # the machine that runs this may be busy
    grippers = []

    class Holding(fake_franky.Gripper):
        def __init__(self, fci_hostname):
            super().__init__(fci_hostname)
            self.width = 0.03
            grippers.append(self)

    monkeypatch.setattr(fake_franky, "Gripper", Holding)
    real_franka.main(["--host", "fake", "--limits", "fer", "--payload-kg", "0.3"], fake_franky)
    assert grippers[0].commands == []
    said = capsys.readouterr().out
    assert "0.00 mm and 0.000 degrees apart" in said
    assert "turned joint 7" in said


def test_references_are_due_at_the_ends_of_their_steps(arm):
    q, before = np.tile(HOME_Q, (10, 1)), JointState.at_rest(HOME_Q)
    q[:, 0] += 0.001 * np.arange(1, 11)
    arm.execute(still(10, q_rad=q), before)
    _, _, from_s = arm.rows
    for row in (1, 4, 10):
        np.testing.assert_allclose(arm.reference_at(from_s + row * arm.dt_s)[0], q[row - 1])
    np.testing.assert_allclose(arm.reference_at(from_s + 3.5 * arm.dt_s)[0][0], HOME_Q[0] + 0.0035)


def planned(limits, start, goal, until):
    """The executor's references on the way to a goal, in one block, up to one that satisfies
    something.
    """
    executor, blocks = Executor(limits, real_franka.FrankaArm.dt_s, start), []
    executor.accept(JointTrajectory(goal[None], np.array([0.1])))
    while not blocks or not until(executor.reference):
        blocks.append(executor.advance(1))
    return ReferenceBlock(
        *(
            np.concatenate([getattr(block, each.name) for block in blocks])
            for each in fields(ReferenceBlock)
        )
    )


def one_joint(joint, angle, q=HOME_Q):
    return np.where(np.arange(7) == joint, angle, q)


def assert_lawful(q, qd, limits, dt_s):
    assert (q >= limits.q_min - 1e-6).all()
    assert (q <= limits.q_max + 1e-6).all()
    assert (np.abs(qd) <= limits.velocity * 1.002).all()
    assert (np.abs(np.diff(q, axis=0)) / dt_s <= limits.velocity * 1.002).all()


@pytest.mark.parametrize(
    ("limits", "joint"),
    [(FER, 6), (ControlConfig("fr3", 0.1).joint_limits(), 3)],
    ids=["fer", "slow"],
)
def test_a_loop_that_stalls_lets_the_arm_brake_within_its_range_and_limits(
    monkeypatch, limits, joint
):
    start = one_joint(joint, limits.q_max - 0.9 * limits.velocity)
    monkeypatch.setattr(fake_franky.Robot, "START_Q", start)
    block = planned(
        limits,
        start,
        one_joint(joint, limits.q_max - 1e-3, start),
        lambda at: at.qdd_rad_s2[joint] < 0 and at.qd_rad_s[joint] > 0.9 * limits.velocity[joint],
    )
    with real_franka.FrankaArm(fake_franky, "fake", limits) as arm:
        arm.execute(block, JointState.at_rest(start))
        q, qd, from_s = arm.rows
        assert np.abs(qd).max() > 0.5 * limits.velocity[joint]
        assert_lawful(q, qd, limits, arm.dt_s)
        assert (np.abs(np.diff(q, n=2, axis=0)) / arm.dt_s**2 <= limits.acceleration * 1.01).all()
        np.testing.assert_array_equal(qd[-1], 0.0)
        assert q[-1, joint] > limits.q_max[joint] - 0.5
        time.sleep(0.1)
        with pytest.raises(ControlError, match="late"):
            arm.execute(
                block.rows(0, 5),
                JointState(block.q_rad[-1], block.qd_rad_s[-1], block.qdd_rad_s2[-1]),
            )
        time.sleep(max(from_s + len(q) * arm.dt_s - time.monotonic(), 0.0))
        np.testing.assert_array_equal(arm.reference_at(time.monotonic())[0], q[-1])


def test_blocks_that_come_a_little_late_are_followed_without_a_jolt(arm, monkeypatch):
    monkeypatch.setattr(real_franka, "BUFFER_S", 0.4)  # the machine that runs this may be busy
    executor, plan, from_s = Executor(FER, arm.dt_s, HOME_Q), [HOME_Q[None]], 0.0
    executor.accept(JointTrajectory(HOME_Q[None] + 0.3, np.array([0.4])))
    for _ in range(30):
        before, block = executor.reference, executor.advance(20)
        arm.execute(block, before)
        from_s = arm.rows[2] if len(plan) == 1 else from_s
        plan.append(block.q_rad)
        time.sleep(0.005)
    plan, (q, _, begun_s) = np.concatenate(plan), arm.rows
    begun = round((begun_s - from_s) / arm.dt_s)
    assert begun > 0
    np.testing.assert_allclose(q[: len(plan) - begun], plan[begun:], atol=1e-12)
    at_s, sent = (np.stack([sent[k] for sent in arm.tracker.sent]) for k in range(2))
    row = (at_s - from_s) / arm.dt_s
    moving = (row > 0) & (row < len(plan) - 1)
    due = np.stack(
        [np.interp(row[moving], np.arange(len(plan)), angles) for angles in plan.T], axis=1
    )
    assert np.median(np.abs(sent[moving] - due)) < 1e-3


def test_a_lead_stays_inside_the_range_and_the_velocity_limit(monkeypatch):
    class Late(fake_franky.JointImpedanceTracker):
        def set_target(self, q, dq=None, tau_ff=None):
            super().set_target(q, dq)
            passed = [q for at_s, q, _ in self.sent if at_s < time.monotonic() - 0.1]
            self.robot.q = passed[-1] if passed else start

    start = one_joint(6, FER.q_max - 1.2)
    monkeypatch.setattr(fake_franky.Robot, "START_Q", start)
    monkeypatch.setattr(fake_franky, "JointImpedanceTracker", Late)
    with real_franka.FrankaArm(fake_franky, "fake", FER, Compensation(delay_s=0.1)) as arm:
        block = planned(FER, start, one_joint(6, FER.q_max - 1e-3), lambda at: at.rests)
        arm.execute(block, JointState.at_rest(start))
        time.sleep(2 * real_franka.BUFFER_S)
        q, qd = (np.stack([sent[k] for sent in arm.tracker.sent]) for k in (1, 2))
        assert (q >= FER.q_min - 1e-12).all()
        assert (q <= FER.q_max + 1e-12).all()
        assert (np.abs(qd) <= FER.velocity + 1e-12).all()
        assert arm.clipped > 0


def test_a_known_delay_is_led_payload_and_friction_are_told_to_the_robot():
    known = Compensation(delay_s=0.01, payload_kg=0.5, friction_nm=0.3)
    with real_franka.FrankaArm(fake_franky, "fake", FER, known) as arm:
        arm.execute(still(5, qd_rad_s=np.full((5, 7), 0.2)), JointState.at_rest(HOME_Q))
        np.testing.assert_allclose(arm.rows[0][1:6], np.tile(HOME_Q + 0.01 * 0.2, (5, 1)))
        (load,) = (call for call in arm.robot.calls if call[0] == "set_load")
        assert load[1] == 0.5
        np.testing.assert_allclose(load[2], [0, 0, 0.1034], atol=1e-9)
        assert arm.tracker.friction.coulomb == [0.3] * 7
        assert arm.clipped == 0


@pytest.mark.parametrize("field", ["q_rad", "qd_rad_s", "qdd_rad_s2", "gripper"])
def test_nothing_is_sent_that_is_not_a_number(arm, field):
    wrong = np.full(5 if field == "gripper" else (5, 7), np.nan)
    with pytest.raises(ActuatorGuardError, match="not finite"):
        arm.execute(still(5, **{field: wrong}), JointState.at_rest(HOME_Q))
    assert all(np.isfinite(q).all() for _, q, _ in arm.tracker.sent)


def test_an_arm_that_is_elsewhere_is_not_sent_for(arm):
    with pytest.raises(ActuatorGuardError, match="joint 2"):
        arm.execute(still(5), JointState.at_rest(HOME_Q + 0.2 * np.eye(7)[1]))


def test_a_reflex_ends_the_motion_with_its_reason(arm):
    arm.execute(still(5), JointState.at_rest(HOME_Q))
    arm.robot.reflex("cartesian_reflex")
    with pytest.raises(ControlError, match="cartesian_reflex"):
        arm.execute(still(5), JointState.at_rest(HOME_Q))


def test_a_load_of_an_earlier_program_is_taken_away(arm):
    (load,) = (call for call in arm.robot.calls if call[0] == "set_load")
    assert load[1] == 0.0
    np.testing.assert_array_equal(load[3], 0.0)


@pytest.mark.parametrize("flag", ["--delay-s=0.01", "--payload-kg=0.5", "--friction-nm=0.1"])
def test_an_arm_that_is_compensated_is_not_identified(capsys, flag):
    with pytest.raises(SystemExit):
        real_franka.main(["--host", "fake", "--identify", flag], fake_franky)
    assert "without compensation" in capsys.readouterr().err


def test_leaving_brings_it_to_rest():
    with pytest.raises(ZeroDivisionError), real_franka.FrankaArm(fake_franky, "fake", FER) as arm:
        raise ZeroDivisionError
    assert arm.tracker.stopped.is_set()


@pytest.mark.parametrize("blocks_s", [3.0, None])
def test_leaving_while_it_moves_brakes_first_whatever_the_gripper_does(monkeypatch, blocks_s):
    entered, left, pressed = threading.Event(), threading.Event(), []

    class Blocking(fake_franky.Gripper):
        def __init__(self, fci_hostname):
            self._width = 0.08
            super().__init__(fci_hostname)

        @property
        def width(self):
            if threading.current_thread() is not threading.main_thread():
                entered.set()
                left.wait(blocks_s)
            return self._width

        @width.setter
        def width(self, _):
            pass

    class Interrupted(fake_franky.Robot):
        @property
        def current_joint_state(self):
            if self.dq[6] > 1.0 and not pressed:
                pressed.append(time.monotonic())
                raise KeyboardInterrupt
            return super().current_joint_state

    monkeypatch.setattr(fake_franky, "Gripper", Blocking)
    monkeypatch.setattr(fake_franky, "Robot", Interrupted)
    block = planned(FER, HOME_Q, one_joint(6, 2.0), lambda at: at.rests)
    with pytest.raises(KeyboardInterrupt), real_franka.FrankaArm(fake_franky, "fake", FER) as arm:
        arm.execute(block, JointState.at_rest(HOME_Q))
    interrupted_s = pressed[0]
    assert entered.is_set()
    assert time.monotonic() - interrupted_s < 2.5
    assert arm.tracker.stopped.is_set()
    at_s, q, qd = (np.stack([sent[k] for sent in arm.tracker.sent]) for k in range(3))
    assert at_s[-1] - interrupted_s < 1.0
    np.testing.assert_array_equal(qd[-1], 0.0)
    assert q[-1, 6] < 1.0  # of 2: it braked, and did not go on to the end
    left.set()


def test_an_error_after_the_tracker_has_started_stops_it(monkeypatch):
    made = []

    class Kept(fake_franky.JointImpedanceTracker):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    def no_more(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(fake_franky, "JointImpedanceTracker", Kept)
    monkeypatch.setattr(threading.Thread, "start", no_more)
    with pytest.raises(RuntimeError, match="thread"):
        real_franka.FrankaArm(fake_franky, "fake", FER)
    assert made[0].stopped.is_set()


@pytest.mark.parametrize(("axis", "message"), [("shifted", "2.00 mm"), ("turned", "degrees")])
def test_frames_are_compared_before_anything_is_in_control(monkeypatch, axis, message):
    T = np.eye(4)
    if axis == "shifted":
        T[0, 3] = 0.002
    else:
        T[:3, :3] = so3_exp(np.array([0, 0, 0.01]))
    monkeypatch.setattr(fake_franky.Robot, "T_base_offset", T)
    started = []
    monkeypatch.setattr(
        fake_franky.JointImpedanceTracker, "__init__", lambda *_, **__: started.append(1)
    )
    with pytest.raises(ConfigError, match=message):
        real_franka.FrankaArm(fake_franky, "fake", FER)
    assert not started


@pytest.mark.parametrize("fixed", ["in the hand", "in the room"])
def test_hand_eye_calibration_recovers_the_camera(fixed):
    rng = np.random.default_rng(0)

    def pose(turn, shift):
        T = np.eye(4)
        T[:3, :3], T[:3, 3] = so3_exp(turn * rng.normal(size=3)), shift * rng.normal(size=3)
        return T

    T_base_hand = np.stack([pose(0.5, 0.3) for _ in range(12)])
    camera, board = pose(1.0, 0.2), pose(1.0, 0.5)
    moving = T_base_hand if fixed == "in the hand" else np.linalg.inv(T_base_hand)
    seen = (
        np.linalg.inv(moving @ camera) @ board @ np.stack([pose(0.001, 0.0002) for _ in range(12)])
    )
    found, off_m = real_franka.hand_eye(moving, seen)
    assert np.linalg.norm(found[:3, 3] - camera[:3, 3]) < 1e-3
    assert np.linalg.norm(found[:3, :3] - camera[:3, :3]) < 5e-3
    assert 0 < off_m < 2e-3
    with pytest.raises(ConfigError, match="two axes"):
        real_franka.hand_eye(np.repeat(moving[:1], 4, axis=0), seen[:4])


def test_a_pixel_is_where_the_camera_sees_the_point():
    K = np.array([[600.0, 0, 320], [0, 600, 240], [0, 0, 1]])
    T_base_camera = np.eye(4)
    T_base_camera[:3, 3] = [1.0, 0.0, 0.0]
    np.testing.assert_allclose(
        real_franka.pixel([1.1, -0.2, 2.0], T_base_camera, K), [350.0, 180.0]
    )


@pytest.mark.peers
def test_the_fake_has_frankys_signatures(pytestconfig, monkeypatch):
    python = environment(pytestconfig, "franky", sys.executable, ("franky-control==2.0.0",))
    (packages,) = Path(python).parents[1].glob("lib/python*/site-packages")
    monkeypatch.syspath_prepend(packages)
    franky = importlib.import_module("franky")
    for name in ("__init__", "set_target", "stop"):
        theirs, ours = (
            inspect.signature(getattr(m.JointImpedanceTracker, name)) for m in (franky, fake_franky)
        )
        assert list(theirs.parameters) == list(ours.parameters)
    for kind in ("Robot", "Gripper", "BoolFuture", "FrictionCompensationParams", "Affine"):
        members = [
            n
            for n in vars(getattr(fake_franky, kind))
            if n[0] != "_" and n.islower() and n != "reflex"
        ]
        assert not [name for name in members if not hasattr(getattr(franky, kind), name)]
        made_here = () if kind == "BoolFuture" else ("__init__",)
        for name in (*made_here, *members):  # pybind11 writes the signature into the docstring
            ours = getattr(fake_franky, kind).__dict__.get(name)
            if inspect.isfunction(ours):
                written = getattr(getattr(franky, kind), name).__doc__
                assert not [
                    p
                    for p in list(inspect.signature(ours).parameters)[1:]
                    if f"{p}:" not in written
                ]
    for name in ("q", "O_T_EE", "F_T_EE"):
        assert hasattr(franky.RobotState, name)
    assert issubclass(franky.ControlException, Exception)
    friction = franky.FrictionCompensationParams(coulomb=[0.3] * 7, max_torque=[1.0] * 7)
    gains = {"stiffness": real_franka.STIFFNESS, "damping": real_franka.DAMPING}
    motion = franky.JointImpedanceTrackingMotion(
        **gains, friction=friction, lower_joint_limits=FER.q_min, upper_joint_limits=FER.q_max
    )
    motion.set_reference(franky.JointReference(q=HOME_Q, dq=np.zeros(7)))
