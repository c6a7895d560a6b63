"""The arms of a policy that drives several limbs: measured poses and joint targets of all of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strands_cosmos3.checks import F64, typed
from strands_cosmos3.collision import Obstacle
from strands_cosmos3.embodiments import Embodiment
from strands_cosmos3.extras import needed_by
from strands_cosmos3.policy.arm import PolicyArm, configuration
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.robots.spec import RobotSpec, join_limbs
from strands_cosmos3.types import ActionChunk, JointTrajectory, Observation


class LimbArm(PolicyArm):
    """As :class:`~strands_cosmos3.policy.arm.PolicyArm`, for several limbs, which are joined
    with columns by name.
    """

    def _build(self, obstacles: tuple[Obstacle, ...]) -> None:
        with needed_by("joint angles"):
            from strands_cosmos3.control.limb_ik import LimbIK
            from strands_cosmos3.robots.model import load_with_obstacles
        self._obstacles = obstacles
        self._ik = LimbIK(
            self._robot, model=load_with_obstacles(self._model, self._robot, obstacles)
        )
        self._all_limits: JointLimits = self._ik.limits if self._limits is None else self._limits

    def _postures(self) -> list[F64]:
        return [bridge.posture_rad for bridge in self._ik.bridges.values()]

    def _set_postures(self, postures: list[F64]) -> None:
        for bridge, posture_rad in zip(self._ik.bridges.values(), postures, strict=True):
            bridge.posture_rad = posture_rad

    def known(self, observation: Observation, embodiment: Embodiment) -> dict[str, Any]:
        """Return what a request says of the limbs: poses and anchors by name, grippers in the
        order of the columns.
        """
        own = [limb.name for limb in self._robot.limbs if limb.gripper is not None]
        order = [own.index(columns.name) for columns in embodiment.limbs if columns.name in own]
        return {
            "gripper": observation.gripper[order]
            if isinstance(observation.gripper, np.ndarray)
            else observation.gripper,
            "limb_poses": self._poses(observation.q_rad, embodiment),
            "limb_anchors": self._poses(observation.q_anchor_rad, embodiment),
        }

    def _poses(self, q_rad: F64 | None, embodiment: Embodiment) -> dict[str, F64]:
        """The pose [4, 4] of each limb's Cosmos frame in its base, by name; none without angles
        [n].
        """
        if q_rad is None:
            return {}
        q = self._configuration(q_rad)
        here, joined = self._ik.forward(q), join_limbs(self._robot, embodiment)
        return {
            limb.name: here[limb.name] @ self._ik.tool_frame(limb, columns, q)
            for limb, columns in joined
        }

    def solve(self, chunk: ActionChunk, observation: Observation) -> JointTrajectory:
        """Joint angles that follow a chunk from the observation's anchor, at the chunk's own row
        times.
        """
        anchor = observation.q_rad if observation.q_anchor_rad is None else observation.q_anchor_rad
        if not self._begun:
            q = self._configuration(anchor)
            self._set_postures([q[bridge.q_address] for bridge in self._ik.bridges.values()])
            self._begun = True
        return self._ik.plan(
            chunk, self._configuration(anchor), t_capture_s=observation.t_capture_s
        ).trajectory

    def _configuration(self, q_rad: F64) -> F64:
        return configuration(self._ik.home, self._ik.q_address, self._all_limits, q_rad)


@typed()
def arm_of(
    arm_model: Any,
    limits: JointLimits | None,
    servo_lead: bool,
    obstacles: Sequence[Obstacle] | None,
    robot: RobotSpec,
) -> PolicyArm:
    """Return the arm of a policy for a robot of one limb, or of several."""
    robot.require_independent("a policy")
    kind = PolicyArm if len(robot.limbs) == 1 else LimbArm
    return kind(arm_model, limits, servo_lead, obstacles, robot)


__all__ = ["LimbArm", "arm_of"]
