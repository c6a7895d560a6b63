"""Rows off their pose: a limb weighs position and rotation, and rows that miss their position by
too much hold the arm.
"""

import warnings
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from helpers.lines import Lines, line
from strands_cosmos3.actions.rotations import so3_exp
from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.errors import InputError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.catalogue import get_robot, read_robot, write_robot
from strands_cosmos3.robots.limits import LimitsAssumedWarning
from strands_cosmos3.robots.panda import HOME_Q, dh_forward
from strands_cosmos3.robots.spec import Limb, ModelPart, RobotSpec
from strands_cosmos3.worlds.arms import Robot

PANDA = get_robot("panda")


def weighed(robot, rotation_weight_m):
    """A robot whose only limb weighs rotation so."""
    return replace(robot, limbs=(replace(robot.limb(), rotation_weight_m=rotation_weight_m),))


def followed(ik, chunk, times):
    """Yield the plans of a chunk that is followed so often, each from where the last ended."""
    q = ik.home
    for _ in range(times):
        plan = ik.follow(chunk, q)
        yield plan
        q = q.copy()
        q[ik.q_address] = plan.q_rad[-1]


@pytest.mark.parametrize(
    ("turn_rad_s", "weighed_alike_mm"),
    [
        ((0.0, 0.0, 1.0), 100),
        pytest.param((0.8, 0.0, 0.0), 100, marks=pytest.mark.slow),
        pytest.param((0.0, 0.0, -1.2), 50, marks=pytest.mark.slow),
        ((0.6, 0.5, 0.0), 20),
    ],
)
def test_a_request_that_only_turns_does_not_move_the_hand(turn_rad_s, weighed_alike_mm):
    def moved_mm(ik):
        q = np.vstack([plan.q_rad for plan in followed(ik, line(turn_rad_s=turn_rad_s), 6)])
        return (
            1e3 * np.linalg.norm(dh_forward(q)[:, :3, 3] - dh_forward(HOME_Q)[:3, 3], axis=1).max()
        )

    assert moved_mm(LimbIK(PANDA)) < 12
    assert moved_mm(LimbIK(PANDA, off_pose_bound_m=1.0)) < 25  # the weight's doing alone
    assert moved_mm(LimbIK(weighed(PANDA, 1.0), off_pose_bound_m=1.0)) > weighed_alike_mm


AWAY = ((0.0, -0.3, 0.0), (0.3, -0.2, 0.1), (0.0, 0.0, -0.35))
BOUNDS_M = (0.002, 0.01, 0.05)


@pytest.mark.parametrize(
    ("velocity", "bound_m"),
    [
        *zip(AWAY, BOUNDS_M, strict=True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(AWAY, BOUNDS_M)),
    ],
)
def test_rows_out_of_reach_hold_the_arm(velocity, bound_m):
    ik = LimbIK(PANDA, check_collisions=False, off_pose_bound_m=bound_m)
    plan = next(plan for plan in followed(ik, line(velocity), 8) if plan.held.any())
    first = int(np.argmax(plan.held))
    assert plan.held[first:].all()
    assert (plan.residual_m[:first] <= bound_m).all()
    assert (plan.q_rad[first:] == plan.q_rad[first]).all()
    assert first == 0 or np.array_equal(plan.q_rad[first], plan.q_rad[first - 1])
    at = dh_forward(plan.q_rad)[:, :3, 3] - plan.poses.T_base_frame[:, :3, 3]
    np.testing.assert_allclose(plan.residual_m, np.linalg.norm(at, axis=1), atol=1e-9)
    assert not plan.converged[first:].any()


def test_held_rows_are_counted_and_the_bound_is_an_option():
    def played(**options):
        policy = Cosmos3Policy(
            "droid", "panda", backend=Lines(lambda _: line((0.0, -0.35, 0.0))), options=options
        )
        return Robot().run_policy(policy=policy, duration=4.0), policy

    rollout, policy = played()
    assert rollout.counters["off_pose_held"] > 3
    assert policy.last_rollout["off_pose_held"] > 3
    unbounded, _ = played(off_pose_bound_m=10.0)
    assert unbounded.counters["off_pose_held"] == 0
    with pytest.raises(InputError, match="off_pose_bound_m"):
        played(off_pose_bound_m=0.0)


AXES = ("0 0 1", "0 1 0", "0 1 0", "0 1 0", "1 0 0")


@pytest.fixture(scope="module")
def five_joints(tmp_path_factory):
    """A turntable, three hinges in a plane, and a wrist that rolls, as of many small arms."""
    inner = '<site name="hand" pos="0.08 0 0"/>'
    for i, axis in reversed(list(enumerate(AXES))):
        place = "0 0 0.1" if i < 2 else "0.2 0 0"
        inner = (
            f'<body pos="{place}"><joint name="joint{i}" axis="{axis}" range="-2.5 2.5"/>'
            f'<geom size="0.02" contype="0" conaffinity="0"/>{inner}</body>'
        )
    servos = "".join(f'<position name="joint{i}" joint="joint{i}" kp="50"/>' for i in range(5))
    path = tmp_path_factory.mktemp("five") / "five.xml"
    path.write_text(
        f'<mujoco><compiler angle="radian"/><worldbody>{inner}</worldbody>'
        f"<actuator>{servos}</actuator></mujoco>"
    )
    names = tuple(f"joint{i}" for i in range(5))
    home = (0.2, -0.6, 0.9, 0.4, 0.1)
    limb = Limb("arm", names, names, "hand", "world", home, frame_type="site")
    return RobotSpec("five", "A small arm", (ModelPart(str(path)),), (limb,))


@pytest.mark.parametrize("seed", range(4))
def test_five_joints_get_position_first(five_joints, seed):
    """The hand goes along a line and is to turn in a way that five joints cannot."""
    rng = np.random.default_rng(seed)
    along = np.linspace(0, 1, 17)[1:, None]
    way_m, turn_rad = rng.uniform(-0.05, 0.05, 3), rng.uniform(-0.8, 0.8, 3)

    def missed_mm(robot):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LimitsAssumedWarning)
            ik = LimbIK(robot)
        T = ik.forward(ik.home)["arm"][None].repeat(16, axis=0)
        T[:, :3, 3] += along * way_m
        T[:, :3, :3] = T[:, :3, :3] @ so3_exp(along * turn_rad)
        return 1e3 * ik.solve({"arm": T}, ik.home).residual_m[0].max()

    assert missed_mm(five_joints) < 1.0
    assert missed_mm(weighed(five_joints, 1.0)) > 10.0


def test_a_limb_states_its_weight_in_its_file(tmp_path):
    for weight in (0.02, 0.3, 1.0):
        path = tmp_path / f"{weight}.toml"
        path.write_text(write_robot(replace(weighed(PANDA, weight), name="mine")))
        assert read_robot(path).limb().rotation_weight_m == weight
    for wrong in (0.0, -1.0, 1e3):
        with pytest.raises(InputError, match="rotation_weight_m of limb 'arm'"):
            weighed(PANDA, wrong)
