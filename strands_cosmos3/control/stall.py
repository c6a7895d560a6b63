"""Stalls: an arm that rests, or circles on the spot, while its chunks repeat; and the way out.

A picture that leads nowhere gives the same chunk again, so that nothing changes until the time is
up. :class:`ProgressMonitor` notices that, and :func:`plan_retreat` leads back along the executed
path and aside, so that the next chunk departs from another picture.

Legend: n joints of all limbs, L limbs, M references.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar, Literal

import numpy as np

from strands_cosmos3.actions.rotations import pose_distances
from strands_cosmos3.checks import F64
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.snapshots import Restorable
from strands_cosmos3.types import ArmGeometry, JointTrajectory

OnStall = Literal["report", "stop", "retreat"]
"""What follows from a stall: it is counted; the loop ends as well; or the arm retreats."""

STALL_S = 6.0
"""Time without progress after which an arm is stalled."""
RETREAT_M, ASIDE_M = 0.1, 0.04
"""How far a hand retreats, and then goes aside."""
_FEWEST_CHUNKS = 3
_LOOK_S = 0.1  # between two looks at where the arm is
_SPOT_M = 0.08  # diagonal of the box within which a hand stays on the spot
_REPEATS_M = 0.06  # between the ends of chunks that repeat
_SAME_RAD = 0.05
_SPEED_M_S, _SPEED_RAD_S = 0.1, 0.4  # of a retreat
_STEPS_ASIDE = 4
_MOST_TURN_RAD = 0.3  # of a joint in a step aside
_PROBE_RAD = 1e-4
_DAMPING = 1e-3


class ProgressMonitor(Restorable):
    """Notices stalls of arms whose geometry is known. Times are of the arm's clock."""

    STATE: ClassVar[tuple[str, ...]] = ("_postures", "_ends")

    def __init__(self) -> None:
        self._postures: deque[tuple[float, F64]] = deque()  # joint angles [n]
        self._ends: deque[tuple[float, F64]] = deque()  # last rows [n] of chunks

    def add(self, now_s: float, q_rad: F64) -> None:
        """Take notice of where the arm is, joint angles [n]."""
        if not self._postures or now_s > self._postures[-1][0] + _LOOK_S - 1e-9:
            self._postures.append((now_s, q_rad))
        while self._postures[0][0] < now_s - STALL_S:
            self._postures.popleft()

    def is_stalled(self, now_s: float, plan: JointTrajectory) -> bool:
        """Take notice of a chunk; return whether the arm is stalled. If so, it is forgotten what
        was before.
        """
        self._ends.append((now_s, plan.q_rad[-1]))
        while len(self._ends) > _FEWEST_CHUNKS and self._ends[0][0] < now_s - STALL_S:
            self._ends.popleft()
        over_s = now_s - self._postures[0][0] if self._postures else 0.0
        if plan.arm is None or len(self._ends) < _FEWEST_CHUNKS or over_s < STALL_S - 2 * _LOOK_S:
            return False
        half = len(self._ends) // 2
        been = plan.arm.limb_poses(np.array([q for _, q in self._postures]))
        ends = plan.arm.limb_poses(np.array([q for _, q in self._ends]))
        for limb in been:
            spot_m = np.linalg.norm(np.ptp(been[limb][:, :3, 3], axis=0))
            end = ends[limb][:, :3, 3]
            apart_m = np.linalg.norm(end[half:, None] - end[:half], axis=2).min(axis=1).max()
            if spot_m > _SPOT_M or apart_m > _REPEATS_M:
                return False
        self._postures.clear()
        self._ends.clear()
        return True


def plan_retreat(
    path: F64, arm: ArmGeometry, limits: JointLimits, gripper: F64, attempt: int
) -> JointTrajectory:
    """Return a way back along references [M, n], to where a hand is 10 cm away or as far as it was,
    and then aside by 4 cm, to the other side with each attempt.

    Args:
        path: The references so far, at equal times; the last one is where the arm is.
        arm, limits: The arm's geometry, and the limits of its joints.
        gripper: [] or [G] open fractions, which stay.
        attempt: How many retreats there were before.
    """
    poses = arm.limb_poses(path)
    away_m = np.max([np.linalg.norm(T[:, :3, 3] - T[-1, :3, 3], axis=1) for T in poses.values()], 0)
    far = np.flatnonzero(away_m > min(RETREAT_M, 0.99 * away_m.max()))
    back = path[far[-1] if len(far) else -1 :][::-1]
    # not through all that it did on the spot
    left = np.flatnonzero(np.abs(back - back[0]).max(axis=1) > _SAME_RAD)
    back = np.vstack((back[:1], back[left[0] :])) if len(left) else back
    rows = np.vstack((back, _aside(back, arm, limits, attempt)))
    steps_m: F64 = np.max(
        [pose_distances(T[:-1], T[1:])[0] for T in arm.limb_poses(rows).values()], axis=0
    )
    steps_rad: F64 = np.abs(np.diff(rows, axis=0)).max(axis=1)
    steps_s = np.maximum(steps_m / _SPEED_M_S, steps_rad / _SPEED_RAD_S)
    t_s: F64 = np.append(0.0, np.cumsum(steps_s))
    end_s = max(float(t_s[-1]), 2 * _LOOK_S)
    at_s: F64 = np.linspace(0, end_s, max(2, round(end_s / _LOOK_S)))[1:]
    columns: list[F64] = [np.interp(at_s, t_s, column) for column in rows.T]
    q = np.column_stack(columns)
    held = np.repeat(gripper[None], len(q), axis=0)
    return JointTrajectory(q, at_s, held, arm=arm)


def _aside(back: F64, arm: ArmGeometry, limits: JointLimits, attempt: int) -> F64:
    """Return rows [S, n] that lead all hands aside from the end of the way back, horizontally and
    across it; none beyond a joint's range.
    """
    ends = [T[:, :3, 3] for T in arm.limb_poses(back[[0, -1]]).values()]
    along = np.mean([end[1] - end[0] for end in ends], axis=0)
    across = np.array([-along[1], along[0]])
    # a way straight up has no side: the base's
    across = across / np.linalg.norm(across) if np.linalg.norm(across) > 1e-2 else np.array([0, 1])
    step = np.zeros(6)
    step[:2] = across * ASIDE_M / _STEPS_ASIDE * (-1) ** attempt
    q, rows = back[-1], [back[-1]]
    for _ in range(_STEPS_ASIDE):
        jacobian = _jacobian(q, arm)  # [6 L, n]
        twist = np.tile(step, len(jacobian) // 6)
        damped = jacobian @ jacobian.T + _DAMPING * np.eye(len(jacobian))
        turn = jacobian.T @ np.linalg.solve(damped, twist)
        q = q + turn
        inside = (q > limits.q_min + _PROBE_RAD).all() and (q < limits.q_max - _PROBE_RAD).all()
        if not inside or np.abs(turn).max() > _MOST_TURN_RAD:
            break
        rows.append(q)
    return np.array(rows[1:]).reshape(-1, len(q))


def _jacobian(q_rad: F64, arm: ArmGeometry) -> F64:
    """Return [6 L, n]: each hand's velocity and angular velocity in its base, by differences."""
    probes = np.vstack((q_rad, q_rad + _PROBE_RAD * np.eye(len(q_rad))))
    rows: list[F64] = []
    for T in arm.limb_poses(probes).values():
        R = T[1:, :3, :3] @ T[0, :3, :3].T
        turn = np.stack((R[:, 2, 1], R[:, 0, 2], R[:, 1, 0]))
        rows += [(T[1:, :3, 3] - T[0, :3, 3]).T / _PROBE_RAD, turn / _PROBE_RAD]
    return np.vstack(rows)
