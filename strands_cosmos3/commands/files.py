"""Output files of commands: checked before anything runs, and written atomically."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_json, write_whole

_REPORTED = ("strands-cosmos3", "numpy", "scipy", "mujoco", "mink", "websockets", "msgpack", "torch", "ray")


def require_writable(path: Path | None, suffixes: tuple[str, ...], option: str) -> None:
    """Create the folder of an output file. Raises ConfigError if the suffix is wrong or the file cannot be written."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise ConfigError(f"{option} {str(path)!r} must end in {' or '.join(suffixes)}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {str(path)!r}: its folder cannot be created ({error.strerror}).") from None
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(f"{option} {str(path)!r} cannot be written; choose another place.")


def numbered(path: Path | None, seed: int, many: bool) -> Path | None:
    """Return the path for one of several episodes: ``out.mp4`` becomes ``out-seed3.mp4``."""
    return path if path is None or not many else path.with_name(f"{path.stem}-seed{seed}{path.suffix}")


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that results depend on."""
    found = {}
    for name in _REPORTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


__all__ = ["numbered", "require_writable", "versions", "write_json", "write_whole"]
