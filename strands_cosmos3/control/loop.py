"""The control loop that never stalls: inference beside motion, for a simulated arm or a real one.

Every tick it hands the arm the references of one control period. While the arm moves, one worker infers the next chunk; when
that arrives, the rows that have passed meanwhile are dropped and the rest is joined without a jump (``seam.py``). Where no
fresh chunk comes in time the executor brakes and holds, and motion goes on from an observation taken after that.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

from strands_cosmos3.checks import F64, finite_array, instance_of, positive, whole_number
from strands_cosmos3.control.chunk_blending import blend_chunk
from strands_cosmos3.control.executor import Executor, ExecutorState, ReferenceBlock
from strands_cosmos3.control.prefetch import Job, Worker
from strands_cosmos3.control.trajectory import JointState, PlannedMotion
from strands_cosmos3.errors import ActuatorGuardError, ConfigError, ControlError, Cosmos3Error, InputError
from strands_cosmos3.types import JointTrajectory

_COUNTERS = ("asked", "failed", "refused", "stale", "deadline_misses", "idle_ticks", "abandoned")
_LATENCIES = 8
_WAIT_S = 0.1
_MARGIN = 1.25  # an inference may take longer than those before it


class Arm(Protocol):
    """What the loop needs of an arm: its joints now, and a place for references at a fixed rate.

    MuJoCo's is :class:`strands_cosmos3.sim.robot.Robot`; ``examples/07_your_own_arm.py`` shows where a libfranka or ROS 2
    bridge would sit.
    """

    @property
    def dt_s(self) -> float:
        """Time between two references."""
        ...

    def now_s(self) -> float:
        """The arm's clock: simulated time, or a monotonic clock."""
        ...

    def joint_state(self) -> tuple[F64, F64, float]:
        """Measured angles [n] in rad, velocities [n] in rad/s, and the gripper's open fraction."""
        ...

    def execute(self, block: ReferenceBlock, before: JointState) -> tuple[F64, F64]:
        """Follow one reference after another.

        Args:
            block: The references at the ends of the next M steps of ``dt_s``.
            before: The reference at the beginning of the first.

        Returns:
            Measured angles [M, n] and the gripper's open fractions [M].

        Raises:
            ActuatorGuardError: A reference must not be followed; none of the block was.
            ControlError: The arm can follow no further; how much of the block it followed is not known.
        """
        ...


@dataclass(frozen=True)
class PrefixSpan:
    """What the arm will have done of the present chunk by the time the next is there.

    Args:
        first: The row of that chunk, counted from its own first, that lies to the observation as a new chunk's first row
            does: under way where rows are due a period after their observation, commanded now where the first is due at once.
        rows: How many rows from there on are bound to be executed.
    """

    first: int
    rows: int


class Planner(Protocol):
    """Where chunks come from. ``observe`` is called between two ticks, ``plan`` on a worker thread."""

    def observe(self, action_prefix: PrefixSpan | None) -> Any:
        """Take down what is to be planned from; ``action_prefix`` is None where nothing is under way."""
        ...

    def plan(self, observation: Any) -> JointTrajectory:
        """The chunk for what was observed.

        Raises:
            Cosmos3Error: There is none. A :class:`ConfigError` ends the loop; anything else is counted and tried again.
        """
        ...


@dataclass(frozen=True)
class LoopConfig:
    """How the loop runs.

    Args:
        hz: Ticks a second; a tick is a whole number of the arm's reference steps.
        replan_rows: Ask for a new chunk after this many rows of the present one; None as late as is safe.
        latency_s: What inference takes on the arm's clock: 0 stops the clock meanwhile; a number, or a source of numbers,
            lets the answer arrive that much later, whatever it takes in truth; None lets it arrive when it does.
        blend_s: How long it takes to fade out what parts an arriving chunk from the motion under way.
        retry_s, longest_retry_s: Pause after a failed inference; it doubles.
        patience_s: How long the arm may hold before a failed inference ends the loop. One that has neither failed nor answered
            is waited for: how long it takes is its own to bound.

    Raises:
        InputError: A number is out of range.
    """

    hz: float = 50.0
    replan_rows: int | None = None
    latency_s: float | Callable[[], float] | None = 0.0
    blend_s: float = 0.4
    retry_s: float = 0.2
    longest_retry_s: float = 2.0
    patience_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("hz", "blend_s", "retry_s", "longest_retry_s", "patience_s"):
            positive(getattr(self, name), name)
        if self.replan_rows is not None:
            whole_number(self.replan_rows, "replan_rows", 1)
        if self.latency_s is not None and not callable(self.latency_s):
            object.__setattr__(self, "latency_s", _simulated(self.latency_s))


def _simulated(latency_s: float) -> float:
    """A latency that a clock can wait for."""
    seconds = float(finite_array(latency_s, "latency_s", ()))
    if not 0 <= seconds <= 60:
        raise InputError(f"latency_s is {seconds:g}; an inference takes 0 to 60 s here.")
    return seconds


@dataclass(frozen=True, eq=False)
class AcceptedChunk:
    """A chunk that has been taken up.

    Args:
        plan: Its rows still to come, as they were planned: the intended path, their times counted from now.
        motion: What the executor made of them.
        motion_from_s: Where the motion's own clock stood.
        since_s: What the motion's own clock has gone on by since the chunk's observation.
        rows_passed: Rows that were dropped because they had passed.
        latency_ms: From the question until now on the arm's clock: what the loop experienced.
        wall_ms: What inference and planning took on the wall's clock.
    """

    plan: JointTrajectory
    motion: PlannedMotion
    motion_from_s: float
    since_s: float
    rows_passed: int
    latency_ms: float
    wall_ms: float


@dataclass(frozen=True, eq=False)
class Tick:
    """What one tick did.

    Args:
        block: The references handed to the arm.
        q_rad: [M, n] measured angles after each.
        gripper: [M] measured open fractions.
    """

    block: ReferenceBlock
    q_rad: F64
    gripper: F64


@dataclass(eq=False)
class PendingInference:
    """An inference under way."""

    job: Job[JointTrajectory]
    asked_s: float
    motion_s: float
    pauses: int
    q_rad: F64
    latency_s: float | None

    def arrived(self, now_s: float) -> bool:
        """Whether its answer counts as there; on a simulated clock it is waited for then."""
        return self.job.done if self.latency_s is None else now_s >= self.asked_s + self.latency_s - 1e-9


class ControlLoop:
    """Drives an arm tick by tick.

    Args:
        arm: Who follows.
        planner: Who says where to.
        executor: Who plans and guards the references; it stands where the arm is.
        config: How.
        on_joined: Called when a chunk is taken up, before the arm follows it, with how many rows of the one before were
            begun.
        interrupted: Whether the user wants to stop: an answer is no longer waited for then.

    Attributes:
        counters: ``asked``; ``failed`` (no answer), ``refused`` (an answer that cannot be followed), ``stale`` (all its rows
            had passed, or the arm had begun to hold or to stop since its observation), ``deadline_misses`` (the motion ran
            out before a fresh chunk came), ``idle_ticks`` (ticks begun without motion after the first chunk), ``abandoned``
            (an inference that did not end with the loop).
        error: Why the latest inference failed, until one succeeds.

    Raises:
        ConfigError: A tick is no whole number of the arm's reference steps.
    """

    def __init__(
        self,
        arm: Arm,
        planner: Planner,
        executor: Executor,
        config: LoopConfig | None = None,
        on_joined: Callable[[AcceptedChunk, int], None] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        self.arm, self.planner, self.executor = arm, planner, instance_of(executor, Executor, "executor")
        self.config = config or LoopConfig()
        steps = 1.0 / (self.config.hz * arm.dt_s)
        if steps < 1 - 1e-9 or abs(steps - round(steps)) > 1e-6:
            raise ConfigError(
                f"{self.config.hz:g} ticks a second are no whole number of reference steps of {arm.dt_s * 1e3:g} ms; "
                f"use a divisor of {1 / arm.dt_s:g} Hz."
            )
        self.substeps = round(steps)
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self.error: Cosmos3Error | None = None
        self._on_joined, self._interrupted = on_joined, interrupted
        self._worker = Worker()
        self._question: PendingInference | None = None
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        self._rows_passed = 0  # rows of the present chunk that had passed when it was taken up
        self._rows_merged = 0  # 1 where the first of the rest was due at once
        self._due_at_once = False  # whether its own first row was
        self._n_rows = 0  # rows of the present chunk still to come at that time
        self._row_s = 0.0
        self._failures = 0
        self._not_before_s = self._moved_s = -float("inf")

    def tick(self) -> Tick:
        """One control period: take up what has arrived, ask for what will be needed, move.

        Raises:
            ConfigError: From the planner. Any of its errors, where nothing has moved yet.
            Cosmos3Error: The last inference's, when the arm has held for longer than the configured patience.
            ControlError: The arm can follow no further, or (:class:`ActuatorGuardError`) a reference must not be followed; the
                executor is in FAULT, and :meth:`advance` brakes and holds.
            KeyboardInterrupt: The user wants to stop, and an answer was being waited for.
        """
        now_s = self.arm.now_s()
        self._receive(now_s)
        if self._is_due(now_s):
            self._ask(now_s)
            self._receive(now_s)
        self._give_up_after_patience(now_s)
        self.counters["idle_ticks"] += self._has_moved and self.executor.state is not ExecutorState.RUNNING
        holds = self.executor.counters["holds"]
        tick = self.advance()
        self.counters["deadline_misses"] += self.executor.counters["holds"] - holds
        return tick

    def advance(self) -> Tick:
        """One control period of the motion as it stands, with nothing asked: how a stop is carried out.

        Raises:
            ControlError: As :meth:`tick`.
        """
        before = self.executor.reference
        block = self.executor.advance(self.substeps)
        try:
            q_rad, gripper = self.arm.execute(block, before)
        except ControlError as error:
            self.executor.fault(followed=not isinstance(error, ActuatorGuardError))
            raise
        return Tick(block, q_rad, gripper)

    @property
    def held_s(self) -> float:
        """How long the arm has been without motion since its last, to a tick; 0 while it moves and before it ever has."""
        if not self._has_moved or self.executor.state is ExecutorState.RUNNING:
            return 0.0
        return self.arm.now_s() - self._moved_s

    def why_held(self) -> str | None:
        """One sentence on what the arm waits for while it is in HOLD; None in every other state."""
        if self.executor.state is not ExecutorState.HOLD:
            return None
        held = f"the arm has held for {self.held_s:.2f} s"
        if self.error is not None:
            return f"{held}; the latest inference failed: {self.error}"
        if self._question is None:
            return f"{held}; no fresh chunk has come."
        return f"{held}; the policy has not answered for {self.arm.now_s() - self._question.asked_s:.2f} s."

    def close(self, longest_s: float = 10.0, break_off: Callable[[], None] = lambda: None) -> None:
        """End the worker; an inference that does not return within ``longest_s`` is left to itself and counted.

        Args:
            longest_s: How long to wait for one under way.
            break_off: Asks it to end, e.g. a policy's ``cancel``; called again and again, for it may just be beginning.
        """
        self._question = None
        self.counters["abandoned"] += not self._worker.close(longest_s, break_off)

    @property
    def _has_moved(self) -> bool:
        return self.executor.counters["chunks"] > 0

    @property
    def _pauses(self) -> int:
        """How often motion has been broken off: what was observed before is no ground to go on from."""
        return self.executor.counters["holds"] + self.executor.counters["stops"]

    def _expected_s(self) -> float:
        """What the next inference may take."""
        return _MARGIN * max(self._latencies) if self.config.latency_s is None and self._latencies else self._slowest_s()

    def _slowest_s(self) -> float:
        latency = self.config.latency_s
        if isinstance(latency, float | int):
            return float(latency)
        return max(self._latencies, default=0.0)

    def _is_due(self, now_s: float) -> bool:
        """Whether to ask now: the rows to execute are nearly done, or the motion would end before an answer came."""
        executor = self.executor
        if self._question is not None or now_s < self._not_before_s or executor.state is ExecutorState.FAULT:
            return False
        if executor.state is not ExecutorState.RUNNING:
            return True
        wanted = self.config.replan_rows
        if wanted is not None and executor.steps_to_row(max(wanted - self._rows_passed, 0) - 1) < self.substeps:
            return True
        expected_s = self._expected_s()
        lead = ceil(expected_s / self.arm.dt_s) + self.substeps if expected_s > 0 else 0
        return executor.steps_to_row(self._n_rows - 1) < self.substeps + lead

    def _ask(self, now_s: float) -> None:
        observation = self.planner.observe(self._prefix_span())
        q_rad, latency = self.arm.joint_state()[0], self.config.latency_s
        latency_s = _simulated(latency()) if callable(latency) else latency
        job = self._worker.submit(lambda: self.planner.plan(observation))  # last: what fails before leaves nothing under way
        self._question = PendingInference(job, now_s, self.executor.motion_s, self._pauses, q_rad, latency_s)
        self.counters["asked"] += 1

    def _prefix_span(self) -> PrefixSpan | None:
        """Rows of the present chunk that the arm carries out while the next one is inferred."""
        executor, expected_s = self.executor, self._expected_s()
        if executor.state is not ExecutorState.RUNNING or expected_s <= 0:
            return None
        under_way = executor.rows_reached
        nearly = executor.steps_to_row(under_way) * self.arm.dt_s < self._row_s / 2
        first = min(under_way + nearly, self._n_rows)
        rows = min(ceil(expected_s / self._row_s - 1e-6), self._n_rows - first)
        if rows <= 0:
            return None
        now = int(self._due_at_once)  # the next chunk begins with the row that has just been reached
        return PrefixSpan(self._rows_passed + self._rows_merged + first - now, rows + now)

    def _receive(self, now_s: float) -> None:
        """Take up the answer, where it has arrived; one that cannot be used is counted and asked for again."""
        question = self._question
        if question is None or not question.arrived(now_s):
            return
        while not question.job.wait(_WAIT_S):
            if self._interrupted():
                raise KeyboardInterrupt
        self._question = None
        try:
            plan = question.job.result()
        except Cosmos3Error as error:
            self._failed(error, now_s, "failed")
            return
        self._latencies.append(now_s - question.asked_s if question.latency_s is None else question.latency_s)
        if self._pauses > question.pauses:
            self.counters["stale"] += 1
            return
        try:
            joined = self._join(plan, question)
        except Cosmos3Error as error:
            self._failed(error, now_s, "refused")
            return
        if joined:
            self._failures, self.error, self._not_before_s = 0, None, -float("inf")

    def _join(self, plan: JointTrajectory, question: PendingInference) -> bool:
        executor = self.executor
        plan = instance_of(plan, JointTrajectory, "plan")
        elapsed_s = executor.motion_s - question.motion_s
        late = blend_chunk(plan, question.q_rad, elapsed_s, executor.reference, executor.limits, self.config.blend_s)
        if late is None:
            self.counters["stale"] += 1
            return False
        begun, motion_from_s = executor.rows_begun, executor.motion_s
        motion = executor.accept(late)
        self._due_at_once = bool(plan.t_s[0] < self.arm.dt_s)
        self._rows_passed = len(plan.t_s) - len(late.t_s)
        self._n_rows = len(motion.nominal_s) - 1
        self._rows_merged = len(late.t_s) - self._n_rows
        self._row_s = float(motion.nominal_s[-1] - motion.nominal_s[0]) / self._n_rows
        if self._on_joined is not None:
            latency_ms, wall_ms = (self.arm.now_s() - question.asked_s) * 1e3, question.job.wall_s * 1e3
            self._on_joined(
                AcceptedChunk(late, motion, motion_from_s, elapsed_s, self._rows_passed, latency_ms, wall_ms), begun
            )
        return True

    def _failed(self, error: Cosmos3Error, now_s: float, what: str) -> None:
        """Count it and let some time pass before the next question; where nothing has moved yet it is the caller's."""
        if isinstance(error, ConfigError) or not self._has_moved:
            raise error
        self.counters[what] += 1
        self.error = error
        pause_s = min(self.config.retry_s * 2**self._failures, self.config.longest_retry_s)
        self._failures += 1
        self._not_before_s = now_s + pause_s

    def _give_up_after_patience(self, now_s: float) -> None:
        if not self._has_moved or self.executor.state is ExecutorState.RUNNING:
            self._moved_s = now_s
        elif self.error is not None and now_s - self._moved_s > self.config.patience_s:
            raise self.error
