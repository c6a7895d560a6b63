"""Ranks on Ray: the actor that hosts one, and the member as which ``parallel.gang.Gang`` leads it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError

from strands_cosmos3.errors import Cosmos3Error, RankLostError
from strands_cosmos3.evaluation.cluster import DEATHS, end_actor
from strands_cosmos3.evaluation.worker import Reply
from strands_cosmos3.parallel.config import ParallelConfig, RankOptions
from strands_cosmos3.parallel.gang import BEAT_S, Report

if TYPE_CHECKING:
    from strands_cosmos3.parallel.rank import InferenceRank

START_S = 120.0
"""How long a rank's process may take to start, once there is room for it."""


class RankHost:
    """An actor that hosts one rank. One thread works, another says how far it is."""

    def __init__(self) -> None:
        self._rank: InferenceRank | None = None

    def who(self) -> tuple[int, str]:
        """Process id and node."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def meeting_point(self) -> str:
        """Where ranks can meet if this one is rank 0."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def open(self, model: str, parallel: ParallelConfig, rank: int, init_method: str, options: RankOptions) -> Reply:
        """Meet the others and load."""
        from strands_cosmos3.engine.checkpoint import locate
        from strands_cosmos3.parallel.rank import InferenceRank

        def load() -> None:
            self._rank = InferenceRank(str(locate(model)), parallel, rank, init_method, options)

        return _said(load)

    def infer(self, payload: bytes) -> Reply:
        """Answer one request together with the others."""
        assert self._rank is not None  # the leader waits until all have loaded
        return _said(lambda: self._rank.infer(payload))  # pyright: ignore[reportOptionalMemberAccess]

    def progress(self) -> int:
        """How much was done so far."""
        return 0 if self._rank is None else self._rank.progress


def _said(work: Callable[[], Any]) -> Reply:
    try:
        return Reply("done", work())
    except Cosmos3Error as error:
        return Reply("error", error=(type(error).__name__, str(error)))
    except RuntimeError as error:  # how torch.distributed tells that a neighbour is gone
        return Reply("error", error=(type(error).__name__, str(error).strip().split("\n")[0]))


class RayMember:
    """A rank in an actor, as ``parallel.gang.Gang`` leads it.

    Args:
        number: The rank.
        actor: Its host.
    """

    def __init__(self, number: int, actor: Any):
        self._number, self.actor = number, actor
        self._pid, self._node = 0, ""
        self._word = "ready"
        self._work: Any = None
        self._beat: Any = None
        self._next_beat_s = 0.0

    @property
    def name(self) -> str:
        """Rank and process."""
        return f"rank {self._number} (process {self._pid or 'unknown'})"

    def meet(self) -> None:
        """Learn who it is.

        Raises:
            RankLostError: Its process does not start.
        """
        try:
            self._pid, self._node = ray.get(self.actor.who.remote(), timeout=START_S)
        except (*DEATHS, GetTimeoutError):
            raise self._lost() from None

    def open(self, *arguments: Any) -> None:
        """Let it meet the others and load; it reports when it is ready."""
        self._word, self._work = "ready", self.actor.open.remote(*arguments)

    def submit(self, payload: bytes) -> None:
        """See :meth:`strands_cosmos3.parallel.gang.Member.submit`."""
        self._word, self._work = "answer", self.actor.infer.remote(payload)

    def reports(self, wait_s: float) -> Sequence[Report]:
        """See :meth:`strands_cosmos3.parallel.gang.Member.reports`."""
        if self._beat is None and time.monotonic() >= self._next_beat_s:
            self._beat, self._next_beat_s = self.actor.progress.remote(), time.monotonic() + BEAT_S
        waiting = [reference for reference in (self._work, self._beat) if reference is not None]
        ready, _ = ray.wait(waiting, timeout=wait_s)
        return [self._heard(reference) for reference in ready]

    def _heard(self, reference: Any) -> Report:
        try:
            said: Any = ray.get(reference)
        except DEATHS:
            raise self._lost() from None
        if reference is self._beat:
            self._beat = None
            return Report("beat", progress=said)
        self._work = None
        if said.kind == "error":
            return Report("error", error=said.error)
        return Report("ready") if self._word == "ready" else Report("answer", payload=said.value or b"")

    def _lost(self) -> RankLostError:
        return RankLostError(f"{self.name} ended. All ranks of its replica were ended, and start again.")

    def close(self) -> None:
        """End it."""
        self.kill()

    def kill(self) -> None:
        """See :meth:`strands_cosmos3.parallel.gang.Member.kill`."""
        end_actor(self.actor, self._pid, self._node)
