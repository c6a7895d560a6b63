"""How GPUs are divided among replicas."""

from __future__ import annotations

from dataclasses import dataclass

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.parallel.config import ParallelConfig


@dataclass(frozen=True)
class Topology:
    """GPUs divided into replicas of one model.

    A replica is a group of ``tp_size * cfg_size`` ranks with one GPU each. Without GPUs, a model
    that is not split runs inside each worker; one that is split runs in ``total_shard`` (default 1)
    groups of CPU processes. With GPUs ``total_shard`` is the expected number of replicas, which is
    checked.

    Raises:
        ConfigError: The GPUs do not divide evenly, or ``total_shard`` differs; the message names
            valid values.
    """

    num_gpus: int = 0
    tp_size: int = 1
    cfg_size: int = 1
    total_shard: int | None = None

    def __post_init__(self) -> None:
        ParallelConfig(self.tp_size, self.cfg_size)  # raises for invalid degrees
        for name, value, least in (
            ("num_gpus", self.num_gpus, 0),
            ("total_shard", self.total_shard, 1),
        ):
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < least
            ):
                raise ConfigError(
                    f"{name} is {value!r}; it must be a whole number of at least {least}."
                )
        replicas, left = divmod(self.num_gpus, self.ranks_per_replica)
        if left:
            raise ConfigError(
                f"num_gpus={self.num_gpus} does not divide into replicas of "
                f"tp_size={self.tp_size} x "
                f"cfg_size={self.cfg_size} = {self.ranks_per_replica}; {left} would stay idle. "
                f"{self._remedy()}"
            )
        if self.num_gpus and self.total_shard not in (None, replicas):
            raise ConfigError(
                f"total_shard={self.total_shard} contradicts num_gpus={self.num_gpus} / "
                f"(tp_size={self.tp_size} x "
                f"cfg_size={self.cfg_size}) = {replicas}. Leave total_shard out, or use "
                f"num_gpus={self.total_shard * self.ranks_per_replica if self.total_shard else 0}."
            )

    def _remedy(self) -> str:
        below, above = (self.num_gpus // self.ranks_per_replica + n for n in (0, 1))
        numbers = " or ".join(f"num_gpus={n * self.ranks_per_replica}" for n in (below, above) if n)
        sizes = [
            tp for tp in range(1, self.num_gpus + 1) if self.num_gpus % (tp * self.cfg_size) == 0
        ]
        if not sizes:
            return f"Use {numbers}."
        return f"Use {numbers}, or with cfg_size={self.cfg_size} a tp_size of {' or '.join(map(str, sizes))}."

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks of one replica."""
        return self.tp_size * self.cfg_size

    @property
    def replicas(self) -> int:
        """Number of replicas that workers share; 0 if every worker has a policy of its own."""
        if self.num_gpus:
            return self.num_gpus // self.ranks_per_replica
        return self.total_shard or (1 if self.ranks_per_replica > 1 else 0)

    @property
    def ranks(self) -> int:
        """Number of ranks of all replicas."""
        return self.replicas * self.ranks_per_replica

    @property
    def gpus_per_rank(self) -> int:
        """1, or 0 on the CPU."""
        return int(self.num_gpus > 0)

    def __str__(self) -> str:
        if not self.replicas:
            return "a policy in every worker, no GPU"
        where = (
            f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''}" if self.num_gpus else "the CPU"
        )
        replicas = f"{self.replicas} replica{'s' if self.replicas > 1 else ''}"
        return f"{replicas} of {self.ranks_per_replica} (tensor {self.tp_size} x guidance {self.cfg_size}) on {where}"
