"""Stalls: noticed where an arm stays on the spot while its chunks repeat, and nowhere else; and the
retreat, back along the executed path and aside, within every limit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_executor import assert_lawful, joined

from helpers.ideal_arm import FPS, IdealArm, make_loop
from helpers.serving import Echo
from strands_cosmos3 import Cosmos3Policy
from strands_cosmos3.backends.base import BackendInfo
from strands_cosmos3.control.executor import ExecutorState
from strands_cosmos3.control.limb_ik import LimbGeometry, LimbIK
from strands_cosmos3.control.loop import LoopConfig
from strands_cosmos3.control.stall import ASIDE_M, RETREAT_M, ProgressMonitor, plan_retreat
from strands_cosmos3.errors import ControlError, InputError, UnknownNameError
from strands_cosmos3.robots.panda import FER, HOME_Q
from strands_cosmos3.types import JointTrajectory, Outcome
from strands_cosmos3.worlds.arms import Robot

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

AWAY_Q = HOME_Q + np.array([0.5, 0.2, 0.0, 0.2, 0.0, 0.0, 0.0])  # the hand is 0.3 m away


@pytest.fixture(scope="module")
def arm() -> LimbGeometry:
    ik = LimbIK("panda", check_collisions=False)
    return LimbGeometry(ik, ik.home)


def hands(arm, q_rad):
    (poses,) = arm.limb_poses(np.atleast_2d(q_rad)).values()
    return poses[:, :3, 3]


def chunk(q_end, arm, rows: int = 16) -> JointTrajectory:
    return JointTrajectory(np.tile(q_end, (rows, 1)), np.arange(1, rows + 1) / FPS, arm=arm)


def stalls(where, end, arm, seconds: float = 13.0) -> list[float]:
    """When a monitor notices stalls of an arm that is at where(t) and gets chunks to end(t)."""
    monitor, found = ProgressMonitor(), []
    for tick in range(round(seconds * 50)):
        now_s = tick / 50
        monitor.add(now_s, where(now_s))
        if tick % 27 == 0 and monitor.is_stalled(now_s, chunk(end(now_s), arm)):
            found.append(now_s)
    return found


def base_turned(angle_rad: float):
    """Joint angles at which the hand has turned about the base."""
    return HOME_Q + np.eye(7)[0] * angle_rad


def test_an_arm_that_rests_while_chunks_repeat_is_stalled_every_six_seconds(arm):
    first, second = stalls(lambda t: HOME_Q, lambda t: HOME_Q, arm)
    assert 5.7 < first < 6.5
    assert 5.7 < second - first < 6.7


def test_an_arm_that_circles_on_the_spot_is_stalled(arm):
    reach_m = float(np.linalg.norm(hands(arm, HOME_Q)[0, :2]))

    def circling(radius_m):
        def at(t_s):
            away = radius_m / reach_m * np.array([np.cos(3 * t_s), np.sin(3 * t_s)])
            return HOME_Q + away[0] * np.eye(7)[0] + away[1] * np.eye(7)[3]

        return at

    assert stalls(circling(0.02), circling(0.02), arm)
    assert not stalls(circling(0.06), circling(0.06), arm)


@pytest.mark.parametrize(
    ("where", "end"),
    [
        (lambda t: base_turned(0.1 * t), lambda t: base_turned(0.1 * t + 0.1)),  # 3 cm/s
        (lambda t: HOME_Q, lambda t: base_turned(0.15 * t)),  # other chunks
    ],
)
def test_an_arm_that_goes_on_is_not_stalled(arm, where, end):
    assert not stalls(where, end, arm)


def test_without_geometry_nothing_is_noticed():
    assert not stalls(lambda t: HOME_Q, lambda t: HOME_Q, None)


def executed(seconds_on_the_spot: float = 0.0):
    """References from home to where the hand stays, a tick apart."""
    there = HOME_Q + np.linspace(0, 1, 120)[:, None] * (AWAY_Q - HOME_Q)
    rng = np.random.default_rng(0)
    stay = AWAY_Q + rng.normal(0, 0.003, (round(seconds_on_the_spot * 50), 7))
    return np.vstack((there, stay, AWAY_Q))


@pytest.mark.parametrize("on_the_spot_s", [0.0, 5.0])
def test_a_retreat_follows_the_executed_path_and_then_goes_aside(arm, on_the_spot_s):
    path = executed(on_the_spot_s)
    ways = [plan_retreat(path, arm, FER, np.array(0.3), attempt) for attempt in (0, 1)]
    ends = []
    for way in ways:
        assert (way.gripper == 0.3).all()
        went = hands(arm, way.q_rad)
        off_m = np.linalg.norm(went[:, None] - hands(arm, executed())[None], axis=2).min(axis=1)
        back = off_m < 0.004
        turned = int(np.flatnonzero(back)[-1])
        assert back[: turned + 1].all()
        assert np.linalg.norm(went[turned] - went[0]) == pytest.approx(RETREAT_M, abs=0.02)
        aside = went[-1] - went[turned]
        along = went[turned] - went[0]
        assert np.linalg.norm(aside[:2]) == pytest.approx(ASIDE_M, abs=0.012)
        assert abs(aside[:2] @ along[:2]) < 0.35 * np.linalg.norm(aside) * np.linalg.norm(along)
        assert abs(aside[2]) < 0.005
        speeds = np.linalg.norm(np.diff(went, axis=0), axis=1) / np.diff(way.t_s)
        assert speeds.max() < 0.11
        assert way.t_s[-1] < 4
        ends.append(aside[:2])
    assert ends[0] @ ends[1] < 0  # to the other side


def test_a_retreat_goes_as_far_as_the_arm_came(arm):
    path = executed()[-20:]  # some 4 cm
    far_m = np.linalg.norm(np.diff(hands(arm, path[[0, -1]]), axis=0))
    way = plan_retreat(path, arm, FER, np.array(1.0), 0)
    went = np.linalg.norm(hands(arm, way.q_rad) - hands(arm, path[-1]), axis=1)
    assert 0.03 < far_m < RETREAT_M
    assert far_m - 0.01 < went.max() < far_m + ASIDE_M
    only_aside = plan_retreat(path[-1:], arm, FER, np.array(1.0), 0)
    went = np.linalg.norm(hands(arm, only_aside.q_rad) - hands(arm, path[-1]), axis=1)
    assert went.max() == pytest.approx(ASIDE_M, abs=0.01)


def test_a_step_aside_ends_before_a_joints_range_does(arm):
    near = replace(FER, q_min=AWAY_Q - 0.02, q_max=AWAY_Q + 0.02)
    way = plan_retreat(executed()[-1:], arm, near, np.array(1.0), 0)
    near.require_rows(way.q_rad, ControlError, "")


class Stuck:
    """Plans to the same place whoever asks, from wherever the arm is, at 0.4 rad/s."""

    def __init__(self, ideal: IdealArm, geometry):
        self.ideal, self.geometry, self.asked = ideal, geometry, []

    def observe(self, action_prefix):
        self.asked.append((self.ideal.now_s(), action_prefix))
        return self.ideal.q.copy()

    def plan(self, q):
        t_s = np.arange(1, 33) / FPS
        share = np.minimum(0.4 * t_s / max(np.abs(AWAY_Q - q).max(), 1e-9), 1)[:, None]
        return JointTrajectory(q + share * (AWAY_Q - q), t_s, np.full(32, 0.5), arm=self.geometry)


def stuck_loop(geometry, **config):
    ideal = IdealArm()
    planner = Stuck(ideal, geometry)
    ideal, loop, taken = make_loop(ideal, planner, replan_rows=8, **config)
    return ideal, loop, taken, planner


def ticks(loop, seconds: float) -> None:
    for _ in range(round(seconds * 50)):
        loop.tick()


@pytest.mark.parametrize("on_stall", ["report", "stop"])
def test_a_stall_is_counted_and_ends_the_loop_if_it_is_to(arm, on_stall):
    ideal, loop, _, _ = stuck_loop(arm, on_stall=on_stall)
    try:
        if on_stall == "report":
            ticks(loop, 15)
            assert loop.counters["stalled"] == 2
        else:
            with pytest.raises(ControlError, match="has stalled"):
                ticks(loop, 15)
            assert loop.executor.state is ExecutorState.STOPPING
            assert loop.counters["stalled"] == 1
    finally:
        loop.close()
    assert loop.counters["retreats"] == 0
    assert ideal.now_s() > 5


@pytest.mark.parametrize("latency_s", [0.0, 0.3])
def test_an_arm_retreats_and_asks_again_and_ends_after_as_many_as_it_may(arm, latency_s):
    ideal, loop, taken, planner = stuck_loop(
        arm, on_stall="retreat", most_retreats=2, latency_s=latency_s
    )
    try:
        with pytest.raises(ControlError, match="after 2 retreats"):
            ticks(loop, 60)
    finally:
        loop.close()
    assert (loop.counters["stalled"], loop.counters["retreats"]) == (3, 2)
    assert loop.counters["failed"] == loop.counters["rejected"] == 0
    assert [chunk.is_retreat for chunk, _ in taken].count(True) == 2
    assert loop.counters["requested"] == len(planner.asked)
    q, v, a = joined(ideal.blocks)
    assert_lawful(q, v, a, FER)
    away_m = np.linalg.norm(hands(arm, q[::30]) - hands(arm, AWAY_Q), axis=1)
    came = int(np.flatnonzero(away_m < 0.02)[0])
    assert away_m[came:].max() == pytest.approx(np.hypot(RETREAT_M, ASIDE_M), abs=0.02)
    # the first chunk after a retreat is requested at its end, and continues no other chunk
    for i, (what, _) in enumerate(taken):
        if what.is_retreat:
            until_s = what.motion.nominal_s[-1]
            begun_s = what.motion_from_s
            after = taken[i + 1][0].motion_from_s
            assert after - begun_s > 0.8 * until_s
    if latency_s:
        prefixes = [prefix for _, prefix in planner.asked]
        assert prefixes.count(None) == 3  # at the beginning, and after the retreats


def test_a_restored_loop_remembers_how_long_the_arm_has_rested(arm):
    ideal, loop, _, _ = stuck_loop(arm)
    try:
        ticks(loop, 4)
        steps = ideal.steps
        state = loop.snapshot(), loop.executor.snapshot()
        counts = []
        for _ in range(2):
            loop.restore(state[0])
            loop.executor.restore(state[1])
            ideal.steps = steps
            ticks(loop, 0.2)
            counts.append((len(loop._progress._postures), len(loop._path)))
    finally:
        loop.close()
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("config", "error"),
    [({"on_stall": "wait"}, UnknownNameError), ({"most_retreats": -1}, InputError)],
)
def test_settings_of_stalls_are_checked(config, error):
    with pytest.raises(error):
        LoopConfig(**config)


class Idle(Echo):
    """Goes 20 degrees aside, and stays there."""

    info = BackendInfo(name="idle", requires_images=False, action_space="joint_pos", prefix_rows=8)

    def infer(self, request):
        answer = super().infer(request)
        rows = np.tile(HOME_Q + np.eye(7)[0] * 0.35, (16, 1))
        share = np.linspace(1 / 16, 1, 16)[:, None]
        rows = request.q_rad + share * (rows - request.q_rad)
        return replace(answer, action=np.hstack((rows, np.ones((16, 1)))))


@pytest.mark.parametrize("on_stall", ["report", "stop", "retreat"])
def test_an_episode_that_stalls(on_stall):
    backend = Idle()
    with Cosmos3Policy(backend=backend, robot="panda") as policy:
        rollout = Robot("panda").run_policy(
            task="reach", policy=policy, duration=14, on_stall=on_stall, latency=0.1
        )
    counters = rollout.counters
    if on_stall == "stop":
        assert rollout.outcome is Outcome.FAULT
        assert "has stalled" in rollout.fault
        assert rollout.duration_s < 11
    else:
        assert rollout.outcome is Outcome.TIMEOUT
    assert counters["stalled"] >= 1
    assert (counters["retreats"] > 0) is (on_stall == "retreat")
    assert len(backend.requests) >= counters["requested"] - 1
    assert len(rollout.arrays["action"]) % 16 == 0 if "action" in rollout.arrays else True
