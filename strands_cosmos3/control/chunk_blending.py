"""Blend a chunk that was inferred while the arm moved into the present motion.

Rows are timed from the chunk's observation; those whose time has passed on arrival are dropped. The
others seldom continue the present reference exactly, so the offset is added to them and faded out,
slowly enough that the hand is hardly faster than it is now or in the chunk. Where the chunk is too
short for that, the arm brakes, and the next chunk departs from where it rests.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import numpy as np
from scipy.interpolate import CubicSpline  # pyright: ignore[reportMissingTypeStubs]

from strands_cosmos3.actions.rotations import geodesic_angle, interpolate_poses, pose_distances
from strands_cosmos3.checks import F64
from strands_cosmos3.control.executor import PreparedMotion, Takeover
from strands_cosmos3.control.stops import JointState
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.types import ArmGeometry, JointTrajectory, PoseTrajectory

SPEED_MARGIN = np.array([0.1, 0.5])
"""By how much, in m/s and rad/s, the hand may be faster in a blend than before and from row to
row.
"""
_NOW_S = 1e-6
_LONGER = 1.5  # each blend that is tried, than the one before
_MOST_BLENDS = 6
# where the arm rests already, the rows take longer, again and again
_SLOWER, _MOST_SLOWER = 1.25, 6
_MOMENT_S = np.array([0.0, 1e-3])
_BY_ROW = ("q_rad", "residual_m", "residual_rad", "converged", "clamped", "held")


class Seam(StrEnum):
    """How a chunk joins the motion under way. All but ``blended`` are counted as
    ``seam_<outcome>``.
    """

    BLENDED = "blended"  # within ``blend_s``
    SLOWED = "slowed"  # over a longer time, because the hand would have been too fast
    BRAKED = "braked"  # not at all: the arm brakes, and the next chunk departs from there


def join_chunk(
    trajectory: JointTrajectory,
    q_departure: F64,
    elapsed_s: float,
    takeover: Takeover,
    blend_s: float,
    arm: ArmGeometry | None = None,
) -> tuple[PreparedMotion, Seam] | None:
    """Plan the motion through a chunk's rows that remain ``elapsed_s`` after its observation, from
    a reference in the near future; None if all have passed.

    With an ``arm``, whose geometry is known, a blend makes the hand faster than both its present
    speed and that from row to row of the chunk by at most :data:`SPEED_MARGIN`: it takes longer
    than ``blend_s``, or the arm brakes, or starts slowly if it rests. Other arguments as of
    :func:`blend_chunk`; errors as of :meth:`Takeover.prepare`.
    """
    reference = takeover.reference
    limits = takeover.limits
    in_time = elapsed_s <= _NOW_S
    blend = trajectory, q_departure, elapsed_s, reference, limits
    rest = trajectory if in_time else blend_chunk(*blend, blend_s)
    if rest is None:
        return None
    prepared = takeover.motion_through(rest)
    seam = Seam.BLENDED
    chunk = _spline(q_departure, trajectory)
    if arm is None or not _contradicts(arm, reference, chunk, elapsed_s, blend_s):
        return takeover.without_collision(prepared), seam
    most = _most_speeds(arm, reference, chunk)
    # the first one is tried already, unless the chunk came in time and was not blended
    blends_s = blend_s * _LONGER ** np.arange(not in_time, _MOST_BLENDS)
    for longer_s in blends_s[blends_s < rest.t_s[-1]]:
        if not _too_fast(arm, prepared, takeover.dt_s, most):
            break
        rest = blend_chunk(*blend, longer_s)
        assert rest is not None  # it lasts longer than the blend
        prepared = takeover.motion_through(rest)
        seam = Seam.SLOWED
    else:
        for _ in range(_MOST_SLOWER):
            if not _too_fast(arm, prepared, takeover.dt_s, most):
                break
            if not reference.rests:
                prepared = takeover.brake(rest)
                seam = Seam.BRAKED
                break
            rest = replace(rest, t_s=rest.t_s * _SLOWER)
            prepared = takeover.motion_through(rest)
            seam = Seam.SLOWED
    return takeover.without_collision(prepared), seam


def _too_fast(arm: ArmGeometry, prepared: PreparedMotion, dt_s: float, most: F64) -> bool:
    steps = prepared.sampled(dt_s)
    at_s = steps.astype(np.float64) * dt_s
    return bool((_hand_speeds(arm, prepared.block.q_rad[steps], at_s) > most).any())


def _contradicts(
    arm: ArmGeometry, reference: JointState, chunk: CubicSpline, elapsed_s: float, blend_s: float
) -> bool:
    """Whether blending may make the hand faster than it is along the chunk by more than the margin:
    the offset's Hermite reaches 1.5 times its mean speed, and the velocities of an arm that moves
    differ.
    """
    now = reference.q_rad + np.outer(_MOMENT_S, reference.qd_rad_s)
    for T in arm.limb_poses(np.vstack((now, chunk(elapsed_s + _MOMENT_S)))).values():
        R = T[:, :3, :3]
        apart = T[:2, :3, 3] - T[2:, :3, 3]
        turn = R[0].T @ R[1]
        turn_of_chunk = R[2].T @ R[3]
        offset = pose_distances(T[0], T[2])
        change = np.array(
            [np.linalg.norm(apart[1] - apart[0]), geodesic_angle(turn, turn_of_chunk)]
        )
        differs = 0.0 if reference.rests else change / _MOMENT_S[1]
        if (1.5 * offset / blend_s + differs > SPEED_MARGIN).any():
            return True
    return False


def _most_speeds(arm: ArmGeometry, reference: JointState, chunk: CubicSpline) -> F64:
    """[2] speeds of the hand that a blend may reach."""
    rows_s: F64 = chunk.x
    now = _hand_speeds(arm, reference.q_rad + np.outer(_MOMENT_S, reference.qd_rad_s), _MOMENT_S)
    return np.maximum(now, _hand_speeds(arm, chunk(rows_s), rows_s)) + SPEED_MARGIN


def _hand_speeds(arm: ArmGeometry, q_rad: F64, t_s: F64) -> F64:
    """[2] greatest speed of a hand, in m/s and in rad/s, between joint angles [M, n] at times
    [M].
    """
    steps = [pose_distances(T[:-1], T[1:]) for T in arm.limb_poses(q_rad).values()]
    return np.max(steps / np.diff(t_s), axis=(0, 2))


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
        elapsed_s: Time since then on the motion's clock.
        reference: The present reference.
    """
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
        t_s = np.array([0.0, 1.0])
        q = np.repeat(q, 2, axis=0)
    return CubicSpline(t_s, q, bc_type="natural")
