"""Inverse kinematics of a robot's limbs: poses of every limb in, the angles of all joints out.

Independent limbs are solved one by one; limbs that share joints, such as a waist, are solved
together. All joints form one trajectory, and one factor stretches its time for all of them, so that
two hands keep their relative pose. Limbs are joined with an embodiment's columns by name.

Legend: L limbs in the robot's order, T rows, n joints of all limbs, nq the model's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.decode import LimbPoses, decode_joint_chunk
from strands_cosmos3.checks import F64, of_grippers, within
from strands_cosmos3.collision import CollisionReport
from strands_cosmos3.control.collision_check import CollisionCheck
from strands_cosmos3.control.holding import hold_rows
from strands_cosmos3.control.ik import (
    IKSolution,
    MinkIKBridge,
    configurations,
    posture_step,
)
from strands_cosmos3.control.levenberg_marquardt import LevenbergMarquardt
from strands_cosmos3.control.look_ahead import StepBounds
from strands_cosmos3.control.targets import DrivenFrame, Stats, driven_poses, tool_frame_in_ee
from strands_cosmos3.embodiments import Embodiment, LimbColumns
from strands_cosmos3.errors import ConfigError, FrameError
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.limits import joined_limits, robot_limits
from strands_cosmos3.robots.model import (
    LimbKinematics,
    base_pose,
    frame_gap,
    joint_ids,
    kinematics_of,
    load_robot,
)
from strands_cosmos3.robots.spec import Limb, RobotSpec, join_arms, rotation_weight_m
from strands_cosmos3.types import OFF_POSE_BOUND_M, ActionChunk, JointTrajectory, PoseTrajectory

__all__ = ["MAX_STRETCH", "LimbIK", "LimbPlan"]

MAX_STRETCH = 4.0  # multiple of the joints' speed limits that a row of a plan may take


@dataclass(frozen=True, eq=False)
class LimbPlan:
    """A chunk as motion of all limbs.

    Args:
        trajectory: Angles [T, n] of all joints, limb by limb; residuals are the worst limb's. Its
            ``gripper`` is [T] of a robot with one gripper, [T, G] of another number of them, and
            None if the rows move none.
        poses: The commanded poses of each limb's Cosmos frame in its base; ``poses.grippers`` [T,
            G].
        solution: The solution of the inverse kinematics, by limb in the robot's order.
    """

    trajectory: JointTrajectory
    poses: LimbPoses
    solution: IKSolution


@dataclass(frozen=True, eq=False)
class LimbGeometry:
    """The geometry of a robot's limbs (an :class:`~strands_cosmos3.types.ArmGeometry`); joints
    other than theirs, such as fingers, stay as in ``q`` [nq].
    """

    ik: LimbIK
    q: F64

    def limb_poses(self, q_rad: F64) -> dict[str, F64]:
        """As :meth:`ArmGeometry.limb_poses`."""
        return {
            name: kinematics.forward(q_rad[:, self.ik.columns[name]])
            for name, kinematics in self.ik.kinematics.items()
        }

    def examine(self, q_rad: F64) -> CollisionReport:
        """As :meth:`ArmGeometry.examine`."""
        if (check := self.ik.collisions) is None:
            return CollisionReport()
        rows = configurations(self.q, self.ik.q_address, q_rad)
        return check.examine(rows[0], rows[1:])


class LimbIK:
    """Forward and inverse kinematics of a robot's limbs. Poses of a limb are in its own base.

    Args:
        robot: A robot, its name, or the path of its TOML file.
        check_collisions: Whether rows are checked for collisions, of limbs with each other as well.
            A single arm looks for a way around; several limbs are stopped together.
        model: The robot's model, if it is compiled already.
        shared_weight: How readily joints turn that limbs share, from 0 (they stay where they are)
            to 1 (as all others).
        limits: By the limb's name, limits in place of the robot's, as :class:`MinkIKBridge` takes
            them.
        off_pose_bound_m: Distance from its pose up to which a row of a plan is executed; the first
            that misses it by more, and those after it, hold the arm.

    Attributes:
        limits: Limits of all joints, limb by limb, for :func:`control.trajectory.plan_motion`.
        bridges: The solver of each limb, by name.
        q_address: [n] addresses of the joints in ``qpos``.
        columns: Of each limb, by name, the indices of its joints among these n.
        home: [nq] configuration at home, grippers open; T_world_base: [4, 4] pose of each limb's
            base, by name.
        collisions: The check of the rows; None if it is off or the model has no collision geometry.

    Raises:
        ConfigError, UnknownNameError, InputError, FrameError: The robot or its model cannot be
            used.
    """

    def __init__(
        self,
        robot: RobotSpec | str | Path = "panda",
        check_collisions: bool = True,
        model: mujoco.MjModel | None = None,
        shared_weight: float = 0.0,
        limits: Mapping[str, JointLimits | None] | None = None,
        off_pose_bound_m: float = OFF_POSE_BOUND_M,
    ):
        self.robot = get_robot(robot)
        self._off_pose_bound_m = off_pose_bound_m
        self.model = load_robot(self.robot) if model is None else model
        within(shared_weight, "shared_weight", 0.0, 1.0)
        limbs = self.robot.limbs
        alone = len(self.robot.limbs) == 1
        limits = robot_limits(self.model, self.robot) if limits is None else limits
        self.bridges = {
            limb.name: MinkIKBridge(
                self.model,
                limb.frame,
                limb.frame_type,
                limits=limits[limb.name],
                posture_rad=limb.home_rad,
                check_collisions=check_collisions and alone,
                rotation_weight_m=rotation_weight_m(limb.rotation_weight_m, len(limb.joints)),
            )
            for limb in limbs
        }
        parts = [bridge.limits for bridge in self.bridges.values()]
        self.limits: JointLimits = joined_limits(parts, [limb.joints for limb in limbs])
        joints = joint_ids(self.model, self.robot.joints)
        self.q_address: NDArray[np.intp] = self.model.jnt_qposadr[joints].astype(np.intp)
        self.columns: Mapping[str, list[int]] = {
            limb.name: [self.robot.joints.index(joint) for joint in limb.joints] for limb in limbs
        }
        self.home = self._home()
        self.T_world_base: Mapping[str, F64] = {
            limb.name: base_pose(self.model, limb) for limb in limbs
        }
        self.collisions: CollisionCheck | None = self.bridges[limbs[0].name].collisions
        if check_collisions and not alone:
            self.collisions = CollisionCheck.of(self.model, joints)
        shared = self.robot.shared_joints
        self._weight = np.array(
            [shared_weight if name in shared else 1.0 for name in self.robot.joints]
        )

    @cached_property
    def _together(self) -> LevenbergMarquardt:
        """The solver of limbs that share joints."""
        joints = joint_ids(self.model, self.robot.joints)
        frames = [bridge.frame for bridge in self.bridges.values()]
        dof_address = self.model.jnt_dofadr[joints].astype(np.intp)
        rotation_m = [bridge.rotation_m for bridge in self.bridges.values()]
        return LevenbergMarquardt(
            self.model, frames, self.q_address, dof_address, rotation_m, self._weight
        )

    @cached_property
    def kinematics(self) -> Mapping[str, LimbKinematics]:
        """Kinematics of each limb, by name."""
        return {limb.name: kinematics_of(self.model, limb) for limb in self.robot.limbs}

    def _home(self) -> F64:
        q = np.array(self.model.qpos0)
        model = self.model
        q[self.q_address] = self.robot.home_rad
        for gripper in filter(None, (limb.gripper for limb in self.robot.limbs)):
            for joint in map(model.joint, range(model.njnt)):
                if joint.name.endswith(gripper.joints):  # a host may put a prefix before
                    q[joint.qposadr] = gripper.opening.open_value
        return q

    def forward(self, qpos: F64) -> dict[str, F64]:
        """Return the pose [4, 4] of each limb's frame in its base, at a configuration [nq]."""
        return {
            name: np.linalg.inv(self.T_world_base[name]) @ bridge.ee_pose(qpos)
            for name, bridge in self.bridges.items()
        }

    def join(self, embodiment: Embodiment) -> tuple[tuple[Limb, LimbColumns], ...]:
        """Return each limb with its columns, by name; a single limb is joined with a single one
        whatever they are called.
        """
        return join_arms(self.robot, embodiment)

    def tool_frame(self, limb: Limb, columns: LimbColumns, qpos: F64) -> F64:
        """Return ``T_frame_cosmos`` [4, 4] of a limb's columns; FrameError if the robot lacks
        the frame they are fixed to.
        """
        tool = columns.tool_frame
        bridge = self.bridges[limb.name]
        with self.robot.named_in_errors():
            if gap := frame_gap(bridge.model, limb, tool.parent):
                raise FrameError(f"robot {self.robot.name!r} cannot follow the rows: {gap}.")
        parent = limb.frame_called(tool.parent)
        return tool_frame_in_ee(replace(tool, parent=parent), bridge, qpos)

    def solve(
        self, T_base_frame: Mapping[str, F64], q_init: F64, dt_s: float | None = None
    ) -> IKSolution:
        """Solve for the angles that take each limb's frame through its poses; residuals are [L, T].

        Args:
            T_base_frame: By the limb's name, [T, 4, 4] poses of its frame in its base, for every
                limb.
            q_init: [nq] configuration before the first row.
            dt_s: Duration of a row, as in :meth:`MinkIKBridge.solve`.

        Raises:
            InputError, NonFiniteError: A limb's poses are malformed.
        """
        targets = {name: self.T_world_base[name] @ T_base_frame[name] for name in self.bridges}
        if self.robot.shared_joints:
            by_limb = self._solve_together(targets, q_init, dt_s)
        else:
            by_limb = [
                bridge.solve(targets[name], q_init, dt_s) for name, bridge in self.bridges.items()
            ]
        rows = np.repeat(q_init[None], len(by_limb[0].q_rad), axis=0)
        for bridge, of_limb in zip(self.bridges.values(), by_limb, strict=True):
            rows[:, bridge.q_address] = of_limb.q_rad[:, bridge.q_address]
        solution = IKSolution.of_limbs(rows, by_limb, by_limb[0].collision)
        if len(by_limb) == 1 or self.collisions is None:
            return solution
        rows, report = self.collisions.held_before(q_init, rows)
        if report.row is None:
            return replace(solution, collision=report)
        residuals = [bridge.residuals(targets[name], rows) for name, bridge in self.bridges.items()]
        residual_m, residual_rad = np.swapaxes(residuals, 0, 1)
        return replace(
            solution,
            q_rad=rows,
            residual_m=residual_m,
            residual_rad=residual_rad,
            collision=report,
        )

    def _solve_together(
        self, targets: dict[str, F64], q: F64, dt_s: float | None
    ) -> list[IKSolution]:
        """Solve for all limbs together; shared joints turn as readily as ``shared_weight`` lets
        them.
        """
        start = q[self.q_address]
        bounds = StepBounds.of(self.limits, start, dt_s)
        posture = start.copy()
        for name, bridge in self.bridges.items():
            posture[self.columns[name]] = bridge.posture_rad
        n_rows = len(next(iter(targets.values())))
        rows = np.repeat(q[None], n_rows, axis=0)
        iterations = np.zeros(n_rows, dtype=int)
        angles, before = start, q
        for i, T in enumerate(zip(*targets.values(), strict=True)):
            angles, _, iterations[i] = self._together.solve(
                T, before, posture_step(posture, angles), bounds.around(angles)
            )
            rows[i, self.q_address] = angles
            before = rows[i]
        active = bounds.active(start, rows[:, self.q_address]) & (self._weight > 0)
        return [
            IKSolution(
                rows,
                *bridge.residuals(targets[name], rows),
                np.asarray(active[:, self.columns[name]].any(axis=1)),
                iterations,
            )
            for name, bridge in self.bridges.items()
        ]

    def _grippers(self, driven: Mapping[str, PoseTrajectory]) -> F64 | None:
        """Open fractions of the robot's grippers, or None if the rows move none of them."""
        owners = [limb.name for limb in self.robot.limbs if limb.gripper is not None]
        moved = {name: driven[name].gripper for name in owners}
        columns = [column for column in moved.values() if column is not None]
        if not columns:
            return None
        if len(columns) < len(owners):
            still = ", ".join(name for name in owners if moved[name] is None)
            raise ConfigError(
                f"the rows do not move the gripper of {still}, but others of {self.robot.name!r}."
            )
        return of_grippers(np.stack(columns, axis=-1))

    def plan(
        self, chunk: ActionChunk, q_anchor: F64, stats: Stats = None, t_capture_s: float = 0.0
    ) -> LimbPlan:
        """Return the motion of all limbs that follows a chunk of poses or their deltas from a
        configuration [nq].

        Rows that are too fast are kept, up to :data:`MAX_STRETCH`; the executor stretches time for
        all limbs at once. Rows from the first in collision on hold the arms before it, and
        ``collision`` says so; so do those from the first on that misses its pose by more than
        ``off_pose_bound_m``, which are ``held``.

        Raises:
            ConfigError: The robot and the chunk's embodiment have different limbs.
            FrameError: A limb lacks the frame that its columns are fixed to.
            ActionSpaceError, StatisticsError, InputError: As :func:`decode_limbs` and
                :meth:`solve`.
        """
        poses_now = self.forward(q_anchor)
        joined = self.join(chunk.embodiment)
        frames = {
            columns.name: DrivenFrame(
                limb.frame, poses_now[limb.name], self.tool_frame(limb, columns, q_anchor)
            )
            for limb, columns in joined
        }
        cosmos, by_columns = driven_poses(chunk, frames, stats)
        driven = {limb.name: by_columns[columns.name] for limb, columns in joined}
        assert chunk.fps is not None  # ActionChunk resolved it
        solution = self.solve(
            {name: poses.T_base_frame for name, poses in driven.items()},
            q_anchor,
            MAX_STRETCH / chunk.fps,
        )
        trajectory = JointTrajectory(
            solution.q_rad[:, self.q_address],
            chunk.row_times_s,
            self._grippers(driven),
            driven,
            solution.residual_m.max(axis=0),
            solution.residual_rad.max(axis=0),
            np.asarray(solution.converged.all(axis=0)),
            np.asarray(solution.clamped.any(axis=0)),
            t_capture_s,
            solution.collision,
            arm=LimbGeometry(self, q_anchor),
        )
        return LimbPlan(self._on_pose(trajectory, q_anchor[self.q_address]), cosmos, solution)

    def _on_pose(self, trajectory: JointTrajectory, q_rad: F64) -> JointTrajectory:
        """Hold the arm, at first at angles [n], from the first row on that is too far from its
        pose; rows that a collision holds are accounted for already.
        """
        off = np.flatnonzero(
            trajectory.residual_m[: trajectory.collision.held_from_row] > self._off_pose_bound_m
        )
        if not len(off):
            return trajectory
        first = int(off[0])
        held = np.arange(len(trajectory.t_s)) >= first
        return replace(hold_rows(trajectory, first, q_rad), held=held)

    def follow(
        self, chunk: ActionChunk, q_anchor: F64, t_capture_s: float = 0.0
    ) -> JointTrajectory:
        """Return the joint angles that follow a chunk of any kind: as :meth:`plan`, or those of
        ``joint_pos`` rows, which are commands already and have no anchor.
        """
        if chunk.action_space.meaning != "joint_position":
            return self.plan(chunk, q_anchor, t_capture_s=t_capture_s).trajectory
        trajectory = replace(decode_joint_chunk(chunk), t_capture_s=t_capture_s)
        if trajectory.q_rad.shape[1] != len(self.q_address):
            return trajectory  # the executor rejects it
        trajectory = replace(trajectory, arm=LimbGeometry(self, q_anchor))
        if self.collisions is None:
            return trajectory
        rows = configurations(q_anchor, self.q_address, trajectory.q_rad)
        rows, collision = self.collisions.held_before(q_anchor, rows)
        return replace(trajectory, q_rad=rows[:, self.q_address], collision=collision)
