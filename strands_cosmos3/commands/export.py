"""``strands-cosmos3 export``: a checkpoint's networks as ONNX graphs, without a copy of its
weights.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.console import Console
from rich.table import Table

from strands_cosmos3.commands.files import require_writable_folder
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.embodiments import Embodiment, get_embodiment
from strands_cosmos3.errors import ConfigError

_DEFAULT_EMBODIMENT = "droid_lerobot"
_RUNS = 5


@dataclass(frozen=True)
class ExportCommand:
    """Write a checkpoint's networks as ONNX graphs.

    --backend onnx runs them without PyTorch. The graphs hold no weights: they name the tensors of
    the checkpoint's safetensors files, which stay where they are. They fit its shapes: any prompt
    and batch, pictures of one size, and clips of its number of rows. Afterwards both engines answer
    one request, and their differences and times are printed.

    The checkpoint must be in the released layout (checkpoint convert makes it) and not be in 8
    bits.
    """

    model: str | None = None
    """A checkpoint's folder, or owner/name[@revision] on the hub; the default is the bundled
    one.
    """
    out: Path | None = None
    """Folder of the graphs; the default is onnx in the checkpoint's own folder, where it must be
    local. An earlier export there is replaced.
    """
    embodiment: str | None = None
    """Source of the composed picture's size and of the rows; the default is the checkpoint's
    domain, else droid_lerobot.
    """
    tier: int | None = None
    """Resolution tier; the default is the checkpoint's, else 480."""
    canvas: tuple[int, int] | None = None
    """Height and width of the pictures in pixels, multiples of 16, instead of what follows."""
    rows: int | None = None
    """Rows of a chunk, and with them the frames of a clip; the default is the checkpoint's, else
    the embodiment's.
    """
    decoder: bool = False
    """Write the VAE's own decoder too, for exact videos; a preview decoder is written anyway."""
    compare: bool = True
    """Answer the same requests with both engines afterwards; this loads the weights twice."""

    extras: ClassVar[tuple[str, ...]] = ("engine", "onnx", "export")
    """Extras of the package that it needs."""

    def run(self) -> int:
        """Export, compare, and print; 1 if an answer is not finite."""
        from strands_cosmos3.engine.checkpoint import Checkpoint
        from strands_cosmos3.engine.exported.comparison import compare
        from strands_cosmos3.engine.exported.export import export
        from strands_cosmos3.engine.exported.folder import EXPORT, FOLDER
        from strands_cosmos3.engine.variants import locate

        console = Console(highlight=False, soft_wrap=True)
        path = locate(self.model or embedded_checkpoint())
        if self.out is None and self.model is not None and not Path(self.model).exists():
            raise ConfigError(f"--model {self.model!r} is on the hub: --out FOLDER is needed.")
        checkpoint = Checkpoint.open(path)
        out = self.out or checkpoint.root / FOLDER
        require_writable_folder(out, "--out")
        if out.is_dir() and any(out.iterdir()) and not (out / EXPORT).is_file():
            raise ConfigError(f"--out {str(out)!r} holds other files; name a new folder.")
        embodiment = get_embodiment(
            self.embodiment or checkpoint.metadata.get("domain") or _DEFAULT_EMBODIMENT
        )
        canvas_hw, content = self._sizes(checkpoint, embodiment)
        rows = self.rows or checkpoint.chunk_rows or embodiment.chunk_rows(checkpoint.action_space)
        console.print(_statement(checkpoint))
        with console.status("reading the checkpoint"):
            checkpoint.verify()
            seen_from = os.path.relpath(path, out) if out.parent == path else str(path.resolve())
            export(
                checkpoint,
                out,
                canvas_hw,
                content,
                rows + 1,
                self.decoder,
                seen_from,
            )
        size = sum(file.stat().st_size for file in out.iterdir())
        height, width = content
        console.print(
            f"wrote {out}: {size / 1e6:.2f} MB without weights, for pictures of {width} x {height} "
            f"pixels and {rows} rows"
        )
        if not self.compare:
            return 0
        with console.status("comparing with the native engine"):
            compared = compare(out, embodiment, content, rows, _RUNS)
        table = Table("part", "onnx ms", "native ms", box=None)
        for part, times in compared.milliseconds.items():
            table.add_row(part, *(f"{ms:.1f}" for ms in times))
        console.print(table)
        gaps = compared.differences
        listed = ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
        console.print(f"largest differences to the native engine: {listed}")
        return int(not np.isfinite([*gaps.values()]).all())

    def _sizes(
        self, checkpoint: Any, embodiment: Embodiment
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Height and width of the canvas, and of the pictures there."""
        from strands_cosmos3.engine.processor import DEFAULT_TIER
        from strands_cosmos3.observe.views import canvas_hw, content_hw

        if self.canvas is not None:
            height, width = self.canvas
            if height % 16 or width % 16 or min(height, width) < 16:
                raise ConfigError(
                    f"--canvas {height},{width}: both must be multiples of 16, from 16 on."
                )
            return self.canvas, self.canvas
        if embodiment.rig is None:
            raise ConfigError(
                f"{embodiment.name!r} composes no views: give the size of its pictures, --canvas "
                "HEIGHT,WIDTH."
            )
        tier = self.tier or checkpoint.metadata.get("resolution_tier") or DEFAULT_TIER
        composite_hw = embodiment.rig.composite_hw
        hw = canvas_hw(*composite_hw, tier)
        return hw, content_hw(*composite_hw, hw)


def _statement(checkpoint: Any) -> str:
    """What type and memory the weights have, in the files and in a process that runs them."""
    from strands_cosmos3.engine.weight_files import SIZES

    stored: Counter[str] = Counter()
    numbers = 0
    parts = [checkpoint.weights, checkpoint.vae_weights]
    parts += [] if checkpoint.preview is None else [checkpoint.preview[1]]
    for source in parts:
        for name, shape in source.shapes.items():
            stored[source.dtypes[name]] += math.prod(shape) * SIZES[source.dtypes[name]]
            numbers += math.prod(shape)
    kinds = ", ".join(f"{size / 2**30:.3f} GiB of {kind}" for kind, size in stored.items())
    widened = numbers * 4 / 2**30
    note = "" if {*stored} == {"F32"} else "; ONNX Runtime computes in float32 on a CPU, and keeps"
    kept = f"{note} at most {widened:.3f} GiB" if note else ""
    return f"{checkpoint.root}: weights in the files are {kinds}{kept}"
