"""Report on a checkpoint and on missing fields, from its configs and headers alone:
``strands-cosmos3 checkpoint inspect``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.formats.acting import rehearse
from strands_cosmos3.engine.formats.contract import (
    FIELDS,
    OPTIONAL,
    checked,
    merged,
    missing,
    template,
)
from strands_cosmos3.engine.formats.detect import open_layout
from strands_cosmos3.engine.preflight import available_bytes, memory_forms, needed_bytes
from strands_cosmos3.engine.senses import (
    lacking_senses,
    reasoner_bytes,
    text_keys,
    vision_encoder,
)
from strands_cosmos3.engine.sound import sound_bytes
from strands_cosmos3.engine.variants import VARIANTS
from strands_cosmos3.engine.weight_files import SIZES, WeightSource
from strands_cosmos3.errors import CheckpointError, Cosmos3Error, InputError

_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")
_SHOWN = 20


def inspect(
    path: Path, base: str | Path | None = None, contract: Path | None = None
) -> dict[str, Any]:
    """Describe a checkpoint as a JSON object; nothing is loaded, and nothing outside its folders is
    read.

    Returns:
        ``verdict``: ``ready`` to load and act, ``needs a contract`` to act, or the error's class if
            it does not load or act;
        ``problem``, its message; ``format``, ``folder``, ``base``, ``parts``, ``memory_gib``,
        ``contract``, ``licences``.

    Raises:
        ConfigError: The arguments contradict each other.
    """
    report: dict[str, Any] = {"verdict": "ready", "folder": str(path)}
    try:
        layout = open_layout(path, base, contract)
        report |= {
            "format": layout.format,
            "folder": str(layout.root),
            "base": None if layout.base is None else str(layout.base.root),
            "licences": sorted(
                file.name for pattern in _LICENCES for file in layout.root.glob(pattern)
            ),
        }
        checkpoint = Checkpoint.open(layout)
        checkpoint.action_stats()
        lacking = missing(checkpoint.metadata)
        if not checkpoint.needs_contract:  # the rest follows from its variant
            lacking = ("action_space",) * ("action_space" in lacking)
        report |= _described(checkpoint, lacking)
    except (CheckpointError, InputError) as error:
        return report | _refusal(error)
    if lacking:
        return report | {"verdict": "needs a contract"}
    try:
        rehearse(checkpoint)
    except Cosmos3Error as error:
        return report | _refusal(error)
    return report


def _refusal(error: Cosmos3Error) -> dict[str, str]:
    return {"verdict": type(error).__name__, "problem": str(error)}


def contract_of(
    path: Path,
    base: str | Path | None = None,
    contract: Path | None = None,
    policy_frames: int | None = None,
) -> str:
    """The contract file to fill in for a checkpoint.

    Args:
        policy_frames: Frames of a policy's clip, which the file then states.

    Raises:
        CheckpointError: The folder cannot be read.
        ContractError: No policy of this checkpoint can have so many frames, or it states others.
    """
    layout = open_layout(path, base, contract)
    metadata = layout.metadata()
    if policy_frames is not None:
        flag = "--policy-frames"
        stated = checked({"policy_frames": policy_frames}, flag)
        sources = [(str(layout.root), metadata), (flag, stated)]
        metadata = merged(sources, str(layout.root), foreign=False)
    return template(metadata, layout.root, None if layout.base is None else str(layout.base.root))


def _described(checkpoint: Checkpoint, lacking: tuple[str, ...]) -> dict[str, Any]:
    metadata = checkpoint.metadata
    weights = checkpoint.weights
    variant = checkpoint.variant
    layout = checkpoint.layout
    skipped = layout.skipped
    text = text_keys(checkpoint)
    optional = {
        "vision encoder": vision_encoder(checkpoint),
        "sound tokenizer": layout.optional_weights("sound_tokenizer"),
    }
    senses = lacking_senses(checkpoint)
    forms = memory_forms(partial(needed_bytes, checkpoint), checkpoint.config)
    if not senses["eyes"]:
        forms["bfloat16 for ask alone"] = reasoner_bytes(checkpoint, torch.bfloat16)
    if not senses["ears"]:
        hears = partial(sound_bytes, checkpoint)
        forms["bfloat16 with sound"] = needed_bytes(checkpoint, torch.bfloat16, sound=hears)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "variant": variant.name
        if variant.repo_id
        else _sizes_of(checkpoint.config) or variant.name,
        "parts": {
            "text tower": _part(weights, sorted(text)),
            "generation tower": _part(weights, sorted(weights.shapes.keys() - text)),
            "VAE": _part(checkpoint.vae_weights, checkpoint.vae_weights.shapes),
            **{
                name: _part(source, source.shapes)
                for name, source in optional.items()
                if source is not None
            },
        },
        "senses": senses,
        "skipped": {"weights": len(skipped), "names": list(skipped[:_SHOWN])},
        "quantised": _quantised(checkpoint),
        "memory_gib": {name: round(size / 2**30, 2) for name, size in forms.items()},
        "free_gib": round(available_bytes(device) / 2**30, 2),
        "contract": {
            name: metadata[name] for name in (*FIELDS, *OPTIONAL) if metadata.get(name) is not None
        },
        "missing": list(lacking),
    }


def _part(weights: WeightSource, keys: Iterable[str]) -> dict[str, Any]:
    stored = Counter[str]()
    numbers = 0
    size = 0
    for key in keys:
        small = weights.eight_bit
        dtype = small.dtype if small and key in small.scales else weights.dtypes[key]
        count = math.prod(weights.shapes[key])
        stored[dtype] += 1
        numbers += count
        size += count * SIZES.get(dtype, 0)
    return {
        "tensors": stored.total(),
        "numbers": numbers,
        "gib": round(size / 2**30, 3),
        "dtypes": dict(stored),
    }


def _quantised(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What is stored in 8 bits, with its bytes, and how it runs; None if nothing is."""
    stored = checkpoint.weights.eight_bit
    if stored is None:
        return None
    runs = "products are in 8 bits at every step"
    if stored.weights_only:
        runs = "weights alone, every step in W8A16"
    if (policy := stored.policy) is not None:
        runs = (
            f"the first {policy.first_steps} and the last {policy.last_steps} steps in W8A16 "
            f"(both at once: {policy.overlap}), others in W8A8; the text tower {policy.reasoner}"
        )
    size = sum(math.prod(checkpoint.weights.shapes[name]) for name in stored.scales)
    return {
        "stored": stored.family,
        "weights": len(stored.scales),
        "gib": round(size / 2**30, 3),
        "runs": runs,
    }


def _sizes_of(config: TransformerConfig) -> str | None:
    """Names of the released models that have these sizes; they say nothing of what was trained
    since.
    """
    fitting = [
        variant.name
        for variant in VARIANTS.values()
        if variant.repo_id
        and variant.action_space == "midtrain"
        and not variant.differences(config)
    ]
    return f"unnamed, sizes of {' or '.join(fitting)}" if fitting else None


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """A report as lines of text."""
    heads = {"verdict": "verdict", "problem": ""} | {
        name: name for name in ("format", "folder", "base", "variant")
    }
    lines = [f"{head:<11}{report[name]}" for name, head in heads.items() if report.get(name)]
    for name, part in report.get("parts", {}).items():
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in part["dtypes"].items())
        text = "{tensors:>5} tensors {numbers:>15,} numbers {gib:>9} GiB  ".format_map(part)
        lines.append(f"{name:<18}{text}{dtypes}")
    for name, lacking in report.get("senses", {}).items():
        verdict = f"no: it lacks {', '.join(lacking)}" if lacking else "yes"
        lines.append(f"{name:<11}{verdict}")
    if (skipped := report.get("skipped", {})).get("weights"):
        text = "skipped    {weights} that inference does not read, e.g. {names[0]}"
        lines.append(text.format_map(skipped))
    if "memory_gib" in report:
        if (small := report["quantised"]) is not None:
            text = "8 bits     {weights} weights in {stored}, {gib} GiB; {runs}"
            lines.append(text.format_map(small))
        needed = ", ".join(f"{name} {gib} GiB" for name, gib in report["memory_gib"].items())
        free = f"{report['free_gib']} GiB are free here"
        lines.append(f"memory     about {needed}, without the VAE's decoder; {free}")
    for name, value in report.get("contract", {}).items():
        text = "(figures in the folder)" if isinstance(value, Mapping) else value
        lines.append(f"contract   {name} = {text}")
    if report.get("missing"):
        lines.append(f"missing    {', '.join(report['missing'])}")
    if "sha256" in report:
        lines.append(f"sha256     {report['sha256']}, of every byte")
    if "format" in report:
        lines.append(f"licence    {', '.join(report['licences']) or 'no file in the folder'}")
    return lines
