"""References from random and edge streams, differentiated outside the executor: `python -m
helpers.limit_sweep --help`.

Angles alone are judged: their first, second and third differences against the joints' limits, and
the differences of the hand's position (the Denavit-Hartenberg product) against the hand's. Nothing
that the executor says of its rates is read.
"""

import argparse
import json
import time
import warnings
from collections import Counter

import mujoco
import numpy as np

from strands_cosmos3.control.executor import Executor, ExecutorState
from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.errors import ActuatorGuardError, MotionBoundsError
from strands_cosmos3.robots.limits import LimitsAssumedWarning
from strands_cosmos3.robots.panda import FER, FR3, dh_forward
from strands_cosmos3.types import JointTrajectory

TABLES = {"fer": FER, "fr3": FR3, "derated": FER.derated(0.4)}
RATES_HZ = (20, 50, 100, 200, 250, 500, 600, 1000)
KINDS = ("uniform", "walk", "ends", "still", "jitter", "nearly", "swing", "flick", "short", "one")
NAMES = ("position", "velocity", "acceleration", "jerk", "hand_velocity", "hand_acceleration")
POSITION_TOLERANCE_RAD = 1e-6


def rows_of(kind, rng, here, limits):
    """[n, joints] rows inside the joints' range: absurd, lawful, at the joints' ends, fast at
    the hand, or standing still.
    """
    low, high = limits.q_min, limits.q_max
    joints = len(low)
    n = int(rng.choice([1, 2, 3, 5, 8, 16, 32], p=[0.15, 0.15, 0.15, 0.2, 0.15, 0.1, 0.1]))
    if kind == "uniform":
        return rng.uniform(low, high, (min(n, 8), joints))
    if kind == "ends":
        return np.where(rng.random((min(n, 8), joints)) < 0.5, low, high)
    if kind == "nearly":  # a hair from the ends, or at them
        gap = rng.choice([0.0, 1e-9, 1e-6, 1e-3, 0.01], (min(n, 8), joints))
        return np.where(rng.random((min(n, 8), joints)) < 0.5, low + gap, high - gap)
    if kind == "swing":  # an outstretched arm turns about its base and shoulder
        t = np.arange(n)[:, None] * rng.uniform(0.02, 0.3)
        reach = np.resize(
            [rng.uniform(-1, 1), rng.uniform(0.3, 1.2), 0.0, -0.08, 0.0, 1.6, 0.0], joints
        )
        far = np.resize([2, 0.5, 1, 0.02, 0.1, 0.1, 0.1], joints)
        return np.clip(reach + np.sin(t) * rng.normal(0, 1, joints) * far, low, high)
    if kind == "flick":  # every joint to and fro at full speed
        step = (
            np.where(rng.random(joints) < 0.5, 1, -1)
            * limits.velocity
            / rng.choice([5.0, 15.0, 50.0])
        )
        return np.clip(here + np.where(np.arange(n)[:, None] % 4 < 2, 1, -1) * step, low, high)
    if kind == "one":  # a single joint
        joint = np.arange(joints) == rng.integers(joints)
        return np.clip(here + np.cumsum(rng.normal(0, 0.2, (n, joints)), axis=0) * joint, low, high)
    size = {"walk": 0.05, "still": 0.0, "jitter": 0.5, "short": 0.005}[kind]
    return np.clip(here + np.cumsum(rng.normal(0, size, (n, joints)), axis=0), low, high)


def stream(rng, limits, hz, chunks, tally):
    """Angles [M, joints] at ``hz``: chunks, stops and silence at odd moments, from a random
    configuration to rest.
    """
    executor = Executor(limits, 1 / hz, rng.uniform(limits.q_min, limits.q_max))
    parts = [np.repeat(executor.reference.q_rad[None], 4, axis=0)]

    def run(steps):
        while steps > 0:
            n = int(min(steps, rng.choice([1, 3, hz // 10, 10 * hz])))
            parts.append(executor.advance(max(n, 1)).q_rad)
            steps -= max(n, 1)

    for _ in range(chunks):
        rows = rows_of(rng.choice(KINDS), rng, executor.reference.q_rad, limits)
        fps, first = rng.choice([5.0, 15.0, 50.0, float(hz)]), rng.choice([0.0, 1.0], p=[0.1, 0.9])
        try:
            executor.accept(JointTrajectory(rows, (np.arange(len(rows)) + first) / fps))
        except MotionBoundsError:
            tally["too_long"] += 1
        tally["chunks"] += 1
        run(
            int(
                rng.choice(
                    [1, 2, 7, 0.3 * hz, 3 * hz, 6 * hz], p=[0.05, 0.05, 0.05, 0.15, 0.3, 0.4]
                )
            )
        )
        if rng.random() < 0.15:
            executor.stop()
            run(int(rng.choice([1, 2, 5, hz])))
    executor.stop()
    for _ in range(20):
        if executor.state is not ExecutorState.STOPPED:
            run(hz)
    assert executor.state is ExecutorState.STOPPED
    tally.update(
        {name: executor.counters[name] for name in ("restarts", "limited_by_joint_end", "holds")}
    )
    return np.concatenate(parts)


def ratios(q, limits, hand, hz):
    """The largest of each quantity as a share of its limit, from angles [M, 7] alone; [6] as
    NAMES.
    """
    p = dh_forward(q)[:, :3, 3]
    shares = [
        (np.linalg.norm(np.diff(p, order, axis=0), axis=1) * hz**order / limit).max()
        for order, limit in enumerate(hand, 1)
    ]
    return np.append(joint_ratios(q, limits, hz), shares)


def joint_ratios(q, limits, hz):
    """[4] of range, velocity, acceleration and jerk, from angles [M, joints] alone."""
    worst = [1 + np.maximum(q - limits.q_max, limits.q_min - q).max() / POSITION_TOLERANCE_RAD]
    for order, limit in enumerate((limits.velocity, limits.acceleration, limits.jerk), 1):
        worst.append((np.abs(np.diff(q, order, axis=0)) * hz**order / limit).max())
    return np.array(worst)


def frames_by_mujoco(ik, q):
    """By limb, positions [M, 3] of its frame at angles [M, joints], by MuJoCo and not by the
    chain that plans use.
    """
    model, data = ik.model, mujoco.MjData(ik.model)
    p = {limb.name: np.empty((len(q), 3)) for limb in ik.robot.limbs}
    for row, angles in enumerate(q):
        data.qpos[ik.q_address] = angles
        mujoco.mj_kinematics(model, data)
        for limb in ik.robot.limbs:
            p[limb.name][row] = (data.site if limb.frame_type == "site" else data.body)(
                limb.frame
            ).xpos
    return p


def sweep_robot(robot, seed, references, chunks=10):
    """As :func:`sweep`, of any robot at 600 and 1000 Hz: all joints of all limbs, and the hands
    whose makers limit them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        ik = LimbIK(robot, check_collisions=False)
    rng, judged, worst, tally = np.random.default_rng(seed), 0, np.zeros(len(NAMES)), Counter()
    while judged < references:
        hz = int(rng.choice([600, 1000]))
        try:
            q = stream(rng, ik.limits, hz, chunks, tally)
        except ActuatorGuardError:
            tally["withheld"] += 1
            continue
        shares = [np.append(joint_ratios(q, ik.limits, hz), [0.0, 0.0])]
        limited = [limb for limb in ik.robot.limbs if limb.limits.hand is not None]
        p = frames_by_mujoco(ik, q) if limited else {}
        for limb in limited:
            rates = limb.limits.hand.velocity, limb.limits.hand.acceleration
            steps = [
                np.linalg.norm(np.diff(p[limb.name], order, axis=0), axis=1) * hz**order
                for order in (1, 2)
            ]
            shares.append(
                np.append(
                    np.zeros(4),
                    [step.max() / rate for step, rate in zip(steps, rates, strict=True)],
                )
            )
        worst = np.maximum(worst, np.max(shares, axis=0))
        judged += len(q)
    return judged, dict(zip(NAMES, worst.tolist(), strict=True)), dict(tally)


def sweep(seed, references, chunks=25, until=None):
    """Draw streams until at least that many references were judged. Returns their number, the
    worst ratios and a tally.
    """
    rng, judged, worst, tally = np.random.default_rng(seed), 0, np.zeros(len(NAMES)), Counter()
    while judged < references and (until is None or not until()):
        name = rng.choice(list(TABLES))
        hand = {"fer": (1.7, 13.0), "fr3": (1.7, 9.0), "derated": (0.68, 5.2)}[name]
        hz = int(rng.choice(RATES_HZ, p=[0.02, 0.04, 0.04, 0.1, 0.1, 0.1, 0.2, 0.4]))
        try:
            q = stream(rng, TABLES[name], hz, chunks, tally)
        except ActuatorGuardError:  # the plan was not within limits; the arm would have braked
            tally["withheld"] += 1
            continue
        worst = np.maximum(worst, ratios(q, TABLES[name], hand, hz))
        judged += len(q)
    return judged, dict(zip(NAMES, worst.tolist(), strict=True)), dict(tally)


def main():
    parser = argparse.ArgumentParser(
        description="Judge references of random and edge streams against every limit."
    )
    parser.add_argument("--seed", type=int, default=0, help="first seed; one for each part")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--robot", help="any robot's name instead of the three Franka tables")
    parser.add_argument("--references", type=int, default=1_000_000, help="references in a part")
    arguments = parser.parse_args()
    for seed in range(arguments.seed, arguments.seed + arguments.parts):
        started = time.process_time()
        robot = arguments.robot
        found = (
            sweep(seed, arguments.references)
            if robot is None
            else sweep_robot(robot, seed, arguments.references)
        )
        judged, worst, tally = found
        seconds = round(time.process_time() - started, 1)
        print(
            json.dumps(
                {
                    "robot": robot,
                    "seed": seed,
                    "references": judged,
                    **worst,
                    **tally,
                    "cpu_s": seconds,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
