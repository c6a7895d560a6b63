"""Robots as data: the installed ones against published figures, TOML files, typed errors, and
what a model tells.
"""

import warnings
from dataclasses import replace

import mujoco
import numpy as np
import pytest

from helpers.robot_motions import BUNDLED_ROBOTS
from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import (
    ConfigError,
    Cosmos3Error,
    InputError,
    ResourceNotFoundError,
    UnknownNameError,
)
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.catalogue import (
    PANDA,
    get_robot,
    read_robot,
    recorded_robot,
    write_robot,
)
from strands_cosmos3.robots.inspection import inspect_model
from strands_cosmos3.robots.limits import LimitsAssumedWarning, joined_limits, robot_limits
from strands_cosmos3.robots.model import (
    base_pose,
    kinematics_of,
    load_panda,
    load_robot,
)
from strands_cosmos3.robots.panda import FER, FR3, HOME_Q, dh_forward
from strands_cosmos3.robots.spec import Figures, LimbLimits, ModelPart, ServoGains, join_limbs

DUAL_PANDA = get_robot("dual_panda")
UR5E = get_robot("ur5e")

# Universal Robots, "DH parameters for calculations of kinematics and dynamics", UR5e: a, d, alpha;
# mass, centre of mass
UR5E_DH = [
    (0, 0.1625, 1),
    (-0.425, 0, 0),
    (-0.3922, 0, 0),
    (0, 0.1333, 1),
    (0, 0.0997, -1),
    (0, 0.0996, 0),
]
UR5E_MASS = [3.761, 8.058, 2.846, 1.37, 1.3, 0.365]
UR5E_COM = [
    (0, -0.02561, 0.00193),
    (0.2125, 0, 0.11336),
    (0.15, 0, 0.0265),
    (0, -0.0018, 0.01634),
    (0, 0.0018, 0.01634),
]
UR5E_COM += [(0, 0, -0.00116)]
LINKS = (
    "shoulder_link",
    "upper_arm_link",
    "forearm_link",
    "wrist_1_link",
    "wrist_2_link",
    "wrist_3_link",
)


def quietly(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        return function(*args)


def pose(data, body):
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = data.body(body).xmat.reshape(3, 3), data.body(body).xpos
    return T


def standard_dh(q):
    """[7, 4, 4] UR's frames 0 to 6 at angles [6]: ``Rz(q) Tz(d) Tx(a) Rx(alpha)``."""
    frames = [np.eye(4)]
    for (a, d, quarter), angle in zip(UR5E_DH, q, strict=True):
        c, s, ca, sa = np.cos(angle), np.sin(angle), float(quarter == 0), float(quarter)
        frames.append(
            frames[-1]
            @ [
                [c, -s * ca, s * sa, a * c],
                [s, c * ca, -c * sa, a * s],
                [0, sa, ca, d],
                [0, 0, 0, 1],
            ]
        )
    return np.stack(frames)


def test_the_ur5e_has_the_published_kinematics_masses_and_centres():
    model = load_robot(UR5E)
    data = mujoco.MjData(model)
    for q in np.random.default_rng(0).uniform(-3, 3, (10, 6)):
        data.qpos[:6] = q
        mujoco.mj_kinematics(model, data)
        frames = standard_dh(q)
        np.testing.assert_allclose(pose(data, "tool0"), frames[6], atol=1e-12)
        for link, frame, com in zip(LINKS, frames[1:], UR5E_COM, strict=True):
            np.testing.assert_allclose(data.body(link).xipos, (frame @ [*com, 1])[:3], atol=1e-12)
    np.testing.assert_allclose([model.body(link).mass[0] for link in LINKS], UR5E_MASS)
    ranges = model.jnt_range[[model.joint(name).id for name in UR5E.joints]]
    np.testing.assert_allclose(ranges, np.outer([2, 2, 1, 2, 2, 2], (-np.pi, np.pi)))
    np.testing.assert_array_equal(model.actuator_forcerange[:6, 1], [150, 150, 150, 28, 28, 28])


def test_the_ur5e_s_home_looks_at_the_table_in_front_of_it():
    model = load_robot(UR5E)
    data = mujoco.MjData(model)
    data.qpos[:] = LimbIK(UR5E, model=model).home
    mujoco.mj_kinematics(model, data)
    T = pose(data, "tool0")
    np.testing.assert_allclose(T[:3, 2], [0, 0, -1], atol=1e-12)
    assert T[0, 3] > 0.4
    gap = data.geom("left_pad").xpos - data.geom("right_pad").xpos
    assert np.linalg.norm(gap) - 2 * model.geom("left_pad").size[1] == pytest.approx(0.085)


def test_the_panda_s_robot_is_today_s_model_and_its_limits_today_s_table():
    model, today = load_robot(PANDA), load_panda()
    for name in (name for name in dir(today) if isinstance(getattr(today, name), np.ndarray)):
        np.testing.assert_array_equal(getattr(model, name), getattr(today, name), name)
    limits = robot_limits(model, PANDA)["arm"]
    for name in ("q_min", "q_max", "velocity", "acceleration", "jerk", "torque"):
        np.testing.assert_array_equal(getattr(limits, name), getattr(FER, name), name)
    assert (limits.hands[0].velocity, limits.hands[0].acceleration) == (1.7, 13.0)
    np.testing.assert_array_equal(LimbIK(PANDA, model=model).home, model.key("home").qpos)


def test_kinematics_come_from_the_model_and_the_panda_s_are_the_published_ones_bit_for_bit():
    rng = np.random.default_rng(5)
    q = rng.uniform(FER.q_min, FER.q_max, (50, 7))
    for robot in (PANDA, DUAL_PANDA):  # recordings hold these figures
        kinematics = kinematics_of(load_robot(robot), robot.limbs[-1])
        np.testing.assert_array_equal(kinematics.forward(q), dh_forward(q))
        np.testing.assert_array_equal(kinematics.forward(q[0]), dh_forward(q[0]))
    model = load_panda()
    model.body_pos[model.body("link4").id] += 0.001
    moved = kinematics_of(model, PANDA.limb()).forward(q)
    assert np.abs(moved - dh_forward(q)).max() > 5e-4
    data = mujoco.MjData(model)
    data.qpos[:7] = q[0]
    mujoco.mj_kinematics(model, data)
    np.testing.assert_allclose(moved[0], pose(data, "hand"), atol=1e-12)
    q = rng.uniform(-3, 3, (20, 6))
    ends = np.stack([standard_dh(row)[6] for row in q])
    np.testing.assert_allclose(
        kinematics_of(load_robot(UR5E), UR5E.limb()).forward(q), ends, atol=1e-12
    )


def test_the_fr3_has_its_own_limits_within_the_model_s_ranges():
    robot = get_robot("fr3")
    model = load_robot(robot)
    limits = robot_limits(model, robot)["arm"]
    np.testing.assert_array_equal(limits.velocity, FR3.velocity)
    np.testing.assert_array_equal(limits.q_min, np.maximum(FER.q_min, FR3.q_min))
    np.testing.assert_array_equal(limits.q_max, np.minimum(FER.q_max, FR3.q_max))
    np.testing.assert_array_equal(
        model.jnt_range[:7], np.column_stack((limits.q_min, limits.q_max))
    )
    assert limits.hands[0].acceleration == 9.0


def test_two_pandas_stand_side_by_side_the_left_one_to_the_left():
    model = load_robot(DUAL_PANDA)
    assert (model.nq, model.nu, model.opt.impratio, model.opt.cone) == (
        18,
        16,
        20,
        mujoco.mjtCone.mjCONE_ELLIPTIC,
    )
    assert model.opt.timestep == pytest.approx(1 / 600)
    data, q = mujoco.MjData(model), HOME_Q + 0.1
    for side, y_m in (("left", 0.3), ("right", -0.3)):
        limb = DUAL_PANDA.limb(side)
        T_world_base = base_pose(model, limb)
        np.testing.assert_allclose(T_world_base[:3, 3], [0, y_m, 0], atol=1e-15)
        data.qpos[[model.joint(name).qposadr[0] for name in limb.joints]] = q
        mujoco.mj_kinematics(model, data)
        np.testing.assert_allclose(
            pose(data, f"{side}_hand"), T_world_base @ dh_forward(q), atol=1e-12
        )
        assert limb.frame_called("hand") == f"{side}_hand"
        q = q - 0.2


def test_joined_limits_keep_each_limb_s_order_and_hand():
    model = load_robot(DUAL_PANDA)
    limits = robot_limits(model, DUAL_PANDA)
    both = joined_limits(
        [limits["left"], limits["right"].derated(0.5)], [limb.joints for limb in DUAL_PANDA.limbs]
    )
    np.testing.assert_array_equal(both.velocity, np.concatenate((FER.velocity, FER.velocity / 2)))
    left, right = both.hands
    values = np.arange(14.0)[None]
    assert (left.of_chain(values).tolist(), right.of_chain(values).tolist()) == (
        [list(range(7))],
        [list(range(7, 14))],
    )
    assert (left.velocity, right.velocity) == (1.7, 0.85)


@pytest.mark.parametrize("name", BUNDLED_ROBOTS)
def test_a_robot_survives_its_toml_file(name, tmp_path):
    path = tmp_path / "robot.toml"
    path.write_text(write_robot(get_robot(name)))
    assert read_robot(path) == get_robot(name)
    assert get_robot(str(path)) == get_robot(name)


def test_missing_limits_are_assumed_with_one_warning_that_lists_them():
    model = load_robot(UR5E)
    with pytest.warns(LimitsAssumedWarning) as told:
        limits = robot_limits(model, UR5E)["arm"]
    assert len(told) == 1
    assert all(
        word in str(told[0].message) for word in ("ur5e", "acceleration", "3.14", "jerk", "1570")
    )
    assert "velocity" not in str(told[0].message)
    np.testing.assert_array_equal(limits.velocity, np.full(6, np.pi))
    np.testing.assert_array_equal(limits.acceleration, np.full(6, 3.14))
    bare = replace(UR5E, limbs=(replace(UR5E.limbs[0], limits=LimbLimits()),))
    with pytest.warns(LimitsAssumedWarning, match=r"velocity \[1.3") as told:
        limits = robot_limits(model, bare)["arm"]
    assert len(told) == 1
    # the model's, which is not assumed
    np.testing.assert_array_equal(limits.torque, [150, 150, 150, 28, 28, 28])
    assert "torque" not in str(told[0].message)


GOOD = write_robot(UR5E)


def loaded(path):
    robot = read_robot(path)
    return base_pose(load_robot(robot), robot.limb())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('frame = "tool0"\n', "", "limbs[0] lacks frame"),
        ("frame = ", "farme = ", "unknown field 'farme'"),
        ('"shoulder_lift_joint", ', "", "has 5 joints, but its actuators has 6"),
        ('file = "ur5e.xml"', 'file = "nowhere.xml"', "nowhere.xml"),
        ('frame = "tool0"', 'frame = "tool1"', "names the body tool1"),
        ('"wrist_3_joint"]', '"wrist_4_joint"]', "names the joint wrist_4_joint"),
        (
            'frame = "tool0"',
            'frame = "forearm_link"',
            "must be all those between the world and 'forearm_link'",
        ),
        ('name = "arm"', 'name = ""', "must be a string that is not empty"),
        ("home = [3.141592653589793", 'home = ["x"', "home"),
        ('base = "base"', 'base = "forearm_link"', "fixed to the world"),
        ("open_value = 0.0425", "open_value = 0.0", "must be finite and differ"),
        (
            "[limbs.limits.torque]\nvalues = [150.0",
            "[limbs.limits.torque]\nvalues = [-150.0",
            "must be above zero",
        ),
        ("[[limbs]]", "[limbs]", "must be a list of tables"),
        ("name = ", "name: ", "cannot be read as TOML"),
    ],
)
def test_a_malformed_file_says_what_is_wrong(old, new, said, tmp_path):
    assert old in GOOD
    path = tmp_path / "robot.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises((ConfigError, InputError, ResourceNotFoundError)) as error:
        loaded(path)
    assert said in str(error.value)


def test_an_error_in_a_file_names_the_file_and_the_table(tmp_path):
    for old, new, kind in (
        ('frame = "tool0"', 'frame = "tool0"\nframe_type = "geom"', UnknownNameError),
        ("home = [", "home = [[1.0], ", InputError),
    ):
        path = tmp_path / "robot.toml"
        path.write_text(GOOD.replace(old, new, 1))
        with pytest.raises(kind, match=r"robot\.toml: limbs\[0\]"):
            read_robot(path)


def test_what_a_file_s_robot_lacks_in_its_model_names_the_file(tmp_path):
    """Found when the model is compiled, long after the file was read; the file is not part of
    what the robot is.
    """
    path, good = tmp_path / "robot.toml", tmp_path / "good.toml"
    for old, new, said in (
        ('"shoulder_pan_joint"', '"shoulder"', "names the joint shoulder"),
        ('"ur5e.xml"', '"elsewhere.xml"', "'elsewhere.xml' is neither a file"),
        ("home = [3.14", "home = [9.14", "home of limb 'arm'"),
    ):
        assert old in GOOD
        path.write_text(GOOD.replace(old, new, 1))
        with pytest.raises((ConfigError, ResourceNotFoundError)) as error:
            load_robot(read_robot(path))
        assert str(error.value).startswith(f"{path}: ")
        assert said in str(error.value)
    good.write_text(GOOD)
    assert read_robot(good) == UR5E
    assert read_robot(good).file == str(good)
    assert write_robot(read_robot(good)) == GOOD
    good.write_text(f'file = "x"\n{GOOD}')
    with pytest.raises(ConfigError, match="has the unknown field 'file'"):
        read_robot(good)


def test_a_recorded_robot_is_a_known_one_or_none():
    assert recorded_robot("Franka") is PANDA
    assert [recorded_robot(kind) for kind in (None, "", "so101_mine", "ur5e.toml")] == [None] * 4


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(UnknownNameError, match="dual_panda"):
        get_robot("ur5")
    with pytest.raises(UnknownNameError, match="left, right"):
        DUAL_PANDA.limb("arm")
    with pytest.raises(ConfigError, match="left, right; name one"):
        DUAL_PANDA.limb()
    with pytest.raises(ResourceNotFoundError, match="robot inspect"):
        get_robot("nowhere.toml")
    assert get_robot("Franka") is PANDA
    for junk in (None, 3, b"x", object()):
        with pytest.raises(Cosmos3Error):
            get_robot(junk)


def test_limbs_are_joined_by_name():
    dual, turned = (
        get_embodiment("robomind-franka-dual"),
        replace(DUAL_PANDA, limbs=DUAL_PANDA.limbs[::-1]),
    )
    for robot in (DUAL_PANDA, turned):
        joined = {limb.name: columns.pose.start for limb, columns in join_limbs(robot, dual)}
        assert joined == {"left": 0, "right": 10}
    agibot = {
        limb.name: columns.pose.start
        for limb, columns in join_limbs(DUAL_PANDA, get_embodiment("agibotworld"))
    }
    assert agibot == {"left": 19, "right": 9}  # the head has no counterpart, and needs none
    with pytest.raises(ConfigError, match=r"limbs arm, but .*left, right"):
        join_limbs(PANDA, dual)
    bare = replace(PANDA, limbs=(replace(PANDA.limbs[0], gripper=None),))
    with pytest.raises(ConfigError, match="gripper"):
        join_limbs(bare, get_embodiment("droid"))


def test_limbs_must_be_independent_chains():
    right = replace(
        DUAL_PANDA.limb("right"), joints=("left_joint1", *DUAL_PANDA.limb("right").joints[1:])
    )
    with pytest.raises(ConfigError, match="share the joints left_joint1"):
        replace(DUAL_PANDA, limbs=(DUAL_PANDA.limb("left"), right))


def test_motors_become_position_servos_with_the_given_gains(tmp_path):
    spec = mujoco.MjSpec.from_string(get_model("ur5e.xml"))
    for name in UR5E.limb().actuators[:3]:
        spec.actuator(name).set_to_motor()
        spec.actuator(name).ctrlrange = [-150, 150]
    spec.compile()
    (tmp_path / "motors.xml").write_text(spec.to_xml())
    limb = replace(
        UR5E.limbs[0], gains=ServoGains(Figures((900.0,) * 6, "test"), Figures((90.0,) * 6, "test"))
    )
    robot = replace(UR5E, model=(ModelPart(str(tmp_path / "motors.xml")),), limbs=(limb,))
    model = load_robot(robot)
    np.testing.assert_array_equal(model.actuator_gainprm[:6, 0], 900)
    np.testing.assert_array_equal(model.actuator_biasprm[:6, 1:3], np.tile((-900, -90), (6, 1)))
    np.testing.assert_allclose(
        model.actuator_ctrlrange[:6], np.outer([2, 2, 1, 2, 2, 2], (-np.pi, np.pi)), rtol=1e-5
    )
    (tmp_path / "robot.toml").write_text(write_robot(robot))
    assert read_robot(tmp_path / "robot.toml") == robot


def get_model(name):
    return resource(f"assets/{name}").read_text()


@pytest.mark.parametrize("robot", [PANDA, UR5E], ids=["panda", "ur5e"])
def test_a_model_tells_joints_frames_home_torques_and_gripper(robot):
    found, notes = inspect_model(resource(f"assets/{robot.name}.xml"))
    limb, own = found.limb("arm"), robot.limb()
    for name in ("joints", "actuators", "frame", "base", "tool"):
        assert getattr(limb, name) == getattr(own, name), name
    assert limb.gripper == replace(own.gripper, grip_gain=1.0)
    np.testing.assert_allclose(limb.tool_m, own.tool_m, atol=1e-12)
    np.testing.assert_allclose(limb.home, own.home, atol=1e-12)
    assert limb.limits.torque.values == own.limits.torque.values
    assert limb.limits.velocity is None
    assert any("velocity, acceleration and jerk" in note for note in notes)
    quietly(robot_limits, load_robot(found), found)


@pytest.mark.filterwarnings("ignore:Attach conflict")
def test_two_arms_in_one_model_are_told_apart_by_their_names(tmp_path):
    path = tmp_path / "two.xml"
    spec = mujoco.MjSpec()
    for side, y_m in (("right", -0.3), ("left", 0.3)):  # a model may begin with either
        arm = mujoco.MjSpec.from_string(get_model("panda.xml"))
        for key in list(arm.keys):
            arm.delete(key)
        spec.attach(arm, prefix=f"{side}_", frame=spec.worldbody.add_frame(pos=[0, y_m, 0]))
    spec.compile()
    path.write_text(spec.to_xml())
    found, _ = inspect_model(path)
    assert [limb.name for limb in found.limbs] == ["right", "left"]
    assert found.limb("left").joints == DUAL_PANDA.limb("left").joints
    assert found.limb("right").gripper == replace(DUAL_PANDA.limb("right").gripper, grip_gain=1.0)


def test_a_model_without_an_arm_is_refused(tmp_path):
    path = tmp_path / "ball.xml"
    path.write_text(
        "<mujoco><worldbody><body><freejoint/><geom size='.1'/></body></worldbody></mujoco>"
    )
    with pytest.raises(ConfigError, match="not an arm"):
        inspect_model(path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothere.xml", "does not exist"),
        ("folder.xml", "not an ordinary"),
        ("a.urdf", r"\.xml file"),
    ],
)
def test_what_is_no_model_is_named(tmp_path, name, says):
    (tmp_path / "folder.xml").mkdir()
    with pytest.raises(ConfigError, match=rf"{says}.*robot list"):
        inspect_model(tmp_path / name)


def test_a_hand_without_a_name_is_asked_for(tmp_path):
    links = "".join(
        f'<body pos="0 0 .1"><joint name="{joint}"/><geom size=".05"/>' for joint in "abcd"
    )
    servos = "".join(f'<position name="{joint}" joint="{joint}" kp="9"/>' for joint in "abcd")
    (tmp_path / "arm.xml").write_text(
        f"<mujoco><worldbody>{links}{'</body>' * 4}</worldbody>"
        f"<actuator>{servos}</actuator></mujoco>"
    )
    with pytest.raises(ConfigError, match=r"joint 'd' moves has no name.*<body name=\"hand\">"):
        inspect_model(tmp_path / "arm.xml")
