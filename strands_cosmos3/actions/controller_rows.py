"""LIBERO's actions as rows of Cosmos' ``libero`` domain, and back.

An action [7] is what robosuite's OSC_POSE controller takes at 20 Hz: translation and rotation
vector in the controller's units (-1 .. 1 stands for 5 cm and 0.5 rad), and the gripper, -1 to open
and 1 to close. A row [10] holds the same numbers: the translation unchanged, the rotation vector as
rot6d, and the gripper with 1 for open. Units stay the controller's: a rotation by one unit is
written as one radian. Rows are goals' offsets from the measured pose in world axes, so they are
never integrated.

Source: cosmos-framework @5eee9ed5, ``libero_lerobot_dataset.py`` 298-306 and
``closed_loop_eval.py`` 525-526, 580-602.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from strands_cosmos3.actions.rotations import matrix_to_rot6d, rot6d_to_matrix, so3_exp, so3_log
from strands_cosmos3.actions.stats import denormalize_rows, normalize_chunk
from strands_cosmos3.checks import F64
from strands_cosmos3.types import ActionChunk

METHOD = "quantile_rot"
"""How the domain's rows are normalised: all ten columns, by q01 and q99 of the unprocessed data."""

UNIT_M, UNIT_RAD = 0.05, 0.5
"""Of an action (robosuite's osc_pose.json)."""


def encode_actions(actions: Any) -> F64:
    """Return actions [T, 7] as rows [T, 10]."""
    a = np.asarray(actions, dtype=np.float64)
    return np.concatenate(
        (a[:, :3], matrix_to_rot6d(so3_exp(a[:, 3:6])), (1 - a[:, 6:]) / 2), axis=1
    )


def decode_rows(rows: Any) -> F64:
    """Return rows [T, 10] as actions [T, 7]; the two columns of rot6d need not be a rotation's
    exactly.

    Raises:
        InputError: The rot6d of a row defines no rotation.
    """
    r = np.asarray(rows, dtype=np.float64)
    return np.concatenate(
        (r[:, :3], so3_log(rot6d_to_matrix(r[:, 3:9])), np.clip(1 - 2 * r[:, 9:], -1, 1)), axis=1
    )


def normalize_actions(actions: Any) -> F64:
    """Return actions [T, 7] as normalised rows [T, 10], as a checkpoint emits them."""
    return normalize_chunk(encode_actions(actions), "libero", None, METHOD)


def controller_rows(chunk: ActionChunk) -> F64:
    """Return a chunk's rows de-normalised, by the checkpoint's own figures where it has some;
    ActionOutOfRangeError if a value lies beyond |z| = 10.
    """
    return denormalize_rows(chunk, None, METHOD)
