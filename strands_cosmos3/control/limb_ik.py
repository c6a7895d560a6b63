"""Inverse kinematics of a robot's limbs: poses of every limb in, the angles of all joints out.

Independent limbs are solved alone, each exactly as a single arm is; limbs that share joints, such
as a waist, are solved together. All joints form one trajectory, and one factor stretches its time
for all of them, so that two hands keep their relative pose. Limbs are joined with an embodiment's
columns by name.

Legend: L limbs in the robot's order, T rows, n joints of all limbs, nq the model's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.arrays import rigid, trailing
from strands_cosmos3.actions.decode import LimbPoses, decode_limbs, to_frame
from strands_cosmos3.actions.normalization import ActionStats
from strands_cosmos3.checks import F64, of_grippers, positive, typed
from strands_cosmos3.collision import CollisionReport
from strands_cosmos3.control.collision_check import CollisionCheck
from strands_cosmos3.control.ik import (
    LIMIT_MARGIN_RAD,
    START_TOLERANCE_RAD,
    IKSolution,
    MinkIKBridge,
)
from strands_cosmos3.control.look_ahead import StepBounds
from strands_cosmos3.control.stacked import StackedSolver
from strands_cosmos3.control.targets import MAX_STRETCH
from strands_cosmos3.embodiments import LimbColumns
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.limits import joined_limits, robot_limits
from strands_cosmos3.robots.model import base_pose, home_configuration, load_robot
from strands_cosmos3.robots.spec import Limb, RobotSpec, join_limbs
from strands_cosmos3.types import ActionChunk, JointTrajectory, PoseTrajectory

__all__ = ["LimbIK", "LimbPlan", "LimbSolution"]


@dataclass(frozen=True, eq=False)
class LimbSolution:
    """Configurations [T, nq], each limb's own solution by name, and what the check for collisions
    found.

    A limb's own ``q_rad`` moves its joints only.
    """

    q_rad: F64
    by_limb: Mapping[str, IKSolution]
    collision: CollisionReport

    @property
    def residual_m(self) -> F64:
        """[L, T] distances from the poses."""
        return np.stack([one.residual_m for one in self.by_limb.values()])

    @property
    def residual_rad(self) -> F64:
        """[L, T] angles from the poses."""
        return np.stack([one.residual_rad for one in self.by_limb.values()])

    @property
    def converged(self) -> NDArray[np.bool_]:
        """[L, T] whether both residuals are within tolerance."""
        return np.stack([one.converged for one in self.by_limb.values()])

    @property
    def clamped(self) -> NDArray[np.bool_]:
        """[L, T] whether a joint or velocity bound is active."""
        return np.stack([one.clamped for one in self.by_limb.values()])


@dataclass(frozen=True, eq=False)
class LimbPlan:
    """A chunk as motion of all limbs.

    Args:
        trajectory: Angles [T, n] of all joints, limb by limb; residuals are the worst limb's. Its
            ``gripper`` is [T] of a robot with one gripper, [T, G] of another number of them, and
            None if the rows move none.
        poses: The commanded poses of each limb's Cosmos frame in its base; ``poses.grippers`` [T,
            G].
        solution: The solution of the inverse kinematics.
    """

    trajectory: JointTrajectory
    poses: LimbPoses
    solution: LimbSolution


class LimbIK:
    """Forward and inverse kinematics of a robot's limbs. Poses of a limb are in its own base.

    Args:
        robot: A robot, its name, or the path of its TOML file.
        check_collisions: Whether rows are checked for collisions, of limbs with each other as well.
            A single arm looks for a way around; several limbs are stopped together.
        model: The robot's model, if it is compiled already.
        shared_weight: How readily joints turn that limbs share, from 0 (they stay where they are)
            to 1 (as all others).

    Attributes:
        limits: Limits of all joints, limb by limb, for :func:`control.trajectory.plan_motion`.
        bridges: The solver of each limb, by name.
        q_address: [n] addresses of the joints in ``qpos``.
        home: [nq] configuration at home, grippers open; T_world_base: [4, 4] pose of each limb's
            base, by name.
        between: The check of several limbs; None for one, if it is off, or if the model has no
            collision geometry.

    Raises:
        ConfigError, UnknownNameError, InputError, FrameError: The robot or its model cannot be
            used.
    """

    @typed()
    def __init__(
        self,
        robot: RobotSpec | str | Path = "panda",
        check_collisions: bool = True,
        model: mujoco.MjModel | None = None,
        shared_weight: float = 0.0,
    ):
        self.robot = get_robot(robot)
        self.model = load_robot(self.robot) if model is None else model
        alone = len(self.robot.limbs) == 1
        limits = robot_limits(self.model, self.robot)
        of_limbs = [limb.joints for limb in self.robot.limbs]
        self.limits: JointLimits = (
            next(iter(limits.values())) if alone else joined_limits(list(limits.values()), of_limbs)
        )
        self.home: F64 = home_configuration(self.model, self.robot)
        self.T_world_base: Mapping[str, F64] = {
            limb.name: base_pose(self.model, limb) for limb in self.robot.limbs
        }
        self.bridges = {
            limb.name: MinkIKBridge(
                self.model,
                limb.frame,
                limb.frame_type,
                limits=limits[limb.name],
                posture_rad=limb.home_rad,
                check_collisions=check_collisions and alone,
            )
            for limb in self.robot.limbs
        }
        joints = [self.model.joint(name).id for name in self.robot.joints]
        self.q_address: NDArray[np.intp] = self.model.jnt_qposadr[joints].astype(np.intp)
        if not 0 <= shared_weight <= 1:
            raise InputError(f"shared_weight must be between 0 and 1, got {shared_weight!r}.")
        self.shared_weight = shared_weight
        between = CollisionCheck(self.model, joints) if check_collisions and not alone else None
        self.between = between if between is not None and len(between.pairs) else None

    def forward(self, qpos: F64) -> dict[str, F64]:
        """Return the pose [4, 4] of each limb's frame in its base, at a configuration [nq]."""
        return {
            name: np.linalg.inv(self.T_world_base[name]) @ bridge.ee_pose(qpos)
            for name, bridge in self.bridges.items()
        }

    def tool_frame(self, limb: Limb, columns: LimbColumns, qpos: F64) -> F64:
        """Return ``T_frame_cosmos`` [4, 4] of a limb's columns; FrameError if the robot lacks
        the frame they are fixed to.
        """
        tool = columns.tool_frame
        bridge = self.bridges[self.robot.limb(limb.name).name]
        return bridge.frame_in_ee(limb.frame_called(tool.parent), qpos) @ tool.T_parent_cosmos

    def solve(
        self, T_base_frame: Mapping[str, F64], q_init: F64, dt_s: float | None = None
    ) -> LimbSolution:
        """Solve for the angles that take every limb's frame through its poses.

        Args:
            T_base_frame: By the limb's name, [T, 4, 4] poses of its frame in its base, for every
                limb.
            q_init: [nq] configuration before the first row.
            dt_s: Duration of a row, as in :meth:`MinkIKBridge.solve`.

        Raises:
            InputError, ShapeError, NonFiniteError: A limb's poses are missing or malformed, or a
                limb has other rows.
        """
        targets = self._in_world(T_base_frame)
        q = next(iter(self.bridges.values())).configuration(q_init, "q_init")
        dt_s = None if dt_s is None else positive(dt_s, "dt_s")
        if self.robot.shared_joints:
            return self._stopped_together(targets, q, self._solve_stacked(targets, q, dt_s))
        found = {
            name: bridge.solve(targets[name], q, dt_s) for name, bridge in self.bridges.items()
        }
        rows = np.repeat(q[None], len(next(iter(targets.values()))), axis=0)
        for name, bridge in self.bridges.items():
            rows[:, bridge.q_address] = found[name].q_rad[:, bridge.q_address]
        if self.between is None:
            return LimbSolution(rows, found, next(iter(found.values())).collision)
        return self._stopped_together(
            targets, q, LimbSolution(rows, found, self.between.examine(q, rows))
        )

    def _solve_stacked(self, targets: dict[str, F64], q: F64, dt_s: float | None) -> LimbSolution:
        """Solve for all limbs together; shared joints turn as readily as ``shared_weight`` lets
        them.
        """
        limits, start, names = self.limits, q[self.q_address], self.robot.joints
        if (outside := limits.outside(start, START_TOLERANCE_RAD)) is not None:
            raise InputError(
                f"the rows cannot start here: {outside}. Move the arms inside first, e.g. to "
                "their home."
            )
        low, high = limits.q_min + LIMIT_MARGIN_RAD, limits.q_max - LIMIT_MARGIN_RAD
        reach = None if dt_s is None else limits.velocity * dt_s
        bounds = StepBounds(np.minimum(low, start), np.maximum(high, start), reach)
        own = {
            limb.name: np.array([names.index(joint) for joint in limb.joints])
            for limb in self.robot.limbs
        }
        weight = np.array(
            [self.shared_weight if name in self.robot.shared_joints else 1.0 for name in names]
        )
        posture = start.copy()
        for name, joints in own.items():
            posture[joints] = self.bridges[name].posture_rad
        solver = StackedSolver(
            [bridge.linearize for bridge in self.bridges.values()], list(own.values()), weight
        )
        angles, iterations = solver.solve(list(targets.values()), q, start, bounds, posture)
        rows = np.repeat(q[None], len(angles), axis=0)
        rows[:, self.q_address] = angles
        before = np.vstack((start, angles[:-1]))
        ends = np.array([bounds.around(row) for row in before])
        at_bound = (weight > 0) & ((angles <= ends[:, 0] + 1e-9) | (angles >= ends[:, 1] - 1e-9))
        by_limb = {
            name: IKSolution(
                rows,
                *bridge.residuals(targets[name], rows),
                np.asarray(at_bound[:, own[name]].any(axis=1)),
                iterations,
            )
            for name, bridge in self.bridges.items()
        }
        report = CollisionReport() if self.between is None else self.between.examine(q, rows)
        return LimbSolution(rows, by_limb, report)

    def _in_world(self, T_base_frame: object) -> dict[str, F64]:
        names = list(self.bridges)
        given = cast("Mapping[str, Any]", T_base_frame if isinstance(T_base_frame, Mapping) else {})
        if set(given) != set(names):
            raise InputError(
                f"poses must be given by limb, for {', '.join(names)}; got {T_base_frame!r:.80}."
            )
        poses = {name: rigid(given[name], f"poses of {name!r}", leading=1) for name in names}
        if len({len(T) for T in poses.values()}) > 1:
            raise InputError(
                "limbs need as many poses each, got "
                f"{', '.join(f'{len(T)} of {k}' for k, T in poses.items())}."
            )
        return {name: self.T_world_base[name] @ T for name, T in poses.items()}

    def _stopped_together(
        self, targets: dict[str, F64], q: F64, solution: LimbSolution
    ) -> LimbSolution:
        """Hold all limbs ahead of the first row in collision."""
        report, check = solution.collision, self.between
        if check is None or report.row is None:
            return solution
        rows, held_from = check.hold(q, solution.q_rad[: report.row], len(solution.q_rad))
        by_limb: dict[str, IKSolution] = {}
        for name, one in solution.by_limb.items():
            residual_m, residual_rad = self.bridges[name].residuals(targets[name], rows)
            by_limb[name] = replace(
                one, q_rad=rows, residual_m=residual_m, residual_rad=residual_rad
            )
        return LimbSolution(rows, by_limb, replace(report, held_from=held_from))

    def _grippers(self, driven: Mapping[str, PoseTrajectory]) -> F64 | None:
        """Open fractions of the robot's grippers, or None if the rows move none of them."""
        columns = {
            limb.name: driven[limb.name].gripper
            for limb in self.robot.limbs
            if limb.gripper is not None
        }
        moved = [column for column in columns.values() if column is not None]
        if moved and len(moved) < len(columns):
            still = ", ".join(name for name, column in columns.items() if column is None)
            raise ConfigError(
                f"the rows do not move the gripper of {still}, but others of {self.robot.name!r}."
            )
        return of_grippers(np.stack(moved, axis=-1)) if moved else None

    @typed()
    def plan(
        self,
        chunk: ActionChunk,
        q_anchor: F64,
        stats: ActionStats | str | Path | None = None,
        t_capture_s: float = 0.0,
    ) -> LimbPlan:
        """Return the motion of all limbs that follows a chunk of pose deltas from a configuration
        [nq].

        Rows that are too fast are kept, up to :data:`MAX_STRETCH`; the executor stretches time for
        all limbs at once.

        Raises:
            ConfigError: The robot and the chunk's embodiment have different limbs.
            FrameError: A limb lacks the frame that its columns are fixed to.
            ActionSpaceError, StatisticsError, InputError: As :func:`decode_limbs` and
                :meth:`solve`.
        """
        q = trailing(q_anchor, "q_anchor", (self.model.nq,), leading=0)
        joined, here = join_limbs(self.robot, chunk.embodiment), self.forward(q)
        tools = {limb.name: self.tool_frame(limb, columns, q) for limb, columns in joined}
        poses = decode_limbs(chunk, {name: here[name] @ T for name, T in tools.items()}, stats)
        driven = {
            limb.name: to_frame(
                poses.by_limb[limb.name], np.linalg.inv(tools[limb.name]), limb.frame
            )
            for limb, _ in joined
        }
        assert chunk.fps is not None  # ActionChunk resolved it
        solution = self.solve(
            {name: one.T_base_frame for name, one in driven.items()}, q, MAX_STRETCH / chunk.fps
        )
        only = driven[joined[0][0].name] if len(joined) == 1 else None
        trajectory = JointTrajectory(
            solution.q_rad[:, self.q_address],
            chunk.row_times_s,
            self._grippers(driven),
            only,
            solution.residual_m.max(axis=0),
            solution.residual_rad.max(axis=0),
            np.asarray(solution.converged.all(axis=0)),
            np.asarray(solution.clamped.any(axis=0)),
            t_capture_s,
            solution.collision,
            {} if only is not None else driven,
        )
        return LimbPlan(trajectory, poses, solution)
