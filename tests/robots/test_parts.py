"""Models that are put together of parts, and what a scene takes from a robot's specification."""

from dataclasses import replace

import mujoco
import numpy as np
import pytest

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.robots.catalogue import PANDA, get_robot, read_robot, write_robot
from strands_cosmos3.robots.model import assembled, load_robot
from strands_cosmos3.robots.spec import ModelPart, Workspace
from strands_cosmos3.sim.simulated_arm import ControlConfig
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.scene import DEFAULT_CUBES, TableScene

OPENARM_LEFT = get_robot("openarm_left")
OPENARM_RIGHT = get_robot("openarm_right")
UR5E = get_robot("ur5e")

TOOL = """<mujoco><option cone="elliptic" impratio="10"/><worldbody><body name="palm"><geom size=".01"/>
<body name="finger"><joint name="finger"/><geom size=".01"/></body></body></worldbody></mujoco>"""


@pytest.fixture
def tool(tmp_path):
    (tmp_path / "tool.xml").write_text(TOOL)
    return str(tmp_path / "tool.xml")


def test_a_part_is_mounted_on_a_body_with_its_contacts(tool):
    """Attaching drops the cone and impratio, without which grasps creep."""
    on = ModelPart(tool, "tool_", (0.0, 0.0, 0.1), mount="tool0", exclude=(("palm", "finger"),))
    model = assembled((ModelPart("ur5e.xml", position_m=(0.0, 0.0, 0.5)), on)).compile()
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    below = data.body("tool0").xmat.reshape(3, 3).T @ (
        data.body("tool_palm").xpos - data.body("tool0").xpos
    )
    np.testing.assert_allclose(below, [0, 0, 0.1], atol=1e-12)
    assert data.body("base").xpos[2] == 0.5
    assert (model.opt.cone, model.opt.impratio) == (mujoco.mjtCone.mjCONE_ELLIPTIC, 10)
    assert model.exclude_signature.size >= 1
    without = assembled(
        (ModelPart("ur5e.xml"), replace(on, exclude=(), without=("finger",)))
    ).compile()
    assert "tool_finger" not in [without.body(i).name for i in range(without.nbody)]
    for wrong in (
        replace(on, mount="no_such"),
        replace(on, without=("no_such",)),
        replace(on, exclude=(("palm", "no_such"),)),
    ):
        with pytest.raises(ConfigError, match="no_such"):
            assembled((ModelPart("ur5e.xml"), wrong))


def test_new_fields_survive_a_file(tmp_path, tool):
    arm = UR5E.limbs[0]
    gripper = replace(arm.gripper, fingers=("finger1", "finger2"), gap_m=(0.0, 0.03, 0.08))
    parts = (
        *UR5E.model,
        ModelPart(tool, "t_", mount="tool0", without=("finger",), exclude=(("palm", "palm"),)),
    )
    robot = replace(
        UR5E,
        name="mine",
        model=parts,
        limbs=(replace(arm, gripper=gripper, tool_roll_deg=180.0),),
        workspace=Workspace((0.3, 0.5), (-0.1, 0.1), (0.4, 0.3), 30.0, 0.15),
    )
    (tmp_path / "mine.toml").write_text(write_robot(robot))
    assert read_robot(tmp_path / "mine.toml") == robot
    with pytest.raises(ConfigError, match="grow"):
        replace(gripper, gap_m=(0.1, 0.0))
    with pytest.raises(ConfigError, match="grow"):
        Workspace(x_m=(0.5, 0.3))


def test_a_first_link_cannot_touch_its_base():
    """MuJoCo ignores contacts between neighbours unless one of them is fixed to the world."""
    model = load_robot(UR5E)
    assert model.nexclude >= 1


def test_a_scene_follows_the_robot_s_workspace():
    workspace = Workspace((0.40, 0.55), (-0.40, -0.27), (0.30, 0.30), 15.0, 0.13)
    scene = TableScene(DEFAULT_CUBES, robot=replace(UR5E, workspace=workspace))
    for seed in range(60):  # crowded: some layouts have to start again
        xy = scene.sample_layout(np.random.default_rng(seed)).xy_m
        assert (xy >= [0.40, -0.40]).all()
        assert (xy <= [0.55, -0.27]).all()
    data = mujoco.MjData(scene.model)
    mujoco.mj_kinematics(scene.model, data)
    np.testing.assert_allclose(data.body("bin").xpos[:2], (0.30, 0.30))
    assert scene.bin.center_m == (0.30, 0.30)


@pytest.mark.filterwarnings("ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning")
def test_assumed_limits_are_said_and_refused_by_strict():
    robot = Robot("ur5e")
    rollout = robot.run_policy(policy_config={"backend": "scripted"}, task="reach", duration=0.1)
    assert robot.limits.assumed
    assert robot.limits.derated(0.5).assumed
    assert rollout.to_dict()["assumed"] is True
    assert "borrowed_domain" not in rollout.to_dict()
    assert not Robot("panda", ControlConfig(strict=True)).limits.assumed
    with pytest.raises(ConfigError, match="strict"):
        Robot("ur5e", ControlConfig(strict=True), robot.scene)


def test_fingers_hold_from_both_sides_of_their_gap():
    """Where fingers are named, they open away from each other, whatever their joints' axes."""
    arm = UR5E.limbs[0]
    model = load_robot(UR5E)
    bodies = tuple(
        model.body(int(model.jnt_bodyid[model.joint(name).id])).name for name in arm.gripper.joints
    )
    named = replace(
        UR5E,
        limbs=(
            replace(arm, gripper=replace(arm.gripper, fingers=bodies, gap_m=(0.0, 0.02, 0.085))),
        ),
    )
    by_axis, by_place = TableScene(robot=UR5E), TableScene(robot=named)
    for scene in (by_axis, by_place):
        data = mujoco.MjData(scene.model)
        scene.reset(data, scene.sample_layout(np.random.default_rng(0)))
        axes = [scene.only.opening_direction(data, finger) for finger in (0, 1)]
        np.testing.assert_allclose(axes[0], data.xaxis[scene.only.finger_joints[0]], atol=1e-6)
        np.testing.assert_allclose(axes[1], data.xaxis[scene.only.finger_joints[1]], atol=1e-6)
    assert by_axis.only.gap_m == pytest.approx(0.085)
    np.testing.assert_array_equal(by_place.only.gap_m, (0.0, 0.02, 0.085))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning")
def test_the_expert_reads_a_gap_that_is_not_linear():
    """It closes on a cube by the gap; told a wrong one, it does not recognise the cube between
    its fingers.
    """
    arm = UR5E.limbs[0]
    model = load_robot(UR5E)
    bodies = tuple(
        model.body(int(model.jnt_bodyid[model.joint(name).id])).name for name in arm.gripper.joints
    )

    def picked(gaps):
        gripper = replace(arm.gripper, fingers=bodies, gap_m=gaps)
        scene = TableScene(robot=replace(UR5E, limbs=(replace(arm, gripper=gripper),)))
        robot = Robot("ur5e", scene=scene)
        return robot.run_policy(
            policy_config={"backend": "scripted"},
            task="pick",
            seed=1,
            duration=9.0,
            control_frequency=20.0,
        )

    assert picked((0.0, 0.0425, 0.085)).success
    assert not picked((0.0, 0.08, 0.085)).success


def test_one_arm_mirrors_the_other():
    left, right = OPENARM_LEFT.limbs[0], OPENARM_RIGHT.limbs[0]
    np.testing.assert_allclose(left.home, np.multiply(right.home, (-1, -1, -1, 1, -1, -1, -1)))
    assert left.gripper.command.open_value == -right.gripper.command.open_value > 0
    assert OPENARM_LEFT.workspace.y_m == tuple(-y for y in reversed(OPENARM_RIGHT.workspace.y_m))
    assert PANDA.workspace == Workspace()
