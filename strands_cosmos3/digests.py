"""SHA-256 of files, remembered in the user's cache for as long as a file is unchanged."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

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
            state = os.fstat(file.fileno())
            entry = _entry(state)
            remembered = None if entry is None else _recall(entry)
            if remembered is not None and not anew:
                return remembered
            if state.st_size > _ANNOUNCED_BYTES:
                logger.warning(
                    "reading %s (%.1f GB) for its SHA-256, once while it is unchanged",
                    path,
                    state.st_size / 1e9,
                )
            settled = time.time_ns() - max(state.st_mtime_ns, state.st_ctime_ns) > _SETTLED_NS
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if _written(os.fstat(file.fileno())) != _written(state):
                raise DigestError(f"{path} was written while it was read; wait until it is whole.")
    except OSError as error:
        raise DigestError(f"{path} cannot be read ({error.strerror or error}).") from None
    if remembered not in (None, digest):
        logger.warning(
            "%s has other bytes than were remembered, and the same size and times: its disk may be "
            "damaged, or its times were reset",
            path,
        )
    if entry is not None and settled and remembered != digest:
        with suppress(StorageError):  # a cache that cannot be written costs time, nothing else
            write_json(entry, {"sha256": digest})
    return digest


def _written(state: os.stat_result) -> tuple[int, ...]:
    """Return what changes when a file is written or replaced."""
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _entry(state: os.stat_result) -> Path | None:
    """Return the file that remembers a digest, of which there is another after each change."""
    folder = user_cache("sha256")
    if folder is None or state.st_size < _REMEMBERED_BYTES:
        return None
    return folder / f"{'-'.join(map(str, _written(state)))}.json"


def _recall(entry: Path) -> str | None:
    """Return a digest that is remembered; None if there is none, or it is damaged."""
    with suppress(DigestError):
        digest = read_json(entry, DigestError, "").get("sha256")
        if isinstance(digest, str) and len(digest) == 64:
            return digest
    return None
