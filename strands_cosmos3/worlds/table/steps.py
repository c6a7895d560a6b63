"""Steps of a simplified simulation of hands: bounded speed and acceleration, and rotations one
at a time.
"""

from __future__ import annotations

import math

import numpy as np

from strands_cosmos3.checks import F64


def length(v: F64) -> float:
    """Return the Euclidean norm of a vector, faster than NumPy's function."""
    return math.sqrt(v.dot(v))


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
    sine, cosine = length(axis), float(R[0, 0] + R[1, 1] + R[2, 2] - 1) / 2
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
