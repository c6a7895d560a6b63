"""The figures of a rollout, recomputed from its arrays by MuJoCo; and that they would show a bad
servo.
"""

import json
import time
from pathlib import Path

import mujoco
import numpy as np
import pytest

from strands_cosmos3.backends.replay import load_recording
from strands_cosmos3.robots.model import load_panda
from strands_cosmos3.sim.simulated_arm import ControlConfig
from strands_cosmos3.types import Outcome
from strands_cosmos3.worlds.arms import Robot

EPISODE = Path(__file__).parents[1] / "assets/droid_episode_48330.json"


def run(feed_forward="velocity", **arguments):
    robot = Robot(control=ControlConfig(feed_forward=feed_forward))
    return robot.run_policy(
        **{"policy_config": {"backend": "scripted"}, "task": "place", "seed": 4, **arguments}
    )


@pytest.fixture(scope="module")
def timed_rollout():
    """A rollout, and the wall and processor time of the whole call."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    rollout = run()
    return rollout, time.perf_counter() - wall_s, time.process_time() - cpu_s


@pytest.fixture(scope="module")
def rollout(timed_rollout):
    return timed_rollout[0]


def hand(q):
    model = load_panda()
    data, out = mujoco.MjData(model), []
    for row in q:
        data.qpos[:7] = row
        mujoco.mj_kinematics(model, data)
        out.append((data.body("hand").xpos.copy(), data.body("hand").xmat.reshape(3, 3).copy()))
    return np.stack([p for p, _ in out]), np.stack([R for _, R in out])


def errors(hand_a, hand_b):
    (p_a, R_a), (p_b, R_b) = hand_a, hand_b
    chord = np.linalg.norm(R_a - R_b, axis=(1, 2)) / np.sqrt(8)
    return np.linalg.norm(p_a - p_b, axis=1) * 1e3, np.rad2deg(2 * np.arcsin(np.minimum(chord, 1)))


def test_tracking_is_every_physics_step_against_its_own_reference(rollout, tmp_path):
    rollout.save_npz(str(tmp_path / "r.npz"))
    with np.load(tmp_path / "r.npz") as arrays:
        q_commanded, q_achieved, t_s = (
            arrays["q_commanded_rad"],
            arrays["q_achieved_rad"],
            arrays["t_s"],
        )
    assert len(t_s) == round(rollout.duration_s * 600)
    np.testing.assert_allclose(np.diff(t_s), 1 / 600, rtol=1e-9)
    commanded, achieved = hand(q_commanded), hand(q_achieved)
    mm, deg = errors(commanded, achieved)
    assert rollout.tracking.mean_mm == pytest.approx(mm.mean(), rel=1e-6)
    assert rollout.tracking.max_mm == pytest.approx(mm.max(), rel=1e-6)
    assert rollout.tracking.mean_deg == pytest.approx(deg.mean(), rel=1e-4)
    assert rollout.tracking.max_deg == pytest.approx(deg.max(), rel=1e-4)
    assert mm.mean() > 1e-4  # it is measured, not copied
    late = errors([x[:-6] for x in commanded], [x[6:] for x in achieved])[0]
    assert late.mean() > 2 * mm.mean()  # and at its own time: a hundredth of a second off shows


def test_a_servo_without_feed_forward_shows(rollout):
    bad = run("none", duration=4.0)
    assert bad.tracking.mean_mm > 5 * rollout.tracking.mean_mm
    assert bad.tracking.max_mm > 5


def test_four_errors_are_apart(rollout):
    assert rollout.success
    assert rollout.ik.max_mm < 1.1e-3
    assert 1e-3 < rollout.path.mean_mm < 1.0
    assert rollout.tracking.mean_mm < 0.5
    assert rollout.drift is None
    steps = rollout.steps
    assert steps["total"] > 50
    assert steps["unconverged"] == 0
    assert 0 <= steps["clamped"] <= steps["total"]
    assert rollout.latency_ms["p50"] <= rollout.latency_ms["p95"] <= rollout.latency_ms["max"]
    assert rollout.counters["ticks"] == pytest.approx(rollout.duration_s * 50, abs=60)


def test_a_simulated_second_takes_less_than_a_second(timed_rollout):
    """In processor time, which other processes do not lengthen; the figure itself is of wall time."""
    rollout, wall_s, cpu_s = timed_rollout
    assert rollout.duration_s / cpu_s > 1
    assert rollout.realtime_factor >= rollout.duration_s / wall_s


def test_json_says_it_all(rollout):
    said = json.loads(json.dumps(rollout.to_dict()))
    assert said["success"] is True
    assert said["outcome"] == "success"
    for error in ("ik", "path", "tracking"):
        assert set(said[error]) == {"mean_mm", "max_mm", "mean_deg", "max_deg"}
    assert "drift" not in said
    assert set(said["steps"]) == {"total", "clamped", "stretched", "unconverged", "off_pose"}


def test_the_droid_episode_in_the_closed_loop():
    rollout = run(policy_config={"backend": "replay", "model": str(EPISODE)}, task=None)
    assert rollout.outcome is Outcome.COMPLETED
    assert rollout.success is None
    assert rollout.tracking.mean_mm < 0.5
    assert rollout.tracking.max_mm < 2.0
    assert rollout.ik.max_mm < 1.1e-3
    recording = load_recording(EPISODE)
    assert rollout.duration_s == pytest.approx(recording.duration_s, abs=0.5)
    assert rollout.drift is not None
    assert rollout.drift.max_mm < 5.0
    # then the motion's clock is the simulation's, and the drift can be had by hand
    if rollout.steps["stretched"] == 0:
        t_s = rollout.arrays["t_s"]
        within = t_s <= recording.duration_s
        p, _ = hand(rollout.arrays["q_achieved_rad"][within])
        mm = np.linalg.norm(p - recording.at(t_s[within])[0][:, :3, 3], axis=1) * 1e3
        assert rollout.drift.mean_mm == pytest.approx(mm.mean(), rel=0.05, abs=0.02)


def test_a_repeated_episode_is_the_same(rollout):
    again = run()
    assert np.array_equal(again.arrays["q_achieved_rad"], rollout.arrays["q_achieved_rad"])
    assert again.steps == rollout.steps
