"""Chunks around a policy's own: antithetic offsets of the hand, and other moments of the grasp.

Another noise explores nothing: a trained policy's chunks lie millimetres apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from strands_cosmos3.actions.decode import LimbPoses, decode_limbs, encode_limbs
from strands_cosmos3.actions.rotations import se3, so3_exp
from strands_cosmos3.actions.stats import ActionStats
from strands_cosmos3.checks import F64
from strands_cosmos3.types import ActionChunk


@dataclass(frozen=True)
class Exploration:
    """How far chunks are displaced.

    Args:
        pairs: Of displaced chunks in a group, which has ``2 pairs + 1``.
        shift_m, turn_rad: Standard deviation of an offset at the end of the chunk, by axis.
        grasp: Fraction of the pairs that also close the fingers, or keep them open, from a random
            row on.
    """

    pairs: int
    shift_m: float
    turn_rad: float
    grasp: float


def group_of(
    chunk: ActionChunk, anchors: Mapping[str, F64], how: Exploration, rng: np.random.Generator
) -> list[F64]:
    """Return the rows of a group's chunks in the model's scale: the chunk's own, to the bit, and
    pairs of it displaced either way.

    An offset is held over the chunk: it grows smoothly from nothing at the anchor to its full size
    at the last row, in the hand's own axes. Rows are those that are commanded, unclipped; their
    grippers are the chunk's own up to the row that they switch at.

    Args:
        anchors: By limb, [4, 4] pose that the first row departs from.

    Raises:
        ActionOutOfRangeError: An offset is too large for a chunk.
    """
    stats = None
    if chunk.quantiles is not None:
        domain = chunk.embodiment.stats or chunk.embodiment.name
        stats = ActionStats(domain, chunk.action_space.columns, *chunk.quantiles)
    poses = decode_limbs(chunk, anchors, stats)
    sizes = np.repeat([how.shift_m, how.turn_rad], 3)
    rows = [chunk.action]
    for _ in range(how.pairs):
        offset = {name: sizes * rng.normal(size=6) for name in poses.by_limb}
        n = len(chunk.action)
        switch = int(rng.integers(1, n)) if rng.random() < how.grasp else n
        for sign in (1.0, -1.0):
            moved = {name: sign * values for name, values in offset.items()}
            rows.append(_displaced(poses, moved, switch, sign < 0, chunk, stats))
    return rows


def _displaced(
    poses: LimbPoses,
    offset: Mapping[str, F64],
    switch: int,
    opens: bool,
    chunk: ActionChunk,
    stats: ActionStats | None,
) -> F64:
    """Return a chunk's rows with an offset [6] of each limb and another gripper from a row on."""
    part = np.arange(1, len(chunk.action) + 1) / len(chunk.action)
    ramp = (part * part * (3 - 2 * part))[:, None]
    moved: dict[str, F64] = {}
    grippers: dict[str, F64] = {}
    for name, limb in poses.by_limb.items():
        step = ramp * offset[name]
        path = limb.T_base_frame @ se3(so3_exp(step[:, 3:]), step[:, :3])
        moved[name] = np.concatenate([limb.T_base_anchor[None], path])
        if limb.gripper is not None:
            grippers[name] = np.array(limb.gripper)
            grippers[name][switch:] = float(opens)
    rows = encode_limbs(moved, grippers, chunk.embodiment, stats)
    for limb in chunk.embodiment.limbs:
        if (column := limb.gripper_column) is not None:
            rows[:switch, column] = chunk.action[:switch, column]
    return rows
