"""Find the folder of a checkpoint: on this machine, or on the hub."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from strands_cosmos3.errors import ConfigError, LayoutError
from strands_cosmos3.resources import shown

_PATTERNS = (
    "*.json",
    "transformer/*",
    "vae/*",
    "preview_decoder/*",
    "scheduler/*",
    "text_tokenizer/*",
)
# fetched if there is no transformer/
_OTHER_FORMATS = ("*.safetensors", "*.toml", "model/*", "LICENSE*")


def locate(
    path_or_repo_id: str | Path, revision: str | None = None, local_files_only: bool = False
) -> Path:
    """The folder of a checkpoint: a local one, or the snapshot of the hub repository
    ``owner/name``, downloaded if needed.

    A contract file that names a checkpoint is as good as a local folder.

    ``HF_HOME``, ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` are honoured. Raises LayoutError if it does not
    exist or cannot be fetched, ConfigError if a ``revision`` was given for a local folder.
    """
    if (path := existing(path_or_repo_id)) is not None:
        if revision is not None:
            raise ConfigError(f"{path} is a local folder; `revision` belongs to a hub repository.")
        return path
    name = str(path_or_repo_id)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise LayoutError(f"{shown(name)} is neither a folder nor a hub repository (owner/name).")
    # needs the network, so imported for repositories only
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    fetch = partial(snapshot_download, name, revision=revision, local_files_only=local_files_only)
    try:
        folder = fetch(allow_patterns=list(_PATTERNS))
        if not (Path(folder) / "transformer").exists():
            folder = fetch(allow_patterns=[*_PATTERNS, *_OTHER_FORMATS])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise LayoutError(
            f"{name!r} is not a local folder and could not be fetched from the hub: "
            f"{type(error).__name__}: {error}. "
            "Pass a local folder, log in with `hf auth login`, or accept the model's licence."
        ) from None
    return Path(folder)


def existing(named: str | Path, folder: Path = Path()) -> Path | None:
    """The file or folder of this name, seen from ``folder``; None if there is none, or can be
    none of that name.
    """
    try:
        path = folder / Path(named).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        # a name that is too long, another user's home, a NUL
        return None


def repository_of(root: Path) -> str:
    """The repository that a folder is a snapshot of, or else the folder's name."""
    cached = (
        root.parent.parent.name.removeprefix("models--")
        if root.parent.name == "snapshots"
        else root.name
    )
    return cached.replace("--", "/")
