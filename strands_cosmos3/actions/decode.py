"""From the model's rows to poses in the robot's base, and back.

A row of a ``midtrain`` chunk is a motion of the Cosmos frame seen from that frame itself (cosmos-framework,
``pose_utils``: ``backward_framewise``), so a chunk is anchored once, on the pose observed, and integrated open-loop:
anchoring anew at each step on what the arm reached would hide its drift by moving the target after it.

The Cosmos frame is seldom the body that inverse kinematics drives. Decode in the Cosmos frame, then cross over with
:func:`to_frame`; deltas composed on the body directly bend the path, and no IK residual shows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from strands_cosmos3.actions.arrays import rigid, trailing
from strands_cosmos3.actions.normalization import ActionStats, Method, refuse_wild
from strands_cosmos3.actions.rotations import (
    matrix_to_rot6d,
    quaternion_to_matrix,
    rot6d_to_matrix,
    se3,
    se3_between,
)
from strands_cosmos3.actions.stats import denormalize_chunk, normalize_chunk
from strands_cosmos3.checks import F64, finite_array, instance_of, rigid_transform
from strands_cosmos3.embodiments import POSE9, ActionSpace, Embodiment, GripperConvention, get_embodiment
from strands_cosmos3.errors import ActionSpaceError, FrameError, InputError, ShapeError, UnknownNameError
from strands_cosmos3.types import ActionChunk, JointTrajectory, PoseTrajectory

Convention = Literal["framewise", "anchored"]
"""``framewise``: each delta departs from the pose before it; ``anchored``: each departs from the anchor."""

COSMOS_FRAME = "cosmos"
_POSE = len(POSE9)


def decode_pose_delta(rows: Any) -> F64:
    """[..., 9] translation [m] and rot6d -> [..., 4, 4] relative poses ``T_from_to``.

    Raises:
        InputError: The rot6d columns are zero or parallel, or a value is absurdly large.
        ShapeError, NonFiniteError: The rows are malformed.
    """
    values = trailing(rows, "pose delta", (_POSE,))
    return se3(rot6d_to_matrix(values[..., 3:]), values[..., :3])


def encode_pose_delta(T: Any) -> F64:
    """[..., 4, 4] relative poses -> [..., 9] translation [m] and rot6d; the inverse of :func:`decode_pose_delta`."""
    pose = rigid(T, "T")
    return np.concatenate([pose[..., :3, 3], matrix_to_rot6d(pose[..., :3, :3])], axis=-1)


def decode_pose_trajectory(deltas: Any, T_0: Any, convention: Convention = "framewise") -> F64:
    """[T, 9] deltas and the anchor [4, 4] -> [T + 1, 4, 4] poses in the anchor's parent frame; row 0 is the anchor.

    ``framewise``: ``T_{i+1} = T_i delta_i``; ``anchored``: ``T_{i+1} = T_0 delta_i``.

    Raises:
        UnknownNameError: No such convention.
        InputError, ShapeError, NonFiniteError: An argument is malformed.
    """
    _require_convention(convention)
    steps = decode_pose_delta(finite_array(deltas, "deltas", (None, _POSE)))
    poses = np.empty((len(steps) + 1, 4, 4))
    poses[0] = rigid(finite_array(T_0, "T_0", (4, 4)), "T_0")
    if convention == "anchored":
        poses[1:] = poses[0] @ steps
        return poses
    for i, step in enumerate(steps):  # each pose needs the one before it
        poses[i + 1] = poses[i] @ step
    return poses


def encode_pose_trajectory(T: Any, convention: Convention = "framewise") -> F64:
    """[N + 1, 4, 4] poses, the anchor first -> [N, 9] deltas; the inverse of :func:`decode_pose_trajectory`.

    Raises:
        UnknownNameError: No such convention.
        ShapeError: There are fewer than two poses.
        InputError, NonFiniteError: A pose is malformed.
    """
    _require_convention(convention)
    poses = rigid(finite_array(T, "T", (None, 4, 4)), "T")
    if len(poses) < 2:
        raise ShapeError("T must hold the anchor and at least one pose after it, got one pose.")
    return encode_pose_delta(se3_between(poses[:1] if convention == "anchored" else poses[:-1], poses[1:]))


def decode_chunk(
    chunk: ActionChunk,
    T_base_anchor_cosmos: Any,
    stats: ActionStats | str | Path | None = None,
    method: Method = "quantile",
) -> PoseTrajectory:
    """Commanded poses of the Cosmos frame, from a chunk of deltas (``midtrain``) or of absolute poses (``pose_abs``).

    Args:
        chunk: Rows in the model's own scale.
        T_base_anchor_cosmos: [4, 4] pose of the Cosmos frame in the robot's base at the observation.
        stats: Statistics for normalised rows; the embodiment's packaged ones by default.
        method: How the rows were normalised.

    Returns:
        T poses in the robot's base, frame ``"cosmos"``, at the rows' times; the anchor stands apart. The gripper's
        column as open fractions.

    Raises:
        ActionSpaceError: The rows are joint angles, undecodable, or of more than one arm.
        StatisticsError: The statistics are of another domain or width, or there are none.
        InputError, ShapeError, NonFiniteError: An argument is malformed.
    """
    chunk = instance_of(chunk, ActionChunk, "chunk")
    anchor = rigid_transform(trailing(T_base_anchor_cosmos, "T_base_anchor_cosmos", (4, 4)), "T_base_anchor_cosmos")
    space = chunk.action_space
    if space.meaning == "pose_delta":
        convention = _gripper_of(chunk.embodiment, space)
        rows = _physical_rows(chunk, stats, method)
        poses = decode_pose_trajectory(rows[:, :_POSE], anchor)[1:]
        gripper = None if convention is None else convention.to_fraction(rows[:, _POSE])
    elif space.meaning == "pose_absolute":
        rows = trailing(chunk.action, "action", (8,))
        poses = se3(quaternion_to_matrix(rows[:, 3:7]), rows[:, :3])
        gripper = np.clip(rows[:, 7], 0.0, 1.0)
    else:
        raise ActionSpaceError(_wrong_decoder(chunk, "decode_chunk", "'midtrain' deltas and 'pose_abs' poses"))
    return PoseTrajectory(poses, chunk.row_times_s, COSMOS_FRAME, anchor, gripper)


def decode_joint_chunk(chunk: ActionChunk) -> JointTrajectory:
    """Commanded joint angles from a chunk of ``joint_pos`` rows: radians as they are, the gripper as open fractions.

    Nothing is de-normalised and nothing goes through inverse kinematics. Row 0 is due at the observation: a sequence's
    clean state row must already be gone.

    Raises:
        ActionSpaceError: The rows are poses or deltas.
        InputError: A joint angle is absurdly large.
    """
    chunk = instance_of(chunk, ActionChunk, "chunk")
    space = chunk.action_space
    if space.meaning != "joint_position":
        raise ActionSpaceError(_wrong_decoder(chunk, "decode_joint_chunk", "'joint_pos' angles"))
    rows = trailing(chunk.action, "action", (None, space.width))
    convention = chunk.embodiment.gripper
    if space.columns[-1] != "gripper" or convention is None:
        return JointTrajectory(rows, chunk.row_times_s)
    return JointTrajectory(rows[:, :-1], chunk.row_times_s, convention.to_fraction(rows[:, -1]))


def to_frame(trajectory: PoseTrajectory, T_cosmos_ee: Any, name: str) -> PoseTrajectory:
    """The same motion as poses of a body fixed to the Cosmos frame: ``T_base_ee = T_base_cosmos T_cosmos_ee``.

    Args:
        trajectory: Poses of the Cosmos frame.
        T_cosmos_ee: [4, 4] the body seen from the Cosmos frame: ``se3_inverse(tool_frame.T_parent_cosmos)`` for the
            tool frame's parent.
        name: The body's name.

    Raises:
        FrameError: The trajectory is not of the Cosmos frame.
        InputError, ShapeError, NonFiniteError: The transform is malformed, or the name is empty.
    """
    trajectory = instance_of(trajectory, PoseTrajectory, "trajectory")
    T = rigid(finite_array(T_cosmos_ee, "T_cosmos_ee", (4, 4)), "T_cosmos_ee")
    if trajectory.frame != COSMOS_FRAME:
        raise FrameError(f"to_frame starts from frame {COSMOS_FRAME!r}, but these are poses of {trajectory.frame!r}.")
    if not instance_of(name, str, "name"):
        raise InputError("name must not be empty; it says whose poses these are.")
    moved, anchor = trajectory.T_base_frame @ T, trajectory.T_base_anchor @ T
    return PoseTrajectory(moved, trajectory.t_s, name, anchor, trajectory.gripper)


def encode_chunk(
    T_base_cosmos: Any,
    gripper: Any,
    embodiment: Embodiment | str,
    stats: ActionStats | str | Path | None = None,
    method: Method = "quantile",
    clip: bool = False,
) -> F64:
    """The ``midtrain`` rows that decode to these poses; the inverse of :func:`decode_chunk`.

    Args:
        T_base_cosmos: [T + 1, 4, 4] poses of the Cosmos frame, the anchor first.
        gripper: [T] open fractions, or None for an embodiment without a gripper.
        embodiment: Whose rows.
        stats: Its statistics; the packaged ones by default.
        method: How to normalise.
        clip: Clamp to [-1, 1] as training did. Without it a row is exact, and motion too fast to be one is refused.

    Returns:
        [T, D] rows in the model's scale.

    Raises:
        ActionSpaceError: The embodiment's rows are not those of a single arm.
        StatisticsError: The statistics are of another domain or width, or there are none.
        ActionOutOfRangeError: A step lies beyond |z| = 10 and ``clip`` is off.
        InputError, ShapeError, NonFiniteError: An argument is malformed, or there is a gripper too many or too few.
    """
    embodiment = get_embodiment(embodiment)
    space = embodiment.action_space("midtrain")
    convention = _gripper_of(embodiment, space)
    _metres(embodiment)
    rows = encode_pose_trajectory(T_base_cosmos)
    if (gripper is None) != (convention is None):
        wants = "no gripper" if convention is None else "a gripper of open fractions [T]"
        raise InputError(f"rows of {embodiment.name!r} take {wants}, got {type(gripper).__name__}.")
    if convention is not None:
        fraction = finite_array(gripper, "gripper", (len(rows),))
        if fraction.min() < 0 or fraction.max() > 1:
            raise InputError("gripper holds open fractions in [0, 1] (1 = open).")
        rows = np.concatenate([rows, convention.from_fraction(fraction)[:, None]], axis=1)
    if not space.normalized:
        return rows / _units(embodiment, space)
    normalised = normalize_chunk(rows, embodiment, stats, method, clip)
    refuse_wild(normalised, space.columns)
    return normalised


def _physical_rows(chunk: ActionChunk, stats: ActionStats | str | Path | None, method: Method) -> F64:
    """[T, D] in metres, rot6d and the gripper's own unit."""
    _metres(chunk.embodiment)
    if chunk.action_space.normalized:
        return denormalize_chunk(chunk.action, chunk.embodiment, stats, method)
    return chunk.action * _units(chunk.embodiment, chunk.action_space)


def _units(embodiment: Embodiment, space: ActionSpace) -> F64:
    """[D] what one unit of each unnormalised column is: metres for translations, one for the others."""
    return np.array([_metres(embodiment)] * 3 + [1.0] * (space.width - 3))


def _metres(embodiment: Embodiment) -> float:
    """Metres for one unit of physical translation.

    Raises:
        ActionSpaceError: The embodiment's translations are in a unit that is not known.
    """
    if embodiment.translation_scale is None:
        raise ActionSpaceError(
            f"the translations of {embodiment.name!r} are in its controller's own unit, not in metres; use the raw columns."
        )
    return embodiment.translation_scale


def _gripper_of(embodiment: Embodiment, space: ActionSpace) -> GripperConvention | None:
    """How a single arm's last column is to be read; None for rows of a bare pose."""
    if space.meaning == "pose_delta" and space.columns[:_POSE] == POSE9:
        if space.width == _POSE:
            return None
        if space.width == _POSE + 1 and embodiment.gripper is not None:
            return embodiment.gripper
    raise ActionSpaceError(
        f"{space.name!r} rows of {embodiment.name!r} have {space.width} columns ({', '.join(space.columns[:10])}...): "
        "not one arm's pose delta and gripper. Slice one arm's columns and use decode_pose_trajectory."
    )


def _wrong_decoder(chunk: ActionChunk, decoder: str, reads: str) -> str:
    remedy = {
        "joint_position": "they are absolute joint angles; no statistics, integration or IK: use decode_joint_chunk",
        "pose_delta": "they are normalised deltas, which must be integrated and go through IK: use decode_chunk",
        "pose_absolute": "they are poses, which must go through IK: use decode_chunk",
        "raw": "nothing is known of their meaning: use them undecoded",
    }[chunk.action_space.meaning]
    return (
        f"{decoder} reads {reads}, but this chunk of {chunk.embodiment.name!r} holds {chunk.action_space.name!r} rows "
        f"({chunk.action_space.meaning}); {remedy}."
    )


def _require_convention(convention: object) -> None:
    if str(convention) not in get_args(Convention):
        raise UnknownNameError("pose convention", convention, get_args(Convention))
