"""The executor: references on the physics clock that never leave the limits, whatever it is fed."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from strands_cosmos3.control.executor import Executor, ExecutorState, ReferenceBlock
from strands_cosmos3.errors import ActuatorGuardError, ControlError, InputError, NonFiniteError, ShapeError
from strands_cosmos3.robots.panda import FER, FR3, HOME_Q
from strands_cosmos3.types import JointTrajectory

DT = 1 / 600
SLACK = 1.003


def chunk(q, fps=15.0, gripper=None):
    return JointTrajectory(q, (np.arange(len(q)) + 1) / fps, gripper)


def sway(n=32, fps=15.0, size=0.2):
    """A smooth motion about home that is still moving at its end."""
    t = (np.arange(n) + 1) / fps
    return chunk(HOME_Q + size * np.sin(0.9 * t)[:, None] * np.linspace(0.3, 1, 7), fps)


def joined(blocks):
    return tuple(np.concatenate([getattr(b, name) for b in blocks]) for name in ("q_rad", "qd_rad_s", "qdd_rad_s2"))


def assert_lawful(q, v, a, limits):
    """Every limit, at every physics step; and the three agree with one another as a motion does."""
    assert np.isfinite(q).all()
    assert (q <= limits.q_max + 1e-6).all()
    assert (q >= limits.q_min - 1e-6).all()
    assert (np.abs(v) <= limits.velocity * SLACK).all()
    assert (np.abs(a) <= limits.acceleration * SLACK).all()
    assert (np.abs(np.diff(a, axis=0)) <= limits.jerk * DT * SLACK).all()
    # The trapezoid misses J dt^3 / 12 of a motion with jerk J, and a jump of J dt in acceleration, mid-step, costs J dt^3 / 8.
    assert np.abs(np.diff(q, axis=0) - DT * (v[1:] + v[:-1]) / 2).max() < limits.jerk.max() * DT**3 * 0.22
    assert np.abs(np.diff(v, axis=0) - DT * (a[1:] + a[:-1]) / 2).max() < limits.jerk.max() * DT**2 * 0.51


def random_rows(rng, executor, limits):
    """Absurd, lawful, at the joints' ends, or standing still: [n, 7] inside the joints' range."""
    n, kind = (
        int(rng.choice([1, 2, 3, 5, 8, 16, 32], p=[0.2, 0.2, 0.2, 0.2, 0.1, 0.05, 0.05])),
        rng.choice(["uniform", "walk", "ends", "still", "jitter"]),
    )
    here = executor.reference.q_rad
    if kind == "uniform":
        return rng.uniform(limits.q_min, limits.q_max, (n, 7))
    if kind == "ends":
        return np.where(rng.random((n, 7)) < 0.5, limits.q_min, limits.q_max)
    size = {"walk": 0.05, "still": 0.0, "jitter": 0.5}[kind]
    return np.clip(here + np.cumsum(rng.normal(0, size, (n, 7)), axis=0), limits.q_min, limits.q_max)


TABLES = {"fer": FER, "fr3": FR3, "derated": FER.derated(0.4)}


def storm(table, n_streams, seed):
    """At odd moments a chunk, a stop, or nothing; then to rest. A stream is what one joint is asked in one chunk."""
    limits, rng, given = TABLES[table], np.random.default_rng(seed), 0
    while given < n_streams:
        executor = Executor(limits, DT, rng.uniform(limits.q_min, limits.q_max))
        blocks = []
        for _ in range(20):
            given += 7
            executor.accept(chunk(random_rows(rng, executor, limits), rng.choice([5.0, 15.0, 50.0])))
            blocks += [executor.advance(int(n)) for n in rng.integers(1, 40, rng.integers(1, 30))]
            if rng.random() < 0.1:
                executor.stop()
        executor.stop()
        blocks += [executor.advance(12) for _ in range(100)]
        q, v, a = joined(blocks)
        assert_lawful(q, v, a, limits)
        assert not v[-1].any()
        assert not a[-1].any()
        assert executor.state is ExecutorState.STOPPED
    return given


@pytest.mark.parametrize("table", TABLES)
def test_ten_thousand_random_joint_streams(table):
    assert storm(table, 3334, 7) >= 3334


@pytest.mark.slow
def test_a_million_random_joint_streams():
    """143 thousand chunks for seven joints each, over three tables of limits."""
    parts = [(table, 1_000_000 // 60 + 1, 100 + k) for k, table in enumerate([*TABLES] * 20)]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as workers:
        given = sum(workers.map(storm, *zip(*parts, strict=True)))
    assert given >= 1_000_000


def test_a_chunk_lasts_its_own_time_at_any_control_rate():
    for control_hz in (50, 15, 100, 600):
        executor = Executor(FER, DT, HOME_Q)
        motion = executor.accept(sway())
        assert not motion.stretched.any()
        n = 600 // control_hz
        ticks = 0
        while executor.state is ExecutorState.RUNNING:
            executor.advance(n)
            ticks += 1
        assert ticks / control_hz == pytest.approx(32 / 15, abs=1.5 / control_hz)


def test_rows_are_met_at_their_times():
    executor, plan = Executor(FER, DT, HOME_Q), sway()
    executor.accept(plan)
    block = executor.advance(40 * 32)
    assert np.abs(block.q_rad[39::40] - plan.q_rad).max() < 1e-12  # row i at (i + 1) / 15 s, 40 steps each
    np.testing.assert_allclose(block.nominal_s, (np.arange(40 * 32) + 1) * DT)
    assert executor.rows_reached == 32
    assert executor.motion_s == pytest.approx(32 / 15)


def test_rows_reached_counts_as_time_goes():
    executor = Executor(FER, DT, HOME_Q)
    executor.accept(sway())
    assert (executor.rows_reached, executor.steps_to_row(0), executor.steps_to_row(2)) == (0, 40, 120)
    executor.advance(39)
    assert (executor.rows_reached, executor.steps_to_row(0)) == (0, 1)
    executor.advance(1)
    assert (executor.rows_reached, executor.steps_to_row(0)) == (1, 0)


def test_velocity_goes_over_the_seam():
    executor = Executor(FER, DT, HOME_Q)
    executor.accept(sway())
    first = executor.advance(16 * 40)
    speed = np.abs(first.qd_rad_s[-1]).max()
    rest = sway().q_rad[16:]
    executor.accept(chunk(rest))
    second = executor.advance(16 * 40)
    assert speed > 0.05
    assert_lawful(*joined([first, second]), FER)
    assert np.abs(second.qd_rad_s[0] - first.qd_rad_s[-1]).max() < 0.05 * speed + FER.acceleration.max() * DT
    assert np.abs(second.q_rad[39::40] - rest).max() < 1e-12


def test_an_arm_that_stopped_at_a_joints_end_moves_again():
    """Braking that ends within a micro-radian beyond the end would leave a start from which nothing is lawful."""
    limits = FER
    for kind in range(2):
        executor = Executor(limits, DT, HOME_Q)
        executor.accept(chunk(np.linspace(HOME_Q, limits.q_max if kind else limits.q_min, 9)[1:], 5.0))
        while executor.state is ExecutorState.RUNNING:
            executor.advance(12)
        executor.advance(600)
        beyond = executor._plan.q_rad + (6e-7 if kind else -6e-7)  # as rounding has left it, once in some thousand stops
        fields = ("qd_rad_s", "qdd_rad_s2", "gripper", "nominal_s")
        executor._follow(ReferenceBlock(beyond, *(getattr(executor._plan, name) for name in fields)))
        executor.advance(len(beyond))
        assert ((executor.reference.q_rad >= limits.q_min) & (executor.reference.q_rad <= limits.q_max)).all()
        executor.accept(chunk(np.linspace(executor.reference.q_rad, HOME_Q, 9)[1:]))
        assert_lawful(*joined([executor.advance(2400)]), limits)


def test_a_motion_replaced_before_it_began_leaves_no_trace():
    """Two chunks in one instant: the second is joined to what the arm was told last, not to the first."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        executor = Executor(FER, DT, HOME_Q)
        executor.accept(sway())
        blocks = [executor.advance(300)]
        here = executor.reference.q_rad
        for _ in range(3):
            executor.accept(chunk(here + np.cumsum(rng.normal(0, 0.02, (6, 7)), axis=0)))
        blocks.append(executor.advance(1200))
        assert_lawful(*joined(blocks), FER)


def test_running_dry_holds_at_rest():
    executor = Executor(FER, DT, HOME_Q)
    executor.accept(sway(8))
    blocks = [executor.advance(12) for _ in range(100)]
    q, v, a = joined(blocks)
    assert_lawful(q, v, a, FER)
    assert np.abs(v[8 * 40 - 1]).max() > 0.05  # it was moving when the chunk ended
    assert not v[-1].any()
    assert executor.state is ExecutorState.HOLD
    assert executor.counters["holds"] == 1
    executor.accept(chunk(q[-1] + 0.01 * np.arange(1, 5)[:, None]))
    assert executor.state is ExecutorState.RUNNING


def test_stretched_motions_brake_without_a_hitch():
    """Where time is stretched the last row falls between two physics steps."""
    rng = np.random.default_rng(3)
    for _ in range(30):
        executor = Executor(FER, DT, HOME_Q)
        motion = executor.accept(chunk(HOME_Q + np.cumsum(rng.normal(0, 0.08, (6, 7)), axis=0)))
        assert motion.stretched.any()
        assert_lawful(*joined([executor.advance(12) for _ in range(200)]), FER)


def test_braking_stays_inside_the_joints_range():
    limits = FER
    start = limits.q_max - 1.0
    executor = Executor(limits, DT, start)
    q = np.minimum(start + np.arange(1, 33)[:, None] * 0.06, limits.q_max - 0.011)
    executor.accept(chunk(q))
    for at in range(0, 1200, 100):
        probe = Executor(limits, DT, start)
        probe.accept(chunk(q))
        head = [probe.advance(at)] if at else []
        probe.stop()
        assert_lawful(*joined([*head, *(probe.advance(12) for _ in range(60))]), limits)
        assert probe.state is ExecutorState.STOPPED


def test_a_chunk_that_cannot_be_entered_moving_is_entered_from_rest():
    rng, restarted = np.random.default_rng(4), 0
    for _ in range(60):
        executor = Executor(FER, DT, rng.uniform(FER.q_min, FER.q_max))
        executor.accept(chunk(random_rows(rng, executor, FER)))
        blocks = [executor.advance(int(rng.integers(20, 200)))]
        rows = random_rows(rng, executor, FER)
        executor.accept(chunk(rows))
        if not executor.counters["restarts"]:
            continue
        restarted += 1
        blocks += [executor.advance(12) for _ in range(2 + executor.steps_to_row(len(rows) - 1) // 12)]
        q, v, a = joined(blocks)
        assert_lawful(q, v, a, FER)
        at_rest = np.flatnonzero(~v[len(blocks[0]) :].any(axis=1))
        assert len(at_rest)  # it brakes first
        met = np.abs(q[len(blocks[0]) + at_rest[0] :] - rows[-1]).max(axis=1)
        assert met.min() < 0.01  # to a physics step
        if restarted == 3:
            return
    pytest.fail(f"only {restarted} chunks could not be entered moving; draw others")


def test_the_gripper_follows_its_rows():
    executor = Executor(FER, DT, HOME_Q, gripper=0.2)
    still = np.repeat(HOME_Q[None], 3, axis=0)
    executor.accept(chunk(still, gripper=np.array([0.9, 0.2, 0.5])))
    block = executor.advance(160)
    assert (block.gripper[:40] == 0.9).all()
    assert (block.gripper[40:80] == 0.2).all()
    assert (block.gripper[80:] == 0.5).all()
    executor.accept(chunk(still))  # no gripper in the rows: it stays
    assert (executor.advance(60).gripper == 0.5).all()
    executor.stop()
    assert (executor.advance(60).gripper == 0.5).all()


@pytest.mark.parametrize("field", ["q_rad", "qd_rad_s", "qdd_rad_s2", "gripper"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1e9])
def test_a_spoilt_plan_is_withheld(field, value):
    executor = Executor(FER, DT, HOME_Q)
    executor.accept(sway())
    blocks = [executor.advance(12) for _ in range(20)]
    spoilt = getattr(executor._plan, field).copy()
    spoilt[300] = value
    fields = ("q_rad", "qd_rad_s", "qdd_rad_s2", "gripper", "nominal_s")
    executor._plan = ReferenceBlock(**{name: spoilt if name == field else getattr(executor._plan, name) for name in fields})
    with pytest.raises(ActuatorGuardError):
        blocks.extend(executor.advance(12) for _ in range(1000))
    assert executor.state is ExecutorState.FAULT
    blocks += [executor.advance(12) for _ in range(60)]
    assert_lawful(*joined(blocks), FER)
    assert not blocks[-1].qd_rad_s.any()
    with pytest.raises(ControlError, match="FAULT"):
        executor.accept(sway())
    executor.stop()
    assert executor.state is ExecutorState.FAULT  # a stop does not heal
    assert executor.counters["faults"] == 1


def test_targets_outside_the_range_change_nothing():
    executor = Executor(FER, DT, HOME_Q)
    executor.accept(sway())
    executor.advance(100)
    before = executor.reference
    rows = np.repeat(HOME_Q[None], 3, axis=0)
    rows[1, 3] = 0.5
    with pytest.raises(ControlError, match="row 1 commands joint 3"):
        executor.accept(chunk(rows))
    with pytest.raises(ControlError, match="6 joints"):
        executor.accept(chunk(rows[:, :6]))
    assert np.array_equal(executor.reference.q_rad, before.q_rad)
    assert executor.state is ExecutorState.RUNNING
    assert executor.counters["chunks"] == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((FER, DT, np.zeros(7)), InputError),  # joint 4 has no zero
        ((FER, DT, HOME_Q[:6]), ShapeError),
        ((FER, DT, HOME_Q * np.nan), NonFiniteError),
        ((FER, 0.0, HOME_Q), InputError),
        ((FER, DT, HOME_Q, np.nan), NonFiniteError),
        ((FER, DT, HOME_Q, 1.5), InputError),
        (("fer", DT, HOME_Q), InputError),
    ],
)
def test_a_malformed_start_is_refused(arguments, error):
    with pytest.raises(error):
        Executor(*arguments)


@pytest.mark.parametrize("n", [0, -1, 1.5, None, "3", np.nan])
def test_steps_are_counted_in_whole_numbers(n):
    executor = Executor(FER, DT, HOME_Q)
    with pytest.raises(InputError):
        executor.advance(n)
    with pytest.raises(InputError):
        executor.accept(n)
