"""Blend a chunk that was inferred while the arm moved into the present motion.

Rows are timed from the chunk's observation; those whose time has passed on arrival are dropped. The
others seldom continue the present reference exactly, so the offset is added to them and faded out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.interpolate import CubicSpline  # pyright: ignore[reportMissingTypeStubs]

from strands_cosmos3.actions.rotations import interpolate_poses
from strands_cosmos3.checks import F64
from strands_cosmos3.control.stops import JointState
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.types import JointTrajectory, PoseTrajectory

_NOW_S = 1e-6
_BY_ROW = ("q_rad", "residual_m", "residual_rad", "converged", "clamped")


def drop_elapsed(trajectory: JointTrajectory, elapsed_s: float) -> JointTrajectory | None:
    """Return the remaining rows with times counted from now, or None if all have passed.

    The poses' anchor moves to where the intended path would be now.
    """
    first = int(np.searchsorted(trajectory.t_s, elapsed_s + _NOW_S, side="right"))
    if first >= len(trajectory.t_s):
        return None
    t_s = trajectory.t_s[first:] - elapsed_s
    gripper = None if trajectory.gripper is None else trajectory.gripper[first:]
    limb_poses = {
        name: _remaining(poses, first, elapsed_s, t_s)
        for name, poses in trajectory.limb_poses.items()
    }
    rows = {name: getattr(trajectory, name)[first:] for name in _BY_ROW}
    return replace(trajectory, t_s=t_s, gripper=gripper, limb_poses=limb_poses, **rows)


def _remaining(poses: PoseTrajectory, first: int, elapsed_s: float, t_s: F64) -> PoseTrajectory:
    """The poses from row ``first`` on, due at times [T - first] from now; the anchor is where
    the path would be now.
    """
    T = np.concatenate((poses.T_base_anchor[None], poses.T_base_frame))
    anchor = interpolate_poses(T, np.concatenate(([0.0], poses.t_s)), np.array([elapsed_s]))[0]
    gripper = None if poses.gripper is None else poses.gripper[first:]
    return PoseTrajectory(poses.T_base_frame[first:], t_s, poses.frame, anchor, gripper)


def blend_chunk(
    trajectory: JointTrajectory,
    q_departure: F64,
    elapsed_s: float,
    reference: JointState,
    limits: JointLimits,
    blend_s: float,
) -> JointTrajectory | None:
    """Return a chunk's rows that remain ``elapsed_s`` after its observation, blended into the
    motion; None if all have passed.

    The reference's offset from the chunk in angle and velocity is added to the rows and fades out
    within ``blend_s`` along a cubic Hermite, so that the motion continues without a jump. Blended
    rows stay inside the joints' range.

    Args:
        q_departure: [n] angles that the chunk departs from.
        elapsed_s: Time since then on the motion's clock; 0 returns the chunk unchanged.
        reference: The present reference.
    """
    if elapsed_s <= _NOW_S:
        return trajectory
    rest = drop_elapsed(trajectory, elapsed_s)
    if rest is None:
        return None
    offset, offset_speed = _seam(trajectory, q_departure, elapsed_s, reference)
    s = np.minimum(rest.t_s / blend_s, 1.0)[:, None]
    fading = offset * (1 - s) ** 2 * (1 + 2 * s) + offset_speed * blend_s * s * (1 - s) ** 2
    # the executor rejects the others
    in_range = (rest.q_rad >= limits.q_min) & (rest.q_rad <= limits.q_max)
    q = np.clip(rest.q_rad + fading, limits.q_min, limits.q_max)
    return replace(rest, q_rad=np.where(in_range, q, rest.q_rad))


def seam_speed(
    trajectory: JointTrajectory, q_departure: F64, elapsed_s: float, reference: JointState
) -> float:
    """Return by how much a chunk's velocity differs from the reference's where it joins it, of the
    fastest joint, in rad/s.

    Arguments as of :func:`blend_chunk`, which spreads this difference over ``blend_s``.
    """
    return float(np.abs(_seam(trajectory, q_departure, elapsed_s, reference)[1]).max())


def _seam(
    trajectory: JointTrajectory, q_departure: F64, elapsed_s: float, reference: JointState
) -> tuple[F64, F64]:
    """The reference's offset [n] from the chunk, in angle and velocity."""
    spline = _spline(q_departure, trajectory)
    return reference.q_rad - spline(elapsed_s), reference.qd_rad_s - spline(elapsed_s, 1)


def _spline(q_departure: F64, trajectory: JointTrajectory) -> CubicSpline:
    """The chunk's angles as a function of time since its observation."""
    due_at_once = trajectory.t_s[0] < _NOW_S
    t_s = trajectory.t_s if due_at_once else np.concatenate(([0.0], trajectory.t_s))
    q = trajectory.q_rad if due_at_once else np.vstack((q_departure, trajectory.q_rad))
    if len(t_s) == 1:
        t_s, q = np.array([0.0, 1.0]), np.repeat(q, 2, axis=0)
    return CubicSpline(t_s, q, bc_type="natural")
