"""Robots other than the Panda inside a host, by the host's names, and domains that a robot
borrows.
"""

from dataclasses import replace

import mujoco
import numpy as np
import pytest

from helpers.spy import Spy
from strands_cosmos3.embodiments import DROID_RIG, MODEL_GRIPPER, WIRE_GRIPPER, GripperConvention
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.catalogue import get_robot, packaged_robots, write_robot
from strands_cosmos3.robots.hosted import driven_gripper
from strands_cosmos3.robots.spec import ModelPart

UR5E = get_robot("ur5e")

pytestmark = pytest.mark.filterwarnings(
    "ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning"
)


def at_home(policy):
    """A flat observation of the arm at home, with a closed gripper."""
    return dict.fromkeys(policy.mapping.observed.values(), 0.0) | dict(
        zip(UR5E.joints, UR5E.home_rad, strict=True)
    )


def hosted_ur5e(turn=(1.0, 0.0, 0.0, 0.0)):
    """A host's model: the arm on a pedestal, turned about, under a prefix."""
    whole, arm = mujoco.MjSpec(), mujoco.MjSpec.from_file(str(resource("assets/ur5e.xml")))
    arm.body("tool0").quat = turn
    whole.attach(
        arm,
        prefix="arm/",
        frame=whole.worldbody.add_frame(pos=[0.3, -0.2, 0.5], quat=[0.6, 0.0, 0.0, 0.8]),
    )
    return whole.compile()


def test_a_host_s_ur5e_is_known_by_its_kinematics():
    policy = Cosmos3Policy("robomind-ur", "ur5e", Spy())
    policy.set_sim_context(hosted_ur5e(), "arm/")
    policy.get_actions_sync(at_home(policy), "go")
    with pytest.raises(ConfigError, match=r"UR5e"):
        policy.set_sim_context(hosted_ur5e((np.cos(0.05), 0.0, 0.0, np.sin(0.05))), "arm/")


@pytest.mark.parametrize(("closed", "unit"), [(0.0, MODEL_GRIPPER), (255.0, WIRE_GRIPPER)])
def test_a_gripper_that_is_closed_at_the_upper_end_is_told_the_closed_fraction(closed, unit):
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><body><joint name='f'/><geom "
        "size='.1'/></body></worldbody><tendon><fixed name='t'>"
        "<joint joint='f' coef='1'/></fixed></tendon><actuator><general tendon='t' ctrlrange='0 "
        "255'/></actuator></mujoco>"
    )
    gripper = replace(
        UR5E.limbs[0].gripper, command=GripperConvention(255.0 - closed, closed, "ctrl")
    )
    assert driven_gripper(model, "", "f", gripper) == unit


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("kuka_iiwa", "iiwa14"),
        ("ufactory_xarm7", "xarm7"),
        ("bi_openarm", "openarm"),
        ("franka_fr3", "fr3"),
        ("oxe_droid", "panda"),
    ],
)
def test_names_of_strands_robots_are_known(alias, name):
    assert get_robot(alias).name == name
    assert alias not in packaged_robots()


@pytest.fixture
def foreign(tmp_path):
    """A robot that Cosmos 3 has no domain for."""
    path = tmp_path / "mine.toml"
    arm = replace(UR5E.limbs[0], frames={"hand": "tool0"})
    model = (ModelPart(str(resource("assets/ur5e.xml"))),)
    path.write_text(
        write_robot(replace(UR5E, name="mine", embodiment=None, model=model, limbs=(arm,)))
    )
    return str(path)


def test_a_borrowed_domain_has_to_be_named(foreign):
    with pytest.raises(ConfigError, match=r"no domain for robot 'mine'.*borrow_domain=True"):
        Cosmos3Policy("droid", foreign, Spy(requires_images=True))
    policy = Cosmos3Policy(
        "droid", foreign, Spy(requires_images=True), options={"borrow_domain": True}
    )
    pictures = dict.fromkeys(DROID_RIG.views, np.zeros((36, 64, 3), np.uint8))
    policy.get_actions_sync(at_home(policy) | pictures, "go")
    assert policy.last_rollout["borrowed_domain"] == "droid_lerobot"
    # no model, no domain
    assert Cosmos3Policy("droid", foreign, "scripted").borrowed_domain is None
    assert Cosmos3Policy("robomind-ur", "ur5e", Spy(requires_images=True)).borrowed_domain is None
    with pytest.raises(ConfigError, match=r"borrow_domain=True"):
        Cosmos3Policy.preflight({"wrist"}, embodiment="droid", robot=foreign, backend="service")
