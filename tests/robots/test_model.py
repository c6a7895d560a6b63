"""Models of robots: parts put together, names, actuators and grippers checked before anything
moves; and what a scene takes from a robot's specification.
"""

from __future__ import annotations

import re
from dataclasses import replace

import mujoco
import numpy as np
import pytest

from helpers.robot_motions import BUNDLED_ROBOTS
from strands_cosmos3.cli import main
from strands_cosmos3.embodiments import GripperConvention
from strands_cosmos3.errors import ConfigError, InputError, NonFiniteError
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.catalogue import PANDA, get_robot, read_robot, write_robot
from strands_cosmos3.robots.inspection import inspect_model
from strands_cosmos3.robots.model import assembled, load_robot
from strands_cosmos3.robots.spec import (
    Figures,
    HandRates,
    LimbLimits,
    ModelPart,
    RobotSpec,
    ServoGains,
    Workspace,
)
from strands_cosmos3.sim.simulated_arm import ControlConfig
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.scene import DEFAULT_CUBES, TableScene

UR5E, DUAL = get_robot("ur5e"), get_robot("dual_panda")
ARM = UR5E.limb()
assert ARM.gripper is not None


def with_limb(**changes: object) -> RobotSpec:
    return replace(UR5E, limbs=(replace(ARM, **changes),))


def with_gripper(**changes: object) -> RobotSpec:
    return with_limb(gripper=replace(ARM.gripper, **changes))


@pytest.mark.parametrize("name", BUNDLED_ROBOTS)
def test_installed_robots_drive_their_own_joints(name):
    assert load_robot(get_robot(name)).nu == sum(
        len(limb.joints) + (limb.gripper is not None) for limb in get_robot(name).limbs
    )


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (
            (1, 0, 2, 3, 4, 5),
            "'shoulder_lift' for joint 'shoulder_pan_joint', but .* it drives "
            "'shoulder_lift_joint'",
        ),
        (
            (0, 1, 2, 3, 4, 4),
            "'wrist_2' is named for joint 'wrist_2_joint' and for joint 'wrist_3_joint'",
        ),
    ],
)
def test_an_actuator_of_another_joint_is_refused(order, said):
    robot = with_limb(actuators=tuple(ARM.actuators[i] for i in order))
    for load in (load_robot, lambda spec: TableScene(robot=spec)):
        with pytest.raises(ConfigError, match=said):
            load(robot)


def test_a_gripper_cannot_be_a_joint_of_the_arm_or_another_arms():
    with pytest.raises(
        ConfigError,
        match="'wrist_3' is named for joint 'wrist_3_joint' and for the gripper of 'arm'",
    ):
        load_robot(with_gripper(actuator="wrist_3"))
    left, right = DUAL.limbs
    shared = replace(right, gripper=replace(right.gripper, actuator=left.gripper.actuator))
    with pytest.raises(
        ConfigError, match="for the gripper of 'left' and for the gripper of 'right'"
    ):
        load_robot(replace(DUAL, limbs=(left, shared)))
    exchanged = (replace(left, actuators=right.actuators), replace(right, actuators=left.actuators))
    with pytest.raises(ConfigError, match="it drives 'right_joint1'"):
        load_robot(replace(DUAL, limbs=exchanged))


def test_a_tendon_is_not_a_joint():
    panda = get_robot("panda")
    arm = panda.limb()
    by_tendon = replace(arm, actuators=(*arm.actuators[:-1], arm.gripper.actuator), gripper=None)
    with pytest.raises(
        ConfigError,
        match="'joint7', but in the model it drives 'finger_joint1' and 'finger_joint2'",
    ):
        load_robot(replace(panda, limbs=(by_tendon,)))


def test_a_grippers_values_are_in_the_models_unit():
    opening, command = ARM.gripper.opening, ARM.gripper.command
    for changes in (
        {"opening": GripperConvention(1000 * opening.open_value, opening.closed_value, "mm")},
        {"command": replace(command, open_value=2 * command.open_value + 1.0)},
        {"command": replace(command, closed_value=command.closed_value - 1.0)},
    ):
        with pytest.raises(
            ConfigError,
            match=r"the gripper of limb 'arm': .*_value .* is outside the model's range",
        ):
            load_robot(with_gripper(**changes))


def test_slides_that_close_where_they_should_open_are_refused_by_the_scene():
    opening = ARM.gripper.opening
    inverted = replace(opening, open_value=opening.closed_value, closed_value=opening.open_value)
    with pytest.raises(ConfigError, match="gap_m = "):
        TableScene(robot=with_gripper(opening=inverted))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fovy_deg": 180.0}, "below 180"),
        ({"target_m": (0.0, 0.0, 0.1), "position_m": (0.0, 0.0, 0.1)}, "other than its position"),
        ({"up": (0.0, 0.0, 0.0)}, "not along up"),
        ({"position_m": (0.0, float("nan"), 0.0)}, "finite"),
    ],
)
def test_a_camera_looks_somewhere(changes, said):
    with pytest.raises((ConfigError, NonFiniteError), match=said):
        replace(UR5E.cameras[0], **changes)
    with pytest.raises(ConfigError, match="cameras of 'ur5e'"):
        replace(UR5E, cameras=UR5E.cameras * 2)


def test_a_tool_is_finite():
    with pytest.raises(NonFiniteError, match="tool_m of limb 'arm'"):
        with_limb(tool_m=(0.0, 0.0, float("nan")))


def test_motors_need_gains_to_be_simulated(tmp_path):
    """Their control is a torque; an angle written to it would not hold the arm."""
    text = (resource("assets/ur5e.xml")).read_text()
    motors = re.sub(
        r'<position name="elbow"[^>]*>', '<motor name="elbow" joint="elbow_joint"/>', text
    )
    assert motors != text
    (tmp_path / "arm.xml").write_text(motors)
    robot = replace(UR5E, model=(ModelPart(str(tmp_path / "arm.xml")),))
    load_robot(robot)
    with pytest.raises(
        ConfigError,
        match=r"elbow .it is a motor.* of limb 'arm' are not position servos; give the limb gains",
    ):
        TableScene(robot=robot)
    gains = ServoGains(Figures((2000.0,) * 6, "tuned"), Figures((400.0,) * 6, "tuned"))
    TableScene(robot=replace(robot, limbs=(replace(ARM, gains=gains),)))


def test_a_robots_file_with_a_table_of_its_own_is_no_robot_for_the_scene(tmp_path):
    text = resource("assets/ur5e.xml").read_text()
    own = text.replace(
        "<worldbody>", '<worldbody><geom name="table" type="plane" size="1 1 .1"/>', 1
    )
    (tmp_path / "arm.xml").write_text(own)
    robot = replace(UR5E, model=(ModelPart(str(tmp_path / "arm.xml")),))
    load_robot(robot)
    with pytest.raises(ConfigError, match=r"cannot build the scene of robot 'ur5e'.*table"):
        TableScene(robot=robot)


def exchanged(**of: str) -> RobotSpec:
    """Two Pandas, each with a part of the other: limb's name -> field."""
    left, right = DUAL.limbs
    return replace(
        DUAL,
        limbs=(
            replace(
                left,
                **{field: getattr(right, field) for side, field in of.items() if side == "left"},
            ),
            replace(
                right,
                **{field: getattr(left, field) for side, field in of.items() if side == "right"},
            ),
        ),
    )


@pytest.mark.parametrize(
    ("robot", "said"),
    [
        (
            exchanged(left="base", right="base"),
            "base 'right_link0' of limb 'left' must be .*'left_joint1': left_link0",
        ),
        (exchanged(right="base"), "base 'left_link0' of limb 'right'"),
        (
            exchanged(right="tool"),
            "tool 'left_tcp' of limb 'right' is a site that its joint 'right_joint7' does not move",
        ),
    ],
)
def test_a_limbs_base_and_tool_are_its_own(robot, said):
    with pytest.raises(ConfigError, match=said):
        load_robot(robot)


def test_home_lies_within_the_range():
    load_robot(with_limb(home=(*ARM.home[:2], 3.14, *ARM.home[3:])))
    with pytest.raises(
        ConfigError, match=r"'elbow_joint' at 3\.2, outside its range -3\.14159 to 3\.14159"
    ):
        load_robot(with_limb(home=(*ARM.home[:2], 3.2, *ARM.home[3:])))


@pytest.mark.parametrize("name", ["q_min", "velocity", "acceleration", "jerk", "torque"])
def test_absurd_limits_are_refused(name):
    figures = Figures((-1e300 if name == "q_min" else 1e300,) * 6, "a slip")
    with pytest.raises(InputError, match=f"{name} limits must lie between"):
        LimbLimits(**{name: figures, **({"q_max": figures} if name == "q_min" else {})})
    with pytest.raises(InputError, match="the hand's velocity must lie between"):
        HandRates(1e300, 1.0, "a slip")


SIX = (1.0,) * 6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda: with_limb(
                gains=ServoGains(Figures((-1.0,) * 6, "a slip"), Figures(SIX, "a slip"))
            ),
            "gains kp of limb 'arm' must lie",
        ),
        (
            lambda: with_limb(
                gains=ServoGains(Figures(SIX, "a slip"), Figures((-1.0,) * 6, "a slip"))
            ),
            "gains kd of limb 'arm' must lie",
        ),
        (
            lambda: with_limb(tool_m=(0.0, 0.0, 5e9)),
            "tool_m of limb 'arm' must lie between -10 and 10",
        ),
        (lambda: with_limb(tool_roll_deg=1e9), "tool_roll_deg of limb 'arm' must lie"),
        (lambda: with_gripper(gap_m=(0.0, 100.0)), "gap_m must lie between 0 and 1"),
        (lambda: with_gripper(grip_gain=1e12), "grip_gain must lie between 0 and 1000"),
        (lambda: Workspace(x_m=(10.0, 11.0)), "a workspace's x_m must lie between -3 and 3"),
        (lambda: Workspace(bin_m=(0.4, 40.0)), "a workspace's bin_m must lie"),
        (lambda: Workspace(grasp_yaw_deg=1e9), "a workspace's grasp_yaw_deg must lie"),
        (lambda: Workspace(carry_m=-5.0), "a workspace's carry_m must lie between 0 and 3"),
        (lambda: ModelPart("ur5e.xml", position_m=(0.0, 1e9, 0.0)), "a part's position_m must lie"),
        (lambda: ModelPart("ur5e.xml", yaw_deg=1e9), "a part's yaw_deg must lie"),
        (
            lambda: replace(UR5E, model=(ModelPart("ur5e.xml", mount="nowhere"),)),
            "mounted on 'nowhere', but no part precedes",
        ),
        (lambda: replace(UR5E, name="../../x"), "a robot's name must not be a path"),
        (lambda: replace(UR5E, name="a\\b"), "a robot's name must not be a path"),
        (lambda: replace(UR5E, name="a\x1b[2J"), "a robot's name and title are one line"),
        (lambda: replace(UR5E, title="a\0b"), "a robot's name and title are one line"),
    ],
)
def test_absurd_robots_are_refused(change, said):
    with pytest.raises((ConfigError, InputError), match=said):
        change()


def test_inspect_says_what_the_simulation_lacks(tmp_path, capsys):
    file = tmp_path / "arm.toml"
    lacking = replace(with_limb(gripper=None), cameras=(), embodiment="droid")
    file.write_text(write_robot(lacking))
    assert main(["robot", "inspect", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "there is no camera 'wrist' for the views" in printed
    assert "has no gripper: a table [limbs.gripper]" in printed


ARM_XML = """<mujoco><worldbody><body name="pelvis">{free}<geom size=".1"/>{links}</body></worldbody>
<actuator>{actuators}</actuator></mujoco>"""


def chain(n: int, end: str) -> str:
    return (
        f'<body name="l{n}"><joint name="j{n}" range="-1 1"/><geom size=".01"/>'
        f"{chain(n - 1, end) if n else end}</body>"
    )


JAW = (
    '<body name="mount"><geom size=".01"/></body><body name="jaw"><joint name="grip" range="0 1"/>'
    '<geom size=".01"/></body>'
)


@pytest.mark.parametrize(
    ("free", "actuator", "said"),
    [
        (
            "<freejoint/>",
            '<position name="a" joint="j0"/>',
            "free or ball joint, '' of body 'pelvis'; delete that joint",
        ),
        (
            "",
            '<position joint="j0"/><position joint="grip"/>',
            "2 actuators without a name, of j0, grip; name them",
        ),
    ],
)
def test_a_model_that_no_limb_can_name_is_refused(free, actuator, said, tmp_path):
    (tmp_path / "arm.xml").write_text(
        ARM_XML.format(free=free, links=chain(4, JAW), actuators=actuator)
    )
    with pytest.raises(ConfigError, match=said):
        inspect_model(tmp_path / "arm.xml")


def test_a_jaw_beside_a_camera_mount_is_the_limbs_gripper(tmp_path):
    """As an SO-101's: its gripper's body carries the mount, which moves nothing, and the jaw."""
    jaw = '<position name="g" joint="grip" ctrlrange="0 1"/>'
    (tmp_path / "arm.xml").write_text(ARM_XML.format(free="", links=chain(4, JAW), actuators=jaw))
    robot, _ = inspect_model(tmp_path / "arm.xml")
    limb = robot.limb()
    assert (limb.frame, limb.joints[-1]) == ("l0", "j0")
    assert limb.gripper is not None
    assert limb.gripper.joints == ("grip",)


OPENARM_LEFT = get_robot("openarm_left")
OPENARM_RIGHT = get_robot("openarm_right")

TOOL = """<mujoco><option cone="elliptic" impratio="10"/><worldbody><body name="palm"><geom size=".01"/>
<body name="finger"><joint name="finger"/><geom size=".01"/></body></body></worldbody></mujoco>"""


@pytest.fixture
def tool(tmp_path):
    (tmp_path / "tool.xml").write_text(TOOL)
    return str(tmp_path / "tool.xml")


def test_a_part_is_mounted_on_a_body_with_its_contacts(tool):
    """The contacts of the whole are a scene's, whatever its parts state."""
    on = ModelPart(tool, "tool_", (0.0, 0.0, 0.1), mount="tool0", exclude=(("palm", "finger"),))
    model = assembled((ModelPart("ur5e.xml", position_m=(0.0, 0.0, 0.5)), on)).compile()
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    below = data.body("tool0").xmat.reshape(3, 3).T @ (
        data.body("tool_palm").xpos - data.body("tool0").xpos
    )
    np.testing.assert_allclose(below, [0, 0, 0.1], atol=1e-12)
    assert data.body("base").xpos[2] == 0.5
    assert (model.opt.cone, model.opt.impratio) == (mujoco.mjtCone.mjCONE_ELLIPTIC, 20)
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
