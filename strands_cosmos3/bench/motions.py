"""Random motions for benchmarks and tests. Feasible ones are drawn in joint space and resampled by arc length."""

from __future__ import annotations

import numpy as np

from strands_cosmos3.actions.rotations import geodesic_angle, so3_exp
from strands_cosmos3.checks import F64
from strands_cosmos3.robots.panda import FER, HOME_Q, dh_forward

FPS = 15.0
SLOW_M, SLOW_DEG = (0.002, 0.010), (0.2, 3.0)
BRISK_M, BRISK_DEG = (0.010, 0.030), (1.0, 5.0)
_FINE = 2001
_LIMIT_ROOM_RAD = 0.1
_CLEAR_M = 0.25  # the hand's height over the table: the fingers reach 0.11 m below it
_SPEED_SHARE = 0.8


def feasible_chunk(
    rng: np.random.Generator, rows: int = 32, step_m: tuple[float, float] = BRISK_M, step_deg: tuple[float, float] = BRISK_DEG
) -> tuple[F64, F64]:
    """Draw a smooth motion within the Panda's joint and velocity limits at 15 Hz.

    ``step_m`` and ``step_deg`` are the least and greatest distance and angle per row. Returns joint angles [7] at the start and
    poses [rows, 4, 4] of the hand after each row.
    """
    s = np.linspace(0.0, 1.0, _FINE)
    while True:
        frequency, phase = rng.uniform(0.3, 1.2, (2, 7)), rng.uniform(0, 2 * np.pi, (2, 7))
        amplitude = rng.uniform(0.1, 0.5, (2, 7))
        waves = amplitude * (np.sin(2 * np.pi * frequency * s[:, None, None] + phase) - np.sin(phase))
        q = HOME_Q + rng.uniform(-0.4, 0.4, 7) + waves.sum(axis=1)
        travelled = np.concatenate(([0.0], np.cumsum(np.linalg.norm(np.diff(dh_forward(q)[:, :3, 3], axis=0), axis=1))))
        anchors = np.arange(0, rows + 8, 8)
        steps = np.interp(np.arange(rows), anchors, rng.uniform(*step_m, size=len(anchors)))
        wanted = np.concatenate(([0.0], np.cumsum(steps)))
        if wanted[-1] > travelled[-1]:
            continue
        at = np.interp(wanted, travelled, s)
        q = np.stack([np.interp(at, s, column) for column in q.T], axis=1)
        if _inside(q, step_deg):
            return q[0], dh_forward(q)[1:]


def _inside(q: F64, step_deg: tuple[float, float]) -> bool:
    R = dh_forward(q)[:, :3, :3]
    angle_deg = np.rad2deg(geodesic_angle(R[:-1], R[1:]))
    speed = np.abs(np.diff(q, axis=0)) * FPS / FER.velocity
    clear = bool((dh_forward(q)[:, 2, 3] > _CLEAR_M).all())
    in_range = clear and (q > FER.q_min + _LIMIT_ROOM_RAD).all() and (q < FER.q_max - _LIMIT_ROOM_RAD).all()
    return bool(in_range and speed.max() < _SPEED_SHARE and angle_deg.min() >= step_deg[0] and angle_deg.max() <= step_deg[1])


def hard_chunk(rng: np.random.Generator, rows: int = 32) -> tuple[F64, F64]:
    """Draw a motion beyond the arm's reach and speed: steps of 4 to 12 cm in one direction, of up to 25 degrees each."""
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
