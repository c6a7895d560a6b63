"""Two arms in the simulation, and the level lift of a bar: the expert, and a judge that must not
be fooled.
"""

from dataclasses import replace

import mujoco
import numpy as np
import pytest

from strands_cosmos3 import Robot
from strands_cosmos3.actions.rotations import pose_distances, se3_inverse
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.policy import Cosmos3Policy, PolicyOptions
from strands_cosmos3.policy.options import ArmOptions
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.model import load_robot
from strands_cosmos3.sim.scene import Layout
from strands_cosmos3.worlds.table.bar import BarMonitor, BarState, bar_state
from strands_cosmos3.worlds.table.expert import ScriptedBackend
from strands_cosmos3.worlds.table.grammar import TEMPLATES, Verb, parse_instruction
from strands_cosmos3.worlds.table.scene import BAR, Bar, TableScene
from strands_cosmos3.worlds.table.tasks import TableJudge, get_task

LIFT_THE_BAR = TEMPLATES[Verb.LIFT]

DUAL_PANDA = get_robot("dual_panda")

ROBOT = Robot("dual_panda")
SCENE = ROBOT.scene
MIDDLE = Layout((BAR,), np.array([[0.5, 0.0]]), np.zeros(1))
LEFT, RIGHT = 9, 19  # columns of the grippers
HANDS = frozenset({"left", "right"})


class LetsGo(ScriptedBackend):
    """The expert, whose hands let go above a height. Blind, they rise without looking at the bar
    any more.
    """

    def __init__(self, *columns, above_m, blind=False):
        self.columns, self.above_m, self.blind, self.gone = list(columns), above_m, blind, False

    def infer(self, request):
        state = dict(request.privileged)
        self.gone |= state["left_tcp"][2, 3] > self.above_m and bool((request.gripper < 0.6).all())
        if self.gone and self.blind:
            bar = np.eye(4)
            bar[:3, 3] = (state["left_tcp"][:3, 3] + state["right_tcp"][:3, 3]) / 2
            request = replace(
                request, privileged=state | {"bar": bar}, gripper=np.array([0.5, 0.5])
            )
        chunk = super().infer(request)
        rows = chunk.action.copy()
        rows[:, self.columns] = 1.0 if self.gone else rows[:, self.columns]
        return replace(chunk, action=rows)


def lift(backend="scripted", robot=ROBOT, duration=9.0, replan=None):
    """The rollout, and the bar at every tick."""
    seen = []
    with Cosmos3Policy(
        "robomind-franka-dual",
        robot="dual_panda",
        backend=backend,
        actions_per_step=replan,
        options=PolicyOptions(arm=ArmOptions(limits=robot.limits)),
    ) as policy:
        rollout = robot.run_policy(
            task="lift_bar",
            policy=policy,
            layout=MIDDLE,
            duration=duration,
            on_tick=lambda _: seen.append(bar_state(robot.scene, robot.data)),
        )
    return rollout, seen


@pytest.fixture(scope="module")
def lifted():
    rollout, seen = lift()
    return rollout, seen, ROBOT.data.qpos.copy(), ROBOT.data.ctrl.copy()


def test_both_arms_lift_the_bar_and_keep_their_relative_pose(lifted):
    rollout, seen, *_ = lifted
    arrays = rollout.arrays
    assert rollout.success
    assert arrays["q_achieved_rad"].shape[1] == 14
    assert arrays["gripper_achieved"].shape == (len(arrays["t_s"]), 2)
    assert set(rollout.by_limb) == set(rollout.to_dict()["limbs"]) == HANDS
    closed = (arrays["gripper_commanded"] < 0.5).all(axis=1)
    assert closed.sum() > 600 * 2
    right = SCENE.limbs["right"].kinematics
    np.testing.assert_array_equal(
        arrays["T_base_hand_achieved_right"], right.forward(arrays["q_achieved_rad"][:, 7:])
    )
    relative = {}
    for which in ("commanded", "achieved"):
        left, right = (
            SCENE.limbs[name].T_world_base @ arrays[f"T_base_hand_{which}_{name}"]
            for name in ("left", "right")
        )
        relative[which] = se3_inverse(left) @ right
    whole = pose_distances(relative["achieved"], relative["commanded"])[0].max()
    assert rollout.between_hands.max_mm == pytest.approx(whole * 1e3, rel=1e-9)
    relative = {which: T[closed] for which, T in relative.items()}
    first = np.repeat(relative["commanded"][:1], closed.sum(), axis=0)
    # as the references have it, and as it was when the fingers closed
    for given in (relative["commanded"], first):
        distance_m, angle_rad = pose_distances(relative["achieved"], given)
        assert distance_m.max() < 0.3e-3
        assert np.rad2deg(angle_rad.max()) < 0.1
    worst = {name: errors["tracking"].max_mm for name, errors in rollout.by_limb.items()}
    assert max(worst.values()) == rollout.tracking.max_mm
    assert min(worst.values()) > 0.01
    assert max(bar.tilt_rad for bar in seen) < np.deg2rad(2)


def test_the_scene_of_two_arms():
    """No constraint but the fingers' own holds anything, and attaching has kept the contacts'
    cone.
    """
    model, alone = SCENE.model, load_robot(DUAL_PANDA)
    assert model.neq == alone.neq
    assert (model.opt.impratio, model.opt.cone) == (20.0, mujoco.mjtCone.mjCONE_ELLIPTIC)
    assert {"left_wrist", "right_wrist", "front", "left", "right"} <= {
        model.camera(i).name for i in range(model.ncam)
    }
    assert SCENE.view_names == ("front", "left", "right")
    assert model.body_mass[SCENE.bodies["bar"].id] == pytest.approx(0.5)
    np.testing.assert_array_equal(
        model.actuator_gainprm[SCENE.gripper_actuators],
        alone.actuator_gainprm[
            [alone.actuator(limb.gripper.actuator).id for limb in DUAL_PANDA.limbs]
        ],
    )
    assert (
        len({tuple(SCENE.sample_layout(np.random.default_rng(seed)).xy_m[0]) for seed in range(5)})
        == 5
    )


def test_each_arm_moves_its_own_joints_and_fingers():
    """The state, the references and the controls of the limbs are in the robot's order."""
    ROBOT.reset(0, layout=MIDDLE)
    ROBOT.data.qpos[SCENE.limbs["right"].finger_qpos] = 0.01
    q, _, gripper = ROBOT.joint_state()
    np.testing.assert_array_equal(q, DUAL_PANDA.home_rad)
    np.testing.assert_allclose(gripper, [1.0, 0.25])
    known = ROBOT.observation().privileged
    assert known["left_tcp"][1, 3] > 0.25 > -0.25 > known["right_tcp"][1, 3]
    flat = ROBOT.observe()
    assert flat["right_finger_joint1"] == pytest.approx(0.01)
    assert flat["left_finger_joint1"] == pytest.approx(0.04)


def test_one_hand_that_carries_a_light_bar_by_its_end_has_not_lifted_it():
    """It is high enough in the middle: a test of the height alone would be fooled."""
    robot = Robot("dual_panda", scene=TableScene(robot=DUAL_PANDA, bar=Bar(mass_kg=0.1)))
    rollout, seen = lift(LetsGo(RIGHT, above_m=0.03, blind=True), robot, 6.0, replan=8)
    assert not rollout.success
    assert seen[-1].position_m[2] > 0.1
    assert seen[-1].gripped_by == {"left"}
    assert seen[-1].tilt_rad > np.deg2rad(5)


def test_a_bar_that_was_dropped_is_not_lifted_again():
    rollout, seen = lift(LetsGo(LEFT, above_m=0.08), duration=5.0, replan=8)
    assert not rollout.success
    assert max(bar.position_m[2] for bar in seen) > 0.07
    assert not seen[-1].gripped_by >= HANDS


@pytest.mark.slow
def test_the_expert_lifts_the_bar_wherever_it_lies():
    options = {"task": "lift_bar", "policy_config": {"backend": "scripted"}, "duration": 15.0}
    rollouts = [ROBOT.run_policy(**options, seed=seed) for seed in range(100)]
    assert sum(rollout.success for rollout in rollouts) >= 95
    assert max(rollout.between_hands.max_mm for rollout in rollouts) < 0.3
    assert max(rollout.between_hands.max_deg for rollout in rollouts) < 0.1


LYING = BarState(
    time_s=0.0,
    position_m=np.array([0.5, 0, 0.02]),
    axis=np.array([0, 1.0, 0]),
    lowest_m=0.0,
    speed_m_s=0.0,
    turning_rad_s=0.0,
    gripped_by=frozenset(),
    touched=False,
    touched_by_others=True,
)
TAKEN = replace(LYING, time_s=1.0, gripped_by=HANDS, touched=True)
HIGH = replace(
    TAKEN, time_s=2.0, position_m=np.array([0.5, 0, 0.2]), lowest_m=0.18, touched_by_others=False
)


def axis(tilt_deg=0.0, turn_deg=0.0):
    tilt, turn = np.deg2rad([tilt_deg, turn_deg])
    return np.array([np.sin(turn) * np.cos(tilt), np.cos(turn) * np.cos(tilt), np.sin(tilt)])


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({}, True),
        ({"lowest_m": 0.101}, True),
        ({"lowest_m": 0.099}, False),
        ({"axis": axis(4.9)}, True),
        ({"axis": axis(-5.1)}, False),
        ({"axis": axis(0, -14.9)}, True),
        ({"axis": axis(0, 15.1)}, False),
        ({"axis": axis(0, 180)}, False),
        ({"speed_m_s": 0.051}, False),
        ({"gripped_by": frozenset({"right"})}, False),
        ({"touched_by_others": True}, False),
    ],
)
def test_every_condition_of_a_level_lift(change, counts):
    monitor = BarMonitor(SCENE)
    assert [monitor.add(state) for state in (LYING, TAKEN, replace(HIGH, **change))] == [
        False,
        False,
        counts,
    ]


def test_the_history_of_the_bar_counts():
    for states in (
        (TAKEN, HIGH),  # it was in the hands from the beginning
        (LYING, HIGH),  # it came into the hands in mid-air
        (LYING, TAKEN, replace(HIGH, time_s=1.02)),  # it jumped
        (
            LYING,
            TAKEN,
            HIGH,
            replace(HIGH, time_s=2.2, gripped_by=frozenset()),
            replace(LYING, time_s=4.0),
            replace(TAKEN, time_s=5.0),
        ),
    ):
        monitor = BarMonitor(SCENE)
        for state in states:
            monitor.add(state)
        assert not monitor.add(replace(HIGH, time_s=states[-1].time_s + 1))
    monitor = BarMonitor(SCENE)
    short = replace(HIGH, time_s=2.05, gripped_by=frozenset({"left"}))
    again = [monitor.add(state) for state in (LYING, TAKEN, HIGH, short, replace(HIGH, time_s=2.1))]
    # a slip of 0.05 s interrupts the second, and drops nothing
    assert again == [False, False, True, False, True]


def judged(put, seconds=1.6, qpos=None, ctrl=None):
    """The judge's verdict on a bar that lay on the table and is then where ``put`` puts it, in
    the middle of the physics.
    """
    ROBOT.reset(0, layout=MIDDLE)
    data, judge = (
        ROBOT.data,
        TableJudge(get_task("lift_bar"), SCENE, parse_instruction(LIFT_THE_BAR)),
    )
    verdicts, states = [], []
    for tick in range(round((0.3 + seconds) * 50)):
        if tick == 15 and qpos is not None:
            data.qpos[:], data.ctrl[:], data.qvel[:] = qpos, ctrl, 0.0
        if tick >= 15:
            put(data)
        mujoco.mj_step(SCENE.model, data, 12)
        if tick >= 15:
            put(data)
            mujoco.mj_forward(SCENE.model, data)
        verdicts.append(judge.succeeded(data))
        states.append(bar_state(SCENE, data))
    return verdicts, states


def at(z_m):
    def put(data):
        data.qpos[SCENE.bodies["bar"].qpos : SCENE.bodies["bar"].qpos + 7] = (
            0.5,
            0.0,
            z_m,
            1.0,
            0.0,
            0.0,
            0.0,
        )
        data.qvel[SCENE.bodies["bar"].dof : SCENE.bodies["bar"].dof + 6] = 0.0

    return put


def test_a_bar_that_is_put_somewhere_is_not_lifted(lifted):
    """In mid-air, or into two hands that hold it well from then on."""
    verdicts, states = judged(at(0.3))
    assert not any(verdicts)
    assert not states[-1].gripped_by
    _, _, qpos, ctrl = lifted
    verdicts, states = judged(lambda data: None, qpos=qpos, ctrl=ctrl)
    assert not any(verdicts)
    assert states[-1].gripped_by == HANDS
    assert states[-1].lowest_m > 0.1


def test_a_bar_on_the_backs_of_the_hands_is_not_lifted(lifted):
    _, _, qpos, ctrl = lifted
    ROBOT.reset(0, layout=MIDDLE)
    ROBOT.data.qpos[:] = qpos
    for z_m in np.arange(0.6, 0.2, -0.002):  # down onto them
        at(z_m)(ROBOT.data)
        mujoco.mj_forward(SCENE.model, ROBOT.data)
        if bar_state(SCENE, ROBOT.data).touched_by_others:
            break
    verdicts, states = judged(at(z_m), qpos=qpos, ctrl=ctrl)
    assert not any(verdicts)
    assert states[-1].touched_by_others
    assert states[-1].lowest_m > 0.1
    assert states[-1].tilt_rad < 0.01


def test_a_task_needs_its_scene():
    with pytest.raises(ConfigError, match="do not go together"):
        TableJudge(get_task("lift_bar"), SCENE, parse_instruction("pick up the red cube"))
    with pytest.raises(ConfigError, match="do not go together"):
        TableJudge(get_task("pick"), SCENE, parse_instruction("pick up the red cube"))
