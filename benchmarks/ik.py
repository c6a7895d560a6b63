"""Time and residuals of inverse kinematics on feasible chunks, and limit
violations on infeasible ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import mink
import numpy as np

import report
import two_arms
from motions import FPS, elbow_straight_chunk, feasible_chunk, hard_chunk
from strands_cosmos3.checks import F64
from strands_cosmos3.control.ik import (
    METHODS,
    POSITION_TOLERANCE_M,
    ROTATION_TOLERANCE_RAD,
    IKSolution,
    MinkIKBridge,
)
from strands_cosmos3.robots.model import load_panda
from strands_cosmos3.robots.panda import FER, dh_forward

_MINK_ITERATIONS = 3  # enough for our accuracy, 7e-8 mm
_ROUNDS = 3
_MOST_ITERATIONS, _STALL_RATIO = 30, 0.998  # those of the bridge


def run(chunks: int = 40, seed: int = 0) -> dict[str, Any]:
    """Compare each method with mink on feasible chunks and straight elbows, and measure violations
    on infeasible chunks.

    Times are CPU times; the loops that are compared take turns.

    Args:
        chunks: Random chunks of each kind.
        seed: Seed of the chunks.
    """
    rng = np.random.default_rng(seed)
    bridge = MinkIKBridge(load_panda())
    feasible = [feasible_chunk(rng) for _ in range(chunks)]
    hard = [hard_chunk(rng) for _ in range(chunks)]
    elbows = [elbow_straight_chunk(rng) for _ in range(chunks)]
    report.progress("ik: times on feasible chunks")
    times_ms = _race(_contenders(bridge, None), feasible)
    out: dict[str, Any] = {"chunks": chunks, "rows": 32, "seed": seed}
    for method in METHODS:
        report.progress(f"ik: {method}, residuals and limits")
        took_ms = times_ms[method]
        out[method] = {
            "ms_per_chunk_median": float(np.median(took_ms)),
            "ms_per_chunk_min": float(took_ms.min()),
        }
        out[method] |= _feasible(bridge, feasible, method) | _hard(bridge, hard, method)
        for name in ("plain_mink", "mink_equal_tolerance"):
            out[method][f"{name}_over_this"] = float(np.median(times_ms[name] / took_ms))
    out["auto"]["collision_check_ms"] = float(np.median(times_ms["auto"] - times_ms["unchecked"]))
    out |= {
        f"{name}_ms": float(np.median(times_ms[name]))
        for name in ("plain_mink", "mink_equal_tolerance")
    }
    report.progress("ik: straight elbows")
    out["straight_elbows"] = _elbows(bridge, elbows)
    out["two_arms"] = two_arms.run(("dual_panda", "openarm"), max(chunks // 4, 1), seed)
    return out


def _elbows(bridge: MinkIKBridge, chunks: list[tuple[F64, F64]]) -> dict[str, float]:
    """Times and residuals near limits: within the joints' speeds, with the second pass for
    chunks that need it.
    """
    contenders = _contenders(bridge, 1.0 / FPS)
    times_ms = _race({name: contenders[name] for name in ("auto", "mink_equal_tolerance")}, chunks)
    worst_mm = [
        float(bridge.solve(T, _qpos(bridge, q), 1.0 / FPS).residual_m.max() * 1e3)
        for q, T in chunks
    ]
    return {
        "ms_per_chunk_median": float(np.median(times_ms["auto"])),
        "ms_per_chunk_max": float(times_ms["auto"].max()),
        "mink_equal_tolerance_over_this": float(
            np.median(times_ms["mink_equal_tolerance"] / times_ms["auto"])
        ),
        "position_max_mm": max(worst_mm),
        "chunks_over_1mm": sum(mm > 1 for mm in worst_mm),
    }


_Loop = Callable[[F64, F64], object]


def _contenders(bridge: MinkIKBridge, dt_s: float | None) -> dict[str, _Loop]:
    """Solvers of a chunk by name; each takes the start [7] and the poses [T, 4, 4]."""
    unchecked = MinkIKBridge(bridge.model, check_collisions=False)
    return {
        "auto": lambda q, T: bridge.solve(T, _qpos(bridge, q), dt_s, "auto"),
        "mink": lambda q, T: bridge.solve(T, _qpos(bridge, q), dt_s, "mink"),
        "unchecked": lambda q, T: unchecked.solve(T, _qpos(bridge, q), dt_s, "auto"),
        "plain_mink": lambda q, T: _plain_mink_loop(bridge, q, T),
        "mink_equal_tolerance": lambda q, T: _mink_loop(bridge, q, T, dt_s),
    }


def _race(contenders: dict[str, _Loop], chunks: list[tuple[F64, F64]]) -> dict[str, F64]:
    """[chunks] CPU times of each contender in milliseconds, the least of some rounds."""
    least_ms = {name: np.full(len(chunks), np.inf) for name in contenders}
    for index, (q, poses) in enumerate(chunks):
        for _ in range(_ROUNDS):
            for name, solve in contenders.items():
                started_s = time.process_time()
                solve(q, poses)
                took_ms = (time.process_time() - started_s) * 1e3
                least_ms[name][index] = min(least_ms[name][index], took_ms)
    return least_ms


def _qpos(bridge: MinkIKBridge, q: F64) -> F64:
    qpos = np.zeros(bridge.model.nq)
    qpos[bridge.q_address] = q
    return qpos


def _feasible(bridge: MinkIKBridge, chunks: list[tuple[F64, F64]], method: Any) -> dict[str, float]:
    solutions = [
        (bridge.solve(poses, _qpos(bridge, q), None, method), poses) for q, poses in chunks
    ]
    errors = np.concatenate(
        [_pose_errors(bridge, solution, poses) for solution, poses in solutions]
    )
    return {
        "position_max_mm": float(errors[:, 0].max() * 1e3),
        "rotation_max_deg": float(np.rad2deg(errors[:, 1].max())),
        "converged_share": float(np.mean([solution.converged.mean() for solution, _ in solutions])),
    }


def _pose_errors(bridge: MinkIKBridge, solution: IKSolution, poses: F64) -> F64:
    """Return position and rotation errors [T, 2] by Denavit-Hartenberg kinematics, which the
    solver does not use.
    """
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
    return {
        "hard_velocity_ratio_max": ratio,
        "hard_all_finite": finite,
        "hard_beyond_joint_limits_rad": max(excess, 0.0),
    }


def _plain_mink_loop(bridge: MinkIKBridge, q: F64, poses: F64) -> None:
    """Run a plain mink loop: a frame task, a configuration limit, three iterations per row."""
    model = bridge.model
    configuration = mink.Configuration(model, _qpos(bridge, q))
    task = mink.FrameTask("hand", "body", 1.0, 1.0)
    limits = [mink.ConfigurationLimit(model)]
    for pose in poses:
        task.set_target(mink.SE3.from_matrix(pose))
        for _ in range(_MINK_ITERATIONS):
            v = mink.solve_ik(configuration, [task], 1.0, "daqp", damping=1e-9, limits=limits)
            configuration.integrate_inplace(v, 1.0)


def _mink_loop(bridge: MinkIKBridge, q: F64, poses: F64, dt_s: float | None = None) -> None:
    """Run a mink loop that leaves a row where the bridge does: at its tolerance, or once the
    error stalls.
    """
    model, dt = bridge.model, 1.0 if dt_s is None else dt_s
    configuration = mink.Configuration(model, _qpos(bridge, q))
    task = mink.FrameTask("hand", "body", 1.0, 1.0)
    limits: list[mink.Limit] = [mink.ConfigurationLimit(model)]
    if dt_s is not None:
        limits.append(
            mink.VelocityLimit(model, dict(zip(bridge.joint_names, FER.velocity, strict=True)))
        )
    for pose in poses:
        task.set_target(mink.SE3.from_matrix(pose))
        cost = np.inf
        for _ in range(_MOST_ITERATIONS):
            x, y, z, u, v, w = task.compute_error(configuration).tolist()
            distance, angle = math.hypot(x, y, z), math.hypot(u, v, w)
            now = distance * distance + angle * angle
            if (
                distance <= POSITION_TOLERANCE_M and angle <= ROTATION_TOLERANCE_RAD
            ) or now > _STALL_RATIO * cost:
                break
            cost = now
            velocity = mink.solve_ik(configuration, [task], dt, "daqp", damping=1e-9, limits=limits)
            configuration.integrate_inplace(velocity, dt)


if __name__ == "__main__":
    report.run(run)
