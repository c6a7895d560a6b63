"""Files: packaged data, JSON, atomic output, and paths that must stay inside a folder; and what is
closed after use.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import reprlib
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from strands_cosmos3.errors import ConfigError, Cosmos3Error, ResourceNotFoundError, StorageError

_PACKAGE = Path(__file__).resolve().parent
_ROOTS = (_PACKAGE / "_data", _PACKAGE.parent)  # in a wheel, in a checkout
_HUB_FOLDERS = ("models--", "datasets--")
_MAX_JSON_BYTES = 8 << 20
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_OF_A_POINTER = 1024
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80
UNFINISHED = ".*.part*"
"""Glob pattern of the files that a killed :func:`write_whole` leaves behind."""


class Closeable(ABC):
    """What is closed after use; as a context manager, at the end of its block."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def resource(relative: str) -> Path:
    """Path of a packaged file or folder, e.g. ``resource("stats/droid_lerobot.json")``, or raise
    ResourceNotFoundError.
    """
    for root in _ROOTS:
        if (root / relative).exists():
            return root / relative
    looked = ", ".join(str(root) for root in _ROOTS)
    raise ResourceNotFoundError(
        f"{relative!r} is not part of this installation (looked in {looked}); reinstall it."
    )


def user_cache(name: str) -> Path | None:
    """Folder in the user's cache: ``$XDG_CACHE_HOME`` or ``~/.cache``, then
    ``strands-cosmos3/<name>``; None if there is no home folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(cache) if cache else Path.home() / ".cache"
    except RuntimeError:
        return None
    return home / "strands-cosmos3" / name


def contained(path: Path, root: Path, noun: str, error: type[Cosmos3Error]) -> Path:
    """Return ``path`` if no symbolic link leads it out of ``root`` (a ``noun`` in messages);
    otherwise raise ``error``.

    In the Hugging Face cache, ``snapshots/<revision>`` links into ``blobs``; the repository's
    folder counts as the root there.
    """
    try:
        allowed = root.resolve()
        target = path.resolve()
    except (OSError, RuntimeError, ValueError) as reason:  # a loop of links, a NUL in the name
        raise error(f"{str(path)!r} cannot be resolved ({reason}); it was not opened.") from None
    if allowed.parent.name == "snapshots" and allowed.parents[1].name.startswith(_HUB_FOLDERS):
        allowed = allowed.parents[1]
    if not target.is_relative_to(allowed):
        raise error(f"{path} leads to {target}, outside the {noun} {allowed}; it was not opened.")
    return path


def shown(value: object) -> str:
    """Return what a message shows of a value from outside: its ``repr``, cut short and without
    control characters.
    """
    return ascii(value)[:80] if isinstance(value, str) else _REPR.repr(value)


def require_file(
    path: Path, error: type[Cosmos3Error], most_bytes: int | None = None, hint: str = ""
) -> None:
    """Raise ``error`` unless ``path`` is an ordinary file, of ``most_bytes`` at most: a pipe
    would block its reader.
    """
    try:
        status = path.stat()
        tiny = stat.S_ISREG(status.st_mode) and status.st_size < _MOST_OF_A_POINTER
        start = path.read_bytes() if tiny else b""
    except FileNotFoundError:
        raise error(f"{path} does not exist. {hint}") from None
    except (OSError, ValueError) as reason:  # a loop of links, a NUL in the name
        raise error(f"{shown(str(path))} cannot be read ({reason}). {hint}") from None
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{path} is not an ordinary file; it was not opened. {hint}")
    if start.startswith(_LFS_POINTER):
        raise error(
            f"{path} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull` or "
            "`hf download`."
        )
    if most_bytes is not None and status.st_size > most_bytes:
        raise error(f"{path} has {status.st_size} bytes; at most {most_bytes} are read. {hint}")


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= (number := int(digits)) < 1 << 64:
        raise ValueError(f"the whole number {digits[:20]}... has more than 64 bits")
    return number


def read_json(path: Path, error: type[Cosmos3Error], hint: str) -> dict[str, Any]:
    """Read a JSON object.

    If the file is missing, unreadable, larger than 8 MiB or holds something else, raise ``error``;
    ``hint`` is a sentence with the remedy.
    """
    require_file(path, error, _MAX_JSON_BYTES, hint)
    try:
        text = path.read_text(encoding="utf-8-sig")  # with a mark or without
    except (OSError, ValueError) as reason:
        raise error(f"{path} cannot be read as JSON ({reason}). {hint}") from None
    return json_object(text, str(path), error, hint)


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_object(text: str, where: str, error: type[Cosmos3Error], hint: str) -> dict[str, Any]:
    """The JSON object of a text; ``error`` if it is none."""
    try:
        value = json.loads(text, parse_int=_int64)
    except (ValueError, RecursionError) as reason:
        raise error(f"{where} cannot be read as JSON ({reason}). {hint}") from None
    if not isinstance(value, dict):
        raise error(f"{where} must hold a JSON object, got {type(value).__name__}. {hint}")
    return value


def require_creatable(path: Path, name: str) -> None:
    """Make a file's folder and try to write beside the file; raise ConfigError if it could not
    be written later.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        unfinished = _unfinished(path)
        unfinished.touch()
        unfinished.unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{name} {str(path)!r} cannot be written ({reason}); choose another place."
        ) from None


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Raise :class:`StorageError`, which names ``path``, for every OSError inside: a full disk,
    no permission.
    """
    try:
        yield
    except Cosmos3Error:
        raise
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written ({error.strerror or error}); what was there before is "
            "unchanged. Make room or choose "
            "another place, and run it again."
        ) from error


@contextmanager
def locked(folder: Path, option: str) -> Iterator[None]:
    """Let one process at a time into a folder, which ``option`` gave, or raise ConfigError. The
    lock ends with its process.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process writes to {folder}; wait for it, stop it, or "
                f"choose another {option}."
            ) from None
        yield
    finally:
        os.close(handle)


def write_whole(path: Path, write: Callable[[Path], object], previous: Path | None = None) -> None:
    """Let ``write`` fill a hidden file beside ``path``, flush it to disk, and rename it to
    ``path``. Makes the folder.

    The file that was there is kept as ``previous``, if given.

    Raises:
        StorageError: It cannot be written. What was there before stays.
    """
    unfinished = _unfinished(path)
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(unfinished)
            _flush(unfinished)
            if previous is not None and path.exists():
                os.replace(path, previous)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        _flush(path.parent)


def _flush(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a hidden folder beside ``path``, then rename it to ``path``; until then
    the old folder stays.

    If the process is killed between the two renames, the next call restores the old folder first.
    Raises StorageError.
    """
    unfinished, old = (path.with_name(f".{path.name}.{state}") for state in ("new", "old"))
    with storing(path):
        if old.exists() and not path.exists():
            os.replace(old, path)
        for left in (unfinished, old):
            shutil.rmtree(left, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            write(unfinished)
            if path.exists():
                os.replace(path, old)
            os.replace(unfinished, path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file with :func:`write_whole`."""
    write_whole(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value with :func:`write_whole`."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def load_json(path: Path) -> Any:
    """Return the value of a JSON file that this package wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
