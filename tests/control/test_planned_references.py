"""What is checked for collisions is what may be executed: the references between a chunk's rows,
those of its blend, and the stop after its last row.
"""

from dataclasses import replace

import mujoco
import numpy as np
import pytest

from helpers.lines import line
from strands_cosmos3.collision import Obstacle
from strands_cosmos3.control.chunk_blending import join_chunk
from strands_cosmos3.control.executor import Executor
from strands_cosmos3.control.limb_ik import LimbGeometry, LimbIK
from strands_cosmos3.errors import ControlError
from strands_cosmos3.robots.model import load_model
from strands_cosmos3.robots.panda import FER, HOME_Q, dh_forward
from strands_cosmos3.types import JointTrajectory

DT, ROWS = 1 / 600, 16
DOWN, RIGHT, LEFT = ((0, 0, -1), (0, 0, 1)), ((0, -1, 0), (1, 0, 0)), ((0, 1, 0), (-1, 0, 0))
"""Directions in the base, and in the Cosmos frame at home."""


def arm_before_a_box(towards, away_m):
    """A Panda whose hand's frame is that far from a box's face."""
    center = dh_forward(HOME_Q)[:3, 3] + np.array(towards) * (away_m + 0.1)
    size = np.where(np.array(towards) != 0, 0.2, 0.3)
    return LimbIK("panda", model=load_model(None, [Obstacle("box", tuple(center), tuple(size))]))


def box_distance_m(ik, q_rad):
    """Least distance of the box from the hand and its fingers at joint angles [M, 7]."""
    model, data, least = ik.model, mujoco.MjData(ik.model), np.inf
    hand = [i for i in range(model.ngeom) if model.geom_bodyid[i] >= model.body("hand").id]
    for q in q_rad:
        data.qpos[:] = ik.home
        data.qpos[ik.q_address] = q
        mujoco.mj_kinematics(model, data)
        box = model.geom("box").id
        solid = (i for i in hand if model.geom_contype[i])
        least = min(least, *(mujoco.mj_geomDistance(model, data, i, box, 1, None) for i in solid))
    return least


def arm_that_ends(gap_m, direction, speed_m_s):
    """A Panda, a chunk that moves it towards a box and ends that far from it, and its plan."""
    towards, in_hand = direction
    chunk, way_m = line(np.array(in_hand) * speed_m_s, rows=ROWS), speed_m_s * ROWS / 15
    far = arm_before_a_box(towards, 0.4 + way_m)
    hand_m = 0.4 - box_distance_m(far, far.follow(chunk, far.home).q_rad[-1:])
    ik = arm_before_a_box(towards, way_m + hand_m + gap_m)
    plan = ik.follow(chunk, ik.home)
    assert box_distance_m(ik, plan.q_rad[-1:]) == pytest.approx(gap_m, abs=1e-4)
    return ik, plan


CASES = [
    (0.004, DOWN, 0.30),
    (0.012, DOWN, 0.45),
    (0.003, DOWN, 0.20),
    (0.005, RIGHT, 0.35),
    (0.008, LEFT, 0.40),
]


@pytest.mark.parametrize(("gap_m", "direction", "speed_m_s"), CASES)
def test_the_stop_after_the_last_row_meets_nothing(gap_m, direction, speed_m_s):
    ik, plan = arm_that_ends(gap_m, direction, speed_m_s)
    assert plan.collision.outcome == "clear"  # the rows are free
    now = Executor(FER, DT, HOME_Q).takeover()
    assert box_distance_m(ik, now.prepare(replace(plan, arm=None)).block.q_rad) < 0
    prepared = now.prepare(plan)
    q, report = prepared.block.q_rad, prepared.trajectory.collision
    assert 0.0005 < box_distance_m(ik, q) < gap_m + 0.04
    assert not prepared.block.qd_rad_s[-1].any()
    assert (report.outcome, report.row) == ("stopped", ROWS)
    assert "box" in report.bodies
    assert report.held_from_row >= ROWS - 2
    # the rows that hold it are reported as off their pose
    rows = prepared.trajectory
    assert (rows.residual_m[report.held_from_row :] > 0.01).all()
    assert not rows.converged[report.held_from_row :].any()
    assert np.array_equal(rows.q_rad[: report.held_from_row], plan.q_rad[: report.held_from_row])


@pytest.mark.parametrize("speed_m_s", [0.1, 0.2, 0.3])
def test_a_free_stop_changes_nothing(speed_m_s):
    _, plan = arm_that_ends(0.04, DOWN, speed_m_s)
    now = Executor(FER, DT, HOME_Q).takeover()
    free, checked = now.prepare(replace(plan, arm=None)), now.prepare(plan)
    assert np.array_equal(free.block.q_rad, checked.block.q_rad)
    assert checked.trajectory is plan


@pytest.mark.parametrize("elapsed_s", [0.1, 0.3, 0.6])
def test_a_blend_is_held_ahead_of_a_collision(elapsed_s):
    """The rows lie to the right of a post, and the arm, which is late, still to its left."""
    left = dh_forward(HOME_Q)
    post = Obstacle("box", tuple(left[:3, 3] + [0.0, -0.2, -0.1]), (0.06, 0.04, 0.3))
    ik = LimbIK("panda", model=load_model(None, [post]))
    T = left[None].repeat(ROWS, axis=0)
    T[:, 1, 3] -= 0.4
    right = LimbIK("panda", check_collisions=False).solve({"arm": T}, ik.home).q_rad[:, :7]
    t_s = (np.arange(ROWS) + 1) / 15
    late = JointTrajectory(right, t_s, arm=LimbGeometry(ik, ik.home))
    assert min(box_distance_m(ik, q[None]) for q in (HOME_Q, right[-1])) > 0.03
    now = Executor(FER, DT, HOME_Q).takeover()
    free, held = (
        join_chunk(chunk, right[0], elapsed_s, now, 0.4)[0]
        for chunk in (replace(late, arm=None), late)
    )
    assert box_distance_m(ik, free.block.q_rad) < 0
    assert box_distance_m(ik, held.block.q_rad) > 0.0005
    assert held.trajectory.collision.outcome == "stopped"


def test_where_even_braking_collides_the_motion_under_way_goes_on():
    _, plan = arm_that_ends(0.002, DOWN, 0.45)
    executor = Executor(FER, DT, HOME_Q)
    executor.accept(replace(plan, arm=None))
    executor.advance(int(ROWS / 15 / DT) - 6)
    before = executor.takeover().plan
    with pytest.raises(ControlError, match="no stop before a collision"):
        executor.accept(replace(plan, q_rad=plan.q_rad[-1:].repeat(ROWS, axis=0)))
    assert executor.takeover().plan is before
