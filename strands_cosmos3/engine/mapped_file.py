"""A safetensors file that is larger than the memory: mapped to be read only, which reserves none.

safetensors' own mapping for torch is private and writable. The kernel may refuse one that memory
could not back.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}


class MappedFile:
    """What :mod:`.weight_files` uses of ``safe_open``. Each tensor that it returns is a copy."""

    def __init__(self, path: Path):
        # raises SafetensorError for a header that is not sound
        self._checked: Any = safe_open(str(path), framework="np")
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._header: dict[str, Any] = json.loads(file.read(size))
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._start = 8 + size

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return self._checked.keys()

    def get_slice(self, name: str) -> MappedTensor:
        """A tensor, of which parts can be read."""
        return MappedTensor(self._checked.get_slice(name), self, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self.get_slice(name)[()]

    def read(self, name: str, index: Any) -> torch.Tensor:
        """A part of a tensor."""
        about = self._header[name]
        dtype, shape, (start, _) = _DTYPES[about["dtype"]], about["shape"], about["data_offsets"]
        bits = np.dtype(f"u{dtype.itemsize}")
        part = (
            np.frombuffer(self._map, bits, math.prod(shape), self._start + start)
            .reshape(shape)[index]
            .copy()
        )
        return torch.from_numpy(np.atleast_1d(part)).view(dtype).reshape(part.shape)


class MappedTensor:
    """A tensor of such a file."""

    def __init__(self, about: Any, file: MappedFile, name: str):
        self._file, self._name = file, name
        self.get_dtype, self.get_shape = about.get_dtype, about.get_shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file.read(self._name, index)
