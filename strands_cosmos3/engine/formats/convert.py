"""Convert a checkpoint of any format to the released layout, or to a LeRobot policy folder.
Resumable: finished files stay.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import save_file

from strands_cosmos3.actions.stats import FIGURES
from strands_cosmos3.engine.checkpoint import STATISTICS, Checkpoint
from strands_cosmos3.engine.formats.contract import CONTRACT, FIELDS, require_complete
from strands_cosmos3.engine.formats.eight_bit import Quantised
from strands_cosmos3.engine.formats.layout import CONFIG_FILES, STATED
from strands_cosmos3.engine.formats.lerobot import exported_config, exported_step
from strands_cosmos3.engine.metadata import METADATA
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.engine.quantised import linears
from strands_cosmos3.engine.senses import lacking_senses, require_eyes
from strands_cosmos3.engine.torch_dtypes import TORCH_DTYPES
from strands_cosmos3.engine.weight_files import (
    STEM,
    WeightSource,
    inside,
    read_config,
    require_finite,
)
from strands_cosmos3.errors import ConfigError, ContractError
from strands_cosmos3.resources import (
    UNFINISHED,
    read_json,
    sha256,
    storing,
    write_json,
    write_text,
    write_whole,
)
from strands_cosmos3.tables import toml_value


@dataclass(frozen=True)
class Planned:
    """One tensor of a file that is to be written: its name and dtype there, its source, and its
    name in it.
    """

    name: str
    dtype: str
    source: WeightSource
    key: str

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.source.shapes[self.key]) * TORCH_DTYPES[self.dtype].itemsize


def write_safetensors(path: Path, planned: Sequence[Planned]) -> str:
    """Write a file and return its SHA-256. Raises WeightsError if a weight is not finite; no
    file is left then.
    """
    digest = hashlib.sha256()

    def fill(unfinished: Path) -> None:
        with unfinished.open("wb") as file:
            for block in _blocks(planned):
                digest.update(block)
                file.write(block)

    write_whole(path, fill)
    return digest.hexdigest()


def _blocks(planned: Sequence[Planned]) -> Iterator[memoryview]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor_plan in planned:
        header[tensor_plan.name] = {
            "dtype": tensor_plan.dtype,
            "shape": list(tensor_plan.source.shapes[tensor_plan.key]),
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


def shards_of(planned: Sequence[Planned], most_bytes: int) -> list[list[Planned]]:
    """Consecutive groups of at most ``most_bytes``, or of one larger tensor."""
    groups: list[list[Planned]] = []
    left = 0
    for tensor_plan in planned:
        if not groups or tensor_plan.size > left:
            groups.append([])
            left = most_bytes
        groups[-1].append(tensor_plan)
        left -= tensor_plan.size
    return groups


Target = Literal["released", "lerobot"]
StoredDtype = Literal["stored", "bfloat16", "float32"]
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
    on_file: Callable[[str, int, int], None] = lambda *_: None,
    shard_bytes: int = SHARD_BYTES,
    quantize: EngineOptions | None = None,
) -> Path:
    """Write a checkpoint to the new folder ``out`` and return it. A conversion that was interrupted
    goes on where it was.

    Args:
        dtype: Of matrices; ``stored`` keeps each tensor's own (8-bit ones become float32). The time
            embedder is float32 in any case.
        quantize: Options with ``int8``, which store linear layers in 8 bits; None stores none so.
        on_file: Called before each file with its name, its number and their count.

    Raises:
        ConfigError: ``out`` exists, or holds an unfinished conversion of something else; or
            quantised weights were asked for in another form.
        ContractError: A LeRobot folder cannot say what the checkpoint's actions mean.
        CheckpointError, StorageError: A weight cannot be read, or a file not be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; choose another --out.")
    if quantize is not None and (to, quantize.quantize) != ("released", "int8"):
        raise ConfigError(
            f"quantize {quantize.quantize!r} as {to!r}: only int8 is written, "
            "in the released layout."
        )
    if to == "lerobot":
        require_complete(checkpoint.metadata, (), checkpoint.root)
        if lost := [name for name in ("state", "policy_frames") if checkpoint.metadata.get(name)]:
            raise ContractError(
                f"{checkpoint.root} records {' and '.join(lost)}, for which LeRobot's folders have "
                "no word."
            )
    unfinished = out.with_name(f".{out.name}.converting")
    conversion = {
        "source": _identity(checkpoint),
        "to": to,
        "dtype": dtype,
        "shard_bytes": shard_bytes,
    }
    weights, quantised = checkpoint.weights, None
    if quantize is not None:
        quantised = Quantised(weights, linears(checkpoint.config, quantize.quantize_text))
        conversion["quantized"] = sorted(quantised.names)
    digests, errors = _finished_files(unfinished, conversion)
    files = (
        _released_files(checkpoint, quantised or weights, dtype, shard_bytes)
        if to == "released"
        else _lerobot_files(checkpoint, dtype)
    )
    for number, (name, planned) in enumerate(files.items(), 1):
        on_file(name, number, len(files))
        path = unfinished / name
        if not path.exists() or digests.get(name) != sha256(path):
            digests[name] = write_safetensors(path, planned)
            errors |= quantised.errors if quantised else {}
            progress = {"what": conversion, "files": digests, "errors": errors}
            write_json(unfinished / PROGRESS, progress)
    if to == "released":
        stated = quantised.described(errors) if quantised else None
        _describe_released(checkpoint, unfinished, files, digests, stated)
    else:
        _describe_lerobot(checkpoint, unfinished)
    (unfinished / PROGRESS).unlink()
    with storing(out):
        if out.exists():
            out.rmdir()
        os.replace(unfinished, out)
    return out


def _finished_files(
    folder: Path, conversion: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, float]]:
    """The finished files of an interrupted conversion, with their digests, and the errors of
    quantised weights.
    """
    for left in folder.rglob(UNFINISHED):  # by a process that was killed
        left.unlink()
    if not (folder / PROGRESS).exists():
        return {}, {}
    progress = read_json(folder / PROGRESS, ConfigError, "Remove it to start anew.")
    if progress.get("what") != conversion:
        raise ConfigError(
            f"{folder} holds an unfinished conversion of something else; remove it to start anew."
        )
    return progress["files"], progress["errors"]


def _identity(checkpoint: Checkpoint) -> list[Any]:
    files = (*checkpoint.weights.files, *checkpoint.vae_weights.files)
    return [
        checkpoint.digest,
        *([str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files),
    ]


def _planned(source: WeightSource, dtype: StoredDtype, prefix: str = "") -> list[Planned]:
    planned = []
    for key in sorted(source.shapes):
        kept = _NAMES.get(dtype, source.dtypes[key])
        if isinstance(source, Quantised) and key.removesuffix("_scale") in source.names:
            kept = source.dtypes[key]
        if key.startswith("time_embedder.") and dtype != "stored":
            kept = "F32"
        planned.append(Planned(f"{prefix}{key}", kept, source, key))
    return planned


_STEMS = {"vision_encoder": "model"}  # of files that are not called STEM


def _released_files(
    checkpoint: Checkpoint, weights: WeightSource, dtype: StoredDtype, shard_bytes: int
) -> dict[str, list[Planned]]:
    files: dict[str, list[Planned]] = {}
    sources = {"transformer": weights, "vae": checkpoint.vae_weights}
    if checkpoint.preview is not None:
        sources["preview_decoder"] = checkpoint.preview[1]
    lacking = lacking_senses(checkpoint)
    if not lacking["eyes"]:
        sources["vision_encoder"] = require_eyes(checkpoint)
    ears = checkpoint.layout.optional_weights("sound_tokenizer")
    if ears is not None and not lacking["ears"]:
        sources["sound_tokenizer"] = ears
    for folder, source in sources.items():
        shards = shards_of(_planned(source, dtype), shard_bytes)
        for i, shard in enumerate(shards, 1):
            tail = "" if len(shards) == 1 else f"-{i:05d}-of-{len(shards):05d}"
            files[f"{folder}/{_STEMS.get(folder, STEM)}{tail}.safetensors"] = shard
    return files


def _describe_released(
    checkpoint: Checkpoint,
    out: Path,
    files: Mapping[str, list[Planned]],
    digests: Mapping[str, str],
    quantization: Mapping[str, Any] | None,
) -> None:
    layout = checkpoint.layout
    for folder in ("transformer", "vae", "vision_encoder", "sound_tokenizer"):
        mine = {name: shard for name, shard in files.items() if name.startswith(f"{folder}/")}
        if len(mine) > 1:
            file_of = {plan: Path(name).name for name, shard in mine.items() for plan in shard}
            weight_map = {plan.name: file for plan, file in file_of.items()}
            total = sum(plan.size for plan in file_of)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            stem = _STEMS.get(folder, STEM)
            write_json(out / folder / f"{stem}.safetensors.index.json", index)
    if any(name.startswith("vision_encoder/") for name in files):
        _copy_tokenizer(layout.reasoner.root, out)
        write_json(out / "config.json", layout.reasoner.read("config.json"))
    ears = layout.optional_weights("sound_tokenizer")
    if ears is not None and any(name.startswith("sound_tokenizer/") for name in files):
        config = read_config(ears.folder / "config.json", ears.folder.parent)
        write_json(out / "sound_tokenizer/config.json", config)
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
    contents = {
        **{file: layout.config(part) for part, file in CONFIG_FILES.items()},
        "preview_decoder/config.json": checkpoint.preview and checkpoint.preview[0],
        "model_index.json": layout.model_index(),
        METADATA: {"strands_cosmos3": ours},
    }
    if quantization is not None:
        contents[CONFIG_FILES["transformer"]] |= {STATED: quantization}
    for name, content in contents.items():
        if content:
            write_json(out / name, content)


def _lerobot_files(checkpoint: Checkpoint, dtype: StoredDtype) -> dict[str, list[Planned]]:
    transformer = _planned(checkpoint.weights, dtype, "model.transformer.")
    return {
        "model.safetensors": [*transformer, *_planned(checkpoint.vae_weights, dtype, "model.vae.")]
    }


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
            write_whole(out / state, lambda unfinished: save_file(figures, unfinished))
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
    write_text(out / CONTRACT, text)


def _copy_tokenizer(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        is_tokenizer = (
            file.suffix in (".json", ".txt", ".jinja", ".model")
            and file.name not in _NOT_TOKENIZER
            and not file.name.endswith(".index.json")
        )
        if is_tokenizer and file.is_file() and file.stat().st_size < _TOKENIZER_BYTES:
            shutil.copyfile(inside(file, source), target / file.name)
