"""A robot in its scene, a policy and a renderer, which turn assignments into records. Independent of Ray and of other workers.

A record depends on its assignment only, not on earlier episodes of the same process: each episode makes a new policy and keeps
only the weights.
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
from strands_cosmos3.evaluation.stages import Stages
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.sim.robot import Robot
from strands_cosmos3.sim.tasks import Judge, get_task
from strands_cosmos3.types import Outcome, Rollout

AS_TOLD = "as_told"
"""Outcome of an episode in which the policy followed its own instruction, which differs from the goal's."""
UNUSABLE = (ActionOutOfRangeError, NonFiniteError, ShapeError, ControlError, ServiceChunkError)
"""Errors that count as the policy's failure, not the evaluation's."""


class Simulator:
    """Runs episodes one after the other, with a shared ``engine`` or one of its own.

    Raises:
        CheckpointError, ConfigError, EnvironmentalError: The policy cannot be made.
    """

    def __init__(self, settings: Settings, engine: Any = None):
        self.settings = settings
        self._engine = engine
        self._opened_for: tuple[int | None, bool] = settings.policy.num_steps, True
        self._backend = self._open(*self._opened_for)
        self.stages = Stages()

    @property
    def model_sha256(self) -> str | None:
        """Digest of the checkpoint, if there is one."""
        return self._backend.model_sha256

    def run(self, assignment: Assignment) -> Record:
        """Run an episode and return its record; ``times`` contains everything that depends on wall-clock time.

        Raises:
            Cosmos3Error: Something other than the policy failed; the episode does not count.
        """
        return self._episode(assignment, None)

    def film(self, assignment: Assignment) -> tuple[Record, bytes]:
        """Run the same episode again and return its record and video (mp4, the three views). Errors: as :meth:`run`."""
        with tempfile.TemporaryDirectory(prefix="sc3-film-") as folder:
            path = Path(folder) / "film.mp4"
            record = self._episode(assignment, path)
            return record, path.read_bytes() if path.exists() else b""

    def close(self) -> None:
        """Free the policy."""
        self._backend.close()

    def _open(self, num_steps: int | None, check_language: bool) -> Backend:
        policy = self.settings.policy
        if policy.backend == "service":
            options = ServiceOptions(policy.host, policy.port, policy.token, None, policy.dialect)
            steps = InferenceOptions(num_steps=num_steps)
            return make_backend("service", options=steps, action_space=policy.action_space, service=options)
        if policy.backend not in MODEL_BACKENDS:
            return make_backend(policy.backend)
        options = InferenceOptions(
            device=policy.device,
            dtype=policy.dtype,  # pyright: ignore[reportArgumentType]
            num_steps=num_steps,
            guidance_scale=policy.guidance_scale,
            policy_frames=policy.policy_frames,
            engine=policy.engine,
            check_language=check_language,
        )
        from strands_cosmos3.backends.native import EngineBackend  # needs torch

        if self._engine is not None:
            return EngineBackend(self._engine, options)
        backend = make_backend(policy.backend, policy.model, options)
        self._engine = backend.engine if isinstance(backend, EngineBackend) else None  # the next one shares its weights
        return backend

    def _backend_for(self, num_steps: int | None, check_language: bool) -> Backend:
        if (wanted := (num_steps, check_language)) != self._opened_for:
            if self._engine is None:
                self._backend.close()
            self._backend, self._opened_for = self._open(*wanted), wanted
        return self._backend

    def _episode(self, assignment: Assignment, video: Path | None) -> Record:
        perturbation, settings = assignment.perturbation, self.settings
        robot, layout = self.stages.prepare(assignment)
        num_steps = settings.policy.num_steps if perturbation.num_steps is None else perturbation.num_steps
        replan = settings.policy.replan_rows if perturbation.replan_rows is None else perturbation.replan_rows
        backend = PerturbedBackend(
            self._backend_for(num_steps, perturbation.text != "random"), perturbation, assignment.policy_instruction
        )
        policy = Cosmos3Policy(
            robot="panda",
            backend=backend,
            limits=robot.limits,
            actions_per_step=replan,
            action_space=settings.policy.action_space,
        )
        monitor = GoalMonitor(assignment, robot)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            rollout = robot.run_policy(
                instruction=assignment.goal_instruction,
                policy=policy,
                duration=perturbation.limit_s or settings.duration,
                latency=perturbation.latency_s or 0.0,
                layout=layout,
                control_frequency=settings.control_frequency,
                video=video,
                film_layout="views",
                task=assignment.task,
                seed=assignment.seed,
                noise_seed=assignment.noise_seed(settings.noise_seed),
                on_tick=monitor.check,
            )
            figures = _figures(assignment, rollout, monitor)
        except UNUSABLE as error:  # in the first answer; later ones end the episode as a fault
            figures = failed_record(assignment, f"{type(error).__name__}: {error}")
        if backend.lost is not None:
            raise backend.lost
        times = {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s, "answer_ms": backend.answer_ms}
        figures["times"] |= {name: _rounded(value) for name, value in times.items()}
        return figures


class GoalMonitor:
    """Ends an episode when the policy has followed its own instruction, if that differs from the goal's."""

    def __init__(self, assignment: Assignment, robot: Robot):
        goal, policy_goal = assignment.goals
        self._judge = None if goal == policy_goal else Judge(get_task(assignment.task), robot.scene, policy_goal)
        self.saw_success = False

    @property
    def differs(self) -> bool:
        """Whether the two goals differ."""
        return self._judge is not None

    def check(self, robot: Robot) -> bool:
        """Return whether the episode should end; called after every tick."""
        self.saw_success = self._judge is not None and self._judge.succeeded(robot.data)
        return self.saw_success


def _figures(assignment: Assignment, rollout: Rollout, monitor: GoalMonitor) -> Record:
    figures = rollout.to_dict()
    del figures["instruction"]  # replaced by both instructions
    times = {name: figures.pop(name) for name in ("inference_ms", "realtime_factor")}
    if monitor.saw_success and rollout.outcome is Outcome.INTERRUPTED:
        figures["outcome"] = AS_TOLD
    told = monitor.saw_success if monitor.differs else figures["success"]
    return {**assignment.instructions(), **figures, "success_told": told, "times": times}


def failed_record(assignment: Assignment, message: str) -> Record:
    """Return the record of an episode without figures: its first chunk could not be executed, or it never ended."""
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
