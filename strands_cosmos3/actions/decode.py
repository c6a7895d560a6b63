"""Chunks to poses in the robot's base frame, and back. Malformed arguments raise InputError,
ShapeError or NonFiniteError.

A row of a ``midtrain`` chunk is a motion of the Cosmos frame expressed in that frame
(cosmos-framework, ``pose_utils``: ``backward_framewise``). A chunk is anchored once, on the pose at
the observation, and integrated open-loop: targets anchored on each measured pose would drift with
the arm and hide its drift.

Inverse kinematics usually drives another body. Decode in the Cosmos frame, then call
:func:`to_frame`; deltas composed on the body itself bend the path, and no IK residual shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from strands_cosmos3.actions.rotations import (
    matrix_to_rot6d,
    quaternion_to_matrix,
    rot6d_to_matrix,
    se3,
    se3_between,
    se3_inverse,
)
from strands_cosmos3.actions.stats import (
    ActionStats,
    Method,
    denormalize_rows,
    normalize_chunk,
)
from strands_cosmos3.checks import F64, known_name, rigid, trailing, within
from strands_cosmos3.embodiments import (
    POSE9,
    ActionSpace,
    Embodiment,
    LimbColumns,
    get_embodiment,
)
from strands_cosmos3.errors import (
    ActionSpaceError,
    InputError,
)
from strands_cosmos3.types import ActionChunk, JointTrajectory, PoseTrajectory, require_in_range

Convention = Literal["framewise", "anchored"]
"""``framewise``: each delta is relative to the previous pose; ``anchored``: each is relative to
the anchor.
"""

COSMOS_FRAME = "cosmos"
_POSE = len(POSE9)


def decode_pose_delta(rows: Any) -> F64:
    """[..., 9] translation [m] and rot6d -> [..., 4, 4] relative poses ``T_from_to``.

    Raises:
        InputError: The rot6d columns are zero or parallel, or a magnitude exceeds 1e9.
    """
    return _poses_of(trailing(rows, "pose delta", (_POSE,)))


def encode_pose_delta(T: Any) -> F64:
    """[..., 4, 4] relative poses -> [..., 9] translation [m] and rot6d; the inverse of
    :func:`decode_pose_delta`.
    """
    return _rows_of(np.asarray(T, dtype=np.float64))


def decode_pose_trajectory(deltas: Any, T_0: Any, convention: Convention = "framewise") -> F64:
    """[T, 9] deltas and the anchor [4, 4] -> [T + 1, 4, 4] poses in the anchor's parent frame; row
    0 is the anchor.

    ``framewise``: ``T_{i+1} = T_i delta_i``; ``anchored``: ``T_{i+1} = T_0 delta_i``.
    UnknownNameError for any other.
    """
    known_name(convention, "pose convention", get_args(Convention))
    steps = _poses_of(trailing(deltas, "deltas", (_POSE,), leading=1))
    anchor = rigid(T_0, "T_0", leading=0)
    return np.concatenate(
        (anchor[None], anchor @ steps if convention == "anchored" else _integrate(anchor, steps))
    )


def encode_pose_trajectory(T: Any, convention: Convention = "framewise") -> F64:
    """[N + 1, 4, 4] poses, the anchor first -> [N, 9] deltas; the inverse of
    :func:`decode_pose_trajectory`.
    """
    poses = np.asarray(T, dtype=np.float64)
    steps = se3_between(poses[:1] if convention == "anchored" else poses[:-1], poses[1:])
    return _rows_of(steps)


def decode_chunk(
    chunk: ActionChunk,
    T_base_anchor_cosmos: Any,
    stats: ActionStats | str | Path | None = None,
    method: Method = "quantile",
) -> PoseTrajectory:
    """Decode a chunk of deltas (``midtrain``) or absolute poses (``pose_abs``) into T poses of the
    Cosmos frame in the base.

    Absolute poses that a server integrated from the pose it was sent are taken to the anchor:
    ``anchor departure^-1 pose``.

    Args:
        chunk: Rows in the model's own scale.
        T_base_anchor_cosmos: [4, 4] pose of the Cosmos frame in the robot's base that the first row
            departs from.
        stats: Statistics for normalised rows; by default the chunk's quantiles, else the
            embodiment's packaged statistics.
        method: Normalisation method of rows without quantiles of their own.

    Returns:
        Poses at the rows' times, without the anchor; the gripper column becomes open fractions,
        clipped to [0, 1].

    Raises:
        ActionSpaceError: The rows are joint angles, undecodable, or of more than one arm.
        StatisticsError: The statistics are of another domain or width, or there are none.
    """
    _require_poses(chunk, "decode_chunk")
    limb = only_limb(chunk.embodiment, chunk.action_space, "decode_chunk")
    return decode_limbs(chunk, {limb: T_base_anchor_cosmos}, stats, method).by_limb[limb]


@dataclass(frozen=True, eq=False)
class LimbPoses:
    """Commanded poses of several limbs, by name.

    Args:
        by_limb: Poses of each limb's Cosmos frame in that limb's own base, with its gripper, all at
            the same times.
        finger_tips_m: [T, 5, 3] positions of a hand's finger tips in its Cosmos frame, of limbs
            that have them.
    """

    by_limb: Mapping[str, PoseTrajectory]
    finger_tips_m: Mapping[str, F64]

    @property
    def gripper_limbs(self) -> tuple[str, ...]:
        """Names of the limbs with a gripper, in the order of the columns of :attr:`grippers`."""
        return tuple(name for name, poses in self.by_limb.items() if poses.gripper is not None)

    @property
    def grippers(self) -> F64:
        """[T, G] open fractions of the limbs that have a gripper; G may be zero."""
        n = len(next(iter(self.by_limb.values())).t_s)
        columns = [poses.gripper for poses in self.by_limb.values() if poses.gripper is not None]
        return np.stack(columns, axis=1) if columns else np.empty((n, 0))


def decode_limbs(
    chunk: ActionChunk,
    T_base_anchor_cosmos: Mapping[str, Any],
    stats: ActionStats | str | Path | None = None,
    method: Method = "quantile",
) -> LimbPoses:
    """Decode a chunk of pose deltas or poses into the poses of each limb; a single arm's limb is
    ``"arm"``.

    Args:
        chunk: ``midtrain`` rows in the model's own scale, or ``pose_abs`` rows of a single arm.
        T_base_anchor_cosmos: By the limb's name, [4, 4] pose of its Cosmos frame in its own base,
            which row 0 departs from. A limb that carries only a camera may be left out; it is not
            decoded then.
        stats, method: As in :func:`decode_chunk`.

    Raises:
        ActionSpaceError: The rows are neither deltas nor poses, or the source does not state which
            columns belong to which limb.
        UnknownNameError, InputError: An anchor is of no limb of the embodiment, or that of an arm
            is missing.
        StatisticsError: As in :func:`decode_chunk`.
    """
    _require_poses(chunk, "decode_limbs")
    space = chunk.action_space
    limbs = _limbs_of(chunk.embodiment, T_base_anchor_cosmos)
    anchors = {
        limb.name: np.asarray(T_base_anchor_cosmos[limb.name], dtype=np.float64) for limb in limbs
    }
    if space.meaning == "pose_absolute":
        name = only_limb(chunk.embodiment, space, "decode_limbs")
        return LimbPoses({name: _absolute(chunk, anchors[name])}, {})
    units = _units(chunk.embodiment, space)
    rows = denormalize_rows(chunk, stats, method)
    rows = rows if space.normalized else rows * units
    poses: dict[str, PoseTrajectory] = {}
    for limb in limbs:
        anchor = anchors[limb.name]
        steps = _poses_of(rows[:, limb.pose])
        gripper = (
            None if limb.gripper is None else limb.gripper.to_fraction(rows[:, limb.gripper_column])
        )
        poses[limb.name] = PoseTrajectory(
            _integrate(anchor, steps), chunk.row_times_s, COSMOS_FRAME, anchor, gripper
        )
    tips = {
        limb.name: rows[:, limb.finger_tips].reshape(-1, 5, 3)
        for limb in limbs
        if limb.finger_tips is not None
    }
    return LimbPoses(poses, tips)


def _absolute(chunk: ActionChunk, anchor: F64) -> PoseTrajectory:
    """The poses of ``pose_abs`` rows, those that a server integrated from its own departure moved
    to the anchor.
    """
    rows = chunk.action
    poses = se3(quaternion_to_matrix(rows[:, 3:7]), rows[:, :3])
    if chunk.T_base_departure is not None:
        poses = anchor @ se3_inverse(chunk.T_base_departure) @ poses
    gripper = np.clip(rows[:, 7], 0.0, 1.0)
    return PoseTrajectory(poses, chunk.row_times_s, COSMOS_FRAME, anchor, gripper)


def encode_limbs(
    T_base_cosmos: Mapping[str, Any],
    open_fractions: Mapping[str, Any],
    embodiment: Embodiment | str,
    stats: ActionStats | str | Path | None = None,
    method: Method = "quantile",
    clip: bool = False,
) -> F64:
    """Encode poses of several limbs as [T, D] ``midtrain`` rows; the inverse of
    :func:`decode_limbs`.

    Args:
        T_base_cosmos: By the limb's name, [T + 1, 4, 4] poses of its Cosmos frame, the anchor
            first. A camera that is left out stays where it is.
        open_fractions: By the limb's name, [T] those of each limb with a gripper.
        embodiment, stats, method, clip: As in :func:`encode_chunk`.

    Raises:
        ActionSpaceError: As in :func:`decode_limbs`, or the rows hold finger tips.
        UnknownNameError, InputError, ShapeError, StatisticsError, ActionOutOfRangeError: As in
            :func:`encode_chunk`.
    """
    embodiment = get_embodiment(embodiment)
    space = embodiment.action_space("midtrain")
    units = _units(embodiment, space)
    limbs = _limbs_of(embodiment, T_base_cosmos)
    if any(limb.finger_tips is not None for limb in limbs):
        raise ActionSpaceError(
            f"rows of {embodiment.name!r} hold finger tips, which poses and grippers do not give."
        )
    deltas = {limb.name: encode_pose_trajectory(T_base_cosmos[limb.name]) for limb in limbs}
    n = len(next(iter(deltas.values())))
    rows = np.zeros((n, space.width))
    for limb in embodiment.limbs:
        still = encode_pose_delta(np.tile(np.eye(4), (n, 1, 1)))
        rows[:, limb.pose] = deltas.get(limb.name, still)
        if (
            column := _gripper_column(open_fractions.get(limb.name), n, embodiment, limb)
        ) is not None:
            rows[:, limb.gripper_column] = column
    if not space.normalized:
        return rows / units
    normalised = normalize_chunk(rows, embodiment, stats, method, clip)
    require_in_range(normalised, space.columns)
    return normalised


def decode_joint_chunk(chunk: ActionChunk) -> JointTrajectory:
    """Decode a chunk of ``joint_pos`` rows: angles in radians as they are, the gripper as open
    fractions, clipped to [0, 1].

    Row 0 is due at the observation: remove a clean state row first.

    Raises:
        ActionSpaceError, InputError: The rows are poses or deltas, or a magnitude exceeds 1e9.
    """
    space = chunk.action_space
    if space.meaning != "joint_position":
        raise _wrong_decoder(chunk, "decode_joint_chunk", "'joint_pos' angles")
    rows = chunk.action
    convention = chunk.embodiment.gripper
    if space.columns[-1] != "gripper" or convention is None:
        return JointTrajectory(rows, chunk.row_times_s)
    return JointTrajectory(rows[:, :-1], chunk.row_times_s, convention.to_fraction(rows[:, -1]))


def to_frame(trajectory: PoseTrajectory, T_cosmos_ee: Any, name: str) -> PoseTrajectory:
    """Return the same motion as poses of a body ``name`` fixed to the Cosmos frame: ``T_base_ee =
    T_base_cosmos T_cosmos_ee``.

    For the tool frame's parent, ``T_cosmos_ee`` [4, 4] is
    ``se3_inverse(tool_frame.T_parent_cosmos)``.
    """
    moved = trajectory.T_base_frame @ T_cosmos_ee
    anchor = trajectory.T_base_anchor @ T_cosmos_ee
    return PoseTrajectory(moved, trajectory.t_s, name, anchor, trajectory.gripper)


def encode_chunk(
    T_base_cosmos: Any,
    gripper: Any,
    embodiment: Embodiment | str,
    stats: ActionStats | str | Path | None = None,
    method: Method = "quantile",
    clip: bool = False,
) -> F64:
    """Encode poses as [T, D] ``midtrain`` rows in the model's scale; the inverse of
    :func:`decode_chunk`.

    Args:
        T_base_cosmos: [T + 1, 4, 4] poses of the Cosmos frame, the anchor first.
        gripper: [T] open fractions, or None for an embodiment without a gripper.
        embodiment, stats, method: As in :func:`denormalize_chunk`.
        clip: Clamp to [-1, 1] as in training. Without it rows are exact, and motion beyond |z| = 10
            is an error.

    Raises:
        ActionSpaceError: The embodiment's rows are not those of a single arm.
        StatisticsError: The statistics are of another domain or width, or there are none.
        ActionOutOfRangeError: A step lies beyond |z| = 10 and ``clip`` is off.
        InputError, ShapeError, NonFiniteError: An argument is malformed, or ``gripper`` does not
            fit the embodiment.
    """
    embodiment = get_embodiment(embodiment)
    limb = only_limb(embodiment, embodiment.action_space("midtrain"), "encode_chunk")
    open_fractions = {} if gripper is None else {limb: gripper}
    return encode_limbs({limb: T_base_cosmos}, open_fractions, embodiment, stats, method, clip)


def _limbs_of(embodiment: Embodiment, by_limb: Mapping[str, Any]) -> list[LimbColumns]:
    """The limbs of a mapping, in the columns' order; arms must not be missing."""
    if not embodiment.limbs:
        raise ActionSpaceError(
            f"which columns of {embodiment.name!r} belong to which limb is not stated by its "
            "source; use the raw columns."
        )
    names = [limb.name for limb in embodiment.limbs]
    for name in by_limb:
        known_name(name, f"limb of embodiment {embodiment.name!r}", names)
    missing = [
        limb.name for limb in embodiment.limbs if limb.name not in by_limb and not limb.is_camera
    ]
    if missing or not by_limb:
        raise InputError(
            f"embodiment {embodiment.name!r} moves the limbs {', '.join(names)}; those of "
            f"{', '.join(missing or names)} are missing."
        )
    return [limb for limb in embodiment.limbs if limb.name in by_limb]


def _poses_of(rows: F64) -> F64:
    return se3(rot6d_to_matrix(rows[..., 3:]), rows[..., :3])


def _rows_of(T: F64) -> F64:
    return np.concatenate([T[..., :3, 3], matrix_to_rot6d(T[..., :3, :3])], axis=-1)


def _integrate(anchor: F64, steps: F64) -> F64:
    """[T, 4, 4] the running products ``anchor step_0 ... step_i``."""
    poses = np.empty_like(steps)
    pose = anchor
    for i, step in enumerate(steps):
        pose = poses[i] = pose @ step
    return poses


def _gripper_column(gripper: Any, n: int, embodiment: Embodiment, limb: LimbColumns) -> F64 | None:
    """[n] open fractions in the limb's own convention; None for one without a gripper."""
    if (gripper is None) != (limb.gripper is None):
        takes = "no gripper" if limb.gripper is None else "a gripper of open fractions [T]"
        raise InputError(
            f"rows of {embodiment.name!r} take {takes} for {limb.name!r}, "
            f"got {type(gripper).__name__}."
        )
    if limb.gripper is None:
        return None
    return limb.gripper.from_fraction(within(gripper, "gripper", 0.0, 1.0, (n,)))


def _units(embodiment: Embodiment, space: ActionSpace) -> F64:
    """[D] unit of each column: metres for the translations of unnormalised rows, one for the
    others.
    """
    if embodiment.translation_scale is None:
        raise ActionSpaceError(
            f"the translations of {embodiment.name!r} are in its controller's own unit, not in "
            "metres; use the raw columns."
        )
    units = np.ones(space.width)
    for limb in embodiment.limbs:
        units[limb.pose.start : limb.pose.start + 3] = embodiment.translation_scale
    return units


def only_limb(embodiment: Embodiment, space: ActionSpace, function: str) -> str:
    """Return the name of the only limb that rows of poses move; ActionSpaceError of others."""
    if len(embodiment.limbs) == 1:
        return embodiment.limbs[0].name
    raise ActionSpaceError(
        f"{space.name!r} rows of {embodiment.name!r} have {space.width} columns "
        f"({', '.join(space.columns[:10])}...): not one arm's pose delta and gripper, as "
        f"{function} takes them. Use decode_limbs and encode_limbs, by limb."
    )


def _require_poses(chunk: ActionChunk, decoder: str) -> None:
    if chunk.action_space.meaning not in ("pose_delta", "pose_absolute"):
        raise _wrong_decoder(chunk, decoder, "'midtrain' deltas and 'pose_abs' poses")


def _wrong_decoder(chunk: ActionChunk, decoder: str, reads: str) -> ActionSpaceError:
    remedy = {
        "joint_position": "they are absolute joint angles and need no statistics, integration or "
        "IK: use decode_joint_chunk",
        "pose_delta": "they are normalised deltas, to be integrated and solved by IK: use "
        "decode_chunk",
        "pose_absolute": "they are poses, to be solved by IK: use decode_chunk",
        "raw": "their meaning is not known: use them undecoded",
    }[chunk.action_space.meaning]
    return ActionSpaceError(
        f"{decoder} reads {reads}, but this chunk of {chunk.embodiment.name!r} holds "
        f"{chunk.action_space.name!r} rows "
        f"({chunk.action_space.meaning}); {remedy}."
    )
