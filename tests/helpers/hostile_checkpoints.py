"""Checkpoints that somebody spoilt on purpose: each attack edits a good one, and names what the
error must say.
"""

from __future__ import annotations

import json
import os
import random
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRANSFORMER, VAE, SCHEDULER = (
    "transformer/config.json",
    "vae/config.json",
    "scheduler/scheduler_config.json",
)
METADATA, INDEX = "checkpoint.json", "transformer/diffusion_pytorch_model.safetensors.index.json"
SHARD = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
TOKENIZER, TOKENIZER_CONFIG = (
    "text_tokenizer/tokenizer.json",
    "text_tokenizer/tokenizer_config.json",
)
DEEP, HUGE = "[" * 200_000, 10**400
Attack = Callable[[Path], object]


def put(name: str, key: str, value: object) -> Attack:
    """Set a key (``a.b`` is nested) of a JSON file."""

    def attack(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        *outer, last = key.split(".")
        inner = data
        for part in outer:
            inner = inner[part]
        inner[last] = value
        (folder / name).write_text(json.dumps(data))

    return attack


def ours(key: str, value: object) -> Attack:
    return put(METADATA, f"strands_cosmos3.{key}", value)


def text(name: str, content: str) -> Attack:
    return lambda folder: (folder / name).write_text(content)


def instead(name: str, make: Callable[[Path], object]) -> Attack:
    """Replace a file by what ``make`` makes at its path."""

    def attack(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return attack


def no_file(path: Path) -> None:
    """Something that is neither a file nor a folder, and that nothing can open, so that a reader
    without a check gets an error where a pipe would block it.
    """
    os.mknod(path, stat.S_IFSOCK | 0o600)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def header(length: int, claims: int | None = None) -> Callable[[Path], object]:
    """A safetensors file with a header of that many bytes, full of tensors."""
    entry = b'"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    block = entry * 20_000

    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", length if claims is None else claims) + b"{")
            blocks = (length - 100) // len(block)
            for _ in range(blocks):
                file.write(block)
            file.write((entry[:-1] + b"}").ljust(length - 1 - blocks * len(block)))

    return make


def many_files(folder: Path) -> None:
    """An index with as many files as keys."""
    put(INDEX, "weight_map", {f"w{i}": f"{i}.safetensors" for i in range(50_000)})(folder)


ATTACKS: dict[str, tuple[Attack, str]] = {
    **{
        f"{name}: no file": (instead(name, no_file), "ordinary")
        for name in (TRANSFORMER, VAE, SCHEDULER, METADATA, INDEX)
    },
    **{
        f"{name}: loop": (instead(name, loop), name)
        for name in (TRANSFORMER, METADATA, "model_index.json", INDEX, SHARD)
    },
    **{
        f"{name}: folder": (instead(name, os.mkdir), "ordinary") for name in (TRANSFORMER, METADATA)
    },
    **{
        f"weights: {make.__name__}": (instead(SHARD, make), "no file beside it")
        for make in (no_file, os.mkdir)
    },
    "sound": (
        lambda folder: (
            put(TRANSFORMER, "sound_gen", True)(folder),
            put(TRANSFORMER, "sound_dim", "x")(folder),
        ),
        "sound_dim",
    ),
    "json of 9 MiB": (text(VAE, '{"a": "' + "x" * (9 << 20) + '"}'), "at most"),
    "layers": (put(TRANSFORMER, "num_hidden_layers", 10**6), "num_hidden_layers"),
    "layers within the limit": (put(TRANSFORMER, "num_hidden_layers", 512), "num_hidden_layers"),
    "sizes beyond memory": (put(TRANSFORMER, "hidden_size", 2**62), "hidden_size"),
    "head width": (put(TRANSFORMER, "head_dim", 33), "head_dim"),
    "rope of strings": (put(TRANSFORMER, "rope_axes_dim", ["a", "b", "c"]), "rope_axes_dim"),
    "rope_scaling list": (
        lambda f: (
            put(TRANSFORMER, "rope_axes_dim", None)(f),
            put(TRANSFORMER, "rope_scaling", [1])(f),
            put(TRANSFORMER, "head_dim", 30)(f),
        ),
        "rope_axes_dim",
    ),
    "latents_std of 0": (put(VAE, "latents_std", [0.0] * 16), "latents_std"),
    "latents_std NaN": (put(VAE, "latents_std", [float("nan")] * 16), "latents_std"),
    "latents_mean": (put(VAE, "latents_mean", [1e999] * 16), "latents_mean"),
    "a VAE of 5000 channels": (put(VAE, "base_dim", 5000), "base_dim is 5000"),
    "dim_mult of 10**5": (put(VAE, "dim_mult", [1] * 10**5), "vae/config.json"),
    "guidance NaN": (
        ours("sampling", {"num_steps": 4, "guidance_scale": float("nan"), "flow_shift": 5}),
        "guidance_scale",
    ),
    "shift infinite": (
        ours("sampling", {"num_steps": 4, "guidance_scale": 1, "flow_shift": 1e999}),
        "flow_shift",
    ),
    "steps": (
        ours("sampling", {"num_steps": 10**9, "guidance_scale": 1, "flow_shift": 5}),
        "num_steps",
    ),
    "sampling list": (ours("sampling", ["num_steps"]), "sampling"),
    "state of infinities": (
        ours("state", {"columns": "pose9_opening", "mean": [1e999] * 10, "std": [1] * 10}),
        "state",
    ),
    "policy_frames": (ours("policy_frames", 10**9), "policy_frames"),
    "prefix_rows": (ours("prefix_rows", 10**9), "prefix_rows"),
    "strands_cosmos3 list": (put(METADATA, "strands_cosmos3", []), METADATA),
    "sha256 of no file": (
        ours("sha256", {"transformer/none.safetensors": "0" * 64}),
        "none.safetensors",
    ),
    "sha256 outside": (ours("sha256", {"../../secret": "0" * 64}), "outside"),
    "sha256 with a NUL": (ours("sha256", {"transformer/a\0b": "0" * 64}), "x00b"),
    "sha256 list": (ours("sha256", {SHARD: ["0"]}), "sha256"),
    "sha256 short": (ours("sha256", {SHARD: "0"}), "sha256"),
    "name with a NUL": (put(INDEX, "weight_map", {"norm.weight": "a\0b.safetensors"}), "x00"),
    "name with escape codes": (
        put(INDEX, "weight_map", {"norm.weight": "\x1b[31m.safetensors"}),
        "x1b",
    ),
    "50,000 files": (many_files, "weight_map"),
    "header of more than 4 MiB": (instead(SHARD, header((4 << 20) + 8)), "are read"),
    "header claims 2**63": (instead(SHARD, header(1000, 2**63)), "are read"),
    "header of 4 MiB": (instead(SHARD, header(4 << 20)), SHARD.rpartition("/")[2]),
    "tokenizer: deep": (text(TOKENIZER, DEEP), "text_tokenizer"),
    "tokenizer: no file": (instead(TOKENIZER, no_file), "ordinary"),
    "tokenizer: loop": (instead(TOKENIZER, loop), "text_tokenizer"),
    "tokenizer: garbage": (
        text(TOKENIZER, '{"model": {"type": "BPE", "vocab": [], "merges": 3}}'),
        "text_tokenizer",
    ),
    "tokenizer: 33 MiB": (text(TOKENIZER, " " * (33 << 20)), "at most"),
    "tokenizer config: deep": (text(TOKENIZER_CONFIG, DEEP), "text_tokenizer"),
    "tokenizer config: list": (text(TOKENIZER_CONFIG, "[]"), "text_tokenizer"),
    "tokenizer config: class": (put(TOKENIZER_CONFIG, "tokenizer_class", ["a"]), "text_tokenizer"),
}
"""Name -> what spoils a checkpoint, and a word of the error."""
PRODUCTS: dict[str, tuple[Attack, str]] = {
    **{
        f"{name}: deep": (text(name, DEEP), name)
        for name in (TRANSFORMER, VAE, SCHEDULER, METADATA, INDEX, "model_index.json")
    },
    **{
        f"{key}: {type(value).__name__} {str(value)[:12]}": (put(TRANSFORMER, key, value), key)
        for key in (
            "hidden_size",
            "vocab_size",
            "rms_norm_eps",
            "hidden_act",
            "attention_bias",
            "rope_axes_dim",
        )
        for value in ([1], {"a": 1}, "x", HUGE)
    },
    **{
        f"vae {key} {str(value)[:12]}": (put(VAE, key, value), "vae/config.json")
        for key in (
            "base_dim",
            "num_res_blocks",
            "z_dim",
            "dim_mult",
            "patch_size",
            "latents_std",
            "scale_factor_spatial",
        )
        for value in ([[]], "x", 5000, -1, 1e999, HUGE, {"a": 1})
    },
    **{
        f"scheduler {key} {str(value)[:12]}": (
            put(SCHEDULER, key, value),
            SCHEDULER.rpartition("/")[2],
        )
        for key in ("flow_shift", "num_train_timesteps", "sigma_min", "solver_type")
        for value in (
            [1],
            "x",
            10**9 if key == "num_train_timesteps" else -1,
            float("nan"),
            1e999,
            HUGE,
        )
    },
    **{
        f"{key} {value!r:.12}": (ours(key, value), key)
        for key in (
            "variant",
            "action_space",
            "prompt_format",
            "composition",
            "resolution_tier",
            "domain",
            "state",
            "policy_frames",
        )
        for value in (["small-silu"], {"a": 1}, -5, float("nan"))
    },
}
"""The same for every pair of a key and a strange value."""

_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    10**6,
    2**63,
    1e999,
    float("nan"),
    "",
    "x\x1b\0",
    [],
    [[]],
    {},
    {"a": []},
    "../..",
)


def _json(path: Path) -> Any:
    """The contents of a JSON file that is not spoilt yet; None for any other."""
    try:
        return json.loads(path.read_text()) if path.suffix == ".json" else None
    except ValueError:
        return None


def spoil(folder: Path, rng: random.Random) -> str:
    """Spoil a file of a checkpoint at random: bytes, a value of its JSON, its length, or its
    kind. Returns what was done.
    """
    names = sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and not p.is_symlink()
    )
    name = rng.choice(names)
    path, kind = folder / name, rng.choice(("value", "value", "value", "bytes", "cut", "kind"))
    data = _json(path) if kind == "value" else None
    if data is not None:
        inner, key = data, ""
        while isinstance(inner, dict | list) and inner:
            outer, key = (
                inner,
                rng.choice(sorted(inner)) if isinstance(inner, dict) else rng.randrange(len(inner)),
            )
            inner = outer[key]
            if rng.random() < 0.3:
                break
        if key != "":
            outer[key] = rng.choice(_ODD)
        path.write_text(json.dumps(data))
        return f"{name}: {key} = {outer[key]!r:.40}" if key != "" else name
    if kind == "kind":
        instead(name, rng.choice((no_file, loop, os.mkdir)))(folder)
        return f"{name}: {kind}"
    good = bytearray(path.read_bytes())
    at = rng.randrange(min(len(good), 4000)) if good else 0
    if kind == "cut":
        path.write_bytes(good[:at])
    elif good:
        for _ in range(rng.randrange(1, 9)):
            good[rng.randrange(min(len(good), 4000))] = rng.randrange(256)
        path.write_bytes(good)
    return f"{name}: {kind} at {at}"
