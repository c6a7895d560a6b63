"""``bench loop``: what a control tick costs the thread that runs it, with and without taking up a chunk."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.control.executor import Executor, ReferenceBlock
from strands_cosmos3.control.loop import ControlLoop, LoopConfig
from strands_cosmos3.control.trajectory import JointState
from strands_cosmos3.robots.panda import FER, HOME_Q
from strands_cosmos3.types import JointTrajectory

_HZ = 50.0
_KINDS = ("smooth", "walk", "far")


class _IdealArm:
    """An arm that follows perfectly, in real time."""

    dt_s = 1 / 600

    def __init__(self) -> None:
        self.q, self.qd, self._due_s = HOME_Q.copy(), np.zeros(7), time.monotonic()

    def now_s(self) -> float:
        return time.monotonic()

    def joint_state(self) -> tuple[F64, F64, float]:
        return self.q.copy(), self.qd.copy(), 1.0

    def execute(self, block: ReferenceBlock, before: JointState) -> tuple[F64, F64]:
        self.q, self.qd = block.q_rad[-1].copy(), block.qd_rad_s[-1].copy()
        self._due_s = max(self._due_s + len(block) * self.dt_s, time.monotonic() - 0.1)
        time.sleep(max(self._due_s - time.monotonic(), 0.0))
        return block.q_rad, block.gripper


class _Chunks:
    """32 rows at 15 Hz from where the arm is: a smooth motion, a random walk, or few rows across the joints' range."""

    def __init__(self, arm: _IdealArm, seed: int):
        self._arm, self._rng, self._turn = arm, np.random.default_rng(seed), 0

    def observe(self, action_prefix: Any) -> F64:
        return self._arm.q.copy()

    def plan(self, observation: F64) -> JointTrajectory:
        kind, rng = _KINDS[self._turn % len(_KINDS)], self._rng
        self._turn += 1
        t_s = (np.arange(32) + 1) / 15
        if kind == "smooth":
            q = observation + 0.2 * np.sin(0.9 * t_s)[:, None] * rng.uniform(-1, 1, 7)
        elif kind == "walk":
            q = observation + np.cumsum(rng.normal(0, 0.03, (32, 7)), axis=0)
        else:
            q, t_s = rng.uniform(FER.q_min, FER.q_max, (3, 7)), t_s[:3]
        return JointTrajectory(np.clip(q, FER.q_min, FER.q_max), t_s)


def run(chunks: int, seed: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the loop in real time until ``chunks`` are taken up; report CPU and wall-clock time of its ticks in ms."""
    arm, accepted = _IdealArm(), 0

    def on_accepted(chunk: Any, rows_begun: int) -> None:
        nonlocal accepted
        accepted += 1

    config = LoopConfig(hz=_HZ, latency_s=None, replan_rows=8)
    loop = ControlLoop(arm, _Chunks(arm, seed), Executor(FER, arm.dt_s, HOME_Q), config, on_accepted)
    cost_ms: dict[bool, list[float]] = {True: [], False: []}
    try:
        while accepted < chunks:
            before, began_s = accepted, time.thread_time()
            loop.tick()
            cost_ms[accepted > before].append((time.thread_time() - began_s) * 1e3)
            progress(f"loop: {accepted} of {chunks} chunks taken up")
    finally:
        loop.close()
    planning_ms = _planning_ms(chunks, seed)
    return {
        "control_hz": _HZ,
        "chunks": accepted,
        "tick_cpu_ms": _spread(cost_ms[False]),
        "tick_that_takes_up_a_chunk_cpu_ms": _spread(cost_ms[True]),
        "planning_cpu_ms_on_the_workers_thread": _spread(planning_ms),
        "counters": {name: loop.counters[name] for name in ("requested", "rejected", "expired", "deadline_misses")},
    }


def _planning_ms(chunks: int, seed: int) -> list[float]:
    """CPU time of planning as many chunks, one after another."""
    arm, out = _IdealArm(), []
    source = _Chunks(arm, seed)
    executor = Executor(FER, arm.dt_s, HOME_Q)
    for _ in range(chunks):
        chunk, began_s = source.plan(executor.reference.q_rad), time.thread_time()
        prepared = executor.takeover().prepare(chunk)
        out.append((time.thread_time() - began_s) * 1e3)
        executor.take_up(prepared)
        executor.advance(300)
    return out


def _spread(values: list[float]) -> dict[str, float]:
    return {"p50": float(np.median(values)), "p95": float(np.percentile(values, 95)), "max": float(np.max(values))}
