"""What a control tick costs the thread that runs it, with and without taking up
a chunk.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import report
from strands_cosmos3.checks import F64, of_grippers
from strands_cosmos3.control.executor import Executor, ReferenceBlock
from strands_cosmos3.control.loop import ControlLoop, LoopConfig
from strands_cosmos3.control.trajectory import JointState
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.limits import all_limits
from strands_cosmos3.robots.model import load_robot
from strands_cosmos3.types import JointTrajectory

_HZ = 50.0
_KINDS = ("smooth", "walk", "far")


class _IdealArm:
    """An arm that follows perfectly, in real time."""

    dt_s = 1 / 600

    def __init__(self, home_rad: F64, opening: float | F64) -> None:
        self.q = home_rad.copy()
        self.qd = np.zeros(len(home_rad))
        self._due_s = time.monotonic()
        self._opening = opening

    def now_s(self) -> float:
        return time.monotonic()

    def joint_state(self) -> tuple[F64, F64, float | F64]:
        return self.q.copy(), self.qd.copy(), self._opening

    def execute(self, block: ReferenceBlock, before: JointState) -> tuple[F64, F64]:
        self.q = block.q_rad[-1].copy()
        self.qd = block.qd_rad_s[-1].copy()
        self._due_s = max(self._due_s + len(block) * self.dt_s, time.monotonic() - 0.1)
        time.sleep(max(self._due_s - time.monotonic(), 0.0))
        return block.q_rad, block.gripper


class _Chunks:
    """32 rows at 15 Hz from where the arm is: a smooth motion, a random walk, or few rows across
    the joints' range.
    """

    def __init__(self, arm: _IdealArm, seed: int, limits: JointLimits):
        self._arm = arm
        self._rng = np.random.default_rng(seed)
        self._turn = 0
        self._limits = limits

    def observe(self, action_prefix: Any) -> F64:
        return self._arm.q.copy()

    def plan(self, observation: F64) -> JointTrajectory:
        kind = _KINDS[self._turn % len(_KINDS)]
        rng = self._rng
        self._turn += 1
        t_s = (np.arange(32) + 1) / 15
        low = self._limits.q_min
        high = self._limits.q_max
        if kind == "smooth":
            q = observation + 0.2 * np.sin(0.9 * t_s)[:, None] * rng.uniform(-1, 1, len(low))
        elif kind == "walk":
            q = observation + np.cumsum(rng.normal(0, 0.03, (32, len(low))), axis=0)
        else:
            q = rng.uniform(low, high, (3, len(low)))
            t_s = t_s[:3]
        return JointTrajectory(np.clip(q, low, high), t_s)


def _of(robot: str) -> tuple[JointLimits, F64, float | F64]:
    """Limits of all of a robot's joints, their angles at home, and open grippers."""
    spec = get_robot(robot)
    grippers = sum(limb.gripper is not None for limb in spec.limbs)
    return all_limits(load_robot(spec), spec), spec.home_rad, of_grippers(np.ones(grippers))


def _at_home(robot: str, seed: int) -> tuple[_IdealArm, _Chunks, Executor]:
    """A robot's arm at home, its chunks, and what executes them."""
    limits, home_rad, opening = _of(robot)
    arm = _IdealArm(home_rad, opening)
    return arm, _Chunks(arm, seed, limits), Executor(limits, arm.dt_s, home_rad, opening)


def run(chunks: int = 40, seed: int = 0, robot: str | None = None) -> dict[str, Any]:
    """Run the loop in real time until ``chunks`` are taken up; report CPU and wall-clock time of
    its ticks in ms.

    Args:
        chunks: Chunks to take up.
        seed: Seed of the chunks.
        robot: The robot (default: panda), or the .toml file of one.
    """
    accepted = 0

    def on_accepted(chunk: Any, rows_begun: int) -> None:
        nonlocal accepted
        accepted += 1

    config = LoopConfig(hz=_HZ, latency_s=None, replan_rows=8)
    loop = ControlLoop(*_at_home(robot or "panda", seed), config, on_accepted)
    cost_ms: dict[bool, list[float]] = {True: [], False: []}
    try:
        while accepted < chunks:
            before = accepted
            began_s = time.thread_time()
            loop.tick()
            cost_ms[accepted > before].append((time.thread_time() - began_s) * 1e3)
            report.progress(f"loop: {accepted} of {chunks} chunks taken up")
    finally:
        loop.close()
    planning_ms = _planning_ms(robot or "panda", chunks, seed)
    return {
        **({} if robot is None else {"robot": robot}),
        "control_hz": _HZ,
        "chunks": accepted,
        "tick_cpu_ms": _spread(cost_ms[False]),
        "tick_that_takes_up_a_chunk_cpu_ms": _spread(cost_ms[True]),
        "planning_cpu_ms_on_the_workers_thread": _spread(planning_ms),
        "counters": {
            name: loop.counters[name]
            for name in ("requested", "rejected", "expired", "deadline_misses")
        },
    }


def _planning_ms(robot: str, chunks: int, seed: int) -> list[float]:
    """CPU time of planning as many chunks, one after another."""
    _, source, executor = _at_home(robot, seed)
    out = []
    for _ in range(chunks):
        chunk = source.plan(executor.reference.q_rad)
        began_s = time.thread_time()
        prepared = executor.takeover().prepare(chunk)
        out.append((time.thread_time() - began_s) * 1e3)
        executor.take_up(prepared)
        executor.advance(300)
    return out


def _spread(values: list[float]) -> dict[str, float]:
    return {**report.quantiles(values), "max": max(values)}


if __name__ == "__main__":
    report.run(run)
