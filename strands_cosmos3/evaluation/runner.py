"""Runs the episodes of an evaluation: an assignment in, a record out. Independent of Ray.

A record depends on its assignment only, not on earlier episodes of the same process: each episode
makes a new policy and keeps only the weights.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from strands_cosmos3.errors import (
    ActionOutOfRangeError,
    BackendError,
    ControlError,
    NonFiniteError,
    ShapeError,
)
from strands_cosmos3.evaluation.judging import open_judge
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.policies import Monitor, PolicySource
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.evaluation.statistics import Record
from strands_cosmos3.policy import Policy
from strands_cosmos3.types import Outcome, Rollout

UNUSABLE = (ActionOutOfRangeError, NonFiniteError, ShapeError, ControlError, BackendError)
"""Errors of a first answer that count as the policy's failure, not the evaluation's, unless a
server or replica is lost."""


class AssignmentRunner:
    """Runs episodes one after the other, with a shared ``engine`` or one of its own.

    Raises:
        CheckpointError, ConfigError, EnvironmentalError: Policy, judge or world cannot be opened.
    """

    def __init__(self, settings: Settings, engine: Any = None):
        self.settings = settings
        self._policies = PolicySource(settings, engine)
        self._judge = open_judge(settings)
        self.session = settings.get_world().open(settings.robot, task=settings.tasks[0])

    def run(self, assignment: Assignment) -> Record:
        """Run an episode and return its record; ``times`` contains everything that depends on
        wall-clock time.

        Raises:
            Cosmos3Error: Something other than the policy failed; the episode does not count.
        """
        return self._episode(assignment, None)

    def film(self, assignment: Assignment) -> tuple[Record, bytes]:
        """Run the same episode again and return its record and video (mp4, the policy's views).
        Errors: as :meth:`run`.
        """
        with tempfile.TemporaryDirectory(prefix="sc3-film-") as folder:
            path = Path(folder) / "film.mp4"
            record = self._episode(assignment, path)
            return record, path.read_bytes() if path.exists() else b""

    def close(self) -> None:
        """Free policy and simulator."""
        self._policies.close()
        self.session.close()

    def _begin(self, assignment: Assignment) -> tuple[Policy, Monitor]:
        """Reset the session to an episode's start; return its policy and what times answers."""
        self.session.reset(assignment.start)
        arguments = self.session.policy_arguments(assignment.policy_instruction)
        return self._policies.policy(assignment.condition, arguments)

    def _episode(self, assignment: Assignment, video: Path | None) -> Record:
        policy, monitor = self._begin(assignment)
        options = replace(
            self.settings.run_options(assignment.condition),
            instruction=assignment.policy_instruction,
            noise_seed=assignment.noise_seed(self.settings.noise_seed),
            video=video,
        )
        judge = self._judge if video is None else None
        if judge is not None:
            judge.look(self.session)
            options = replace(options, on_tick=judge.look)
        wall_s = time.perf_counter()
        cpu_s = time.process_time()
        try:
            record = _record(assignment, self.session.run(policy, options))
        except UNUSABLE as error:  # in the first answer; later ones end the episode as a fault
            record = failed_record(assignment, f"{type(error).__name__}: {error}")
        if monitor.lost is not None:
            raise monitor.lost
        if judge is not None:
            record["judged"] = judge.judged(assignment, self.session)
        record["model_sha256"] = self._policies.model_sha256
        record["times"] |= {
            "wall_s": round(time.perf_counter() - wall_s, 6),
            "cpu_s": round(time.process_time() - cpu_s, 6),
            "answer_ms": [round(answer, 3) for answer in monitor.answer_ms],
        }
        return record


def _record(assignment: Assignment, rollout: Rollout) -> Record:
    figures = rollout.to_dict()
    del figures["instruction"]  # replaced by both instructions
    times = {name: figures.pop(name) for name in ("inference_ms", "realtime_factor")}
    return {**assignment.instructions(), **figures, "times": times}


def failed_record(assignment: Assignment, message: str) -> Record:
    """Return the record of an episode without figures: its first chunk could not be executed, or
    it never ended.
    """
    return {
        **assignment.instructions(),
        "seed": assignment.seed,
        "task": assignment.task,
        "success": False,
        **({"followed": False} if assignment.goals_differ else {}),
        "outcome": str(Outcome.FAULT),
        "counters": {},
        "duration_s": 0.0,
        "fault": message,
        "times": {},
    }
