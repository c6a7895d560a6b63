"""The native engine on several processes, which this backend starts and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from strands_cosmos3.backends.model_input import as_path, resolve_device
from strands_cosmos3.backends.native import EngineBackend
from strands_cosmos3.backends.options import InferenceOptions
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.parallel.config import ParallelConfig, RankOptions
from strands_cosmos3.parallel.engine import RankGroupEngine
from strands_cosmos3.parallel.group import RankTimeouts


class DistributedBackend(EngineBackend):
    """Answers with a :class:`~strands_cosmos3.parallel.engine.RankGroupEngine`: one process for each rank, on this machine.

    If a rank dies or hangs, every process is ended within seconds and the call raises a ``RanksError``; the next call starts
    new processes. ``options.parallel`` gives their number; ``action_space`` is for a checkpoint that does not state it.

    Raises:
        ConfigError: The degrees do not fit the transformer or the available GPUs. Nothing was started.
        CheckpointError: The checkpoint cannot be loaded; see its subclasses.
    """

    def __init__(
        self,
        model: str | Path,
        options: InferenceOptions | None = None,
        action_space: str | None = None,
        timeouts: RankTimeouts | None = None,
    ):
        options = options or InferenceOptions()
        parallel = options.parallel or ParallelConfig()
        device, dtype = resolve_device(options)
        if ":" in str(device):
            raise ConfigError(f"device {options.device!r} is one GPU; ranks take one each: use device='cuda', or 'cpu'.")
        _check_gpus(device.type, parallel)
        name: Literal["float32", "bfloat16"] = "bfloat16" if str(dtype) == "torch.bfloat16" else "float32"
        rank = RankOptions(device.type, name, options.decode_video, action_space)
        engine = RankGroupEngine.from_pretrained(as_path(model, "distributed"), parallel, rank, timeouts)
        super().__init__(engine, options, "distributed")


def _check_gpus(kind: str, parallel: ParallelConfig) -> None:
    import torch

    if kind == "cuda" and torch.cuda.device_count() < parallel.world_size:
        raise ConfigError(
            f"tp_size={parallel.tp_size} x cfg_size={parallel.cfg_size} needs {parallel.world_size} GPUs, torch sees "
            f"{torch.cuda.device_count()}. Use smaller degrees, or device='cpu'."
        )
