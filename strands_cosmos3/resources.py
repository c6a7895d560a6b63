"""Files: where packaged data lives (beside the package in a checkout, inside it in a wheel), and output written whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strands_cosmos3.errors import ResourceNotFoundError

_PACKAGE = Path(__file__).resolve().parent
_ROOTS = (_PACKAGE / "_data", _PACKAGE.parent)


def resource(relative: str) -> Path:
    """Path of a packaged file or folder, e.g. ``resource("stats/droid_lerobot.json")``.

    Raises:
        ResourceNotFoundError: The installation lacks it.
    """
    for root in _ROOTS:
        if (root / relative).exists():
            return root / relative
    looked = ", ".join(str(root) for root in _ROOTS)
    raise ResourceNotFoundError(f"{relative!r} is not part of this installation (looked in {looked}); reinstall it.")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a hidden file beside ``path``, then put it in its place."""
    hidden = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(hidden)
        os.replace(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a hidden folder beside ``path``, then put it in its place; until then what was there stays.

    Killed between the two renamings, the next call finds the old folder and puts it back first.
    """
    hidden, old = (path.with_name(f".{path.name}.{state}") for state in ("new", "old"))
    if old.exists() and not path.exists():
        os.replace(old, path)
    for left in (hidden, old):
        shutil.rmtree(left, ignore_errors=True)
    hidden.mkdir(parents=True)
    try:
        write(hidden)
        if path.exists():
            os.replace(path, old)
        os.replace(hidden, path)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    write_whole(path, lambda hidden: hidden.write_text(json.dumps(value, indent=1) + "\n"))
