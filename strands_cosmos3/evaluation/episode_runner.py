"""What every simulator of an evaluation does around an episode: make its policy, time it, film it,
record what failed.

A record depends on its assignment only, not on earlier episodes of the same process: each episode
makes a new policy and keeps only the weights.
"""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from strands_cosmos3.errors import (
    ActionOutOfRangeError,
    ControlError,
    NonFiniteError,
    ServiceChunkError,
    ShapeError,
)
from strands_cosmos3.evaluation.folder import Record
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.policy_source import PolicySource
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.policy import Policy
from strands_cosmos3.types import Outcome

AS_TOLD = "as_told"
"""Outcome of an episode in which the policy followed its own instruction, which differs from the
goal's.
"""
UNUSABLE = (ActionOutOfRangeError, NonFiniteError, ShapeError, ControlError, ServiceChunkError)
"""Errors that count as the policy's failure, not the evaluation's."""


class EpisodeRunner(ABC):
    """Runs episodes one after the other, with a shared ``engine`` or one of its own.

    Raises:
        CheckpointError, ConfigError, EnvironmentalError: The policy cannot be made.
    """

    def __init__(self, settings: Settings, engine: Any = None):
        self.settings = settings
        self.source = PolicySource(settings, engine)

    @property
    def model_sha256(self) -> str | None:
        """Digest of the checkpoint, if there is one."""
        return self.source.model_sha256

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
        """Free the policy."""
        self.source.close()

    @abstractmethod
    def _prepare(self, assignment: Assignment, video: Path | None) -> dict[str, Any]:
        """Make the scene ready; return arguments for
        :class:`~strands_cosmos3.policy.Cosmos3Policy` and caption.
        """

    @abstractmethod
    def _figures(self, assignment: Assignment, policy: Policy, video: Path | None) -> Record:
        """Run the episode and return its record, with ``times``."""

    def _episode(self, assignment: Assignment, video: Path | None) -> Record:
        driver, watch = self.source.policy(assignment, **self._prepare(assignment, video))
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            figures = self._figures(assignment, driver, video)
        except UNUSABLE as error:  # in the first answer; later ones end the episode as a fault
            figures = failed_record(assignment, f"{type(error).__name__}: {error}")
        if watch.lost is not None:
            raise watch.lost
        times = {
            "wall_s": time.perf_counter() - wall_s,
            "cpu_s": time.process_time() - cpu_s,
            "answer_ms": watch.answer_ms,
        }
        figures["times"] |= {name: _rounded(value) for name, value in times.items()}
        return figures


def failed_record(assignment: Assignment, message: str) -> Record:
    """Return the record of an episode without figures: its first chunk could not be executed, or
    it never ended.
    """
    return {
        **assignment.instructions(),
        "seed": assignment.seed,
        "task": assignment.task,
        "success": False,
        "success_told": False,
        "outcome": str(Outcome.FAULT),
        "counters": {},
        "duration_s": 0.0,
        "fault": message,
        "times": {},
    }


def _rounded(value: float | list[float]) -> float | list[float]:
    return [round(one, 3) for one in value] if isinstance(value, list) else round(value, 6)
