"""One rank of a spread engine, in whatever process hosts it."""

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.distributed as dist

from strands_cosmos3.engine.engine import Cosmos3Engine, OnStep
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.parallel.config import ParallelConfig, RankOptions
from strands_cosmos3.parallel.mesh import meet
from strands_cosmos3.parallel.payload import decode_request, encode_result


class InferenceRank:
    """One rank. Making one waits for all the others and loads this rank's share of the weights.

    Args:
        checkpoint: A folder in the released layout, or a hub repository that every rank can fetch.
        parallel: The degrees.
        rank: This one's number, 0 .. ``parallel.world_size - 1``.
        init_method: Where ranks meet: ``file:///path`` that does not exist yet, on one machine, or ``tcp://host:port`` on
            which rank 0 listens.
        options: How to load.

    Attributes:
        progress: Parts of the work that were done so far: it grows while an inference goes on. Any thread may read it.

    Raises:
        ConfigError: The rank is none of this world's, or the process belongs to another world already.
        CheckpointError: The checkpoint cannot be loaded.
    """

    def __init__(
        self,
        checkpoint: str,
        parallel: ParallelConfig,
        rank: int,
        init_method: str,
        options: RankOptions | None = None,
    ):
        options = options or RankOptions()
        if not 0 <= rank < parallel.world_size:
            raise ConfigError(f"rank {rank} is none of 0..{parallel.world_size - 1}.")
        if dist.is_initialized():
            raise ConfigError("this process is a rank of another group already; one process hosts one rank.")
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        device = torch.device(options.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", rank % max(torch.cuda.device_count(), 1))
        self.rank = rank
        self.progress = 0
        if parallel.world_size > 1:
            meet(parallel, device, init_method, rank)
        with ExitStack() as on_failure:
            on_failure.callback(_leave)
            self.engine = Cosmos3Engine.from_pretrained(
                checkpoint,
                device=device,
                dtype=getattr(torch, options.dtype),
                parallel=parallel,
                decode_video=options.decode_video,
                action_space=options.action_space,
            )
            if parallel.world_size > 1:
                dist.barrier()  # whoever is ready can be asked: everybody has loaded
            on_failure.pop_all()

    def infer(self, payload: bytes, on_step: OnStep | None = None) -> bytes | None:
        """Answer one request together with the other ranks, which must get the same bytes.

        Args:
            payload: From :func:`~strands_cosmos3.parallel.payload.encode_request`.
            on_step: As in ``Cosmos3Engine.step``.

        Returns:
            For :func:`~strands_cosmos3.parallel.payload.decode_result` on rank 0, None on the others.

        Raises:
            Cosmos3Error: The request cannot be answered; every rank raises alike and can be asked again.
        """

        def count(done: int, of: int) -> None:
            self.progress += 1
            if on_step is not None:
                on_step(done, of)

        result = self.engine.step(decode_request(payload), on_step=count)
        self.progress += 1
        return encode_result(result) if self.rank == 0 else None

    def close(self) -> None:
        """Let go of the weights and leave the group."""
        self.engine.close()
        _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
