"""The leader of a group of ranks: hands them requests, waits for all of them, and ends all where one fails.

It knows ranks by what they say (:class:`Member`), not by how they were started, so subprocesses and actors are led alike.
A rank that works gives a sign of life every second; one that says nothing for some seconds is taken for stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, Protocol

from strands_cosmos3 import errors
from strands_cosmos3.errors import BackendError, Cosmos3Error, RankFailedError, RankLostError, RanksError, RankSilentError

BEAT_S = 1.0
"""Seconds between two signs of life of a rank that works."""
_WAIT_S = 0.02
_ATTRIBUTION_S = 1.0
_LOADING_GRACE_S = 30.0
_NEXT = "All ranks were ended; the next call starts them again."


@dataclass(frozen=True)
class Report:
    """What a rank says.

    Args:
        kind: ``ready`` after loading, ``beat`` while it works, then ``answer`` or ``error``, one for each request.
        progress: Of a beat: grows as the work goes on.
        step: Of a beat: denoising steps done, and in all.
        payload: Of rank 0's answer.
        error: (type, message) of an error. Types of this package leave the rank ready for the next request.
    """

    kind: Literal["ready", "beat", "answer", "error"]
    progress: int = 0
    step: tuple[int, int] | None = None
    payload: bytes = b""
    error: tuple[str, str] = ("", "")


class Member(Protocol):
    """One rank, as its leader sees it."""

    @property
    def name(self) -> str:
        """For messages, e.g. ``rank 1 (process 4711)``."""
        ...

    def submit(self, payload: bytes) -> None:
        """Hand over a request; returns without waiting for its answer.

        Raises:
            RankLostError, RankSilentError: It cannot be reached.
        """
        ...

    def reports(self, wait_s: float) -> Sequence[Report]:
        """What it said since the last time; waits at most ``wait_s`` for the first word.

        Raises:
            RankLostError: It ended; the message says how.
        """
        ...

    def close(self) -> None:
        """Let it end by itself, or end it where it does not within some seconds."""
        ...

    def kill(self) -> None:
        """End it at once, whatever it does, stopped or hung; returns when it is gone. Calling it twice is harmless."""
        ...


@dataclass(frozen=True)
class GangLimits:
    """How long a leader waits, in seconds.

    Args:
        start_s: For all ranks to load.
        silent_s: For a sign of life of a rank that works.
        stalled_s: For any rank's progress.
    """

    start_s: float = 900.0
    silent_s: float = 8.0
    stalled_s: float = 600.0


class Gang:
    """Ranks that answer requests together.

    Args:
        members: Rank 0 first.
        limits: How long to wait.
        clean_up: Called once, when all ranks are gone.
    """

    def __init__(
        self,
        members: Sequence[Member],
        limits: GangLimits | None = None,
        clean_up: Callable[[], None] = lambda: None,
    ):
        self.members = tuple(members)
        self._limits = limits or GangLimits()
        self._clean_up = clean_up
        self.ended = False

    def wait_ready(self) -> None:
        """Wait until every rank has loaded.

        Raises:
            Cosmos3Error: Loading failed, on one rank or on all; every rank was ended.
        """
        done = False
        try:
            self._answers("ready", self._limits.start_s, None)
            done = True
        finally:
            if not done:
                self.kill()

    def infer(self, payload: bytes, on_step: Callable[[int, int], None] | None = None) -> bytes:
        """Let all ranks answer one request.

        Args:
            payload: From ``payload.encode_request``.
            on_step: Called with (denoising steps done, in all), as rank 0 reports them.

        Returns:
            Rank 0's answer, for ``payload.decode_result``.

        Raises:
            RanksError: A rank is lost, silent or failed. Every rank was ended.
            Cosmos3Error: All ranks refused the request alike; they can be asked again.
        """
        if self.ended:
            raise RankLostError("these ranks were ended; start new ones.")
        done = False
        try:
            for member in self.members:
                member.submit(payload)
            answers = self._answers("answer", self._limits.silent_s, on_step)
            done = True
        finally:
            if not done:  # a rank failed, or the caller was interrupted: nobody knows what they are at
                self.kill()
        if answers[0].kind == "error":
            raise revive(*answers[0].error)
        return answers[0].payload

    def close(self) -> None:
        """End the ranks in order; calling it twice is harmless."""
        if not self.ended:
            for member in self.members:
                member.close()
        self.kill()

    def kill(self) -> None:
        """End the ranks at once."""
        for member in self.members:
            member.kill()
        if not self.ended:
            self.ended = True
            self._clean_up()

    def _answers(self, wanted: str, silent_s: float, on_step: Callable[[int, int], None] | None) -> list[Report]:
        """One answer or one known error of every rank; the same of all.

        Raises:
            RanksError, Cosmos3Error: See :meth:`infer` and :meth:`wait_ready`; who calls ends the ranks.
        """
        began = time.monotonic()
        heard = dict.fromkeys(range(len(self.members)), began)
        progress, moved = dict.fromkeys(heard, 0), began
        answers: dict[int, Report] = {}
        refused_at: float | None = None
        grace_s = max(self._limits.silent_s, _LOADING_GRACE_S if wanted == "ready" else 0.0)
        while len(answers) < len(self.members):
            waiting = [i for i in heard if i not in answers]
            for i in waiting:
                for report in self.members[i].reports(_WAIT_S if i == waiting[0] else 0.0):
                    heard[i] = time.monotonic()
                    if report.kind == "beat":
                        if report.progress > progress[i]:
                            progress[i], moved = report.progress, heard[i]
                        if report.step is not None and i == 0 and on_step is not None:
                            on_step(*report.step)
                    elif report.kind == "error" and not _known(report):
                        self._failed(i, report)
                    elif report.kind in (wanted, "error"):
                        answers[i], moved = report, heard[i]
                        refused_at = heard[i] if report.kind == "error" and refused_at is None else refused_at
            now = time.monotonic()
            for i in waiting:
                if i not in answers and now - heard[i] > silent_s:
                    raise RankSilentError(
                        f"{self.members[i].name} has given no sign of life for {now - heard[i]:.0f} s: it was stopped, or "
                        f"hangs. {_NEXT}"
                    )
            if now - moved > max(self._limits.stalled_s, silent_s):
                raise RankSilentError(f"no rank has made progress for {now - moved:.0f} s. {_NEXT}")
            if refused_at is not None and len(answers) < len(self.members) and now - refused_at > grace_s:
                kind, message = next(report.error for report in answers.values() if report.kind == "error")
                raise RankFailedError(f"some ranks refused what others still work on ({kind}: {message}). {_NEXT}")
        return self._agreed([answers[i] for i in sorted(answers)], wanted)

    def _agreed(self, answers: list[Report], wanted: str) -> list[Report]:
        kinds = {(report.kind, report.error) for report in answers}
        if len(kinds) > 1:
            said = "; ".join(f"{m.name}: {r.kind} {': '.join(r.error)}" for m, r in zip(self.members, answers, strict=True))
            raise RankFailedError(f"ranks disagree ({said}). {_NEXT}")
        if wanted == "ready" and answers[0].kind == "error":
            raise revive(*answers[0].error)
        return answers

    def _failed(self, index: int, report: Report) -> NoReturn:
        """Say who is to blame: a rank that lost its neighbour fails too, and often speaks first."""
        deadline = time.monotonic() + _ATTRIBUTION_S
        while time.monotonic() < deadline:
            for i, member in enumerate(self.members):
                if i != index:
                    member.reports(_WAIT_S)  # raises where it is lost
        kind, message = report.error
        raise RankFailedError(f"{self.members[index].name} failed with {kind}: {message}. {_NEXT}")


def _known(report: Report) -> bool:
    kind = getattr(errors, report.error[0], None)
    return isinstance(kind, type) and issubclass(kind, Cosmos3Error) and not issubclass(kind, RanksError)


def revive(name: str, message: str) -> Cosmos3Error:
    """An error of this package that was raised elsewhere, by its name and message; a ``BackendError`` where it is none."""
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Cosmos3Error)):
        return BackendError(f"{name}: {message}")
    if kind is errors.UnknownNameError:  # it words its own message
        return errors.InputError(message)
    return kind(message)
