"""Robots with fetched models: what their specifications name exists, and each follows its own
feasible chunks.

`make test-robots` fetches the models and prints the figures.
"""

import warnings

import mujoco
import numpy as np
import pytest

from helpers.robot_motions import feasible_motion, limb_poses
from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.control.trajectory import JointState, plan_motion
from strands_cosmos3.robots.catalogue import get_robot, is_present, packaged_robots, source_of
from strands_cosmos3.robots.limits import LimitsAssumedWarning

pytestmark = pytest.mark.robots
CHUNKS, ROWS, FPS, DT_S = 20, 16, 10, 1 / 600


@pytest.fixture(
    scope="module", params=[name for name, robot in packaged_robots().items() if source_of(robot)]
)
def ik(request):
    if not is_present(get_robot(request.param)):
        pytest.skip(f"not fetched; run `strands-cosmos3 robot fetch {request.param}`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        return LimbIK(request.param)


def test_a_fetched_robot_follows_its_own_feasible_chunks(ik):
    """Rows of 1 to 3 cm and 1 to 5 degrees: residual below 0.01 mm, references within every
    limit.
    """
    rng, residual_m, ratios = np.random.default_rng(1), [], []
    for _ in range(CHUNKS):
        q = feasible_motion(ik, rng, ROWS, FPS)
        found = ik.solve({name: T[1:] for name, T in limb_poses(ik, q).items()}, q[0], 4 / FPS)
        assert found.converged.all()
        assert found.collision.row is None
        residual_m.append(found.residual_m.max(axis=1))
        start, t_s = JointState.at_rest(q[0][ik.q_address]), np.arange(1, ROWS + 1) / FPS
        motion = plan_motion(start, found.q_rad[:, ik.q_address], t_s, ik.limits, DT_S)
        position, v, a = motion.spline.sample(np.arange(0, motion.spline.end_s, DT_S))
        assert ((position >= ik.limits.q_min - 1e-6) & (position <= ik.limits.q_max + 1e-6)).all()
        ratios.append(
            [(np.abs(v) / ik.limits.velocity).max(), (np.abs(a) / ik.limits.acceleration).max()]
        )
    worst, (velocity, acceleration) = np.max(residual_m, axis=0), np.max(ratios, axis=0)
    limbs = ", ".join(f"{name} {m * 1e6:.3f} um" for name, m in zip(ik.bridges, worst, strict=True))
    print(
        f"\n{ik.robot.name}: {CHUNKS} chunks of {ROWS} rows; greatest residual {limbs}; greatest "
        "ratio of velocity "
        f"{velocity:.6f}, of acceleration {acceleration:.6f}"
    )
    assert worst.max() < 1e-5
    assert max(velocity, acceleration) <= 1.001


def test_a_gripper_opens_and_closes_by_its_own_convention(ik):
    """Its actuator takes it to the opening that its specification states, and its fingers are
    farther apart when it is open.
    """
    for limb in (limb for limb in ik.robot.limbs if limb.gripper is not None):
        gap_m, at = {}, {}
        for state in ("open_value", "closed_value"):
            data = held(ik, limb.gripper.actuator, getattr(limb.gripper.command, state))
            gap_m[state], at[state] = (
                distance_m(ik.model, data, limb.gripper.fingers),
                float(data.joint(limb.gripper.joints[0]).qpos[0]),
            )
            assert abs(at[state] - getattr(limb.gripper.opening, state)) < 0.15, (
                limb.name,
                state,
                at,
            )
        assert gap_m["open_value"] - gap_m["closed_value"] > 0.04, (limb.name, gap_m)


def held(ik, actuator, command):
    """The state after 2 s with the arm held at home, weightless."""
    model, data = ik.model, mujoco.MjData(ik.model)
    gravity, model.opt.gravity[:] = model.opt.gravity.copy(), 0
    data.qpos[:] = ik.home
    for limb in ik.robot.limbs:
        for name, angle in zip(limb.actuators, limb.home, strict=True):
            data.actuator(name).ctrl[0] = angle
        data.actuator(limb.gripper.actuator).ctrl[0] = limb.gripper.command.open_value
    data.actuator(actuator).ctrl[0] = command
    while data.time < 2.0:
        mujoco.mj_step(model, data)
    model.opt.gravity[:] = gravity
    return data


def distance_m(model, data, bodies):
    first, second = (
        data.geom_xpos[model.geom_bodyid == model.body(name).id].mean(axis=0) for name in bodies
    )
    return float(np.linalg.norm(first - second))
