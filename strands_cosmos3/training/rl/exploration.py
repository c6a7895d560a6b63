"""Chunks around a policy's own: antithetic offsets of the hand, and other moments of the grasp.

Another noise explores nothing: a trained policy's chunks lie millimetres apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from strands_cosmos3.actions.controller_rows import (
    UNIT_M,
    UNIT_RAD,
    controller_rows,
    decode_rows,
    encode_actions,
    normalize_actions,
)
from strands_cosmos3.actions.decode import decode_limbs, encode_limbs
from strands_cosmos3.actions.rotations import se3, so3_exp
from strands_cosmos3.actions.stats import ActionStats, normalize_quantile
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
        whole_episodes: Whether one chunk of a group is run, although the others could be.
    """

    pairs: int
    shift_m: float
    turn_rad: float
    grasp: float
    whole_episodes: bool = False


def group_of(
    chunk: ActionChunk, anchors: Mapping[str, F64], how: Exploration, rng: np.random.Generator
) -> list[F64]:
    """Return the rows of a group's chunks in the model's scale: the chunk's own, to the bit, and
    pairs of it displaced either way.

    An offset is held over the chunk: it grows smoothly from nothing at the anchor to its full size
    at the last row, in the hand's own axes. Rows are those that are commanded, unclipped; their
    grippers are the chunk's own up to the row that they switch at.

    Args:
        anchors: By limb, [4, 4] pose that the first row departs from; empty for rows in a
            controller's own units.

    Raises:
        ActionOutOfRangeError: An offset is too large for a chunk.
    """
    arms = tuple(anchors) or (chunk.embodiment.limbs[0].name,)
    sizes = np.repeat([how.shift_m, how.turn_rad], 3)
    rows, n = [chunk.action], len(chunk.action)
    for _ in range(how.pairs):
        offset = {name: sizes * rng.normal(size=6) for name in arms}
        switch = int(rng.integers(1, n)) if rng.random() < how.grasp else n
        for sign in (1.0, -1.0):
            moved = {name: sign * values for name, values in offset.items()}
            rows.append(displaced(chunk, anchors, moved, switch, sign < 0))
    return rows


def displaced(
    chunk: ActionChunk,
    anchors: Mapping[str, F64],
    offset: Mapping[str, F64],
    switch: int,
    opens: bool = False,
) -> F64:
    """Return a chunk's rows with an offset [6] of each limb at its end, metres and radians in the
    hand's axes, and with closed or open fingers from the row ``switch`` on. Errors and anchors: as
    :func:`group_of`.
    """
    part = np.arange(1, len(chunk.action) + 1)[:, None] / len(chunk.action)
    ramp = part * part * (3 - 2 * part)
    steps = {name: ramp * full for name, full in offset.items()}
    if chunk.embodiment.in_controller_units:
        (only,) = steps.values()
        rows = _displaced_actions(chunk, only, switch, opens)
    else:
        rows = _displaced_poses(chunk, anchors, steps, switch, opens)
    for limb in chunk.embodiment.limbs:
        if (column := limb.gripper_column) is not None:
            rows[:switch, column] = chunk.action[:switch, column]
    return rows


def _displaced_poses(
    chunk: ActionChunk,
    anchors: Mapping[str, F64],
    steps: Mapping[str, F64],
    switch: int,
    opens: bool,
) -> F64:
    stats = None
    if chunk.quantiles is not None:
        domain = chunk.embodiment.stats or chunk.embodiment.name
        stats = ActionStats(domain, chunk.action_space.columns, *chunk.quantiles)
    moved: dict[str, F64] = {}
    grippers: dict[str, F64] = {}
    for name, limb in decode_limbs(chunk, anchors, stats).by_limb.items():
        path = limb.T_base_frame @ se3(so3_exp(steps[name][:, 3:]), steps[name][:, :3])
        moved[name] = np.concatenate([limb.T_base_anchor[None], path])
        if limb.gripper is not None:
            grippers[name] = np.array(limb.gripper)
            grippers[name][switch:] = float(opens)
    return encode_limbs(moved, grippers, chunk.embodiment, stats)


def _displaced_actions(chunk: ActionChunk, steps: F64, switch: int, opens: bool) -> F64:
    """Return rows that each add to the measured pose, in the world's axes."""
    actions = decode_rows(controller_rows(chunk))
    actions[:, :6] += np.diff(steps, axis=0, prepend=0.0) / np.repeat([UNIT_M, UNIT_RAD], 3)
    actions[switch:, 6] = -1.0 if opens else 1.0
    if chunk.quantiles is not None:
        return normalize_quantile(encode_actions(actions), *chunk.quantiles)
    return normalize_actions(actions)
