"""Random motions for benchmarks and tests. Feasible ones are drawn in joint space and resampled
by arc length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.rotations import geodesic_angle, interpolate_poses, so3_exp
from strands_cosmos3.backends.replay import Recording
from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.robots.panda import FER, HOME_Q, dh_forward

FPS = 15.0
SLOW_M = (0.002, 0.010)
SLOW_DEG = (0.2, 3.0)
BRISK_M = (0.010, 0.030)
BRISK_DEG = (1.0, 5.0)
_FINE = 2001
_LIMIT_ROOM_RAD = 0.1
_CLEAR_M = 0.25  # the hand's height over the table: the fingers reach 0.11 m below it
_SPEED_SHARE = 0.8
_EDGE_SPEED_SHARE = 0.98
_ELBOW = 3
_ELBOW_ROOM_RAD = 0.012
_ELBOW_SWING_RAD = 0.3
_JOINTS = np.arange(7)


def feasible_chunk(
    rng: np.random.Generator,
    rows: int = 32,
    step_m: tuple[float, float] = BRISK_M,
    step_deg: tuple[float, float] = BRISK_DEG,
) -> tuple[F64, F64]:
    """Draw a smooth motion within the Panda's joint and velocity limits at 15 Hz.

    ``step_m`` and ``step_deg`` are the least and greatest distance and angle per row. Returns joint
    angles [7] at the start and poses [rows, 4, 4] of the hand after each row.
    """
    while True:
        q = _by_arc_length(rng, _waves(rng), rows, step_m)
        if q is not None and _inside(q, step_deg):
            return q[0], dh_forward(q)[1:]


def recording_of_motion(
    rng: np.random.Generator, step_m: tuple[float, float], step_deg: tuple[float, float]
) -> Recording:
    """Draw a random smooth motion of 32 rows as a recording."""
    q, T_base_hand = feasible_chunk(rng, 32, step_m, step_deg)
    T_hand_cosmos = get_embodiment("droid").tool_frame.T_parent_cosmos
    T = np.concatenate((dh_forward(q)[None], T_base_hand)) @ T_hand_cosmos
    return Recording(T, np.ones(len(T)), FPS, q, "random smooth motion")


def elbow_straight_chunk(rng: np.random.Generator, rows: int = 32) -> tuple[F64, F64]:
    """Draw a motion along straight elbows, where a small motion of the hand may take a large one of
    the joints.

    Joint 4 swings by up to 0.3 rad from 0.012 rad before its end (the elbow is straight at 0) and
    comes within 0.1 rad of it; the others move as in :func:`feasible_chunk`, joints at up to 98 %
    of their speed limits, the hand by 1 to 3 cm a row. Of these poses every fourth one is kept and
    the others are interpolated on straight lines, which lie within reach, but not always within the
    joints' speed limits. Returns joint angles [7] at the start and poses [rows, 4, 4] of the hand.
    """
    s = np.linspace(0.0, 1.0, _FINE)
    while True:
        q = _waves(rng)
        swing = rng.uniform(0.1, _ELBOW_SWING_RAD)
        frequency = rng.uniform(0.3, 1.2)
        phase = rng.uniform(0, 2 * np.pi)
        elbow_end = FER.q_max[_ELBOW] - _ELBOW_ROOM_RAD
        q[:, _ELBOW] = elbow_end - swing * (1 - np.cos(2 * np.pi * frequency * s + phase)) / 2
        q = _by_arc_length(rng, q, rows, BRISK_M)
        if (
            q is None
            or not _possible(q, np.delete(_JOINTS, _ELBOW), _EDGE_SPEED_SHARE)
            or q[:, _ELBOW].max() <= FER.q_max[_ELBOW] - _LIMIT_ROOM_RAD
        ):
            continue
        kept = np.append(np.arange(0, rows, 4), rows)
        at = np.arange(1.0, rows + 1)
        return q[0], interpolate_poses(dh_forward(q[kept]), kept.astype(np.float64), at)


def _waves(rng: np.random.Generator) -> F64:
    """Draw a smooth joint motion [_FINE, 7] around the home configuration."""
    s = np.linspace(0.0, 1.0, _FINE)
    frequency = rng.uniform(0.3, 1.2, (2, 7))
    phase = rng.uniform(0, 2 * np.pi, (2, 7))
    amplitude = rng.uniform(0.1, 0.5, (2, 7))
    waves = amplitude * (np.sin(2 * np.pi * frequency * s[:, None, None] + phase) - np.sin(phase))
    return HOME_Q + rng.uniform(-0.4, 0.4, 7) + waves.sum(axis=1)


def _by_arc_length(
    rng: np.random.Generator, q: F64, rows: int, step_m: tuple[float, float]
) -> F64 | None:
    """Draw distances per row and return the angles [rows + 1, 7] at them, or None if the motion
    is too short.
    """
    s = np.linspace(0.0, 1.0, _FINE)
    travelled = np.concatenate(
        ([0.0], np.cumsum(np.linalg.norm(np.diff(dh_forward(q)[:, :3, 3], axis=0), axis=1)))
    )
    anchors = np.arange(0, rows + 8, 8)
    steps = np.interp(np.arange(rows), anchors, rng.uniform(*step_m, size=len(anchors)))
    wanted = np.concatenate(([0.0], np.cumsum(steps)))
    if wanted[-1] > travelled[-1]:
        return None
    at = np.interp(wanted, travelled, s)
    return np.stack([np.interp(at, s, column) for column in q.T], axis=1)


def _inside(q: F64, step_deg: tuple[float, float]) -> bool:
    R = dh_forward(q)[:, :3, :3]
    angle_deg = np.rad2deg(geodesic_angle(R[:-1], R[1:]))
    turns = angle_deg.min() >= step_deg[0] and angle_deg.max() <= step_deg[1]
    return bool(turns and _possible(q, _JOINTS, _SPEED_SHARE))


def _possible(q: F64, joints: NDArray[np.intp], speed_share: float) -> bool:
    """Whether joints stay away from their limits, all below a share of their speed limits, and the
    hand above the table.
    """
    room_rad = np.minimum(q - FER.q_min, FER.q_max - q)[:, joints]
    speed = np.abs(np.diff(q, axis=0)) * FPS / FER.velocity
    clear = dh_forward(q)[:, 2, 3] > _CLEAR_M
    return bool(room_rad.min() > _LIMIT_ROOM_RAD and speed.max() < speed_share and clear.all())


def hard_chunk(rng: np.random.Generator, rows: int = 32) -> tuple[F64, F64]:
    """Draw a motion beyond the arm's reach and speed: steps of 4 to 12 cm in one direction, of
    up to 25 degrees each.
    """
    q_start = HOME_Q + rng.uniform(-0.3, 0.3, 7)
    T = dh_forward(q_start)
    direction, axis = (v / np.linalg.norm(v) for v in rng.normal(size=(2, 3)))
    poses = []
    for _ in range(rows):
        T = T.copy()
        T[:3, :3] = so3_exp(axis * np.deg2rad(rng.uniform(0, 25))) @ T[:3, :3]
        T[:3, 3] += direction * rng.uniform(0.04, 0.12)
        poses.append(T)
    return q_start, np.stack(poses)
