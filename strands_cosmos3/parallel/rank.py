"""One rank of an engine, in the process that hosts it: a subprocess or a Ray actor. Importing
this loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from strands_cosmos3.errors import ConfigError, Cosmos3Error
from strands_cosmos3.parallel.config import ParallelConfig, RankOptions
from strands_cosmos3.parallel.group import OnStep, RankStatus

if TYPE_CHECKING:
    from strands_cosmos3.engine.engine import Cosmos3Engine


class Rank:
    """One rank. Its methods report errors as a status, because the rank's group decides for all
    ranks.

    ``progress`` grows during inference. Any thread may read it.
    """

    def __init__(self) -> None:
        self.progress = 0
        self._engine: Cosmos3Engine | None = None

    def load(
        self,
        checkpoint: str,
        parallel: ParallelConfig,
        rank: int,
        init_method: str,
        options: RankOptions | None = None,
    ) -> RankStatus:
        """Connect to the other ranks and load this rank's shard of the weights; ``ready`` once
        every rank has loaded.

        Args:
            checkpoint: A folder in the released layout, or a hub repository that every rank can
                fetch.
            rank: This rank's number, 0 .. ``parallel.world_size - 1``.
            init_method: ``file:///path`` of a new file, on one machine; or ``tcp://host:port``,
                where rank 0 listens.
        """

        def load() -> bytes:
            self._load(checkpoint, parallel, rank, init_method, options or RankOptions())
            return b""

        return _report("ready", load)

    def _load(
        self,
        checkpoint: str,
        parallel: ParallelConfig,
        rank: int,
        init_method: str,
        options: RankOptions,
    ) -> None:
        import torch
        import torch.distributed as dist

        from strands_cosmos3.engine.checkpoint import locate
        from strands_cosmos3.engine.engine import Cosmos3Engine
        from strands_cosmos3.parallel.collectives import connect

        if not 0 <= rank < parallel.world_size:
            raise ConfigError(f"rank {rank} is not one of 0..{parallel.world_size - 1}.")
        if dist.is_initialized():
            raise ConfigError(
                "this process is a rank of another group already; one process hosts one rank."
            )
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        device = torch.device(options.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device(
                "cuda", (options.first_gpu + rank) % max(torch.cuda.device_count(), 1)
            )
        if parallel.world_size > 1:
            connect(device, parallel.timeout_s, init_method, rank, parallel.world_size)
        self._rank = rank
        self._engine = Cosmos3Engine.from_pretrained(
            str(locate(checkpoint)),
            device=device,
            dtype=options.dtype,
            parallel=parallel,
            decode_video=options.decode_video,
            action_space=options.action_space,
            **vars(options.engine),
        )
        self._engine.parallel_context.barrier()

    def infer(self, payload: bytes, on_step: OnStep | None = None) -> RankStatus:
        """Answer a request together with the other ranks, which must get the same bytes
        (``payload.encode_requests``).

        Returns ``answer``, whose payload on rank 0 is for ``payload.decode_results``. ``on_step``:
        as in the engine's ``step``.
        """
        from strands_cosmos3.parallel.payload import decode_requests, encode_results

        engine = self._engine
        assert engine is not None, "call load first"

        def count(done: int, total: int) -> None:
            self.progress += 1
            if on_step is not None:
                on_step(done, total)

        def step() -> bytes:
            results = engine.step_batch(decode_requests(payload), on_step=count)
            self.progress += 1
            return encode_results(results) if self._rank == 0 else b""

        return _report("answer", step)

    def close(self) -> None:
        """Free the weights and leave the process group."""
        import torch.distributed as dist

        if self._engine is not None:
            self._engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _report(kind: Literal["ready", "answer"], work: Callable[[], bytes]) -> RankStatus:
    try:
        return RankStatus(kind, payload=work())
    except Exception as error:  # whatever it was, the group decides for all ranks
        message = str(error).strip()
        if not isinstance(error, Cosmos3Error):
            message = message.split("\n")[0] or "no message"
        return RankStatus("error", error=(type(error).__name__, message))
