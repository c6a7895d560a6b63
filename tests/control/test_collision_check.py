"""Planned rows never end in an unreported collision, judged by MuJoCo's contacts on a model of
the tests' own.
"""

from collections import Counter

import mujoco
import numpy as np
import pytest

from helpers.panda_oracle import Q_MAX, Q_MIN, PandaOracle, between, random_chunk
from motions import feasible_chunk
from strands_cosmos3.collision import CollisionOutcome, Obstacle
from strands_cosmos3.control.collision_check import CLEARANCE_M
from strands_cosmos3.control.ik import DETOUR_M, MinkIKBridge
from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.control.targets import decode_cosmos_chunk_to_targets
from strands_cosmos3.control.trajectory import JointState, plan_motion
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ControlError
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.model import load_model, load_panda
from strands_cosmos3.robots.panda import FER, HOME_Q, dh_forward
from strands_cosmos3.types import ActionChunk

DT_S = 1 / 15
BRIDGE, FREE = MinkIKBridge(load_panda()), MinkIKBridge(load_panda(), check_collisions=False)
ORACLE = PandaOracle()
DROID = get_embodiment("droid")
# by the oracle's numbers
BODIES = [*(f"link{i}" for i in range(8)), "hand", "left_finger", "right_finger"]


def full(q):
    return np.r_[q, 0.04, 0.04]


def into_itself(rows=40):
    """From home, the hand drawn back into the shoulder."""
    T = np.repeat(dh_forward(HOME_Q)[None], rows, axis=0)
    T[:, 2, 3] -= np.linspace(0, 0.1, rows + 1)[1:]
    T[:, 0, 3] -= np.linspace(0, 0.4, rows + 1)[1:]
    return T


def judge(seed, chunks):
    """Solve random chunks with and without the check; every collision of the latter must be
    reported by the former.
    """
    rng, outcomes, collided = np.random.default_rng(seed), Counter(), 0
    for _ in range(chunks):
        q, T = random_chunk(rng, ORACLE)
        solution, free = BRIDGE.solve(T, full(q), DT_S), FREE.solve(T, full(q), DT_S)
        report, hits = solution.collision, np.flatnonzero(ORACLE.deepest_m(free.q_rad) > 0)
        outcomes[report.outcome] += 1
        assert ORACLE.deepest_m(between(q, solution.q_rad[:, :7])).max() == 0, (seed, str(report))
        if not len(hits):
            continue
        collided += 1
        assert report.outcome in ("avoided", "stopped")
        assert report.row <= hits[0]  # earlier if the way there, or the clearance, is what is met
        if report.row == hits[0]:
            found = {
                frozenset((BODIES[a], BODIES[b])): depth
                for a, b, depth in ORACLE.contacts(free.q_rad[hits[0]])
            }
            assert report.depth_m > max(found.values()) - 1e-5
    return outcomes, collided


def test_no_random_chunk_ends_in_a_collision():
    outcomes, collided = judge(3, 16)
    assert collided >= 5  # so the check has something to find
    assert outcomes["clear"] >= 8
    assert outcomes["stopped"] >= 3
    assert outcomes["avoided"]
    assert outcomes["unchecked"] == 0


@pytest.mark.slow
def test_no_chunk_of_a_thousand_ends_in_a_collision():
    totals, collided = Counter(), 0
    for seed in range(1, 26):
        outcomes, hit = judge(seed, 40)
        totals, collided = totals + outcomes, collided + hit
    print(dict(totals), collided)
    assert totals.total() == 1000
    assert totals["avoided"]
    assert totals["stopped"]


def test_the_arm_is_held_before_it_meets_itself():
    T = into_itself()
    free, solution = FREE.solve(T, full(HOME_Q), DT_S), BRIDGE.solve(T, full(HOME_Q), DT_S)
    assert ORACLE.deepest_m(free.q_rad).max() > 0.005
    report = solution.collision
    assert report.outcome is CollisionOutcome.STOPPED
    assert report.row <= np.flatnonzero(ORACLE.deepest_m(free.q_rad) > 0)[0]
    assert "hand" in report.bodies
    assert -CLEARANCE_M < report.depth_m < 0.05
    held = report.held_from_row
    assert 5 < held < len(T)
    assert (solution.q_rad[held:] == solution.q_rad[held - 1]).all()
    assert ORACLE.deepest_m(between(HOME_Q, solution.q_rad[:, :7])).max() == 0
    missed = np.linalg.norm(dh_forward(solution.q_rad[:, :7])[:, :3, 3] - T[:, :3, 3], axis=1)
    # held rows say how far off they are
    np.testing.assert_allclose(solution.residual_m, missed, atol=1e-9)
    assert (solution.residual_m[:held] < free.residual_m[:held] + DETOUR_M).all()
    assert all(name in str(report) for name in report.bodies)


def test_the_spline_does_not_swing_past_the_row_that_is_held():
    """Three centimetres a row; the row before the contact is not followed where the arm would
    swing into the contact.
    """
    path, earlier = FREE.solve(into_itself(240), full(HOME_Q)).q_rad, 0
    for phase in range(0, 18, 2):
        q = path[phase::18]
        rows, report = BRIDGE.collisions.held_before(full(HOME_Q), q)
        assert report.outcome == "stopped"
        if phase % 6 and report.held_from_row == report.row:
            continue
        earlier += report.row - report.held_from_row
        motion = plan_motion(
            JointState.at_rest(HOME_Q), rows[:, :7], np.arange(1, len(q) + 1) * DT_S, FER, 1 / 600
        )
        assert (
            ORACLE.deepest_m(
                motion.spline.sample(np.arange(0, motion.spline.end_s, 1 / 120))[0]
            ).max()
            == 0
        )
    assert 0 < earlier < 9


def test_the_way_between_two_rows_is_checked():
    """The hand meets link 5 halfway between two configurations that are clear."""
    before = np.array([0.96, 1.51, -0.74, -1.58, -1.0, 0.42, -0.56])
    after = np.array([0.51, 1.13, -0.48, -1.76, -1.19, 0.21, -0.09])
    assert not ORACLE.deepest_m([before, after]).any()
    assert ORACLE.contacts((before + after) / 2)[0][:2] == (5, 8)
    rows, report = BRIDGE.collisions.held_before(
        full(before), np.stack((full(before), full(after)))
    )
    assert (report.outcome, report.row, report.held_from_row) == ("stopped", 1, 1)
    assert set(report.bodies) == {"link5", "hand"}
    assert (rows[1] == rows[0]).all()


def test_the_planned_motion_comes_to_rest_in_time():
    """The spline of a fast motion that is held swings past the last row."""
    rng, stops = np.random.default_rng(3), 0
    while stops < 2:
        q, T = random_chunk(rng, ORACLE)
        solution = BRIDGE.solve(T, full(q), DT_S)
        if (
            solution.collision.outcome != "stopped"
            or (q < Q_MIN + 0.1).any()
            or (q > Q_MAX - 0.1).any()
        ):
            continue
        try:
            motion = plan_motion(
                JointState.at_rest(q), solution.q_rad[:, :7], np.arange(1, 33) * DT_S, FER, 1 / 600
            )
        except ControlError:
            continue
        at_s = np.arange(0, motion.spline.end_s, 1 / 60)
        assert ORACLE.deepest_m(motion.spline.sample(at_s)[0]).max() == 0
        stops += 1


def test_nominal_chunks_are_solved_as_without_the_check():
    rng = np.random.default_rng(1)
    for _ in range(5):
        q, T = feasible_chunk(rng)
        checked, free = BRIDGE.solve(T, full(q), DT_S), FREE.solve(T, full(q), DT_S)
        assert checked.collision.outcome == "clear"
        assert np.array_equal(checked.q_rad, free.q_rad)
        assert free.collision.outcome == "unchecked"


def test_a_collision_is_avoided_with_the_redundant_joint():
    """Where the limit finds a way, the hand follows it to the pose."""
    rng, avoided = np.random.default_rng(2), 0
    while avoided < 2:
        q, T = random_chunk(rng, ORACLE)
        solution = BRIDGE.solve(T, full(q), DT_S)
        if solution.collision.outcome == "avoided":
            avoided += 1
            free = FREE.solve(T, full(q), DT_S)
            assert ORACLE.deepest_m(between(q, free.q_rad[:, :7])).max() > -CLEARANCE_M
            assert (solution.residual_m < free.residual_m + DETOUR_M).all()
            assert solution.collision.held_from_row is None
            step = np.abs(np.diff(np.vstack((q, solution.q_rad[:, :7])), axis=0))
            assert (step <= FER.velocity * DT_S * 1.001).all()


# Which pairs are checked


def pairs_of(spec):
    model = spec.compile()
    check = MinkIKBridge(
        model, next(body.name for body in spec.bodies if body.name.endswith("hand")), limits=FER
    ).collisions
    return set() if check is None else {
        frozenset(BODIES.index(model.body(model.geom_bodyid[geom]).name.removeprefix("x_")) for geom in pair)
        for pair in check.pairs
    }  # fmt: skip


def panda_spec():
    return mujoco.MjSpec.from_file(str(resource("assets/panda.xml")))


def test_pairs_follow_from_the_model_and_not_from_names():
    spec = panda_spec()
    pairs = pairs_of(spec)
    assert {
        frozenset((5, 8)),
        frozenset((0, 8)),
        frozenset((1, 9)),
        frozenset((2, 7)),
        frozenset((0, 3)),
    } <= pairs
    assert not any(abs(a - b) == 1 for a, b in map(sorted, pairs) if b <= 7)  # neighbours
    # hand, fingers and the link that carries them
    assert not any(a >= 7 for a, _ in map(sorted, pairs))
    renamed = panda_spec()
    for kind in ("bodies", "geoms", "joints"):
        for element in getattr(renamed, kind):
            if element.name and element.name != "world":
                element.name = f"x_{element.name}"
    for exclude in renamed.excludes:
        exclude.bodyname1, exclude.bodyname2 = f"x_{exclude.bodyname1}", f"x_{exclude.bodyname2}"
    for equality in renamed.equalities:
        equality.name1, equality.name2 = f"x_{equality.name1}", f"x_{equality.name2}"
    for actuator in renamed.actuators:
        if actuator.trntype == mujoco.mjtTrn.mjTRN_JOINT:
            actuator.target = f"x_{actuator.target}"
    for tendon in renamed.tendons:
        renamed.delete(tendon)
    renamed.delete(renamed.actuators[-1])
    for key in renamed.keys:  # they would need another number of controls
        renamed.delete(key)
    assert pairs_of(renamed) == pairs


def test_without_the_models_own_excludes_neighbours_are_still_left_out():
    spec = panda_spec()
    for exclude in list(spec.excludes):
        spec.delete(exclude)
    pairs = pairs_of(spec)
    assert pairs > pairs_of(panda_spec())
    assert not any(b - a <= 1 or a >= 7 for a, b in map(sorted, pairs))
    bridge = MinkIKBridge(spec.compile())
    q, T = feasible_chunk(np.random.default_rng(2))
    assert bridge.solve(T, full(q), DT_S).collision.outcome == "clear"


def test_links_that_always_overlap_are_left_out():
    spec = panda_spec()
    for body in ("link1", "link4"):
        spec.body(body).add_geom(
            name=f"{body}_ball", type=mujoco.mjtGeom.mjGEOM_SPHERE, size=[0.25, 0, 0]
        )
    model = spec.compile()
    bridge = MinkIKBridge(model)
    balls = {model.geom("link1_ball").id, model.geom("link4_ball").id}
    assert not any(balls == set(pair) for pair in bridge.collisions.pairs.tolist())
    assert any(len(balls & set(pair)) == 1 for pair in bridge.collisions.pairs.tolist())


@pytest.mark.parametrize("masks", [(0, 0), (1, 2)])
def test_a_model_without_collision_geometry_says_so(masks):
    spec = panda_spec()
    for geom in spec.geoms:
        geom.contype, geom.conaffinity = masks
    bridge = MinkIKBridge(spec.compile())
    assert bridge.collisions is None
    solution = bridge.solve(into_itself(), full(HOME_Q), DT_S)
    assert solution.collision.outcome == "unchecked"


def test_disabled_contacts_do_not_disable_the_check():
    model = load_panda()
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONTACT
    assert (
        MinkIKBridge(model).solve(into_itself(), full(HOME_Q), DT_S).collision.outcome == "stopped"
    )


@pytest.mark.parametrize("shape", ["box", "plane"])
def test_a_table_is_seen_and_a_cube_on_it_is_not(shape):
    spec = panda_spec()
    if shape == "box":
        spec.worldbody.add_geom(
            name="slab", type=mujoco.mjtGeom.mjGEOM_BOX, size=[0.3, 0.4, 0.05], pos=[0.6, 0, 0.15]
        )
    else:
        spec.worldbody.add_geom(
            name="slab", type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 1], pos=[0, 0, 0.0]
        )
    cube = spec.worldbody.add_body(name="cube", pos=[0.36, 0, 0.3])
    cube.add_freejoint()
    cube.mass, cube.inertia = 0.1, [1e-4] * 3
    cube.add_geom(name="cube", type=mujoco.mjtGeom.mjGEOM_BOX, size=[0.02, 0.02, 0.1])
    model = spec.compile()
    bridge, oracle = MinkIKBridge(model), PandaOracle(0.2)
    q = model.qpos0.copy()
    q[bridge.q_address], q[7:9] = HOME_Q, 0.04
    T = np.repeat(dh_forward(HOME_Q)[None], 32, axis=0)
    T[:, 2, 3] -= np.linspace(0, 0.6, 33)[1:]
    report = (solution := bridge.solve(T, q, DT_S)).collision
    assert report.outcome == "stopped"
    assert "slab" in report.bodies
    assert set(report.bodies) & {"left_finger", "right_finger"}
    down = dh_forward(solution.q_rad[:, :7])
    # the hand's origin is 0.113 m above the finger tips
    assert down[:, 2, 3].min() < (0.2 if shape == "box" else 0.0) + 0.15
    if shape == "box":
        assert oracle.deepest_m(between(HOME_Q, solution.q_rad[:, :7])).max() == 0
        assert oracle.deepest_m(FREE.solve(T, full(HOME_Q), DT_S).q_rad).max() > 0.05


def test_distances_to_standing_boxes_are_exact_where_near_and_bounds_elsewhere():
    boxes = [
        Obstacle("table", (0.33, 0.0, -0.02), (1.3, 1.36, 0.04)),
        Obstacle("wall", (0.4, 0.4, 0.2), (0.6, 0.02, 0.4), 0.5),
    ]
    check = MinkIKBridge(load_model(None, boxes)).collisions
    q = np.stack(
        [full(q) for q in np.random.default_rng(0).uniform(HOME_Q - 0.7, HOME_Q + 0.7, (40, 7))]
    )
    found, data = check.distances(q), mujoco.MjData(check.model)
    for row, angles in enumerate(q):
        data.qpos[:] = angles
        mujoco.mj_kinematics(check.model, data)
        exact = np.array(
            [
                mujoco.mj_geomDistance(check.model, data, int(a), int(b), 10.0, None)
                for a, b in check.pairs
            ]
        )
        assert (found[row] <= exact + 1e-9).all()
        np.testing.assert_allclose(found[row][exact < 0.03], exact[exact < 0.03], atol=1e-9)


# Starts in a collision


def test_a_start_in_contact_may_be_left_and_not_entered_deeper():
    T = into_itself()
    free = FREE.solve(T, full(HOME_Q), DT_S)
    deep = np.flatnonzero(ORACLE.deepest_m(free.q_rad) > 0.003)[0]
    start = free.q_rad[deep]
    out = BRIDGE.solve(T[:deep][::-1], start, DT_S)
    assert out.collision.outcome == "touching"
    assert "hand" in out.collision.bodies
    assert out.collision.depth_m > 0.003 - 1e-5
    assert out.converged.all()
    rows, report = BRIDGE.collisions.held_before(start, free.q_rad[deep + 1 :])
    assert (report.outcome, report.row) == ("stopped", 0)
    assert (rows == start).all()
    assert (
        BRIDGE.collisions.held_before(start, np.repeat(start[None], 4, axis=0))[1].outcome
        == "touching"
    )


# Where it is reported


def test_decoding_reports_it():
    T = into_itself() @ DROID.tool_frame.T_parent_cosmos
    rows = []
    for pose in T:
        quat = np.zeros(4)
        mujoco.mju_mat2Quat(quat, pose[:3, :3].reshape(9))
        rows.append([*pose[:3, 3], *quat[1:], quat[0], 0.2])
    out = decode_cosmos_chunk_to_targets(rows, DROID, BRIDGE, full(HOME_Q), action_space="pose_abs")
    assert out["collision"].outcome is CollisionOutcome.STOPPED
    held = out["collision"].held_from_row
    assert out["qpos"].shape == (40, 9)
    assert (out["qpos"][held:] == out["qpos"][held - 1]).all()
    missed_mm = (
        np.linalg.norm(
            (dh_forward(out["qpos"][:, :7]) @ DROID.tool_frame.T_parent_cosmos - out["poses"])[
                :, :3, 3
            ],
            axis=1,
        )
        * 1e3
    )
    assert (out["off_pose"] == (missed_mm > 1)).all()
    assert out["off_pose"].any()


def test_joint_rows_are_stopped_too():
    free = FREE.solve(into_itself(), full(HOME_Q), DT_S)
    rows = np.column_stack((free.q_rad[:, :7], np.full(40, 0.2)))
    chunk = ActionChunk(rows, DROID.action_space("joint_pos"), DROID)
    plan = LimbIK("panda").follow(chunk, full(HOME_Q))
    held = plan.collision.held_from_row
    assert plan.collision.outcome == "stopped"
    assert np.array_equal(plan.q_rad[:held], rows[:held, :7])
    assert (plan.q_rad[held:] == plan.q_rad[held - 1]).all()
    assert ORACLE.deepest_m(between(HOME_Q, plan.q_rad)).max() == 0
    assert ORACLE.deepest_m(rows[:, :7]).max() > 0.005


def test_an_arm_that_is_folded_at_mid_range_is_still_checked():
    """Links 2 and 5 overlap in the middle of the ranges, and not elsewhere."""
    lengths, axes = (0.15, 0.2, 0.2, 0.2, 0.2, 0.1, 0.1), ("0 0 1", "0 1 0") * 3 + ("0 0 1",)
    ranges = [(-3, 3), (-2, 2), (-3, 3), (1.5, 4.4), (-3, 3), (-1.7, 3.1), (-3, 3)]
    bodies = ""
    for i, (axis, length) in enumerate(zip(axes, lengths, strict=True)):
        bodies += (
            f'<body name="l{i + 1}" pos="0 0 {lengths[i - 1] if i else 0.1}">'
            f'<joint axis="{axis}" range="{ranges[i][0]} {ranges[i][1]}" limited="true"/>'
            f'<geom type="capsule" size=".03" fromto="0 0 .036 0 0 {length - 0.036}"/>'
        )
    hand = '<body name="hand" pos="0 0 .1"><geom type="sphere" size=".03"/></body>'
    whole = f'<body><geom type="cylinder" size=".06 .04"/>{bodies}{hand}{"</body>" * 7}</body>'
    model = mujoco.MjModel.from_xml_string(
        f'<mujoco><compiler angle="radian"/><worldbody>{whole}</worldbody></mujoco>'
    )
    rates = [np.ones(7)] * 4
    limits = JointLimits(
        *(np.array(ends, dtype=float) for ends in zip(*ranges, strict=True)), *rates
    )
    bridge = MinkIKBridge(model, limits=limits)
    start = np.array([0, 0.3, 0, 1.6, 0, 0.8, 0])
    rows = np.linspace(start, start + np.array([0, 0, 0, 1.35, 0, 0, 0]), 33)[1:]
    report = bridge.solve(np.stack([bridge.ee_pose(row) for row in rows]), start, 1 / 15).collision
    assert report.outcome == "stopped"
    assert report.held_from_row is not None
