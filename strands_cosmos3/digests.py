"""SHA-256 of files, remembered in the user's cache for as long as a file is unchanged."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from strands_cosmos3.errors import DigestError, StorageError
from strands_cosmos3.resources import read_json, user_cache, write_json

logger = logging.getLogger(__name__)
_REMEMBERED_BYTES = 16 << 20  # smaller files are read each time
_ANNOUNCED_BYTES = 10**9  # reading so many takes a second or more
_SETTLED_NS = 2 * 10**9
"""Age from which a file's times tell whether it was written since: a clock may have ticks."""


def file_sha256(path: Path, anew: bool = False) -> str:
    """Return the hexadecimal SHA-256 of all bytes of a file.

    That of a large file is remembered for its size, inode, and times of modification and change in
    nanoseconds; ``anew`` reads it in any case, and logs a warning if its bytes differ from those
    that were remembered. Without a folder for the user's cache, nothing is remembered.

    Raises:
        DigestError: The file cannot be read, or was written meanwhile.
    """
    try:
        with path.open("rb") as file:
            state = _state(file)
            remembered = _recall(state)
            if remembered is not None and not anew:
                return remembered
            if state["size"] > _ANNOUNCED_BYTES:
                logger.warning(
                    "reading %s (%.1f GB) for its SHA-256, once while it is unchanged",
                    path,
                    state["size"] / 1e9,
                )
            settled = time.time_ns() - max(state["mtime_ns"], state["ctime_ns"]) > _SETTLED_NS
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if _state(file) != state:
                raise DigestError(f"{path} was written while it was read; wait until it is whole.")
    except OSError as error:
        raise DigestError(f"{path} cannot be read ({error.strerror or error}).") from None
    if remembered not in (None, digest):
        logger.warning(
            "%s has other bytes than were remembered, and the same size and times: its disk may be "
            "damaged, or its times were reset",
            path,
        )
    if settled and remembered != digest:
        _remember(state, digest)
    return digest


def _state(file: BinaryIO) -> dict[str, int]:
    """Return what changes when a file is written or replaced."""
    status = os.fstat(file.fileno())
    return {
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _entry(state: dict[str, int]) -> Path | None:
    folder = user_cache("sha256")
    if folder is None or state["size"] < _REMEMBERED_BYTES:
        return None
    return folder / f"{state['device']:x}-{state['inode']:x}.json"


def _recall(state: dict[str, int]) -> str | None:
    """Return the digest that is remembered for a state; None if there is none, or it is damaged."""
    if (entry := _entry(state)) is None:
        return None
    with suppress(DigestError):
        known = read_json(entry, DigestError, "")
        digest = known.pop("sha256", None)
        if known == state and isinstance(digest, str) and len(digest) == 64:
            return digest
    return None


def _remember(state: dict[str, int], digest: str) -> None:
    if (entry := _entry(state)) is not None:
        with suppress(StorageError):  # a cache that cannot be written costs time, nothing else
            write_json(entry, {**state, "sha256": digest})
