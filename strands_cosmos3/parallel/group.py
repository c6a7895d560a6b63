"""A group of ranks: send them requests, wait for all of them, and end all of them if one fails.

The group knows its ranks through :class:`RankHandle`. A working rank sends a heartbeat every
second; a rank that is silent for some seconds counts as stopped. Importing this loads no torch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from strands_cosmos3 import errors
from strands_cosmos3.errors import (
    BackendError,
    Cosmos3Error,
    RankFailedError,
    RanksError,
    RankSilentError,
)

HEARTBEAT_S = 1.0
"""Interval between two heartbeats of a working rank."""
RESTART_NOTE = "All ranks were ended; the next call starts them again."
_WAIT_S = 0.02
_ATTRIBUTION_S = 1.0
_LOADING_GRACE_S = 30.0

OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class RankStatus:
    """A message from a rank.

    Args:
        kind: ``ready`` after loading, ``heartbeat`` during work, then one ``answer`` or ``error``
            for each request.
        progress: Heartbeats: a counter that grows as work proceeds.
        step: Heartbeats: denoising steps done, and their total.
        payload: Rank 0's answer.
        error: Type name and message of an error. After an error of this package the rank accepts
            the next request.
    """

    kind: Literal["ready", "heartbeat", "answer", "error"]
    progress: int = 0
    step: tuple[int, int] | None = None
    payload: bytes = b""
    error: tuple[str, str] = ("", "")


class RankHandle(ABC):
    """One rank, as its group controls it."""

    name: str
    """For messages, e.g. ``rank 1 (process 4711)``."""

    @abstractmethod
    def submit(self, payload: bytes) -> None:
        """Send a request without waiting; a RankLostError or RankSilentError if the rank cannot
        be reached.
        """

    @abstractmethod
    def statuses(self, wait_s: float) -> Sequence[RankStatus]:
        """Return the messages since the last call; wait at most ``wait_s`` for the first.

        Raises:
            RankLostError, RankSilentError: The rank ended or stopped.
        """

    @property
    def lost(self) -> bool:
        """Whether the rank is known to be gone."""
        return False

    @abstractmethod
    def kill(self) -> None:
        """End the rank at once, even if it is stopped or hangs, and wait until it is gone.
        Idempotent.
        """

    def close(self) -> None:
        """Let the rank end by itself; end it if it takes more than a few seconds."""
        self.kill()


@dataclass(frozen=True)
class RankTimeouts:
    """How long a group waits [s]: for all ranks to load, a heartbeat of a working rank, and
    progress of any rank.
    """

    start_s: float = 900.0
    silent_s: float = 8.0
    stalled_s: float = 600.0


class RankGroup:
    """Ranks that answer requests together. The first request starts them, and so does the first one
    after a failure.

    ``start`` returns their handles, rank 0 first, and registers on the given stack what ends them.
    ``handles`` are those running; ``starts`` counts how often ranks were started.
    """

    def __init__(
        self,
        start: Callable[[ExitStack], Sequence[RankHandle]],
        timeouts: RankTimeouts,
    ):
        self.timeouts = timeouts
        self.handles: tuple[RankHandle, ...] = ()
        self.starts = 0
        self._start = start
        self._end = ExitStack()

    def start(self) -> None:
        """Start the ranks, if they are not running, and wait until all have loaded. After any error
        every rank was ended.

        If one was lost between two requests, all are started again.
        """
        if any(handle.lost for handle in self.handles):
            self.kill()
        if self.handles:
            return
        self.starts += 1
        with ExitStack() as on_failure:
            on_failure.callback(self.kill)
            self.handles = tuple(self._start(self._end))
            raise_error(_Round(self.handles, "ready", self.timeouts).collect()[0])
            on_failure.pop_all()

    def infer(self, payload: bytes, on_step: OnStep | None = None) -> bytes:
        """Let all ranks answer a request (``payload.encode_requests``); return rank 0's answer
        (``payload.decode_results``).

        ``on_step`` is called with (denoising steps done, total), as rank 0 reports them.

        Raises:
            RanksError: A rank was lost, silent or failed. Every rank was ended.
            Cosmos3Error: All ranks rejected the request alike; they accept the next one.
        """
        self.start()
        with ExitStack() as on_failure:
            # also when the caller is interrupted: the next answer would be this request's
            on_failure.callback(self.kill)
            for handle in self.handles:
                handle.submit(payload)
            answers = _Round(self.handles, "answer", self.timeouts, on_step).collect()
            on_failure.pop_all()
        raise_error(answers[0])
        return answers[0].payload

    def close(self) -> None:
        """Let the ranks end in order. Idempotent."""
        with self._end:
            for handle in self.handles:
                handle.close()
        self.handles = ()

    def kill(self) -> None:
        """End the ranks at once."""
        self.handles = ()
        self._end.close()


class _Round:
    """One wait for all ranks: one answer, or one known error, of each."""

    def __init__(
        self,
        handles: Sequence[RankHandle],
        kind: Literal["ready", "answer"],
        timeouts: RankTimeouts,
        on_step: OnStep | None = None,
    ):
        now = time.monotonic()
        loading = kind == "ready"
        self._handles = handles
        self._kind = kind
        self._on_step = on_step
        self._silent_s = timeouts.start_s if loading else timeouts.silent_s
        self._stalled_s = max(timeouts.stalled_s, self._silent_s)
        self._grace_s = max(timeouts.silent_s, _LOADING_GRACE_S if loading else 0.0)
        self._heard_at = [now] * len(handles)
        self._progress = [0] * len(handles)
        self._moved_at = now
        self._rejected_at = float("inf")
        self._answers: dict[int, RankStatus] = {}

    def collect(self) -> list[RankStatus]:
        """Return one status of each rank, all of the same kind and error. Errors: as
        :meth:`RankGroup.infer`.
        """
        while pending := self._pending():
            for rank in pending:
                for status in self._handles[rank].statuses(_WAIT_S if rank == pending[0] else 0.0):
                    self._take(rank, status)
            self._check_time()
        answers = [self._answers[rank] for rank in range(len(self._handles))]
        if len({(status.kind, status.error) for status in answers}) > 1:
            pairs = zip(self._handles, answers, strict=True)
            listed = "; ".join(
                f"{handle.name}: {status.kind} {': '.join(status.error)}"
                for handle, status in pairs
            )
            raise RankFailedError(f"ranks disagree ({listed}). {RESTART_NOTE}")
        return answers

    def _pending(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in range(len(self._handles)) if rank not in self._answers]

    def _take(self, rank: int, status: RankStatus) -> None:
        now = self._heard_at[rank] = time.monotonic()
        if status.kind == "heartbeat":
            if status.progress > self._progress[rank]:
                self._progress[rank] = status.progress
                self._moved_at = now
            if status.step is not None and rank == 0 and self._on_step is not None:
                self._on_step(*status.step)
        elif status.kind == "error" and not is_rejection(status.error[0]):
            self._raise_failure(rank, status)
        elif status.kind in (self._kind, "error"):
            self._answers[rank] = status
            self._moved_at = now
            if status.kind == "error":
                self._rejected_at = min(self._rejected_at, now)

    def _check_time(self) -> None:
        now = time.monotonic()
        pending = self._pending()
        for rank in pending:
            if (silent_s := now - self._heard_at[rank]) > self._silent_s:
                raise RankSilentError(
                    f"{self._handles[rank].name} has sent no heartbeat for {silent_s:.0f} s: it "
                    f"was stopped, or hangs. {RESTART_NOTE}"
                )
        if now - self._moved_at > self._stalled_s:
            raise RankSilentError(
                f"no rank has made progress for {now - self._moved_at:.0f} s. {RESTART_NOTE}"
            )
        if pending and now - self._rejected_at > self._grace_s:
            kind, message = next(
                status.error for status in self._answers.values() if status.kind == "error"
            )
            raise RankFailedError(
                f"some ranks rejected a request that others work on ({kind}: "
                f"{message}). {RESTART_NOTE}"
            )

    def _raise_failure(self, rank: int, status: RankStatus) -> None:
        """Raise for the rank at fault: one that lost its neighbour fails too, and often reports
        first.
        """
        deadline = time.monotonic() + _ATTRIBUTION_S
        while time.monotonic() < deadline:
            for handle in self._handles:
                if handle is not self._handles[rank]:
                    handle.statuses(_WAIT_S)  # raises if that rank is lost
        raise RankFailedError(
            f"{self._handles[rank].name} failed with {': '.join(status.error)}. {RESTART_NOTE}"
        )


def raise_error(status: RankStatus) -> None:
    """Raise a rank's error, if it has one."""
    if status.kind == "error":
        raise error_from_name(*status.error)


def is_rejection(name: str) -> bool:
    """Return whether an error of that name rejects a request, so that the ranks can go on."""
    kind = _error_kind(name)
    return kind is not None and not issubclass(kind, RanksError)


def _error_kind(name: str) -> type[Cosmos3Error] | None:
    kind = vars(errors).get(name)
    return kind if isinstance(kind, type) and issubclass(kind, Cosmos3Error) else None


def error_from_name(name: str, message: str) -> Cosmos3Error:
    """Return an error of this package that another process raised; a ``BackendError`` for any
    other name.
    """
    kind = _error_kind(name)
    if kind is None:
        return BackendError(f"{name}: {message}")
    if kind is errors.UnknownNameError:  # its constructor composes the message
        return errors.InputError(message)
    return kind(message)
