"""Optional dependencies: features of each extra, and the error that names the extra to install."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from strands_cosmos3.errors import MissingDependencyError, RenderError
from strands_cosmos3.tables import from_tables, packaged_worlds, read_toml


@dataclass(frozen=True)
class Extra:
    """An extra of this package.

    Args:
        enables: Features that need it.
        modules: Modules that it installs, by their import names.
    """

    enables: str
    modules: tuple[str, ...]

    @property
    def absent(self) -> tuple[str, ...]:
        """Its modules that are not installed."""
        return tuple(module for module in self.modules if find_spec(module) is None)


EXTRAS = from_tables(Extra, read_toml(Path(__file__).with_suffix(".toml")))
"""Extras by name."""
OF_BACKEND = {
    "native": ("engine",),
    "onnx": ("onnx",),
    "distributed": ("engine",),
    "diffusers": ("engine", "diffusers"),
    "service": ("serve",),
}
"""Backend -> extras that it needs; the others need none."""


def of_world(world: str | None) -> tuple[str, ...]:
    """Return the extras that a world needs, by its name."""
    packaged = packaged_worlds().get((world or "").partition("/")[0], {})
    return tuple(packaged.get("extras", ()))


def pip_command(extras: Iterable[str]) -> str:
    """Return the command that installs some extras. pip finds this package where it is installed,
    and else needs the checkout: no index has it.
    """
    package = "strands-cosmos3" if _is_installed() else str(Path(__file__).resolve().parents[1])
    return f"pip install '{package}[{','.join(extras)}]'"


def _is_installed() -> bool:
    try:
        return bool(version("strands-cosmos3"))
    except PackageNotFoundError:
        return False


def require_extras(user: str, extras: Iterable[str]) -> None:
    """Raise MissingDependencyError if a module of these extras is not installed. ``user``, e.g. a
    command, needs them.
    """
    absent = {extra: EXTRAS[extra].absent for extra in extras}
    missing = [extra for extra, modules in absent.items() if modules]
    if missing:
        first = ", ".join(absent[extra][0] for extra in missing)
        raise MissingDependencyError(
            f"{user} needs packages that are not installed ({first}): {pip_command(missing)}"
        )


@contextmanager
def needed_by(user: str) -> Iterator[None]:
    """Turn a missing optional module into a MissingDependencyError that names its extra, and a
    library that MuJoCo cannot draw with into a RenderError; other import errors pass.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        extras = [name for name, extra in EXTRAS.items() if module in extra.modules]
        if not extras:
            raise
        raise MissingDependencyError(
            f"{user} needs {module}, which is not installed: {pip_command(extras[:1])}"
        ) from None
    except RuntimeError as error:
        if "environment variable MUJOCO_GL" not in str(error):
            raise
        raise RenderError(
            f"MuJoCo cannot be loaded ({error}); set MUJOCO_GL to egl, osmesa or glfw, or unset it."
        ) from None
