"""Motion planning: rows are met, speed is carried over, and no limit is left on the physics
grid.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_cosmos3.control.stops import stop_strain
from strands_cosmos3.control.trajectory import JointState, plan_motion, plan_stop
from strands_cosmos3.errors import ControlError
from strands_cosmos3.robots.panda import FER, FR3, HOME_Q

DT = 1 / 600
SLACK = 1.003
LIMITS = pytest.mark.parametrize(
    "limits", [FER, FR3, FER.derated(0.3)], ids=["fer", "fr3", "derated"]
)


def braking_position(q, v, a, limits):
    """Angles at which joints come to rest that brake as hard as they may."""
    hardest = plan_stop(JointState(q, v, a), replace(limits, hands=()))
    return hardest.sample(np.array([hardest.end_s]))[0][0]


def rows_of(rng, n_rows, step_rad, limits=FER, start=None):
    """A random walk of joint angles inside the limits."""
    start = rng.uniform(limits.q_min + 0.3, limits.q_max - 0.3) if start is None else start
    q = start + np.cumsum(rng.normal(0, step_rad, (n_rows, 7)), axis=0)
    return start, np.clip(q, limits.q_min + 0.01, limits.q_max - 0.01)


def on_grid(motion):
    return motion.spline.sample(np.arange(0, motion.spline.end_s, DT))


def worst(q, v, a, limits):
    """Largest position excess [rad]; velocity, acceleration and jerk in units of their limits,
    at neighbouring steps.
    """
    jerk = np.abs(np.diff(a, axis=0)) / DT / limits.jerk
    return (
        max((q - limits.q_max).max(), (limits.q_min - q).max()),
        (np.abs(v) / limits.velocity).max(),
        (np.abs(a) / limits.acceleration).max(),
        jerk.max() if len(jerk) else 0.0,
    )


@LIMITS
def test_hundreds_of_random_motions_keep_every_limit(limits):
    rng = np.random.default_rng(0)
    stretched = cornered = 0
    for trial in range(60):
        n, fps = int(rng.integers(1, 33)), rng.choice([5.0, 15.0, 50.0])
        start, q = rows_of(rng, n, rng.choice([0.003, 0.03, 0.2]), limits)
        t_s = (np.arange(n) + 1) / fps
        motion = plan_motion(JointState.at_rest(start), q, t_s, limits, DT)
        spline = motion.spline
        # every row is passed
        assert np.abs(spline.sample(spline.t_s)[0] - np.vstack([start, q])).max() < 1e-9, trial
        angle, velocity, acceleration = on_grid(motion)
        # what the arm was doing until now: the first step's jump and jerk are one
        acceleration[0] = 0.0
        beyond, *rates = worst(angle, velocity, acceleration, limits)
        assert beyond < 1e-6
        assert max(rates) < SLACK
        asked = np.diff(motion.nominal_s)
        assert (np.diff(spline.t_s) >= asked * (1 - 1e-9)).all()  # never faster than asked
        assert (motion.stretched == (np.diff(spline.t_s) > asked * 1.0001)).all()
        np.testing.assert_allclose(motion.nominal_s[1:], t_s)
        ends_at = braking_position(*(x[0] for x in spline.sample(np.array([spline.end_s]))), limits)
        assert (ends_at <= limits.q_max + 1e-6).all()
        assert (ends_at >= limits.q_min - 1e-6).all()
        stretched += motion.stretched.any()
        cornered += not motion.smooth
    assert stretched > 30
    assert cornered < 60


@LIMITS
def test_slow_rows_keep_their_own_time_and_a_continuous_acceleration(limits):
    rng = np.random.default_rng(1)
    for _ in range(50):
        start, goal = HOME_Q, HOME_Q + rng.normal(0, 0.1, 7)
        s = np.linspace(0, 1, 33)[1:, None]
        ease = s**3 * (10 - 15 * s + 6 * s * s)
        motion = plan_motion(
            JointState.at_rest(start),
            start + ease * (goal - start),
            np.arange(1, 33) / 15,
            limits,
            DT,
        )
        assert not motion.stretched.any()
        assert motion.smooth
        assert motion.spline.end_s == pytest.approx(32 / 15)
        spline = motion.spline
        before, after = (
            spline.sample(spline.t_s[1:-1] - 1e-9),
            spline.sample(spline.t_s[1:-1] + 1e-9),
        )
        for value_before, value_after, size in zip(before, after, (1e-8, 1e-6, 1e-4), strict=True):
            assert np.abs(value_after - value_before).max() < size  # angle, velocity, acceleration


def test_derivatives_are_derivatives():
    rng = np.random.default_rng(2)
    start, q = rows_of(rng, 8, 0.05)
    spline = plan_motion(JointState.at_rest(start), q, np.arange(1, 9) / 15, FER, DT).spline
    t, e = rng.uniform(0.01, spline.end_s - 0.01, 200), 1e-5
    (q0, v0, _), (q1, v1, _) = spline.sample(t - e), spline.sample(t + e)
    _, v, a = spline.sample(t)
    assert np.abs((q1 - q0) / (2 * e) - v).max() < 1e-5
    assert np.abs((v1 - v0) / (2 * e) - a).max() < 1e-2


def test_speed_is_carried_over_a_seam():
    """Two halves of one motion, planned apart, are nearly the motion planned whole."""
    t = np.arange(1, 33) / 15
    q = HOME_Q + 0.3 * np.sin(1.3 * t)[:, None] * np.linspace(0.3, 1, 7)
    first = plan_motion(JointState.at_rest(HOME_Q), q[:16], t[:16], FER, DT)
    state = JointState(*(x[0] for x in first.spline.sample(np.array([first.spline.t_s[8]]))))
    second = plan_motion(state, q[8:], t[8:] - t[7], FER, DT)
    at_seam = second.spline.sample(np.zeros(1))
    assert np.abs(at_seam[0][0] - state.q_rad).max() == 0
    assert np.abs(at_seam[1][0] - state.qd_rad_s).max() < 1e-12
    assert np.abs(state.qd_rad_s).max() > 0.2
    assert (np.abs(at_seam[2][0] - state.qdd_rad_s2) / DT <= FER.jerk * SLACK).all()
    assert not second.stretched.any()


def test_a_first_row_that_is_due_now_is_the_start():
    motion = plan_motion(
        JointState.at_rest(HOME_Q), np.stack([HOME_Q + 1.0, HOME_Q]), np.array([0.0, 0.1]), FER, DT
    )
    assert len(motion.nominal_s) == 2
    assert np.abs(motion.spline.q_rad - HOME_Q).max() == 0
    alone = plan_motion(JointState.at_rest(HOME_Q), HOME_Q[None] + 1, np.zeros(1), FER, DT)
    assert np.abs(alone.spline.q_rad - HOME_Q).max() == 0


def test_rows_at_the_joints_ends_are_met_without_overshoot():
    """The smooth spline overshoots such rows however slow it is; time alone would be stretched
    for ever.
    """
    rng = np.random.default_rng(3)
    for _ in range(40):
        n = int(rng.integers(1, 12))
        q = np.where(rng.random((n, 7)) < 0.5, FER.q_min, FER.q_max)
        start = np.where(rng.random(7) < 0.5, FER.q_min, FER.q_max)
        motion = plan_motion(JointState.at_rest(start), q, np.arange(1, n + 1) / 15, FER, DT)
        beyond, speed, acceleration, jerk = worst(*on_grid(motion), FER)
        assert beyond < 1e-6
        assert max(speed, acceleration, jerk) < SLACK
        assert motion.spline.end_s < 15 * n


def test_a_start_that_cannot_meet_its_rows_is_refused():
    q = HOME_Q.copy()
    q[0] = FER.q_max[0] - 0.001
    v = np.zeros(7)
    v[0] = 2.0  # will be carried beyond the joint's end whatever is planned
    with pytest.raises(ControlError, match="Stop the arm"):
        plan_motion(
            JointState(q, v, np.zeros(7)), np.repeat(q[None], 4, 0), np.arange(1, 5) / 15, FER, DT
        )


states = st.tuples(
    st.lists(st.floats(-1, 1), min_size=7, max_size=7),
    st.lists(st.floats(-1, 1), min_size=7, max_size=7),
    st.sampled_from([replace(limits, hands=()) for limits in (FER, FR3, FER.derated(0.2))]),
)


@settings(max_examples=120)
@given(states)
def test_a_stop_ends_at_rest_within_limits_and_no_later_than_needed(state):
    v_share, a_share, limits = np.array(state[0]), np.array(state[1]), state[2]
    start = JointState(HOME_Q, v_share * limits.velocity, a_share * limits.acceleration)
    stop = plan_stop(start, limits)
    t = np.linspace(0, stop.end_s + 1e-3, 1500)
    q, v, a = stop.sample(t)
    dt = t[1] - t[0]
    assert (v[-1] == 0).all()
    assert (a[-1] == 0).all()
    assert (np.abs(a) <= limits.acceleration * (1 + 1e-9)).all()
    assert (np.abs(np.diff(a, axis=0)) <= limits.jerk * dt * (1 + 1e-6) + 1e-9).all()
    assert np.abs(np.diff(q, axis=0) - dt * (v[1:] + v[:-1]) / 2).max() < limits.jerk.max() * dt**3
    assert (
        np.abs(
            q[-1] - braking_position(start.q_rad, start.qd_rad_s, start.qdd_rad_s2, limits)
        ).max()
        < 1e-9
    )
    # No stop is faster than constant deceleration, nor than undoing the acceleration at full jerk.
    least = np.maximum(
        np.abs(start.qd_rad_s) / limits.acceleration, np.abs(start.qdd_rad_s2) / limits.jerk
    )
    # And this one wastes no time: velocity over acceleration, and three jerk ramps at most.
    most = (
        np.abs(start.qd_rad_s) + np.abs(start.qdd_rad_s2) ** 2 / limits.jerk
    ) / limits.acceleration
    each = stop.phase_s.sum(axis=0)
    assert (each >= least - 1e-9).all()
    assert (each <= most + 4 * limits.acceleration / limits.jerk + 1e-9).all()


def test_a_stop_from_rest_takes_no_time():
    assert plan_stop(JointState.at_rest(HOME_Q), FER).end_s == 0.0


@pytest.mark.parametrize("seed", [400, 996, 1315, 1486])
def test_from_rest_every_chunk_can_be_followed(seed):
    """Wild rows, some at the joints' ends, for which neither a smooth nor a monotone motion was
    found within limits.
    """
    rng = np.random.default_rng(seed)
    n, start = int(rng.choice([5, 8, 16])), rng.uniform(FER.q_min, FER.q_max)
    q = np.clip(start + np.cumsum(rng.normal(0, 0.5, (n, 7)), axis=0), FER.q_min, FER.q_max)
    t_s = (np.arange(n) + 1) / rng.choice([15.0, 50.0])
    motion = plan_motion(JointState.at_rest(start), q, t_s, FER, 1 / 600)
    assert np.abs(motion.spline.q_rad[1:] - q).max() == 0.0
    at, v, a = motion.spline.sample(np.arange(0, motion.spline.end_s, 1 / 600))
    assert (np.abs(v) <= FER.velocity * 1.002).all()
    assert (np.abs(a) <= FER.acceleration * 1.002).all()
    assert ((at >= FER.q_min - 1e-6) & (at <= FER.q_max + 1e-6)).all()


def test_a_stop_that_is_called_gentle_can_be_made_inside_the_range():
    """Near a joint's end there is no room for a gentle stop; a hard one may accelerate the hand
    too much.
    """
    rng, limits, judged = np.random.default_rng(7), FR3, 0
    for _ in range(200):
        q = rng.uniform(limits.q_min, limits.q_max)
        v = rng.uniform(-0.3, 0.3, 7)
        joint, room = rng.integers(7), 10 ** rng.uniform(-5, -2)
        speed = np.sqrt(2 * room * limits.acceleration[joint]) * rng.uniform(0.7, 1.0)
        q[joint], v[joint] = limits.q_max[joint] - room, speed
        if stop_strain(q[None], v[None], np.zeros((1, 7)), limits, 0.97)[0] > 0.97:
            continue
        stop = plan_stop(JointState(q, v, np.zeros(7)), limits)
        angles, *rates = stop.sample(np.linspace(0, stop.end_s, 500))
        _, speed, acceleration = limits.hands[0].chain.motion(angles, *rates)
        assert np.linalg.norm(acceleration, axis=1).max() <= limits.hands[0].acceleration
        assert (
            angles <= np.maximum(limits.q_max, braking_position(q, v, np.zeros(7), limits)) + 1e-9
        ).all()
        judged += 1
    assert judged > 50


def peaks(spline, limits):
    """Greatest velocity, acceleration and jerk as shares of the limits, from the pieces of
    constant jerk.
    """
    _, v0, a0, jerk = spline.pieces
    span = np.diff(spline.piece_s, append=spline.end_s)[:, None]
    v1, a1 = v0 + span * (a0 + jerk * span / 2), a0 + jerk * span
    turn = np.where(
        a0 * a1 < 0,
        v0 - np.divide(a0 * a0, 2 * jerk, out=np.zeros_like(jerk), where=jerk != 0),
        0.0,
    )
    greatest = (
        np.max(np.abs([v0, v1, turn]), axis=0),
        np.max(np.abs([a0, a1]), axis=0),
        np.abs(jerk),
    )
    return {
        name: float((x / getattr(limits, name)).max())
        for name, x in zip(RATES, greatest, strict=True)
    }


RATES = "velocity", "acceleration", "jerk"
UNHURRIED = replace(
    FER,
    velocity=np.full(7, 50.0),
    acceleration=np.full(7, 500.0),
    jerk=np.full(7, 5000.0),
)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("beyond", [1e-4, 1e-7, -1e-7])
def test_a_motion_that_exceeds_a_limit_by_a_hair_is_stretched(rate, beyond):
    """Passes aim at 1.0002 of a limit; what lies between is stretched all the same, and what
    lies below it is not.
    """
    start, t_s = JointState.at_rest(HOME_Q), np.arange(1, 17) / 15
    rows = HOME_Q + 0.1 * np.sin(2.5 * t_s)[:, None] ** 3 * np.linspace(0.3, 1, 7)
    unhurried = peaks(plan_motion(start, rows, t_s, UNHURRIED, DT).spline, UNHURRIED)
    limits = replace(UNHURRIED, **{rate: getattr(UNHURRIED, rate) * unhurried[rate] / (1 + beyond)})
    motion = plan_motion(start, rows, t_s, limits, DT)
    assert motion.stretched.any() == (beyond > 0)
    assert max(peaks(motion.spline, limits).values()) <= 1 + 1e-8


def test_an_arm_that_brakes_as_hard_as_it_may_is_not_told_to_brake_harder():
    """Rows that call it back: the first segment's jerk adds to the deceleration, which reached
    1.00016 of its limit.
    """
    limits = replace(
        FER,
        velocity=np.full(7, 2.14),
        acceleration=np.full(7, 20.0),
        jerk=np.full(7, 1e4),
    )
    joint = np.arange(7) == 0
    start = JointState(HOME_Q, 1.34 * joint, -20.0 * joint)
    motion = plan_motion(start, np.repeat(HOME_Q[None], 8, axis=0), np.arange(8) / 5, limits, DT)
    assert peaks(motion.spline, limits)["acceleration"] <= 1 + 1e-8
    steps = np.diff(on_grid(motion)[0], 2, axis=0) / DT**2
    assert (np.abs(steps) <= limits.acceleration * (1 + 1e-8)).all()
