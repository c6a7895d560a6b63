"""One episode: run the control loop with a policy, judge the task, come to rest, report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from math import inf
from typing import Any, ClassVar

from strands_cosmos3.backends.replay import LimbRecording
from strands_cosmos3.checks import positive
from strands_cosmos3.control.executor import ExecutorState
from strands_cosmos3.control.loop import AcceptedChunk, ControlLoop, LoopConfig, Tick
from strands_cosmos3.errors import BackendError, ConfigError, ControlError, Cosmos3Error
from strands_cosmos3.robots.model import PHYSICS_HZ
from strands_cosmos3.sim.film import VideoRecorder
from strands_cosmos3.sim.interrupt import Interrupt, deferred_interrupt
from strands_cosmos3.sim.judge import Judge
from strands_cosmos3.sim.metrics import EpisodeLog
from strands_cosmos3.sim.pacing import Pacer
from strands_cosmos3.sim.policy_planner import AdaptedPolicyPlanner, PolicyPlanner
from strands_cosmos3.sim.simulated_arm import SimulatedArm
from strands_cosmos3.snapshots import Restorable
from strands_cosmos3.types import Outcome, Rollout

_MAX_STOP_S = 3.0
_MAX_WAIT_S = 10.0  # for an inference under way when the episode ends


def physics_steps_per_tick(control_frequency: float) -> int:
    """Return the number of physics steps between two control ticks; ConfigError if it is not
    whole.
    """
    steps = PHYSICS_HZ / positive(control_frequency, "control frequency")
    if not 1 <= steps < inf or abs(steps - round(steps)) > 1e-9:
        valid = [str(hz) for hz in range(10, PHYSICS_HZ + 1) if PHYSICS_HZ % hz == 0]
        raise ConfigError(
            f"a control frequency of {control_frequency:g} Hz is not a whole number of physics "
            f"steps ({PHYSICS_HZ} Hz); use one of {', '.join(valid)}."
        )
    return round(steps)


def _clock_of(config: LoopConfig) -> str:
    """Return the clock that the loop's latencies are read from."""
    if config.latency_s is None:
        return "simulated, in wall-clock time"
    return "simulated" if config.latency_s else "simulated, stopped for each answer"


@dataclass(eq=False)
class EpisodeRunner(Restorable):
    """Runs one episode, from its start or from a snapshot.

    Args:
        arm: Already reset.
        judge: The task's success criterion, or None.
        n_ticks: Most ticks.
        realtime: Whether a simulated second lasts at least a second of wall-clock time.
        on_tick: Called after every tick; the episode ends as interrupted if it returns True.
        followed: Judges the policy's own instruction, where that is another goal: it ends the
            episode too.
        recording: Of a replay: the episode ends with it.
        progress: Called with simulated and total seconds.
        identify: Whether the rollout states the digest of the policy's checkpoint.
    """

    STATE: ClassVar[tuple[str, ...]] = ("_within_tick",)
    # the loop first: it waits for an inference under way
    PARTS: ClassVar[tuple[str, ...]] = ("loop", "arm", "planner", "judge", "followed", "log")

    arm: SimulatedArm
    planner: PolicyPlanner | AdaptedPolicyPlanner
    judge: Judge | None
    film: VideoRecorder
    config: LoopConfig
    n_ticks: int
    _: KW_ONLY
    realtime: bool = False
    on_tick: Callable[[], bool | None] | None = None
    followed: Judge | None = None
    recording: LimbRecording | None = None
    progress: Callable[[float, float], None] | None = None
    identify: bool = True

    def __post_init__(self) -> None:
        self.log = EpisodeLog(self.arm.dt_s, self.arm.scene.limbs)
        self._counters_before = dict(self.planner.counters)
        self._interrupt = Interrupt()
        self._pacer = Pacer(self.arm.now_s()) if self.realtime else None
        self._within_tick = False  # a tick has moved the arm and is not judged yet
        self.loop = ControlLoop(
            self.arm,
            self.planner,
            self.arm.executor,
            self.config,
            self._accepted,
            lambda: self._interrupt.requested,
        )

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the state of arm, loop, planner, judges and log; it waits for an
        inference under way. ConfigError in real time.
        """
        return super().snapshot() | {"counted": self._planner_counters()}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a snapshot of an episode of the same arm, task and policy."""
        super().restore(state)
        counted = state["counted"]
        self._counters_before = {n: self.planner.counters.get(n, 0) - counted[n] for n in counted}

    def run(self, seed: int, task: str | None) -> Rollout:
        """Tick until success, the end of the recording or of the time, a fault or Ctrl-C; come
        to rest and report.
        """
        started = time.perf_counter()
        try:
            with deferred_interrupt() as self._interrupt:
                outcome = self._play()
        finally:
            self.loop.close(0.0 if self._interrupt.forced else _MAX_WAIT_S, self.planner.cancel)
        wall_s = time.perf_counter() - started
        self.film.finish(self.arm.data, f"{outcome}: {outcome.message}")
        return self._report(seed, task, outcome, wall_s)

    def _play(self) -> Outcome:
        outcome: Outcome | None = None
        try:
            if self._within_tick:
                outcome = self._ended()
            while outcome is None and self.log.counters["ticks"] < self.n_ticks:
                if self._interrupt.requested or self._tick():
                    outcome = Outcome.INTERRUPTED
                else:
                    outcome = self._ended()
            if outcome is None:
                outcome = self._time_is_up()
        except KeyboardInterrupt:
            if self._interrupt.forced:
                raise
            outcome = Outcome.INTERRUPTED
        except Cosmos3Error as error:
            if isinstance(error, ConfigError) or not self.log.chunks:
                raise  # nothing has moved; the caller must correct it
            outcome = Outcome.FAULT
            self.log.counters[type(error).__name__] += 1
            self.log.fault = str(error)
        finally:  # also for other errors, e.g. of a foreign policy: never leave the arm moving
            self.log.final_state = self.arm.executor.state
            if not self._interrupt.forced:
                self._come_to_rest(outcome)
        assert outcome is not None  # an error has been raised
        return Outcome.FAULT if self.log.fault else outcome

    def _ended(self) -> Outcome | None:
        """Judge the present tick; return how the episode ended, or None."""
        self._within_tick = False
        if self.followed is not None and self.followed.succeeded(self.arm.data):
            return Outcome.FOLLOWED
        if self.progress is not None:
            hz = self.config.hz
            self.progress(self.log.counters["ticks"] / hz, self.n_ticks / hz)
        if self.judge is not None and self.judge.succeeded(self.arm.data):
            return Outcome.SUCCESS
        motion_s = self.arm.executor.motion_s
        recording = self.recording
        over = recording is not None and motion_s >= recording.duration_s - 1e-9
        return self._unjudged if over else None

    @property
    def _unjudged(self) -> Outcome:
        return Outcome.COMPLETED if self.judge is None else Outcome.TIMEOUT

    def _time_is_up(self) -> Outcome:
        if not self.log.chunks:
            raise BackendError(
                f"the policy returned no chunk in the episode's {self.n_ticks / self.config.hz:g} "
                "s, and nothing moved. Give it longer (duration), or let the simulation wait for "
                "it (no realtime, no latency)."
            )
        self._account_for_holding()
        return self._unjudged

    def _account_for_holding(self) -> None:
        """Record why the arm held when the time was up; raise if it held for too long."""
        loop = self.loop
        self.log.held = loop.why_held()
        if self.log.held is not None and loop.error is not None:
            raise loop.error
        if self.log.held is not None and loop.held_s > self.config.patience_s:
            raise BackendError(f"the time was up, and {self.log.held}")

    def _tick(self) -> bool:
        """Run one control tick; return whether ``on_tick`` ends the episode."""
        self._record(self.loop.tick())
        self.log.end_chunk(self.arm.executor.rows_begun)  # before a fault can end the episode
        self.log.counters["ticks"] += 1
        self._within_tick = True
        if self.on_tick is not None and self.on_tick():
            return True
        if self._pacer is not None:
            self.log.counters["late_ticks"] += self._pacer.wait(self.arm.now_s())
        return False

    def _accepted(self, chunk: AcceptedChunk, rows_begun: int) -> None:
        """Record and show a chunk that the loop has accepted."""
        self.log.end_chunk(rows_begun)
        answer = (None, None, None) if chunk.is_retreat else self.planner.answer
        action, video, sound = answer
        self.planner.accepted_rows = action
        self.log.begin_chunk(chunk, action)
        self.film.show_prediction(video, chunk.age_s, sound)
        self.film.show_plan(chunk.plan, chunk.wall_ms)

    def _record(self, tick: Tick) -> None:
        self.log.add(tick)
        self.film.film_tick(self.arm.data)

    def _come_to_rest(self, outcome: Outcome | None) -> None:
        """Brake within limits and log the motion; the report of an outcome needs a tick."""
        executor = self.arm.executor
        if executor.state in (ExecutorState.RUNNING, ExecutorState.HOLD):
            self.log.end_chunk(executor.rows_begun)
            executor.stop()
        for _ in range(int(_MAX_STOP_S * self.config.hz)):
            if executor.reference.rests and (self.log.ticks or outcome is None):
                break
            try:
                self._record(self.loop.advance())
            except ControlError as error:  # report what was done
                if not self.log.ticks:
                    raise
                self.log.fault = self.log.fault or str(error)
                break
        if executor.state is ExecutorState.FAULT:
            self.log.final_state = executor.state

    def _report(
        self,
        seed: int,
        task: str | None,
        outcome: Outcome,
        wall_s: float,
    ) -> Rollout:
        log = self.log
        planner = self.planner
        errors: dict[str, Any] = log.errors()
        duration_s = log.duration_s  # the simulator's clock is reset when the physics diverges
        return Rollout(
            seed=seed,
            task=task,
            instruction=planner.instruction,
            outcome=outcome,
            ik=log.ik_error(),
            **errors,
            drift=log.drift(self.recording),
            between_hands=log.between_hands(),
            by_limb=log.by_limb(),
            steps=log.steps(),
            latency_ms=log.percentiles("latency_ms"),
            latency_clock=_clock_of(self.config),
            inference_ms=log.percentiles("wall_ms"),
            seam_rad_s=log.seam_rad_s(),
            counters={
                **self.arm.executor.counters,
                **self.loop.counters,
                **self._planner_counters(),
                **log.counters,
            },
            duration_s=duration_s,
            realtime_factor=duration_s / wall_s,
            model_sha256=planner.model_sha256 if self.identify else None,
            fault=log.fault,
            final_state=None if log.final_state is None else str(log.final_state),
            held=log.held,
            assumed=self.arm.limits.assumed,
            borrowed_domain=planner.borrowed_domain,
            collisions=log.collisions(),
            arrays=log.arrays(),
            followed=None if self.followed is None else outcome is Outcome.FOLLOWED,
        )

    def _planner_counters(self) -> dict[str, int]:
        """Return what the planner has counted in this episode."""
        before = self._counters_before
        return {name: n - before.get(name, 0) for name, n in self.planner.counters.items()}
