"""Weights by name, whatever file they are in: shapes first, then tensor by tensor into the caller's
memory, so loading needs little more than the loaded weights.

:class:`WeightFiles` reads safetensors. Nothing is unpickled, and headers are checked first.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from safetensors import SafetensorError, safe_open

from strands_cosmos3.engine.mapped_file import MappedFile
from strands_cosmos3.engine.precision import EightBit
from strands_cosmos3.errors import LayoutError, WeightsError
from strands_cosmos3.resources import contained, read_json, require_file, sha256, shown

if TYPE_CHECKING:
    import torch

Slices = tuple[slice, ...]  # the wanted part of a stored tensor, axis by axis; empty is all of it
Shard = Callable[[str, tuple[int, ...]], Slices]
"""From the released name and whole shape of a weight to the part of it that a rank keeps; only
that is read.
"""
Index = int | Slices
"""The part of a stored tensor to read: one row, or slices."""

DTYPES = ("F32", "BF16", "F16")
"""Dtypes that are loaded, as safetensors calls them."""
SIZES: Mapping[str, int] = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1}
"""Bytes of a number of those that are read, some of which are dequantised before they are
loaded.
"""
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_CHECK_BLOCK = 1 << 22
_RESIDENT_BYTES = 64 << 20
"""Of a file that is mapped: what has been read of it stays in memory while it is open."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class Target(Protocol):
    """Where a weight goes: a tensor, or what makes another form of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def copy_(self, src: torch.Tensor, /) -> Any: ...


class WeightSource(ABC):
    """Weights of one component of a checkpoint, under their released names.

    Attributes:
        folder: Where they are, for messages.
        shapes: Name -> whole shape.
        dtypes: Name -> dtype as safetensors calls it, e.g. ``BF16``.
        eight_bit: Scales of weights that are stored in 8 bits, and read as float32.
        sources: Those that it is made of, if it has no files of its own.
    """

    folder: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    eight_bit: EightBit | None = None
    sources: tuple[WeightSource, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """All weight files."""
        return tuple(file for source in self.sources for file in source.files)

    @abstractmethod
    def parts(
        self, requests: Mapping[str, tuple[str, Index]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (key, tensor) for each of ``requests``, key -> (name, part), in an order that
        suits the files.
        """

    def check(
        self, expected: Mapping[str, tuple[int, ...]], optional: tuple[str, ...] = ()
    ) -> None:
        """Raise WeightsError if names are missing or surplus (``optional`` prefixes may be), or
        shapes or dtypes differ.
        """
        stored = set(self.shapes)
        required = set(expected)
        missing = [
            f"missing: {key}" for key in sorted(required - stored) if not key.startswith(optional)
        ]
        surplus = [
            f"surplus: {readable(key)}"
            for key in sorted(stored - required)
            if not key.startswith(optional)
        ]
        problems: list[str] = []
        for key in sorted(stored & required):
            if self.shapes[key] != tuple(expected[key]):
                problems.append(
                    f"shape of {key} is {shown(list(self.shapes[key]))}, "
                    f"expected {list(expected[key])}"
                )
            if self.dtypes[key] not in DTYPES:
                small = self.dtypes[key] in SIZES
                unless = " without hf_quant_config.json, which is missing" if small else ""
                problems.append(
                    f"{key} is stored as {shown(self.dtypes[key])}; only "
                    f"{', '.join(DTYPES)} are loaded{unless}"
                )
        # some of each kind: a foreign name says more than twelve that it replaced
        first = [*missing[:8], *surplus[:4], *problems][:12]
        if count := len(missing) + len(surplus) + len(problems):
            listed = "; ".join(first) + ("; ..." if count > len(first) else "")
            raise WeightsError(f"{count} weights of {self.folder} do not fit its config: {listed}.")

    def read_into(
        self, targets: Mapping[str, Target], slices: Mapping[str, Slices] | None = None
    ) -> None:
        """Copy weights into existing tensors, converting dtype and device. ``name#i`` is row i of a
        stored matrix.

        Of each tensor only its ``slices``, by name, are read. Raises WeightsError if a weight is
        not finite, LayoutError if a file cannot be read.
        """
        requests: dict[str, tuple[str, Index]] = {}
        for key in targets:
            name, _, row = key.partition("#")
            requests[key] = name, int(row) if row else (slices or {}).get(key, ())
        _map_blocks_above(1 << 20)
        try:
            for key, part in self.parts(requests):
                require_finite(part, key)
                targets[key].copy_(part.reshape(targets[key].shape))
                del part  # before the next one is read
        finally:
            _map_blocks_above(32 << 20)  # as far as glibc raises it by itself


def _map_blocks_above(size: int) -> None:
    """Let glibc map each larger block of memory by itself and give it back as a whole: tensors that
    come and go between those that stay tear its heap to pieces.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, size)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * size)  # its own proportion


def unsharded(key: str, shape: tuple[int, ...]) -> Slices:
    """The :data:`Shard` of a single process: every weight is kept whole."""
    return ()


def sliced_shape(shape: tuple[int, ...], slices: Slices) -> tuple[int, ...]:
    """Shape of a part of a tensor."""
    return (
        tuple(len(range(*part.indices(n))) for n, part in zip(shape, slices, strict=False))
        + shape[len(slices) :]
    )


def require_finite(tensor: torch.Tensor, key: str) -> None:
    """Raise WeightsError, which names the weight, if a number is NaN or infinite."""
    import torch

    # aminmax propagates NaN without a mask of the weights' size
    for block in tensor.reshape(-1).split(_CHECK_BLOCK):
        low, high = torch.aminmax(block)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise WeightsError(
                f"{key.partition('#')[0]} holds NaN or infinity; the file is "
                "damaged or badly converted."
            )


def readable(key: str) -> str:
    """A weight's name as messages show it."""
    return key if key.isprintable() and len(key) < 80 else shown(key)


def unwrapped(key: str, stored: dict[str, str]) -> str:
    """A weight's name without what torch.compile, DDP, FSDP and checkpointing add to it; its stored
    name is added to ``stored``. Raises WeightsError if another weight has that name.
    """
    name = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
    claim(stored, name, key)
    return name


def claim(stored: dict[str, str], name: str, key: str) -> None:
    """Add name -> stored name; raises WeightsError if another weight has that name."""
    if (other := stored.setdefault(name, key)) != key:
        raise WeightsError(
            f"{readable(key)} and {readable(other)} are both {readable(name)}; one is wrong."
        )


_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WEIGHTS = re.compile(r"\.safetensors(\.index(\.\w+)?\.json)?$")
_SHARD = re.compile(r"-\d+-of-\d+\.(\w+\.)?safetensors$")
_MAX_HEADER_BYTES = 4 << 20  # twenty times that of the largest released checkpoint
_MAX_TENSORS = 20_000
STEM = "diffusion_pytorch_model"
_HINT = "Download it again."


def read_config(path: Path, root: Path) -> dict[str, Any]:
    """Read a JSON object; raises LayoutError if the file is missing, outside the checkpoint, or
    not a JSON object.
    """
    return read_json(inside(path, root), LayoutError, _HINT)


def inside(path: Path, root: Path) -> Path:
    """Return ``path`` if it lies inside the checkpoint ``root``; raises LayoutError if a link
    leads out of it.
    """
    return contained(path, root, "checkpoint", LayoutError)


def named_file(folder: Path, name: object, root: Path, where: Path) -> Path:
    """The safetensors file of ``folder`` that another file names; raises LayoutError if it is
    none, or lies elsewhere.
    """
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise LayoutError(
            f"{where} names {shown(name)}; only safetensors files beside it are opened."
        )
    path = inside(folder / name, root)
    if not os.path.isfile(path):
        raise LayoutError(
            f"{where} names {shown(name)}, no file beside it; is the download complete?"
        )
    return path


class WeightFiles(WeightSource):
    """The weights of one folder (``transformer/`` or ``vae/``), by name. Nothing outside the
    checkpoint ``root`` is opened, and neither are pipes and files whose header is larger than 4
    MiB.

    Args:
        folder, root: The folder of the files, and that of the checkpoint.
        stem: Name of the file, or of the index, without its suffix.
        beside: What the names of other safetensors files begin with that would be ignored.

    Raises:
        LayoutError: There are no safetensors files, an index or header is unreadable, or a path
            leads outside ``root``.
        WeightsError: An index and the headers disagree.
    """

    def __init__(self, folder: Path, root: Path, stem: str = STEM, beside: str = ""):
        self.folder = folder
        self._root = root
        self._file_of = self._locate(stem, beside)
        self.shapes = {}
        self.dtypes = {}
        self._stored: dict[str, str] = {}  # by the name without wrappers
        for file in self.files:
            self._read_header(file, {key for key, owner in self._file_of.items() if owner == file})

    @property
    def files(self) -> tuple[Path, ...]:
        """All weight files."""
        return tuple(sorted(set(self._file_of.values())))

    def place_of(self, name: str) -> tuple[Path, str, int, int]:
        """The file of a weight, its stored name, and the first byte and number of bytes there."""
        stored = self._stored[name]
        path = self._file_of[stored]
        first, size = MappedFile(path).place(stored)
        return path, stored, first, size

    def _locate(self, stem: str, beside: str) -> dict[str, Path]:
        if not self.folder.is_dir():
            raise LayoutError(f"{self.folder} is not a folder; a Cosmos 3 checkpoint has one.")
        names = sorted(path.name for path in self.folder.iterdir() if path.name[0] != ".")
        held = [name for name in names if name.startswith(beside) and _WEIGHTS.search(name)]
        mine = [name for name in held if name.startswith(stem) and not _SHARD.search(name)]
        pickled = [name for name in names if Path(name).suffix in _PICKLED]
        if mine:
            main = self.folder / mine[0]
            # of several, none is read
            file_of = {} if len(mine) > 1 else self._of_main(main)
            counted = {main.name, *(path.name for path in file_of.values())}
            every = (*mine, *held, *(name for name in pickled if name.startswith(stem)))
            if surplus := [name for name in dict.fromkeys(every) if name not in counted]:
                raise LayoutError(
                    f"{self.folder} holds {', '.join(map(readable, surplus[:4]))} beside "
                    f"{readable(main.name)}; only one of them is loaded: keep the one that counts, "
                    "and move the other."
                )
            return file_of
        if pickled:
            raise LayoutError(
                f"{self.folder} holds pickled weights ({', '.join(pickled)}), which can run code "
                "when read; "
                "only safetensors are loaded. Convert them first."
            )
        raise LayoutError(
            f"{self.folder} holds neither {stem}.safetensors nor {stem}.safetensors.index.json, "
            f"only {', '.join(held[:4]) or 'other files'}; is the download complete?"
        )

    def _of_main(self, main: Path) -> dict[str, Path]:
        if main.suffix == ".json":
            return self._from_index(main)
        with opened(inside(main, self._root), "np") as file:
            return dict.fromkeys(file.keys(), main)

    def _from_index(self, index: Path) -> dict[str, Path]:
        weight_map = read_config(index, self._root).get("weight_map")
        if not isinstance(weight_map, dict) or not 0 < len(weight_map) <= _MAX_TENSORS:
            raise LayoutError(
                f"{index} has no weight_map of at most {_MAX_TENSORS} tensors; download it again."
            )
        files = {str(name): name for name in weight_map.values()}
        paths = {
            text: named_file(self.folder, name, self._root, index) for text, name in files.items()
        }
        return {key: paths[str(name)] for key, name in weight_map.items()}

    def _read_header(self, path: Path, mine: set[str]) -> None:
        with opened(path, "np") as file:
            stored = set(file.keys())
            if stored != mine:
                raise WeightsError(
                    f"{path} {_difference(mine, stored)} against its index; download it again."
                )
            for stored_name in sorted(mine):
                view = file.get_slice(stored_name)
                key = unwrapped(stored_name, self._stored)
                self.shapes[key] = tuple(view.get_shape())
                self.dtypes[key] = str(view.get_dtype())

    def parts(
        self, requests: Mapping[str, tuple[str, Index]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parts file by file; see :class:`WeightSource`. Raises LayoutError if a file
        cannot be read.
        """
        file_of = {key: self._file_of[self._stored[name]] for key, (name, _) in requests.items()}
        for path in sorted(set(file_of.values())):
            keys = sorted((key for key in requests if file_of[key] == path), reverse=True)
            while keys:
                resident = 0  # bytes; they are free again when the file is closed
                with opened(inside(path, self._root)) as file:
                    while keys and resident < _RESIDENT_BYTES:
                        key = keys.pop()
                        name, index = requests[key]
                        part = file.get_slice(self._stored[name])[index]
                        resident += part.nbytes
                        yield key, part
                        del part


def opened(path: Path, framework: Literal["pt", "np"] = "pt") -> Any:
    """Open a safetensors file for reading by a framework, after a look at its header; raises
    LayoutError if it is not one.
    """
    require_file(path, LayoutError)
    try:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > _MAX_HEADER_BYTES:
            raise OSError(f"its header claims {header} bytes; at most {_MAX_HEADER_BYTES} are read")
        try:
            return safe_open(str(path), framework=framework, device="cpu")
        except RuntimeError:  # torch could not map it
            return nullcontext(MappedFile(path))
    except (SafetensorError, OSError) as error:
        reason = str(error).encode("ascii", "backslashreplace").decode()[:200]
        raise LayoutError(
            f"{path} is not a readable safetensors file ({reason}); download it again."
        ) from None


def weight_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every weight file in a checkpoint's folder, as its metadata records them."""
    files = sorted(folder.glob("*/*.safetensors"))
    return {str(file.relative_to(folder)): sha256(file) for file in files}


def _difference(required: set[str], stored: set[str]) -> str:
    lacking = sorted(required - stored)
    surplus = sorted(stored - required)
    parts = [f"lacks {', '.join(map(readable, lacking[:6]))}"] if lacking else []
    parts += [f"holds in addition {', '.join(map(readable, surplus[:6]))}"] if surplus else []
    return " and ".join(parts)
