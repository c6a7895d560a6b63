"""Write safetensors files tensor by tensor: no more than one tensor is in memory at a time."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from strands_cosmos3.engine.weight_source import WeightSource, require_finite
from strands_cosmos3.resources import write_whole

DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_BLOCK = 1 << 24


class Planned:
    """One tensor of a file that is to be written: its stored name, its source, and its name and
    dtype there.
    """

    def __init__(self, name: str, source: WeightSource, key: str, dtype: str | None = None):
        self.name, self.source, self.key = name, source, key
        self.dtype = dtype or source.dtypes[key]
        self.shape = source.shapes[key]

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_safetensors(path: Path, tensors: Iterable[Planned]) -> str:
    """Write a file and return its SHA-256. Raises WeightsError if a weight is not finite; no
    file is left then.
    """
    planned, digest = list(tensors), hashlib.sha256()

    def fill(hidden: Path) -> None:
        with hidden.open("wb") as file:
            for block in _blocks(planned):
                digest.update(block)
                _write(file, block)

    write_whole(path, fill)
    return digest.hexdigest()


def _blocks(planned: list[Planned]) -> Iterator[memoryview]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in planned:
        header[one.name] = {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "data_offsets": [at, at + one.size],
        }
        at += one.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for one in planned:
        ((_, tensor),) = one.source.parts({"": (one.key, ())})
        require_finite(tensor, one.key)
        flat = tensor.to(DTYPES[one.dtype]).contiguous().reshape(-1)
        if flat.numel():
            yield memoryview(cast("Any", flat.view(torch.uint8).numpy()))


def _write(file: BinaryIO, block: memoryview) -> None:
    for start in range(0, len(block), _BLOCK):
        file.write(block[start : start + _BLOCK])


def shards_of(planned: Iterable[Planned], most_bytes: int) -> list[list[Planned]]:
    """Consecutive groups of at most ``most_bytes``, or of one larger tensor."""
    groups: list[list[Planned]] = [[]]
    held = 0
    for one in planned:
        if groups[-1] and held + one.size > most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(one)
        held += one.size
    return groups
