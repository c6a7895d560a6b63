"""The groups of ranks, and the only place that sends anything between them; what it sends it counts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.parallel_context import ParallelContext, Vae, Velocities
from strands_cosmos3.engine.transformer import Cosmos3Transformer
from strands_cosmos3.engine.weight_files import Slices
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.parallel import tensor
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.parallel.sharded_vae import ShardedVae


@dataclass
class Traffic:
    """What this rank put into exchanges, by kind.

    Attributes:
        messages: Exchanges that it took part in; a halo counts one for each neighbour that it sent to.
        payload: Bytes of its own tensors in them. What travels follows from the kind: see ``plan.sent_bytes``.
    """

    messages: Counter[str] = field(default_factory=Counter)
    payload: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, x: torch.Tensor, times: int = 1) -> None:
        """Count a tensor that goes into ``times`` exchanges."""
        self.messages[kind] += times
        self.payload[kind] += times * x.numel() * x.element_size()

    def clear(self) -> None:
        """Start again from nothing."""
        self.messages.clear()
        self.payload.clear()


class Group:
    """Some ranks that exchange tensors. Every rank of it makes the same calls in the same order.

    Args:
        group: torch's group; None is a group of one.
        traffic: Where to count.
    """

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic):
        self._group = group
        self._traffic = traffic
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def sum(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """The sum over ranks, in place, the same bits on every rank."""
        if self.size > 1:
            x = x.contiguous()
            self._traffic.add(kind, x)
            dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: torch.Tensor, kind: str) -> list[torch.Tensor]:
        """Every rank's tensor of this shape, in the order of ranks."""
        if self.size == 1:
            return [x]
        x = x.contiguous()
        self._traffic.add(kind, x)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self._group)
        return parts

    def gather_widths(self, x: torch.Tensor, widths: Sequence[int], kind: str) -> torch.Tensor:
        """Tensors that differ in their last axis, side by side on every rank.

        Args:
            x: [..., widths[rank]].
            widths: Of each rank's tensor.
        """
        parts = self.gather(_padded(x, max(widths)), kind)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    def collect(self, x: torch.Tensor, widths: Sequence[int], kind: str) -> list[torch.Tensor] | None:
        """Tensors that differ in their last axis, on rank 0; None on the others."""
        if self.size == 1:
            return [x]
        padded = _padded(x, max(widths)).contiguous()
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else None
        if self.rank:
            self._traffic.add(kind, padded)
        dist.gather(padded, parts, group=self._group, group_dst=0)
        return None if parts is None else [part[..., :width] for part, width in zip(parts, widths, strict=True)]

    def neighbours(
        self, to_left: torch.Tensor | None, to_right: torch.Tensor | None, kind: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What the neighbours sent: (of the left one its ``to_right``, of the right one its ``to_left``).

        Every rank passes tensors of the same shape, or None for a direction in which nothing travels; there is None where
        there is no neighbour.
        """
        sends, from_left, from_right = [], None, None
        if to_right is not None and self.rank > 0:
            from_left = torch.empty_like(to_right)
            sends.append(dist.P2POp(dist.irecv, from_left, group=self._group, group_peer=self.rank - 1))
        if to_left is not None and self.rank + 1 < self.size:
            from_right = torch.empty_like(to_left)
            sends.append(dist.P2POp(dist.irecv, from_right, group=self._group, group_peer=self.rank + 1))
        if to_left is not None and self.rank > 0:
            self._traffic.add(kind, to_left)
            sends.append(dist.P2POp(dist.isend, to_left, group=self._group, group_peer=self.rank - 1))
        if to_right is not None and self.rank + 1 < self.size:
            self._traffic.add(kind, to_right)
            sends.append(dist.P2POp(dist.isend, to_right, group=self._group, group_peer=self.rank + 1))
        for work in dist.batch_isend_irecv(sends) if sends else ():
            work.wait()
        return from_left, from_right


class Mesh(ParallelContext):
    """One rank's place among all ranks.

    Attributes:
        traffic: What this rank sent.
    """

    def __init__(self, parallel: ParallelConfig, device: torch.device, owns_world: bool):
        self.parallel = parallel
        self.device = device
        self.traffic = Traffic()
        self._owns_world = owns_world
        self._config: TransformerConfig | None = None
        if parallel.world_size == 1:
            self.rank = 0
            self.tp = self.cfg = self.all = Group(None, self.traffic)
        else:
            shape = (parallel.cfg_size, parallel.tp_size)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("cfg", "tp"))
            self.rank = dist.get_rank()
            self.tp = Group(mesh.get_group("tp"), self.traffic)
            self.cfg = Group(mesh.get_group("cfg"), self.traffic)
            self.all = Group(dist.group.WORLD, self.traffic)
        cfg_rank = parallel.coordinates(self.rank)[0]
        self.branches: tuple[int, ...] = (0, 1) if parallel.cfg_size == 1 else (cfg_rank,)

    def check(self, config: TransformerConfig) -> None:
        """See :meth:`ParallelContext.check`."""
        tensor.check(config, self.parallel.tp_size)
        self._config = config

    def shard(self, key: str, shape: tuple[int, ...]) -> Slices:
        """See :meth:`ParallelContext.shard`."""
        assert self._config is not None, "check comes first"
        return tensor.shard(key, shape, self._config, self.tp.rank, self.tp.size)

    def parallelize(self, transformer: Cosmos3Transformer) -> None:
        """See :meth:`ParallelContext.parallelize`."""
        tensor.parallelize(transformer, self.tp)

    def parallelize_vae(self, vae: Vae) -> Vae:
        """See :meth:`ParallelContext.parallelize_vae`."""
        return vae if self.all.size == 1 else ShardedVae(vae, self.all, self.parallel.vae_split)

    def exchange(self, velocities: Velocities) -> Velocities:
        """Both branches' velocities in one packed exchange between the two groups."""
        if self.cfg.size == 1:
            return velocities
        packed = torch.cat([velocity.flatten() for velocity in velocities])
        branches = self.cfg.gather(packed, "guidance")
        split = [b.split([velocity.numel() for velocity in velocities]) for b in branches]
        vision, action = (
            torch.cat([part.view_as(velocity) for part in parts])
            for velocity, parts in zip(velocities, zip(*split, strict=True), strict=True)
        )
        return vision, action

    def barrier(self) -> None:
        """Wait until every rank has come so far."""
        if self.all.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the world, if this made it."""
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()


def join_world(parallel: ParallelConfig, device: torch.device) -> Mesh:
    """This process's place in the world that exists: one that was initialised already, or the one torchrun announces.

    Raises:
        ConfigError: Its size is not what the degrees need, or torch has no means to connect.
    """
    if dist.is_available() and dist.is_initialized():
        parallel.check_world(dist.get_world_size())
        return Mesh(parallel, _own_device(device), owns_world=False)
    launched = dist.is_available() and dist.is_torchelastic_launched()
    parallel.check_world(int(os.environ["WORLD_SIZE"]) if launched else 1)  # torchrun's, as torch itself reads it
    if parallel.world_size > 1:
        device = _own_device(device)
        meet(parallel, device, "env://")
    return Mesh(parallel, device, owns_world=True)


def meet(parallel: ParallelConfig, device: torch.device, init_method: str, rank: int = -1) -> None:
    """Make the world: NCCL between GPUs, gloo between CPUs. Returns when every rank is there.

    Raises:
        ConfigError: This torch was built without distributed.
    """
    if not dist.is_available():
        raise ConfigError("this torch was built without torch.distributed; install one with it, or use one process.")
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=parallel.world_size if rank >= 0 else -1,
        timeout=timedelta(seconds=parallel.timeout_s),
        device_id=device if cuda else None,
    )


def _own_device(device: torch.device) -> torch.device:
    """``cuda`` is the GPU of this process's own number on its machine."""
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
    torch.cuda.set_device(device)
    return device


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))
