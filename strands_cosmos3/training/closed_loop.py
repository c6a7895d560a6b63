"""Closed-loop evaluation during training: a few episodes of a checkpoint in simulation, in a
process of their own.

Training waits for that process and shares no random numbers with it, so it ends with the same
weights with and without.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from strands_cosmos3.evaluation.policy_settings import PolicySettings
from strands_cosmos3.evaluation.runner import AssignmentRunner
from strands_cosmos3.evaluation.settings import Settings

CLOSED_LOOP = "closed_loop"
"""Name of the curve."""
_MOST_S = 540.0  # below the 10 minutes that NCCL lets the other processes wait


@dataclass(frozen=True)
class ClosedLoop:
    """Episodes that judge a policy during training: the same scenes each time, which no other
    evaluation has.

    A world, task or number that an evaluation does not know raises its error.
    """

    every: int = 0  # steps between two evaluations; 0 for none
    tasks: tuple[str, ...] = ("reach", "pick")  # of the world
    episodes: int = 4  # of each task
    limit_s: float = 15.0  # simulated seconds of an episode
    seed: int = 1_500_000  # of the scenes; `evaluate` starts at 0
    world: str = "table"

    def __post_init__(self) -> None:
        self.settings(Path("checkpoint"))

    def settings(self, checkpoint: Path) -> Settings:
        """Return the same as an evaluation's settings."""
        policy = PolicySettings(backend="native", model=str(checkpoint))
        return Settings(
            policy,
            self.tasks,
            seeds=self.episodes,
            seed=self.seed,
            world=self.world,
            duration=self.limit_s,
        )

    def due(self, step: int, steps: int) -> bool:
        """Whether to evaluate after a step of so many."""
        return bool(self.every) and (step % self.every == 0 or step == steps)


def measure(checkpoint: Path, how: ClosedLoop) -> Mapping[str, float]:
    """Return each task's fraction of successes, ``<task>``, and the mean time to success,
    ``<task>_s``, if there was one.
    """
    runner = AssignmentRunner(how.settings(checkpoint))
    found: dict[str, float] = {}
    try:
        records = [runner.run(assignment) for assignment in runner.settings.plan()]
    finally:
        runner.close()
    for task in how.tasks:
        successes = (record for record in records if record["task"] == task and record["success"])
        times = [record["duration_s"] for record in successes]
        found[task] = len(times) / how.episodes
        if times:
            found[f"{task}_s"] = sum(times) / len(times)
    return found


def measure_apart(checkpoint: Path, how: ClosedLoop) -> Mapping[str, float] | None:
    """Return :func:`measure`'s figures from another process; None, with a warning, if it fails:
    training goes on.
    """
    command = [sys.executable, "-m", __name__, str(checkpoint), json.dumps(asdict(how))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_S, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        problem = f"took more than {_MOST_S:g} s; choose fewer --evaluate-episodes"
    except subprocess.CalledProcessError as error:
        problem = f"failed: {(error.stderr.strip().splitlines() or [''])[-1]}"
    warnings.warn(
        f"the closed-loop evaluation of {checkpoint} {problem}. Training goes on.", stacklevel=2
    )
    return None


if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    print(
        json.dumps(
            measure(Path(sys.argv[1]), ClosedLoop(**{**options, "tasks": tuple(options["tasks"])}))
        )
    )
