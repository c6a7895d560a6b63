"""The simulated plant's errors: what they do to the arm, and that the controller's model knows
nothing of them.
"""

import json
from dataclasses import replace

import mujoco
import numpy as np
import pytest

from strands_cosmos3.cli import main
from strands_cosmos3.control.executor import ReferenceBlock
from strands_cosmos3.control.trajectory import JointState
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.robots.catalogue import PANDA, get_robot
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.robots.spec import LimbLimits
from strands_cosmos3.sim.plant import ALL_ERRORS, PlantErrors
from strands_cosmos3.sim.simulated_arm import ControlConfig
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.scene import TableScene

UR5E = get_robot("ur5e")


@pytest.fixture(scope="module")
def scene():
    return Robot().scene


def hold(robot, steps, q_rad=HOME_Q):
    zeros = np.zeros((steps, 7))
    return robot.execute(
        ReferenceBlock(
            np.tile(q_rad, (steps, 1)), zeros, zeros, np.ones(steps), np.full(steps, np.nan)
        ),
        JointState.at_rest(q_rad),
    )[0]


def weight_torque(robot, mass_kg):
    """Torque [7] about the joints of a mass at the tool centre point, in the robot's present
    configuration.
    """
    jacobian = np.zeros((3, robot.scene.model.nv))
    mujoco.mj_jacSite(robot.scene.model, robot.data, jacobian, None, robot.scene.only.tcp_site)
    return (jacobian.T @ [0, 0, -9.81 * mass_kg])[robot.scene.arm_dof]


@pytest.mark.parametrize("feed_forward", ["velocity", "computed_torque"])
def test_a_payload_bends_the_servos_by_its_weight_at_the_tool_centre_point(scene, feed_forward):
    robot = Robot(
        control=ControlConfig(feed_forward=feed_forward),
        scene=scene,
        plant=PlantErrors(payload_kg=0.5),
    )
    q = hold(robot, 1200)[-1]
    np.testing.assert_allclose(robot.servo.kp * (q - HOME_Q), weight_torque(robot, 0.5), atol=5e-3)


@pytest.mark.parametrize("feed_forward", ["velocity", "computed_torque"])
def test_heavier_links_bend_the_servos_by_the_extra_weight_only(scene, feed_forward):
    robot = Robot(
        control=ControlConfig(feed_forward=feed_forward),
        scene=scene,
        plant=PlantErrors(link_mass_scale=1.1),
    )
    q = hold(robot, 1200)[-1]
    nominal = mujoco.MjData(scene.model)
    nominal.qpos[:] = robot.data.qpos
    mujoco.mj_forward(scene.model, nominal)  # at rest, the bias is the weight of every link
    np.testing.assert_allclose(
        robot.servo.kp * (q - HOME_Q), -0.1 * nominal.qfrc_bias[scene.arm_dof], atol=5e-3
    )


def test_a_payload_adds_a_point_mass_and_nothing_else(scene):
    plant = PlantErrors(payload_kg=0.5).apply(scene.model)
    nominal, data = mujoco.MjData(scene.model), mujoco.MjData(plant)
    for state in (nominal, data):
        state.qpos[scene.arm_qpos] = HOME_Q + 0.3
    mujoco.mj_forward(scene.model, nominal)
    mujoco.mj_forward(plant, data)
    with_payload, without = np.zeros((plant.nv, plant.nv)), np.zeros((plant.nv, plant.nv))
    for column, unit in enumerate(np.eye(plant.nv)):
        mujoco.mj_mulM(scene.model, nominal, without[column], unit)
        mujoco.mj_mulM(plant, data, with_payload[column], unit)
    jacobian = np.zeros((3, plant.nv))
    mujoco.mj_jacSite(plant, data, jacobian, None, scene.only.tcp_site)
    np.testing.assert_allclose(with_payload - without, 0.5 * jacobian.T @ jacobian, atol=1e-9)


def test_the_controllers_model_is_left_alone(scene):
    before = (
        scene.model.body_mass.copy(),
        scene.model.body_gravcomp.copy(),
        scene.model.dof_frictionloss.copy(),
    )
    robot = Robot(scene=scene, plant=ALL_ERRORS)
    for kept, now in zip(
        before,
        (scene.model.body_mass, scene.model.body_gravcomp, scene.model.dof_frictionloss),
        strict=True,
    ):
        np.testing.assert_array_equal(now, kept)
    assert robot.servo.model is scene.model
    np.testing.assert_allclose(
        robot.model.dof_frictionloss[scene.arm_dof], ALL_ERRORS.joint_friction_nm
    )
    cube = scene.bodies["cube_red"].id
    assert robot.model.body_mass[cube] == scene.model.body_mass[cube]
    assert Robot(scene=scene).model is scene.model


def moved(robot, steps=60):
    """Angles [steps, 7] of the arm while joint 1 accelerates."""
    t = (np.arange(steps) + 1) * robot.dt_s
    q, qd, qdd = (np.zeros((steps, 7)) for _ in range(3))
    q[:], q[:, 0], qd[:, 0], qdd[:, 0] = HOME_Q, t * t, 2 * t, 2.0
    block = ReferenceBlock(q, qd, qdd, np.ones(steps), np.full(steps, np.nan))
    return robot.execute(block, JointState.at_rest(HOME_Q))[0]


def test_a_delay_shifts_the_motion_by_whole_steps(scene):
    prompt = moved(Robot(scene=scene))
    late = moved(Robot(scene=scene, plant=PlantErrors(actuation_delay_s=0.010)))
    np.testing.assert_allclose(late[6:], prompt[:-6], atol=1e-6)
    assert np.abs(late[:6] - HOME_Q).max() < 1e-6


def test_noise_is_measured_but_not_real_and_repeats_with_its_seeds(scene):
    robot = Robot(scene=scene, plant=PlantErrors(sensor_noise_rad=0.0005, seed=3))
    q_true, errors = robot.data.qpos[scene.arm_qpos], []
    for _ in range(300):
        assert np.abs(hold(robot, 1)[-1] - HOME_Q).max() < 1e-4
        q = robot.joint_state()[0]
        np.testing.assert_array_equal(q, robot.joint_state()[0])
        np.testing.assert_array_equal(q, robot.observation().q_rad)
        assert q[0] == robot.observe()["joint1"]
        errors.append(q - robot.data.qpos[scene.arm_qpos])
    assert np.std(errors) == pytest.approx(0.0005, rel=0.1)
    robot.reset(1)
    other = robot.joint_state()[0] - q_true
    robot.reset(0)
    first = robot.joint_state()[0]
    robot.reset(0)
    np.testing.assert_array_equal(first, robot.joint_state()[0])
    assert not np.array_equal(first, other)


def test_friction_holds_the_arm_against_a_small_torque(scene):
    plants = PlantErrors(payload_kg=0.05), PlantErrors(payload_kg=0.05, joint_friction_nm=1.0)
    without, with_friction = (
        np.abs(hold(Robot(scene=scene, plant=p), 1200)[-1] - HOME_Q).max() for p in plants
    )
    assert with_friction < without / 5


@pytest.mark.parametrize(
    "values",
    [
        {"link_mass_scale": 0.0},
        {"payload_kg": -0.1},
        {"joint_friction_nm": np.nan},
        {"actuation_delay_s": 2.0},
        {"sensor_noise_rad": "much"},
        {"seed": -1},
    ],
)
def test_impossible_errors_are_refused(values):
    with pytest.raises(InputError, match=next(iter(values))):
        PlantErrors(**values)


def test_errors_of_another_robot_are_refused(scene):
    with pytest.raises(InputError, match="plant"):
        Robot(scene=scene, plant="all")  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning")
def test_the_errors_apply_to_any_robots_limbs():
    plant = PlantErrors(payload_kg=0.5, joint_friction_nm=0.3, link_mass_scale=1.1)
    robot = Robot("ur5e", plant=PlantErrors(payload_kg=0.5))
    start = robot.scene.robot.home_rad
    zeros = np.zeros((1200, 6))
    block = ReferenceBlock(
        np.tile(start, (1200, 1)), zeros, zeros, np.ones(1200), np.full(1200, np.nan)
    )
    q = robot.execute(block, JointState.at_rest(start))[0][-1]
    np.testing.assert_allclose(robot.servo.kp * (q - start), weight_torque(robot, 0.5), atol=5e-2)
    heavier, model = plant.apply(robot.scene.model, *robot.scene.robot.limbs), robot.scene.model
    np.testing.assert_allclose(heavier.dof_frictionloss[robot.scene.arm_dof], 0.3)
    arm = model.body_rootid == model.body_rootid[robot.scene.only.frame_body]
    assert heavier.body_mass[arm].sum() == pytest.approx(1.1 * model.body_mass[arm].sum() + 0.5)
    assert heavier.body_mass[~arm].sum() == pytest.approx(model.body_mass[~arm].sum())


def test_a_frame_that_a_joint_moves_needs_a_body_fixed_to_it():
    arm = """<mujoco><worldbody><body name="arm"><joint name="j"/><geom size=".1"/>{}</body></worldbody></mujoco>"""
    limb = replace(
        PANDA.limbs[0],
        joints=("j",),
        actuators=("a",),
        home=(0.0,),
        limits=LimbLimits(),
        frame="arm",
    )
    with pytest.raises(ConfigError, match="fixed to the last link"):
        PlantErrors(payload_kg=0.5).apply(mujoco.MjModel.from_xml_string(arm.format("")), limb)
    mounted = arm.format('<body name="hand" pos="0 0 .1" euler="180 0 0"><geom size=".05"/></body>')
    plant = PlantErrors(payload_kg=0.5).apply(mujoco.MjModel.from_xml_string(mounted), limb)
    data = mujoco.MjData(plant)
    mujoco.mj_kinematics(plant, data)
    hand = plant.body("hand").id
    assert plant.body_mass[hand] == 0.5
    np.testing.assert_allclose(data.xipos[hand], limb.tool_m, atol=1e-9)


def test_a_payload_is_carried_by_the_frame_s_own_body_and_not_by_another_one_on_the_link():
    arm = """<mujoco><worldbody><body name="arm"><joint name="j"/><geom size=".1"/>
    <body name="sensor"><geom size=".05"/></body>
    <body name="hand" pos="0 0 .1"><geom size=".05"/></body></body></worldbody></mujoco>"""
    limb = replace(
        PANDA.limbs[0],
        joints=("j",),
        actuators=("a",),
        home=(0.0,),
        limits=LimbLimits(),
        frame="hand",
    )
    model = mujoco.MjModel.from_xml_string(arm)
    plant = PlantErrors(payload_kg=0.5).apply(model, limb)
    assert plant.body("hand").mass[0] == 0.5
    assert plant.body("sensor").mass[0] == model.body("sensor").mass[0]


@pytest.mark.filterwarnings("ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning")
def test_another_arms_errors_are_identified_in_free_space():
    """Its hand is so low that the motion would hit the table; the robot's own model still has
    it.
    """
    limb = UR5E.limbs[0]
    plant = PlantErrors(payload_kg=0.5, actuation_delay_s=0.010, joint_friction_nm=0.5)
    low = np.array(limb.home) + [0.0, 0.45, 0.0, -0.45, 0.0, 0.0]
    scene = TableScene(robot=replace(UR5E, limbs=(replace(limb, home=tuple(low)),)))
    robot = Robot("ur5e", scene=scene, plant=plant)
    solid = robot.model.geom_contype.copy()
    found = robot.identify()
    assert found.payload_kg == pytest.approx(0.5, rel=0.1)
    assert found.delay_s == pytest.approx(0.010, abs=0.002)
    assert np.abs(np.array(found.friction_nm) - 0.5).max() < 0.25
    assert found.n_joints == 6
    np.testing.assert_array_equal(robot.model.geom_contype, solid)


def test_rollout_takes_errors_and_compensates_them(tmp_path):
    tracked = {}
    for how in ("none", "identified"):
        file = tmp_path / f"{how}.json"
        common = [
            "rollout",
            "--backend",
            "scripted",
            "--task",
            "reach",
            "--duration",
            "1",
            "--plant",
            "all-errors",
        ]
        main([*common, "--compensate", how, "--json", str(file)])
        tracked[how] = json.loads(file.read_text())["episodes"][0]["tracking"]["mean_mm"]
    assert tracked["identified"] < 0.6 * tracked["none"]
