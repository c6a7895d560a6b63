"""The control loop: runs inference while the arm moves, for a simulated arm or a real one.

Each tick hands the arm the references of one control period, while a worker thread infers the next
chunk. On arrival its elapsed rows are dropped, the rest is blended into the motion
(``chunk_blending.py``) and planned, on that thread as well: on a simulated clock the tick waits for
it; in real time it is planned from a reference a little ahead. If no fresh chunk arrives in time,
the executor brakes and holds, and motion resumes from an observation taken after that.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from math import ceil, inf
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar, get_args

import numpy as np

from strands_cosmos3.actions.rotations import pose_distances
from strands_cosmos3.checks import (
    F64,
    instance_of,
    known_name,
    positive,
    whole_number,
    within,
)
from strands_cosmos3.collision import CollisionOutcome
from strands_cosmos3.control.chunk_blending import Seam, join_chunk, seam_speed
from strands_cosmos3.control.executor import (
    Executor,
    ExecutorState,
    PreparedMotion,
    ReferenceBlock,
    Takeover,
)
from strands_cosmos3.control.stall import STALL_S, OnStall, ProgressMonitor, plan_retreat
from strands_cosmos3.control.trajectory import JointState, PlannedMotion
from strands_cosmos3.errors import (
    ActuatorGuardError,
    ConfigError,
    ControlError,
    Cosmos3Error,
    InputError,
    SensorError,
    ServiceBusyError,
)
from strands_cosmos3.snapshots import Restorable
from strands_cosmos3.types import JointTrajectory, Observation

__all__ = [
    "ANCHOR_TOLERANCE_RAD",
    "AcceptedChunk",
    "Arm",
    "ControlLoop",
    "LoopConfig",
    "Planner",
    "PrefixSpan",
    "Tick",
]
_T = TypeVar("_T")
_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
_CANCEL_EVERY_S = 0.1
_COUNTERS = (
    "requested",
    "failed",
    "rejected",
    "expired",
    "deadline_misses",
    "idle_ticks",
    "abandoned_inferences",
    "anchored_on_measurement",
    "following_waits",
    *(f"collision_{outcome}" for outcome in CollisionOutcome if outcome != CollisionOutcome.CLEAR),
    *(f"seam_{outcome}" for outcome in Seam if outcome != Seam.BLENDED),
    "off_pose_held",
    "stalled",
    "retreats",
)
ANCHOR_TOLERANCE_RAD = 0.05
"""Distance of a joint from its reference, up to which a chunk departs from the reference: ten
times the sag under a payload of 0.5 kg, and a few centimetres at the hand.
"""
MAX_LATENCY_S = 60.0
_LATENCIES = 8  # inferences whose latency is remembered
_INTERRUPT_POLL_S = 0.1
_REACH_M = 2.0  # from a joint to the hand at most
_LATENCY_MARGIN = 1.25  # an inference may take longer than those before it
_MOST_WAITS = 3  # in a row for an arm that does not follow
_FOLLOWS_AGAIN = 0.5  # share of what the hand may be off, at which a wait ends
_MOST_PATH = 6000  # ticks, along which the arm may retreat


class Arm(Protocol):
    """The loop's interface to an arm: the measured joints, and a sink for references at a fixed
    rate.

    ``SimulatedArm`` (``sim.simulated_arm``) implements it; ``examples/07_your_own_arm.py`` is the
    place for libfranka or ROS 2.
    """

    @property
    def dt_s(self) -> float:
        """Time between two references."""
        ...

    def now_s(self) -> float:
        """Time on the arm's clock: simulated, or monotonic."""
        ...

    def joint_state(self) -> tuple[F64, F64, float | F64]:
        """Measured angles [n] in rad, velocities [n] in rad/s, and the gripper's open fraction
        ([G] of other than one).
        """
        ...

    def execute(self, block: ReferenceBlock, before: JointState) -> tuple[F64, F64]:
        """Follow the references at the ends of the next M steps of ``dt_s``; ``before`` is the one
        at their beginning.

        Returns:
            Measured angles [M, n] and open fractions [M], or [M, G].

        Raises:
            ActuatorGuardError: A reference must not be followed. No part of the block was followed.
            ControlError: The arm cannot go on. It is not known how much of the block was followed.
        """
        ...


@dataclass(frozen=True)
class PrefixSpan:
    """The ``rows`` of the present chunk, from index ``first`` on, that the arm executes while the
    next chunk is inferred.

    ``first`` coincides with the next chunk's first row: the row under way if rows are due one
    period after their observation, the row commanded now if the first is due at once.
    """

    first: int
    rows: int


class Planner(Protocol):
    """The source of chunks. ``observe`` is called between two ticks, ``plan`` on a worker thread.

    An :class:`Observation` is given its anchor by the loop: the chunk is to depart from
    ``q_anchor_rad``; in real time also how long the chunk can be waited for. Anything else is
    passed on as it is; such a planner commands absolute angles.
    """

    def observe(self, action_prefix: PrefixSpan | None) -> Any:
        """Return what ``plan`` needs; ``action_prefix`` is None if no motion is under way or the
        arm is off its reference.
        """
        ...

    def plan(self, observation: Any) -> JointTrajectory:
        """Return the chunk for an observation.

        Raises:
            Cosmos3Error: Inference failed. A :class:`ConfigError` ends the loop; others are
                counted, and the loop tries again.
        """
        ...


@dataclass(frozen=True)
class LoopConfig:
    """Settings of the control loop.

    Args:
        hz: Ticks per second; a tick is a whole number of the arm's reference steps.
        replan_rows: Rows of a chunk after which the next is requested; None requests as late as the
            latency allows.
        latency_s: Duration of an inference on the arm's clock. 0 stops the clock during inference;
            a number, or a callable that returns one, delivers the chunk that much later, whatever
            inference takes; None delivers it once it is there.
        blend_s: Time over which the offset between an arriving chunk and the motion under way fades
            out, unless that would make the hand too fast.
        retry_s, longest_retry_s: First and longest pause after a failed inference; the pause
            doubles each time.
        anchor_tolerance_rad: If every joint is this close to its reference, a chunk departs from
            the reference, so that the servos' sag does not add up. Otherwise it departs from the
            measured angles.
        patience_s: Time that the arm may hold before a failed inference ends the loop; a running
            one is waited for. Time that the reference waits for an arm that does not follow.
        following_m, following_rad: How far the hand may be from its reference. Farther behind, the
            reference brakes and waits until the arm follows again; after ``patience_s`` a chunk
            departs from where the arm is. The third wait in a row that is in vain ends the loop, in
            HOLD. Where its geometry is not known, the joints count.
        on_stall: What follows where the arm rests, or circles on the spot, while its chunks repeat
            (:mod:`~strands_cosmos3.control.stall`): ``report`` counts it; ``stop`` also ends the
            loop, with a :class:`ControlError`; ``retreat`` leads back along the executed path and
            aside before the next chunk is requested, if the arm's geometry is known.
        most_retreats: How often, until the loop ends.

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
    anchor_tolerance_rad: float = ANCHOR_TOLERANCE_RAD
    following_m: float = 0.05
    following_rad: float = 0.3
    on_stall: OnStall = "report"
    most_retreats: int = 3

    def __post_init__(self) -> None:
        for name in (
            "hz",
            "blend_s",
            "retry_s",
            "longest_retry_s",
            "patience_s",
            "anchor_tolerance_rad",
            "following_m",
            "following_rad",
        ):
            positive(getattr(self, name), name)
        if self.replan_rows is not None:
            whole_number(self.replan_rows, "replan_rows", 1)
        known_name(self.on_stall, "on_stall", get_args(OnStall))
        whole_number(self.most_retreats, "most_retreats", 0)
        if self.latency_s is not None and not callable(self.latency_s):
            object.__setattr__(self, "latency_s", _checked_latency(self.latency_s))


def _checked_latency(latency_s: float) -> float:
    return float(within(latency_s, "latency_s", 0.0, MAX_LATENCY_S, ()))


def _next_latency(latency: Callable[[], float]) -> float:
    """The next inference's latency by a caller's function."""
    try:
        latency_s = latency()
    except TypeError as error:
        raise InputError(f"latency must return seconds without arguments ({error}).") from error
    return _checked_latency(latency_s)


@dataclass(frozen=True, eq=False)
class AcceptedChunk:
    """A chunk that the executor has accepted.

    Args:
        plan, rows_passed: The remaining rows, timed from now (the intended path), and the number of
            those dropped.
        motion: The executor's motion through them.
        motion_from_s: Time on the motion's clock at acceptance.
        age_s: Time on it since the chunk's observation.
        latency_ms: Time from the request to acceptance on the arm's clock.
        wall_ms: Wall-clock time of inference and planning. seam_rad_s: See ``Rollout``.
        q_reference_rad, limb_anchors: The reference [n] at the observation, and by limb the pose
            [4, 4] that the chunk departs from; none for a plan without poses.
        is_retreat: Whether it is no chunk of the planner's but a retreat.
    """

    plan: JointTrajectory
    motion: PlannedMotion
    motion_from_s: float
    age_s: float
    rows_passed: int
    latency_ms: float
    wall_ms: float
    seam_rad_s: float
    q_reference_rad: F64
    limb_anchors: Mapping[str, F64]
    is_retreat: bool = False


@dataclass(frozen=True, eq=False)
class Tick:
    """The references handed to the arm in one tick, and the angles [M, n] and open fractions
    ([M], [M, G]) measured after.
    """

    block: ReferenceBlock
    q_rad: F64
    gripper: F64


@dataclass(frozen=True, eq=False)
class PendingInference:
    """An inference under way, and the state of the loop when it was requested."""

    result: Future[tuple[JointTrajectory, float]]
    requested_s: float
    motion_s: float
    pauses: int
    q_departure_rad: F64
    q_reference_rad: F64
    latency_s: float | None
    is_retreat: bool = False

    def arrived(self, now_s: float) -> bool:
        """Whether the chunk is due; on a simulated clock the loop then waits for it."""
        return (
            self.result.done()
            if self.latency_s is None
            else now_s >= self.requested_s + self.latency_s - 1e-9
        )


@dataclass(frozen=True, eq=False)
class PendingPlan:
    """The planning of a chunk under way: the reference it starts from, and the motion through the
    remaining rows, if any.
    """

    takeover: Takeover
    result: Future[tuple[PreparedMotion, Seam] | None]


def _work(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        future, call = item
        try:
            future.set_result(call())
        except BaseException as error:  # raised again by Future.result, in the thread that reads it
            future.set_exception(error)


class Worker:
    """One daemon thread, started by the first call, that runs one call after another.

    A ``ThreadPoolExecutor`` is joined at exit, but a call into a user's policy may never return and
    must not block that.
    """

    def __init__(self) -> None:
        self._calls: _Calls = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Run a call on the thread, after those submitted before it."""
        if self._thread is None:
            self._calls = SimpleQueue()  # an abandoned thread keeps its own
            self._thread = threading.Thread(
                target=_work, args=(self._calls,), name="planner", daemon=True
            )
            self._thread.start()
        future: Future[_T] = Future()
        self._calls.put((future, call))
        return future

    def close(self, timeout_s: float, cancel: Callable[[], None] = lambda: None) -> bool:
        """Return whether the thread ended, i.e. its call returned within ``timeout_s``; it is
        abandoned otherwise.

        ``cancel`` asks the call to end. It is called repeatedly, because the call may only just be
        starting.
        """
        if self._thread is None:
            return True
        self._calls.put(None)
        deadline_s = time.monotonic() + timeout_s
        while self._thread.is_alive():
            cancel()
            left_s = deadline_s - time.monotonic()
            self._thread.join(max(min(left_s, _CANCEL_EVERY_S), 0.0))
            if left_s <= 0:
                break
        ended = not self._thread.is_alive()
        self._thread = None
        return ended


class ControlLoop(Restorable):
    """Drives an arm tick by tick.

    Args:
        arm, planner, config: The arm, the source of chunks, the settings.
        executor: Plans and guards the references; it starts at the arm's configuration.
        on_accepted: Called with each accepted chunk, before the arm follows it, and the number of
            rows begun of the previous.
        interrupted: Returns whether the user wants to stop; waiting for an inference then ends.

    Attributes:
        counters: ``requested``; ``failed`` (no chunk), ``rejected`` (a chunk that cannot be
            followed), ``expired`` (a chunk whose rows have all passed, or whose observation
            precedes a hold or stop; or that a server refused since it would come too late),
            ``deadline_misses`` (the motion ended before a fresh chunk arrived), ``idle_ticks``
            (ticks begun without motion after the first chunk),
            ``abandoned_inferences`` (inferences that had not ended when the loop was closed),
            ``anchored_on_measurement`` (inferences requested while the arm was too far from its
            reference to depart from there); of the accepted chunks ``collision_stopped``,
            ``_avoided``, ``_touching`` and ``_unchecked`` (:class:`CollisionOutcome`), and
            ``off_pose_held``, rows that hold the arm because they would miss their pose;
            ``seam_slowed`` (chunks that were blended in over a longer time, for the hand's speed)
            and ``seam_braked`` (chunks for which the arm braked instead); ``stalled`` (stalls) and
            ``retreats`` (those that were followed by one).
        error: The latest inference's error; None once an inference has succeeded.

    Raises:
        ConfigError: A tick is not a whole number of the arm's reference steps.
    """

    STATE = (
        "counters",
        "error",
        "_pending",
        "_planning",
        "_ticks_ahead",
        "_latencies",
        "_rows_passed",
        "_first_row",
        "_due_at_once",
        "_rows_remaining",
        "_row_s",
        "_failures",
        "_not_before_s",
        "_moved_s",
        "_followed",
        "_q_rad",
        "_vain_waits",
        "_path",
        "_plan",
        "_retreat_due",
        "_retreats_now",
    )
    PARTS = ("_progress",)

    def __init__(
        self,
        arm: Arm,
        planner: Planner,
        executor: Executor,
        config: LoopConfig = LoopConfig(),
        on_accepted: Callable[[AcceptedChunk, int], None] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        self.arm = arm
        self.planner = planner
        self.executor = executor
        self.config = config
        steps = 1.0 / (self.config.hz * arm.dt_s)
        if steps < 1 - 1e-9 or abs(steps - round(steps)) > 1e-6:
            raise ConfigError(
                f"{self.config.hz:g} ticks per second are not a whole number of reference steps "
                f"of {arm.dt_s * 1e3:g} ms; "
                f"use a divisor of {1 / arm.dt_s:g} Hz."
            )
        self.substeps = round(steps)
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self.error: Cosmos3Error | None = None
        self._on_accepted = on_accepted
        self._interrupted = interrupted
        self._worker = Worker()
        self._pending: PendingInference | None = None
        self._planning: PendingPlan | None = None
        self._ticks_ahead = 1  # in real time, the reference that a chunk is planned from
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        self._rows_passed = 0  # rows of the present chunk that had passed when it was accepted
        self._first_row = 0  # of those that remained then and were not due at once
        self._due_at_once = False  # whether the chunk's own first row was
        self._rows_remaining = 0  # rows of the present chunk that remained then
        self._row_s = 0.0
        self._failures = 0
        self._not_before_s = self._moved_s = -float("inf")
        self._followed: JointTrajectory | None = None  # the chunk taken up last
        self._q_rad: F64 | None = None  # measured after the last tick
        self._vain_waits = 0  # for the arm, since it last followed at rest
        self._progress = ProgressMonitor()
        # the references at the ends of ticks
        self._path: deque[F64] = deque([executor.reference.q_rad], maxlen=_MOST_PATH)
        self._plan: JointTrajectory | None = None  # that was taken up in this tick
        self._retreat_due = self._retreats_now = False

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the state between two ticks, after waiting for an inference under way;
        the arm, the executor and the planner have their own. ConfigError in real time.
        """
        if self.config.latency_s is None:
            raise ConfigError("an episode in real time cannot be saved; use a simulated latency.")
        results: list[Future[Any]] = [
            pending.result for pending in (self._pending, self._planning) if pending is not None
        ]
        wait(results)
        return super().snapshot()

    def tick(self) -> Tick:
        """Run one control period: accept the chunk that has arrived, request the next if it is due,
        move.

        Raises:
            ConfigError: From the planner. Before the first motion, any of the planner's errors.
            Cosmos3Error: The latest inference's error, once the arm has held for longer than
                ``patience_s``; that it does not follow (:class:`ControlError`).
            ControlError: The arm cannot go on, or (:class:`ActuatorGuardError`) a reference must
                not be followed. The executor is in FAULT, and :meth:`advance` brakes and holds.
            KeyboardInterrupt: The user interrupted the wait for an inference.
        """
        now_s = self.arm.now_s()
        if self._waits and not self._lags:
            self._vain_waits = 0
        self._receive(now_s)
        if self._is_due(now_s):
            self._request(now_s)
            self._receive(now_s)
        self._wait_for_arm()
        self._notice_stall(now_s)
        self._give_up_after_patience(now_s)
        self.counters["idle_ticks"] += self._waits
        holds = self.executor.counters["holds"]
        tick = self.advance()
        self.counters["deadline_misses"] += self.executor.counters["holds"] - holds
        return tick

    def advance(self) -> Tick:
        """As :meth:`tick`, without requesting a chunk: continue the present motion, e.g. to
        carry out a stop.
        """
        before = self.executor.reference
        block = self.executor.advance(self.substeps)
        try:
            q_rad, gripper = self.arm.execute(block, before)
        except ControlError as error:
            self.executor.fault(followed=not isinstance(error, ActuatorGuardError))
            raise
        self._q_rad = q_rad[-1]
        self._path.append(block.q_rad[-1])
        self._progress.add(self.arm.now_s(), q_rad[-1])
        return Tick(block, q_rad, gripper)

    @property
    def held_s(self) -> float:
        """Time since the arm last moved, to a tick; 0 while it moves and before its first
        motion.
        """
        return self.arm.now_s() - self._moved_s if self._waits else 0.0

    def why_held(self) -> str | None:
        """One sentence on what the arm waits for in HOLD; None in every other state."""
        if self.executor.state is not ExecutorState.HOLD:
            return None
        hold = f"the arm has held for {self.held_s:.2f} s"
        if self._lags:
            return f"{hold}; the hand does not follow its reference."
        if self.error is not None:
            return f"{hold}; the latest inference failed: {self.error}"
        if self._pending is None:
            return f"{hold}; no fresh chunk has arrived."
        return (
            f"{hold}; the policy has not answered for "
            f"{self.arm.now_s() - self._pending.requested_s:.2f} s."
        )

    def close(self, timeout_s: float = 10.0, cancel: Callable[[], None] = lambda: None) -> None:
        """End the worker thread. An inference that does not end within ``timeout_s`` is abandoned
        and counted.

        ``cancel`` (e.g. a policy's) asks it to end, repeatedly, because the inference may only just
        be starting.
        """
        self._pending = self._planning = None
        self.counters["abandoned_inferences"] += not self._worker.close(timeout_s, cancel)

    @property
    def _has_moved(self) -> bool:
        return self.executor.counters["chunks"] > 0

    @property
    def _waits(self) -> bool:
        """Whether the arm has no motion, after its first one."""
        return self._has_moved and self.executor.state is not ExecutorState.RUNNING

    @property
    def _pauses(self) -> int:
        """Number of holds and stops so far; an observation from before one is no basis for
        further motion.
        """
        return self.executor.counters["holds"] + self.executor.counters["stops"]

    def _expected_s(self) -> float:
        """Expected duration of the next inference on the arm's clock."""
        latency = self.config.latency_s
        if isinstance(latency, float | int):
            return float(latency)
        slowest_s = max(self._latencies, default=0.0)
        return _LATENCY_MARGIN * slowest_s if latency is None else slowest_s

    def _is_due(self, now_s: float) -> bool:
        """Whether to request a chunk now: ``replan_rows`` are nearly done, or the motion would
        end before it arrived.
        """
        executor = self.executor
        if (
            self._pending is not None
            or now_s < self._not_before_s
            or executor.state is ExecutorState.FAULT
        ):
            return False
        if executor.state is not ExecutorState.RUNNING:
            gives_up = self._vain_waits >= _MOST_WAITS
            return not self._lags or (self.held_s > self.config.patience_s and not gives_up)
        if self._retreat_due:
            return True
        rows = None if self._retreats_now else self.config.replan_rows
        if (
            rows is not None
            and executor.steps_to_row(max(rows - self._rows_passed, 0) - 1) < self.substeps
        ):
            return True
        expected_s = self._expected_s()
        lead = ceil(expected_s / self.arm.dt_s) + self.substeps if expected_s > 0 else 0
        return executor.steps_to_row(self._rows_remaining - 1) < self.substeps + lead

    @property
    def _lags(self) -> bool:
        most = _FOLLOWS_AGAIN if self._vain_waits else 1.0
        return self._lag(self.executor.reference.q_rad) > most

    def _lag(self, q_rad: F64) -> float:
        """How far the hand is from that at reference angles [n], in shares of what it may be."""
        if self._followed is None or self._q_rad is None:
            return 0.0
        config = self.config
        off = np.abs(q_rad - self._q_rad)
        if off.sum() < min(config.following_m / _REACH_M, config.following_rad):
            return 0.0  # most ticks compute no pose
        if self._followed.arm is None:
            return float(off.max()) / config.following_rad
        poses = self._followed.arm.limb_poses(np.stack((q_rad, self._q_rad)))
        distances = [pose_distances(*T) for T in poses.values()]
        return float(np.max(distances / np.array((config.following_m, config.following_rad))))

    def _wait_for_arm(self) -> None:
        """Brake where the motion would lead an arm that does not follow still farther."""
        executor = self.executor
        followed = self._followed
        if executor.state is not ExecutorState.RUNNING or followed is None:
            return
        lag = self._lag(executor.reference.q_rad)
        if lag > 1 and self._lag(executor.takeover(self.substeps).reference.q_rad) > lag:
            executor.take_up(executor.takeover().brake(followed))
            self.counters["following_waits"] += 1
            self._vain_waits += 1

    def _request(self, now_s: float) -> None:
        q_departure = self.arm.joint_state()[0]
        latency = self.config.latency_s
        reference = self.executor.reference.q_rad
        off = self._off_reference(q_departure, reference)
        if self._retreat_due:
            self._request_retreat(now_s, reference)
            return
        is_chunk = not (off or self._retreats_now)
        observation = self.planner.observe(self._prefix_span() if is_chunk else None)
        if isinstance(observation, Observation):
            q_departure = observation.q_rad if off else reference
            observation = observation.anchored(q_departure, self._wait_s)
        latency_s = _next_latency(latency) if callable(latency) else latency

        def infer() -> tuple[JointTrajectory, float]:
            started_s = time.perf_counter()
            return self.planner.plan(observation), time.perf_counter() - started_s

        # Submitted last: if anything above fails, no inference is under way.
        result = self._worker.submit(infer)
        motion_s = self.executor.motion_s
        pauses = self._pauses
        self._pending = PendingInference(
            result, now_s, motion_s, pauses, q_departure, reference, latency_s
        )
        self.counters["requested"] += 1
        self.counters["anchored_on_measurement"] += off

    def _request_retreat(self, now_s: float, q_rad: F64) -> None:
        """Plan a retreat on the worker's thread, as if it were a chunk."""
        assert self._followed is not None  # the arm has stalled
        assert self._followed.arm is not None
        path = np.array([*self._path, q_rad])
        of_retreat = (
            path,
            self._followed.arm,
            self.executor.limits,
            self.executor.takeover().gripper,
            self.counters["retreats"],
        )
        result = self._worker.submit(lambda: (plan_retreat(*of_retreat), 0.0))
        latency_s = None if self.config.latency_s is None else 0.0
        about = now_s, self.executor.motion_s, self._pauses, q_rad, q_rad
        self._pending = PendingInference(result, *about, latency_s, is_retreat=True)

    def _notice_stall(self, now_s: float) -> None:
        plan, self._plan = self._plan, None
        if plan is None or not self._progress.is_stalled(now_s, plan):
            return
        self.counters["stalled"] += 1
        if self.config.on_stall == "report":
            return
        retreats = self.config.on_stall == "retreat" and plan.arm is not None
        if retreats and self.counters["retreats"] < self.config.most_retreats:
            self._retreat_due = True
            return
        self.executor.stop()
        raise ControlError(
            f"the arm has stalled: it has stayed on the spot for {STALL_S:g} s while the chunks "
            f"repeat, after {self.counters['retreats']} retreats. Look at what the cameras show, "
            "or pass on_stall='report'."
        )

    @property
    def _wait_s(self) -> float:
        """Time until the arm rests, after which a chunk that is requested now has expired; infinite
        if it rests, or its clock is not the policy's.
        """
        if self.config.latency_s is not None:
            return inf
        return self.executor.steps_to_rest * self.arm.dt_s or inf

    def _off_reference(self, q_rad: F64, q_reference_rad: F64) -> bool:
        """Whether angles [n] are too far from a reference for a chunk to depart from that."""
        off_rad = np.abs(q_rad - q_reference_rad).max()
        return bool(off_rad > self.config.anchor_tolerance_rad)

    def _prefix_span(self) -> PrefixSpan | None:
        executor = self.executor
        expected_s = self._expected_s()
        if executor.state is not ExecutorState.RUNNING or expected_s <= 0:
            return None
        under_way = executor.rows_reached
        nearly = executor.steps_to_row(under_way) * self.arm.dt_s < self._row_s / 2
        first = min(under_way + nearly, self._rows_remaining)
        rows = min(ceil(expected_s / self._row_s - 1e-6), self._rows_remaining - first)
        if rows <= 0:
            return None
        # the next chunk then begins with the row that has just been reached
        now = int(self._due_at_once)
        return PrefixSpan(self._first_row + first - now, rows + now)

    def _receive(self, now_s: float) -> None:
        """Take up the chunk that has arrived, if any, as soon as it is planned; one that cannot
        be used is counted.
        """
        pending = self._pending
        counter = "failed"
        if pending is None or not pending.arrived(now_s):
            return
        latency_s = now_s - pending.requested_s if pending.latency_s is None else pending.latency_s
        try:
            plan, wall_s = self._result_of(pending.result)
            counter = "rejected"
            taken_up = self._pauses == pending.pauses and self._take_up(plan, pending, wall_s * 1e3)
        except Cosmos3Error as error:
            self._pending = self._planning = None
            if counter == "rejected":
                self._latencies.append(latency_s)
            self._failed(error, now_s, counter)
            return
        if taken_up is None:
            return
        self._pending = self._planning = None
        self._latencies.append(latency_s)
        if taken_up:
            self._failures = 0
            self.error = None
            self._not_before_s = -float("inf")
            if self.executor.state is ExecutorState.HOLD:  # it braked, and is asked again at rest
                self._not_before_s = now_s + self.executor.steps_to_rest * self.arm.dt_s
        else:
            self.counters["expired"] += 1

    def _result_of(self, result: Future[_T]) -> _T:
        while not wait((result,), _INTERRUPT_POLL_S).done:
            if self._interrupted():
                raise KeyboardInterrupt
        if result.exception() is not None:
            self._pending = self._planning = None  # whatever it is, it is raised once
        return result.result()

    def _take_up(
        self, plan: JointTrajectory, pending: PendingInference, wall_ms: float
    ) -> bool | None:
        """Hand a chunk to the executor; None while it is being planned, False if all its rows
        have passed.
        """
        executor = self.executor
        in_real_time = pending.latency_s is None
        if self._planning is None:
            self._planning = self._plan_ahead(
                plan, pending, self._ticks_ahead if in_real_time else 0
            )
        if in_real_time and not self._planning.result.done():
            return None
        takeover = self._planning.takeover
        planned = self._result_of(self._planning.result)
        if planned is None:
            return False
        prepared, seam = planned
        if (steps := executor.steps_until(prepared)) != 0:
            if steps < 0:  # planning took longer than expected
                self._ticks_ahead += 1
                self._planning = self._plan_ahead(plan, pending, self._ticks_ahead)
            return None
        begun = executor.rows_begun
        rest = prepared.trajectory
        motion = executor.take_up(prepared)
        if seam is not Seam.BLENDED:
            self.counters[f"seam_{seam}"] += 1
        if motion is None:
            return True
        self._followed = rest
        self._retreats_now = pending.is_retreat
        if pending.is_retreat:
            self.counters["retreats"] += 1
            self._retreat_due = False
        else:
            self._plan = rest
        self._due_at_once = bool(plan.t_s[0] < self.arm.dt_s)
        self._rows_passed = len(plan.t_s) - len(rest.t_s)
        self._rows_remaining = len(motion.nominal_s) - 1
        self._first_row = len(plan.t_s) - self._rows_remaining
        self._row_s = float(motion.nominal_s[-1]) / self._rows_remaining
        if rest.collision.outcome is not CollisionOutcome.CLEAR:
            self.counters[f"collision_{rest.collision.outcome}"] += 1
        self.counters["off_pose_held"] += int(rest.held.sum())
        if self._on_accepted is not None:
            latency_ms = (self.arm.now_s() - pending.requested_s) * 1e3
            age_s = takeover.motion_s - pending.motion_s
            seam_rad_s = seam_speed(plan, pending.q_departure_rad, age_s, takeover.reference)
            timing = takeover.motion_s, age_s, self._rows_passed, latency_ms, wall_ms, seam_rad_s
            anchors = {name: poses.T_base_anchor for name, poses in plan.limb_poses.items()}
            self._on_accepted(
                AcceptedChunk(
                    rest, motion, *timing, pending.q_reference_rad, anchors, pending.is_retreat
                ),
                begun,
            )
        return True

    def _plan_ahead(
        self, plan: JointTrajectory, pending: PendingInference, ticks: int
    ) -> PendingPlan:
        """Plan a chunk on the worker's thread, from the reference some ticks ahead."""
        takeover = self.executor.takeover(ticks * self.substeps)
        blend_s = self.config.blend_s
        q_now = pending.q_departure_rad if self._q_rad is None else self._q_rad
        # to where a pushed arm is, the reference may go as fast as it can; not to where it was
        was_pushed = self._off_reference(pending.q_departure_rad, pending.q_reference_rad)
        pushed = was_pushed and self._off_reference(q_now, takeover.reference.q_rad)

        def prepare() -> tuple[PreparedMotion, Seam] | None:
            chunk = instance_of(plan, JointTrajectory, "plan")
            age_s = takeover.motion_s - pending.motion_s
            arm = None if pushed else chunk.arm
            return join_chunk(chunk, pending.q_departure_rad, age_s, takeover, blend_s, arm)

        return PendingPlan(takeover, self._worker.submit(prepare))

    def _failed(self, error: Cosmos3Error, now_s: float, counter: str) -> None:
        """Count a failure and pause before the next request; before the first motion, raise it."""
        final = isinstance(error, SensorError) and error.final
        if isinstance(error, ConfigError) or final or not self._has_moved:
            raise error
        self.error = error
        pause_s = self.config.retry_s * 2**self._failures
        if isinstance(error, ServiceBusyError):  # the chunk would have come too late
            counter, pause_s = "expired", error.retry_after_s
        else:
            self._failures += 1
        self.counters[counter] += 1
        self._not_before_s = now_s + min(pause_s, self.config.longest_retry_s)

    def _give_up_after_patience(self, now_s: float) -> None:
        if not self._waits:
            self._moved_s = now_s
        elif self.held_s > self.config.patience_s:
            if self.error is not None:
                raise self.error
            if self._vain_waits >= _MOST_WAITS and self._lags:
                raise ControlError(
                    f"the hand does not follow its reference, after {_MOST_WAITS} waits of "
                    f"{self.config.patience_s:g} s; free the arm, and start again."
                )
