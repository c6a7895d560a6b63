"""Action chunks to joint targets: decode, convert to the driven frames, solve the inverse
kinematics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from strands_cosmos3.actions.decode import LimbPoses, decode_limbs, only_limb, to_frame
from strands_cosmos3.actions.stats import ActionStats, stats_of_domain
from strands_cosmos3.checks import F64, typed
from strands_cosmos3.collision import CollisionReport
from strands_cosmos3.control.ik import IKSolution, MinkIKBridge
from strands_cosmos3.embodiments import Embodiment, ToolFrame, get_embodiment
from strands_cosmos3.errors import ActionSpaceError
from strands_cosmos3.types import OFF_POSE_M, ActionChunk, ErrorSummary, PoseTrajectory

Stats = ActionStats | str | Path | None


def tool_frame_in_ee(tool: ToolFrame, bridge: MinkIKBridge, qpos: F64) -> F64:
    """Return [4, 4] ``T_ee_cosmos``: the frame of the model's deltas, in the driven frame;
    FrameError if not attached to it.
    """
    return bridge.frame_in_ee(tool.parent, qpos) @ tool.T_parent_cosmos


@dataclass(frozen=True, eq=False)
class DrivenFrame:
    """The frame of a limb that inverse kinematics drives.

    Args:
        name: Its name.
        T_base_frame: [4, 4] its pose that a chunk departs from, in the limb's base.
        T_frame_cosmos: [4, 4] the frame of the model's deltas, in it.
    """

    name: str
    T_base_frame: F64
    T_frame_cosmos: F64


def driven_poses(
    chunk: ActionChunk, frames: Mapping[str, DrivenFrame], stats: Stats = None
) -> tuple[LimbPoses, dict[str, PoseTrajectory]]:
    """Return a chunk's poses of each limb's Cosmos frame, and of its driven frame by the limb's
    name; errors as :func:`~strands_cosmos3.actions.decode.decode_limbs`.
    """
    anchors = {name: frame.T_base_frame @ frame.T_frame_cosmos for name, frame in frames.items()}
    cosmos = decode_limbs(chunk, anchors, stats)
    driven = {
        name: to_frame(cosmos.by_limb[name], np.linalg.inv(frame.T_frame_cosmos), frame.name)
        for name, frame in frames.items()
    }
    return cosmos, driven


@typed()
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
    frames: Mapping[str, str] | None = None,
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
        frames: Names of frames that the embodiment uses -> the model's bodies or sites, such as
            ``{"hand": "tool0"}``; others have the same name in both.

    Returns:
        ``qpos`` [T, nq] in rad, row i after delta i, each step within joint and velocity limits at
        1/fps; ``gripper`` [T] open fractions (1 is open) or None; ``poses`` [T, 4, 4] of the Cosmos
        frame, in metres, integrated from ``q_init``; ``t_s``, times of the rows; ``converged``;
        ``clamped``, rows at a limit; ``off_pose`` [T], rows more than 1 mm off;
        ``tracking_error``: mean_mm, max_mm, mean_deg, max_deg of the IK residual (strands-robots'
            name); ``collision``: a
        :class:`~strands_cosmos3.collision.CollisionReport`. From its ``held_from_row`` on, rows
        stop the arm ahead of a collision.

    Raises:
        ActionSpaceError: The rows are joint angles, or of another width.
        ActionOutOfRangeError: A normalised value lies beyond +-10, where -1..1 are the quantiles.
        StatisticsError, FrameError, ShapeError, NonFiniteError: As the parts raise them; nothing
            was solved.
    """
    embodiment = get_embodiment(embodiment)
    q = ik_bridge.configuration(q_init, "q_init")
    space = embodiment.action_space(action_space)
    if space.meaning == "joint_position":
        raise ActionSpaceError(
            "joint_pos rows are joint angles: command them directly. IK is for "
            "'midtrain' and 'pose_abs'."
        )
    stats = stats_of_domain(embodiment, stats, stats_domain)
    tool = embodiment.tool_frame
    tool = replace(tool, parent=(frames or {}).get(tool.parent, tool.parent))
    embodiment = replace(embodiment, tool_frame=tool)
    chunk = ActionChunk(action_chunk, space, embodiment, fps)
    by_row = reanchor and space.name == "midtrain"
    cosmos, solution = (_solve_row_by_row if by_row else _solve)(chunk, ik_bridge, q, stats)
    residual = ErrorSummary.of(solution.residual_m, solution.residual_rad)
    return {
        "qpos": solution.q_rad,
        "gripper": cosmos.gripper,
        "poses": cosmos.T_base_frame,
        "t_s": cosmos.t_s,
        "converged": solution.converged,
        "clamped": solution.clamped,
        "off_pose": solution.residual_m > OFF_POSE_M,
        "tracking_error": vars(residual),
        "collision": solution.collision,
    }


def _solve(
    chunk: ActionChunk, bridge: MinkIKBridge, q: F64, stats: Stats
) -> tuple[PoseTrajectory, IKSolution]:
    """The chunk's poses of the Cosmos frame, and the configurations that follow them from q."""
    limb = only_limb(chunk.embodiment, chunk.action_space, "decode_cosmos_chunk_to_targets")
    T_ee_cosmos = tool_frame_in_ee(chunk.embodiment.tool_frame, bridge, q)
    frame = DrivenFrame(bridge.ee_frame_name, bridge.ee_pose(q), T_ee_cosmos)
    cosmos, driven = driven_poses(chunk, {limb: frame}, stats)
    assert chunk.fps is not None  # ActionChunk resolved it
    return cosmos.by_limb[limb], bridge.solve(driven[limb].T_base_frame, q, 1.0 / chunk.fps)


def _solve_row_by_row(
    chunk: ActionChunk, bridge: MinkIKBridge, q: F64, stats: Stats
) -> tuple[PoseTrajectory, IKSolution]:
    """As :func:`_solve`, each row from where the one before it arrived; from a row in collision
    on, all together.
    """
    poses: list[PoseTrajectory] = []
    solutions: list[IKSolution] = []
    report = CollisionReport()
    for i in range(len(chunk.action)):
        row, solution = _solve(replace(chunk, action=chunk.action[i : i + 1]), bridge, q, stats)
        if (report := solution.collision).row is not None:
            row, solution = _solve(replace(chunk, action=chunk.action[i:]), bridge, q, stats)
            report = solution.collision.later(i)
        poses.append(row)
        solutions.append(solution)
        if report.row is not None:
            break
        q = solution.q_rad[-1]
    grippers = [row.gripper for row in poses if row.gripper is not None]
    cosmos = replace(
        poses[0],
        T_base_frame=np.concatenate([row.T_base_frame for row in poses]),
        t_s=chunk.row_times_s,
        gripper=np.concatenate(grippers) if grippers else None,
    )
    return cosmos, IKSolution.joined(solutions, report)
