"""The arm of a policy: measured poses, joint targets, and the model of a simulator that drives
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from strands_cosmos3.checks import F64
from strands_cosmos3.collision import Obstacle
from strands_cosmos3.embodiments import Embodiment, GripperConvention
from strands_cosmos3.errors import ConfigError, InputError, ObservationError
from strands_cosmos3.extras import needed_by
from strands_cosmos3.observe.mapping import RobotMapping
from strands_cosmos3.policy.resample import resample
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.spec import Limb, RobotSpec
from strands_cosmos3.types import OFF_POSE_M, ActionChunk, JointTrajectory, Observation

_START_TOLERANCE_RAD = 0.02


class PolicyArm:
    """Inverse kinematics and limits of the arm that a policy answers targets for.

    Args:
        arm_model: Its MuJoCo model, path or name; None is the packaged one.
        limits: Joint limits; None is the Panda's table.
        servo_lead: Whether targets for a bound simulator's position servos lead the motion by those
            servos' lag.
        obstacles: What it must not meet; None is what :meth:`surround` tells, else nothing.
        robot: The robot, of one limb; ``LimbArm`` is for several.

    Raises:
        ConfigError, UnknownNameError, EnvironmentalError: The model cannot be used.
    """

    def __init__(
        self,
        arm_model: Any = None,
        limits: JointLimits | None = None,
        servo_lead: bool = True,
        obstacles: Sequence[Obstacle] | None = None,
        robot: str | RobotSpec = "panda",
    ):
        self._model, self._limits, self._takes_obstacles = arm_model, limits, obstacles is None
        self._robot = get_robot(robot)
        self._build(tuple(obstacles or ()))
        self._servo_lead = servo_lead
        self._lead_s: F64 | None = None
        self._foreign: ConfigError | None = None
        self._begun = False

    def _build(self, obstacles: tuple[Obstacle, ...]) -> None:
        with needed_by("joint angles"):
            from strands_cosmos3.control.ik import MinkIKBridge
            from strands_cosmos3.robots.limits import limits_of_arm
            from strands_cosmos3.robots.model import load_model, load_with_obstacles
        self._obstacles, self._limb = obstacles, self._robot.limb()
        limb, own = self._limb, self._model is None
        model = (
            load_with_obstacles(None, self._robot, obstacles)
            if own
            else load_model(self._model, obstacles)
        )
        limits = limits_of_arm(model, self._robot) if self._limits is None else self._limits
        self._bridge = MinkIKBridge(model, limb.frame, limb.frame_type, limits=limits)
        self._all_limits: JointLimits = self._bridge.limits
        self._q_open = _fingers_open(model, limb)
        self._T_world_base = _base_pose(model, limb) if own else None

    def surround(self, obstacles: Sequence[Obstacle]) -> None:
        """Take what a robot knows of its surroundings, unless obstacles were given or the model
        is compiled and has its own.
        """
        from strands_cosmos3.robots.model import is_compiled

        if (
            self._takes_obstacles
            and not is_compiled(self._model)
            and tuple(obstacles) != self._obstacles
        ):
            postures = self._postures()
            self._build(tuple(obstacles))
            self._set_postures(postures)

    def _postures(self) -> list[F64]:
        return [self._bridge.posture_rad]

    def _set_postures(self, postures: list[F64]) -> None:
        (self._bridge.posture_rad,) = postures

    def reset(self) -> None:
        """Start a new episode: its first configuration becomes the posture that redundant joints
        are drawn to.
        """
        self._begun = False

    def known(self, observation: Observation, embodiment: Embodiment) -> dict[str, Any]:
        """Return what a :class:`~strands_cosmos3.types.Request` says of the arm: its gripper,
        its pose and the anchor's.
        """
        poses = {"T_base_cosmos": self.T_base_cosmos, "T_base_anchor": self.T_base_anchor}
        return {
            "gripper": observation.gripper,
            **{name: pose(observation, embodiment) for name, pose in poses.items()},
        }

    def T_base_cosmos(self, observation: Observation, embodiment: Embodiment) -> F64:
        """Return the measured pose [4, 4] of the frame whose deltas the model predicts."""
        return self._T_base_cosmos(observation.q_rad, embodiment)

    def T_base_anchor(self, observation: Observation, embodiment: Embodiment) -> F64 | None:
        """Return the pose [4, 4] of that frame from which the deltas depart; None is the
        measured one.
        """
        return (
            None
            if observation.q_anchor_rad is None
            else self._T_base_cosmos(observation.q_anchor_rad, embodiment)
        )

    def _T_base_cosmos(self, q_rad: F64, embodiment: Embodiment) -> F64:
        from strands_cosmos3.control.targets import tool_frame_in_ee

        q = self._configuration(q_rad)
        T_world_cosmos = self._bridge.ee_pose(q) @ tool_frame_in_ee(
            self._named(embodiment), self._bridge, q
        )
        return (
            T_world_cosmos
            if self._T_world_base is None
            else np.linalg.inv(self._T_world_base) @ T_world_cosmos
        )

    def _named(self, embodiment: Embodiment) -> Embodiment:
        """The embodiment with the model's name of the body that its tool frame is fixed to."""
        tool = embodiment.tool_frame
        name = self._limb.frame_called(tool.parent)
        return (
            embodiment
            if name == tool.parent
            else replace(embodiment, tool_frame=replace(tool, parent=name))
        )

    def solve(self, chunk: ActionChunk, observation: Observation) -> JointTrajectory:
        """Joint angles that follow a chunk from the observation's anchor, at the chunk's own row
        times.
        """
        from strands_cosmos3.control.targets import solve_chunk

        anchor = observation.q_rad if observation.q_anchor_rad is None else observation.q_anchor_rad
        if not self._begun:
            self._bridge.posture_rad, self._begun = anchor, True
        if (named := self._named(chunk.embodiment)) is not chunk.embodiment:
            chunk = replace(chunk, embodiment=named)
        q, captured_s = self._configuration(anchor), observation.t_capture_s
        return solve_chunk(
            chunk, self._bridge, q, t_capture_s=captured_s, T_world_base=self._T_world_base
        )

    @staticmethod
    def account(plan: JointTrajectory) -> dict[str, Any]:
        """For ``last_rollout``: ``collision``, the report of the check, and ``off_pose_mm``, row
        -> mm where over 1 mm off.
        """
        assert plan.residual_m is not None  # JointTrajectory fills it
        off_pose_mm = {
            int(row): float(plan.residual_m[row] * 1e3)
            for row in np.flatnonzero(plan.residual_m > OFF_POSE_M)
        }
        return {"collision": plan.collision.to_dict(), "off_pose_mm": off_pose_mm}

    def steps(
        self, plan: JointTrajectory, observation: Observation, hz: float | None
    ) -> tuple[JointTrajectory, F64]:
        """A plan at the caller's rate (None: its own), and the motion's own time at the end of
        each step.
        """
        return (
            (plan, plan.t_s)
            if hz is None
            else resample(plan, observation, hz, self._all_limits, self._lead_s)
        )

    def bind_model(
        self, model: Any, namespace: str, mapping: RobotMapping
    ) -> list[GripperConvention | None]:
        """Bind the arms that a simulator drives; return the grippers' units, limb by limb, or None
        to keep the present one.

        Raises:
            ConfigError: It lacks a joint or a gripper's actuator, is another robot, or the mapping
                commands another joint than it observes; :meth:`require_known` raises it again.
        """
        from strands_cosmos3.robots.hosted import (
            driven_gripper,
            require_actuators,
            require_robot,
            servo_lead_of,
        )

        self._foreign, joints, grippers = None, mapping.joint_keys, mapping.gripper_keys
        try:
            require_robot(model, namespace, joints, self._robot)
            require_actuators(
                model, namespace, joints, mapping.joint_commands, grippers, self._robot
            )
        except ConfigError as error:
            self._foreign = error
            raise
        self._lead_s = servo_lead_of(model, namespace, joints) if self._servo_lead else None
        specs = [limb.gripper for limb in self._robot.limbs]
        return [
            driven_gripper(model, namespace, key, gripper)
            for key, gripper in zip(grippers, specs, strict=True)
        ]

    def require_known(self) -> None:
        """Raise the error with which :meth:`bind_model` refused the simulator's arm, if it did."""
        if self._foreign is not None:
            raise self._foreign

    def _configuration(self, q_rad: F64) -> F64:
        return configuration(self._q_open, self._bridge.q_address, self._all_limits, q_rad)


def configuration(q_open: F64, q_address: Any, limits: JointLimits, q_rad: F64) -> F64:
    """[nq] of an arm's model, from angles in range, to a tolerance. Fingers are open, as wide as
    they can meet things.
    """
    q = q_open.copy()
    if len(q_rad) != len(q_address):
        raise InputError(f"{len(q_rad)} joint angles for an arm of {len(q_address)}.")
    if (outside := limits.outside(q_rad, _START_TOLERANCE_RAD)) is not None:
        raise ObservationError(
            f"no motion can start here: {outside}. Move the arm inside, e.g. to the keyframe "
            "'home'."
        )
    q[q_address] = q_rad
    return q


def _base_pose(model: Any, limb: Limb) -> F64 | None:
    """[4, 4] the base's pose in the model's world; None at its origin."""
    from strands_cosmos3.robots.model import base_pose

    T_world_base = base_pose(model, limb)
    return None if np.array_equal(T_world_base, np.eye(4)) else T_world_base


def _fingers_open(model: Any, limb: Limb) -> F64:
    """[nq] the model's initial configuration, with open fingers."""
    q = np.array(model.qpos0)
    for joint in range(model.njnt if limb.gripper is not None else 0):
        # a host may put a prefix before
        if limb.gripper is not None and model.joint(joint).name.endswith(limb.gripper.joints):
            q[model.jnt_qposadr[joint]] = limb.gripper.opening.open_value
    return q
