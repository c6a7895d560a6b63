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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.rotations import interpolate_poses, pose_distances, se3_inverse
from strands_cosmos3.backends.replay import LimbRecording
from strands_cosmos3.checks import F64
from strands_cosmos3.collision import CollisionReport
from strands_cosmos3.control.executor import ExecutorState
from strands_cosmos3.control.loop import AcceptedChunk, Tick
from strands_cosmos3.sim.scene import SceneLimb
from strands_cosmos3.snapshots import Restorable
from strands_cosmos3.types import OFF_POSE_M, ErrorSummary

_NONE = np.zeros(0)
_SHORT_M = 1e-4  # a shorter segment of the path is a stop


@dataclass
class EpisodeLog(Restorable):
    """Log of an episode; ``dt_s`` is the physics step."""

    STATE: ClassVar[tuple[str, ...]] = (
        *("ticks", "chunk_of", "chunks", "rows", "actions", "counters", "fault", "held"),
        "final_state",
    )

    dt_s: float
    limbs: Mapping[str, SceneLimb]
    ticks: list[Tick] = field(default_factory=list)
    chunk_of: list[NDArray[np.int_]] = field(default_factory=list)  # of a tick's physics steps
    chunks: list[AcceptedChunk] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # executed of each chunk, the current included
    actions: list[F64] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    fault: str | None = None
    held: str | None = None
    final_state: ExecutorState | None = None

    @property
    def duration_s(self) -> float:
        """Simulated duration of the motion."""
        return sum(len(tick.block) for tick in self.ticks) * self.dt_s

    def begin_chunk(self, chunk: AcceptedChunk, action: F64 | None) -> None:
        """Record a chunk, and its raw rows [T, D] if there are any."""
        self.chunks.append(chunk)
        self.rows.append(0)
        if action is not None:
            self.actions.append(action)

    def end_chunk(self, rows_begun: int) -> None:
        """Record that the present chunk was executed for that many rows."""
        if self.chunks:
            self.rows[-1] = max(self.rows[-1], rows_begun)

    def _executed(self, name: str) -> F64:
        """An array of the plans, over the executed rows."""
        parts = [np.zeros(0)]
        for chunk, rows in zip(self.chunks, self.rows, strict=True):
            # a row due at once is merged into the start
            skipped = len(chunk.plan.t_s) - len(chunk.motion.stretched)
            parts.append(getattr(chunk.plan, name)[skipped : skipped + rows])
        return np.concatenate(parts)

    def add(self, tick: Tick) -> None:
        """Log a tick: the references of its physics steps, and the measurements after each."""
        self.ticks.append(tick)
        self.chunk_of.append(np.full(len(tick.block), len(self.chunks) - 1))

    def _commanded(self, name: str) -> F64:
        return np.concatenate([getattr(tick.block, name) for tick in self.ticks])

    def _achieved(self, name: str) -> F64:
        return np.concatenate([getattr(tick, name) for tick in self.ticks])

    def steps(self) -> dict[str, int]:
        """Numbers of executed rows: total, clamped to a bound, slowed down, not converged, more
        than 1 mm off.
        """
        stretched = [
            chunk.motion.stretched[:rows].sum()
            for chunk, rows in zip(self.chunks, self.rows, strict=True)
        ]
        converged = self._executed("converged")
        return {
            "total": sum(self.rows),
            "clamped": int(self._executed("clamped").sum()),
            "stretched": int(sum(stretched)),
            "unconverged": int(len(converged) - converged.sum()),
            "off_pose": int((self._executed("residual_m") > OFF_POSE_M).sum()),
        }

    def collisions(self) -> tuple[CollisionReport, ...]:
        """Reports of the accepted chunks that name two bodies."""
        reports = [chunk.plan.collision for chunk in self.chunks]
        return tuple(report for report in reports if report.bodies is not None)

    def percentiles(self, name: str, first: int = 0) -> dict[str, float]:
        """Percentiles of a number of the chunks, from the ``first`` chunk on."""
        values = [getattr(chunk, name) for chunk in self.chunks[first:]] or [0.0]
        p50, p95 = np.percentile(values, [50, 95])
        return {"p50": float(p50), "p95": float(p95), "max": float(max(values))}

    def seam_rad_s(self) -> dict[str, float]:
        """Percentiles of the differences in velocity where chunks join the motion; empty without
        a second chunk.
        """
        return self.percentiles("seam_rad_s", 1) if len(self.chunks) > 1 else {}

    def ik_error(self) -> ErrorSummary:
        """The solver's residual over executed rows."""
        return _over([(self._executed("residual_m"), self._executed("residual_rad"))])

    def errors(self, *names: str) -> dict[str, ErrorSummary]:
        """``path``, ``tracking`` and ``loop_drift`` over the named limbs, by default all."""
        limbs = [self.limbs[name] for name in names or self.limbs]
        poses = [self._poses(limb) for limb in limbs]
        return {
            "path": _over([part for limb in limbs for part in self._path(limb)]),
            "tracking": _over([pose_distances(*of_limb) for of_limb in poses]),
            "loop_drift": _over(list(map(self._loop_drift, limbs, poses))),
        }

    def by_limb(self) -> dict[str, dict[str, ErrorSummary]]:
        """The errors of each limb, by name; none for one limb, whose they are in any case."""
        return {name: self.errors(name) for name in self.limbs if len(self.limbs) > 1}

    def _path(self, limb: SceneLimb) -> Iterator[F64]:
        """The commanded motion against the intended path, chunk by chunk."""
        q_rad = self._commanded("q_rad")[:, limb.columns]
        for chunk, at, nominal_s in self._chunk_steps():
            T_commanded = limb.kinematics.forward(q_rad[at])
            yield pose_distances(T_commanded, _intended(chunk, limb, nominal_s, T_commanded))

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
        return ErrorSummary.of(*pose_distances(*relative))

    def _loop_drift(self, limb: SceneLimb, poses: tuple[F64, F64]) -> F64:
        """The arm against the chunks' motions joined end to end.

        Chunk k departs from ``T_anchor`` where the reference was ``T_reference``. What follows is
        joined to what was by ``T_join[k] = T_join[k - 1] T_reference T_anchor^-1``.
        """
        T_join = [np.eye(4)]
        forward = limb.kinematics.forward
        for chunk in self.chunks:
            jump = np.eye(4)
            anchor = chunk.limb_anchors.get(limb.limb.name)
            if anchor is not None:
                jump = forward(chunk.q_reference_rad[limb.columns]) @ se3_inverse(anchor)
            T_join.append(T_join[-1] @ jump)
        commanded, achieved = poses
        return pose_distances(
            np.stack(T_join)[np.concatenate(self.chunk_of) + 1] @ commanded, achieved
        )

    def _poses(self, limb: SceneLimb) -> tuple[F64, F64]:
        """Commanded and achieved poses [M, 4, 4] of a limb's frame in its base."""
        forward = limb.kinematics.forward
        columns = limb.columns
        commanded = self._commanded("q_rad")
        achieved = self._achieved("q_rad")
        return forward(commanded[:, columns]), forward(achieved[:, columns])

    def drift(self, recording: LimbRecording | None) -> ErrorSummary | None:
        """The arm against a recording, if any."""
        steps = [
            (at, chunk.motion_from_s + nominal_s) for chunk, at, nominal_s in self._chunk_steps()
        ]
        if recording is None or not steps:
            return None
        at, motion_s = (np.concatenate(parts) for parts in zip(*steps, strict=True))
        within = motion_s <= recording.duration_s
        q = self._achieved("q_rad")[at[within]]
        by_limb = recording.of_limbs(limb.limb for limb in self.limbs.values())
        errors: list[F64] = []
        for name, limb in self.limbs.items():
            T_base_frame = limb.kinematics.forward(q[:, limb.columns])
            T_base_cosmos = T_base_frame @ recording.tool_frame(name).T_parent_cosmos
            errors.append(pose_distances(T_base_cosmos, by_limb[name].at(motion_s[within])[0]))
        return _over(errors)

    def _chunk_steps(self) -> Iterator[tuple[AcceptedChunk, NDArray[np.intp], F64]]:
        """Yield each chunk with the physics steps that followed it and their times on its clock;
        braking is left out.
        """
        chunk_of = np.concatenate(self.chunk_of)
        nominal_s = self._commanded("nominal_s")
        for index, chunk in enumerate(self.chunks):
            at = np.flatnonzero((chunk_of == index) & np.isfinite(nominal_s))
            if len(at):
                yield chunk, at, nominal_s[at]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Every trajectory of the episode, for :meth:`Rollout.save_npz`."""
        q = self._achieved("q_rad")
        return {
            "t_s": (np.arange(len(q)) + 1) * self.dt_s,
            "q_commanded_rad": self._commanded("q_rad"),
            "q_achieved_rad": q,
            "gripper_commanded": self._commanded("gripper"),
            "gripper_achieved": self._achieved("gripper"),
            **{
                f"T_base_hand_{which}_{limb.prefix}".rstrip("_"): T
                for limb in self.limbs.values()
                for which, T in zip(("commanded", "achieved"), self._poses(limb), strict=True)
            },
            "chunk": np.concatenate(self.chunk_of),
            **({"action": np.concatenate(self.actions)} if self.actions else {}),
        }


def _intended(chunk: AcceptedChunk, limb: SceneLimb, at_s: F64, T_commanded: F64) -> F64:
    """Return the point [M, 4, 4] of the intended path that is nearest to each commanded pose, near
    its time.

    The path joins the poses, from the anchor on, by straight lines. A delay along it is not an
    error, so the foot of the perpendicular is compared, within two rows of the pose's time on the
    chunk's clock.
    """
    poses = chunk.plan.limb_poses.get(limb.limb.name)
    motion = chunk.motion
    if poses is None:  # the path joins the angles by straight lines
        knots = motion.spline.q_rad[:, limb.columns].T  # the rows, and the reference at the start
        return limb.kinematics.forward(
            np.stack([np.interp(at_s, motion.nominal_s, column) for column in knots], axis=1)
        )
    T = np.concatenate((poses.T_base_anchor[None], poses.T_base_frame))
    t_s = np.concatenate(([0.0], chunk.plan.t_s))
    corner = T[:, :3, 3]
    last = len(T) - 2
    now = np.clip(np.searchsorted(t_s, at_s, side="right") - 1, 0, last)[:, None]
    k = np.clip(now + np.arange(-2, 3), 0, last)  # [M, 5] candidate sides
    side = np.diff(corner, axis=0)[k]
    duration_s = np.diff(t_s)[k]
    length_sq = np.sum(side * side, axis=2)
    elapsed = np.clip((at_s[:, None] - t_s[k]) / duration_s, 0.0, 1.0)
    away = T_commanded[:, None, :3, 3] - corner[k]
    foot = np.clip(np.sum(away * side, axis=2) / np.maximum(length_sq, _SHORT_M**2), 0.0, 1.0)
    u = np.where(length_sq > _SHORT_M**2, foot, elapsed)  # at a stop, the time decides
    distance = np.linalg.norm(away - u[..., None] * side, axis=2) + 1e-9 * np.abs(k - now)
    nearest = np.arange(len(k)), np.argmin(distance, axis=1)
    return interpolate_poses(T, t_s, (t_s[k] + u * duration_s)[nearest])


def _over(errors: Sequence[F64 | tuple[F64, F64]]) -> ErrorSummary:
    """Of distances and angles in parts; of none they are zero."""
    wholes = (np.concatenate(parts) for parts in zip((_NONE, _NONE), *errors, strict=True))
    return ErrorSummary.of(*(whole if len(whole) else np.zeros(1) for whole in wholes))
