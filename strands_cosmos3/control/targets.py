"""From an action chunk to joint targets: decode, move to the driven body's frame, solve.

:func:`solve_chunk` is what the policy uses; :func:`decode_cosmos_chunk_to_targets` is the same for people who keep their own
control loop, with exactly one row a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from strands_cosmos3.actions.decode import decode_chunk, decode_joint_chunk, to_frame
from strands_cosmos3.actions.normalization import ActionStats
from strands_cosmos3.checks import F64, instance_of
from strands_cosmos3.control.ik import IKSolution, MinkIKBridge
from strands_cosmos3.embodiments import Embodiment, get_embodiment
from strands_cosmos3.errors import ActionSpaceError
from strands_cosmos3.types import ActionChunk, ErrorSummary, JointTrajectory, PoseTrajectory

MAX_STRETCH = 4.0
"""The policy's solver may ask a joint for this many times its speed in one row; the executor then takes as much longer."""


def tool_frame_in_ee(embodiment: Embodiment, bridge: MinkIKBridge, qpos: F64) -> F64:
    """[4, 4] ``T_ee_cosmos``: the frame whose deltas the model speaks, seen from the driven frame.

    Raises:
        FrameError: The model lacks the tool frame's parent body, or it is not rigidly attached to the driven frame.
    """
    tool = embodiment.tool_frame
    return bridge.frame_in_ee(tool.parent, qpos) @ tool.T_parent_cosmos


def solve_chunk(
    chunk: ActionChunk,
    bridge: MinkIKBridge,
    q_measured: F64,
    stats: ActionStats | None = None,
    t_capture_s: float = 0.0,
) -> JointTrajectory:
    """Joint angles that follow a chunk from the measured configuration.

    ``midtrain`` and ``pose_abs`` rows become poses and go through inverse kinematics; ``joint_pos`` rows are angles
    already. Rows that are too fast are kept (up to :data:`MAX_STRETCH`): time is the executor's to stretch.

    Args:
        chunk: What the model answered.
        bridge: The arm.
        q_measured: [nq] configuration at the observation.
        stats: Statistics for normalised rows; the embodiment's own by default.
        t_capture_s: The observation's time stamp.
    """
    if chunk.action_space.meaning == "joint_position":
        joints = decode_joint_chunk(chunk)
        return JointTrajectory(joints.q_rad, joints.t_s, joints.gripper, t_capture_s=t_capture_s)
    poses = _ee_poses(chunk, bridge, q_measured, stats)[1]
    assert chunk.fps is not None  # ActionChunk resolved it
    solution = bridge.solve(poses.T_base_frame, q_measured, MAX_STRETCH / chunk.fps)
    return JointTrajectory(
        solution.q_rad[:, bridge.q_address],
        poses.t_s,
        poses.gripper,
        poses,
        solution.residual_m,
        solution.residual_rad,
        solution.converged,
        solution.clamped,
        t_capture_s,
    )


def decode_cosmos_chunk_to_targets(
    raw_chunk: Any,
    embodiment: Embodiment | str,
    bridge: MinkIKBridge,
    q_init: Any,
    stats: ActionStats | str | Path | None = None,
    action_space: str | None = None,
    fps: float | None = None,
) -> dict[str, Any]:
    """Joint targets for a raw chunk, one row for each of its rows.

    Args:
        raw_chunk: [T, D] rows as the model emitted them.
        embodiment: Whose rows, e.g. ``get_embodiment("droid")`` or ``"droid"``.
        bridge: The arm; its base is the world's origin.
        q_init: [nq] configuration at the observation.
        stats: Statistics; the embodiment's own by default.
        action_space: ``"midtrain"`` (default) or ``"pose_abs"``.
        fps: Rows a second; the embodiment's own by default.

    Returns:
        ``qpos`` [T, nq], row i after delta i, each step within joint and velocity limits at 1/fps; ``gripper`` [T] open
        fractions or None; ``poses`` [T, 4, 4] commanded poses of the Cosmos frame, integrated open-loop from ``q_init``'s;
        ``t_s`` [T]; ``converged`` and ``clamped`` [T]; ``tracking_error``: the IK residual against those poses (mean_mm,
        max_mm, mean_deg, max_deg). It says nothing about dynamics.

    Raises:
        ActionSpaceError: The rows are joint angles, or of another width.
        ActionOutOfRangeError: A normalised value lies beyond |z| = 10.
        StatisticsError, FrameError, ShapeError, NonFiniteError: As the parts raise them; nothing was solved.
    """
    embodiment = get_embodiment(embodiment)
    bridge = instance_of(bridge, MinkIKBridge, "bridge")
    space = embodiment.action_space(action_space)
    if space.meaning == "joint_position":
        raise ActionSpaceError(
            "joint_pos rows are joint angles already: command them as they are. Inverse kinematics is for 'midtrain' and "
            "'pose_abs' rows."
        )
    chunk = ActionChunk(raw_chunk, space, embodiment, fps)
    q = bridge.configuration(q_init, "q_init")
    cosmos, driven = _ee_poses(chunk, bridge, q, stats)
    assert chunk.fps is not None  # ActionChunk resolved it
    solution = bridge.solve(driven.T_base_frame, q, 1.0 / chunk.fps)
    return {
        "qpos": solution.q_rad,
        "gripper": cosmos.gripper,
        "poses": cosmos.T_base_frame,
        "t_s": cosmos.t_s,
        "converged": solution.converged,
        "clamped": solution.clamped,
        "tracking_error": vars(_residual(solution)),
    }


def _residual(solution: IKSolution) -> ErrorSummary:
    return ErrorSummary.of(solution.residual_m, solution.residual_rad)


def _ee_poses(
    chunk: ActionChunk, bridge: MinkIKBridge, q: F64, stats: ActionStats | str | Path | None
) -> tuple[PoseTrajectory, PoseTrajectory]:
    """The chunk's poses, of the Cosmos frame and of the driven frame."""
    T_ee_cosmos = tool_frame_in_ee(chunk.embodiment, bridge, q)
    cosmos = decode_chunk(chunk, bridge.ee_pose(q) @ T_ee_cosmos, stats)
    return cosmos, to_frame(cosmos, np.linalg.inv(T_ee_cosmos), bridge.ee_frame_name)
