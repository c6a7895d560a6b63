"""``bench ik``: time and residuals of inverse kinematics on feasible chunks, and limit violations on infeasible ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mink
import numpy as np

from strands_cosmos3.bench.motions import FPS, feasible_chunk, hard_chunk
from strands_cosmos3.checks import F64
from strands_cosmos3.control.ik import METHODS, IKSolution, MinkIKBridge
from strands_cosmos3.robots.model import load_panda
from strands_cosmos3.robots.panda import FER, dh_forward

_MINK_ITERATIONS = 3  # enough for our accuracy, 7e-8 mm


def run(chunks: int, seed: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Compare each method with plain mink on feasible chunks, and measure limit violations on hard (infeasible) ones."""
    rng = np.random.default_rng(seed)
    bridge = MinkIKBridge(load_panda())
    feasible = [feasible_chunk(rng) for _ in range(chunks)]
    hard = [hard_chunk(rng) for _ in range(chunks)]
    out: dict[str, Any] = {"chunks": chunks, "rows": 32, "seed": seed}
    for method in METHODS:
        progress(f"ik: {method}, feasible chunks")
        out[method] = _feasible(bridge, feasible, method)
        progress(f"ik: {method}, hard chunks")
        out[method] |= _hard(bridge, hard, method)
    progress("ik: plain mink loop")
    plain_mink_ms = float(np.median([_plain_mink_ms(bridge, q, poses) for q, poses in feasible]))
    out["plain_mink_ms"] = plain_mink_ms
    for method in METHODS:
        out[method]["plain_mink_over_this"] = plain_mink_ms / out[method]["ms_per_chunk_median"]
    return out


def _qpos(bridge: MinkIKBridge, q: F64) -> F64:
    qpos = np.zeros(bridge.model.nq)
    qpos[bridge.q_address] = q
    return qpos


def _feasible(bridge: MinkIKBridge, chunks: list[tuple[F64, F64]], method: Any) -> dict[str, float]:
    times_ms, solutions = [], []
    for q, poses in chunks:
        started = time.perf_counter()
        solution = bridge.solve(poses, _qpos(bridge, q), None, method)
        times_ms.append((time.perf_counter() - started) * 1e3)
        solutions.append((solution, poses))
    errors = np.concatenate([_pose_errors(bridge, solution, poses) for solution, poses in solutions])
    return {
        "ms_per_chunk_median": float(np.median(times_ms)),
        "ms_per_chunk_min": float(np.min(times_ms)),
        "position_max_mm": float(errors[:, 0].max() * 1e3),
        "rotation_max_deg": float(np.rad2deg(errors[:, 1].max())),
        "converged_share": float(np.mean([solution.converged.mean() for solution, _ in solutions])),
    }


def _pose_errors(bridge: MinkIKBridge, solution: IKSolution, poses: F64) -> F64:
    """Return position and rotation errors [T, 2] by Denavit-Hartenberg kinematics, which the solver does not use."""
    from strands_cosmos3.sim.metrics import between

    return np.stack(between(dh_forward(solution.q_rad[:, bridge.q_address]), poses), axis=1)


def _hard(bridge: MinkIKBridge, chunks: list[tuple[F64, F64]], method: Any) -> dict[str, float]:
    ratio, finite, excess = 0.0, True, -np.inf
    for q, poses in chunks:
        solution = bridge.solve(poses, _qpos(bridge, q), 1.0 / FPS, method)
        angles = np.vstack((q, solution.q_rad[:, bridge.q_address]))
        ratio = max(ratio, float((np.abs(np.diff(angles, axis=0)) * FPS / FER.velocity).max()))
        finite = finite and bool(np.isfinite(solution.q_rad).all())
        excess = max(excess, float(np.maximum(angles - FER.q_max, FER.q_min - angles).max()))
    return {"hard_velocity_ratio_max": ratio, "hard_all_finite": finite, "hard_beyond_joint_limits_rad": max(excess, 0.0)}


def _plain_mink_ms(bridge: MinkIKBridge, q: F64, poses: F64) -> float:
    """Return the time of a plain mink loop: a frame task, a configuration limit, three iterations per row."""
    model = bridge.model
    configuration = mink.Configuration(model, _qpos(bridge, q))
    task = mink.FrameTask("hand", "body", 1.0, 1.0)
    limits = [mink.ConfigurationLimit(model)]
    started = time.perf_counter()
    for pose in poses:
        task.set_target(mink.SE3.from_matrix(pose))
        for _ in range(_MINK_ITERATIONS):
            v = mink.solve_ik(configuration, [task], 1.0, "daqp", damping=1e-9, limits=limits)
            configuration.integrate_inplace(v, 1.0)
    return (time.perf_counter() - started) * 1e3
