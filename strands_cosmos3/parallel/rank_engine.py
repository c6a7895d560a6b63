"""A :class:`RankGroup` behind the interface of ``Cosmos3Engine``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from strands_cosmos3.engine.checkpoint import Checkpoint, locate
from strands_cosmos3.engine.options import DecodeVideo
from strands_cosmos3.engine.preflight import choose_dtype
from strands_cosmos3.engine.request import Cosmos3ActionRequest
from strands_cosmos3.engine.sound import require_ears
from strands_cosmos3.engine.variants import EARS
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.parallel.config import ParallelConfig, RankOptions
from strands_cosmos3.parallel.group import OnStep, RankTimeouts
from strands_cosmos3.parallel.launched import told
from strands_cosmos3.parallel.leader import LaunchedRanks
from strands_cosmos3.parallel.payload import decode_results, encode_requests
from strands_cosmos3.parallel.rank import rank_processes


class Ranks(Protocol):
    """A :class:`RankGroup`, or a client of one in another process."""

    def start(self) -> None: ...
    def infer(self, payload: bytes, on_step: OnStep | None = None) -> bytes: ...
    def close(self) -> None: ...


class RankGroupEngine:
    """Answers like a ``Cosmos3Engine``, computed by a group of ranks. After a failure the next call
    starts new ranks; those that torchrun started end, with this process.

    The ranks are started here, which may raise any Cosmos3Error. Only they load weights.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        decode_video: DecodeVideo,
        ranks: Ranks,
        decode_sound: bool = False,
    ):
        self.checkpoint = checkpoint
        self.action_space = checkpoint.action_space
        self.decodes_video = bool(decode_video)
        self.predicts_sound = decode_sound
        self.ranks = ranks
        self._closed = False
        ranks.start()

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        parallel: ParallelConfig,
        options: RankOptions = RankOptions(),
        timeouts: RankTimeouts = RankTimeouts(),
    ) -> RankGroupEngine:
        """Start one process for each rank on this machine and load a checkpoint in them.

        Raises:
            ConfigError, CheckpointError: The transformer cannot be split so (nothing was started),
                or not be loaded.
        """
        decode_sound = options.engine.decode_sound
        folder = locate(path_or_repo_id, also=EARS if decode_sound else ())
        checkpoint = Checkpoint.open(folder, action_space=options.action_space)
        parallel.check_transformer(checkpoint.config)
        if decode_sound:
            require_ears(checkpoint)
        device = torch.device(options.engine.device or "cpu")
        options.engine.require_runnable(device.type, parallel.layer_ranks)
        if told("WORLD_SIZE", 1) > 1:
            ranks = LaunchedRanks(folder, parallel, options)
            return cls(checkpoint, options.engine.decode_video, ranks, decode_sound)
        # once for all ranks
        dtype = choose_dtype(options.engine.dtype, device, checkpoint.config)
        engine = replace(options.engine, dtype=str(dtype).removeprefix("torch."))
        group = rank_processes(folder, parallel, replace(options, engine=engine), timeouts)
        return cls(checkpoint, engine.decode_video, group, decode_sound)

    def step(self, request: Cosmos3ActionRequest, on_step: OnStep | None = None) -> dict[str, Any]:
        """Answer one request; see ``Cosmos3Engine.step``. Errors: as :meth:`step_batch`."""
        return self.step_batch((request,), on_step)[0]

    def step_batch(
        self, requests: Sequence[Cosmos3ActionRequest], on_step: OnStep | None = None
    ) -> list[dict[str, Any]]:
        """Answer several requests in one pass; see ``Cosmos3Engine.step_batch``.

        Raises:
            RanksError, InputError: A rank failed and every process was ended; or the ranks rejected
                a request.
        """
        if self._closed:
            raise ConfigError("this engine was closed; make another.")
        return decode_results(self.ranks.infer(encode_requests(requests), on_step))

    def close(self) -> None:
        """End every process. Idempotent."""
        self._closed = True
        self.ranks.close()
