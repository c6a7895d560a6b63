"""Rows that hold the arm, in place of those that must not be followed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from strands_cosmos3.actions.rotations import pose_distances
from strands_cosmos3.checks import F64
from strands_cosmos3.types import JointTrajectory


def hold_rows(trajectory: JointTrajectory, first: int, q_start_rad: F64) -> JointTrajectory:
    """Return a trajectory whose rows from ``first`` on hold the arm where the row before them, or
    the start [n], has it; they are accounted for against their own poses.
    """
    q_rad = trajectory.q_rad[first - 1] if first else q_start_rad
    held = np.arange(len(trajectory.t_s)) >= first
    residuals = np.zeros((2, len(held)))
    if trajectory.arm is not None:
        now = trajectory.arm.limb_poses(q_rad[None])
        for name, poses in trajectory.limb_poses.items():
            residuals = np.maximum(residuals, pose_distances(now[name], poses.T_base_frame))
    return replace(
        trajectory,
        q_rad=np.where(held[:, None], q_rad, trajectory.q_rad),
        residual_m=np.where(held, residuals[0], trajectory.residual_m),
        residual_rad=np.where(held, residuals[1], trajectory.residual_rad),
        converged=trajectory.converged & ~held,
    )
