"""Simplified dynamics of hands, in which scripted experts plan their rows: bounded speed and
acceleration, perfect tracking.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from strands_cosmos3.actions.rotations import se3
from strands_cosmos3.checks import F64


@dataclass(frozen=True)
class HandLimits:
    """What a hand does in a row at most."""

    step_m: float
    step_change_m: float
    turn_rad: float
    turn_change_rad: float
    opening_change: float


@dataclass(kw_only=True)
class Hand:
    """A hand in a simplified simulation, row by row."""

    limits: HandLimits
    p: F64  # position of the tool centre point [3]
    R: F64  # its orientation [3, 3]
    v: F64  # metres per row
    w: F64  # radians per row
    opening: float  # open fraction
    starts_cruising: bool = False  # whether the next row has the speed that the hand would reach

    @property
    def T_world_tcp(self) -> F64:
        """Pose [4, 4] of the tool centre point."""
        return se3(self.R, self.p)

    def move(self, to: F64, R_to: F64) -> None:
        """Move one row towards a pose, with bounded speed and acceleration, so as to stop there."""
        limits = self.limits
        step = to - self.p, limits.step_m, limits.step_change_m
        turn = rotation_vector(self.R, R_to), limits.turn_rad, limits.turn_change_rad
        if self.starts_cruising:
            self.v = cruise(*step)
            self.w = cruise(*turn)
            self.starts_cruising = False
        else:
            self.v = approach(self.v, *step)
            self.w = approach(self.w, *turn)
        self.p = self.p + self.v
        self.R = rotate(self.R, self.w)

    def move_fingers(self, opening: float, least: float = 0.0) -> None:
        """Move the fingers one row towards an open fraction, down to ``least`` at most."""
        change = self.limits.opening_change
        self.opening = float(np.clip(opening, self.opening - change, self.opening + change))
        self.opening = max(self.opening, least)


def length(v: F64) -> float:
    """Return the Euclidean norm of a vector, faster than NumPy's function."""
    return math.sqrt(v.dot(v))


def direction(rng: np.random.Generator) -> F64:
    """Draw a unit vector [3]."""
    drawn = rng.normal(0, 1, 3)
    return drawn / length(drawn)


def cruise(remaining: F64, max_speed: float, max_change: float) -> F64:
    """Return the highest velocity towards ``remaining`` from which steps of ``max_change`` stop
    in time.
    """
    distance = length(remaining)
    # The highest speed from which a constant deceleration stops within the distance.
    stoppable = math.sqrt(max_change * max_change / 4 + 2 * max_change * distance) - max_change / 2
    return remaining * (min(max_speed, 0.8 * stoppable, distance) / max(distance, 1e-12))


def approach(velocity: F64, remaining: F64, max_speed: float, max_change: float) -> F64:
    """Return the next velocity towards :func:`cruise`'s, by at most ``max_change``."""
    change = cruise(remaining, max_speed, max_change) - velocity
    return velocity + change * min(1.0, max_change / max(length(change), 1e-12))


# Without checks and for one rotation only, because a chunk takes hundreds of calls;
# actions.rotations has general versions.
def rotation_vector(R_from: F64, R_to: F64) -> F64:
    """Return the rotation vector [3], in world axes, from one orientation to another; half turns
    are about the vertical.
    """
    R = R_to @ R_from.T
    axis = np.array([R[2, 1] - R[1, 2], R[0, 2] - R[2, 0], R[1, 0] - R[0, 1]]) / 2
    sine = length(axis)
    cosine = float(R[0, 0] + R[1, 1] + R[2, 2] - 1) / 2
    if sine < 1e-9:
        return np.array([0.0, 0.0, 0.0 if cosine > 0 else np.pi])
    return axis * (np.arctan2(sine, cosine) / sine)


def rotate(R: F64, w: F64) -> F64:
    """Return an orientation [3, 3] rotated by a rotation vector in world axes (Rodrigues'
    formula).
    """
    angle = length(w)
    if angle < 1e-12:
        return R
    x, y, z = w / angle
    K = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return R + np.sin(angle) * (K @ R) + (1 - np.cos(angle)) * (K @ K @ R)


def gripper_down(yaw_rad: float) -> F64:
    """Return the orientation [3, 3] of a hand that points down and opens along ``yaw + 90
    degrees``.
    """
    return down_along(np.cos(yaw_rad), np.sin(yaw_rad))


def down_along(x: float, y: float) -> F64:
    """Return the orientation [3, 3] of a hand that points down and opens across a horizontal unit
    vector.
    """
    return np.array([[x, y, 0.0], [y, -x, 0.0], [0.0, 0.0, -1.0]])


def yaw_of(R: F64) -> float:
    """Return the yaw of an orientation's first axis."""
    return float(np.arctan2(R[1, 0], R[0, 0]))
