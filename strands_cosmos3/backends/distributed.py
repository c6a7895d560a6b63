"""The native engine on several processes, which this backend starts and ends."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from strands_cosmos3.backends.devices import resolve_device
from strands_cosmos3.backends.engine_backend import EngineBackend
from strands_cosmos3.backends.model_input import as_path
from strands_cosmos3.backends.options import BackendOptions
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.parallel.config import RankOptions
from strands_cosmos3.parallel.group import RankTimeouts
from strands_cosmos3.parallel.launched import told
from strands_cosmos3.parallel.rank_engine import RankGroupEngine


class DistributedBackend(EngineBackend):
    """Answers with a :class:`~strands_cosmos3.parallel.rank_engine.RankGroupEngine`: one process
    for each rank, on this machine, or torchrun's processes, of which only rank 0 comes back.

    If a rank dies or hangs, every process is ended within seconds and the call raises a
    ``RanksError``; the next call starts new processes. ``options.parallel`` gives their number;
    ``action_space`` is for a checkpoint that does not state it. ``replica`` is (number, count)
    where several such backends share this machine's cores and GPUs; see :func:`replicas`. ``name``
    is what the backend calls itself in metrics and messages.

    Raises:
        ConfigError: The degrees do not fit the transformer or the available GPUs. Nothing was
            started.
        CheckpointError: The checkpoint cannot be loaded; see its subclasses.
    """

    def __init__(
        self,
        model: str | Path,
        options: BackendOptions = BackendOptions(),
        action_space: str | None = None,
        timeouts: RankTimeouts = RankTimeouts(),
        replica: tuple[int, int] = (0, 1),
        name: str = "distributed",
    ):
        parallel = options.parallel
        device = resolve_device(options.engine)
        if ":" in str(device):
            raise ConfigError(
                f"device {options.engine.device!r} is one GPU; ranks take one each: use "
                "device='cuda', or 'cpu'."
            )
        here = parallel.ranks if told("WORLD_SIZE", 1) == 1 else told("LOCAL_WORLD_SIZE")
        if device.type == "cuda" and torch.cuda.device_count() < here:
            raise ConfigError(
                f"{parallel} needs {here} GPUs on this machine, torch sees "
                f"{torch.cuda.device_count()}. Use smaller degrees, or device='cpu'."
            )
        number, count = replica
        threads = (
            max(1, len(os.sched_getaffinity(0)) // (parallel.ranks * count)) if count > 1 else None
        )
        rank = RankOptions(
            replace(options.engine, device=device.type),
            action_space,
            threads,
            first_gpu=number * parallel.ranks,
        )
        engine = RankGroupEngine.from_pretrained(
            as_path(model, "distributed"), parallel, rank, timeouts
        )
        super().__init__(engine, options, name)


def replicas(
    count: int,
    model: str | Path,
    options: BackendOptions = BackendOptions(),
    action_space: str | None = None,
    timeouts: RankTimeouts = RankTimeouts(),
    name: str = "distributed",
) -> list[DistributedBackend]:
    """Start ``count`` backends that answer side by side; each loads the weights. Arguments and
    errors: as :class:`DistributedBackend`.
    """
    with ThreadPoolExecutor(count) as pool:
        starting = [
            pool.submit(
                DistributedBackend, model, options, action_space, timeouts, (number, count), name
            )
            for number in range(count)
        ]
    for future in starting:
        if (error := future.exception()) is not None:
            for other in starting:
                if other.exception() is None:
                    other.result().close()
            raise error
    return [future.result() for future in starting]
