"""Convert a checkpoint of any format to the released layout, or to a LeRobot policy folder.
Resumable: finished files stay.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import save_file

from strands_cosmos3.actions.stats import FIGURES
from strands_cosmos3.engine.checkpoint import STATISTICS, Checkpoint
from strands_cosmos3.engine.formats.contract import CONTRACT, FIELDS, require_complete
from strands_cosmos3.engine.formats.lerobot import exported_config, exported_step
from strands_cosmos3.engine.metadata import METADATA
from strands_cosmos3.engine.weight_files import (
    STEM,
    TORCH_DTYPES,
    WeightSource,
    inside,
    require_finite,
    sha256,
)
from strands_cosmos3.errors import ConfigError, ContractError
from strands_cosmos3.resources import UNFINISHED, read_json, storing, write_json, write_whole
from strands_cosmos3.tables import toml_value


class Planned:
    """One tensor of a file that is to be written: its stored name, its source, and its name and
    dtype there.
    """

    def __init__(self, name: str, source: WeightSource, key: str, dtype: str | None = None):
        self.name, self.source, self.key = name, source, key
        self.dtype = dtype or source.dtypes[key]
        self.shape = source.shapes[key]

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize


def write_safetensors(path: Path, tensors: Iterable[Planned]) -> str:
    """Write a file and return its SHA-256. Raises WeightsError if a weight is not finite; no
    file is left then.
    """
    planned, digest = list(tensors), hashlib.sha256()

    def fill(hidden: Path) -> None:
        with hidden.open("wb") as file:
            for block in _blocks(planned):
                digest.update(block)
                file.write(block)

    write_whole(path, fill)
    return digest.hexdigest()


def _blocks(planned: list[Planned]) -> Iterator[memoryview]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor_plan in planned:
        header[tensor_plan.name] = {
            "dtype": tensor_plan.dtype,
            "shape": list(tensor_plan.shape),
            "data_offsets": [at, at + tensor_plan.size],
        }
        at += tensor_plan.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor_plan in planned:
        ((_, tensor),) = tensor_plan.source.parts({"": (tensor_plan.key, ())})
        require_finite(tensor, tensor_plan.key)
        flat = tensor.to(TORCH_DTYPES[tensor_plan.dtype]).contiguous().reshape(-1)
        if flat.numel():
            yield memoryview(cast("Any", flat.view(torch.uint8).numpy()))


def shards_of(planned: Iterable[Planned], most_bytes: int) -> list[list[Planned]]:
    """Consecutive groups of at most ``most_bytes``, or of one larger tensor."""
    groups: list[list[Planned]] = [[]]
    size = 0
    for tensor_plan in planned:
        if groups[-1] and size + tensor_plan.size > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor_plan)
        size += tensor_plan.size
    return groups


Target = Literal["released", "lerobot"]
StoredDtype = Literal["stored", "bfloat16", "float32"]
OnFile = Callable[[str, int, int], None]
SHARD_BYTES = 4 << 30
PROGRESS = "conversion.json"
_RECORDED = ("statistics", "normalization")  # by LeRobot's own files
_NAMES = {"bfloat16": "BF16", "float32": "F32"}
_NOT_TOKENIZER = ("config.json", "model_index.json", "export_manifest.json", METADATA)
_TOKENIZER_BYTES = 64 << 20


def convert(
    checkpoint: Checkpoint,
    out: Path,
    to: Target = "released",
    dtype: StoredDtype = "stored",
    on_file: OnFile = lambda *_: None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint to the new folder ``out`` and return it. A conversion that was interrupted
    goes on where it was.

    Args:
        dtype: Of matrices; ``stored`` keeps each tensor's own (FP8 becomes float32). The time
            embedder is float32 in any case.
        on_file: Called before each file with its name, its number and their count.

    Raises:
        ConfigError: ``out`` exists, or holds an unfinished conversion of something else.
        ContractError: A LeRobot folder cannot say what the checkpoint's actions mean.
        CheckpointError, StorageError: A weight cannot be read, or a file not be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; choose another --out.")
    if to == "lerobot":
        _require_said_by_lerobot(checkpoint)
    hidden = out.with_name(f".{out.name}.converting")
    done = _Progress(
        hidden,
        {"source": _identity(checkpoint), "to": to, "dtype": dtype, "shard_bytes": shard_bytes},
    )
    files = (
        _released_files(checkpoint, dtype, shard_bytes)
        if to == "released"
        else _lerobot_files(checkpoint, dtype)
    )
    for number, (name, planned) in enumerate(files.items(), 1):
        on_file(name, number, len(files))
        if not done.has(name):
            done.add(name, write_safetensors(hidden / name, planned))
    if to == "released":
        _describe_released(checkpoint, hidden, files, done.digests)
    else:
        _describe_lerobot(checkpoint, hidden)
    (hidden / PROGRESS).unlink()
    with storing(out):
        if out.exists():
            out.rmdir()
        os.replace(hidden, out)
    return out


class _Progress:
    """The finished files of a conversion with their digests, kept beside them."""

    def __init__(self, folder: Path, what: Mapping[str, Any]):
        self._path, self._what = folder / PROGRESS, dict(what)
        self.digests: dict[str, str] = {}
        if self._path.exists():
            found = read_json(self._path, ConfigError, "Remove it to start anew.")
            if found.get("what") != json.loads(json.dumps(self._what)):
                raise ConfigError(
                    f"{folder} holds an unfinished conversion of something else; remove it to "
                    "start anew."
                )
            self.digests = found["files"]
            for left in folder.rglob(UNFINISHED):  # by a process that was killed
                left.unlink()
        else:
            self._keep()

    def has(self, name: str) -> bool:
        """Whether a file is finished and unchanged."""
        path = self._path.parent / name
        return name in self.digests and path.exists() and sha256(path) == self.digests[name]

    def add(self, name: str, digest: str) -> None:
        """Record a finished file."""
        self.digests[name] = digest
        self._keep()

    def _keep(self) -> None:
        write_json(self._path, {"what": self._what, "files": self.digests})


def _identity(checkpoint: Checkpoint) -> list[Any]:
    files = (*checkpoint.weights.files, *checkpoint.vae_weights.files)
    return [
        checkpoint.digest,
        *([str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files),
    ]


def _planned(source: WeightSource, dtype: StoredDtype, prefix: str = "") -> list[Planned]:
    def kept(key: str) -> str | None:
        return (
            "F32" if key.startswith("time_embedder.") and dtype != "stored" else _NAMES.get(dtype)
        )

    return [Planned(f"{prefix}{key}", source, key, kept(key)) for key in sorted(source.shapes)]


def _released_files(
    checkpoint: Checkpoint, dtype: StoredDtype, shard_bytes: int
) -> dict[str, list[Planned]]:
    files: dict[str, list[Planned]] = {}
    preview = {} if checkpoint.preview is None else {"preview_decoder": checkpoint.preview[1]}
    for folder, source in {
        "transformer": checkpoint.weights,
        "vae": checkpoint.vae_weights,
        **preview,
    }.items():
        shards = shards_of(_planned(source, dtype), shard_bytes)
        for i, shard in enumerate(shards, 1):
            tail = "" if len(shards) == 1 else f"-{i:05d}-of-{len(shards):05d}"
            files[f"{folder}/{STEM}{tail}.safetensors"] = shard
    return files


def _describe_released(
    checkpoint: Checkpoint,
    out: Path,
    files: Mapping[str, list[Planned]],
    digests: Mapping[str, str],
) -> None:
    layout = checkpoint.layout
    for folder in ("transformer", "vae"):
        mine = {name: shard for name, shard in files.items() if name.startswith(f"{folder}/")}
        if len(mine) > 1:
            weight_map = {
                tensor_plan.name: name.partition("/")[2]
                for name, shard in mine.items()
                for tensor_plan in shard
            }
            total = sum(tensor_plan.size for shard in mine.values() for tensor_plan in shard)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(out / folder / f"{STEM}.safetensors.index.json", index)
    write_json(out / "transformer/config.json", layout.transformer_config())
    write_json(out / "vae/config.json", layout.vae_config())
    write_json(out / "scheduler/scheduler_config.json", layout.scheduler_config())
    if checkpoint.preview is not None:
        write_json(out / "preview_decoder/config.json", checkpoint.preview[0])
    if index := layout.model_index():
        write_json(out / "model_index.json", index)
    _copy_tokenizer(layout.tokenizer, out / "text_tokenizer")
    if (statistics := checkpoint.root / STATISTICS).is_file() and checkpoint.metadata.get(
        "statistics"
    ) is None:
        shutil.copyfile(statistics, out / STATISTICS)
    ours = {
        **checkpoint.metadata,
        "composition": checkpoint.composition,
        "converted_from": layout.format,
        "sha256": dict(digests),
    }
    write_json(out / METADATA, {"strands_cosmos3": ours})


def _lerobot_files(checkpoint: Checkpoint, dtype: StoredDtype) -> dict[str, list[Planned]]:
    transformer = _planned(checkpoint.weights, dtype, "model.transformer.")
    return {
        "model.safetensors": [*transformer, *_planned(checkpoint.vae_weights, dtype, "model.vae.")]
    }


def _require_said_by_lerobot(checkpoint: Checkpoint) -> None:
    metadata = checkpoint.metadata
    require_complete(metadata, (), checkpoint.root)
    if lost := [name for name in ("state", "policy_frames") if metadata.get(name)]:
        raise ContractError(
            f"{checkpoint.root} records {' and '.join(lost)}, for which LeRobot's folders have no "
            "word."
        )


def _describe_lerobot(checkpoint: Checkpoint, out: Path) -> None:
    write_json(out / "config.json", exported_config(checkpoint.layout, checkpoint.metadata))
    _copy_tokenizer(checkpoint.layout.tokenizer, out / "text_tokenizer")
    stats = checkpoint.action_stats()
    figures: dict[str, torch.Tensor] = {}
    if stats is not None:
        if checkpoint.metadata.get("normalization") == "quantile_rot":
            stats = stats.raw or stats
        figures = {
            f"action.{name}": torch.tensor(value)
            for name in FIGURES
            if (value := getattr(stats, name)) is not None
        }
    for name, registry in (
        ("preprocessor", "normalizer_processor"),
        ("postprocessor", "unnormalizer_processor"),
    ):
        state = f"policy_{name}_step_0_{registry}.safetensors" if figures else None
        if state is not None:
            write_whole(out / state, lambda hidden: save_file(figures, hidden))
        write_json(
            out / f"policy_{name}.json",
            {
                "name": f"policy_{name}",
                "steps": [exported_step(registry, state, checkpoint.metadata)],
            },
        )
    fields = {
        name: checkpoint.metadata[name]
        for name in FIELDS
        if name in checkpoint.metadata and name not in _RECORDED
    }
    fields["composition"] = checkpoint.composition
    text = "".join(f"{name} = {toml_value(value)}\n" for name, value in fields.items())
    write_whole(out / CONTRACT, lambda hidden: hidden.write_text(text, encoding="utf-8"))


def _copy_tokenizer(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        is_tokenizer = (
            file.suffix in (".json", ".txt", ".jinja", ".model") and file.name not in _NOT_TOKENIZER
        )
        if is_tokenizer and file.is_file() and file.stat().st_size < _TOKENIZER_BYTES:
            shutil.copyfile(inside(file, source), target / file.name)
