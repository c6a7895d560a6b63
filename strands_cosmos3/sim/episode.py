"""One episode: the loop of observing, planning, executing and judging, and its account."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from strands_cosmos3.arm.model import PHYSICS_HZ
from strands_cosmos3.backends.replay import Recording, ReplayBackend
from strands_cosmos3.checks import positive
from strands_cosmos3.control.executor import ExecutorState
from strands_cosmos3.errors import ActuatorGuardError, BackendError, ConfigError, ControlError, Cosmos3Error
from strands_cosmos3.policy import Cosmos3Policy, Policy, Step
from strands_cosmos3.sim.film import Film
from strands_cosmos3.sim.interrupt import Interrupt, deferred_interrupt
from strands_cosmos3.sim.metrics import ChunkRecord, EpisodeLog
from strands_cosmos3.sim.tasks import Judge
from strands_cosmos3.types import ActionChunk, JointTrajectory, Outcome, Rollout

if TYPE_CHECKING:
    from strands_cosmos3.sim.robot import Robot

_MAX_STOP_S = 3.0


def physics_steps_per_tick(control_frequency: float) -> int:
    """Physics steps between two control ticks.

    Raises:
        ConfigError: The tick is no whole number of physics steps; the message names frequencies that are.
    """
    steps = PHYSICS_HZ / positive(control_frequency, "control frequency")
    if steps < 1 or abs(steps - round(steps)) > 1e-9:
        valid = [PHYSICS_HZ // n for n in range(1, PHYSICS_HZ + 1) if PHYSICS_HZ % n == 0 and PHYSICS_HZ // n >= 10]
        raise ConfigError(
            f"a control frequency of {control_frequency:g} Hz is no whole number of physics steps ({PHYSICS_HZ} Hz); "
            f"use one of {', '.join(map(str, sorted(valid)))}."
        )
    return round(steps)


def recording_of(policy: Policy) -> Recording | None:
    """The recording that a policy replays, if it does."""
    backend = getattr(policy, "backend", None)
    return backend.recording if isinstance(backend, ReplayBackend) else None


class Episode:
    """Runs one episode.

    Args:
        robot: The robot, already reset.
        policy: What decides; ours is asked by ``plan()``, others by ``get_actions_sync()`` with the flat observation.
        instruction: What it is told.
        judge: Says when the task has succeeded, or None.
        film: Where pictures go.
        control_frequency: Ticks a second.
        on_tick: Called after every tick.
    """

    def __init__(
        self,
        robot: Robot,
        policy: Policy,
        instruction: str,
        judge: Judge | None,
        film: Film,
        control_frequency: float,
        on_tick: Callable[[Robot], None] | None = None,
    ):
        self.robot, self.policy, self.instruction, self.judge, self.film = robot, policy, instruction, judge, film
        self.control_frequency = control_frequency
        self.substeps = physics_steps_per_tick(control_frequency)
        self.on_tick = on_tick
        self.log = EpisodeLog(robot.dt_s)
        self._horizon = 0

    def run(
        self,
        n_ticks: int,
        seed: int,
        task: str | None,
        recording: Recording | None,
        progress: Callable[[float, float], None] | None,
    ) -> Rollout:
        """Tick until success, the recording's or the time's end, a fault or Ctrl-C; bring the arm to rest and report."""
        started = time.perf_counter()
        with deferred_interrupt() as interrupt:
            outcome = self._play(n_ticks, recording, progress, interrupt)
        wall_s = time.perf_counter() - started
        return self._report(seed, task, outcome, recording, wall_s)

    def _play(
        self,
        n_ticks: int,
        recording: Recording | None,
        progress: Callable[[float, float], None] | None,
        interrupt: Interrupt,
    ) -> Outcome:
        outcome = Outcome.COMPLETED if self.judge is None else Outcome.TIMEOUT
        try:
            for tick in range(n_ticks):
                if interrupt.requested:
                    outcome = Outcome.INTERRUPTED
                    break
                self._tick()
                if progress is not None:
                    progress((tick + 1) / self.control_frequency, n_ticks / self.control_frequency)
                if self.judge is not None and self.judge.succeeded(self.robot.data):
                    outcome = Outcome.SUCCESS
                    break
                if recording is not None and self.robot.executor.motion_s >= recording.duration_s - 1e-9:
                    break
        except KeyboardInterrupt:
            outcome = Outcome.INTERRUPTED
        except Cosmos3Error as error:
            if isinstance(error, ConfigError) or not self.log.blocks:
                raise  # nothing has moved: it is the caller's to mend
            outcome = Outcome.FAULT
            self.log.counters[type(error).__name__] += 1
            self.log.fault = str(error)
        finally:  # whatever else was raised, e.g. by somebody's policy: the arm is not left moving
            self._come_to_rest()
        return outcome

    def _tick(self) -> None:
        if self._chunk_is_spent():
            self._plan()
        self._advance()
        self.log.counters["ticks"] += 1
        if self.on_tick is not None:
            self.on_tick(self.robot)

    def _chunk_is_spent(self) -> bool:
        """Whether the last row of the horizon would be passed before the next tick."""
        executor = self.robot.executor
        return executor.state is not ExecutorState.RUNNING or executor.steps_to_row(self._horizon - 1) < self.substeps

    def _plan(self) -> None:
        robot = self.robot
        started = time.perf_counter()
        plan = self._ask()
        latency_ms = (time.perf_counter() - started) * 1e3
        self.log.end_chunk(robot.executor.rows_begun)
        motion_from_s = robot.executor.motion_s
        motion = robot.executor.accept(plan)
        n_rows = len(motion.nominal_s) - 1
        self._horizon = min(self.policy.actions_per_step or n_rows, n_rows)
        self.log.begin_chunk(ChunkRecord(plan, motion, motion_from_s, latency_ms))
        self.film.show_plan(plan)

    def _ask(self) -> JointTrajectory:
        robot, policy = self.robot, self.policy
        images = self.film.observe(robot.data) if policy.requires_images else None
        if not isinstance(policy, Cosmos3Policy):
            steps = policy.get_actions_sync(robot.observe(images), self.instruction)
            return _adapted(steps, robot, self.control_frequency)
        plan = policy.plan(robot.observation(images), self.instruction)
        self.log.actions.append(np.asarray(policy.last_rollout["action"]))
        self.film.show_prediction(policy.last_rollout["video"])
        if isinstance(plan, ActionChunk):
            raise ConfigError("this policy answers raw columns; give it robot='panda' to drive the arm.")
        return plan

    def _advance(self) -> None:
        robot = self.robot
        before = robot.executor.reference
        block = robot.executor.advance(self.substeps)
        try:
            q, gripper = robot.execute(block, before)
        except ActuatorGuardError:
            robot.executor.fault()
            raise
        self.log.step_block(block, q, gripper)
        self.film.frame(robot.data)

    def _come_to_rest(self) -> None:
        """Brake within limits and flush. A second Ctrl-C leaves at once, with the arm where it is."""
        executor = self.robot.executor
        if executor.state in (ExecutorState.RUNNING, ExecutorState.HOLD):
            self.log.end_chunk(executor.rows_begun)
            executor.stop()
        for _ in range(int(_MAX_STOP_S * self.control_frequency)):
            reference = executor.reference
            if not reference.qd_rad_s.any() and not reference.qdd_rad_s2.any() and self.log.blocks:
                break
            try:
                self._advance()
            except ControlError as error:  # no further reference can be followed; what was done is reported
                self.log.fault = self.log.fault or str(error)
                break

    def _report(self, seed: int, task: str | None, outcome: Outcome, recording: Recording | None, wall_s: float) -> Rollout:
        log, robot = self.log, self.robot
        return Rollout(
            seed=seed,
            task=task,
            instruction=self.instruction,
            outcome=outcome,
            ik=log.ik_error(),
            path=log.path_error(),
            tracking=log.tracking_error(),
            drift=log.drift(recording),
            steps=log.steps(),
            latency_ms=log.latency_ms(),
            counters={**robot.executor.counters, **log.counters},
            duration_s=float(robot.data.time),
            realtime_factor=float(robot.data.time) / wall_s,
            model_sha256=getattr(getattr(self.policy, "backend", None), "model_sha256", None),
            fault=log.fault,
            arrays=log.arrays(),
        )


def _adapted(steps: list[Step], robot: Robot, hz: float) -> JointTrajectory:
    """A foreign policy's steps, due one control period apart, as a joint trajectory.

    Raises:
        BackendError: A step lacks a joint, or holds something other than a number.
    """
    from strands_cosmos3.observe.mapping import resolve_mapping

    keys: Mapping[str, str] = resolve_mapping("panda").commanded
    try:
        rows = np.array([[float(np.asarray(step[key])) for key in list(keys.values())[:7]] for step in steps])
    except (KeyError, TypeError, ValueError) as error:
        raise BackendError(f"a step of {type(robot).__name__}'s policy is malformed: {error!r}.") from None
    finger = keys["gripper"]
    gripper: Any = None
    if all(finger in step for step in steps):
        from strands_cosmos3.embodiments import PANDA_FINGER

        gripper = PANDA_FINGER.to_fraction(np.array([float(np.asarray(step[finger])) for step in steps]))
    return JointTrajectory(rows, (np.arange(len(rows)) + 1) / hz, gripper)
