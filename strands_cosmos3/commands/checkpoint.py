"""``strands-cosmos3 checkpoint``: what a checkpoint is, and conversion between formats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro
from rich.console import Console
from rich.text import Text

from strands_cosmos3.commands.files import require_writable, require_writable_folder, write_new
from strands_cosmos3.commands.flags import require_owned
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_json

_OWNERS = {
    "out": "convert and contract",
    "to": "convert",
    "policy_frames": "contract",
    "dtype": "convert",
    "quantize": "convert",
    "quantize_text": "convert",
    "json": "inspect",
    "verify": "inspect",
}
"""Field -> the only actions that heed it."""


@dataclass(frozen=True)
class Checkpoint:
    """Inspect a checkpoint of any format, or convert it.

    Formats: the released layout, exports and training runs (DCP) of cosmos-framework, LeRobot
    policies, ModelOpt FP8, INT8, and deltas and LoRA adapters on a base. docs/formats.md explains
    contracts, which say what the actions mean.
    """

    what: Annotated[Literal["inspect", "convert", "contract"], tyro.conf.Positional]
    """inspect it, convert it, or print the contract file to fill in."""
    path: Annotated[str, tyro.conf.Positional]
    """Folder, contract file (.toml) that names one, or owner/name[@revision] on the hub."""
    base: str | None = None
    """Checkpoint that it was trained from, with VAE and tokenizer: folder or hub repository. The
    default is the contract's.
    """
    contract: Path | None = None
    """Contract file. The default is contract.toml in the folder."""
    out: Path | None = None
    """New folder of convert, or new .toml file of contract, which is printed otherwise."""
    policy_frames: int | None = None
    """Frames of the policy's clip, for contract to state of a checkpoint that was fine-tuned with a
    shorter future: 1 + 4 for each future latent frame that it kept.
    """
    to: Literal["released", "lerobot"] = "released"
    """Format that convert writes."""
    dtype: Literal["stored", "bfloat16", "float32"] = "stored"
    """Type of the weights that convert writes; stored keeps each one's own."""
    quantize: Literal["int8"] | None = None
    """Store the generation tower's linear layers in 8 bits."""
    quantize_text: bool = False
    """Store the text tower's so too."""
    json: Path | None = None
    """Write what inspect prints to this JSON file."""

    verify: bool = False
    """Read every byte for the SHA-256 of the checkpoint, and compare recorded ones."""

    extras: ClassVar[tuple[str, ...]] = ("engine",)
    """Extras of the package that it needs."""

    def run(self) -> int:
        """Inspect or convert; 1 if the checkpoint cannot be loaded."""
        from strands_cosmos3.engine.formats.inspect import contract_of
        from strands_cosmos3.engine.variants import locate

        require_owned(self, self.what, _OWNERS)
        if self.contract is not None and not self.contract.is_file():
            raise ConfigError(f"--contract {str(self.contract)!r} is not a file.")
        path = locate(self.path)
        base = None if self.base is None else locate(self.base)
        if self.what == "inspect":
            return self._inspect(path, base)
        if self.what == "contract":
            write_new(self.out, contract_of(path, base, self.contract, self.policy_frames))
            return 0
        return self._convert(path, base)

    def _inspect(self, path: Path, base: Path | None) -> int:
        from strands_cosmos3.engine.checkpoint import Checkpoint as Opened
        from strands_cosmos3.engine.formats.detect import open_layout
        from strands_cosmos3.engine.formats.inspect import inspect, lines_of

        require_writable(self.json, (".json",), "--json")
        report = inspect(path, base, self.contract)
        if self.verify and report["verdict"] in ("ready", "needs a contract"):
            opened = Opened.open(open_layout(path, base, self.contract))
            opened.read_anew()
            opened.verify(anew=False)
            report["sha256"] = opened.digest
        Console().print(Text("\n".join(lines_of(report))), soft_wrap=True)
        if self.json is not None:
            write_json(self.json, report)
        return 0 if report["verdict"] in ("ready", "needs a contract") else 1

    def _convert(self, path: Path, base: Path | None) -> int:
        from strands_cosmos3.engine.checkpoint import Checkpoint as Opened
        from strands_cosmos3.engine.formats.convert import convert
        from strands_cosmos3.engine.formats.detect import open_layout
        from strands_cosmos3.engine.options import EngineOptions

        if self.out is None:
            raise ConfigError("convert needs --out, a new folder.")
        require_writable_folder(self.out, "--out")
        console = Console()
        opened = Opened.open(open_layout(path, base, self.contract))

        def shown(name: str, number: int, count: int) -> None:
            console.print(f"{number}/{count} {name}", highlight=False)

        quantize = None
        if self.quantize is not None or self.quantize_text:
            quantize = EngineOptions(quantize=self.quantize, quantize_text=self.quantize_text)
        convert(opened, self.out, self.to, self.dtype, shown, quantize=quantize)
        console.print(f"wrote {self.out}", highlight=False, soft_wrap=True)
        return 0
