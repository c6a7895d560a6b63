"""Ranks on Ray: the actor that hosts a rank, and the handle through which its group controls it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from strands_cosmos3.errors import RankLostError
from strands_cosmos3.evaluation.cluster import WORKER_FAILURES, end_actor
from strands_cosmos3.parallel.group import HEARTBEAT_S, RankHandle, RankStatus
from strands_cosmos3.parallel.rank import Rank

START_S = 120.0
"""Time limit for a rank's process to start, once there is room for it."""


class RayRank(Rank):
    """A rank in a Ray actor. One thread works, another reports progress."""

    def process(self) -> tuple[int, str]:
        """Return process id and Ray node id."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def rendezvous(self) -> str:
        """Return an address where ranks can connect if this one is rank 0."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def heartbeat(self) -> RankStatus:
        """Return the progress so far."""
        return RankStatus("heartbeat", self.progress)


class RayRankHandle(RankHandle):
    """Handle of the actor of a :class:`RayRank`."""

    def __init__(self, rank: int, actor: Any):
        self.actor = actor
        self.pid, self._node = 0, ""
        self.name = f"rank {rank} (process unknown)"
        self._rank = rank
        self._work: Any = None
        self._heartbeat: Any = None
        self._next_heartbeat_s = 0.0

    def connect(self) -> None:
        """Wait for the process and learn its id; raise a RankLostError if it does not start."""
        try:
            self.pid, self._node = ray.get(self.actor.process.remote(), timeout=START_S)
        except (*WORKER_FAILURES, GetTimeoutError):
            raise self._lost() from None
        self.name = f"rank {self._rank} (process {self.pid})"

    def load(self, *arguments: Any) -> None:
        """Begin :meth:`Rank.load`; the rank reports when it is ready."""
        self._work = self.actor.load.remote(*arguments)

    def submit(self, payload: bytes) -> None:
        """See :meth:`RankHandle.submit`."""
        self._work = self.actor.infer.remote(payload)

    def statuses(self, wait_s: float) -> Sequence[RankStatus]:
        """See :meth:`RankHandle.statuses`."""
        if self._heartbeat is None and time.monotonic() >= self._next_heartbeat_s:
            self._heartbeat, self._next_heartbeat_s = (
                self.actor.heartbeat.remote(),
                time.monotonic() + HEARTBEAT_S,
            )
        waiting = [
            reference for reference in (self._work, self._heartbeat) if reference is not None
        ]
        if not waiting:
            time.sleep(wait_s)
            return []
        ready, _ = ray.wait(waiting, timeout=wait_s)
        return [self._take(reference) for reference in ready]

    def _take(self, reference: Any) -> RankStatus:
        try:
            status: RankStatus = ray.get(reference)
        except WORKER_FAILURES:
            raise self._lost() from None
        if reference is self._heartbeat:
            self._heartbeat = None
        else:
            self._work = None
        return status

    def _lost(self) -> RankLostError:
        return RankLostError(
            f"{self.name} ended. All ranks of its replica were ended, and start again."
        )

    def kill(self) -> None:
        """See :meth:`RankHandle.kill`."""
        end_actor(self.actor, self.pid, self._node)
