"""Training on several processes: weights, gradients and moments spread over them by FSDP2 (``fully_shard``).

Started by ``torchrun --nproc-per-node N -m strands_cosmos3 train ...``; alone nothing here does anything. gloo on CPUs, NCCL
on GPUs. The layers of the generation tower are gathered one by one, everything else at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from strands_cosmos3.training.flow import TrainedPolicy
from strands_cosmos3.training.loop import LossMetrics
from strands_cosmos3.training.matching import SINGLE_PROCESS, DataShard


@contextmanager
def processes() -> Iterator[DataShard]:
    """This process's share, with the others joined where torchrun started several.

    A program that was one of several ends with :func:`~strands_cosmos3.parallel.process_exit.exit_rank`, as the command line
    does.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield SINGLE_PROCESS
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield DataShard(dist.get_rank(), dist.get_world_size())
        dist.barrier()  # nobody leaves while another is in its last exchange
    finally:
        dist.destroy_process_group()


def spread(policy: TrainedPolicy, share: DataShard) -> TrainedPolicy:
    """Spread a policy over the processes, in place; on GPUs it computes in bfloat16."""
    if share.ranks == 1:
        return policy
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (share.ranks,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if kind == "cuda" else MixedPrecisionPolicy()
    for layer in policy.transformer.generation.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    assert isinstance(policy, FSDPModule)
    return policy


def averaged(parts: LossMetrics, share: DataShard) -> LossMetrics:
    """The parts of a loss as one process would report them."""
    if share.ranks == 1:
        return parts
    values = torch.tensor(list(parts.values()), dtype=torch.float64)
    if torch.cuda.is_available():
        values = values.cuda()
    dist.all_reduce(values)
    return dict(zip(parts, (values / share.ranks).tolist(), strict=True))
