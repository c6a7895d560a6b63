"""Action chunks to joint targets: decode, convert to the driven body's frame, solve the inverse
kinematics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from strands_cosmos3.actions.decode import decode_chunk, decode_joint_chunk, to_frame
from strands_cosmos3.actions.normalization import ActionStats
from strands_cosmos3.actions.rotations import se3_inverse
from strands_cosmos3.actions.stats import stats_of_domain
from strands_cosmos3.checks import F64, instance_of, renamed_arguments, typed
from strands_cosmos3.collision import CollisionReport
from strands_cosmos3.control.ik import IKSolution, MinkIKBridge
from strands_cosmos3.embodiments import Embodiment, get_embodiment
from strands_cosmos3.errors import ActionSpaceError
from strands_cosmos3.types import (
    OFF_POSE_M,
    ActionChunk,
    ErrorSummary,
    JointTrajectory,
    PoseTrajectory,
)

MAX_STRETCH = 4.0  # multiple of the joints' speed limit that ``solve_chunk`` allows in one row


@typed()
def tool_frame_in_ee(embodiment: Embodiment, bridge: MinkIKBridge, qpos: F64) -> F64:
    """Return [4, 4] ``T_ee_cosmos``: the frame of the model's deltas, in the driven frame;
    FrameError if not attached to it.
    """
    tool = embodiment.tool_frame
    return bridge.frame_in_ee(tool.parent, qpos) @ tool.T_parent_cosmos


@typed()
def solve_chunk(
    chunk: ActionChunk,
    bridge: MinkIKBridge,
    q_anchor: F64,
    stats: ActionStats | None = None,
    t_capture_s: float = 0.0,
    T_world_base: F64 | None = None,
) -> JointTrajectory:
    """Return joint angles that follow a chunk from its anchor, the configuration [nq] that its
    first row departs from.

    Poses are in the base of the robot, which stands at ``T_world_base`` [4, 4] in the bridge's
    model; None: at its origin.

    ``midtrain`` and ``pose_abs`` rows become poses and are solved by inverse kinematics;
    ``joint_pos`` rows are commands already, which have no anchor. Rows that are too fast are kept,
    up to :data:`MAX_STRETCH`; the executor stretches time for them. Rows from the first in
    collision on hold the arm before it, and ``collision`` says so. ``stats`` defaults to the
    chunk's quantiles, else the embodiment's packaged statistics.
    """
    q = bridge.configuration(q_anchor, "q_anchor")
    if chunk.action_space.meaning == "joint_position":
        return _stopped_before_collision(
            replace(decode_joint_chunk(chunk), t_capture_s=t_capture_s), bridge, q
        )
    _, poses, solution = _solve(chunk, bridge, q, stats, MAX_STRETCH, T_world_base)
    q_rad = solution.q_rad[:, bridge.q_address]
    account = solution.residual_m, solution.residual_rad, solution.converged, solution.clamped
    return JointTrajectory(
        q_rad, poses.t_s, poses.gripper, poses, *account, t_capture_s, solution.collision
    )


def _stopped_before_collision(
    plan: JointTrajectory, bridge: MinkIKBridge, q: F64
) -> JointTrajectory:
    if plan.q_rad.shape[1] != len(bridge.q_address):
        return plan  # the executor rejects it
    rows = np.repeat(q[None], len(plan.q_rad), axis=0)
    rows[:, bridge.q_address] = plan.q_rad
    rows, collision = bridge.stop_before_collision(q, rows)
    return replace(plan, q_rad=rows[:, bridge.q_address], collision=collision)


@renamed_arguments(raw_chunk="action_chunk", bridge="ik_bridge")
def decode_cosmos_chunk_to_targets(
    action_chunk: Any,
    embodiment: Embodiment | str,
    ik_bridge: MinkIKBridge,
    q_init: Any,
    stats: ActionStats | Mapping[str, Any] | str | Path | None = None,
    action_space: str | None = None,
    fps: float | None = None,
    *,
    stats_domain: str | None = None,
    reanchor: bool = False,
) -> dict[str, Any]:
    """Return joint targets for a raw chunk, one for each of its rows, for a control loop of your
    own.

    Args:
        action_chunk: [T, D] rows as the model emitted them (normalised).
        embodiment: Embodiment, or its name. Its own ``stats`` and ``fps`` (rows per second) are the
            defaults.
        ik_bridge: The arm's kinematics; the base is the world's origin.
        q_init: [nq] configuration at the observation [rad].
        stats: Also a mapping with ``q01`` and ``q99``, which needs ``stats_domain``.
        action_space: ``"midtrain"`` (default): relative poses, row to row; or ``"pose_abs"``: poses
            in the base frame.
        stats_domain: Domain of ``stats``, which must be the embodiment's.
        reanchor: Whether each delta starts from the pose that inverse kinematics reached in the row
            before, as in strands-robots, instead of from that row's ideal pose. The two differ only
            by the residual.

    Returns:
        ``qpos`` [T, nq] in rad, row i after delta i, each step within joint and velocity limits at
        1/fps; ``gripper`` [T] open fractions (1 is open) or None; ``poses`` [T, 4, 4] of the Cosmos
        frame, in metres, integrated from ``q_init``; ``t_s``, times of the rows; ``converged``;
        ``clamped``, rows at a limit; ``off_pose`` [T], rows more than 1 mm off;
        ``tracking_error``: mean_mm, max_mm, mean_deg, max_deg of the IK residual (strands-robots'
            name); ``collision``: a
        :class:`~strands_cosmos3.collision.CollisionReport`. From its ``held_from`` on, rows stop
        the arm ahead of a collision.

    Raises:
        ActionSpaceError: The rows are joint angles, or of another width.
        ActionOutOfRangeError: A normalised value lies beyond +-10, where -1..1 are the quantiles.
        StatisticsError, FrameError, ShapeError, NonFiniteError: As the parts raise them; nothing
            was solved.
    """
    embodiment = get_embodiment(embodiment)
    q = instance_of(ik_bridge, MinkIKBridge, "ik_bridge").configuration(q_init, "q_init")
    space = embodiment.action_space(action_space)
    if space.meaning == "joint_position":
        raise ActionSpaceError(
            "joint_pos rows are joint angles: command them directly. IK is for 'midtrain' and "
            "'pose_abs'."
        )
    stats = stats_of_domain(embodiment, stats, stats_domain)
    chunk = ActionChunk(action_chunk, space, embodiment, fps)
    again = instance_of(reanchor, bool, "reanchor") and space.name == "midtrain"
    solve = _solve_reanchored if again else _solve
    cosmos, _, solution = solve(chunk, ik_bridge, q, stats, 1.0)
    residual = vars(ErrorSummary.of(solution.residual_m, solution.residual_rad))
    account = {
        "converged": solution.converged,
        "clamped": solution.clamped,
        "off_pose": solution.residual_m > OFF_POSE_M,
    }
    account |= {"tracking_error": residual, "collision": solution.collision}
    return {
        "qpos": solution.q_rad,
        "gripper": cosmos.gripper,
        "poses": cosmos.T_base_frame,
        "t_s": cosmos.t_s,
        **account,
    }


def _solve_reanchored(
    chunk: ActionChunk,
    bridge: MinkIKBridge,
    q: F64,
    stats: ActionStats | str | Path | None,
    stretch: float,
) -> tuple[PoseTrajectory, PoseTrajectory, IKSolution]:
    """As :func:`_solve`, each row from where the one before it arrived; from a row in collision
    on, all together.
    """
    whole, report = decode_chunk(chunk, np.eye(4), stats), CollisionReport()
    parts: list[tuple[PoseTrajectory, PoseTrajectory, IKSolution]] = []
    for i in range(len(chunk.action)):
        parts.append(
            _solve(replace(chunk, action=chunk.action[i : i + 1]), bridge, q, stats, stretch)
        )
        if (report := parts[-1][2].collision).row is not None:
            parts[-1] = _solve(replace(chunk, action=chunk.action[i:]), bridge, q, stats, stretch)
            report = parts[-1][2].collision.later(i)
            break
        q = parts[-1][2].q_rad[-1]
    cosmos, driven = (
        _joined(poses, whole)
        for poses in ([part[0] for part in parts], [part[1] for part in parts])
    )
    names = [field.name for field in fields(IKSolution) if field.name != "collision"]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part[2], name) for part in parts]) for name in names
    }
    return cosmos, driven, IKSolution(**arrays, collision=report)


def _joined(parts: list[PoseTrajectory], whole: PoseTrajectory) -> PoseTrajectory:
    """The poses of consecutive parts, with the times and the gripper of the whole."""
    poses = np.concatenate([part.T_base_frame for part in parts])
    return replace(parts[0], T_base_frame=poses, t_s=whole.t_s, gripper=whole.gripper)


def _solve(
    chunk: ActionChunk,
    bridge: MinkIKBridge,
    q: F64,
    stats: ActionStats | str | Path | None,
    stretch: float,
    T_world_base: F64 | None = None,
) -> tuple[PoseTrajectory, PoseTrajectory, IKSolution]:
    """The chunk's poses of the Cosmos frame and of the driven frame, and the angles that follow
    the latter.
    """
    T_ee_cosmos = tool_frame_in_ee(chunk.embodiment, bridge, q)
    T_world_cosmos = bridge.ee_pose(q) @ T_ee_cosmos
    cosmos = decode_chunk(
        chunk,
        T_world_cosmos if T_world_base is None else se3_inverse(T_world_base) @ T_world_cosmos,
        stats,
    )
    driven = to_frame(cosmos, np.linalg.inv(T_ee_cosmos), bridge.ee_frame_name)
    assert chunk.fps is not None  # ActionChunk resolved it
    targets = driven.T_base_frame if T_world_base is None else T_world_base @ driven.T_base_frame
    return cosmos, driven, bridge.solve(targets, q, stretch / chunk.fps)
