"""Inverse kinematics of a robot's limbs: every installed robot on its own feasible chunks, and
two hands at once.
"""

import re
import warnings
from dataclasses import replace

import mujoco
import numpy as np
import pytest

from helpers.robot_motions import BUNDLED_ROBOTS, feasible_motion, limb_poses
from strands_cosmos3.actions.decode import encode_limbs
from strands_cosmos3.cli import main
from strands_cosmos3.collision import CollisionOutcome
from strands_cosmos3.control.collision_check import CollisionCheck
from strands_cosmos3.control.executor import Executor
from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.control.targets import decode_cosmos_chunk_to_targets
from strands_cosmos3.control.trajectory import JointState, plan_motion, plan_stop
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import (
    ActuatorGuardError,
    ConfigError,
    FrameError,
    NonFiniteError,
)
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.catalogue import get_robot, write_robot
from strands_cosmos3.robots.limits import LimitsAssumedWarning
from strands_cosmos3.robots.panda import dh_forward
from strands_cosmos3.robots.spec import join_limbs
from strands_cosmos3.types import ActionChunk, JointTrajectory

DUAL_PANDA = get_robot("dual_panda")

DOMAIN = {
    "panda": "droid",
    "fr3": "robomind-franka",
    "dual_panda": "robomind-franka-dual",
    "ur5e": "robomind-ur",
}
DT_S = 1 / 600


def solver(robot):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        return LimbIK(robot)


@pytest.fixture(scope="module", params=BUNDLED_ROBOTS)
def ik(request):
    return solver(request.param)


@pytest.fixture(scope="module")
def dual():
    return solver("dual_panda")


def chunk_of(ik, q, grippers, embodiment=None):
    """The rows, as a model would emit them, of a motion [T + 1, nq]."""
    row, poses = get_embodiment(embodiment or DOMAIN[ik.robot.name]), limb_poses(ik, q)
    cosmos = {
        limb.name: poses[limb.name] @ ik.tool_frame(limb, columns, q[0])
        for limb, columns in join_limbs(ik.robot, row)
    }
    return ActionChunk(encode_limbs(cosmos, grippers, row), row.action_space("midtrain"), row)


def test_a_robot_follows_its_own_feasible_chunks(ik):
    """1 to 3 cm and 1 to 5 degrees a row, from encoded rows to references: residual below 0.01
    mm, speeds within limits.
    """
    rng = np.random.default_rng(1)
    for _ in range(3):
        row = get_embodiment(DOMAIN[ik.robot.name])
        q = feasible_motion(ik, rng, 16, row.fps)
        grippers = {limb.name: rng.uniform(size=16) for limb in ik.robot.limbs}
        plan = ik.plan(chunk_of(ik, q, grippers), q[0])
        assert plan.solution.residual_m.shape == (len(ik.robot.limbs), 16)
        assert plan.solution.residual_m.max() < 1e-5
        assert plan.trajectory.converged.all()
        np.testing.assert_array_equal(
            plan.trajectory.residual_m, plan.solution.residual_m.max(axis=0)
        )
        assert plan.trajectory.collision.row is None
        for name, T in limb_poses(ik, plan.solution.q_rad).items():
            away_m = np.linalg.norm(T[:, :3, 3] - limb_poses(ik, q[1:])[name][:, :3, 3], axis=1)
            assert away_m.max() < 1e-5
        for g, name in enumerate(plan.poses.gripper_limbs):
            np.testing.assert_allclose(plan.poses.grippers[:, g], grippers[name], atol=1e-9)
        require_within_limits(ik, q[0][ik.q_address], plan.trajectory)


def require_within_limits(ik, start, trajectory):
    motion = plan_motion(
        JointState.at_rest(start), trajectory.q_rad, trajectory.t_s, ik.limits, DT_S
    )
    q, v, a = motion.spline.sample(np.arange(0, motion.spline.end_s, DT_S))
    assert (np.abs(v) / ik.limits.velocity).max() <= 1.001
    assert (np.abs(a) / ik.limits.acceleration).max() <= 1.001
    assert ((q >= ik.limits.q_min - 1e-6) & (q <= ik.limits.q_max + 1e-6)).all()
    for hand in ik.limits.hands:
        _, speed, acceleration = hand.chain.motion(
            hand.of_chain(q), hand.of_chain(v), hand.of_chain(a)
        )
        assert np.linalg.norm(speed, axis=1).max() <= hand.velocity * 1.001
        assert np.linalg.norm(acceleration, axis=1).max() <= hand.acceleration * 1.001


def test_forward_kinematics_is_the_model_s_in_each_limb_s_base(ik):
    rng, q = np.random.default_rng(2), ik.home.copy()
    q[ik.q_address] += rng.uniform(-0.3, 0.3, len(ik.q_address))
    found = ik.forward(q)
    for limb in ik.robot.limbs:
        if limb.frame.endswith("hand"):
            np.testing.assert_allclose(
                found[limb.name], dh_forward(q[ik.bridges[limb.name].q_address]), atol=1e-12
            )


def test_a_panda_alone_moves_as_by_its_bridge_bit_for_bit():
    ik = solver("panda")
    q = feasible_motion(ik, np.random.default_rng(3), 16, 15)
    chunk = chunk_of(ik, q, {"arm": np.linspace(0, 1, 16)})
    plan = ik.plan(chunk, q[0]).trajectory
    alone = decode_cosmos_chunk_to_targets(chunk.action, "droid", ik.bridges["arm"], q[0])
    np.testing.assert_array_equal(plan.q_rad, alone["qpos"][:, ik.q_address])
    for name in ("t_s", "gripper", "converged"):
        np.testing.assert_array_equal(getattr(plan, name), alone[name], name)
    np.testing.assert_array_equal(list(plan.limb_poses), ["arm"])


def test_left_and_right_are_joined_by_name_whatever_comes_first(dual):
    """Rows in which only the left hand moves; also for a robot whose limbs are listed in the
    other order.
    """
    row, still = get_embodiment("robomind-franka-dual"), dual.forward(dual.home)
    turned = solver(replace(DUAL_PANDA, limbs=DUAL_PANDA.limbs[::-1]))
    up = np.eye(4)
    up[2, 3] = 0.01
    cosmos = {
        limb.name: still[limb.name] @ dual.tool_frame(limb, columns, dual.home)
        for limb, columns in join_limbs(DUAL_PANDA, row)
    }
    poses = {"left": np.stack([np.linalg.matrix_power(up, k) @ cosmos["left"] for k in range(5)])}
    poses["right"] = np.repeat(cosmos["right"][None], 5, axis=0)
    chunk = ActionChunk(
        encode_limbs(poses, {"left": np.zeros(4), "right": np.ones(4)}, row),
        row.action_space(),
        row,
    )
    for ik in (dual, turned):
        plan = ik.plan(chunk, ik.home)
        end = ik.forward(plan.solution.q_rad[-1])
        np.testing.assert_allclose(
            end["left"][:3, 3] - still["left"][:3, 3], [0, 0, 0.04], atol=1e-5
        )
        np.testing.assert_allclose(end["right"], still["right"], atol=1e-5)
        assert plan.poses.by_limb["left"].gripper.max() < 1e-9
        assert plan.poses.by_limb["right"].gripper.min() > 1 - 1e-9


def test_one_factor_stretches_the_time_of_all_limbs(dual):
    """One hand is asked for too much: both are slowed down alike, and stay where they are
    relative to each other.
    """
    still, rows = dual.forward(dual.home), 6
    fast, slow = np.eye(4), np.eye(4)
    fast[2, 3], slow[2, 3] = 0.09, 0.01
    T = {
        "left": np.stack(
            [np.linalg.matrix_power(fast, k) @ still["left"] for k in range(1, rows + 1)]
        ),
        "right": np.stack(
            [np.linalg.matrix_power(slow, k) @ still["right"] for k in range(1, rows + 1)]
        ),
    }
    q = dual.solve(T, dual.home, 4 / 15).q_rad[:, dual.q_address]
    motion = plan_motion(
        JointState.at_rest(dual.home[dual.q_address]),
        q,
        np.arange(1, rows + 1) / 15,
        dual.limits,
        DT_S,
    )
    assert motion.stretched.any()
    at = motion.spline.sample(motion.spline.t_s)[0]
    np.testing.assert_allclose(at[1:], q, atol=1e-9)  # both arms are at row k at the same time
    executor = Executor(dual.limits, DT_S, dual.home[dual.q_address])
    assert executor.reference.q_rad.shape == (14,)


def test_each_hand_s_own_limit_stretches_time(dual):
    """The right hand's limit alone, lowered, slows the motion; it lies on the second half of the
    joints.
    """
    left, right = dual.limits.hands
    q = feasible_motion(dual, np.random.default_rng(4), 8, 10)[:, dual.q_address]
    start, t_s = JointState.at_rest(q[0]), np.arange(1, 9) / 10
    end_s = {}
    for name, hands in (
        ("as it is", (left, right)),
        ("right slower", (left, replace(right, velocity=0.15))),
    ):
        limits = replace(dual.limits, hands=hands)
        motion = plan_motion(start, q[1:], t_s, limits, DT_S)
        state = motion.spline.sample(np.arange(0, motion.spline.end_s, DT_S))
        speed = hands[1].chain.motion(*(hands[1].of_chain(x) for x in state))[1]
        assert np.linalg.norm(speed, axis=1).max() <= hands[1].velocity * 1.001
        end_s[name] = motion.spline.end_s
    assert end_s["right slower"] > 1.1 * end_s["as it is"]


def test_the_guard_and_the_stops_know_either_hand(dual):
    left, right = dual.limits.hands
    q = feasible_motion(dual, np.random.default_rng(4), 8, 10)[:, dual.q_address]
    for hands in ((replace(left, velocity=0.01), right), (left, replace(right, velocity=0.01))):
        executor = Executor(dual.limits, DT_S, q[0], 1.0)
        executor.accept(JointTrajectory(q[1:], np.arange(1, 9) / 10))
        executor.limits = replace(dual.limits, hands=hands)
        with pytest.raises(ActuatorGuardError, match="the hand's velocity"):
            executor.advance(240)
    for arm, hand in enumerate((left, right)):
        qd, hardest = np.zeros(14), []
        qd[7 * arm : 7 * arm + 7] = 2, 2, 2, -2, 0, -2, 0
        for limits in (dual.limits, replace(dual.limits, hands=())):
            stop = plan_stop(JointState(dual.home[dual.q_address], qd, np.zeros(14)), limits)
            state = stop.sample(np.arange(0, stop.end_s, DT_S))
            hardest.append(
                np.linalg.norm(
                    hand.chain.motion(*(hand.of_chain(x) for x in state))[2], axis=1
                ).max()
            )
        assert hardest[0] < 0.9 * hardest[1]  # it brakes more gently for its hand


def test_two_arms_that_would_meet_are_held_together(dual):
    """The left hand goes to the right one: both arms stop, the right one too, although its own
    rows are clear.
    """
    T_world, rows = (
        {name: dual.T_world_base[name] @ T for name, T in dual.forward(dual.home).items()},
        20,
    )
    T = {name: np.repeat(pose[None], rows, axis=0).copy() for name, pose in T_world.items()}
    T["left"][:, 1, 3] -= np.linspace(0.03, 0.6, rows)
    T["right"][:, 2, 3] += np.linspace(0.001, 0.02, rows)
    T = {name: np.linalg.inv(dual.T_world_base[name]) @ poses for name, poses in T.items()}
    found = dual.solve(T, dual.home, 0.2)
    report = found.collision
    assert report.outcome is CollisionOutcome.STOPPED
    assert {body.split("_")[0] for body in report.bodies} == {"left", "right"}
    assert 0 < report.held_from_row <= report.row
    held = found.q_rad[report.held_from_row :, dual.q_address]
    np.testing.assert_array_equal(held, np.repeat(held[:1], len(held), axis=0))
    assert dual.collisions.distances(found.q_rad).min() > 0
    assert found.residual_m[1, -1] > 1e-3


def test_what_does_not_fit_is_refused_before_anything_is_solved(dual):
    T = {name: pose[None] for name, pose in dual.forward(dual.home).items()}
    with pytest.raises(NonFiniteError):
        dual.solve({"left": T["left"] * np.nan, "right": T["right"]}, dual.home)
    droid = get_embodiment("droid")
    with pytest.raises(ConfigError, match="left, right"):
        dual.plan(ActionChunk(np.zeros((2, 10)), droid.action_space("midtrain"), droid), dual.home)
    ur = solver("ur5e")
    with pytest.raises(FrameError, match="hand"):
        ur.plan(ActionChunk(np.zeros((2, 10)), droid.action_space("midtrain"), droid), ur.home)


@pytest.mark.parametrize(
    ("frames", "frame_type", "frame"),
    [({}, "body", "tool0"), ({"hand": "palm"}, "body", "tool0"), ({}, "site", "tcp")],
)
def test_a_hand_without_a_name_is_told_as_inspect_tells_it(
    tmp_path, capsys, frames, frame_type, frame
):
    robot = get_robot("ur5e")
    limb = replace(robot.limb(), frames=frames, frame_type=frame_type, frame=frame, tool="tcp")
    file = tmp_path / "arm.toml"
    file.write_text(write_robot(replace(robot, limbs=(limb,), embodiment="droid")))
    ur, droid = solver(file), get_embodiment("droid")
    said = f"limb 'arm' has no frame 'hand', whose motion the rows are: frames = {{hand = \"{frame}\"}}"
    with pytest.raises(FrameError, match="arm.toml: .*" + re.escape(said)):
        ur.plan(ActionChunk(np.zeros((2, 10)), droid.action_space("midtrain"), droid), ur.home)
    assert main(["robot", "inspect", str(file)]) == 1
    assert said in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Attach conflict")
def test_neighbouring_links_of_either_arm_are_not_checked_against_each_other():
    """They touch by design; here the models say nothing of it (no <exclude>)."""
    spec = mujoco.MjSpec()
    for side in ("left", "right"):
        arm = mujoco.MjSpec.from_string(resource("assets/panda.xml").read_text())
        for listed in (*arm.keys, *arm.excludes):
            arm.delete(listed)
        spec.attach(
            arm,
            prefix=f"{side}_",
            frame=spec.worldbody.add_frame(pos=[0, 0.6 * (side == "left"), 0]),
        )
    model = spec.compile()
    pairs = CollisionCheck(model, [model.joint(name).id for name in DUAL_PANDA.joints]).pairs
    links = [
        [model.body(model.geom_bodyid[geom]).name.split("_link") for geom in pair] for pair in pairs
    ]
    within = [(a, b) for a, b in links if len(a) == len(b) == 2 and a[0] == b[0]]
    assert {side for (side, _), _ in within} == {"left", "right"}
    assert all(abs(int(a[1]) - int(b[1])) > 1 for a, b in within)
    assert any(a[0].split("_")[0] != b[0].split("_")[0] for a, b in links)
