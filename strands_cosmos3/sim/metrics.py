"""Figures of an episode: five separate errors, from the log of its physics steps.

- ``ik``: the solver's residual against the commanded poses, over executed rows.
- ``path``: the commanded motion against the intended path (the poses, joined straight), at every
  physics step.
- ``tracking``: the measured against the commanded motion, by forward kinematics, at every physics
  step.
- ``drift``: the arm against a replayed recording, at the same time of the motion's own clock.
- ``loop_drift``: the arm against the chunks' motions joined end to end, at every physics step. A
  chunk that does not depart from the reference shifts everything after it: tracking and path cannot
  see that, and such shifts add up.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.rotations import geodesic_angle, interpolate_poses, se3_inverse
from strands_cosmos3.backends.replay import LimbRecording
from strands_cosmos3.checks import F64
from strands_cosmos3.collision import CollisionReport
from strands_cosmos3.control.executor import ExecutorState, ReferenceBlock
from strands_cosmos3.control.trajectory import PlannedMotion
from strands_cosmos3.sim.scene import SceneLimb
from strands_cosmos3.snapshots import Restorable
from strands_cosmos3.types import OFF_POSE_M, ErrorSummary, JointTrajectory, PoseTrajectory

_NONE = np.zeros(1)
_SHORT_M = 1e-4  # a shorter segment of the path is a stop


def between(T_a: F64, T_b: F64) -> tuple[F64, F64]:
    """Distances [N] in metres and angles [N] in radians between poses [N, 4, 4]."""
    return np.linalg.norm(T_a[:, :3, 3] - T_b[:, :3, 3], axis=1), geodesic_angle(
        T_a[:, :3, :3], T_b[:, :3, :3]
    )


@dataclass
class ChunkRecord:
    """One accepted chunk."""

    plan: JointTrajectory  # as given to the executor
    motion: PlannedMotion
    motion_from_s: float  # time of the motion's own clock at its start
    latency_ms: float  # from the request to acceptance, on the arm's clock
    inference_ms: float  # wall-clock time of inference and planning
    seam_rad_s: float  # difference of the fastest joint's velocity where it joins the motion
    q_reference_rad: F64  # the reference at its observation
    # by limb, the pose of the hand that it departs from; empty for a plan without poses
    limb_anchors: Mapping[str, F64]
    rows: int = 0  # executed, including the current one

    def executed(self, per_row: NDArray[Any] | None) -> NDArray[Any]:
        """Return the entries of a plan's array [T] that belong to executed rows."""
        assert per_row is not None  # JointTrajectory fills them all
        # a row due at once is merged into the start
        skipped = len(self.plan.t_s) - len(self.motion.stretched)
        return per_row[skipped : skipped + self.rows]


@dataclass
class EpisodeLog(Restorable):
    """Log of an episode; ``dt_s`` is the physics step. Errors are over all limbs, or of those
    that are named.
    """

    STATE: ClassVar[tuple[str, ...]] = (
        *("q_achieved", "gripper_achieved", "blocks", "chunk_of", "chunks", "actions"),
        *("counters", "fault", "held", "final_state"),
    )

    dt_s: float
    limbs: Mapping[str, SceneLimb]
    q_achieved: list[F64] = field(default_factory=list)
    gripper_achieved: list[F64] = field(default_factory=list)
    blocks: list[ReferenceBlock] = field(default_factory=list)
    chunk_of: list[NDArray[np.int_]] = field(default_factory=list)
    chunks: list[ChunkRecord] = field(default_factory=list)
    actions: list[F64] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    fault: str | None = None
    held: str | None = None
    final_state: ExecutorState | None = None

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the log."""
        return super().snapshot() | {"chunks": [copy.copy(chunk) for chunk in self.chunks]}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a snapshot."""
        super().restore(state)
        self.chunks = [copy.copy(chunk) for chunk in self.chunks]

    @property
    def duration_s(self) -> float:
        """Simulated duration of the motion."""
        return sum(map(len, self.blocks)) * self.dt_s

    def end_chunk(self, rows_begun: int) -> None:
        """Record that the present chunk was executed for that many rows."""
        if self.chunks:
            self.chunks[-1].rows = max(self.chunks[-1].rows, rows_begun)

    def step_block(self, block: ReferenceBlock, q: F64, gripper: F64) -> None:
        """Log a block of physics steps: the references, and the measurements after each step."""
        self.blocks.append(block)
        self.q_achieved.append(q)
        self.gripper_achieved.append(gripper)
        self.chunk_of.append(np.full(len(block), len(self.chunks) - 1))

    def steps(self) -> dict[str, int]:
        """Numbers of executed rows: total, clamped to a bound, slowed down, not converged, more
        than 1 mm off.
        """
        return {
            "total": sum(chunk.rows for chunk in self.chunks),
            "clamped": sum(int(chunk.executed(chunk.plan.clamped).sum()) for chunk in self.chunks),
            "stretched": sum(
                int(chunk.motion.stretched[: chunk.rows].sum()) for chunk in self.chunks
            ),
            "unconverged": sum(
                int((~chunk.executed(chunk.plan.converged)).sum()) for chunk in self.chunks
            ),
            "off_pose": sum(
                int((chunk.executed(chunk.plan.residual_m) > OFF_POSE_M).sum())
                for chunk in self.chunks
            ),
        }

    def collisions(self) -> tuple[CollisionReport, ...]:
        """Reports of the accepted chunks that name two bodies."""
        return tuple(
            chunk.plan.collision for chunk in self.chunks if chunk.plan.collision.bodies is not None
        )

    def latency_ms(self) -> dict[str, float]:
        """Percentiles of the chunks' latencies on the arm's clock."""
        return _percentiles([chunk.latency_ms for chunk in self.chunks])

    def inference_ms(self) -> dict[str, float]:
        """Percentiles of the wall-clock time of inference and planning."""
        return _percentiles([chunk.inference_ms for chunk in self.chunks])

    def seam_rad_s(self) -> dict[str, float]:
        """Percentiles of the differences in velocity where chunks join the motion; empty without
        a second chunk.
        """
        return (
            _percentiles([chunk.seam_rad_s for chunk in self.chunks[1:]])
            if len(self.chunks) > 1
            else {}
        )

    def ik_error(self) -> ErrorSummary:
        """The solver's residual over executed rows."""
        metres = [chunk.executed(chunk.plan.residual_m) for chunk in self.chunks]
        return ErrorSummary.of(
            _concatenate(metres),
            _concatenate([chunk.executed(chunk.plan.residual_rad) for chunk in self.chunks]),
        )

    def path_error(self, *names: str) -> ErrorSummary:
        """The commanded motion against the intended path."""
        distances, angles = [], []
        for limb in self._named(names):
            for chunk, at, nominal_s in self._chunk_steps():
                T_commanded = limb.kinematics.forward(self._q_commanded()[at, limb.columns])
                T_intended = _intended(
                    chunk.plan.limb_poses.get(limb.limb.name),
                    limb,
                    chunk.motion,
                    nominal_s,
                    chunk.plan.t_s,
                    T_commanded,
                )
                distance, angle = between(T_commanded, T_intended)
                distances.append(distance)
                angles.append(angle)
        return ErrorSummary.of(_concatenate(distances), _concatenate(angles))

    def tracking_error(self, *names: str) -> ErrorSummary:
        """The arm against the commanded motion."""
        return _over([between(*self._poses(limb)) for limb in self._named(names)])

    def between_hands(self) -> ErrorSummary | None:
        """The second limb's pose in the first one's against the commanded one, at every step;
        None for one limb.
        """
        if len(self.limbs) < 2:
            return None
        first, second = list(self.limbs.values())[:2]
        T_first_second = se3_inverse(first.T_world_base) @ second.T_world_base
        relative = [
            se3_inverse(a) @ T_first_second @ b
            for a, b in zip(self._poses(first), self._poses(second), strict=True)
        ]
        return ErrorSummary.of(*between(*relative))

    def loop_drift(self, *names: str) -> ErrorSummary:
        """The arm against the chunks' motions joined end to end.

        Chunk k departs from ``T_anchor`` where the reference was ``T_reference``. What follows is
        joined to what was by ``T_join[k] = T_join[k - 1] T_reference T_anchor^-1``.
        """
        return _over([self._loop_drift(limb) for limb in self._named(names)])

    def _loop_drift(self, limb: SceneLimb) -> tuple[F64, F64]:
        T_join, forward = [np.eye(4)], limb.kinematics.forward
        for chunk in self.chunks:
            jump, anchor = np.eye(4), chunk.limb_anchors.get(limb.limb.name)
            if anchor is not None:
                jump = forward(chunk.q_reference_rad[limb.columns]) @ se3_inverse(anchor)
            T_join.append(T_join[-1] @ jump)
        commanded, achieved = self._poses(limb)
        return between(np.stack(T_join)[np.concatenate(self.chunk_of) + 1] @ commanded, achieved)

    def _named(self, names: tuple[str, ...]) -> list[SceneLimb]:
        return [self.limbs[name] for name in names or self.limbs]

    def _poses(self, limb: SceneLimb) -> tuple[F64, F64]:
        """Commanded and achieved poses [M, 4, 4] of a limb's frame in its base."""
        forward, q_achieved = limb.kinematics.forward, np.concatenate(self.q_achieved)
        return forward(self._q_commanded()[:, limb.columns]), forward(q_achieved[:, limb.columns])

    def by_limb(self) -> dict[str, dict[str, ErrorSummary]]:
        """Path, tracking and loop drift of each limb, by name; none for one limb, whose they are
        in any case.
        """
        figures = {
            "path": self.path_error,
            "tracking": self.tracking_error,
            "loop_drift": self.loop_drift,
        }
        names = self.limbs if len(self.limbs) > 1 else ()
        return {name: {figure: error(name) for figure, error in figures.items()} for name in names}

    def drift(self, recording: LimbRecording | None) -> ErrorSummary | None:
        """The arm against a recording, if any."""
        steps = [
            (at, chunk.motion_from_s + nominal_s) for chunk, at, nominal_s in self._chunk_steps()
        ]
        if recording is None or not steps:
            return None
        motion_s = np.concatenate([when for _, when in steps])
        within = motion_s <= recording.duration_s
        q = np.concatenate(self.q_achieved)[np.concatenate([at for at, _ in steps])[within]]
        by_limb = recording.of_limbs(
            {name: len(limb.limb.joints) for name, limb in self.limbs.items()}
        )
        errors: list[tuple[F64, F64]] = []
        for name, limb in self.limbs.items():
            T_base_cosmos = (
                limb.kinematics.forward(q[:, limb.columns])
                @ recording.tool_frame(name).T_parent_cosmos
            )
            errors.append(between(T_base_cosmos, by_limb[name].at(motion_s[within])[0]))
        return _over(errors)

    def _q_commanded(self) -> F64:
        return np.concatenate([block.q_rad for block in self.blocks])

    def _chunk_steps(self) -> Iterator[tuple[ChunkRecord, NDArray[np.intp], F64]]:
        """Yield each chunk with the physics steps that followed it and their times on its clock;
        braking is left out.
        """
        chunk_of = np.concatenate(self.chunk_of)
        nominal_s = np.concatenate([block.nominal_s for block in self.blocks])
        for index, chunk in enumerate(self.chunks):
            at = np.flatnonzero((chunk_of == index) & np.isfinite(nominal_s))
            if len(at):
                yield chunk, at, nominal_s[at]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Every trajectory of the episode, for :meth:`Rollout.save_npz`."""
        q_ref, q = self._q_commanded(), np.concatenate(self.q_achieved)
        return {
            "t_s": (np.arange(len(q)) + 1) * self.dt_s,
            "q_commanded_rad": q_ref,
            "q_achieved_rad": q,
            "gripper_commanded": np.concatenate([block.gripper for block in self.blocks]),
            "gripper_achieved": np.concatenate(self.gripper_achieved),
            **{
                f"T_base_hand_{which}{'_' if limb.prefix else ''}{limb.prefix.rstrip('_')}": T
                for limb in self.limbs.values()
                for which, T in zip(("commanded", "achieved"), self._poses(limb), strict=True)
            },
            "chunk": np.concatenate(self.chunk_of),
            **({"action": np.concatenate(self.actions)} if self.actions else {}),
        }


def _percentiles(values: list[float]) -> dict[str, float]:
    array = np.array(values or [0.0])
    p50, p95 = np.percentile(array, [50, 95])
    return {"p50": float(p50), "p95": float(p95), "max": float(array.max())}


def _intended(
    poses: PoseTrajectory | None,
    limb: SceneLimb,
    motion: PlannedMotion,
    at_s: F64,
    row_s: F64,
    T_commanded: F64,
) -> F64:
    """Return the point [M, 4, 4] of the intended path that is nearest to each commanded pose, near
    its time.

    The path joins the poses, from the anchor on, by straight lines. A delay along it is not an
    error, so the foot of the perpendicular is compared, within two rows of the pose's time on the
    chunk's clock.
    """
    if poses is None:  # the path joins the angles by straight lines
        knots = motion.spline.q_rad[:, limb.columns].T  # the rows, and the reference at the start
        return limb.kinematics.forward(
            np.stack([np.interp(at_s, motion.nominal_s, column) for column in knots], axis=1)
        )
    T = np.concatenate((poses.T_base_anchor[None], poses.T_base_frame))
    t_s = np.concatenate(([0.0], row_s))
    corner = T[:, :3, 3]
    side = np.diff(corner, axis=0)
    length_sq = np.sum(side * side, axis=1)
    now = np.clip(np.searchsorted(t_s, at_s, side="right") - 1, 0, len(side) - 1)
    k = np.clip(now[:, None] + np.arange(-2, 3), 0, len(side) - 1)  # [M, 5] candidate sides
    elapsed = np.clip((at_s[:, None] - t_s[k]) / (t_s[k + 1] - t_s[k]), 0.0, 1.0)
    away = T_commanded[:, None, :3, 3] - corner[k]
    foot = np.clip(np.sum(away * side[k], axis=2) / np.maximum(length_sq[k], _SHORT_M**2), 0.0, 1.0)
    u = np.where(length_sq[k] > _SHORT_M**2, foot, elapsed)  # at a stop, the time decides
    distance = np.linalg.norm(away - u[..., None] * side[k], axis=2) + 1e-9 * np.abs(
        k - now[:, None]
    )
    best = np.argmin(distance, axis=1)[:, None]
    k, u = np.take_along_axis(k, best, 1)[:, 0], np.take_along_axis(u, best, 1)[:, 0]
    return interpolate_poses(T, t_s, t_s[k] + u * (t_s[k + 1] - t_s[k]))


def _over(errors: list[tuple[F64, F64]]) -> ErrorSummary:
    distances, angles = zip(*errors, strict=True)
    return ErrorSummary.of(np.concatenate(distances), np.concatenate(angles))


def _concatenate(parts: list[F64]) -> F64:
    whole = np.concatenate(parts) if parts else _NONE
    return whole if len(whole) else _NONE
