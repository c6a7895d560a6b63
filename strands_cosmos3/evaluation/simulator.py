"""Our table for an evaluation: robot, scene, policy and renderer, which turn assignments into
records. Independent of Ray.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strands_cosmos3.evaluation.episode_runner import AS_TOLD, EpisodeRunner
from strands_cosmos3.evaluation.folder import Record
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.evaluation.stages import Stages
from strands_cosmos3.policy import Policy
from strands_cosmos3.types import Outcome, Rollout
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.world import Start


class Simulator(EpisodeRunner):
    """Runs episodes on our table."""

    def __init__(self, settings: Settings, engine: Any = None):
        super().__init__(settings, engine)
        self.stages = Stages(settings.robot)

    def _prepare(self, assignment: Assignment, video: Path | None) -> dict[str, Any]:
        self._robot, self._layout = self.stages.prepare(assignment)
        return {
            "embodiment": self.settings.embodiment,
            "robot": self.settings.robot,
            "limits": self._robot.limits,
        }

    def _figures(self, assignment: Assignment, policy: Policy, video: Path | None) -> Record:
        perturbation, settings = assignment.perturbation, self.settings
        monitor = GoalMonitor(assignment, self._robot)
        rollout = self._robot.run_policy(
            instruction=assignment.goal_instruction,
            policy=policy,
            duration=perturbation.limit_s or settings.duration,
            latency=perturbation.latency_s or 0.0,
            layout=self._layout,
            control_frequency=settings.control_frequency,
            video=video,
            film_layout="views",
            task=assignment.task,
            seed=assignment.seed,
            noise_seed=assignment.noise_seed(settings.noise_seed),
            on_tick=monitor.check,
        )
        return _record(assignment, rollout, monitor)


class GoalMonitor:
    """Ends an episode when the policy has followed its own instruction, if that differs from the
    goal's.
    """

    def __init__(self, assignment: Assignment, robot: Robot):
        goal, policy_goal = assignment.goals
        own = Start(assignment.task, instruction=assignment.policy_instruction)
        self._judge = None if goal == policy_goal else robot.judge_of(own)
        self.saw_success = False

    @property
    def differs(self) -> bool:
        """Whether the two goals differ."""
        return self._judge is not None

    def check(self, robot: Robot) -> bool:
        """Return whether the episode should end; called after every tick."""
        self.saw_success = self._judge is not None and self._judge.succeeded(robot.data)
        return self.saw_success


def _record(assignment: Assignment, rollout: Rollout, monitor: GoalMonitor) -> Record:
    figures = rollout.to_dict()
    del figures["instruction"]  # replaced by both instructions
    times = {name: figures.pop(name) for name in ("inference_ms", "realtime_factor")}
    if monitor.saw_success and rollout.outcome is Outcome.INTERRUPTED:
        figures["outcome"] = AS_TOLD
    told = monitor.saw_success if monitor.differs else figures["success"]
    return {**assignment.instructions(), **figures, "success_told": told, "times": times}
