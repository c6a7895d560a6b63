"""How one engine is spread over ranks. Light: importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strands_cosmos3.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from strands_cosmos3.parallel.mesh import Mesh

VaeSplit = Literal["exact", "tiles", "off"]
VAE_SPLITS = ("exact", "tiles", "off")


@dataclass(frozen=True)
class ParallelConfig:
    """How one engine is spread over ranks; the one owner of the degrees.

    A rank's number is ``cfg_rank * tp_size + tp_rank``.

    Args:
        tp_size: Ranks that split every layer.
        cfg_size: 2 computes the conditional and the unconditional pass of guidance on two groups of ranks; 1 on one.
        vae_split: How all ranks together encode and decode pictures: ``exact``, in shards of the width that exchange their
            borders; ``tiles``, which decodes overlapping tiles without a word between them, approximate; ``off``, each rank
            encodes everything and rank 0 decodes.
        timeout_s: How long a rank waits for the others in one exchange before it gives up.

    Raises:
        ConfigError: A degree or the split cannot be used.
    """

    tp_size: int = 1
    cfg_size: int = 1
    vae_split: VaeSplit = "exact"
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("tp_size", "cfg_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        if self.cfg_size > 2:
            raise ConfigError(f"cfg_size is {self.cfg_size}; guidance has two passes, so it must be 1 or 2.")
        if self.vae_split not in VAE_SPLITS:
            raise ConfigError(f"vae_split {self.vae_split!r} is not one of {', '.join(VAE_SPLITS)}.")
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be a finite number of seconds above zero.")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp_size * self.cfg_size

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(cfg_rank, tp_rank) of a rank."""
        return divmod(rank, self.tp_size)

    def check_world(self, world_size: int) -> None:
        """Compare the product with the number of processes that there are.

        Raises:
            ConfigError: They differ; the message holds the line that would work.
        """
        if world_size != self.world_size:
            there = "there is 1 process" if world_size == 1 else f"there are {world_size} processes"
            raise ConfigError(
                f"tp_size={self.tp_size} x cfg_size={self.cfg_size} needs {self.world_size} process"
                f"{'' if self.world_size == 1 else 'es'}, but {there}. Start them with: {self.torchrun_line()}"
            )

    def torchrun_line(self) -> str:
        """The command that starts as many processes as this needs."""
        if self.world_size == 1:
            return "python -m strands_cosmos3 infer ... (without torchrun)"
        return (
            f"torchrun --nproc-per-node={self.world_size} -m strands_cosmos3 infer --cfg {self.cfg_size} "
            f"--tp {self.tp_size} ..."
        )

    def join(self, device: torch.device) -> Mesh:
        """Meet the other ranks of this process's world: the one that torchrun (or a host's own ``init_process_group``)
        made.

        Raises:
            ConfigError: The world has another size than this needs. Nothing was loaded yet.
        """
        from strands_cosmos3.parallel.mesh import join_world

        return join_world(self, device)


@dataclass(frozen=True)
class RankOptions:
    """How each rank loads and computes; the same for all of them. It is made of what JSON knows.

    Args:
        device: ``cpu``, ``cuda:N``, or ``cuda``: the GPU of the rank's own number.
        dtype: ``float32`` or ``bfloat16``.
        decode_video: Whether results carry pixels.
        action_space: What the checkpoint's actions mean, where it does not say so itself.
        threads: Of this rank on a CPU; None leaves torch's.
    """

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    decode_video: bool = False
    action_space: str | None = None
    threads: int | None = None
