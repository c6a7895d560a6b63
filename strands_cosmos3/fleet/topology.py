"""GPUs divided into replicas of one model. Importing this loads no Ray."""

from __future__ import annotations

from dataclasses import dataclass

from strands_cosmos3.checks import whole_number
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.parallel.config import ParallelConfig


@dataclass(frozen=True)
class Topology:
    """GPUs divided into replicas of one model.

    A replica is a group of ``parallel.ranks`` ranks with one GPU each. Without GPUs, a model that
    is not split runs inside each worker; one that is split runs in ``total_shard`` (default 1)
    groups of CPU processes. With GPUs ``total_shard`` is the expected number of replicas, which is
    checked.

    Raises:
        ConfigError: The GPUs do not divide evenly, or ``total_shard`` differs; the message names
            valid values.
        InputError: A number is out of range.
    """

    parallel: ParallelConfig
    num_gpus: int = 0
    total_shard: int | None = None

    def __post_init__(self) -> None:
        whole_number(self.num_gpus, "num_gpus", 0)
        if self.total_shard is not None:
            whole_number(self.total_shard, "total_shard", 1)
        size, gpus = self.parallel.ranks, self.num_gpus
        replicas, left = divmod(gpus, size)
        if left:
            fewer = f"num_gpus={gpus - left} or " if replicas else ""
            sizes = [str(ranks) for ranks in range(1, gpus + 1) if gpus % ranks == 0]
            raise ConfigError(
                f"num_gpus={gpus} does not divide into replicas of {self.parallel} = {size}; "
                f"{left} would stay idle. Use {fewer}num_gpus={gpus - left + size}, or degrees "
                f"that multiply to {' or '.join(sizes)}."
            )
        if gpus and self.total_shard not in (None, replicas):
            raise ConfigError(
                f"total_shard={self.total_shard} contradicts num_gpus={gpus} / "
                f"({self.parallel}) = {replicas}. Leave total_shard out, or use "
                f"num_gpus={(self.total_shard or 0) * size}."
            )

    @property
    def replicas(self) -> int:
        """Number of replicas that workers share; 0 if every worker has a policy of its own."""
        if self.num_gpus:
            return self.num_gpus // self.parallel.ranks
        return self.total_shard or (1 if self.parallel.ranks > 1 else 0)

    @property
    def ranks(self) -> int:
        """Number of ranks of all replicas."""
        return self.replicas * self.parallel.ranks

    def __str__(self) -> str:
        if not self.replicas:
            return "a policy in every worker, no GPU"
        gpus = self.num_gpus
        replicas = self.replicas
        return (
            f"{replicas} replica{'s' * (replicas > 1)} of {self.parallel.ranks} ({self.parallel}) "
            f"on {f'{gpus} GPU' if gpus else 'the CPU'}{'s' * (gpus > 1)}"
        )
