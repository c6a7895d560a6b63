"""The seam between two chunks: a chunk that was inferred while the arm went on is joined where the arm now is.

A chunk's rows count from its observation. By the time it arrives some of them have passed; they are dropped. The first of
the others seldom lies where the reference has come to meanwhile, so what parts them is carried over and faded out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.interpolate import CubicSpline  # pyright: ignore[reportMissingTypeStubs]

from strands_cosmos3.actions.rotations import interpolate_poses
from strands_cosmos3.checks import F64, positive
from strands_cosmos3.control.trajectory import JointState
from strands_cosmos3.robots.panda import JointLimits
from strands_cosmos3.types import JointTrajectory, PoseTrajectory

_NOW_S = 1e-6


def drop_elapsed(trajectory: JointTrajectory, elapsed_s: float) -> JointTrajectory | None:
    """The rows still to come, their times counted from now; None where all have passed.

    The intended path begins where it would have been by now: the poses' anchor moves along with the time.
    """
    first = int(np.searchsorted(trajectory.t_s, elapsed_s + _NOW_S, side="right"))
    if first >= len(trajectory.t_s):
        return None
    poses, t_s = trajectory.poses, trajectory.t_s[first:] - elapsed_s
    gripper = None if trajectory.gripper is None else trajectory.gripper[first:]
    if poses is not None:
        T = np.concatenate((poses.T_base_anchor[None], poses.T_base_frame))
        anchor = interpolate_poses(T, np.concatenate(([0.0], poses.t_s)), np.array([elapsed_s]))[0]
        poses = PoseTrajectory(poses.T_base_frame[first:], t_s, poses.frame, anchor, gripper)
    assert trajectory.residual_m is not None  # JointTrajectory fills them all
    assert trajectory.residual_rad is not None
    assert trajectory.converged is not None
    assert trajectory.clamped is not None
    return JointTrajectory(
        trajectory.q_rad[first:],
        t_s,
        gripper,
        poses,
        trajectory.residual_m[first:],
        trajectory.residual_rad[first:],
        trajectory.converged[first:],
        trajectory.clamped[first:],
        trajectory.t_capture_s,
    )


def blend_chunk(
    trajectory: JointTrajectory, q_observed: F64, elapsed_s: float, reference: JointState, limits: JointLimits, blend_s: float
) -> JointTrajectory | None:
    """A chunk as it is to be followed from the present reference, ``elapsed_s`` after its observation.

    The difference between the reference and where the chunk would be by now, in angle and in velocity, is added to the
    rows and fades to nothing within ``blend_s`` (a cubic Hermite), so that the chunk is entered at its own speed.

    Args:
        trajectory: The chunk.
        q_observed: [n] the angles it was planned from.
        elapsed_s: Time on the motion's own clock since then; 0 leaves the chunk as it is.
        reference: Where the reference is now.
        limits: Fading keeps rows inside the joints' range.
        blend_s: How long the fading takes.

    Returns:
        The rows still to come, or None where all have passed.
    """
    if elapsed_s <= _NOW_S:
        return trajectory
    rest = drop_elapsed(trajectory, elapsed_s)
    if rest is None:
        return None
    spline = _spline(q_observed, trajectory)
    away, away_speed = reference.q_rad - spline(elapsed_s), reference.qd_rad_s - spline(elapsed_s, 1)
    s = np.minimum(rest.t_s / positive(blend_s, "blend_s"), 1.0)[:, None]
    fading = away * (1 - s) ** 2 * (1 + 2 * s) + away_speed * blend_s * s * (1 - s) ** 2
    lawful = (rest.q_rad >= limits.q_min) & (rest.q_rad <= limits.q_max)  # what is not is the executor's to refuse
    q = np.clip(rest.q_rad + fading, limits.q_min, limits.q_max)
    return replace(rest, q_rad=np.where(lawful, q, rest.q_rad))


def _spline(q_observed: F64, trajectory: JointTrajectory) -> CubicSpline:
    """The chunk's angles as a function of the time since its observation."""
    due_at_once = trajectory.t_s[0] < _NOW_S
    t_s = trajectory.t_s if due_at_once else np.concatenate(([0.0], trajectory.t_s))
    q = trajectory.q_rad if due_at_once else np.vstack((q_observed, trajectory.q_rad))
    if len(t_s) == 1:
        t_s, q = np.array([0.0, 1.0]), np.repeat(q, 2, axis=0)
    return CubicSpline(t_s, q, bc_type="natural")
