"""Safetensors files of one component of a checkpoint; nothing is unpickled, and headers are checked first.

Weights are read once, tensor by tensor, into the caller's memory, so loading needs little more than the loaded weights.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from strands_cosmos3.errors import DigestError, LayoutError, WeightsError
from strands_cosmos3.resources import contained, read_json, require_file, shown

Slices = tuple[slice, ...]  # the wanted part of a stored tensor, axis by axis; empty is all of it
Shard = Callable[[str, tuple[int, ...]], Slices]
"""From the released name and whole shape of a weight to the part of it that a rank keeps; only that is read."""

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DTYPES = ("F32", "BF16", "F16")
_CHECK_BLOCK = 1 << 22
_MAX_HEADER_BYTES = 4 << 20  # twenty times that of the largest released checkpoint
_MAX_TENSORS = 20_000
_HINT = "A Cosmos 3 checkpoint has this file; download it again."


def unsharded(key: str, shape: tuple[int, ...]) -> Slices:
    """The :data:`Shard` of a single process: every weight is kept whole."""
    return ()


def read_config(path: Path, root: Path) -> dict[str, Any]:
    """Read a JSON object; raises LayoutError if the file is missing, outside the checkpoint, or not a JSON object."""
    return read_json(inside(path, root), LayoutError, _HINT)


def inside(path: Path, root: Path) -> Path:
    """Return ``path`` if it lies inside the checkpoint ``root``; raises LayoutError if a link leads out of it."""
    return contained(path, root, "checkpoint", LayoutError)


class WeightFiles:
    """The weights of one folder (``transformer/`` or ``vae/``), by name. Nothing outside the checkpoint ``root`` is opened,
    and neither are pipes and files whose header is larger than 4 MiB.

    Raises:
        LayoutError: There are no safetensors files, an index or header is unreadable, or a path leads outside ``root``.
        WeightsError: An index and the headers disagree, or a dtype is not supported.
    """

    def __init__(self, folder: Path, root: Path, stem: str = "diffusion_pytorch_model"):
        self.folder = folder
        self._root = root
        self._file_of = self._locate(stem)
        self.shapes: dict[str, tuple[int, ...]] = {}
        wanted: dict[Path, set[str]] = {}
        for key, file in self._file_of.items():
            wanted.setdefault(file, set()).add(key)
        for file in self.files:
            self._read_header(file, wanted[file])

    @property
    def files(self) -> tuple[Path, ...]:
        """All weight files."""
        return tuple(sorted(set(self._file_of.values())))

    def _locate(self, stem: str) -> dict[str, Path]:
        if not self.folder.is_dir():
            raise LayoutError(f"{self.folder} is not a folder; a Cosmos 3 checkpoint has one.")
        index = self.folder / f"{stem}.safetensors.index.json"
        if os.path.lexists(index):
            return self._from_index(index)
        single = self.folder / f"{stem}.safetensors"
        if single.exists():
            inside(single, self._root)
            with _opened(single) as file:
                return dict.fromkeys(file.keys(), single)
        pickled = sorted(p.name for p in self.folder.iterdir() if p.suffix in _PICKLED)
        if pickled:
            raise LayoutError(
                f"{self.folder} holds pickled weights ({', '.join(pickled)}), which can run code when read; "
                "only safetensors are loaded. Convert them first."
            )
        raise LayoutError(f"{self.folder} holds neither {single.name} nor {index.name}; is the download complete?")

    def _from_index(self, index: Path) -> dict[str, Path]:
        weight_map = read_config(index, self._root).get("weight_map")
        if not isinstance(weight_map, dict) or not 0 < len(weight_map) <= _MAX_TENSORS:
            raise LayoutError(f"{index} has no weight_map of at most {_MAX_TENSORS} tensors; download it again.")
        located = {}
        for key, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise LayoutError(f"{index} maps {shown(key)} to {shown(name)}; only safetensors files beside it are opened.")
            located[key] = self.folder / name
        for file in sorted(set(located.values())):
            inside(file, self._root)
            if not file.is_file():
                raise LayoutError(f"{index} names {shown(file.name)}, no file beside it; is the download complete?")
        return located

    def _read_header(self, path: Path, mine: set[str]) -> None:
        with _opened(path) as file:
            held = set(file.keys())
            if held != mine:
                raise WeightsError(f"{path} {_difference(mine, held)} against its index; download it again.")
            for key in mine:
                view = file.get_slice(key)
                if view.get_dtype() not in _DTYPES:
                    raise WeightsError(f"{key} is stored as {view.get_dtype()}; only {', '.join(_DTYPES)} are loaded.")
                self.shapes[key] = tuple(view.get_shape())

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: tuple[str, ...] = ()) -> None:
        """Raise WeightsError if names are missing or surplus (``optional`` prefixes may be), or shapes differ."""
        found, wanted = set(self.shapes), set(expected)
        problems = [f"missing: {key}" for key in sorted(wanted - found) if not key.startswith(optional)]
        problems += [f"surplus: {_name(key)}" for key in sorted(found - wanted) if not key.startswith(optional)]
        for key in sorted(found & wanted):
            if self.shapes[key] != tuple(expected[key]):
                problems.append(f"shape of {key} is {shown(list(self.shapes[key]))}, expected {list(expected[key])}")
        if problems:
            first = "; ".join(problems[:12]) + ("; ..." if len(problems) > 12 else "")
            raise WeightsError(f"{len(problems)} weights of {self.folder} do not fit its config: {first}.")

    def read_into(self, targets: Mapping[str, torch.Tensor], slices: Mapping[str, Slices] | None = None) -> None:
        """Copy weights into existing tensors, converting dtype and device. ``name#i`` is row i of a stored matrix.

        Of each tensor only its ``slices``, by name, are read. Raises WeightsError if a weight is not finite, LayoutError if
        a file cannot be read.
        """
        by_file: dict[Path, list[str]] = {}
        for key in targets:
            by_file.setdefault(self._file_of[key.partition("#")[0]], []).append(key)
        for path, keys in sorted(by_file.items()):
            with _opened(inside(path, self._root)) as file:
                for key in sorted(keys):
                    name, _, row = key.partition("#")
                    view = file.get_slice(name)
                    part = view[int(row)] if row else view[(slices or {}).get(key) or slice(None)]
                    _copy_finite(part, targets[key], key)


def verify(path: Path, wanted: str) -> None:
    """Compare a file with its recorded SHA-256 in hexadecimal; raises DigestError if it differs."""
    if (found := sha256(path)) != wanted:
        raise DigestError(f"{path} has SHA-256 {found}, recorded is {wanted}; download it again.")


def _opened(path: Path) -> Any:
    require_file(path, LayoutError)
    try:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > _MAX_HEADER_BYTES:
            raise OSError(f"its header claims {header} bytes; at most {_MAX_HEADER_BYTES} are read")
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        reason = str(error).encode("ascii", "backslashreplace").decode()[:200]
        raise LayoutError(f"{path} is not a readable safetensors file ({reason}); download it again.") from None


def _name(key: str) -> str:
    return key if key.isprintable() and len(key) < 80 else shown(key)


def _copy_finite(source: torch.Tensor, target: torch.Tensor, key: str) -> None:
    source = source.reshape(target.shape)
    for block in source.reshape(-1).split(_CHECK_BLOCK):  # aminmax propagates NaN without a mask of the weights' size
        low, high = torch.aminmax(block)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise WeightsError(f"{key.partition('#')[0]} holds NaN or infinity; the file is damaged or badly converted.")
    target.copy_(source)


def sliced_shape(shape: tuple[int, ...], slices: Slices) -> tuple[int, ...]:
    """Shape of a part of a tensor."""
    return tuple(len(range(*part.indices(n))) for n, part in zip(shape, slices, strict=False)) + shape[len(slices) :]


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _difference(wanted: set[str], held: set[str]) -> str:
    lacking, surplus = sorted(wanted - held), sorted(held - wanted)
    parts = [f"lacks {', '.join(map(_name, lacking[:6]))}"] if lacking else []
    parts += [f"holds in addition {', '.join(map(_name, surplus[:6]))}"] if surplus else []
    return " and ".join(parts)
