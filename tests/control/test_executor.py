"""The executor: references on the physics clock that never leave the limits, whatever it is fed."""

import multiprocessing
import os
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from helpers.limit_sweep import NAMES, ratios, sweep, sweep_robot
from strands_cosmos3.control.executor import Executor, ExecutorState, ReferenceBlock
from strands_cosmos3.control.trajectory import MAX_DURATION_S, MAX_ROWS, MAX_STRETCH_S
from strands_cosmos3.errors import (
    ActuatorGuardError,
    ControlError,
    InputError,
    MotionBoundsError,
    NonFiniteError,
    ShapeError,
)
from strands_cosmos3.robots.catalogue import is_present, packaged_robots
from strands_cosmos3.robots.panda import FER, FR3, HOME_Q
from strands_cosmos3.types import JointTrajectory

DT = 1 / 600
SLACK = 1.001
JOINT_RATES = NAMES[1:4]
# of angles near 6 rad, in third differences at 1 kHz: 2e-8 of a derated table's jerk
ROUNDING = 1e-7


def chunk(q, fps=15.0, gripper=None):
    return JointTrajectory(q, (np.arange(len(q)) + 1) / fps, gripper)


def sway(n=32, fps=15.0, size=0.2):
    """A smooth motion about home that is still moving at its end."""
    t = (np.arange(n) + 1) / fps
    return chunk(HOME_Q + size * np.sin(0.9 * t)[:, None] * np.linspace(0.3, 1, 7), fps)


def joined(blocks):
    return tuple(
        np.concatenate([getattr(b, name) for b in blocks])
        for name in ("q_rad", "qd_rad_s", "qdd_rad_s2")
    )


def assert_lawful(q, v, a, limits):
    """Every limit, at every physics step; and the three agree with one another as a motion does."""
    assert np.isfinite(q).all()
    assert (q <= limits.q_max + 1e-6).all()
    assert (q >= limits.q_min - 1e-6).all()
    assert (np.abs(v) <= limits.velocity * SLACK).all()
    assert (np.abs(a) <= limits.acceleration * SLACK).all()
    assert (np.abs(np.diff(a, axis=0)) <= limits.jerk * DT * SLACK).all()
    # The trapezoid misses J dt^3 / 12 of a motion with jerk J, and a jump of J dt in acceleration,
    # mid-step, costs J dt^3 / 8.
    assert (
        np.abs(np.diff(q, axis=0) - DT * (v[1:] + v[:-1]) / 2).max()
        < limits.jerk.max() * DT**3 * 0.22
    )
    assert (
        np.abs(np.diff(v, axis=0) - DT * (a[1:] + a[:-1]) / 2).max()
        < limits.jerk.max() * DT**2 * 0.51
    )


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
    return np.clip(
        here + np.cumsum(rng.normal(0, size, (n, 7)), axis=0), limits.q_min, limits.q_max
    )


TABLES = {"fer": FER, "fr3": FR3, "derated": FER.derated(0.4)}


def storm(table, n_streams, seed):
    """At odd moments a chunk, a stop, or nothing; then to rest. A stream is what one joint is
    asked in one chunk.
    """
    limits, rng, given = TABLES[table], np.random.default_rng(seed), 0
    while given < n_streams:
        executor = Executor(limits, DT, rng.uniform(limits.q_min, limits.q_max))
        blocks = []
        for _ in range(20):
            given += 7
            before = executor.counters["chunks"]
            try:
                executor.accept(
                    chunk(random_rows(rng, executor, limits), rng.choice([5.0, 15.0, 50.0]))
                )
            except MotionBoundsError:  # 16 rows or more, each across the joints' range
                assert executor.counters["chunks"] == before
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


@pytest.mark.parametrize("streams", [280, pytest.param(3334, marks=pytest.mark.slow)])
@pytest.mark.parametrize("table", TABLES)
def test_hundreds_of_random_joint_streams(table, streams):
    assert storm(table, streams, 7) >= streams


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
    # row i at (i + 1) / 15 s, 40 steps each
    assert np.abs(block.q_rad[39::40] - plan.q_rad).max() < 1e-12
    np.testing.assert_allclose(block.nominal_s, (np.arange(40 * 32) + 1) * DT)
    assert executor.rows_reached == 32
    assert executor.motion_s == pytest.approx(32 / 15)


def test_rows_reached_counts_as_time_goes():
    executor = Executor(FER, DT, HOME_Q)
    executor.accept(sway())
    assert (executor.rows_reached, executor.steps_to_row(0), executor.steps_to_row(2)) == (
        0,
        40,
        120,
    )
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
    assert (
        np.abs(second.qd_rad_s[0] - first.qd_rad_s[-1]).max()
        < 0.05 * speed + FER.acceleration.max() * DT
    )
    assert np.abs(second.q_rad[39::40] - rest).max() < 1e-12


def test_an_arm_that_stopped_at_a_joints_end_moves_again():
    """Braking may end a hair beyond the end, where a joint turns back while its deceleration
    fades.
    """
    limits = FER
    for kind in range(2):
        for after in range(1, 400, 33):
            executor = Executor(limits, DT, HOME_Q)
            executor.accept(
                chunk(np.linspace(HOME_Q, limits.q_max if kind else limits.q_min, 9)[1:], 5.0)
            )
            blocks = [executor.advance(executor.steps_to_row(7) - after % 7 - 2 * (after % 3))]
            executor.stop()
            blocks.append(executor.advance(600))
            executor.accept(chunk(np.linspace(executor.reference.q_rad, HOME_Q, 9)[1:]))
            q, v, a = joined([*blocks, executor.advance(1200)])
            assert_lawful(q, v, a, limits)
            assert executor.counters["restarts"] == 0


def test_a_row_at_a_joints_end_is_not_passed_by_a_hair():
    """A spline that arrives there at micrometres a second would halt 0.5 nrad beyond."""
    limits, joint = replace(FER, hands=()), np.arange(7) == 3
    goal = np.where(joint, limits.q_max, HOME_Q)
    for gap, due_s in ((1e-6, 1 / 15), (1e-6, 0.2), (1e-6, 1.0), (1e-5, 1.0), (1e-3, 0.2)):
        executor = Executor(limits, DT, goal - gap * joint)
        executor.accept(chunk(goal[None], 1 / due_s))
        q = executor.advance(1200).q_rad
        assert (q <= limits.q_max + 1e-14).all()
        assert np.abs(q[-1] - goal).max() < 1e-9


def test_a_motion_replaced_before_it_began_leaves_no_trace():
    """Two chunks in one instant: the second is joined to what the arm was told last, not to the
    first.
    """
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
        executor.accept(chunk(random_rows(rng, executor, FER)[:8]))
        blocks = [executor.advance(int(rng.integers(20, 200)))]
        rows = random_rows(rng, executor, FER)[:8]
        executor.accept(chunk(rows))
        if not executor.counters["restarts"]:
            continue
        restarted += 1
        blocks += [
            executor.advance(12) for _ in range(2 + executor.steps_to_row(len(rows) - 1) // 12)
        ]
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


def spoilt(executor, trajectory, field, value, at=300, add=False):
    """A motion, prepared as usual, in which one value of one step is another."""
    prepared = executor.takeover().prepare(trajectory)
    values = getattr(prepared.block, field).copy()
    values[at] = values[at] + value if add else value
    return replace(
        prepared, plan=replace(prepared.plan, block=replace(prepared.block, **{field: values}))
    )


@pytest.mark.parametrize("at", [300, 32 * 40 + 3])  # in the motion, and in the stop after it
@pytest.mark.parametrize("field", ["q_rad", "qd_rad_s", "qdd_rad_s2", "gripper"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1e9])
def test_a_spoilt_plan_is_withheld(field, value, at):
    executor = Executor(FER, DT, HOME_Q)
    executor.take_up(spoilt(executor, sway(), field, value, at))
    blocks = [executor.advance(12) for _ in range(20)]
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


@pytest.mark.parametrize("hz", [600, 1000])
@pytest.mark.parametrize(
    ("named", "order", "share"),
    [("velocity", 1, 1.02), ("acceleration", 2, 0.6), ("jerk", 3, 0.5), ("angle", 0, None)],
)
def test_the_guard_differentiates_the_angles_itself(hz, named, order, share):
    """A plan whose rates look well may have angles that are not: one angle moved by so much, all
    else as it was.
    """
    by = FER.q_max - HOME_Q + 1e-3 if share is None else share * getattr(FER, named) / hz**order
    trajectory = chunk(np.repeat(HOME_Q[None], 8, axis=0))
    executor = Executor(replace(FER, hands=()), 1 / hz, HOME_Q)
    executor.take_up(spoilt(executor, trajectory, "q_rad", by, 100, add=True))
    with pytest.raises(ActuatorGuardError, match=named):
        executor.advance(200)
    if named == "jerk":
        executor = Executor(replace(FER, hands=()), 1 / hz, HOME_Q)
        # 0.9 of the limit
        executor.take_up(spoilt(executor, trajectory, "q_rad", 0.6 * by, 100, add=True))
        executor.advance(200)


@pytest.mark.parametrize("field", ["qd_rad_s", "qdd_rad_s2"])
def test_the_guard_reads_the_rates_that_are_fed_forward(field):
    limit = {"qd_rad_s": FER.velocity, "qdd_rad_s2": FER.acceleration}[field]
    for share in (0.9, 1.01):
        executor = Executor(FER, DT, HOME_Q)
        executor.take_up(
            spoilt(executor, chunk(np.repeat(HOME_Q[None], 8, axis=0)), field, share * limit, 100)
        )
        if share > 1:
            with pytest.raises(ActuatorGuardError):
                executor.advance(200)
        else:
            executor.advance(200)


OUTSTRETCHED = np.array([-1.5, 1.4, 0.0, -0.3, 0.0, 3.2, 0.0])


def swing(rad_s=2.15, n=24):
    """The outstretched arm turns about its base: 1.78 m/s at the hand for 2.15 rad/s."""
    rows = np.repeat(OUTSTRETCHED[None], n, axis=0)
    rows[:, 0] += rad_s * (np.arange(n) + 1) / 15
    return chunk(rows)


@pytest.mark.parametrize(("quantity", "share"), [("velocity", 0.99), ("acceleration", 0.97)])
def test_the_guard_checks_the_hand(quantity, share):
    """A motion planned for a faster hand than the executor allows is withheld."""
    executor = Executor(FER, DT, OUTSTRETCHED)
    executor.accept(swing())
    q = joined([executor.advance(1500)])[0]
    fastest = dict(zip(NAMES, ratios(q, FER, (1.7, 13.0), 600), strict=True))[f"hand_{quantity}"]
    for factor, withheld in ((1.01, False), (share, True)):
        hand = replace(
            FER.hands[0], **{quantity: getattr(FER.hands[0], quantity) * fastest * factor}
        )
        executor = Executor(replace(FER, hands=(hand,)), DT, OUTSTRETCHED)
        executor.take_up(replace(executor.takeover(), limits=FER).prepare(swing()))
        if withheld:
            with pytest.raises(ActuatorGuardError, match=f"hand's {quantity}"):
                executor.advance(1500)
            assert executor.state is ExecutorState.FAULT
        else:
            executor.advance(1500)


def test_the_hand_is_slowed_down_and_no_more_than_needed():
    """Without its limits it reaches 1.8 m/s; with them time is stretched until it reaches nearly
    1.7.
    """
    reached = {}
    for limits in (replace(FER, hands=()), FER):
        executor = Executor(limits, DT, OUTSTRETCHED)
        motion = executor.accept(swing())
        worst = ratios(joined([executor.advance(1800)])[0], FER, (1.7, 13.0), 600)
        reached[bool(limits.hands)] = {
            **dict(zip(NAMES, worst, strict=True)),
            "end_s": motion.spline.end_s,
        }
    assert reached[False]["hand_velocity"] > 1.03
    assert 0.95 < reached[True]["hand_velocity"] <= 1.001
    assert 1.0 < reached[True]["end_s"] / reached[False]["end_s"] < 1.1


def test_a_stop_does_not_throw_the_hand():
    """A joint-wise time-optimal stop of an arm that swings at its limit exceeds the hand's
    acceleration by half.
    """
    worst, rows = {}, swing(1.0).q_rad + np.outer(np.arange(24) / 15, [0, -0.5, 0.6, -0.6, 0, 0, 0])
    for limits in (replace(FER, hands=()), FER):
        executor = Executor(limits, DT, OUTSTRETCHED)
        executor.take_up(replace(executor.takeover(), limits=FER).prepare(chunk(rows)))
        blocks = [executor.advance(500)]
        executor.stop()
        blocks.append(executor.advance(600))
        worst[bool(limits.hands)] = ratios(joined(blocks)[0], FER, (1.7, 13.0), 600)[5]
        assert not blocks[-1].qd_rad_s[-1].any()
    assert worst[False] > 1.2
    assert worst[True] <= 1.001


@pytest.mark.parametrize("seed", [1, 2])
def test_references_differentiated_outside_the_executor_keep_every_limit(seed):
    """The short form of `make test-limits`, at 20 to 1000 Hz; NAMES lists what is judged."""
    judged, worst, tally = sweep(seed, 60_000, chunks=8)
    assert judged >= 60_000
    assert tally["chunks"] > 10
    assert "withheld" not in tally
    assert max(worst.values()) <= 1.001, worst
    assert max(worst[name] for name in JOINT_RATES) <= 1 + ROUNDING, worst
    # a stop uses all of it: had the angles been judged at another rate, it would not
    assert worst["jerk"] > 0.95


@pytest.mark.slow
def test_ten_million_references_keep_every_limit():
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as workers:
        parts = list(workers.map(sweep, range(1000, 1020), [500_000] * 20))
    assert sum(judged for judged, _, _ in parts) >= 10_000_000
    assert max(max(worst.values()) for _, worst, _ in parts) <= 1.001
    assert max(worst[name] for _, worst, _ in parts for name in JOINT_RATES) <= 1 + ROUNDING
    assert not any("withheld" in tally for _, _, tally in parts)


@pytest.mark.parametrize(("robot", "seed"), [("dual_panda", 1), ("ur5e", 1), ("ur5e", 35)])
def test_references_of_other_robots_keep_every_limit(robot, seed):
    """All joints of all limbs, differentiated outside the executor, and the hands by MuJoCo's
    kinematics.

    Stops of ur5e's seed 35 would end 0.01 urad beyond a joint's end, were 0.2 urad forgiven there.
    """
    judged, worst, tally = sweep_robot(robot, seed, 10_000, chunks=4)
    assert judged >= 10_000
    assert "withheld" not in tally
    assert max(worst.values()) <= 1.001, worst
    assert max(worst[name] for name in JOINT_RATES) <= 1 + ROUNDING, worst
    assert worst["jerk"] > 0.9


@pytest.mark.slow
def test_ten_million_references_of_all_robots_keep_every_limit():
    """Those that are installed or have been fetched."""
    robots = [name for name, robot in packaged_robots().items() if is_present(robot)]
    assert {"dual_panda", "ur5e"} <= set(robots)
    jobs = [(robot, seed) for seed in range(20) for robot in robots]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as workers:
        parts = list(
            workers.map(
                sweep_robot, *zip(*jobs, strict=True), [10_000_000 // len(jobs) + 1] * len(jobs)
            )
        )
    assert sum(judged for judged, _, _ in parts) >= 10_000_000
    for _, worst, tally in parts:
        assert "withheld" not in tally
        assert max(worst.values()) <= 1.001, worst
        assert max(worst[name] for name in JOINT_RATES) <= 1 + ROUNDING, worst


def far_rows(n=32):
    """From end to end of the joints' range and back."""
    return np.where(np.arange(n)[:, None] % 2 == 0, FER.q_max, FER.q_min)


@pytest.mark.parametrize(
    ("rows", "t_s", "named"),
    [
        (HOME_Q[None], [3600.0], "3600"),
        (HOME_Q[None], [MAX_DURATION_S + 0.1], "shorter chunks"),
        (
            np.repeat(HOME_Q[None], MAX_ROWS + 1, axis=0),
            np.arange(1, MAX_ROWS + 2) / 50,
            "1001 rows",
        ),
        (far_rows(), np.arange(1, 33) / 15, "32 rows are due in 2.1 s"),
        (far_rows(12), np.arange(1, 13) / 15, "closer together"),
    ],
    ids=["an hour", "too long", "too many", "too far", "a little too far"],
)
def test_a_plan_is_bounded(rows, t_s, named):
    """Refused at once, in little time and memory, and the motion under way goes on."""
    executor = Executor(FER, DT, HOME_Q)
    executor.accept(sway())
    executor.advance(100)
    before, began_s = executor.reference, time.thread_time()
    tracemalloc.start()
    with pytest.raises(MotionBoundsError, match=named):
        executor.accept(JointTrajectory(rows, np.array(t_s)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.thread_time() - began_s < 1.0
    assert peak < 20e6
    assert np.array_equal(executor.reference.q_rad, before.q_rad)
    assert executor.state is ExecutorState.RUNNING
    assert executor.counters["chunks"] == 1


def test_the_bounds_of_a_plan_are_not_narrower_than_said():
    executor = Executor(FER, 1 / 50, HOME_Q)
    motion = executor.accept(
        JointTrajectory(
            np.repeat(HOME_Q[None], MAX_ROWS, axis=0), np.arange(1, MAX_ROWS + 1) * 0.06
        )
    )
    assert motion.spline.end_s == pytest.approx(MAX_DURATION_S)
    executor.advance(4000)
    motion = executor.accept(chunk(np.vstack((FER.q_max, FER.q_min, FER.q_max))))
    assert 5 < motion.spline.end_s < MAX_STRETCH_S


def test_a_motion_that_continues_another_reference_is_refused():
    """What was planned ahead is of use only where it was planned from."""
    executor = Executor(FER, DT, HOME_Q)
    executor.accept(sway())
    ahead = executor.takeover(24)
    prepared = ahead.prepare(sway())
    assert executor.steps_until(prepared) == 24
    with pytest.raises(ControlError, match="another reference"):
        executor.take_up(prepared)
    blocks = [executor.advance(24)]
    assert np.array_equal(ahead.reference.q_rad, executor.reference.q_rad)
    assert executor.motion_s == pytest.approx(ahead.motion_s)
    executor.take_up(prepared)
    blocks.append(executor.advance(300))
    assert_lawful(*joined(blocks), FER)
    executor.advance(1)
    with pytest.raises(ControlError, match="another reference"):
        executor.take_up(prepared)


def test_a_stop_under_way_goes_on():
    """A second stop, or a chunk that needs one first, changes nothing of how the arm brakes."""
    executor = Executor(FER, DT, OUTSTRETCHED)
    executor.accept(swing())
    executor.advance(400)
    executor.stop()
    twin = Executor(FER, DT, OUTSTRETCHED)
    twin.accept(swing())
    twin.advance(400)
    twin.stop()
    for _ in range(10):
        twin.stop()
        np.testing.assert_array_equal(twin.advance(7).q_rad, executor.advance(7).q_rad)


def test_targets_outside_the_range_change_nothing():
    executor = Executor(FER, DT, HOME_Q)
    executor.accept(sway())
    executor.advance(100)
    before = executor.reference
    rows = np.repeat(HOME_Q[None], 3, axis=0)
    rows[1, 3] = 0.5
    with pytest.raises(ControlError, match=r"row 1: joint 4 of 7 is at 0\.5000 rad, outside"):
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
        ((FER, 1e-5, HOME_Q), InputError),  # a plan would have millions of steps
        ((FER, DT, HOME_Q, np.nan), NonFiniteError),
        ((FER, DT, HOME_Q, 1.5), InputError),
        ((FER, np.nan, HOME_Q), InputError),
        ((FER, 1e3, HOME_Q), InputError),
        ((FER, "0.002", HOME_Q), InputError),
        ((FER, True, HOME_Q), InputError),
        ((None, DT, HOME_Q), InputError),
        (({"velocity": [1.0] * 7}, DT, HOME_Q), InputError),
    ],
)
def test_a_malformed_start_is_refused(arguments, error):
    with pytest.raises(error):
        Executor(*arguments)


@pytest.mark.parametrize("junk", [None, 0, -3, 1.5, True, "7", [1], np.zeros((2, 7))], ids=repr)
def test_what_is_no_trajectory_and_no_number_of_steps_is_refused(junk):
    executor = Executor(FER, DT, HOME_Q)
    with pytest.raises(InputError, match="trajectory must be JointTrajectory"):
        executor.accept(junk)
    with pytest.raises(InputError, match="n_steps must be a whole number of at least 1"):
        executor.advance(junk)
    assert executor.state is ExecutorState.IDLE


def test_ten_kilohertz_is_the_fastest_rate():
    assert Executor(FER, 1e-4, HOME_Q).dt_s == 1e-4
    with pytest.raises(InputError, match=r"at least 0\.0001 s"):
        Executor(FER, 0.9e-4, HOME_Q)


def test_a_start_out_of_range_names_joint_value_and_range():
    with pytest.raises(
        InputError,
        match=r"joint 4 of 7 is at 0\.0000 rad, outside its range \[-3\.0718, -0\.0698\]",
    ):
        Executor(FER, DT, np.zeros(7))


@pytest.mark.parametrize(("first", "last"), [(0, 5), (1, 4), (2, 2), (3, 8), (5, 6), (7, 9)])
def test_steps_of_a_reference_past_its_end_rest_at_the_last_one(first, last):
    rows = np.arange(1.0, 6)[:, None] * np.ones(7)
    block = ReferenceBlock(rows, 10 * rows, 100 * rows, rows[:, 0] / 10, rows[:, 0] * 1000)
    steps = block.rows(first, last)
    assert len(steps) == last - first
    for k, step in enumerate(range(first, last)):
        within = step < 5
        number = min(step, 4) + 1.0
        for state in (block.at(step), steps.at(k)):
            np.testing.assert_array_equal(state.q_rad, np.full(7, number))
            np.testing.assert_array_equal(state.qd_rad_s, np.full(7, 10 * number * within))
            np.testing.assert_array_equal(state.qdd_rad_s2, np.full(7, 100 * number * within))
        assert steps.gripper[k] == number / 10
        np.testing.assert_array_equal(steps.nominal_s[k], 1000 * number if within else np.nan)
