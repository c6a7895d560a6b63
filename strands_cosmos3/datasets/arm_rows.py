"""Poses and ``midtrain`` rows of an arm's recorded columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.decode import encode_pose_delta
from strands_cosmos3.actions.rotations import (
    matrix_to_quaternion,
    matrix_to_rot6d,
    quaternion_to_matrix,
    se3,
    se3_between,
)
from strands_cosmos3.checks import F64


@dataclass(frozen=True, eq=False)
class ArmClip:
    """Pictures of a chunk's execution, and what the arm executed between them."""

    frames: NDArray[np.uint8]  # [rows + 1, H, W, 3]
    T_base_cosmos: F64  # [rows + 1, 4, 4] measured
    gripper_command: F64  # [rows] open fractions
    gripper_opening: float  # measured at the first frame
    instruction: str  # of the goal that is pursued
    other_instruction: str  # of another goal


def state_columns(T_base_cosmos: F64, gripper_opening: F64) -> F64:
    """Return [n, 10] translation [m], rot6d and open fraction of measured poses [n, 4, 4]."""
    rotation = matrix_to_rot6d(T_base_cosmos[:, :3, :3])
    return np.concatenate(
        [T_base_cosmos[:, :3, 3], rotation, np.asarray(gripper_opening)[:, None]], axis=1
    )


def raw_rows(T_base_cosmos: F64, gripper_command: F64) -> F64:
    """Return [n, 10] executed ``midtrain`` rows: measured pose delta and gripper command after
    each frame; the last stays.
    """
    poses = np.concatenate([T_base_cosmos, T_base_cosmos[-1:]])
    return np.concatenate(
        [encode_pose_delta(se3_between(poses[:-1], poses[1:])), gripper_command[:, None]], axis=1
    )


def pose7(T: F64) -> F64:
    """Return [n, 7] position and quaternion xyzw of poses [n, 4, 4]."""
    return np.concatenate([T[:, :3, 3], matrix_to_quaternion(T[:, :3, :3])], axis=1)


def poses_of(columns: Any) -> F64:
    """Return [n, 4, 4] poses of positions and quaternions xyzw [n, 7]."""
    values = np.asarray(columns, dtype=np.float64)
    return se3(quaternion_to_matrix(values[:, 3:]), values[:, :3])
