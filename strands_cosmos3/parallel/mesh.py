"""One rank's position in the groups of tensor, sequence and guidance parallelism, and the slice of
each stored weight that it keeps.

The model itself is unchanged. Query, key, value, gate and up projections are split by rows (each
rank has its own heads and neurons), ``out`` and ``down`` by columns (each rank's output is a
summand), the embedding by columns (each rank has a part of every token's vector). Norms, input and
output projections and action heads are replicated. Each layer sums twice.

With fewer key heads than ranks, several ranks keep the same head: rank r keeps head ``r * heads //
ranks``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.parallel_context import ParallelContext, Vae, Velocities
from strands_cosmos3.engine.sequence import Rope
from strands_cosmos3.engine.text_cache import TextKV
from strands_cosmos3.engine.transformer import ActionHead, Cosmos3Transformer, Mlp
from strands_cosmos3.engine.weight_files import Shard, Slices
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.parallel.collectives import (
    Group,
    Traffic,
    connect,
    naming_lost_ranks,
    own_device,
    require_same_checkpoint,
)
from strands_cosmos3.parallel.sharded_vae import ShardedVae
from strands_cosmos3.parallel.shared_sequence import SharedSequence, own_heads, require_sp_size

_ROWS = re.compile(r".*\.(to_q|add_q_proj|gate_proj|up_proj)\.(weight|bias)")
_KEY_HEADS = re.compile(r".*\.(to_k|to_v|add_k_proj|add_v_proj)\.(weight|bias)")
_COLUMNS = re.compile(r".*\.(to_out|to_add_out|down_proj)\.weight|embed_tokens\.weight")


def require_tp_size(config: TransformerConfig, tp_size: int) -> None:
    """Raise a ConfigError that lists the valid degrees if layers cannot be split into equal
    parts.
    """
    if not _divides(config, tp_size):
        valid = [n for n in range(1, config.num_attention_heads + 1) if _divides(config, n)]
        raise ConfigError(
            f"tp_size={tp_size} does not split this transformer ({config.num_attention_heads} "
            f"heads, {config.num_key_value_heads} key heads, {config.intermediate_size} neurons, "
            f"width {config.hidden_size}) into equal parts; valid: {', '.join(map(str, valid))}."
        )


def _divides(config: TransformerConfig, n: int) -> bool:
    k = config.num_key_value_heads
    sizes = (config.num_attention_heads, config.intermediate_size, config.hidden_size)
    return all(size % n == 0 for size in sizes) and (k % n == 0 or n % k == 0)


def key_heads(config: TransformerConfig, rank: int, size: int) -> range:
    """Return the key heads that a rank's query heads read."""
    k = config.num_key_value_heads
    first = rank * k // size
    return range(first, first + max(k // size, 1))


def shard_slices(
    key: str, shape: tuple[int, ...], config: TransformerConfig, rank: int, size: int
) -> Slices:
    """Return the slices that a rank keeps of a stored weight (name in the released layout, full
    shape); empty for all of it.
    """
    if size == 1:
        return ()
    if _KEY_HEADS.fullmatch(key):
        heads = key_heads(config, rank, size)
        return (slice(heads.start * config.head_dim, heads.stop * config.head_dim),)
    if _ROWS.fullmatch(key):
        return (_part(shape[0], rank, size),)
    if _COLUMNS.fullmatch(key):
        return (slice(0, shape[0]), _part(shape[1], rank, size))
    return ()


def _part(n: int, rank: int, size: int) -> slice:
    return slice(n // size * rank, n // size * (rank + 1))


class Mesh(ParallelContext):
    """The parallel context of one rank among several; see
    :class:`~strands_cosmos3.parallel.config.ParallelConfig`.

    ``degrees`` are cfg_size, sp_size and tp_size. It joins the process group that there is, or
    makes that of torchrun and destroys it on :meth:`close`. ``traffic``: what this rank sent.
    """

    def __init__(
        self,
        degrees: tuple[int, int, int],
        vae_split: str,
        device: torch.device,
        timeout_s: float,
    ):
        self.device = own_device(device)
        self._owns_world = not dist.is_initialized()
        if self._owns_world:
            connect(self.device, timeout_s, "env://")
        self.traffic = Traffic()
        self._vae_split = vae_split
        mesh = init_device_mesh(device.type, degrees, mesh_dim_names=("cfg", "sp", "tp"))
        self.rank = dist.get_rank()
        self.tp = Group(mesh.get_group("tp"), self.traffic)
        self.sp = Group(mesh.get_group("sp"), self.traffic)
        self.cfg = Group(mesh.get_group("cfg"), self.traffic)
        self.all = Group(dist.group.WORLD, self.traffic)
        if self.cfg.size > 1:
            self.branches = (self.cfg.rank,)

    def require_same_checkpoint(self, digest: Callable[[], str]) -> None:
        """See :meth:`ParallelContext.require_same_checkpoint`."""
        require_same_checkpoint(digest)

    def sharding(self, config: TransformerConfig) -> Shard:
        """See :meth:`ParallelContext.sharding`."""
        require_tp_size(config, self.tp.size)
        require_sp_size(config, self.tp.size, self.sp.size)
        return lambda key, shape: shard_slices(key, shape, config, self.tp.rank, self.tp.size)

    def parallelize(self, transformer: Cosmos3Transformer) -> None:
        """Add the sums over ranks to a model of sharded weights: after each attention projection
        and after each MLP. Of a prompt's keys and values keep those that this rank's heads read.
        """
        if self.sp.size > 1:

            def keep_own(_module: torch.nn.Module, _inputs: Any, output: TextKV) -> TextKV:
                return own_heads(output, self.sp)

            transformer.text.register_forward_hook(keep_own)
        group = self.tp
        if group.size == 1:
            return

        def all_reduce(
            _module: torch.nn.Module, _inputs: Any, output: torch.Tensor
        ) -> torch.Tensor:
            return group.sum(output, "layer")

        def all_gather(
            _module: torch.nn.Module, _inputs: Any, output: torch.Tensor
        ) -> torch.Tensor:
            return torch.cat(group.gather(output, "embedding"), dim=-1)

        transformer.text.embed_tokens.register_forward_hook(all_gather)
        for name, module in transformer.named_modules():
            if isinstance(module, Mlp):
                module.register_forward_hook(all_reduce)
            elif name.endswith((".to_out", ".to_add_out")):
                if module.bias is not None and group.rank > 0:
                    module.register_parameter("bias", None)  # it is added once
                module.register_forward_hook(all_reduce)

    def parallelize_vae(self, vae: Vae) -> Vae:
        """See :meth:`ParallelContext.parallelize_vae`."""
        return ShardedVae(vae, self.all, self._vae_split)

    def velocity(
        self,
        transformer: Cosmos3Transformer,
        tokens: Sequence[torch.Tensor],
        time_D: torch.Tensor,
        noisy_N1: torch.Tensor,
        rope: Rope,
        texts: Sequence[TextKV],
        head: ActionHead,
        groups: Sequence[slice],
    ) -> Velocities:
        """See :meth:`ParallelContext.velocity`. Each rank of a sequence-parallel group computes its
        own tokens; the velocities that are wanted travel in one packed exchange.
        """
        if self.sp.size == 1:
            return super().velocity(
                transformer, tokens, time_D, noisy_N1, rope, texts, head, groups
            )
        shared = SharedSequence(self.sp, tuple(stream.shape[-2] for stream in tokens))
        own = transformer.velocity(
            [shared.own(stream) for stream in tokens],
            time_D,
            shared.own_of_all(noisy_N1),
            (shared.own_of_all(rope[0]), shared.own_of_all(rope[1])),
            texts,
            head,
            [shared.own_group(group) for group in groups],
            shared.attention,
        )
        return shared.whole_groups(_gathered(own, self.sp, "velocity"), groups)

    def exchange(self, velocities: Velocities) -> Velocities:
        """Gather both branches' velocities in one packed exchange between the two guidance
        groups.
        """
        if self.cfg.size == 1:
            return velocities
        return tuple(part.flatten(0, 1) for part in _gathered(velocities, self.cfg, "guidance"))

    def barrier(self) -> None:
        """See :meth:`ParallelContext.barrier`."""
        with naming_lost_ranks("barrier"):
            dist.barrier()

    def close(self) -> None:
        """Destroy the process group, if it was made for this mesh."""
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()


def _gathered(velocities: Velocities, group: Group, kind: str) -> list[torch.Tensor]:
    """[ranks, B, tokens, P] of each stream, packed into one exchange."""
    packed = torch.cat([velocity.flatten(1) for velocity in velocities], dim=1)
    sizes = [velocity[0].numel() for velocity in velocities]
    parts = torch.stack(group.gather(packed, kind)).split(sizes, dim=-1)
    return [
        part.unflatten(-1, velocity.shape[1:])
        for part, velocity in zip(parts, velocities, strict=True)
    ]
