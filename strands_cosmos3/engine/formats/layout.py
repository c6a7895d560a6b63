"""Parts of a checkpoint's folder, as the loader needs them. :class:`Layout` is the released
layout; other formats differ in where they keep a part, and take from a ``base`` what they do not
have.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strands_cosmos3.engine.formats.contract import Stated, merged
from strands_cosmos3.engine.metadata import METADATA, read_metadata
from strands_cosmos3.engine.weight_files import (
    STEM,
    WeightFiles,
    WeightSource,
    read_config,
    readable,
)
from strands_cosmos3.errors import LayoutError
from strands_cosmos3.resources import shown
from strands_cosmos3.tables import read_toml

CONFIG_FILES: Mapping[str, str] = {
    "transformer": "transformer/config.json",
    "vae": "vae/config.json",
    "scheduler": "scheduler/scheduler_config.json",
}
"""Part of a checkpoint -> its config in the released layout."""
QUANTIZATION = "hf_quant_config.json"
STATED = "quantization_config"
_CONFIG = CONFIG_FILES["transformer"]
_QUANTIZATIONS = (QUANTIZATION, f"transformer/{QUANTIZATION}")
_PARTS = (*CONFIG_FILES, "text_tokenizer", "preview_decoder")
IMPLEMENTED: Mapping[str, Mapping[str, list[Any]]] = read_toml(
    Path(__file__).with_name("implemented.toml")
)
"""Kind of config -> its options -> the values that are implemented; none listed means any."""


@dataclass(eq=False)
class Layout:
    """A folder in the released layout. Every method raises a CheckpointError if its part is missing
    or damaged.

    Args:
        root: The folder. Nothing outside it is opened.
        contracts: Fields of contract files (:mod:`.contract`): the caller's, and the folder's own.
        base: Source of what the folder lacks: VAE, tokenizer, scheduler, sizes.

    Attributes:
        format: Name of the format.
        skipped: Names of weights that are not loaded, known once :meth:`weights` was called.
    """

    format = "released"

    root: Path
    contracts: Sequence[Stated] = ()
    base: Layout | None = None
    skipped: tuple[str, ...] = field(default=(), init=False)

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder."""
        return read_config(self.root / name, self.root)

    def has(self, name: str) -> bool:
        """Whether the folder has a file or folder of this name."""
        return os.path.lexists(self.root / name)

    def model_index(self) -> dict[str, Any]:
        """``model_index.json``, empty if there is none."""
        return self.read("model_index.json") if self.has("model_index.json") else {}

    def config(self, part: str) -> dict[str, Any]:
        """The config of a part in :data:`CONFIG_FILES`."""
        return self.read(CONFIG_FILES[part])

    def weights(self) -> WeightSource:
        """The transformer's weights under their released names."""
        return WeightFiles(self.root / "transformer", self.root)

    def vae_weights(self) -> WeightSource:
        """The VAE's weights."""
        return WeightFiles(self.root / "vae", self.root)

    def preview(self) -> tuple[dict[str, Any], WeightSource] | None:
        """Config and weights of the preview decoder, or None."""
        if not self.has("preview_decoder"):
            return None
        return self.read("preview_decoder/config.json"), WeightFiles(
            self.root / "preview_decoder", self.root
        )

    def optional_weights(self, folder: str, stem: str = STEM) -> WeightSource | None:
        """Weights of a part that not every checkpoint has, or None."""
        return WeightFiles(self.root / folder, self.root, stem) if self.has(folder) else None

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer."""
        return self.root / "text_tokenizer"

    @property
    def reasoner(self) -> Layout:
        """The folder at the top of which the reasoner's own files are, such as its config."""
        return self

    def recorded(self) -> Sequence[Stated]:
        """Fields of actions in the folder's own files, file by file: keys of the metadata."""
        return [(str(self.root / METADATA), read_metadata(self.root))]

    def metadata(self) -> Mapping[str, Any]:
        """Fields of the folder and the contracts together; raises ContractError if they
        contradict each other.
        """
        return merged(
            [*self.recorded(), *self.contracts], str(self.root), foreign=isinstance(self, OnBase)
        )

    @property
    def roots(self) -> set[Path]:
        """The folder, and those of its bases."""
        return {self.root} | (set[Path]() if self.base is None else self.base.roots)

    def files(self) -> set[Path]:
        """Every file of the parts and every JSON file at the top, those of the bases included."""
        patterns = ("*.json", *(f"{part}/**/*" for part in _PARTS))
        found = {path for root in self.roots for each in patterns for path in root.glob(each)}
        return {path for path in found if path.is_file()}

    @property
    def needs_contract(self) -> bool:
        """Whether every field of the contract must be known to act; a released folder may rely
        on its variant.
        """
        return isinstance(self, OnBase) or bool(self.contracts)


class OnBase(Layout):
    """A folder with weights of the transformer alone; the rest is the base's."""

    def _base(self) -> Layout:
        if self.base is None:
            raise LayoutError(
                f"{self.root} ({self.format}) has no VAE, tokenizer and scheduler of its own; "
                "name the checkpoint that it was "
                'trained from in a contract file: base = "nvidia/Cosmos3-Nano" (docs/formats.md).'
            )
        return self.base

    def model_index(self) -> dict[str, Any]:
        return self._base().model_index()

    def config(self, part: str) -> dict[str, Any]:
        return self._base().config(part)

    def vae_weights(self) -> WeightSource:
        return self._base().vae_weights()

    def preview(self) -> tuple[dict[str, Any], WeightSource] | None:
        return self._base().preview()

    def optional_weights(self, folder: str, stem: str = STEM) -> WeightSource | None:
        return None if self.base is None else self.base.optional_weights(folder, stem)

    @property
    def tokenizer(self) -> Path:
        return self._base().tokenizer

    @property
    def reasoner(self) -> Layout:
        return self if self.base is None else self.base.reasoner

    def recorded(self) -> Sequence[Stated]:
        return ()


def require_implemented(config: Mapping[str, Any], kind: str, where: Path, instead: str) -> None:
    """Raise LayoutError if a config of a kind in :data:`IMPLEMENTED` sets an option to what is not
    implemented; what is unset (None, False, empty) is ignored.

    Args:
        instead: What to do instead, for the message.
    """
    refused, implemented = [], IMPLEMENTED[kind]
    for name, value in config.items():
        valid = implemented.get(name)
        if (
            value in (None, False, "", [], {})
            or valid == []
            or (valid and any(value is v or value == v for v in valid))
        ):
            continue
        refused.append(
            f"{readable(name)} = {shown(value)}"
            + (f" (only {' or '.join(map(repr, valid))})" if valid else "")
        )
    if refused:
        raise LayoutError(
            f"{where}: {', '.join(refused[:6])}: not implemented. Implemented are "
            f"{', '.join(implemented)}. {instead}"
        )


def stated_blocks(root: Path) -> dict[str, Mapping[str, Any]]:
    """What a folder states of its quantisation, by the place where it does; empty if nothing."""
    blocks: dict[str, Mapping[str, Any]] = {
        name: read_config(root / name, root)
        for name in _QUANTIZATIONS
        if os.path.lexists(root / name)
    }
    if os.path.isfile(root / _CONFIG):
        try:
            config = read_config(root / _CONFIG, root)
        except LayoutError:  # which names itself where the config is read
            config = {}
        if config.get(STATED) is not None:
            blocks[f"{_CONFIG}: {STATED}"] = config[STATED]
    return blocks
