"""One episode: the loop of observing, planning, executing and judging, and its account."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from strands_cosmos3.backends.replay import Recording, ReplayBackend
from strands_cosmos3.checks import positive
from strands_cosmos3.control.executor import ExecutorState
from strands_cosmos3.control.loop import AcceptedChunk, ControlLoop, LoopConfig, Tick, with_old_names
from strands_cosmos3.errors import BackendError, ConfigError, ControlError, Cosmos3Error
from strands_cosmos3.policy import Cosmos3Policy, Policy
from strands_cosmos3.robots.model import PHYSICS_HZ
from strands_cosmos3.sim.film import VideoRecorder
from strands_cosmos3.sim.interrupt import Interrupt, deferred_interrupt
from strands_cosmos3.sim.metrics import ChunkRecord, EpisodeLog
from strands_cosmos3.sim.policy_planner import PolicyPlanner
from strands_cosmos3.sim.tasks import Judge
from strands_cosmos3.types import Outcome, Rollout

if TYPE_CHECKING:
    from strands_cosmos3.sim.robot import Robot

_MAX_STOP_S = 3.0
_MAX_WAIT_S = 10.0  # for an inference under way when the episode ends


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


def _reconnects_of(policy: Policy) -> int | None:
    """How often a policy's service was dialled again in its life, if it has one."""
    counters = getattr(getattr(policy, "backend", None), "counters", None)
    return None if counters is None else counters.get("reconnects", 0)


def _nothing() -> None:
    """How an inference is broken off that cannot be."""


def _clock_of(config: LoopConfig) -> str:
    """Which clock the loop's latencies are read from."""
    if config.latency_s is None:
        return "simulated, paced by the wall's"
    return "simulated" if config.latency_s else "simulated, stopped for each answer"


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
        config: How the loop runs.
        realtime: Whether a simulated second lasts at least a second on the wall.
        on_tick: Called after every tick; the episode ends as interrupted if it returns True.
    """

    def __init__(
        self,
        robot: Robot,
        policy: Policy,
        instruction: str,
        judge: Judge | None,
        film: VideoRecorder,
        config: LoopConfig,
        realtime: bool = False,
        on_tick: Callable[[Robot], bool | None] | None = None,
    ):
        self.robot, self.policy, self.instruction, self.judge, self.film = robot, policy, instruction, judge, film
        self.config = config
        self.on_tick = on_tick
        self.log = EpisodeLog(robot.dt_s)
        self._asking = PolicyPlanner(robot, policy, instruction, film, config.hz)
        self._reconnects_before = _reconnects_of(policy)
        self._interrupt = Interrupt()
        self._pace = _Pace(robot) if realtime else None
        self.loop = ControlLoop(robot, self._asking, robot.executor, config, self._joined, lambda: self._interrupt.requested)

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
        try:
            with deferred_interrupt() as self._interrupt:
                outcome = self._play(n_ticks, recording, progress)
        finally:
            break_off = self.policy.cancel if isinstance(self.policy, Cosmos3Policy) else _nothing
            self.loop.close(0.0 if self._interrupt.forced else _MAX_WAIT_S, break_off)
        wall_s = time.perf_counter() - started
        return self._report(seed, task, outcome, recording, wall_s)

    def _play(self, n_ticks: int, recording: Recording | None, progress: Callable[[float, float], None] | None) -> Outcome:
        outcome, hz = Outcome.COMPLETED if self.judge is None else Outcome.TIMEOUT, self.config.hz
        try:
            for tick in range(n_ticks):
                if self._interrupt.requested:
                    outcome = Outcome.INTERRUPTED
                    break
                if self._tick():
                    outcome = Outcome.INTERRUPTED
                    break
                if progress is not None:
                    progress((tick + 1) / hz, n_ticks / hz)
                if self.judge is not None and self.judge.succeeded(self.robot.data):
                    outcome = Outcome.SUCCESS
                    break
                if recording is not None and self.robot.executor.motion_s >= recording.duration_s - 1e-9:
                    break
            else:
                if not self.log.chunks:
                    raise BackendError(
                        f"the policy had not answered once when the episode's {n_ticks / hz:g} s were over, and nothing moved. "
                        "Give it longer (duration), or let the simulation wait for it (no realtime, no latency)."
                    )
                self._account_for_holding()
        except KeyboardInterrupt:
            if self._interrupt.forced:
                raise
            outcome = Outcome.INTERRUPTED
        except Cosmos3Error as error:
            if isinstance(error, ConfigError) or not self.log.chunks:
                raise  # nothing has moved: it is the caller's to mend
            outcome = Outcome.FAULT
            self.log.counters[type(error).__name__] += 1
            self.log.fault = str(error)
        finally:  # whatever else was raised, e.g. by somebody's policy: the arm is not left moving
            self.log.final_state = self.robot.executor.state
            if not self._interrupt.forced:
                self._come_to_rest()
        return Outcome.FAULT if self.log.fault else outcome

    def _account_for_holding(self) -> None:
        """The time is up. Where the arm spent the end of it on holding that is said, or is the episode's fault."""
        loop = self.loop
        self.log.held = loop.why_held()
        if self.log.held is not None and loop.error is not None:
            raise loop.error
        if self.log.held is not None and loop.held_s > self.config.patience_s:
            raise BackendError(f"the time was up, and {self.log.held}")

    def _tick(self) -> bool:
        """Run one control tick; return whether ``on_tick`` ends the episode."""
        self._keep(self.loop.tick())
        self.log.end_chunk(self.robot.executor.rows_begun)  # so far; a fault leaves no other trace of it
        self.log.counters["ticks"] += 1
        if self.on_tick is not None and self.on_tick(self.robot):
            return True
        if self._pace is not None:
            self.log.counters["late_ticks"] += self._pace.wait()
        return False

    def _joined(self, joined: AcceptedChunk, rows_begun: int) -> None:
        """The loop has taken up a chunk."""
        self.log.end_chunk(rows_begun)
        chunk = ChunkRecord(joined.plan, joined.motion, joined.motion_from_s, joined.latency_ms, joined.wall_ms)
        self.log.begin_chunk(chunk)
        action, video = self._asking.answer
        self._asking.in_force = action
        if action is not None:
            self.log.actions.append(action)
        self.film.show_prediction(video, joined.since_s)
        self.film.show_plan(joined.plan, joined.wall_ms)

    def _keep(self, tick: Tick) -> None:
        self.log.step_block(tick.block, tick.q_rad, tick.gripper)
        self.film.frame(self.robot.data)

    def _come_to_rest(self) -> None:
        """Brake within limits and flush. A second Ctrl-C leaves at once, with the arm where it is."""
        executor = self.robot.executor
        if executor.state in (ExecutorState.RUNNING, ExecutorState.HOLD):
            self.log.end_chunk(executor.rows_begun)
            executor.stop()
        for _ in range(int(_MAX_STOP_S * self.config.hz)):
            reference = executor.reference
            if not reference.qd_rad_s.any() and not reference.qdd_rad_s2.any() and self.log.blocks:
                break
            try:
                self._keep(self.loop.advance())
            except ControlError as error:  # no further reference can be followed; what was done is reported
                if not self.log.blocks:
                    raise
                self.log.fault = self.log.fault or str(error)
                break
        if executor.state is ExecutorState.FAULT:
            self.log.final_state = executor.state

    def _report(self, seed: int, task: str | None, outcome: Outcome, recording: Recording | None, wall_s: float) -> Rollout:
        log, robot = self.log, self.robot
        duration_s = log.duration_s  # not the simulator's clock: physics that diverged has set that to zero
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
            latency_clock=_clock_of(self.config),
            inference_ms=log.inference_ms(),
            counters=with_old_names({**robot.executor.counters, **self.loop.counters, **self._reconnects(), **log.counters}),
            duration_s=duration_s,
            realtime_factor=duration_s / wall_s,
            model_sha256=getattr(getattr(self.policy, "backend", None), "model_sha256", None),
            fault=log.fault,
            final_state=None if log.final_state is None else str(log.final_state),
            held=log.held,
            arrays=log.arrays(),
        )

    def _reconnects(self) -> dict[str, int]:
        """How often a service had to be dialled again in this episode, where there is one."""
        so_far = _reconnects_of(self.policy)
        return {} if so_far is None else {"reconnects": so_far - (self._reconnects_before or 0)}


class _Pace:
    """Keeps the simulation's clock from running ahead of the wall's.

    Args:
        robot: Whose clock.
    """

    def __init__(self, robot: Robot):
        self._robot = robot
        self._offset_s = time.monotonic() - robot.now_s()

    def wait(self) -> bool:
        """Sleep until the wall has caught up; says whether it had to be waited for the other way round."""
        ahead_s = self._robot.now_s() + self._offset_s - time.monotonic()
        if ahead_s > 0:
            time.sleep(ahead_s)
            return False
        self._offset_s -= ahead_s  # what was lost is not made up for by hurrying
        return True
