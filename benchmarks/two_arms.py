"""Inverse kinematics of two arms against mink's own program, on the same rows in
one run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import mink
import numpy as np

import report
from strands_cosmos3.checks import F64
from strands_cosmos3.control.ik import POSITION_TOLERANCE_M, ROTATION_TOLERANCE_RAD, StepBoxLimit
from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.errors import ResourceNotFoundError

_ROWS = 32
_ROUNDS = 3
_MINK_ITERATIONS = 3
_STEP_M = 0.008
_Poses = dict[str, F64]


def run(
    robots: Sequence[str] = ("dual_panda", "openarm"), chunks: int = 10, seed: int = 0
) -> dict[str, Any]:
    """Compare CPU times and greatest residuals on feasible chunks of 32 rows, neither with a check
    for collisions.

    A robot that has not been fetched is left out.

    mink's program: two FrameTasks, the box of all joints' ranges, DofFreezingTask on the fingers,
    at most 3 iterations a row.
    """
    out: dict[str, Any] = {}
    for name in robots:
        report.progress(f"ik: two arms of {name}")
        try:
            ik, rng = LimbIK(name, check_collisions=False), np.random.default_rng(seed)
        except ResourceNotFoundError as error:
            report.progress(f"ik: {name} is left out: {error}")
            continue
        program = _MinkProgram(ik)
        contenders: dict[str, Callable[[_Poses, F64], F64]] = {
            "limb_ik": lambda poses, q, ik=ik: ik.solve(poses, q).q_rad,
            "mink": program.solve,
        }
        least_ms = {key: np.full(chunks, np.inf) for key in contenders}
        worst = {key: np.zeros(2) for key in contenders}
        for chunk in range(chunks):
            q, poses = _feasible(ik, rng)
            for _ in range(_ROUNDS):
                for key, solve in contenders.items():
                    started_s = time.process_time()
                    found = solve(poses, q)
                    least_ms[key][chunk] = min(
                        least_ms[key][chunk], (time.process_time() - started_s) * 1e3
                    )
                    worst[key] = np.maximum(worst[key], _residual(ik, poses, found))
        out[name] = {
            key: {
                "ms_per_chunk_median": float(np.median(least_ms[key])),
                "position_max_mm": float(worst[key][0] * 1e3),
                "rotation_max_deg": float(np.rad2deg(worst[key][1])),
            }
            for key in contenders
        }
        out[name]["mink_over_limb_ik"] = float(np.median(least_ms["mink"] / least_ms["limb_ik"]))
    return out


def _feasible(ik: LimbIK, rng: np.random.Generator) -> tuple[F64, _Poses]:
    """A start, and poses of every limb on a smooth path of its joints, whose frames move by up
    to 8 mm a row.
    """
    address, limits = ik.q_address, ik.limits
    margin = 0.1 * (limits.q_max - limits.q_min)
    start = np.clip(
        ik.home[address] + rng.normal(0, 0.2, len(address)),
        limits.q_min + margin,
        limits.q_max - margin,
    )
    along = np.sin(np.linspace(0, np.pi / 2, _ROWS + 1))[:, None] * rng.normal(0, 1, len(address))
    scale = 0.5
    while True:
        rows = np.repeat(ik.home[None], _ROWS + 1, axis=0)
        rows[:, address] = np.clip(start + scale * along, limits.q_min, limits.q_max)
        each = [ik.forward(q) for q in rows]
        poses = {name: np.stack([pose[name] for pose in each]) for name in ik.bridges}
        step_m = max(
            float(np.linalg.norm(np.diff(T[:, :3, 3], axis=0), axis=1).max())
            for T in poses.values()
        )
        if step_m <= _STEP_M:
            return rows[0], {name: T[1:] for name, T in poses.items()}
        scale *= 0.99 * _STEP_M / step_m


def _residual(ik: LimbIK, poses: _Poses, q_rad: F64) -> F64:
    """[2] greatest distance and angle of any limb from its poses."""
    found = [
        bridge.residuals(ik.T_world_base[name] @ poses[name], q_rad)
        for name, bridge in ik.bridges.items()
    ]
    return np.array([max(float(one[kind].max()) for one in found) for kind in (0, 1)])


class _MinkProgram:
    """Two frame tasks in one quadratic program, solved until both are within tolerance."""

    def __init__(self, ik: LimbIK):
        self._ik, model = ik, ik.model
        joints = [model.joint(name).id for name in ik.robot.joints]
        dofs = model.jnt_dofadr[joints].astype(np.intp)
        box = StepBoxLimit(ik.q_address, dofs, model.nv)
        box.lower_rad[:], box.upper_rad[:] = ik.limits.q_min, ik.limits.q_max
        self._limits: list[mink.Limit] = [box]
        self._frozen: list[mink.Task] = [
            mink.DofFreezingTask(model, sorted(set(range(int(model.nv))) - set(dofs.tolist())))
        ]
        self._tasks = {
            limb.name: mink.FrameTask(limb.frame, limb.frame_type, 1.0, 1.0)
            for limb in ik.robot.limbs
        }

    def solve(self, poses: _Poses, q: F64) -> F64:
        configuration, rows = (
            mink.Configuration(self._ik.model, q.copy()),
            np.empty((_ROWS, len(q))),
        )
        tasks: list[mink.Task] = list(self._tasks.values())
        for row in range(_ROWS):
            for name, task in self._tasks.items():
                task.set_target(
                    mink.SE3.from_matrix(self._ik.T_world_base[name] @ poses[name][row])
                )
            for _ in range(_MINK_ITERATIONS):
                if all(_within(task.compute_error(configuration)) for task in self._tasks.values()):
                    break
                v = mink.solve_ik(
                    configuration,
                    tasks,
                    1.0,
                    "daqp",
                    1e-9,
                    limits=self._limits,
                    constraints=self._frozen,
                )
                configuration.integrate_inplace(v, 1.0)
            rows[row] = configuration.q
        return rows


def _within(error: F64) -> bool:
    x, y, z, u, v, w = error.tolist()
    return (
        math.hypot(x, y, z) <= POSITION_TOLERANCE_M
        and math.hypot(u, v, w) <= ROTATION_TOLERANCE_RAD
    )


if __name__ == "__main__":
    report.run(run)
