"""Inverse kinematics: poses of one frame in, joint angles out, with limits that hold for the
control step.

Levenberg-Marquardt (``levenberg_marquardt.py``) is several times faster while no bound is active;
mink's quadratic program with :class:`StepBoxLimit` handles active bounds and collisions. ``"auto"``
turns to the latter when a bound becomes active.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mink
import mujoco
import numpy as np
import qpsolvers
from numpy.typing import NDArray

from strands_cosmos3.checks import (
    F64,
    finite_array,
    instance_of,
    known_name,
    positive,
    rigid,
    trailing,
    typed,
)
from strands_cosmos3.collision import CollisionOutcome, CollisionReport
from strands_cosmos3.control.avoidance import avoidance_limits
from strands_cosmos3.control.collision_check import CollisionCheck
from strands_cosmos3.control.levenberg_marquardt import LevenbergMarquardt
from strands_cosmos3.control.look_ahead import StepBounds, at_bound, look_ahead
from strands_cosmos3.errors import FrameError, InputError, ShapeError, UnknownNameError
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.limits import is_franka, limits_of
from strands_cosmos3.robots.model import joint_names, joints_to, pose_of
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.robots.spec import ROTATION_WEIGHT_M
from strands_cosmos3.robots.spec import rotation_weight_m as weight_of_rotation
from strands_cosmos3.types import ErrorSummary

__all__ = ["METHODS", "IKSolution", "Method", "MinkIKBridge"]

Method = Literal["auto", "mink"]
METHODS = ("auto", "mink")
POSITION_TOLERANCE_M = 1e-6
ROTATION_TOLERANCE_RAD = float(np.deg2rad(1e-4))
# a row that misses by more, in metres and radians together, calls for a second pass over the chunk
ROW_TOLERANCE = 1e-3
_HOPELESS = 0.1  # a pose that far off, as a limb weighs it, is out of reach: no second pass helps
_LEAD_ROWS = 8  # rows before a collision from which on a way around it is sought
# how much farther a row may miss its pose to avoid a collision
DETOUR_M, DETOUR_RAD = 0.01, float(np.deg2rad(5))
_MAX_ITERATIONS = 30
_STALL_RATIO = 0.998
_SMALLEST_STEP_RAD = 1e-7
_QP_DAMPING = 1e-9
POSTURE_GAIN = 0.1  # share of the distance to the posture that a row covers in the null space
_POSTURE_STEP_RAD = 0.015  # the most that it covers
_POSTURE_COST = 1e-3  # its square lies far above the damping and far below the pose's weight
_BY_ROW = ("q_rad", "residual_m", "residual_rad", "clamped", "iterations")
_FRAME_TYPES = ("body", "site", "geom")


class StepBoxLimit(mink.Limit):
    r"""Bounds on the joints that hold for a whole control step, however many iterations solve it.

    From the angles :math:`q_0` [rad] at the start of the step, with margin m [rad] and
    :math:`\Delta t` [s]:

    .. math::

        \max(q_{min} + m,\; q_0 - \dot q_{max} \Delta t) \le q + \Delta q
        \le \min(q_{max} - m,\; q_0 + \dot q_{max} \Delta t)

    mink's own ``VelocityLimit`` bounds each iteration separately, so ten iterations may move ten
    times as far.
    """

    def __init__(self, q_address: NDArray[np.intp], dof_address: NDArray[np.intp], n_dof: int):
        n = len(dof_address)
        self._G = np.zeros((2 * n, n_dof))
        self._G[np.arange(n), dof_address] = 1.0
        self._G[n + np.arange(n), dof_address] = -1.0
        self._q_address = q_address
        self.lower_rad = np.full(n, -np.inf)
        self.upper_rad = np.full(n, np.inf)

    def compute_qp_inequalities(
        self, configuration: mink.Configuration, dt: float
    ) -> mink.Constraint:
        """``G dq <= h`` at the present iterate. ``dt`` is not used: the box is that of the
        control step.
        """
        q = configuration.data.qpos[self._q_address]
        return mink.Constraint(self._G, np.concatenate((self.upper_rad - q, q - self.lower_rad)))


@dataclass(frozen=True, eq=False)
class IKSolution:
    """Configuration vectors [T, nq] for T poses, with residuals and iterations [T]; of several
    limbs these are [L, T].

    ``clamped``: a joint or velocity bound is active at the solution. ``collision``: what the check
    of the rows found.
    """

    q_rad: F64
    residual_m: F64
    residual_rad: F64
    clamped: NDArray[np.bool_]
    iterations: NDArray[np.int_]
    collision: CollisionReport = field(default_factory=CollisionReport)

    @property
    def converged(self) -> NDArray[np.bool_]:
        """[T] or [L, T] whether both residuals are within tolerance."""
        return (self.residual_m <= POSITION_TOLERANCE_M) & (
            self.residual_rad <= ROTATION_TOLERANCE_RAD
        )

    @staticmethod
    def joined(parts: Sequence[IKSolution], collision: CollisionReport) -> IKSolution:
        """Return consecutive parts as one solution."""
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in _BY_ROW
        }
        return IKSolution(**arrays, collision=collision)

    @staticmethod
    def of_limbs(q_rad: F64, limbs: Sequence[IKSolution], collision: CollisionReport) -> IKSolution:
        """Return the solutions of several limbs as one, with the configurations of all joints."""
        arrays: dict[str, Any] = {
            name: np.stack([getattr(limb, name) for limb in limbs]) for name in _BY_ROW[1:]
        }
        return IKSolution(q_rad, **arrays, collision=collision)

    def rows(self, first: int, last: int) -> IKSolution:
        """Return the rows from ``first`` to before ``last``."""
        return replace(self, **{name: getattr(self, name)[first:last] for name in _BY_ROW})

    def worst(self, rotation_m: float = 1.0) -> float:
        """Greatest residual of a row, in metres; a radian counts as ``rotation_m``."""
        return float(np.hypot(self.residual_m, rotation_m * self.residual_rad).max())


class MinkIKBridge:
    """Inverse and forward kinematics of one frame of a MuJoCo model.

    Args:
        model: A model with limited hinge or slide joints from its base to the frame. The base must
            be at the world's origin.
        ee_frame_name, ee_frame_type: Name of the driven frame, and ``"body"``, ``"site"`` or
            ``"geom"``. For Cosmos' rows on a Panda this is ``hand``: decoding adds the turn to
            Cosmos' tool frame.
        limits: Rates and ranges of the chain's joints, or the name of a table; see
            :func:`robots.limits.limits_of`. The ranges never exceed the model's.
        posture_rad: [n] preferred angles of the redundant joints, applied in the null space only,
            so that closed loops do not drift. It may be set again later. None is the model's
            keyframe ``home``, the Franka's home, or the middle of the range.
        method: ``"auto"`` tries a fast damped least-squares solver first; ``"mink"`` uses the
            quadratic program only.
        avoid_collisions: Pairs of groups of geoms (names or ids) to keep ``min_distance_m`` apart,
            e.g. ``[(arm, ["table"])]``, whatever their masks and exclusions say. They imply
            ``method="mink"``. A group that is paired with itself means its links among each other,
            without those that touch by design.
        check_collisions: Whether to check each row against the arm's own links and what is static
            in the model, and to avoid a collision or stop the arm ahead of it
            (:mod:`strands_cosmos3.control.collision_check`).
        solver: Solver of the quadratic program, of those that qpsolvers finds installed; None is
            ``daqp``.
        rotation_weight_m: Distance that weighs as much as a radian where position and rotation
            cannot both be met; None is 1 m, as mink weighs them, and for fewer than six joints 10
            mm. A robot's limb has its own (:class:`~strands_cosmos3.robots.spec.Limb`).

    Attributes:
        collisions: The check; None if it is off or the model has no collision geometry.

    Raises:
        FrameError: The model has no such frame, or no joint moves it.
        ConfigError, UnknownNameError: The limits do not fit the model's joints, or there is no such
            table or solver; or a pair cannot be kept apart, and the message names it.
    """

    @typed()
    def __init__(
        self,
        model: mujoco.MjModel,
        ee_frame_name: str = "hand",
        ee_frame_type: str = "body",
        limits: JointLimits | str | None = None,
        method: Method = "auto",
        avoid_collisions: Sequence[tuple[Sequence[str | int], Sequence[str | int]]] = (),
        min_distance_m: float = 0.01,
        check_collisions: bool = True,
        posture_rad: F64 | None = None,
        solver: str | None = None,
        rotation_weight_m: float | None = None,
    ):
        self.model = model
        self.solver = "daqp" if solver is None else solver
        if self.solver not in qpsolvers.available_solvers:
            raise UnknownNameError("qpsolvers solver", solver, qpsolvers.available_solvers)
        self.ee_frame_name = ee_frame_name
        self.ee_frame_type = ee_frame_type
        self.frame = ee_frame_type, _frame_id(model, ee_frame_name, ee_frame_type)
        self._joints = _chain(model, self.body_id)
        self.joint_names = joint_names(model, self._joints)
        if not self._joints:
            raise FrameError(
                f"no joint moves {ee_frame_type} {ee_frame_name!r}; name a frame on the arm."
            )
        weight_m = weight_of_rotation(rotation_weight_m, len(self._joints), default=1.0)
        self.rotation_m = positive(weight_m, "rotation_weight_m")
        self.q_address = model.jnt_qposadr[self._joints].astype(np.intp)
        self.dof_address = dof_address = model.jnt_dofadr[self._joints].astype(np.intp)
        self.limits = limits_of(model, self._joints, limits, self.body_id)
        self.posture_rad = (
            self._home()
            if posture_rad is None
            else finite_array(posture_rad, "posture_rad", (len(self._joints),))
        )
        self.method: Method = known_name(method, "IK method", METHODS)
        if avoid_collisions:
            self.method = "mink"
        self._configuration = mink.Configuration(model)
        self._task = mink.FrameTask(
            ee_frame_name, ee_frame_type, position_cost=1.0, orientation_cost=1.0
        )
        posture_cost = np.zeros(model.nv)
        posture_cost[dof_address] = _POSTURE_COST
        self._posture = mink.PostureTask(model, cost=posture_cost)
        self._box = StepBoxLimit(self.q_address, dof_address, model.nv)
        self._mink_limits: list[mink.Limit] = [self._box]
        frozen = np.setdiff1d(np.arange(int(model.nv)), dof_address).tolist()
        self._frozen: list[mink.Task] = [mink.DofFreezingTask(model, frozen)] if frozen else []
        if avoid_collisions:
            groups = [
                (
                    [_geom_id(model, geom) for geom in first],
                    [_geom_id(model, geom) for geom in second],
                )
                for first, second in avoid_collisions
            ]
            self._mink_limits += avoidance_limits(model, self._joints, groups, min_distance_m)
        self.collisions = CollisionCheck.of(model, self._joints) if check_collisions else None
        self._lm = LevenbergMarquardt(
            model, [self.frame], self.q_address, self.dof_address, [self.rotation_m]
        )

    def _home(self) -> F64:
        key = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_KEY, "home")
        if key >= 0:
            return self.model.key_qpos[key, self.q_address].copy()
        return (
            HOME_Q
            if is_franka(self.model, self._joints)
            else (self.limits.q_min + self.limits.q_max) / 2
        )

    @property
    def body_id(self) -> int:
        """Id of the body that carries the driven frame."""
        kind, index = self.frame
        return index if kind == "body" else int(getattr(self.model, kind)(index).bodyid[0])

    def ee_pose(self, qpos: F64) -> F64:
        """Forward kinematics: [nq] -> [4, 4], ``T_world_ee``; errors as :meth:`configuration`."""
        return self._lm.pose(self.configuration(qpos, "qpos"))

    def configuration(self, value: Any, name: str) -> F64:
        """Return a read-only copy [nq] of a configuration vector; InputError, ShapeError,
        NonFiniteError if it is malformed.
        """
        return trailing(value, name, (self.model.nq,), leading=0)

    def frame_in_ee(self, body_name: str, qpos: F64) -> F64:
        """Return the pose [4, 4] ``T_ee_body`` of a body, or a site, that is rigidly attached to
        the driven frame.

        Raises:
            FrameError: There is no such body or site, or a joint lies between the two.
        """
        name = instance_of(body_name, str, "body_name")
        site = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_SITE, name)
        body = _frame_id(self.model, name, "body") if site < 0 else self.model.site_bodyid[site]
        if self.model.body_weldid[body] != self.model.body_weldid[self.body_id]:
            raise FrameError(
                f"body {body_name!r} is not rigidly attached to {self.ee_frame_name!r}; drive it, "
                "or a frame fixed to it."
            )
        T_world_ee = self.ee_pose(qpos)
        data = self._lm.data
        return np.linalg.inv(T_world_ee) @ pose_of(data.body(body) if site < 0 else data.site(site))

    def solve(
        self, T_world_ee: F64, q_init: F64, dt_s: float | None = None, method: Method | None = None
    ) -> IKSolution:
        """Solve for the joint angles that take the driven frame through the poses, one control step
        each.

        A pose out of reach within the step's bounds gets the best configuration found; the next
        step starts from there.

        Args:
            T_world_ee: [T, 4, 4] target poses.
            q_init: [nq] configuration before the first step; joints off the chain keep their
                values.
            dt_s: Duration of a control step. None bounds positions only, not speeds.
            method: Overrides the bridge's own.

        Raises:
            ShapeError, NonFiniteError, InputError: An argument is malformed, or the chain starts
                outside its range by more than :data:`START_TOLERANCE_RAD`. Nothing was solved.
        """
        targets = rigid(T_world_ee, "T_world_ee", leading=1)
        q = self.configuration(q_init, "q_init")
        dt_s = dt_s if dt_s is None else positive(dt_s, "dt_s")
        method = known_name(self.method if method is None else method, "IK method", METHODS)
        bounds = StepBounds.of(self.limits, q[self.q_address], dt_s)
        solution = self._row_by_row(targets, q, bounds, method, self._mink_limits)
        if method == "auto" and solution.worst() > ROW_TOLERANCE:
            solution = self._second_pass(targets, q, bounds, solution)
        return (
            solution
            if self.collisions is None
            else self._clear_of_collisions(targets, q, bounds, solution)
        )

    def solve_trajectory(self, poses: F64, q_init: F64) -> F64:
        """Return the angles [T, nq] of :meth:`solve` for poses [T, 4, 4], without bounds on
        speed, as strands-robots has it.
        """
        return self.solve(poses, q_init).q_rad

    def tracking_error(self, poses: F64, qpos_traj: F64) -> dict[str, float]:
        """Return ``mean_mm``, ``max_mm``, ``mean_deg``, ``max_deg`` between poses [T, 4, 4] and
        those of angles [T, nq].
        """
        return dict(vars(ErrorSummary.of(*self.residuals(poses, qpos_traj))))

    def residuals(self, poses: F64, qpos_traj: F64) -> tuple[F64, F64]:
        """Return distances [T] in m and angles [T] in rad between poses [T, 4, 4] and those of
        angles [T, nq].
        """
        targets = rigid(poses, "poses", leading=1)
        rows = trailing(qpos_traj, "qpos_traj", (self.model.nq,), leading=1)
        if len(targets) != len(rows):
            raise ShapeError(
                f"poses and qpos_traj must have as many rows, got {len(targets)} and {len(rows)}."
            )
        residuals = [self._lm.residual([T], row)[0] for T, row in zip(targets, rows, strict=True)]
        residual_m, residual_rad = np.array(residuals).T
        return residual_m, residual_rad

    def _row_by_row(
        self,
        targets: F64,
        q: F64,
        bounds: StepBounds,
        method: Method,
        limits: list[mink.Limit],
        most: F64 | None = None,
    ) -> IKSolution:
        """Solve rows in turn, up to the first with a residual (m, rad) above ``most`` [T, 2]."""
        n = len(targets)
        rows: list[tuple[F64, float, float, bool, int]] = []
        for i, target in enumerate(targets):
            q, *residuals, _, _ = row = self._step(target, q, bounds, method, limits)
            rows.append(row)
            if most is not None and (most[i] < residuals).any():
                n = i
                break
        q_rad, residual_m, residual_rad, clamped, iterations = map(
            np.array, zip(*rows, strict=True)
        )
        return IKSolution(q_rad, residual_m, residual_rad, clamped, iterations).rows(0, n)

    def _second_pass(
        self, targets: F64, q: F64, bounds: StepBounds, solution: IKSolution
    ) -> IKSolution:
        """Solve the rows by the quadratic program alone, which may go around a singular pose on the
        side that the fast solver did not, then all at once, from the best solution so far and from
        rest; the best one is returned.
        """
        most = np.tile((solution.residual_m.max(), np.inf), (len(targets), 1))
        by_program = self._row_by_row(targets, q, bounds, "mink", self._mink_limits, most)
        if len(by_program.q_rad) == len(targets):
            solution = self._better(solution, by_program)
        if solution.worst() <= ROW_TOLERANCE or solution.worst(ROTATION_WEIGHT_M) >= _HOPELESS:
            return solution
        start = q[self.q_address]
        seeds = [solution.q_rad[:, self.q_address], np.repeat(start[None], len(targets), axis=0)]
        angles = look_ahead(self._lm, targets, q, start, seeds, bounds)
        ahead = self._account(targets, q, angles, bounds, solution.iterations)
        return self._better(solution, ahead)

    def _better(self, first: IKSolution, second: IKSolution) -> IKSolution:
        """The first solution, unless the second one's worst row is nearer, its position at least
        as near.
        """
        nearer = second.residual_m.max() <= first.residual_m.max()
        better = second.worst(self.rotation_m) < first.worst(self.rotation_m)
        return second if nearer and better else first

    def _account(
        self, targets: F64, q: F64, angles: F64, bounds: StepBounds, iterations: NDArray[np.int_]
    ) -> IKSolution:
        """The solution [T, nq] of angles [T, n], with its residuals and active bounds."""
        rows = configurations(q, self.q_address, angles)
        clamped = np.asarray(bounds.active(q[self.q_address], angles).any(axis=1))
        return IKSolution(rows, *self.residuals(targets, rows), clamped, iterations)

    def _clear_of_collisions(
        self, targets: F64, q: F64, bounds: StepBounds, solution: IKSolution
    ) -> IKSolution:
        """Solve the rows again around a collision; where that is a detour or does not help, hold
        the arm before it.
        """
        check = self.collisions
        assert check is not None
        report = check.examine(q, solution.q_rad)
        if report.row is None:
            return replace(solution, collision=report)
        around = self._around(targets, q, bounds, solution, max(0, report.row - _LEAD_ROWS))
        collision_row = check.examine(q, around.q_rad).row
        passed = len(around.q_rad) if collision_row is None else collision_row
        if passed == len(targets):
            return replace(around, collision=replace(report, outcome=CollisionOutcome.AVOIDED))
        free = around.q_rad[:passed] if passed > report.row else solution.q_rad[: report.row]
        rows, held_from_row = check.hold(q, free, len(targets))
        stopped = self._account(targets, q, rows[:, self.q_address], bounds, solution.iterations)
        return replace(stopped, collision=replace(report, held_from_row=held_from_row))

    def _around(
        self, targets: F64, q: F64, bounds: StepBounds, solution: IKSolution, first: int
    ) -> IKSolution:
        """Solve the rows from ``first`` on again, within mink's collision limit, up to the first
        that takes a detour.
        """
        assert self.collisions is not None
        limits = [*self._mink_limits, self.collisions.limit]
        start = solution.q_rad[first - 1] if first else q
        most = np.stack((solution.residual_m + DETOUR_M, solution.residual_rad + DETOUR_RAD), 1)
        rest = self._row_by_row(targets[first:], start, bounds, "mink", limits, most[first:])
        return IKSolution.joined((solution.rows(0, first), rest), solution.collision)

    def _step(
        self, target: F64, q: F64, bounds: StepBounds, method: Method, limits: list[mink.Limit]
    ) -> tuple[F64, float, float, bool, int]:
        lower, upper = box = bounds.around(q[self.q_address])
        spent = 0
        if method == "auto":
            angles, [(residual_m, residual_rad)], spent = self._lm.solve(
                [target], q, posture_step(self.posture_rad, q[self.q_address])
            )
            inside = (angles > lower).all() and (angles < upper).all()
            if inside and _reached(residual_m, residual_rad):
                return self._lm.data.qpos.copy(), residual_m, residual_rad, False, spent
        before = q
        q, residual_m, residual_rad, iterations = self._step_mink(target, q, box, limits, 1.0)
        # beside obstacles both count alike, lest the hand is turned into them
        if len(limits) == 1 and not _reached(residual_m, residual_rad) and self.rotation_m != 1.0:
            spent += iterations
            q, residual_m, residual_rad, iterations = self._step_mink(
                target, before, box, limits, self.rotation_m
            )
        at_a_bound = bool(at_bound(q[self.q_address], lower, upper).any())
        return q, residual_m, residual_rad, at_a_bound, spent + iterations

    def _step_mink(
        self,
        target: F64,
        q: F64,
        box: tuple[F64, F64],
        limits: list[mink.Limit],
        rotation_m: float,
    ) -> tuple[F64, float, float, int]:
        """Gauss-Newton by quadratic programs. Each step is halved until the residual falls,
        which distant targets need.
        """
        self._box.lower_rad, self._box.upper_rad = lower, upper = box
        configuration = self._configuration
        task = self._task
        task.set_orientation_cost(rotation_m)
        # Without this the program would move fingers, or free bodies such as cubes, out of the
        # arm's way.
        constraints = self._frozen if len(limits) > 1 else []
        task.set_target(mink.SE3.from_matrix(target))
        configuration.update(q)
        posture = q.copy()
        posture[self.q_address] += posture_step(self.posture_rad, q[self.q_address])
        self._posture.set_target(posture)
        best, cost, change, iteration = q, np.inf, np.zeros(self.model.nv), 0
        for iteration in range(_MAX_ITERATIONS + 1):
            # body twist: metres, then radians
            x, y, z, u, v, w = task.compute_error(configuration).tolist()
            distance = math.hypot(x, y, z)
            angle = math.hypot(u, v, w)
            now = distance * distance + (rotation_m * angle) ** 2
            if now < cost:
                stalled = now > _STALL_RATIO * cost
                best = configuration.q
                cost = now
                done = _reached(distance, angle)
                if done or stalled or iteration == _MAX_ITERATIONS:
                    break
                tasks: list[mink.Task] = [task] if iteration else [task, self._posture]
                problem = mink.build_ik(
                    configuration, tasks, 1.0, _QP_DAMPING, limits, constraints=constraints
                )
                solution = qpsolvers.solve_problem(problem, solver=self.solver)  # pyright: ignore
                if not solution.found or solution.x is None:
                    break
                change = solution.x
            else:
                change = change / 2
                if iteration == _MAX_ITERATIONS or np.abs(change).max() < _SMALLEST_STEP_RAD:
                    break
                configuration.update(best)
            configuration.integrate_inplace(change, 1.0)
        # removes the solver's tolerance, a few ulp
        best[self.q_address] = np.clip(best[self.q_address], lower, upper)
        # the twist's length is not the distance
        [(residual_m, residual_rad)] = self._lm.residual([target], best)
        return best, residual_m, residual_rad, iteration


def _reached(distance_m: float, angle_rad: float) -> bool:
    return distance_m <= POSITION_TOLERANCE_M and angle_rad <= ROTATION_TOLERANCE_RAD


def posture_step(posture_rad: F64, angles_rad: F64) -> F64:
    """Return the step [n] towards a posture that a row covers at most."""
    step = POSTURE_GAIN * (posture_rad - angles_rad)
    return step * min(1.0, _POSTURE_STEP_RAD / max(float(np.abs(step).max()), 1e-12))


def configurations(q: F64, q_address: NDArray[np.intp], q_rad: F64) -> F64:
    """Return [M, nq] a configuration [nq] with some of its joints at angles [M, n]."""
    rows = np.repeat(q[None], len(q_rad), axis=0)
    rows[:, q_address] = q_rad
    return rows


def _geom_id(model: mujoco.MjModel, geom: str | int) -> int:
    by_id = isinstance(geom, int) and 0 <= geom < model.ngeom
    return int(geom) if by_id else _frame_id(model, geom, "geom")


def _frame_id(model: mujoco.MjModel, name: object, frame_type: str) -> int:
    known_name(frame_type, "frame type", _FRAME_TYPES)
    part = getattr(model, frame_type)
    count = getattr(model, f"n{frame_type}")
    names = [part(i).name for i in range(count)]
    if name == "" or name not in names:
        raise FrameError(
            f"the model has no {frame_type} {name!r}; it has: "
            f"{', '.join(filter(None, names)) or 'none that are named'}."
        )
    return names.index(name)


def _chain(model: mujoco.MjModel, body: int) -> list[int]:
    """Joints from the root to a body, in that order."""
    joints = joints_to(model, body)
    kinds = model.jnt_type.tolist()
    for joint in joints:
        if kinds[joint] not in (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE):
            raise InputError(
                f"joint {model.joint(joint).name!r} is neither a hinge nor a slide; only those "
                "are supported."
            )
    return joints
