"""Inverse kinematics against mink's own loop: times and residuals on feasible chunks of one arm and
of two, and limit violations on infeasible ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mink
import mujoco
import numpy as np

import report
from motions import FPS, elbow_straight_chunk, feasible_chunk, hard_chunk
from strands_cosmos3.actions.rotations import pose_distances
from strands_cosmos3.checks import F64
from strands_cosmos3.control.ik import (
    METHODS,
    POSITION_TOLERANCE_M,
    ROTATION_TOLERANCE_RAD,
    MinkIKBridge,
    configurations,
)
from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.robots.model import load_panda
from strands_cosmos3.robots.panda import FER, dh_forward

_ROUNDS = 3
_MOST_ITERATIONS, _STALL_RATIO = 30, 0.998  # those of the bridge
_Chunk = tuple[F64, Any]
"""Configuration [nq] at the start, and poses [T, 4, 4] of the hand, or by name of both hands."""
_Solver = Callable[[F64, Any], Any]


def run(chunks: int = 40, seed: int = 0) -> dict[str, Any]:
    """Compare each method with mink's loop on feasible chunks and straight elbows, and measure
    violations on infeasible chunks.

    Times are CPU times; the loops that are compared take turns.

    Args:
        chunks: Random chunks of each kind; a quarter as many of two arms.
        seed: Seed of the chunks.
    """
    rng = np.random.default_rng(seed)
    bridge = MinkIKBridge(load_panda())
    unchecked = MinkIKBridge(bridge.model, check_collisions=False)

    def drawn(draw: Callable[[np.random.Generator], tuple[F64, F64]]) -> list[_Chunk]:
        q_rad, T_base_hand = zip(*(draw(rng) for _ in range(chunks)), strict=True)
        starts = configurations(np.zeros(bridge.model.nq), bridge.q_address, np.array(q_rad))
        return list(zip(starts, T_base_hand, strict=True))

    feasible, hard, elbows = map(drawn, (feasible_chunk, hard_chunk, elbow_straight_chunk))
    report.progress("ik: times on feasible chunks")
    contenders: dict[str, _Solver] = {
        method: lambda qpos, T, method=method: bridge.solve(T, qpos, None, method)
        for method in METHODS
    }
    contenders["unchecked"] = lambda qpos, T: unchecked.solve(T, qpos, None, "auto")
    loop = MinkLoop(bridge.model, {"arm": "hand"})
    contenders["mink_equal_tolerance"] = lambda qpos, T: loop.solve(qpos, {"arm": T})
    times_ms = _race(contenders, feasible)
    theirs_ms = times_ms["mink_equal_tolerance"]
    out: dict[str, Any] = {"chunks": chunks, "rows": 32, "seed": seed}
    out["mink_equal_tolerance_ms"] = float(np.median(theirs_ms))
    for method in METHODS:
        report.progress(f"ik: {method}, residuals and limits")
        out[method] = {
            **_against_mink(times_ms[method], theirs_ms),
            "ms_per_chunk_min": float(times_ms[method].min()),
            **_residuals(bridge, feasible, method),
            **_violations(bridge, hard, method),
        }
    out["auto"]["collision_check_ms"] = float(np.median(times_ms["auto"] - times_ms["unchecked"]))
    report.progress("ik: straight elbows")
    out["straight_elbows"] = _elbows(bridge, elbows)
    report.progress("ik: two arms")
    out["two_arms"] = _two_arms(max(chunks // 4, 1), rng)
    return out


def _against_mink(ours_ms: F64, theirs_ms: F64) -> dict[str, float]:
    """The median of chunks' times, and of how many times as long mink takes."""
    return {
        "ms_per_chunk_median": float(np.median(ours_ms)),
        "mink_equal_tolerance_over_this": float(np.median(theirs_ms / ours_ms)),
    }


def _race(contenders: Mapping[str, _Solver], chunks: list[_Chunk]) -> dict[str, F64]:
    """[chunks] CPU times of each contender in milliseconds, the least of some rounds."""
    rounds_ms = [
        report.alternate(
            {name: partial(solve, *chunk) for name, solve in contenders.items()}, _ROUNDS
        )
        for chunk in chunks
    ]
    return {name: np.array([min(times[name]) for times in rounds_ms]) for name in contenders}


def _residuals(bridge: MinkIKBridge, chunks: list[_Chunk], method: Any) -> dict[str, float]:
    """Residuals by Denavit-Hartenberg kinematics, which the solver does not use."""
    solutions = [bridge.solve(poses, qpos, None, method) for qpos, poses in chunks]
    errors = [
        pose_distances(dh_forward(solution.q_rad[:, bridge.q_address]), poses)
        for solution, (_, poses) in zip(solutions, chunks, strict=True)
    ]
    return {
        "position_max_mm": float(max(distance_m.max() for distance_m, _ in errors) * 1e3),
        "rotation_max_deg": float(np.rad2deg(max(angle_rad.max() for _, angle_rad in errors))),
        "converged_share": float(np.mean([solution.converged.mean() for solution in solutions])),
    }


def _violations(bridge: MinkIKBridge, chunks: list[_Chunk], method: Any) -> dict[str, float]:
    ratio, finite, excess = 0.0, True, -np.inf
    for qpos, poses in chunks:
        q_rad = bridge.solve(poses, qpos, 1.0 / FPS, method).q_rad
        angles = np.vstack((qpos, q_rad))[:, bridge.q_address]
        ratio = max(ratio, float((np.abs(np.diff(angles, axis=0)) * FPS / FER.velocity).max()))
        finite = finite and bool(np.isfinite(q_rad).all())
        excess = max(excess, float(np.maximum(angles - FER.q_max, FER.q_min - angles).max()))
    return {
        "hard_velocity_ratio_max": ratio,
        "hard_all_finite": finite,
        "hard_beyond_joint_limits_rad": max(excess, 0.0),
    }


def _elbows(bridge: MinkIKBridge, chunks: list[_Chunk]) -> dict[str, float]:
    """Times and residuals near limits: within the joints' speeds, with the second pass for
    chunks that need it.
    """
    speeds = dict(zip(bridge.joint_names, FER.velocity, strict=True))
    loop = MinkLoop(bridge.model, {"arm": "hand"}, 1.0 / FPS, speeds)
    contenders: dict[str, _Solver] = {
        "auto": lambda qpos, T: bridge.solve(T, qpos, 1.0 / FPS, "auto"),
        "mink": lambda qpos, T: loop.solve(qpos, {"arm": T}),
    }
    times_ms = _race(contenders, chunks)
    worst_mm = [float(contenders["auto"](*chunk).residual_m.max() * 1e3) for chunk in chunks]
    return {
        **_against_mink(times_ms["auto"], times_ms["mink"]),
        "ms_per_chunk_max": float(times_ms["auto"].max()),
        "position_max_mm": max(worst_mm),
        "chunks_over_1mm": sum(mm > 1 for mm in worst_mm),
    }


def _two_arms(chunks: int, rng: np.random.Generator) -> dict[str, float]:
    """Both arms at once, neither side with a check for collisions."""
    ik = LimbIK("dual_panda", check_collisions=False)
    both: list[_Chunk] = []
    for _ in range(chunks):
        arms = {name: feasible_chunk(rng) for name in ik.bridges}
        qpos = ik.home.copy()
        qpos[ik.q_address] = np.concatenate([q for q, _ in arms.values()])
        both.append((qpos, {name: poses for name, (_, poses) in arms.items()}))
    loop = MinkLoop(ik.model, {limb.name: limb.frame for limb in ik.robot.limbs})
    contenders: dict[str, _Solver] = {
        "limb_ik": lambda qpos, poses: ik.solve(poses, qpos),
        "mink": lambda qpos, poses: loop.solve(
            qpos, {name: ik.T_world_base[name] @ T for name, T in poses.items()}
        ),
    }
    times_ms = _race(contenders, both)
    solutions = [contenders["limb_ik"](*chunk) for chunk in both]
    worst_m = max(float(solution.residual_m.max()) for solution in solutions)
    return {
        **_against_mink(times_ms["limb_ik"], times_ms["mink"]),
        "position_max_mm": worst_m * 1e3,
    }


class MinkLoop:
    """mink's own loop over a chunk: frame tasks in one quadratic program.

    It leaves a row where the bridge does: at its tolerance, or once the error stalls.

    Args:
        frames: The body that each limb moves.
        dt_s: Time of a row.
        speeds: Limits in rad/s by joint; none if empty.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        frames: Mapping[str, str],
        dt_s: float = 1.0,
        speeds: Mapping[str, float] = {},
    ):
        self._model, self._dt_s = model, dt_s
        self._tasks = {
            limb: mink.FrameTask(frame, "body", 1.0, 1.0) for limb, frame in frames.items()
        }
        self._limits: list[mink.Limit] = [mink.ConfigurationLimit(model)]
        if speeds:
            self._limits.append(mink.VelocityLimit(model, dict(speeds)))

    def solve(self, qpos: F64, T_world_hands: Mapping[str, F64]) -> None:
        """Solve poses [T, 4, 4] of each limb, row by row."""
        configuration = mink.Configuration(self._model, qpos.copy())
        tasks = list(self._tasks.values())
        for poses in zip(*(T_world_hands[limb] for limb in self._tasks), strict=True):
            for task, pose in zip(tasks, poses, strict=True):
                task.set_target(mink.SE3.from_matrix(pose))
            cost = np.inf
            for _ in range(_MOST_ITERATIONS):
                within, now = True, 0.0
                for task in tasks:
                    x, y, z, u, v, w = task.compute_error(configuration).tolist()
                    distance, angle = math.hypot(x, y, z), math.hypot(u, v, w)
                    now += distance * distance + angle * angle
                    within &= distance <= POSITION_TOLERANCE_M and angle <= ROTATION_TOLERANCE_RAD
                if within or now > _STALL_RATIO * cost:
                    break
                cost = now
                velocity = mink.solve_ik(
                    configuration, tasks, self._dt_s, "daqp", damping=1e-9, limits=self._limits
                )
                configuration.integrate_inplace(velocity, self._dt_s)


if __name__ == "__main__":
    report.run(run)
