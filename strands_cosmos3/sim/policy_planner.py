"""PolicyPlanner a policy from inside an episode: what it is shown, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.control.loop import PrefixSpan
from strands_cosmos3.errors import BackendError, ConfigError
from strands_cosmos3.policy import Cosmos3Policy, Policy, Step
from strands_cosmos3.sim.film import VideoRecorder
from strands_cosmos3.types import ActionChunk, JointTrajectory, Observation

if TYPE_CHECKING:
    from strands_cosmos3.sim.robot import Robot

_Answer = tuple[NDArray[Any] | None, Any]


class PolicyPlanner:
    """The planner of an episode (:class:`~strands_cosmos3.control.loop.Planner`).

    Args:
        robot: Who is observed.
        policy: Who is asked.
        instruction: What it is told.
        film: Whose cameras a policy with eyes looks through.
        hz: How far apart a foreign policy's steps are meant.

    Attributes:
        answer: Raw action rows [T, D] and predicted video of the latest answer, where there are any.
        in_force: The raw rows of the answer that the arm follows, which need not be the latest: that may have come too late,
            or been refused.
    """

    def __init__(self, robot: Robot, policy: Policy, instruction: str, film: VideoRecorder, hz: float):
        self.robot, self.policy, self.instruction, self.film, self.hz = robot, policy, instruction, film, hz
        self.answer: _Answer = (None, None)
        self.in_force: NDArray[Any] | None = None

    def observe(self, action_prefix: PrefixSpan | None) -> tuple[Observation | dict[str, Any], NDArray[Any] | None]:
        """The robot's observation now, and the raw rows that it is bound to execute."""
        robot = self.robot
        images = self.film.observe(robot.data) if self.policy.requires_images else None
        if not isinstance(self.policy, Cosmos3Policy):
            return robot.observe(images), None
        rows = self.in_force
        bound = (
            None
            if action_prefix is None or rows is None
            else rows[action_prefix.first : action_prefix.first + action_prefix.rows]
        )
        if bound is not None and rows is not None:
            bound = bound[: min(len(rows) - 1, self.policy.prefix_rows)]  # a chunk that were all bound would add nothing
        return robot.observation(images), bound if self.policy.takes_action_prefix and bound is not None and len(
            bound
        ) else None

    def plan(self, observation: tuple[Observation | dict[str, Any], NDArray[Any] | None]) -> JointTrajectory:
        """The policy's chunk.

        Raises:
            Cosmos3Error: As the policy raises it.
        """
        seen, bound = observation
        if not isinstance(self.policy, Cosmos3Policy):
            assert isinstance(seen, dict)
            self.answer = (None, None)
            return _adapted(self.policy.get_actions_sync(seen, self.instruction), type(self.policy).__name__, self.hz)
        plan = self.policy.plan(seen, self.instruction, action_prefix=bound)
        self.answer = (np.asarray(self.policy.last_rollout["action"]), self.policy.last_rollout["video"])
        if isinstance(plan, ActionChunk):
            raise ConfigError("this policy answers raw columns; give it robot='panda' to drive the arm.")
        return plan


def _adapted(steps: list[Step], policy: str, hz: float) -> JointTrajectory:
    """A foreign policy's steps, due one control period apart, as a joint trajectory.

    Raises:
        BackendError: A step lacks a joint, or holds something other than a number; the policy is named.
    """
    from strands_cosmos3.observe.mapping import resolve_mapping

    keys: Mapping[str, str] = resolve_mapping("panda").commanded
    try:
        rows = np.array([[float(np.asarray(step[key])) for key in list(keys.values())[:7]] for step in steps])
    except (KeyError, TypeError, ValueError) as error:
        raise BackendError(f"a step of policy {policy!r} is malformed: {error!r}.") from None
    finger = keys["gripper"]
    gripper: Any = None
    if all(finger in step for step in steps):
        from strands_cosmos3.embodiments import PANDA_FINGER

        gripper = PANDA_FINGER.to_fraction(np.array([float(np.asarray(step[finger])) for step in steps]))
    return JointTrajectory(rows, (np.arange(len(rows)) + 1) / hz, gripper)
