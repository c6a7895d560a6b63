"""Interface of an engine to the other ranks when several processes run it together; implemented by
``parallel``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.sequence import Rope
from strands_cosmos3.engine.text_cache import TextKV
from strands_cosmos3.engine.transformer import ActionHead, Cosmos3Transformer
from strands_cosmos3.engine.weight_files import Shard, unsharded

# of each stream [B, tokens, P]; B branches of guidance
Velocities = tuple[torch.Tensor, ...]


class Vae(Protocol):
    """Pixels to latents and back; see :class:`~strands_cosmos3.engine.vae.WanVae`."""

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def has_decoder(self) -> bool: ...
    def encode(self, pixels: torch.Tensor) -> torch.Tensor: ...  # normalised latents, on every rank
    # pixels on rank 0, None on the others
    def decode(
        self, latents: torch.Tensor, first: torch.Tensor | None = None
    ) -> torch.Tensor | None: ...


class ParallelContext:
    """One rank's view of all ranks. The defaults are those of a single process."""

    device: torch.device
    rank: int = 0  # rank 0 returns pixels and writes files
    # of guidance, computed by this rank at steps with it: conditional 0, unconditional 1
    branches: tuple[int, ...] = (0, 1)

    def require_same_checkpoint(self, digest: Callable[[], str]) -> None:
        """Raise a DigestError if ranks on other machines have a checkpoint with another digest."""

    def sharding(self, config: TransformerConfig) -> Shard:
        """The part of each stored weight that this rank keeps; raises ConfigError if a
        transformer cannot be split over the ranks.
        """
        return unsharded

    def parallelize(self, transformer: Cosmos3Transformer) -> None:
        """Make a transformer of sharded weights exchange its partial results, in place."""

    def parallelize_vae(self, vae: Vae) -> Vae:
        """The VAE, with its work shared by the ranks."""
        return vae

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
        """The velocities of this rank's branches at one step, on every rank; arguments as in
        :meth:`Cosmos3Transformer.velocity`.
        """
        return transformer.velocity(tokens, time_D, noisy_N1, rope, texts, head, groups)

    def exchange(self, velocities: Velocities) -> Velocities:
        """The velocities of both branches on every rank, from those that each rank computed."""
        return velocities

    def barrier(self) -> None:
        """Wait until every rank has called this, e.g. before the process exits."""

    def close(self) -> None:
        """Leave the process group. Calling it twice is harmless."""


class SingleProcess(ParallelContext):
    """The context of an engine that runs in one process. ``cuda`` is the GPU of the thread that
    loads it.
    """

    def __init__(self, device: torch.device):
        unnumbered = device.type == "cuda" and device.index is None and torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if unnumbered else device
