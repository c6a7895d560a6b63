"""A gang where an engine is expected: the same questions, the same answers, several processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from strands_cosmos3.engine.checkpoint import Checkpoint, locate
from strands_cosmos3.engine.engine import OnStep
from strands_cosmos3.engine.request import Cosmos3ActionRequest
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.parallel import tensor
from strands_cosmos3.parallel.config import ParallelConfig, RankOptions
from strands_cosmos3.parallel.gang import Gang, GangLimits
from strands_cosmos3.parallel.payload import decode_result, encode_request
from strands_cosmos3.parallel.worker import start_processes


class GangEngine:
    """Leads a gang and answers like a ``Cosmos3Engine``. After a gang was lost, the next call starts another.

    Args:
        checkpoint: Whose headers and metadata to know; its weights stay with the ranks.
        decode_video: Whether the ranks decode.
        start: Starts a gang and waits until it is ready.

    Raises:
        Cosmos3Error: The first gang cannot be started.
    """

    def __init__(self, checkpoint: Checkpoint, decode_video: bool, start: Callable[[], Gang]):
        self.checkpoint = checkpoint
        self.action_space = checkpoint.action_space
        self.decodes_video = decode_video
        self._start = start
        self._closed = False
        self.gang = start()

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        parallel: ParallelConfig,
        options: RankOptions | None = None,
        limits: GangLimits | None = None,
    ) -> GangEngine:
        """Start processes on this machine that load a checkpoint together.

        Args:
            path_or_repo_id: A folder, or a hub repository.
            parallel: How many, and how they divide the work.
            options: How each loads.
            limits: How long to wait for them.

        Raises:
            ConfigError: The transformer cannot be split so; nothing was started.
            CheckpointError: The checkpoint cannot be loaded.
        """
        options = options or RankOptions()
        folder = locate(path_or_repo_id)
        checkpoint = Checkpoint.open(folder, action_space=options.action_space)
        tensor.check(checkpoint.config, parallel.tp_size)
        return cls(checkpoint, options.decode_video, lambda: start_processes(folder, parallel, options, limits))

    def step(self, request: Cosmos3ActionRequest, on_step: OnStep | None = None) -> dict[str, Any]:
        """Answer one request; see ``Cosmos3Engine.step``.

        Raises:
            RanksError: A rank was lost, silent or failed; every process was ended.
            InputError: As there.
        """
        if self._closed:
            raise ConfigError("this engine was closed; make another.")
        if self.gang.ended:
            self.gang = self._start()
        return decode_result(self.gang.infer(encode_request(request), on_step))

    def close(self) -> None:
        """End every process; calling it twice is harmless."""
        self._closed = True
        self.gang.close()
