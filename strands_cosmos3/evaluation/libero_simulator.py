"""LIBERO for an evaluation: the world of one task at a time, a policy, and assignments turned
into records.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from strands_cosmos3.evaluation.episode_runner import AS_TOLD, UNUSABLE, EpisodeRunner
from strands_cosmos3.evaluation.folder import Record
from strands_cosmos3.evaluation.libero_plan import told_task
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.observe.prompts import libero_caption
from strands_cosmos3.policy import Policy
from strands_cosmos3.sim.record import VideoWriter
from strands_cosmos3.types import Outcome
from strands_cosmos3.worlds.libero.protocol import CONTROL_HZ, get_protocol
from strands_cosmos3.worlds.libero.simulation import LiberoSimulation, as_seen, side_by_side
from strands_cosmos3.worlds.libero.suites import load_tasks
from strands_cosmos3.worlds.libero.world import next_actions

_FILM_EVERY = 2  # steps


class LiberoSimulator(EpisodeRunner):
    """Runs episodes of a LIBERO suite."""

    def __init__(self, settings: Settings, engine: Any = None):
        super().__init__(settings, engine)
        self._config = get_protocol(settings.protocol)
        self._world: LiberoSimulation | None = None

    def close(self) -> None:
        """Free the policy and the world."""
        super().close()
        if self._world is not None:
            self._world.close()
        self._world = None

    def _prepare(self, assignment: Assignment, video: Path | None) -> dict[str, Any]:
        return {
            "embodiment": self.settings.embodiment,
            "prompt": libero_caption(assignment.policy_instruction, self._config.caption),
        }

    def _world_of(self, assignment: Assignment, pictures: bool) -> LiberoSimulation:
        """Return the world of an episode's task; the last one is kept, because making one takes
        seconds.
        """
        task, world = load_tasks(assignment.suite)[int(assignment.task)], self._world
        if world is None or world.task != task or (pictures and not world.can_draw):
            if world is not None:
                world.close()
            self._world = world = LiberoSimulation(task, self._config, pictures)
        return world

    def _figures(self, assignment: Assignment, policy: Policy, video: Path | None) -> Record:
        world = self._world_of(assignment, policy.requires_images or video is not None)
        world.reset(assignment.index, assignment.seed)
        policy.set_control_frequency(CONTROL_HZ)
        policy.reset(assignment.noise_seed(self.settings.noise_seed))
        other, counters, outcome, fault = told_task(assignment), Counter[str](), Outcome.TIMEOUT, {}
        with ExitStack() as stack:
            film = (
                None
                if video is None
                else stack.enter_context(VideoWriter(video, CONTROL_HZ / _FILM_EVERY))
            )
            try:
                while outcome is Outcome.TIMEOUT and not world.time_is_up:
                    actions = next_actions(policy, world, assignment.policy_instruction)[
                        : world.horizon - world.steps
                    ]
                    counters["chunks"] += 1
                    for row, action in enumerate(actions, 1):
                        if film is not None and world.steps % _FILM_EVERY == 0:
                            film.write(
                                side_by_side(
                                    {name: as_seen(view) for name, view in world.rendered().items()}
                                )
                            )
                        if world.step(action, look=policy.requires_images and row == len(actions)):
                            outcome = Outcome.SUCCESS
                        elif other != world.task and world.fulfilled(other.goal):
                            outcome = Outcome.INTERRUPTED
                        if outcome is not Outcome.TIMEOUT:
                            break
            except UNUSABLE as error:
                if not counters["chunks"]:
                    raise
                outcome, fault = Outcome.FAULT, {"fault": f"{type(error).__name__}: {error}"}
        succeeded = outcome is Outcome.SUCCESS
        return {
            **assignment.instructions(),
            "seed": assignment.seed,
            "task": assignment.task,
            "success": succeeded,
            "success_told": outcome is Outcome.INTERRUPTED
            if assignment.goals_differ
            else succeeded,
            "outcome": AS_TOLD if outcome is Outcome.INTERRUPTED else str(outcome),
            "counters": {"steps": world.steps, **counters},
            "duration_s": world.steps / CONTROL_HZ,
            **({"model_sha256": policy.model_sha256} if policy.model_sha256 else {}),
            **fault,
            "times": {},
        }
