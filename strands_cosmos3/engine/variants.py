"""Known checkpoints: sizes, action spaces and default sampling, as ``variants.toml`` lists them;
and the folder of a checkpoint, on this machine or on the hub.

A policy checkpoint has the sizes of its base model, so the action space never follows from them: it
comes from this table by name, from the checkpoint's metadata, or from the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from strands_cosmos3.checks import known_name
from strands_cosmos3.embodiments import PRESETS, Sampling
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.errors import ConfigError, LayoutError, VariantError
from strands_cosmos3.observe.views import Composition
from strands_cosmos3.resources import shown
from strands_cosmos3.tables import read_toml

PromptFormat = Literal["plain", "json"]


@dataclass(frozen=True)
class Variant:
    """One released checkpoint, or a small one of the same architecture."""

    name: str
    sizes: Mapping[str, object]  # required values of the config
    preset: Sampling  # reference sampling
    repo_id: str | None = None
    action_space: str | None = None  # None if each checkpoint states its own
    prompt_format: PromptFormat = "json"
    composition: Composition = "letterbox"  # how three views become one picture

    def differences(self, config: TransformerConfig) -> list[str]:
        """Every size of a config that differs, in words."""
        return [
            f"{name} is {getattr(config, name)}, {self.name} has {size}"
            for name, size in self.sizes.items()
            if getattr(config, name) != size
        ]

    def check(self, config: TransformerConfig) -> None:
        """Raise VariantError with every size of a config that differs."""
        if wrong := self.differences(config):
            raise VariantError(
                f"this is not a {self.name!r} checkpoint: {'; '.join(wrong)}. Pass "
                "another variant, or none."
            )


def _variant(table: Mapping[str, Any]) -> Variant:
    named = {"sizes": _TABLES["sizes"][table["sizes"]], "preset": PRESETS[table["preset"]]}
    return Variant(**{**table, **named})


_TABLES = read_toml(Path(__file__).with_suffix(".toml"))
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {table["name"]: _variant(table) for table in _TABLES["variants"]}
)


def get_variant(name: str) -> Variant:
    """The variant with this name; UnknownNameError lists the names."""
    return VARIANTS[known_name(name, "variant", VARIANTS)]


def variant_of_repo(repo_id: str) -> Variant | None:
    """The variant released as this repository or in a local folder of the same name, or None."""
    tail = repo_id.rsplit("/", 1)[-1]
    return next(
        (v for v in VARIANTS.values() if v.repo_id and v.repo_id.rsplit("/", 1)[-1] == tail), None
    )


def variant_of_sizes(config: TransformerConfig) -> Variant:
    """The small variant that fits a config, for a checkpoint without a known name."""
    return VARIANTS[f"small-{config.hidden_act}"]


_PATTERNS = (
    "*.json",
    "transformer/*",
    "vae/*",
    "preview_decoder/*",
    "scheduler/*",
    "text_tokenizer/*",
)
EYES = ("vision_encoder/*", "*.jinja", "merges.txt")
"""What a reasoner needs of a repository besides."""
EARS = ("sound_tokenizer/*",)
"""What sound needs besides."""
# fetched if there is no transformer/
_OTHER_FORMATS = ("*.safetensors", "*.toml", "model/*", "LICENSE*")


def locate(
    path_or_repo_id: str | Path,
    revision: str | None = None,
    local_files_only: bool = False,
    also: Sequence[str] = (),
) -> Path:
    """The folder of a checkpoint: a local one, or the snapshot of the hub repository
    ``owner/name`` or ``owner/name@revision``, downloaded if needed.

    ``also`` are patterns of more files to download. A contract file that names a checkpoint is as
    good as a local folder. Without a network and without a revision, the only snapshot in the cache
    is taken, also where no branch points to it.

    ``HF_HOME``, ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` are honoured. Raises LayoutError if it does not
    exist or cannot be fetched, ConfigError if a ``revision`` was given for a local folder, or
    twice.
    """
    if (path := existing(path_or_repo_id)) is not None:
        if revision is not None:
            raise ConfigError(f"{path} is a local folder; `revision` belongs to a hub repository.")
        return path
    name, at, named = str(path_or_repo_id).partition("@")
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or (at and not named):
        raise LayoutError(
            f"{shown(str(path_or_repo_id))} is neither a folder nor a hub repository (owner/name "
            "or owner/name@revision)."
        )
    if at and revision is not None:
        raise ConfigError(f"{path_or_repo_id} and {revision!r} are two revisions; give one.")
    revision = revision or named or None
    # needs the network, so imported for repositories only
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    fetch = partial(snapshot_download, name, local_files_only=local_files_only)

    def fetched(revision: str | None) -> Path:
        wanted = [*_PATTERNS, *also]
        folder = fetch(revision=revision, allow_patterns=wanted)
        if not (Path(folder) / "transformer").exists():
            folder = fetch(revision=revision, allow_patterns=[*wanted, *_OTHER_FORMATS])
        return Path(folder)

    cached = ()
    try:
        try:
            return fetched(revision)
        except LocalEntryNotFoundError:
            cached = cached_revisions(name, "model")
            if revision is not None or len(cached) != 1:
                raise
            return fetched(cached[0])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        which = f" The cache has the revisions {', '.join(cached)}." if cached else ""
        raise LayoutError(
            f"{str(path_or_repo_id)!r} is not a local folder and could not be fetched from the "
            f"hub: {type(error).__name__}: {error}.{which} Pass a local folder or "
            "owner/name@revision, log in with `hf auth login`, or accept the model's licence."
        ) from None


def cached_revisions(repository: str, kind: str) -> tuple[str, ...]:
    """Return the commits of a ``model`` or ``dataset`` that Hugging Face's cache has, whether or
    not a branch points to them.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE, f"{kind}s--{repository.replace('/', '--')}", "snapshots")
    return tuple(sorted(path.name for path in folder.glob("*") if path.is_dir()))


def existing(name: str | Path, folder: Path = Path()) -> Path | None:
    """The file or folder of this name, seen from ``folder``; None if there is none, or can be
    none of that name.
    """
    try:
        path = folder / Path(name).expanduser()
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
