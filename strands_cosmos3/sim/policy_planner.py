"""Planners of an episode: what a policy observes, and its chunks. Policies of another make are
adapted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.backends.replay import LimbRecording, ReplayBackend
from strands_cosmos3.checks import of_grippers
from strands_cosmos3.control.loop import PrefixSpan
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.policy import Cosmos3Policy, Policy, Step
from strands_cosmos3.policy.policy import step_values
from strands_cosmos3.sim.film import VideoRecorder
from strands_cosmos3.sim.simulated_arm import SimulatedArm
from strands_cosmos3.snapshots import Restorable
from strands_cosmos3.types import ActionChunk, JointTrajectory, Observation

__all__ = ["planner_for", "recording_of"]


class _Planner(Restorable):
    """What planners share: a policy, whose pictures ``film`` renders.

    Attributes:
        answer: Raw action rows [T, D], predicted video and its sound, of the latest chunk, or None
            each.
        accepted_rows: Raw rows of the chunk that the arm follows. The latest one may have expired
            or been rejected.
        replan_rows: Rows to execute before the next inference, or None.
    """

    STATE: ClassVar[tuple[str, ...]] = ("answer", "accepted_rows", "_seen")
    PARTS: ClassVar[tuple[str, ...]] = ("_policy",)
    borrowed_domain: str | None = None
    replan_rows: int | None

    def __init__(self, arm: SimulatedArm, policy: Any, instruction: str, film: VideoRecorder):
        self.instruction = instruction
        self.answer: tuple[NDArray[Any] | None, Any, Any] = (None, None, None)
        self.accepted_rows: NDArray[Any] | None = None
        self._arm = arm
        self._policy = policy
        self._film = film
        self._seen: Any = None  # by the latest observation, for its plan

    @property
    def model_sha256(self) -> str | None:
        """Digest of the checkpoint behind the policy, or None."""
        return None

    def _images(self) -> dict[str, NDArray[np.uint8]] | None:
        return self._film.observe(self._arm.data) if self._policy.requires_images else None

    def cancel(self) -> None:
        """Break off an inference under way, if the policy can."""


class PolicyPlanner(_Planner):
    """Plans with a :class:`~strands_cosmos3.policy.Cosmos3Policy` (a
    :class:`~strands_cosmos3.control.loop.Planner`).
    """

    def __init__(
        self, arm: SimulatedArm, policy: Cosmos3Policy, instruction: str, film: VideoRecorder
    ):
        super().__init__(arm, policy, instruction, film)
        self.replan_rows = policy.replan_rows
        self.borrowed_domain = policy.borrowed_domain
        policy.set_obstacles(arm.scene.obstacles)

    def observe(self, action_prefix: PrefixSpan | None) -> Observation:
        """Return the observation now, and keep the raw rows that the arm will execute in any
        case for :meth:`plan`.
        """
        images = self._images()
        self._seen = self._prefix(action_prefix)
        return self._arm.observation(images)

    def _prefix(self, span: PrefixSpan | None) -> NDArray[Any] | None:
        rows = self.accepted_rows
        if span is None or rows is None:
            return None
        prefix = rows[span.first :][: min(span.rows, self._policy.prefix_rows)]
        return prefix if len(prefix) else None

    def plan(self, observation: Observation) -> JointTrajectory:
        """Return the policy's chunk; any Cosmos3Error is the policy's."""
        plan = self._policy.plan(observation, self.instruction, action_prefix=self._seen)
        chunk = self._policy.last_chunk
        assert chunk is not None  # it has just planned
        self.answer = chunk.action, chunk.video, chunk.sound
        if isinstance(plan, ActionChunk):
            raise ConfigError(
                "this policy returns raw columns; name the arm's robot, e.g. robot='panda'."
            )
        return plan

    @property
    def model_sha256(self) -> str | None:
        return self._policy.model_sha256

    @property
    def counters(self) -> Mapping[str, int]:
        """Events in the policy's life that an episode reports, if it counts any: ``reconnects``,
        and what its monitors notice.
        """
        counters = self._policy.counters
        if not counters:
            return {}
        noticed = self._policy.backend.watch.counters
        return {"reconnects": counters.get("reconnects", 0), **noticed}

    def cancel(self) -> None:
        """Break off an inference under way."""
        self._policy.cancel()


class AdaptedPolicyPlanner(_Planner):
    """Plans with any other policy, by ``get_actions_sync`` and flat observations.

    Such a policy plans from the angles it is shown, the measured ones; its steps are shifted to the
    anchor.

    ``hz`` is the rate at which the policy's steps are due.
    """

    counters: Mapping[str, int] = {}

    def __init__(
        self, arm: SimulatedArm, policy: Policy, instruction: str, film: VideoRecorder, hz: float
    ):
        super().__init__(arm, policy, instruction, film)
        fingers = (limb.gripper.joints[0] for limb in arm.scene.limbs.values())
        policy.set_robot_state_keys([*arm.scene.robot.joints, *fingers])
        policy.set_control_frequency(hz)
        self.replan_rows = policy.actions_per_step
        self._hz = hz

    def observe(self, action_prefix: PrefixSpan | None) -> Observation:
        """Return the joints now, and keep the flat observation for :meth:`plan`."""
        self._seen = self._arm.observe(self._images())
        return self._arm.observation()

    def plan(self, observation: Observation) -> JointTrajectory:
        """Return the policy's steps as a joint trajectory; BackendError if a step lacks a joint
        or holds no number.
        """
        plan = self._trajectory(self._policy.get_actions_sync(self._seen, self.instruction))
        anchor = observation.q_anchor_rad
        limits = self._arm.limits
        if anchor is None or plan.q_rad.shape[1:] != anchor.shape:
            return plan
        q = plan.q_rad
        shifted = np.clip(
            q + (anchor - observation.q_rad),
            np.minimum(q, limits.q_min),
            np.maximum(q, limits.q_max),
        )
        return replace(plan, q_rad=shifted)

    def _trajectory(self, steps: list[Step]) -> JointTrajectory:
        """Return steps, due one control period apart, as a joint trajectory."""
        scene = self._arm.scene
        rows = step_values(steps, scene.robot.joints, self._policy)
        fingers = {limb.gripper.joints[0]: limb.gripper.opening for limb in scene.limbs.values()}
        gripper: Any = None
        if all(finger in step for step in steps for finger in fingers):
            values = step_values(steps, tuple(fingers), self._policy).T
            openings = [
                opening.to_fraction(value)
                for opening, value in zip(fingers.values(), values, strict=True)
            ]
            gripper = of_grippers(np.stack(openings, axis=1))
        return JointTrajectory(rows, (np.arange(len(rows)) + 1) / self._hz, gripper)


def planner_for(
    arm: SimulatedArm, policy: Policy, instruction: str, film: VideoRecorder, hz: float
) -> PolicyPlanner | AdaptedPolicyPlanner:
    """Return the planner for a policy of any make."""
    if isinstance(policy, Cosmos3Policy):
        return PolicyPlanner(arm, policy, instruction, film)
    return AdaptedPolicyPlanner(arm, policy, instruction, film, hz)


def recording_of(policy: Policy) -> LimbRecording | None:
    """Return the recording that a policy replays, by limb, or None."""
    backend = policy.backend if isinstance(policy, Cosmos3Policy) else None
    return backend.recording if isinstance(backend, ReplayBackend) else None
