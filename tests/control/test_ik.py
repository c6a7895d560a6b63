"""Inverse kinematics: both paths to tolerance, judged by MuJoCo's own kinematics and by the DH
product.
"""

import mujoco
import numpy as np
import pytest

from motions import feasible_chunk
from strands_cosmos3.control.ik import METHODS, MinkIKBridge
from strands_cosmos3.control.look_ahead import LIMIT_MARGIN_RAD
from strands_cosmos3.errors import (
    ConfigError,
    Cosmos3Error,
    FrameError,
    InputError,
    NonFiniteError,
    UnknownNameError,
)
from strands_cosmos3.robots.model import load_panda
from strands_cosmos3.robots.panda import FER, HOME_Q, dh_forward

DT_S = 1 / 15
MODEL = load_panda()
FINGERS = np.array([0.04, 0.04])


def full(q_arm):
    return np.concatenate([q_arm, FINGERS])


def mujoco_fk(model, qpos, body="hand"):
    """[N, nq] -> [N, 4, 4], on a fresh MjData and by mj_forward: nothing of the bridge is used."""
    data, out = mujoco.MjData(model), []
    for q in qpos:
        data.qpos[:] = q
        mujoco.mj_forward(model, data)
        T = np.eye(4)
        T[:3, :3], T[:3, 3] = data.body(body).xmat.reshape(3, 3), data.body(body).xpos
        out.append(T)
    return np.stack(out)


def distance_mm_deg(T_a, T_b):
    """[N] distances and [N] angles; the angle by the chord, exact where an arc cosine has no
    digits left.
    """
    chord = np.linalg.norm(T_a[:, :3, :3] - T_b[:, :3, :3], axis=(1, 2)) / np.sqrt(8)
    return np.linalg.norm(T_a[:, :3, 3] - T_b[:, :3, 3], axis=1) * 1e3, np.rad2deg(
        2 * np.arcsin(np.minimum(chord, 1))
    )


def velocity_ratio(q_start, q):
    """Largest |dq| over a control step, in units of what the joint's speed allows."""
    return (np.abs(np.diff(np.vstack([q_start, q]), axis=0)) / (FER.velocity * DT_S)).max()


@pytest.fixture(scope="module")
def bridge():
    return MinkIKBridge(MODEL)


@pytest.mark.parametrize("method", METHODS)
def test_feasible_chunks_converge_to_a_tolerance(bridge, method):
    rng, q_off = np.random.default_rng(1), []
    for _ in range(12):
        q_start, T = feasible_chunk(rng, 32, (0.01, 0.03), (1.0, 5.0))
        solution = bridge.solve(T, full(q_start), DT_S, method)
        for T_reached in (mujoco_fk(MODEL, solution.q_rad), dh_forward(solution.q_rad[:, :7])):
            mm, deg = distance_mm_deg(T_reached, T)
            assert mm.max() < 1e-3
            assert deg.max() < 1e-4
            # what is reported is what MuJoCo measures
            assert np.abs(mm - solution.residual_m * 1e3).max() < 1e-7
        assert solution.converged.all()
        assert not solution.clamped.any()
        assert velocity_ratio(q_start, solution.q_rad[:, :7]) <= 1.001
        assert (solution.q_rad[:, 7:] == FINGERS).all()
        q_off.append(solution.iterations.mean())
    assert np.mean(q_off) < 6


def test_paths_agree(bridge):
    rng = np.random.default_rng(2)
    for _ in range(4):
        q_start, T = feasible_chunk(rng, 32, (0.01, 0.03), (1.0, 5.0))
        lm, qp = (bridge.solve(T, full(q_start), DT_S, method) for method in METHODS)
        # one spare joint: both near the same branch
        assert np.abs(lm.q_rad - qp.q_rad).max() < 2e-2
        mm, deg = distance_mm_deg(mujoco_fk(MODEL, lm.q_rad), mujoco_fk(MODEL, qp.q_rad))
        assert mm.max() < 2e-3
        assert deg.max() < 2e-4


@pytest.mark.parametrize(("name", "kind"), [("hand", "body"), ("tcp", "site")])
def test_ee_pose_is_mujocos(name, kind):
    bridge = MinkIKBridge(MODEL, name, kind)
    data, rng = mujoco.MjData(MODEL), np.random.default_rng(3)
    for _ in range(50):
        q = full(rng.uniform(FER.q_min, FER.q_max))
        data.qpos[:] = q
        mujoco.mj_forward(MODEL, data)
        frame = getattr(data, kind)(name)
        T = bridge.ee_pose(q)
        assert np.abs(T[:3, 3] - frame.xpos).max() < 1e-15
        assert np.abs(T[:3, :3] - frame.xmat.reshape(3, 3)).max() < 1e-15
        assert (T[3] == [0, 0, 0, 1]).all()


@pytest.mark.parametrize("kind", ["site", "geom"])
def test_sites_and_geoms_are_driven(kind):
    name = (
        "tcp"
        if kind == "site"
        else next(
            MODEL.geom(i).name
            for i in range(MODEL.ngeom)
            if MODEL.geom(i).name and MODEL.geom_bodyid[i] == MODEL.body("hand").id
        )
    )
    bridge = MinkIKBridge(MODEL, name, kind)
    q_start, T_hand = feasible_chunk(np.random.default_rng(4), 8, (0.01, 0.02), (1.0, 3.0))
    T_hand_frame = np.linalg.inv(dh_forward(q_start)) @ bridge.ee_pose(full(q_start))
    solution = bridge.solve(T_hand @ T_hand_frame, full(q_start), DT_S)
    mm, deg = distance_mm_deg(dh_forward(solution.q_rad[:, :7]), T_hand)
    assert mm.max() < 2e-3
    assert deg.max() < 2e-4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["fast", "unreachable", "random"])
def test_hard_chunks_keep_the_limits(bridge, method, kind):
    rng = np.random.default_rng(5)
    for _ in range(6):
        if kind == "fast":
            q_start, T = feasible_chunk(rng, 32, (0.01, 0.03), (1.0, 5.0))
            T = T[::8]
        elif kind == "unreachable":
            q_start, T = feasible_chunk(rng, 16, (0.01, 0.03), (1.0, 5.0))
            T = T.copy()
            T[:, :3, 3] += np.linspace(0, rng.uniform(0.5, 3.0), 16)[:, None] * _unit(rng)
        else:
            q_start = rng.uniform(FER.q_min + 0.02, FER.q_max - 0.02)
            T = dh_forward(rng.uniform(FER.q_min, FER.q_max, (12, 7)))
        solution = bridge.solve(T, full(q_start), DT_S, method)
        q = solution.q_rad[:, :7]
        assert np.isfinite(solution.q_rad).all()
        assert velocity_ratio(q_start, q) <= 1.001
        assert (q >= FER.q_min).all()
        assert (q <= FER.q_max).all()
        mm, deg = distance_mm_deg(mujoco_fk(MODEL, solution.q_rad), T)
        within = (mm <= 1.000001e-3) & (deg <= 1.000001e-4)
        assert (within == solution.converged).all()
        np.testing.assert_allclose(solution.residual_m * 1e3, mm, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(np.rad2deg(solution.residual_rad), deg, rtol=1e-6, atol=1e-7)
        step = np.abs(np.diff(np.vstack([q_start, q]), axis=0))
        at_speed = (step >= FER.velocity * DT_S * (1 - 1e-6)).any(axis=1)
        at_end = (
            (q <= FER.q_min + LIMIT_MARGIN_RAD + 1e-9) | (q >= FER.q_max - LIMIT_MARGIN_RAD - 1e-9)
        ).any(axis=1)
        assert (solution.clamped == (at_speed | at_end)).all()
        assert not solution.converged.all()
        assert solution.clamped.any()
        assert (solution.residual_m < 4.0).all()


def _unit(rng):
    v = rng.normal(size=3)
    return v / np.linalg.norm(v)


def test_step_box_against_minks_velocity_limit():
    """Ten iterations with mink's VelocityLimit move several times as far as a control step
    allows; the box does not.
    """
    import mink
    import qpsolvers

    from strands_cosmos3.control.ik import StepBoxLimit

    q_start, T = feasible_chunk(np.random.default_rng(6), 32, (0.01, 0.03), (1.0, 5.0))
    far = T[31]
    dof = np.arange(7)

    def ratio(limit):
        configuration, task = mink.Configuration(MODEL), mink.FrameTask("hand", "body", 1.0, 1.0)
        configuration.update(full(q_start))
        task.set_target(mink.SE3.from_matrix(far))
        for _ in range(10):
            problem = mink.build_ik(configuration, [task], DT_S, 1e-6, [limit])
            configuration.integrate_inplace(
                qpsolvers.solve_problem(problem, solver="daqp").x / DT_S, DT_S
            )
        return (np.abs(configuration.q[:7] - q_start) / (FER.velocity * DT_S)).max()

    theirs = mink.VelocityLimit(MODEL, {f"joint{i + 1}": FER.velocity[i] for i in range(7)})
    ours = StepBoxLimit(dof, dof, MODEL.nv)
    ours.lower_rad, ours.upper_rad = q_start - FER.velocity * DT_S, q_start + FER.velocity * DT_S
    assert ratio(theirs) > 2.0
    assert ratio(ours) <= 1.001


def test_unreachable_pose_is_held_and_the_next_step_goes_on(bridge):
    q_start, T = feasible_chunk(np.random.default_rng(7), 4, (0.01, 0.02), (1.0, 3.0))
    away = T[0].copy()
    away[:3, 3] += [2.0, 0.0, 0.0]
    solution = bridge.solve(np.stack([away] * 40 + [T[0]] * 40), full(q_start), DT_S)
    hold, back = solution.q_rad[39, :7], solution.q_rad[40:, :7]
    assert not solution.converged[:40].any()
    reached = dh_forward(solution.q_rad[:, :7])[:, :3, 3]
    # as near as it can
    assert (
        np.linalg.norm(reached[39] - away[:3, 3]) < np.linalg.norm(reached[0] - away[:3, 3]) - 0.2
    )
    assert np.abs(solution.q_rad[39] - solution.q_rad[38]).max() < 0.01  # and about at rest there
    assert solution.converged[-1]
    assert np.abs(back[0] - hold).max() <= (FER.velocity * DT_S).max() * 1.001


def test_without_dt_only_positions_bound(bridge):
    rng = np.random.default_rng(8)
    q_start, T = feasible_chunk(rng, 32, (0.01, 0.03), (1.0, 5.0))
    solution = bridge.solve(T[-1:], full(q_start))
    assert solution.converged.all()
    assert velocity_ratio(q_start, solution.q_rad[:, :7]) > 1.0


def test_a_start_inside_the_margin_stays_legal(bridge):
    q_start = HOME_Q.copy()
    q_start[3] = FER.q_min[3] + 0.001
    target = bridge.ee_pose(full(q_start))
    solution = bridge.solve(target[None], full(q_start), DT_S)
    assert np.abs(solution.q_rad[0, :7] - q_start).max() < 1e-9


def test_frames_that_cannot_be_driven():
    for kind in ("body", "site", "geom"):
        with pytest.raises(FrameError, match="has no"):
            MinkIKBridge(MODEL, "nonsense", kind)
    with pytest.raises(UnknownNameError, match="body"):
        MinkIKBridge(MODEL, "hand", "camera")
    with pytest.raises(FrameError, match="no joint moves"):
        MinkIKBridge(MODEL, "link0")
    with pytest.raises(UnknownNameError, match="auto"):
        MinkIKBridge(MODEL, method="newton")
    bridge = MinkIKBridge(MODEL)
    with pytest.raises(FrameError, match="rigidly"):
        bridge.frame_in_ee("left_finger", full(HOME_Q))
    with pytest.raises(FrameError, match="rigidly"):
        bridge.frame_in_ee("link6", full(HOME_Q))
    with pytest.raises(ConfigError, match="7 joints"):
        MinkIKBridge(mujoco.MjModel.from_xml_string(_TWO_LINKS), "tip", limits=FER)


def test_frame_in_ee_is_mujocos(bridge):
    T = bridge.frame_in_ee("link7", full(HOME_Q))
    poses = [mujoco_fk(MODEL, full(HOME_Q)[None], body)[0] for body in ("hand", "link7")]
    assert np.abs(T - np.linalg.inv(poses[0]) @ poses[1]).max() < 1e-12
    assert np.abs(bridge.frame_in_ee("hand", full(HOME_Q)) - np.eye(4)).max() < 1e-12


_TWO_LINKS = """<mujoco><worldbody><body name="a"><joint name="x" axis="0 0 1"/><geom size=".1"/>
<body name="tip" pos=".3 0 0"><joint name="y" axis="0 0 1"/><geom size=".1"/></body></body></worldbody></mujoco>"""


@pytest.mark.parametrize("bad", ["nan_target", "inf_target", "nan_q", "skewed", "method"])
def test_nothing_malformed_reaches_a_solver(bridge, bad, monkeypatch):
    monkeypatch.setattr(type(bridge._lm), "solve", lambda *_: pytest.fail("solved"))
    monkeypatch.setattr(bridge, "_step_mink", lambda *_: pytest.fail("solved"))
    T, q, method = np.repeat(bridge.ee_pose(full(HOME_Q))[None], 3, axis=0), full(HOME_Q), "auto"
    if bad == "nan_target":
        T[2, 0, 3] = np.nan
    elif bad == "inf_target":
        T[1, 1, 1] = np.inf
    elif bad == "nan_q":
        q[3] = np.nan
    elif bad == "skewed":
        T[0, :3, 0] *= 1.1
    else:
        method = "newton"
    with pytest.raises(NonFiniteError if bad.startswith(("nan", "inf")) else Cosmos3Error):
        bridge.solve(T, q, DT_S, method)


@pytest.mark.parametrize("method", METHODS)
def test_a_far_pose_is_walked_to(bridge, method):
    """Thirty centimetres away in one row: the box holds each step back, and the arm comes nearer
    until it is there.
    """
    q_start, T = feasible_chunk(np.random.default_rng(7), 4, (0.01, 0.02), (1.0, 3.0))
    away = T[0].copy()
    away[:3, 3] += [0.3, 0.0, 0.0]
    solution = bridge.solve(np.repeat(away[None], 60, axis=0), full(q_start), DT_S, method)
    assert solution.converged[-1]
    assert (np.diff(solution.residual_m + solution.residual_rad) < 1e-3).all()


def test_a_start_out_of_range_is_refused_by_joint_value_and_range():
    bridge = MinkIKBridge(load_panda())
    home = np.r_[HOME_Q, 0.04, 0.04]
    targets = bridge.ee_pose(home)[None]
    for joint, value in ((3, 0.0), (0, 3.0)):
        q = home.copy()
        q[joint] = value
        with pytest.raises(
            InputError, match=rf"joint {joint + 1} of 7 is at {value:.4f} rad, outside its range \["
        ):
            bridge.solve(targets, q)
    q = home.copy()
    q[3] = bridge.limits.q_max[3] + 0.01  # a servo's droop at the end is no error
    assert bridge.solve(targets, q).q_rad.shape == (1, 9)
