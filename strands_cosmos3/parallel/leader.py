"""Torchrun's processes as the ranks of one engine: rank 0 leads, the others follow."""

from __future__ import annotations

import signal
from pathlib import Path

import torch
import torch.distributed as dist

from strands_cosmos3.parallel.collectives import naming_lost_ranks, patient_group
from strands_cosmos3.parallel.config import ParallelConfig, RankOptions
from strands_cosmos3.parallel.group import OnStep, RankStatus, is_rejection, raise_error
from strands_cosmos3.parallel.launched import end, told
from strands_cosmos3.parallel.rank import Rank, exit_rank

_END = b"end"


class LaunchedRanks:
    """Ranks in processes that torchrun started, on one machine or several; each makes this.

    Only rank 0 comes back from :meth:`start`: it sends every request to the others, which answer
    it too until rank 0 closes, and then end. A failure ends all of them.
    """

    def __init__(self, checkpoint: str | Path, parallel: ParallelConfig, options: RankOptions):
        parallel.check_world(told("WORLD_SIZE"))
        self._loading = str(checkpoint), parallel, told("RANK"), "env://", options
        self._rank = Rank()

    def start(self) -> None:
        """Load; on other ranks than 0 answer requests until rank 0 closes, and end the process.

        Raises:
            Cosmos3Error: The checkpoint cannot be loaded.
        """
        raise_error(self._rank.load(*self._loading))
        self._requests = patient_group()
        if told("RANK") == 0:
            return
        # torchrun sends signals to all, and rank 0 may finish an inference first
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while (frame := self._share(b"")) != _END:
            self._answer(frame)
        self._rank.close()
        exit_rank(0)

    def infer(self, payload: bytes, on_step: OnStep | None = None) -> bytes:
        """Answer a request on all ranks; return rank 0's answer. Cosmos3Error: they rejected it."""
        status = self._answer(self._share(payload), on_step)
        raise_error(status)
        return status.payload

    def close(self) -> None:
        """Let the other ranks end."""
        self._share(_END)
        self._rank.close()

    def _answer(self, frame: bytes, on_step: OnStep | None = None) -> RankStatus:
        status = self._rank.infer(frame, on_step)
        if status.kind == "error" and not is_rejection(status.error[0]):
            end(": ".join(status.error))
        return status

    def _share(self, frame: bytes) -> bytes:
        """Return rank 0's frame on every rank."""
        length = torch.tensor([len(frame)])
        with naming_lost_ranks("a request"):
            dist.broadcast(length, 0, self._requests)
            content = torch.tensor(bytearray(frame.ljust(int(length))), dtype=torch.uint8)
            dist.broadcast(content, 0, self._requests)
        return content.numpy().tobytes()
