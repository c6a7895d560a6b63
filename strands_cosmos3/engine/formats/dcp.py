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
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from strands_cosmos3.engine.formats.framework import is_vision, renamed
from strands_cosmos3.engine.formats.layout import OnBase
from strands_cosmos3.engine.formats.sources import Renamed
from strands_cosmos3.engine.weight_files import Index, WeightSource, inside, readable, taken
from strands_cosmos3.errors import LayoutError, WeightsError
from strands_cosmos3.resources import require_file, shown

_BROKEN = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
)
_BROKEN += (OverflowError, MemoryError, RecursionError, AssertionError)


class Record:
    """Stands for an object of a named class: its arguments and its attributes, and no behaviour."""

    kind = ""

    def __init__(self, *args: Any):
        self.args = args
        self.fields: Mapping[Any, Any] = {}  # by name, or by position

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, Mapping) else dict(enumerate(state))

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__  # records are keys before their state is known


def unpickle(
    data: bytes,
    allowed: Mapping[str, Any],
    where: str,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Read a pickle in which only ``allowed`` names, ``module.name`` -> what stands for it, may
    occur.

    Args:
        persistent: Reads persistent ids; None refuses them.

    Raises LayoutError if it is damaged or names anything else; nothing of it was run then.
    """

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" not in allowed:
                raise pickle.UnpicklingError(
                    f"it names {shown(f'{module}.{name}')}, which no checkpoint needs"
                )
            return allowed[f"{module}.{name}"]

        def persistent_load(self, pid: Any) -> Any:
            if persistent is None:
                raise pickle.UnpicklingError("it has persistent ids")
            return persistent(pid)

    try:
        return Restricted(io.BytesIO(data)).load()
    except _BROKEN as error:
        reason = str(error).encode("ascii", "backslashreplace").decode()[:200]
        raise LayoutError(
            f"{where} is not readable ({reason}); nothing of it was run. Download it again."
        ) from None


def record(name: str) -> type[Record]:
    """A kind of record for the class of this name."""
    return type(name, (Record,), {"kind": name})


METADATA = ".metadata"
LATEST = "checkpoints/latest_checkpoint.txt"
_MAX_METADATA_BYTES = 64 << 20
_MAX_ARCHIVE_EXTRA = 1 << 20  # of an archive beside its numbers
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_CODE = "torch.distributed.checkpoint"
_RECORDS = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
)
_ALLOWED: Mapping[str, Any] = {
    **{
        f"{_CODE}.metadata.{name}": record(name)
        for name in (*_RECORDS, "MetadataIndex", "StorageMeta")
    },
    f"{_CODE}.metadata._MEM_FORMAT_ENCODING": record("memory format"),
    f"{_CODE}.filesystem._StorageInfo": record("_StorageInfo"),
    "torch.serialization._get_layout": record("layout"),
    "torch.Size": lambda sizes=(): tuple(sizes),
    **{f"pathlib.{name}": record("path") for name in ("Path", "PosixPath", "PurePosixPath")},
    **{
        str(dtype): dtype
        for dtype in (*_DTYPES, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
    },
}


@dataclass(frozen=True)
class _Chunk:
    """A stored block of a tensor: where it begins in the tensor, its shape, and its archive."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    offset: int
    length: int


class DcpFiles(WeightSource):
    """The tensors of one DCP folder by their stored names. Of each only its blocks are in memory,
    one at a time.

    Raises LayoutError if the metadata or an archive is damaged, hostile or leads out of ``root``.
    """

    def __init__(self, folder: Path, root: Path):
        self.folder, self._root = folder, root
        path = inside(folder / METADATA, root)
        require_file(
            path, LayoutError, _MAX_METADATA_BYTES, "A distributed checkpoint has this file."
        )
        metadata = unpickle(path.read_bytes(), _ALLOWED, str(path))
        self.shapes, self.dtypes = {}, {}
        self._chunks: dict[str, list[_Chunk]] = {}
        self._dtype_of: dict[str, torch.dtype] = {}
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
            yield key, taken(self._whole(name), index)

    def _whole(self, name: str) -> torch.Tensor:
        chunks, dtype = self._chunks[name], self._dtype_of[name]
        if len(chunks) == 1:
            return _read_archive(chunks[0], dtype, self._root, name)
        # what blocks that overlap leave out is not finite
        tensor = torch.full(self.shapes[name], math.nan, dtype=dtype)
        for chunk in chunks:
            place = tuple(slice(a, a + n) for a, n in zip(chunk.start, chunk.shape, strict=True))
            tensor[place] = _read_archive(chunk, dtype, self._root, name)
        return tensor

    def _read(self, metadata: Record) -> None:
        places = {}
        for index, info in metadata.fields["storage_data"].items():
            places[index.fields["fqn"], tuple(index.fields["offset"] or ())] = info.fields
        for name, entry in metadata.fields["state_dict_metadata"].items():
            if not isinstance(name, str) or entry.kind != "TensorStorageMetadata":
                continue
            shape, dtype = _sizes(entry.fields["size"]), entry.fields["properties"].fields[0]
            self.shapes[name], self._dtype_of[name] = shape, dtype
            self.dtypes[name] = _DTYPES.get(dtype, str(dtype))
            blocks = [chunk.fields for chunk in entry.fields["chunks"]]
            self._chunks[name] = [self._chunk(name, block, places, dtype) for block in blocks]
            if not _tiles(self._chunks[name], shape):
                raise WeightsError(f"{self.folder}: the blocks of {readable(name)} do not cover "
                                   f"{list(shape)} once; a rank's "
                                   "file is missing.")  # fmt: skip

    def _chunk(
        self, name: str, block: Mapping[str, Any], places: Mapping[Any, Any], dtype: torch.dtype
    ) -> _Chunk:
        start, shape = _sizes(block["offsets"]), _sizes(block["sizes"])
        if (name, start) not in places:
            raise LayoutError(
                f"{self.folder}/{METADATA} does not say where {readable(name)} is; download it "
                "again."
            )
        info = places[name, start]
        file, offset, length = info["relative_path"], info["offset"], info["length"]
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
                f"{path} has no {length} bytes for {readable(name)} at {offset}; is the download "
                "complete?"
            )
        return _Chunk(start, shape, path, offset, length)


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


def _read_archive(chunk: _Chunk, dtype: torch.dtype, root: Path, name: str) -> torch.Tensor:
    """The tensor of one ``torch.save`` archive inside a file; its pickle may describe one tensor
    and nothing else.
    """
    where, bytes_wanted = (
        f"{readable(name)} in {chunk.file}",
        math.prod(chunk.shape) * dtype.itemsize,
    )
    with inside(chunk.file, root).open("rb") as file:
        try:
            layout, at, size = _describe(_Window(file, chunk.offset, chunk.length), where)
        except LayoutError:
            raise
        except (zipfile.BadZipFile, KeyError, ValueError, RuntimeError, EOFError, OSError) as error:
            raise LayoutError(
                f"{where} is not readable ({shown(str(error))}); download it again."
            ) from None
        if layout != (dtype, chunk.shape) or size != bytes_wanted or at + size > chunk.length:
            raise LayoutError(
                f"{where} is {shown(layout)} and not {dtype} {list(chunk.shape)}; download it "
                "again."
            )
        data = bytearray(size)
        file.seek(chunk.offset + at)
        if file.readinto(data) != size:
            raise LayoutError(
                f"{chunk.file} ends within {readable(name)}; is the download complete?"
            )
    if not data:
        return torch.empty(chunk.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(chunk.shape)


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int):
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


def _describe(window: _Window, where: str) -> tuple[Any, int, int]:
    """(dtype, shape), offset and size in bytes of the one tensor of an archive."""
    with zipfile.ZipFile(cast("Any", window)) as archive:
        (pickled,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
        prefix = pickled.filename.removesuffix("data.pkl")
        numbers = archive.getinfo(f"{prefix}data/0")
        if pickled.file_size > _MAX_ARCHIVE_EXTRA or {
            pickled.compress_type,
            numbers.compress_type,
        } != {zipfile.ZIP_STORED}:
            raise ValueError("it is compressed, or describes more than a tensor")
        if (
            f"{prefix}byteorder" in archive.namelist()
            and archive.read(f"{prefix}byteorder") != b"little"
        ):
            raise ValueError("its numbers are big-endian")
        tensor = unpickle(archive.read(pickled), _TENSOR, where, _storage)
    window.seek(numbers.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", window.read(4))
    return tensor, numbers.header_offset + 30 + name_length + extra_length, numbers.file_size


def _storage(pid: Any) -> torch.dtype:
    kind, dtype, key, *_ = pid
    if kind != "storage" or key != "0":
        raise ValueError("more than one storage")
    return dtype


def _tensor(
    dtype: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> tuple[Any, tuple[int, ...]]:
    """Stands for ``torch._utils._rebuild_tensor_v2``: the dtype and shape of a contiguous
    tensor.
    """
    expected = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if offset or any(n > 1 and a != b for n, a, b in zip(shape, stride, expected, strict=True)):
        raise ValueError("the tensor is a view of a larger one")
    return dtype, tuple(shape)


_TENSOR: Mapping[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "collections.OrderedDict": OrderedDict,
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
}


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
        if unknown := [name for name in self.skipped if not is_vision(name)]:
            raise LayoutError(
                f"{files.folder} holds weights under neither net nor net_ema: {shown(unknown[:6])}."
            )
        return Renamed(files, names)


def model_folder(root: Path) -> Path:
    """The folder with ``.metadata``: of a run the latest checkpoint's; raises LayoutError if
    there is none.
    """
    if (root / LATEST).is_file():
        require_file(inside(root / LATEST, root), LayoutError, 4096)
        name = (root / LATEST).read_text(encoding="utf-8", errors="replace").strip()
        if not re.fullmatch(r"iter_[0-9]{1,12}", name):
            raise LayoutError(
                f"{root / LATEST} names {shown(name)}, no checkpoint such as iter_000000100."
            )
        return root / "checkpoints" / name / "model"
    folder = next(
        (folder for folder in (root, root / "model") if os.path.lexists(folder / METADATA)), None
    )
    if folder is None:
        raise LayoutError(
            f"{root} is no distributed checkpoint: it has neither {METADATA}, model/{METADATA} "
            f"nor {LATEST}."
        )
    return folder
