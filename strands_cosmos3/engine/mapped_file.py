"""Safetensors files mapped into memory, of which nothing is read before it is used: for files that
are larger than the memory, and for weights that are handed on without a copy. Importing this loads
no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open

if TYPE_CHECKING:
    import torch


class MappedFile:
    """A safetensors file with the part of ``safe_open``'s interface that is used here. Each tensor
    that it returns is a copy.

    safetensors' own mapping for torch is private and writable, and the kernel may refuse one that
    memory could not back; this one is read-only and reserves none.
    """

    def __init__(self, path: Path):
        # raises SafetensorError for a header that is not sound
        checked: Any = safe_open(str(path), framework="np")
        self.keys = checked.keys
        self.metadata = checked.metadata
        mapped = np.memmap(path, np.uint8, "r")
        start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
        self._header: dict[str, Any] = json.loads(mapped[8:start].tobytes())
        self._start = start
        self._data = mapped[start:]

    def place(self, name: str) -> tuple[int, int]:
        """The first byte of a tensor in the file, and their number."""
        first, last = self._header[name]["data_offsets"]
        return self._start + first, last - first

    def get_slice(self, name: str) -> MappedTensor:
        """A tensor, of which parts can be read."""
        entry = self._header[name]
        return MappedTensor(
            entry["dtype"], entry["shape"], self._data[slice(*entry["data_offsets"])]
        )

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self.get_slice(name)[()]


@dataclass
class MappedTensor:
    """A tensor of such a file, and its bytes there. An index is a row, or slices."""

    dtype: str
    shape: list[int]
    data: np.ndarray

    def get_dtype(self) -> str:
        """Its dtype as safetensors calls it."""
        return self.dtype

    def get_shape(self) -> list[int]:
        """Its whole shape."""
        return self.shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        import torch

        from strands_cosmos3.engine.torch_dtypes import TORCH_DTYPES

        dtype = TORCH_DTYPES[self.dtype]
        numbers = self.data.view(f"u{dtype.itemsize}").reshape(self.shape)
        part = np.array(numbers[index])
        return torch.from_numpy(np.atleast_1d(part)).view(dtype).reshape(part.shape)
