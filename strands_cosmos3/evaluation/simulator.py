"""One worker: a robot in its scene, a policy, and its own renderer. An assignment goes in, a record comes out.

Nothing here knows of Ray or of other workers. An episode's record depends on its assignment alone, whatever ran before it in
the same process: the policy is made anew, only weights are kept.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from strands_cosmos3.backends import ServiceOptions, make_backend
from strands_cosmos3.backends.base import Backend
from strands_cosmos3.backends.options import InferenceOptions
from strands_cosmos3.errors import ActionOutOfRangeError, ControlError, NonFiniteError, ServiceChunkError, ShapeError
from strands_cosmos3.evaluation.folder import Record
from strands_cosmos3.evaluation.perturbed_backend import PerturbedBackend
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.settings import MODEL_BACKENDS, Settings
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.sim.robot import Robot
from strands_cosmos3.sim.tasks import Judge, get_task
from strands_cosmos3.types import Outcome, Rollout

AS_TOLD = "as_told"
"""Outcome of an episode in which the policy did what it was told, which was not what it is judged by."""
UNUSABLE = (ActionOutOfRangeError, NonFiniteError, ShapeError, ControlError, ServiceChunkError)
"""What a policy may answer that is its own failure and not the evaluation's."""


class Simulator:
    """Runs episodes, one after the other.

    Args:
        settings: What is evaluated.
        engine: A shared engine that is asked instead of one in this process, or None.

    Raises:
        CheckpointError, ConfigError, EnvironmentalError: The policy cannot be made.
    """

    def __init__(self, settings: Settings, engine: Any = None):
        self.settings = settings
        self._engine = engine
        self._num_steps: int | None = settings.policy.num_steps
        self._backend = self._open(self._num_steps)
        self.robot = Robot("panda")

    @property
    def model_sha256(self) -> str | None:
        """Digest of the checkpoint, where there is one."""
        return self._backend.model_sha256

    def run(self, assignment: Assignment) -> Record:
        """An episode's record: its figures, and under ``times`` everything that depends on the clock on the wall.

        Raises:
            Cosmos3Error: Something other than the policy failed; the episode does not count.
        """
        return self._episode(assignment, None)

    def film(self, assignment: Assignment) -> tuple[Record, bytes]:
        """The same episode again, filmed (mp4, the three views).

        Raises:
            Cosmos3Error: As :meth:`run`.
        """
        with tempfile.TemporaryDirectory(prefix="sc3-film-") as folder:
            path = Path(folder) / "film.mp4"
            record = self._episode(assignment, path)
            return record, path.read_bytes() if path.exists() else b""

    def close(self) -> None:
        """Free the policy."""
        self._backend.close()

    def _open(self, num_steps: int | None) -> Backend:
        policy = self.settings.policy
        if policy.backend == "service":
            options = ServiceOptions(policy.host, policy.port, policy.token, None, policy.dialect)
            return make_backend("service", action_space=policy.action_space, service=options)
        if policy.backend not in MODEL_BACKENDS:
            return make_backend(policy.backend)
        options = InferenceOptions(
            device=policy.device,
            dtype=policy.dtype,  # pyright: ignore[reportArgumentType]
            num_steps=num_steps,
            guidance_scale=policy.guidance_scale,
            policy_frames=policy.policy_frames,
        )
        from strands_cosmos3.backends.native import EngineBackend  # needs torch

        if self._engine is not None:
            return EngineBackend(self._engine, options)
        backend = make_backend(policy.backend, policy.model, options)
        self._engine = backend.engine if isinstance(backend, EngineBackend) else None  # the next one shares its weights
        return backend

    def _backend_for(self, num_steps: int | None) -> Backend:
        if num_steps != self._num_steps:
            if self._engine is None:
                self._backend.close()
            self._backend, self._num_steps = self._open(num_steps), num_steps
        return self._backend

    def _episode(self, assignment: Assignment, video: Path | None) -> Record:
        condition, settings = assignment.condition, self.settings
        num_steps = settings.policy.num_steps if condition.num_steps is None else condition.num_steps
        replan = settings.policy.replan_rows if condition.replan_rows is None else condition.replan_rows
        backend = PerturbedBackend(self._backend_for(num_steps), condition, assignment.told)
        policy = Cosmos3Policy(
            robot="panda",
            backend=backend,
            limits=self.robot.limits,
            actions_per_step=replan,
            action_space=settings.policy.action_space,
        )
        bystander = GoalMonitor(assignment, self.robot)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            rollout = self.robot.run_policy(
                instruction=assignment.asked,
                policy=policy,
                duration=settings.duration,
                control_frequency=settings.control_frequency,
                video=video,
                film_layout="views",
                task=assignment.task,
                seed=assignment.seed,
                on_tick=bystander.look,
            )
            figures = _figures(assignment, rollout, bystander)
        except UNUSABLE as error:  # the very first answer already; later ones end the episode as a fault by themselves
            figures = fault(assignment, f"{type(error).__name__}: {error}")
        if backend.lost is not None:
            raise backend.lost
        times = {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s, "answer_ms": backend.answer_ms}
        figures["times"] |= {name: _rounded(value) for name, value in times.items()}
        return figures


class GoalMonitor:
    """Sees whether what was told comes about, where it is not what the episode is judged by, and ends the episode then."""

    def __init__(self, assignment: Assignment, robot: Robot):
        asked, told = assignment.goals
        self._judge = None if asked == told else Judge(get_task(assignment.task), robot.scene, told)
        self.saw_success = False

    @property
    def differs(self) -> bool:
        return self._judge is not None

    def look(self, robot: Robot) -> bool:
        """Called after every tick; True ends the episode."""
        self.saw_success = self._judge is not None and self._judge.succeeded(robot.data)
        return self.saw_success


def _figures(assignment: Assignment, rollout: Rollout, bystander: GoalMonitor) -> Record:
    figures = rollout.to_dict()
    del figures["instruction"]  # asked and told are written beside each other
    times = {name: figures.pop(name) for name in ("inference_ms", "realtime_factor")}
    if bystander.saw_success and rollout.outcome is Outcome.INTERRUPTED:
        figures["outcome"] = AS_TOLD
    told = bystander.saw_success if bystander.differs else figures["success"]
    return {"asked": assignment.asked, "told": assignment.told, **figures, "success_told": told, "times": times}


def fault(assignment: Assignment, message: str) -> Record:
    """An episode that failed without a figure to show: its policy could not be executed from the start, or nobody came back."""
    return {
        "asked": assignment.asked,
        "told": assignment.told,
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
