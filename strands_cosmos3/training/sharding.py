"""Training on several processes: weights, gradients and moments sharded by FSDP2, over gloo on
CPUs and NCCL on GPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.parallel.collectives import naming_lost_ranks, patient_group
from strands_cosmos3.parallel.launched import told, watch_machines
from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.loop import LossMetrics
from strands_cosmos3.training.matching import DataShard


@contextmanager
def processes() -> Iterator[DataShard]:
    """Join the processes that torchrun started; yield this one's data shard. Each must end with
    ``exit_rank``.

    Raises RankLostError, which names the ranks that are gone, where an exchange fails. On several
    machines a lost one ends all of them.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield DataShard()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    watch_machines()
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        with naming_lost_ranks("training"):
            yield DataShard(dist.get_rank(), dist.get_world_size())
            dist.barrier()  # no process leaves during another's last exchange
    finally:
        dist.destroy_process_group()


def require_one_folder(folder: Path, share: DataShard) -> None:
    """Raise a ConfigError where a folder is not the one that rank 0 has, on another machine: what
    rank 0 writes would be missing there.
    """
    if told("GROUP_WORLD_SIZE", 1) == 1:
        return
    group = patient_group()
    number = torch.tensor(time.time_ns())
    dist.broadcast(number, 0, group)
    mark = folder / f".one-folder-{int(number)}"
    if not share.rank:
        mark.touch()
    dist.barrier(group)
    seen = mark.exists()
    dist.barrier(group)
    if not share.rank:
        mark.unlink()
    if not seen:
        raise ConfigError(
            f"--out {folder} is another folder than on rank 0's machine; give one that all "
            "machines share, such as a network file system's."
        )


@contextmanager
def rank_0_first(share: DataShard) -> Iterator[None]:
    """Let rank 0 run a block before the others, which find the files that it wrote."""
    if share.ranks == 1:
        yield
        return
    waiting = patient_group()
    if share.rank:
        dist.barrier(waiting)
    yield
    if not share.rank:
        dist.barrier(waiting)


def shard_policy(policy: TrainedPolicy, ranks: int) -> TrainedPolicy:
    """Shard a policy over processes, in place; on GPUs it computes in bfloat16."""
    if ranks == 1:
        return policy
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (ranks,))
    precision = MixedPrecisionPolicy(torch.bfloat16 if kind == "cuda" else None)
    for layer in policy.transformer.generation.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy


def reshard(policy: TrainedPolicy) -> None:
    """Free weights that a forward pass without a backward pass has gathered."""
    if isinstance(policy, FSDPModule):
        policy.reshard()


def mean_over_ranks(metrics: LossMetrics, ranks: int) -> LossMetrics:
    """Return the metrics that a single process would report."""
    if ranks == 1:
        return metrics
    values = torch.tensor(list(metrics.values()), dtype=torch.float64)
    if torch.cuda.is_available():
        values = values.cuda()
    dist.all_reduce(values)
    return dict(zip(metrics, (values / ranks).tolist(), strict=True))
