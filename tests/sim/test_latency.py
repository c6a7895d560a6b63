"""Inference that takes time, in the closed loop with real dynamics: no tick is idle, and tasks
succeed as without.
"""

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from strands_cosmos3.control.chunk_blending import join_chunk
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.panda import FER
from strands_cosmos3.sim import pacing
from strands_cosmos3.sim.film import RolloutTrace
from strands_cosmos3.types import Outcome
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.expert import ScriptedBackend

CONFIG = {"embodiment": "droid", "backend": "scripted", "options": {"chunk_rows": 32}}
IDLE = ("idle_ticks", "deadline_misses", "expired", "failed", "rejected", "restarts")


@pytest.fixture(scope="module")
def robot():
    return Robot("panda")


def pick(robot, seed, latency):
    return robot.run_policy(
        policy_config=CONFIG, task="pick", seed=seed, duration=20.0, latency=latency
    )


@pytest.fixture(scope="module")
def late_pick(robot):
    return pick(robot, 0, 0.8)


def assert_within_limits(rollout):
    """From the recorded angles alone, across every seam: [N, 7] at 600 Hz."""
    q = rollout.arrays["q_commanded_rad"]
    v = np.diff(q, axis=0) * 600
    a = np.diff(v, axis=0) * 600
    assert ((q >= FER.q_min) & (q <= FER.q_max)).all()
    assert (np.abs(v) <= FER.velocity * 1.003).all()
    assert (np.abs(a) <= FER.acceleration * 1.01).all()
    assert len(np.unique(rollout.arrays["chunk"])) > 2  # there were seams


def test_eight_tenths_of_a_second_cost_no_tick(robot, late_pick):
    for rollout in (late_pick, pick(robot, 1, 0.8)):
        assert rollout.success
        assert {name: rollout.counters.get(name, 0) for name in IDLE} == dict.fromkeys(IDLE, 0)
        assert_within_limits(rollout)
        assert rollout.tracking.max_mm < 2.0


def test_a_predicted_world_begins_with_its_observation(robot):
    """Its first frame is of what was seen then: one latency before the chunk is taken up, or
    none while the arm waited.
    """
    since_s = []
    told = SimpleNamespace(
        show_plan=lambda plan, ms: None, show_prediction=lambda video, since: since_s.append(since)
    )
    robot.run_policy(
        policy_config=CONFIG, task="pick", seed=0, duration=4.0, latency=0.5, audience=told
    )
    assert since_s[0] == 0.0
    assert len(since_s) > 1
    # a motion that was stretched has come less far
    assert all(0.4 < since <= 0.5 + 1e-6 for since in since_s[1:])
    trace = RolloutTrace(robot.scene, points=2)
    trace.predict(np.arange(9), from_s=-0.3)
    assert trace.predicted(0.02) == 4  # 0.32 s at 15 frames a second


@pytest.mark.slow
def test_picking_succeeds_as_often_as_without_latency(robot):
    """A hundred held-out scenes each: within three points."""
    late, prompt, idle = 0, 0, 0
    for seed in range(100):
        rollout = pick(robot, seed, 0.8)
        late += rollout.success
        idle += sum(rollout.counters.get(name, 0) for name in IDLE)
        assert_within_limits(rollout)
        prompt += pick(robot, seed, 0.0).success
    print(f"pick: {late} of 100 with 0.8 s, {prompt} without; idle ticks {idle}")
    assert late >= prompt - 3
    assert idle == 0


class Heeds(ScriptedBackend):
    """The expert, pretending to heed action-prefix rows, so that one can see which it is given."""

    info = replace(ScriptedBackend.info, prefix_rows=None)

    def __init__(self):
        super().__init__()
        self.asked = []

    def infer(self, request):
        chunk = super().infer(request)
        self.asked.append((request.t_motion_s, request.action_prefix, chunk.action))
        return chunk


def test_committed_rows_are_the_last_chunks_own_at_their_time(robot):
    backend = Heeds()
    with Cosmos3Policy(
        backend=backend, robot="panda", options={"chunk_rows": 32}, actions_per_step=10
    ) as policy:
        robot.run_policy(
            policy=policy, instruction="pick up the red cube", duration=5.0, latency=0.4
        )
    assert backend.asked[0][1] is None
    assert len(backend.asked) > 4
    for (before_s, _, chunk), (now_s, action_prefix, _) in zip(
        backend.asked, backend.asked[1:], strict=False
    ):
        first = next(
            i for i in range(32) if np.array_equal(chunk[i : i + len(action_prefix)], action_prefix)
        )
        assert len(action_prefix) == 6  # 0.4 s at 15 Hz
        # row i of a chunk is on its way from i / 15 to (i + 1) / 15 s after its observation
        assert abs((now_s - before_s) * 15 - first) < 0.6


def test_rows_that_were_refused_are_not_committed(robot, monkeypatch):
    """A chunk that cannot be followed leaves the one before in force, and that is what the arm
    is bound to do.
    """
    backend, calls = Heeds(), []

    def refuse_the_third(plan, *arguments):
        calls.append(plan)
        return None if len(calls) == 3 else join_chunk(plan, *arguments)

    monkeypatch.setattr("strands_cosmos3.control.loop.join_chunk", refuse_the_third)
    with Cosmos3Policy(
        backend=backend, robot="panda", options={"chunk_rows": 32}, actions_per_step=10
    ) as policy:
        robot.run_policy(
            policy=policy, instruction="pick up the red cube", duration=4.0, latency=0.4
        )
    _, _, in_force = backend.asked[1]
    _, action_prefix, _ = backend.asked[3]
    first = next(
        i for i in range(32) if np.array_equal(in_force[i : i + len(action_prefix)], action_prefix)
    )
    assert abs((backend.asked[3][0] - backend.asked[1][0]) * 15 - first) < 0.6


def test_an_inference_that_takes_longer_than_its_chunk_is_asked_all_the_same(robot):
    """It is bound to everything but one row: none of the questions may be malformed for that."""
    backend = Heeds()
    with Cosmos3Policy(backend=backend, robot="panda", options={"chunk_rows": 8}) as policy:
        rollout = robot.run_policy(
            policy=policy, instruction="pick up the red cube", duration=4.0, latency=0.8
        )
    assert rollout.counters["failed"] == 0
    assert all(
        action_prefix is None or 0 < len(action_prefix) < 8 for _, action_prefix, _ in backend.asked
    )


def test_latency_and_real_time_exclude_each_other(robot):
    with pytest.raises(ConfigError, match="leave one out"):
        robot.run_policy(policy_config=CONFIG, latency=0.5, realtime=True)


def test_real_time_is_kept(robot):
    """Simulated seconds last as long as those of wall-clock time, or longer; inference runs
    beside them.
    """
    rollout = robot.run_policy(
        policy_config=CONFIG, instruction="reach the red cube", duration=2.0, realtime=True
    )
    assert rollout.realtime_factor <= 1.05
    assert rollout.counters["ticks"] == 100
    assert rollout.latency_clock == "simulated, in wall-clock time"


def test_ticks_that_took_too_long_are_counted(robot):
    """Seven of a hundred ticks last three times as long as they may; a busy machine may add
    some, and takes none away.
    """
    slow = range(10, 80, 10)
    ticks = itertools.count()

    def dawdle(robot):
        if next(ticks) in slow:
            time.sleep(0.06)

    rollout = robot.run_policy(
        policy_config=CONFIG,
        instruction="reach the red cube",
        duration=2.0,
        realtime=True,
        on_tick=dawdle,
    )
    assert len(slow) <= rollout.counters["late_ticks"] <= 100


def test_the_pace_counts_a_tick_as_late_if_the_wall_was_ahead(monkeypatch):
    wall, now_s = [100.0], 3.0
    monkeypatch.setattr(pacing.time, "monotonic", lambda: wall[0])
    monkeypatch.setattr(
        pacing.time, "sleep", lambda seconds: wall.__setitem__(0, wall[0] + seconds)
    )
    pacer = pacing.Pacer(now_s)
    late = []
    for took_s in (0.005, 0.019, 0.05, 0.005, 0.021):
        now_s += 0.02
        wall[0] += took_s
        late.append(pacer.wait(now_s))
    assert late == [False, False, True, False, True]
    # what was lost is not made up for
    assert wall[0] == pytest.approx(100.0 + 0.02 + 0.02 + 0.05 + 0.02 + 0.021)


def test_a_delay_within_the_tolerance_is_made_up_for_and_a_longer_one_is_not(monkeypatch):
    wall, now_s = [100.0], 0.0
    monkeypatch.setattr(pacing.time, "monotonic", lambda: wall[0])
    monkeypatch.setattr(
        pacing.time, "sleep", lambda seconds: wall.__setitem__(0, wall[0] + seconds)
    )
    pacer = pacing.Pacer(now_s, tolerance_s=0.1)
    waited, ends_s = [], []
    for took_s in (0.05, 0.005, 0.001, 0.2, 0.005):
        now_s += 0.02
        wall[0] += took_s
        waited.append(not pacer.wait(now_s))
        ends_s.append(wall[0] - 100.0)
    assert waited == [False, False, True, False, True]
    assert ends_s == pytest.approx([0.05, 0.055, 0.06, 0.26, 0.28])


def test_latency_is_the_loops_and_inference_the_walls(robot, late_pick):
    """The expert answers within milliseconds; the loop waits 0.8 s for it on its own clock, and
    says both.
    """
    said = late_pick.to_dict()
    assert said["latency_clock"] == "simulated"
    for name in ("p50", "p95", "max"):
        assert said["latency_ms"][name] == pytest.approx(800.0, abs=1e-3)  # a whole number of ticks
    assert 0 < said["inference_ms"]["p50"] < said["inference_ms"]["max"]
    assert said["inference_ms"]["p50"] != pytest.approx(800.0, abs=1e-3)
    prompt = robot.run_policy(
        policy_config=CONFIG, instruction="reach the red cube", duration=0.5
    ).to_dict()
    assert prompt["latency_ms"] == {"p50": 0.0, "p95": 0.0, "max": 0.0}
    assert prompt["latency_clock"] == "simulated, stopped for each answer"
    assert prompt["inference_ms"]["max"] > 0


def test_an_episode_that_ends_in_a_hold_says_so(robot):
    """Two rows last 0.13 s and the next answer takes 0.8 s: the time is up while the arm waits."""
    config = {**CONFIG, "options": {"chunk_rows": 2}}
    rollout = robot.run_policy(
        policy_config=config, instruction="reach the red cube", duration=1.3, latency=0.8
    )
    assert rollout.outcome is Outcome.COMPLETED
    assert rollout.final_state == "hold"
    assert "the policy has not answered for" in rollout.to_dict()["held"]
    moving = robot.run_policy(policy_config=CONFIG, instruction="reach the red cube", duration=1.0)
    assert (moving.final_state, moving.held) == ("running", None)
    assert "held" not in moving.to_dict()
