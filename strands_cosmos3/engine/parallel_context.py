"""What an engine asks of the ranks that it is spread over; it knows no more of them than this.

``parallel`` answers; :class:`SingleProcess` is the answer of one process.
"""

from __future__ import annotations

from typing import Protocol

import torch

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.transformer import Cosmos3Transformer
from strands_cosmos3.engine.weight_files import Cut

Velocities = tuple[torch.Tensor, torch.Tensor]
"""Of vision tokens [B, n, P] and of action rows [B, m, A], B branches of guidance."""


class Vae(Protocol):
    """Pixels to latents and back; see :class:`~strands_cosmos3.engine.vae.WanVae`."""

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def has_decoder(self) -> bool: ...
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised latents, on every rank."""
        ...

    def decode(self, latents: torch.Tensor) -> torch.Tensor | None:
        """Pixels, on the rank that keeps them; None on the others."""
        ...


class ParallelContext(Protocol):
    """One rank's view of all of them.

    Attributes:
        device: This rank's.
        rank: This one's number; rank 0 keeps pixels and writes.
        branches: Which passes of guidance this rank computes where guidance applies: conditional 0, unconditional 1.
    """

    device: torch.device
    rank: int
    branches: tuple[int, ...]

    def check(self, config: TransformerConfig) -> None:
        """Whether a transformer can be split so.

        Raises:
            ConfigError: It cannot.
        """
        ...

    def shard(self, key: str, shape: tuple[int, ...]) -> Cut:
        """Return the slices of a stored weight that this rank keeps; empty for the whole weight."""
        ...

    def parallelize(self, transformer: Cosmos3Transformer) -> None:
        """Add the sums over ranks that a transformer with sharded weights needs."""
        ...

    def parallelize_vae(self, vae: Vae) -> Vae:
        """The VAE, shared by the ranks."""
        ...

    def exchange(self, velocities: Velocities) -> Velocities:
        """Both branches' velocities on every rank, of those that each rank computed."""
        ...

    def barrier(self) -> None:
        """Wait until every rank has reached this point. Call it before a rank exits, so that no exchange is cut off."""
        ...

    def close(self) -> None:
        """Leave the others; calling it twice is harmless."""
        ...


class Plan(Protocol):
    """What ``parallel=`` takes: a :class:`~strands_cosmos3.parallel.config.ParallelConfig`."""

    def join(self, device: torch.device) -> ParallelContext:
        """Meet the other ranks.

        Raises:
            ConfigError: There are more or fewer of them than planned.
        """
        ...


class SingleProcess:
    """One process does everything."""

    rank = 0
    branches: tuple[int, ...] = (0, 1)

    def __init__(self, device: torch.device):
        self.device = device

    def check(self, config: TransformerConfig) -> None:
        """Nothing to check."""

    def shard(self, key: str, shape: tuple[int, ...]) -> Cut:
        """Everything is kept."""
        return ()

    def parallelize(self, transformer: Cosmos3Transformer) -> None:
        """Nothing to sum."""

    def parallelize_vae(self, vae: Vae) -> Vae:
        """As it is."""
        return vae

    def exchange(self, velocities: Velocities) -> Velocities:
        """Both are here."""
        return velocities

    def barrier(self) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nobody to leave."""
