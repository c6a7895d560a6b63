"""Inverse kinematics of two arms on one waist."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from helpers.robot_motions import limb_poses
from strands_cosmos3.control.executor import Executor
from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.limits import LimitsAssumedWarning
from strands_cosmos3.robots.spec import Figures, HandRates, Limb, LimbLimits, ModelPart, RobotSpec
from strands_cosmos3.types import JointTrajectory
from strands_cosmos3.worlds.table.scene import TableScene

DUAL_PANDA = get_robot("dual_panda")

AXES = ("0 0 1", "0 1 0", "0 1 0", "1 0 0", "0 1 0", "1 0 0")
HOME = (0.0, 0.3, 0.6, 0.8, -0.2, 0.9, 0.3)
WAIST = 0  # its index among the joints
ROWS, DT_S = 12, 0.1


def arm(side, y, joints):
    """Hinges with links of 0.15 m along x."""
    inner = f'<site name="{side}_hand" pos="0.1 0 0"/>'
    for i, axis in reversed(list(enumerate(AXES[:joints], 1))):
        inner = (
            f'<body name="{side}_link{i}" pos="{0 if i == 1 else 0.15} {y if i == 1 else 0} '
            f'{0.4 if i == 1 else 0}">'
            f'<joint name="{side}_joint{i}" axis="{axis}" range="-2 2"/><geom size="0.02" '
            f'contype="0" conaffinity="0"/>{inner}'
            "</body>"
        )
    return inner


@pytest.fixture(scope="module")
def robot(tmp_path_factory):
    return waist_and_arms(tmp_path_factory.mktemp("waist"), 6)


def waist_and_arms(folder, joints):
    """A waist and two arms of so many joints; the model is in a folder."""
    path = folder / "waist.xml"
    of_arm = range(1, joints + 1)
    names = ["waist", *(f"{side}_joint{i}" for side in ("left", "right") for i in of_arm)]
    servos = "".join(f'<position name="{name}" joint="{name}" kp="100"/>' for name in names)
    path.write_text(
        '<mujoco><compiler angle="radian"/><worldbody><body name="torso"><joint name="waist" '
        'axis="0 0 1" range="-1 1"/>'
        f'<geom size="0.05"/>{arm("left", 0.2, joints)}{arm("right", -0.2, joints)}</body>'
        "</worldbody>"
        f"<actuator>{servos}</actuator></mujoco>"
    )
    limbs = []
    for side in ("left", "right"):
        own = ("waist", *(f"{side}_joint{i}" for i in of_arm))
        limbs.append(
            Limb(side, own, own, f"{side}_hand", "world", HOME[: joints + 1], frame_type="site")
        )
    return RobotSpec("waist", "Two arms on a waist", (ModelPart(str(path)),), tuple(limbs))


def solver(robot, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        return LimbIK(robot, **options)


def motion(ik, waist_rad, seed=1):
    """[T + 1, nq] smooth configurations, in which the waist turns by so much a row."""
    t, rng = np.arange(ROWS + 1)[:, None], np.random.default_rng(seed)
    q = ik.home + 0.03 * t * rng.uniform(-1, 1, len(ik.home))
    q[:, ik.q_address[WAIST]] = waist_rad * t[:, 0]
    return q


def solved(ik, q):
    """The solution of a motion's poses, whose bounds are checked."""
    found = ik.solve({name: T[1:] for name, T in limb_poses(ik, q).items()}, q[0], DT_S)
    # by MuJoCo's kinematics, not by what the solver says
    for limb, (name, T) in enumerate(limb_poses(ik, found.q_rad).items()):
        off_m = np.linalg.norm(T[:, :3, 3] - limb_poses(ik, q[1:])[name][:, :3, 3], axis=1)
        np.testing.assert_allclose(off_m, found.residual_m[limb], atol=1e-9)
    angles = found.q_rad[:, ik.q_address]
    step = np.abs(np.diff(np.vstack((q[0, ik.q_address], angles)), axis=0))
    assert (step <= ik.limits.velocity * DT_S + 1e-12).all()
    assert (angles >= ik.limits.q_min).all()
    assert (angles <= ik.limits.q_max).all()
    return found, angles


def test_a_shared_joint_counts_once(robot):
    ik = solver(robot)
    assert robot.joints == ("waist", *robot.limbs[0].joints[1:], *robot.limbs[1].joints[1:])
    assert robot.home_rad.tolist() == [*HOME, *HOME[1:]]
    assert ik.limits.q_max.tolist() == [1.0] + [2.0] * 12
    assert ik.q_address.tolist() == list(range(13))
    hand = LimbLimits(hand=HandRates(1.0, 5.0, "made up"))
    limited = solver(
        replace(robot, limbs=tuple(replace(limb, limits=hand) for limb in robot.limbs))
    )
    assert [one.joints for one in limited.limits.hands] == [
        (0, 1, 2, 3, 4, 5, 6),
        (0, 7, 8, 9, 10, 11, 12),
    ]


@pytest.mark.parametrize(("joints", "seed"), [(3, 0), (3, 1), (6, 0), (6, 1)])
def test_both_hands_follow_rows_while_the_waist_turns(tmp_path, joints, seed):
    robot = waist_and_arms(tmp_path, joints)
    ik = solver(robot, shared_weight=0.1)
    q = motion(ik, 0.04, seed)
    found, angles = solved(ik, q)
    assert found.residual_m.shape == (2, ROWS)
    assert found.residual_m.max() < 1e-5
    assert found.converged.all()
    if joints == 3:  # arms that cannot do without the waist
        np.testing.assert_allclose(angles[:, WAIST], q[1:, ik.q_address[WAIST]], atol=1e-4)
        assert solved(solver(robot), q)[0].residual_m.max() > 1e-3
    executor = Executor(ik.limits, 1 / 600, q[0, ik.q_address])
    executor.accept(JointTrajectory(angles, np.arange(1, ROWS + 1, dtype=np.float64) * DT_S))
    assert executor.advance(600).q_rad.shape == (600, 1 + 2 * joints)


def test_the_waist_stays_by_default_and_turns_little_for_a_hand(robot):
    turned = {}
    for weight in (0.0, 0.02, 1.0):
        ik = solver(robot, shared_weight=weight)
        found, angles = solved(ik, motion(ik, 0.0))
        assert found.residual_m.max() < 1e-5
        turned[weight] = float(np.abs(angles[:, WAIST]).max())
    assert turned[0.0] == 0.0
    assert 0 < turned[0.02] < 0.25 * turned[1.0]


def test_a_step_s_bounds_hold_where_the_rows_are_too_fast(robot):
    ik = solver(robot, shared_weight=1.0)
    found, _ = solved(ik, motion(ik, 0.3))
    assert found.clamped.any()


def test_what_shares_joints_must_agree_and_has_no_scene_yet(robot):
    left, right = robot.limbs
    with pytest.raises(ConfigError, match=r"share the joints waist.*home"):
        replace(robot, limbs=(left, replace(right, home=(0.1, *HOME[1:]))))
    faster = LimbLimits(velocity=Figures((2.0,) * 7, "made up"))
    with pytest.raises(ConfigError, match="share the joints waist"):
        replace(robot, limbs=(left, replace(right, limits=faster)))
    with pytest.raises(ConfigError, match=r"share waist.*LimbIK"):
        TableScene(robot=robot)
    with pytest.raises(InputError, match="shared_weight"):
        LimbIK(DUAL_PANDA, shared_weight=1.5)
