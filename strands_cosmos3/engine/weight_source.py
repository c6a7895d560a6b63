"""Weights by name, whatever file they are in: shapes first, then tensor by tensor into the
caller's memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from strands_cosmos3.errors import WeightsError
from strands_cosmos3.resources import shown

Slices = tuple[slice, ...]  # the wanted part of a stored tensor, axis by axis; empty is all of it
Shard = Callable[[str, tuple[int, ...]], Slices]
"""From the released name and whole shape of a weight to the part of it that a rank keeps; only
that is read.
"""
Index = int | Slices
"""What to read of a stored tensor: one row, or slices."""

DTYPES = ("F32", "BF16", "F16")
_CHECK_BLOCK = 1 << 22


class WeightSource(ABC):
    """Weights of one component of a checkpoint, under their released names.

    Attributes:
        folder: Where they are, for messages.
        shapes: Name -> whole shape.
        dtypes: Name -> dtype as safetensors calls it, e.g. ``BF16``.
    """

    folder: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    @property
    @abstractmethod
    def files(self) -> tuple[Path, ...]:
        """All weight files."""

    @abstractmethod
    def parts(self, wanted: Mapping[str, tuple[str, Index]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (key, tensor) for each key of ``wanted``, key -> (name, part), in an order that
        suits the files.
        """

    def check(
        self, expected: Mapping[str, tuple[int, ...]], optional: tuple[str, ...] = ()
    ) -> None:
        """Raise WeightsError if names are missing or surplus (``optional`` prefixes may be), or
        shapes or dtypes differ.
        """
        found, wanted = set(self.shapes), set(expected)
        problems = [
            f"missing: {key}" for key in sorted(wanted - found) if not key.startswith(optional)
        ]
        problems += [
            f"surplus: {readable(key)}"
            for key in sorted(found - wanted)
            if not key.startswith(optional)
        ]
        for key in sorted(found & wanted):
            if self.shapes[key] != tuple(expected[key]):
                problems.append(
                    f"shape of {key} is {shown(list(self.shapes[key]))}, expected "
                    f"{list(expected[key])}"
                )
            if self.dtypes[key] not in DTYPES:
                problems.append(
                    f"{key} is stored as {shown(self.dtypes[key])}; only {', '.join(DTYPES)} are "
                    "loaded"
                )
        if problems:
            first = "; ".join(problems[:12]) + ("; ..." if len(problems) > 12 else "")
            raise WeightsError(
                f"{len(problems)} weights of {self.folder} do not fit its config: {first}."
            )

    def read_into(
        self, targets: Mapping[str, torch.Tensor], slices: Mapping[str, Slices] | None = None
    ) -> None:
        """Copy weights into existing tensors, converting dtype and device. ``name#i`` is row i of a
        stored matrix.

        Of each tensor only its ``slices``, by name, are read. Raises WeightsError if a weight is
        not finite, LayoutError if a file cannot be read.
        """
        wanted: dict[str, tuple[str, Index]] = {}
        for key in targets:
            name, _, row = key.partition("#")
            wanted[key] = name, int(row) if row else (slices or {}).get(key, ())
        for key, part in self.parts(wanted):
            require_finite(part, key)
            targets[key].copy_(part.reshape(targets[key].shape))
            del part  # before the next one is read


def unsharded(key: str, shape: tuple[int, ...]) -> Slices:
    """The :data:`Shard` of a single process: every weight is kept whole."""
    return ()


def sliced_shape(shape: tuple[int, ...], slices: Slices) -> tuple[int, ...]:
    """Shape of a part of a tensor."""
    return (
        tuple(len(range(*part.indices(n))) for n, part in zip(shape, slices, strict=False))
        + shape[len(slices) :]
    )


def taken(tensor: torch.Tensor, index: Index) -> torch.Tensor:
    """A part of a tensor, as a view."""
    return tensor if index == () else tensor[index]


def require_finite(tensor: torch.Tensor, key: str) -> None:
    """Raise WeightsError, which names the weight, if a number is NaN or infinite."""
    # aminmax propagates NaN without a mask of the weights' size
    for block in tensor.reshape(-1).split(_CHECK_BLOCK):
        low, high = torch.aminmax(block)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise WeightsError(
                f"{key.partition('#')[0]} holds NaN or infinity; the file is damaged or badly "
                "converted."
            )


def readable(key: str) -> str:
    """A weight's name as messages show it."""
    return key if key.isprintable() and len(key) < 80 else shown(key)
