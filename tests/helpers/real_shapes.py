"""Checkpoints of the released models' real shapes in every format: but for their headers, the
files are holes.
"""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as Stored

from helpers.checkpoint_formats import VISION, framework_name, write_json
from recipes.random_checkpoint import (
    LAYOUT,
    FactorySizes,
    fresh_vae,
    transformer_config,
    write_tokenizer,
)
from strands_cosmos3.engine.variants import VARIANTS
from strands_cosmos3.engine.weight_files import STEM

SHARD_BYTES = 5 << 30
BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
Shapes = Mapping[str, tuple[int, ...]]


def real_config(kind: str) -> dict[str, Any]:
    """``transformer/config.json`` of ``edge``, of ``nano``, or of ``nano-sound``."""
    sizes = VARIANTS[kind.removesuffix("-sound")].sizes
    hidden, layers, heads, kv_heads, intermediate, vocab = (sizes[name] for name in list(sizes)[:6])
    made = FactorySizes(hidden, layers, heads, kv_heads, 128, intermediate, 48)  # type: ignore[arg-type]
    data = transformer_config(made, sizes["hidden_act"], vocab)  # type: ignore[arg-type]
    return data | ({"sound_gen": True, "sound_dim": 64} if kind.endswith("-sound") else {})


def vae_parts() -> tuple[dict[str, Any], Shapes]:
    """Config and shapes of Wan 2.2's VAE."""
    with torch.device("meta"):
        vae = fresh_vae(160, 256, 48)
    return dict(vae.config), {name: tuple(w.shape) for name, w in vae.state_dict().items()}


def hollow(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], ones: tuple[str, ...] = ()
) -> None:
    """A safetensors file of tensors, name -> (dtype, shape), that are zero; single numbers named
    ``ones`` are 1.
    """
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
        for name in ones:
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(b"\x00\x00\x80\x3f")


def hollow_shards(
    folder: Path, stem: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """The same in several files with an index."""
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, (dtype, shape) in tensors.items():
        size += math.prod(shape) * BYTES[dtype]
        if size > SHARD_BYTES:
            shards, size = [*shards, {}], 0
        shards[-1][name] = dtype, shape
    files = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        hollow(folder / file, shard, tuple(name for name in shard if name.endswith("_scale")))
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    write_json(folder / f"{stem}.safetensors.index.json", {"weight_map": weight_map})


def bf16(shapes: Shapes, prefix: str = "") -> dict[str, tuple[str, tuple[int, ...]]]:
    return {f"{prefix}{name}": ("BF16", shape) for name, shape in shapes.items()}


def released(folder: Path, kind: str, shapes: Shapes) -> Path:
    """The released layout."""
    write_json(folder / "transformer/config.json", real_config(kind))
    hollow_shards(folder / "transformer", STEM, bf16(shapes))
    config, vae = vae_parts()
    write_json(folder / "vae/config.json", config)
    hollow(
        folder / f"vae/{STEM}.safetensors", {name: ("F32", shape) for name, shape in vae.items()}
    )
    shutil.copytree(LAYOUT, folder, dirs_exist_ok=True)
    write_tokenizer(folder / "text_tokenizer")
    return folder


def export(folder: Path, kind: str, shapes: Shapes) -> Path:
    """cosmos-framework's export."""
    vision = (
        {} if kind == "edge" else {name: ("BF16", tuple(w.shape)) for name, w in VISION.items()}
    )
    hollow_shards(
        folder,
        "model",
        bf16({framework_name(name): s for name, s in shapes.items()}, "model.net.") | vision,
    )
    target = "Nemotron3DenseVLTextForCausalLM" if kind == "edge" else "Qwen3VLTextForCausalLM"
    config = {"max_action_dim": 64, "vlm_config": {"model_instance": {"_target_": target}}}
    write_json(
        folder / "config.json",
        {"model_type": "cosmos3_omni", "model": {"_target_": "a.OmniMoTModel", "config": config}},
    )
    write_json(folder / "checkpoint.json", {})
    return folder


def lerobot(folder: Path, kind: str, shapes: Shapes) -> Path:
    """A LeRobot policy: one file."""
    config, vae = vae_parts()
    both = {f"model.transformer.{name}": s for name, s in shapes.items()} | {
        f"model.vae.{name}": s for name, s in vae.items()
    }
    hollow(folder / "model.safetensors", bf16(both))
    configs = {
        "transformer_config": real_config(kind),
        "vae_config": config,
        "scheduler_config": json.loads((LAYOUT / "scheduler/scheduler_config.json").read_text()),
    }
    write_json(folder / "config.json", {"type": "cosmos3", **configs})
    write_tokenizer(folder / "text_tokenizer")
    return folder


def dcp(folder: Path, kind: str, shapes: Shapes) -> Path:
    """A run of the framework's trainer: every tensor in two blocks, on two ranks."""
    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    ends = [0, 0]
    for name, shape in shapes.items():
        fqn, chunks, rows = f"net_ema.{framework_name(name)}", [], max(1, shape[0] // 2)
        for rank, (start, stop) in enumerate(((0, rows), (rows, shape[0]))):
            if start == stop:
                continue
            offsets, sizes = (start, *[0] * (len(shape) - 1)), (stop - start, *shape[1:])
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            length = math.prod(sizes) * 2 + 1000
            places[MetadataIndex(fqn, torch.Size(offsets), rank)] = _StorageInfo(
                f"__{rank}_0.distcp", ends[rank], length
            )
            ends[rank] += length
        tensors[fqn] = Stored(TensorProperties(torch.bfloat16), torch.Size(shape), chunks)
    folder.mkdir()
    for rank, end in enumerate(ends):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(end)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, storage_data=places)))
    return folder


def fp8(folder: Path, kind: str, shapes: Shapes) -> Path:
    """ModelOpt's FP8."""
    released(folder, kind, shapes)
    for old in (folder / "transformer").glob(f"{STEM}*"):
        old.unlink()
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if "self_attn.to_" in name or "proj.weight" in name:
            stored |= {
                name: ("F8_E4M3", shape),
                f"{name}_scale": ("F32", ()),
                name.replace(".weight", ".input_scale"): ("F32", ()),
            }
        else:
            stored[name] = "BF16", shape
    hollow_shards(folder / "transformer", STEM, stored)
    write_json(folder / "hf_quant_config.json", {"quant_method": "modelopt", "quant_algo": "FP8"})
    return folder


def adapter(folder: Path, kind: str, shapes: Shapes) -> Path:
    """LoRA factors of rank 16 on every MLP of the generation tower, and its attention and the
    action heads whole.
    """
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if "mlp_moe_gen" in name:
            stem = framework_name(name).removesuffix(".weight")
            stored[f"{stem}.lora_A.weight"], stored[f"{stem}.lora_B.weight"] = (
                ("F32", (16, shape[1])),
                ("F32", (shape[0], 16)),
            )
        elif name.startswith("action_") or "add_q_proj" in name:
            stored[framework_name(name)] = "BF16", shape
    hollow(folder / "delta.safetensors", stored)
    write_json(folder / "lora_config.json", {"r": 16, "lora_alpha": 32})
    return folder


ALL = {
    "released": released,
    "export": export,
    "lerobot": lerobot,
    "dcp": dcp,
    "fp8": fp8,
    "adapter": adapter,
}
