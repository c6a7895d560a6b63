"""Output files: checked before anything runs, and never half-written."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_json, write_whole

_REPORTED = ("strands-cosmos3", "numpy", "scipy", "mujoco", "mink", "websockets", "msgpack", "torch", "ray")


def require_writable(path: Path | None, suffixes: tuple[str, ...], option: str) -> None:
    """Make the folder of an output file.

    Raises:
        ConfigError: The name has another suffix, or its folder cannot be made or written to.
    """
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise ConfigError(f"{option} {str(path)!r} must end in {' or '.join(suffixes)}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {str(path)!r}: its folder cannot be made ({error.strerror}).") from None
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(f"{option} {str(path)!r} cannot be written there; choose another place.")


def numbered(path: Path | None, seed: int, many: bool) -> Path | None:
    """Return the file for one of several episodes: ``out.mp4`` becomes ``out-seed3.mp4``."""
    return path if path is None or not many else path.with_name(f"{path.stem}-seed{seed}{path.suffix}")


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that figures depend on."""
    found = {}
    for name in _REPORTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


__all__ = ["numbered", "require_writable", "versions", "write_json", "write_whole"]
