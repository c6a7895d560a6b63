"""One rank's position in the tensor-parallel and guidance-parallel groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.parallel_context import ParallelContext, Vae, Velocities
from strands_cosmos3.engine.transformer import Cosmos3Transformer
from strands_cosmos3.engine.weight_source import Slices
from strands_cosmos3.parallel import tensor
from strands_cosmos3.parallel.collectives import Group, Traffic, naming_lost_ranks
from strands_cosmos3.parallel.sharded_vae import ShardedVae


class Mesh(ParallelContext):
    """The parallel context of one rank among several; see
    :class:`~strands_cosmos3.parallel.config.ParallelConfig`.

    ``owns_world``: whether :meth:`close` destroys the process group. ``traffic``: what this rank
    sent.
    """

    def __init__(
        self, tp_size: int, cfg_size: int, vae_split: str, device: torch.device, owns_world: bool
    ):
        self.device = device
        self.traffic = Traffic()
        self._vae_split = vae_split
        self._owns_world = owns_world
        self._config: TransformerConfig | None = None
        if tp_size * cfg_size == 1:
            self.rank = 0
            self.tp = self.cfg = self.all = Group(None, self.traffic)
        else:
            mesh = init_device_mesh(device.type, (cfg_size, tp_size), mesh_dim_names=("cfg", "tp"))
            self.rank = dist.get_rank()
            self.tp = Group(mesh.get_group("tp"), self.traffic)
            self.cfg = Group(mesh.get_group("cfg"), self.traffic)
            self.all = Group(dist.group.WORLD, self.traffic)
        self._tp_size = tp_size
        self.branches: tuple[int, ...] = (0, 1) if cfg_size == 1 else (self.rank // tp_size,)

    def check(self, config: TransformerConfig) -> None:
        """See :meth:`ParallelContext.check`."""
        tensor.check(config, self._tp_size)
        self._config = config

    def shard(self, key: str, shape: tuple[int, ...]) -> Slices:
        """See :meth:`ParallelContext.shard`."""
        assert self._config is not None, "call check first"
        return tensor.shard(key, shape, self._config, self.tp.rank, self.tp.size)

    def parallelize(self, transformer: Cosmos3Transformer) -> None:
        """See :meth:`ParallelContext.parallelize`."""
        tensor.parallelize(transformer, self.tp)

    def parallelize_vae(self, vae: Vae) -> Vae:
        """See :meth:`ParallelContext.parallelize_vae`."""
        return vae if self.all.size == 1 else ShardedVae(vae, self.all, self._vae_split)

    def exchange(self, velocities: Velocities) -> Velocities:
        """Gather both branches' velocities in one packed exchange between the two guidance
        groups.
        """
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
        """See :meth:`ParallelContext.barrier`."""
        if self.all.size > 1:
            with naming_lost_ranks("barrier"):
                dist.barrier()

    def close(self) -> None:
        """Destroy the process group, if it was made for this mesh."""
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()
