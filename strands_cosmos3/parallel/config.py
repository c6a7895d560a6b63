"""Degrees of parallelism, and how ranks load. Importing this loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from strands_cosmos3.checks import known_name, positive, typed, typed_fields, whole_number
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.options import option
from strands_cosmos3.parallel.launched import told

if TYPE_CHECKING:
    import torch

    from strands_cosmos3.engine.config import TransformerConfig
    from strands_cosmos3.engine.parallel_context import ParallelContext

VaeSplit = Literal["exact", "tiles", "off"]
VAE_SPLITS = get_args(VaeSplit)
DEGREES = {"tp": "tp_size", "cfg": "cfg_size", "sp": "sp_size"}
"""Flag of each degree of parallelism -> the field of :class:`ParallelConfig`; they multiply."""


@dataclass(frozen=True)
class ParallelConfig:
    """How one engine is divided among ranks.

    Rank number = (cfg_rank * sp_size + sp_rank) * tp_size + tp_rank.

    Raises:
        InputError: A degree, the split or the time limit is not valid.
        ConfigError: The number of processes is another one.
    """

    tp_size: int = option(1, "distributed", flag="tp")
    """Ranks that split every layer."""
    cfg_size: int = option(1, "distributed", flag="cfg")
    """2 computes the conditional and the unconditional pass of guidance on two groups of ranks; 1
    on one. The degrees multiply: tp x cfg x sp processes are needed.
    """
    sp_size: int = option(1, "distributed", flag="sp")
    """Ranks that split the sequence of pictures and actions, and each keep all weights: for long
    sequences, and where tensor parallelism sends too much.
    """
    vae_split: VaeSplit = option("exact", "distributed")
    """How all ranks share the VAE: exact splits the width into shards that exchange halos; tiles
    decodes overlapping tiles, which is approximate; off encodes on each rank and decodes on rank 0.
    """
    timeout_s: float = option(120.0, "distributed", hidden=True)
    """Time limit of one exchange between ranks [s]."""
    world_size: int | None = option(None, "distributed", hidden=True)
    """Number of processes, for a check: it must be the product of the degrees."""

    def __post_init__(self) -> None:
        typed_fields(self)
        whole_number(self.tp_size, "tp_size", 1)
        whole_number(self.cfg_size, "cfg_size", 1, 2)  # guidance has two passes
        whole_number(self.sp_size, "sp_size", 1)
        if self.world_size not in (None, self.ranks):
            raise ConfigError(
                f"world_size is {self.world_size!r}; {self} makes {self.ranks}: leave world_size "
                "out, or correct it."
            )
        known_name(self.vae_split, "vae_split", VAE_SPLITS)
        positive(self.timeout_s, "timeout_s")

    def __str__(self) -> str:
        degrees = self.degrees
        named = {flag: degrees[name] for flag, name in DEGREES.items() if name in degrees}
        return " x ".join(f"{flag}={size}" for flag, size in named.items())

    @property
    def degrees(self) -> dict[str, int]:
        """Number of ranks along each degree, by the name of its field. ``sp_size`` is left out
        where it is 1, so that what records without it identify stays the same.
        """
        sizes = {name: getattr(self, name) for name in DEGREES.values()}
        return {name: size for name, size in sizes.items() if name != "sp_size" or size > 1}

    @property
    def ranks(self) -> int:
        """Total number of ranks."""
        return math.prod(self.degrees.values())

    @property
    def layer_ranks(self) -> int:
        """Number of ranks that exchange within a layer."""
        return self.tp_size * self.sp_size

    @typed()
    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return (cfg_rank, sp_rank, tp_rank) of a rank."""
        others, tp_rank = divmod(rank, self.tp_size)
        return (*divmod(others, self.sp_size), tp_rank)

    @typed()
    def check_world(self, world_size: int) -> None:
        """Raise a ConfigError with the command that works if the number of processes is wrong."""
        if world_size != self.ranks:
            count = "there is 1 process" if world_size == 1 else f"there are {world_size} processes"
            raise ConfigError(
                f"{self} needs {self.ranks} process{'' if self.ranks == 1 else 'es'}, but {count}. "
                f"Start them with: {self.torchrun_line()}"
            )

    def check_transformer(self, config: TransformerConfig) -> None:
        """Raise a ConfigError that lists the valid degrees if a transformer cannot be split so."""
        from strands_cosmos3.parallel.mesh import require_tp_size
        from strands_cosmos3.parallel.shared_sequence import require_sp_size

        require_tp_size(config, self.tp_size)
        require_sp_size(config, self.tp_size, self.sp_size)

    def torchrun_line(self) -> str:
        """Return the command that starts :attr:`ranks` processes."""
        if self.ranks == 1:
            return "python -m strands_cosmos3 infer ... (without torchrun)"
        flags = str(self).replace(" x ", " --")
        nodes = told("GROUP_WORLD_SIZE", 1)
        machines = f"--nnodes={nodes} " if nodes > 1 else ""
        each = -(-self.ranks // nodes)
        return f"torchrun {machines}--nproc-per-node={each} -m strands_cosmos3 infer --{flags} ..."

    def join(self, device: torch.device) -> ParallelContext:
        """Join the process group of torchrun or of the caller's ``init_process_group``; a
        ConfigError if its size is wrong.
        """
        from strands_cosmos3.engine.parallel_context import SingleProcess
        from strands_cosmos3.parallel.collectives import world_size
        from strands_cosmos3.parallel.mesh import Mesh

        self.check_world(world_size())
        if self.ranks == 1:
            return SingleProcess(device)
        degrees = self.cfg_size, self.sp_size, self.tp_size
        return Mesh(degrees, self.vae_split, device, self.timeout_s)


@dataclass(frozen=True)
class RankOptions:
    """How every rank loads and computes. All values can be written as JSON.

    Args:
        engine: Its device is ``cpu``, ``cuda:N``, or ``cuda`` for the GPU with the rank's number
            plus ``first_gpu``; None is ``cpu``.
        action_space: For a checkpoint that does not state its own.
        threads: CPU threads of each rank; None keeps torch's default.
        first_gpu: GPU of rank 0.
    """

    engine: EngineOptions = field(default_factory=EngineOptions)
    action_space: str | None = None
    threads: int | None = None
    first_gpu: int = 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RankOptions:
        """Return the options that ``dataclasses.asdict`` wrote."""
        return cls(**{**values, "engine": EngineOptions(**values["engine"])})
