"""A policy that changes its mind with every chunk, and answers late: the hand stays within speed,
the joints within their limits, nothing is touched, and every answer is counted.
"""

import numpy as np
import pytest

from helpers.lines import Lines, line
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.panda import FER
from strands_cosmos3.types import Outcome
from strands_cosmos3.worlds.arms import Robot

MOST_M_S = 0.3
ENDED = ("chunks", "seam_braked", "expired", "rejected", "failed", "abandoned_inferences")


@pytest.fixture(scope="module")
def robot():
    return Robot("panda")


def contradicting(seed):
    """Lines in random directions, most of them downwards, at up to :data:`MOST_M_S`."""
    rng = np.random.default_rng(seed)

    def chunk(call):
        towards = rng.normal(size=3) + [0.0, 0.0, 0.7]  # z points out of the hand: down
        speed = rng.uniform(0.05, MOST_M_S)
        turn = rng.uniform(-0.4, 0.4, 3) * rng.integers(0, 2)
        return line(speed * towards / np.linalg.norm(towards), turn, int(rng.integers(6, 33)))

    return Lines(chunk)


def play(robot, seed, latency):
    """One episode of 4 s, and the contacts of the arm with itself, the table and the bin."""
    model, touched = robot.scene.model, set()
    of_arm = model.body_rootid == model.body_rootid[model.body("link0").id]
    fixed = (model.body_weldid == 0) & ~of_arm

    def step(q_rad, gripper):
        contact = robot.data.contact
        bodies = model.geom_bodyid[contact.geom]
        of_either = of_arm[bodies].any(1)
        of_both = (of_arm | fixed)[bodies].all(1)
        for one, two in bodies[of_either & of_both & (contact.dist < 0)]:
            touched.add((model.body(one).name, model.body(two).name))

    robot.on_step = step
    try:
        policy = Cosmos3Policy("droid", "panda", backend=contradicting(seed))
        rollout = robot.run_policy(policy=policy, duration=4.0, latency=latency, seed=seed)
    finally:
        robot.on_step = None
    return rollout, touched


def judge(robot, seed, latency):
    rollout, touched = play(robot, seed, latency)
    assert rollout.outcome is Outcome.COMPLETED
    assert not touched
    hand_m = rollout.arrays["T_base_hand_commanded"][:, :3, 3]
    assert np.linalg.norm(np.diff(hand_m, axis=0), axis=1).max() / robot.dt_s < MOST_M_S + 0.1
    q = rollout.arrays["q_commanded_rad"]
    v = np.diff(q, axis=0) / robot.dt_s
    a = np.diff(v, axis=0) / robot.dt_s
    assert ((q >= FER.q_min) & (q <= FER.q_max)).all()
    assert (np.abs(v) <= FER.velocity * 1.001).all()
    assert (np.abs(a) <= FER.acceleration * 1.001).all()
    counters = rollout.counters
    assert counters["requested"] - sum(counters.get(name, 0) for name in ENDED) in (0, 1)
    return counters


def test_a_policy_that_changes_its_mind(robot):
    totals = [judge(robot, seed, seed / 7) for seed in range(8)]  # latencies of 0 to 1 s
    assert sum(counters["seam_braked"] + counters["seam_slowed"] for counters in totals) >= 4
    assert sum(counters["chunks"] for counters in totals) >= 16


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_two_hundred_contradicting_streams(robot, part):
    for seed in range(100 + 25 * part, 125 + 25 * part):
        judge(robot, seed, float(np.random.default_rng(seed).uniform(0.0, 1.0)))
