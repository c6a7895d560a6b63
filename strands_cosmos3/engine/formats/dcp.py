"""Distributed checkpoints (torch DCP) of cosmos-framework's trainer, read without torch.distributed
and without the framework.

``<run>/checkpoints/iter_000000100/model/`` has ``.metadata``, a pickle that says where every tensor
is, and ``__<rank>_<n>.distcp``, each a row of archives as ``torch.save`` writes them. Names are
``net.<framework name>``, and ``net_ema.<framework name>`` for the averaged weights, which NVIDIA
exports and serves: they win. Source: cosmos-framework 5eee9ed5, ``checkpoint/dcp.py``; torch 2.13,
``distributed/checkpoint``.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strands_cosmos3.engine.formats.framework import is_vision, renamed, require_vision
from strands_cosmos3.engine.formats.layout import OnBase
from strands_cosmos3.engine.formats.sources import Renamed
from strands_cosmos3.engine.torch_dtypes import TORCH_DTYPES
from strands_cosmos3.engine.weight_files import (
    Index,
    WeightSource,
    inside,
    readable,
    unwrapped,
)
from strands_cosmos3.errors import LayoutError, WeightsError
from strands_cosmos3.resources import require_file, shown

_BROKEN = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
    OverflowError,
    MemoryError,
    RecursionError,
    AssertionError,
)


class Record:
    """Stands for an object of a named class: its attributes, and no behaviour."""

    kind = ""

    def __init__(self, *_: Any):
        self.fields: Mapping[Any, Any] = {}  # by name, or by position

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, Mapping) else dict(enumerate(state))


def _record(name: str) -> type[Record]:
    """A kind of record for the class of this name."""
    return type(name, (Record,), {"kind": name})


METADATA = ".metadata"
LATEST = "checkpoints/latest_checkpoint.txt"
STEPS = "checkpoints/iter_*"
_MAX_METADATA_BYTES = 64 << 20
_MAX_ARCHIVE_EXTRA = 1 << 20  # of an archive beside its numbers
_NAME_OF = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_CODE = "torch.distributed.checkpoint"
_RECORDS = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
)
_ALLOWED: Mapping[str, Any] = {
    **{f"{_CODE}.metadata.{name}": _record(name) for name in _RECORDS},
    f"{_CODE}.metadata._MEM_FORMAT_ENCODING": _record("memory format"),
    f"{_CODE}.filesystem._StorageInfo": _record("_StorageInfo"),
    "torch.serialization._get_layout": _record("layout"),
    "torch.Size": lambda sizes=(): tuple(sizes),
    **{f"pathlib.{name}": _record("path") for name in ("Path", "PosixPath", "PurePosixPath")},
    **{
        str(dtype): dtype
        for dtype in (*_NAME_OF, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
    },
}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads a pickle in which only the names of ``_ALLOWED`` may occur; nothing else is run."""

    def find_class(self, module: str, name: str) -> Any:
        known = _ALLOWED.get(whole := f"{module}.{name}")
        if known is None:
            raise pickle.UnpicklingError(f"it names {shown(whole)}, which no checkpoint needs")
        return known


def _unreadable(where: str, error: Exception) -> LayoutError:
    # torch's advice to load it nevertheless comes after the first sentence
    reason = str(error).partition(". ")[0].encode("ascii", "backslashreplace").decode()[:200]
    return LayoutError(
        f"{where} is not readable ({reason}); nothing of it was run. Download it again."
    )


@dataclass(frozen=True)
class _Chunk:
    """A stored block of a tensor: where it begins in the tensor, its shape and dtype, and its
    archive.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int
    length: int


class DcpFiles(WeightSource):
    """The tensors of one DCP folder by their stored names. Of each only its blocks are in memory,
    one at a time.

    Raises LayoutError if the metadata or an archive is damaged, hostile or leads out of ``root``.
    """

    def __init__(self, folder: Path, root: Path):
        self.folder = folder
        self._root = root
        path = inside(folder / METADATA, root)
        require_file(
            path, LayoutError, _MAX_METADATA_BYTES, "A distributed checkpoint has this file."
        )
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except _BROKEN as error:
            raise _unreadable(str(path), error) from None
        self.shapes = {}
        self.dtypes = {}
        self._chunks: dict[str, list[_Chunk]] = {}
        try:
            self._read(metadata)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LayoutError(
                f"{path} does not describe tensors ({shown(str(error))}); download it again."
            ) from None

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({chunk.file for chunks in self._chunks.values() for chunk in chunks}))

    def parts(
        self, requests: Mapping[str, tuple[str, Index]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        def order(key: str) -> tuple[Path, int]:
            first = self._chunks[requests[key][0]][0]
            return first.file, first.offset

        for key in sorted(requests, key=order):
            name, index = requests[key]
            yield key, self._whole(name)[index]

    def _whole(self, name: str) -> torch.Tensor:
        chunks = self._chunks[name]
        if len(chunks) == 1:
            return _read_archive(chunks[0], self._root, name)
        # what blocks that overlap leave out is not finite
        tensor = torch.full(self.shapes[name], math.nan, dtype=chunks[0].dtype)
        for chunk in chunks:
            place = tuple(slice(a, a + n) for a, n in zip(chunk.start, chunk.shape, strict=True))
            tensor[place] = _read_archive(chunk, self._root, name)
        return tensor

    def _read(self, metadata: Record) -> None:
        places = {}
        stored: dict[str, str] = {}
        for index, info in metadata.fields["storage_data"].items():
            places[index.fields["fqn"], tuple(index.fields["offset"] or ())] = info.fields
        for name, entry in metadata.fields["state_dict_metadata"].items():
            if not isinstance(name, str) or entry.kind != "TensorStorageMetadata":
                continue
            shape = _sizes(entry.fields["size"])
            dtype = entry.fields["properties"].fields[0]
            blocks = [chunk.fields for chunk in entry.fields["chunks"]]
            chunks = [self._chunk(name, block, places, dtype) for block in blocks]
            name = unwrapped(name, stored)
            self.shapes[name] = shape
            self.dtypes[name] = _NAME_OF.get(dtype, str(dtype))
            self._chunks[name] = chunks
            if not _tiles(chunks, shape):
                raise WeightsError(f"{self.folder}: the blocks of {readable(name)} do not cover "
                                   f"{list(shape)} once; a rank's "
                                   "file is missing.")  # fmt: skip

    def _chunk(
        self, name: str, block: Mapping[str, Any], places: Mapping[Any, Any], dtype: torch.dtype
    ) -> _Chunk:
        start = _sizes(block["offsets"])
        shape = _sizes(block["sizes"])
        if (name, start) not in places:
            raise LayoutError(
                f"{self.folder}/{METADATA} does not say where {readable(name)} "
                "is; download it again."
            )
        info = places[name, start]
        file = info["relative_path"]
        offset = info["offset"]
        length = info["length"]
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or info.get("transform_descriptors")
        ):
            raise LayoutError(f"{self.folder}/{METADATA} places {readable(name)} in "
                              f"{shown(file)}; only plain files beside it "
                              "are opened.")  # fmt: skip
        path = inside(self.folder / file, self._root)
        require_file(path, LayoutError, hint="Is the download complete?")
        whole = math.prod(shape) * dtype.itemsize
        if (
            not 0 <= offset <= offset + length <= path.stat().st_size
            or length > whole + _MAX_ARCHIVE_EXTRA
        ):
            raise LayoutError(
                f"{path} has no {length} bytes for {readable(name)} at {offset}; is "
                "the download complete?"
            )
        return _Chunk(start, shape, dtype, path, offset, length)


def _sizes(sizes: Any) -> tuple[int, ...]:
    sizes = tuple(sizes)
    if len(sizes) > 8 or not all(type(n) is int and 0 <= n < 1 << 40 for n in sizes):
        raise ValueError(f"sizes {sizes!r}")
    return sizes


def _tiles(chunks: list[_Chunk], shape: tuple[int, ...]) -> bool:
    """Whether blocks lie inside a shape, do not overlap, and cover it."""
    inside_it = all(
        a + n <= whole for c in chunks for a, n, whole in zip(c.start, c.shape, shape, strict=True)
    )
    apart = len({chunk.start for chunk in chunks}) == len(chunks)
    return (
        bool(chunks)
        and inside_it
        and apart
        and sum(math.prod(c.shape) for c in chunks) == math.prod(shape)
    )


def _read_archive(chunk: _Chunk, root: Path, name: str) -> torch.Tensor:
    """The tensor of one ``torch.save`` archive inside a file, read by torch's own unpickler of
    weights, which runs no code.
    """
    where = f"{readable(name)} in {chunk.file}"
    with inside(chunk.file, root).open("rb") as file:
        file.seek(chunk.offset)
        archive = io.BytesIO(file.read(chunk.length))
    try:
        with zipfile.ZipFile(archive) as entries:
            unpacked = sum(entry.file_size for entry in entries.infolist())
        if unpacked > chunk.length:  # compressed, it could fill the memory
            raise ValueError(f"it unpacks to {unpacked} bytes")
        archive.seek(0)
        tensor = torch.load(archive, map_location="cpu", weights_only=True)
    except (*_BROKEN, zipfile.BadZipFile, RuntimeError, OSError) as error:
        raise _unreadable(where, error) from None
    is_plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided
    if not is_plain or (tensor.dtype, tensor.shape) != (chunk.dtype, chunk.shape):
        raise LayoutError(
            f"{where} is no plain tensor of {chunk.dtype} {list(chunk.shape)}; download it again."
        )
    return tensor


class DcpRun(OnBase):
    """A run of cosmos-framework's trainer, one of its checkpoints, or the ``model`` folder in
    it.
    """

    format = "DCP"

    def weights(self) -> WeightSource:
        files = DcpFiles(model_folder(self.root), self.root)
        prefix = "net_ema." if any(name.startswith("net_ema.") for name in files.shapes) else "net."
        other = "net." if prefix == "net_ema." else "net_ema."
        names, rest = renamed(files.shapes, prefix)
        self.skipped = tuple(name for name in rest if not name.startswith(other) or is_vision(name))
        require_vision(self.skipped, f"{files.folder} holds weights under neither net nor net_ema")
        return Renamed(files, names)


def model_folder(root: Path) -> Path:
    """The folder with ``.metadata``: of a run the latest checkpoint's, or its only complete one;
    raises LayoutError if there is none.
    """
    if (root / LATEST).is_file():
        require_file(inside(root / LATEST, root), LayoutError, 4096)
        name = (root / LATEST).read_text(encoding="utf-8", errors="replace").strip()
        if not re.fullmatch(r"iter_[0-9]{1,12}", name):
            raise LayoutError(
                f"{root / LATEST} names {shown(name)}, no checkpoint such as iter_000000100."
            )
        return root / "checkpoints" / name / "model"
    folders = [
        folder
        for folder in (root, root / "model", *sorted(root.glob(f"{STEPS}/model")))
        if os.path.lexists(folder / METADATA)
    ]
    if len(folders) != 1:
        listed = ", ".join(str(folder.relative_to(root)) for folder in folders)
        raise LayoutError(
            f"{root} has neither {METADATA}, model/{METADATA} nor {LATEST}, and of the steps "
            f"{STEPS} {listed or 'none'} {'are' if folders else 'is'} complete; pass the folder of "
            "one step."
        )
    return folders[0]
