"""Results of ``golden.py``: what a case wrote, without clock and paths, and the comparison."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

NAMES = tomllib.loads(Path(__file__).with_name("golden_names.toml").read_text())
LEFT_OUT = {*NAMES["clock"], *NAMES["dropped"]}
RENAMED: Mapping[str, str] = NAMES["renamed"]
UNREAD = ("run.json", ".lock", ".html", ".log", "MUJOCO_LOG.TXT")
UNSTEADY = ("answer.mp4",)
"""Films whose bytes vary: x264 encodes the same small frames of ``infer`` anew in each run."""
ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """The first value that differs between two results."""

    name: str
    index: tuple[int, ...]
    base: Any
    head: Any
    largest: float | None = None  # absolute difference anywhere in the array

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        largest = "" if self.largest is None else f", largest difference {self.largest:.3g}"
        return f"{self.name}{place}: {self.base!r} and {self.head!r}{largest}"


def compare(
    base: Mapping[str, Any], head: Mapping[str, Any], tolerance_rad: float = 0.0
) -> Difference | None:
    """Return the first difference of two results, or None if they are equal.

    Results are numbers, texts and arrays by name. The tolerance is for floating-point numbers.
    """
    for name in {**base, **head}:
        if name not in base or name not in head:
            return Difference(name, (), base.get(name, ABSENT), head.get(name, ABSENT))
        a = np.asarray(base[name])
        b = np.asarray(head[name])
        if a.dtype != b.dtype and not a.dtype.kind == b.dtype.kind == "U":
            return Difference(f"{name} (type)", (), str(a.dtype), str(b.dtype))
        if a.shape != b.shape:
            return Difference(f"{name} (shape)", (), a.shape, b.shape)
        equal = _equal(name, a, b, tolerance_rad)
        if not equal.all():
            index = tuple(map(int, np.argwhere(~equal)[0])) if a.ndim else ()
            return Difference(name, index, a[index].tolist(), b[index].tolist(), _largest(a, b))
    return None


def _equal(name: str, a: np.ndarray, b: np.ndarray, tolerance_rad: float) -> np.ndarray:
    """Return where two arrays of one type and shape are equal; NaN equals NaN."""
    equal = np.asarray(a == b)
    if a.dtype.kind != "f":
        return equal
    equal |= np.isnan(a) & np.isnan(b)
    if tolerance_rad > 0:
        # A thousandth of a radian moves the tip of an arm of a metre by 1 mm.
        angles = re.search(r"_rad\b|joint", name)
        allowed = tolerance_rad if angles else 1e3 * tolerance_rad * np.maximum(1.0, np.abs(a))
        with np.errstate(invalid="ignore"):  # infinities
            equal |= np.abs(a - b) <= allowed
    return equal


def _largest(a: np.ndarray, b: np.ndarray) -> float | None:
    if a.dtype.kind not in "fiub":
        return None
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.astype(float) - b.astype(float))
    return None if np.isnan(apart).all() else float(np.nanmax(apart))


def read_results(folder: Path, paths: Mapping[str, str]) -> dict[str, Any]:
    """Return what a case wrote, by name: leaves of JSON, texts, arrays, digests of the rest.

    ``paths`` maps a tree's own folders to words that stand for them in both trees' texts.
    """
    results: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file() or name.endswith(UNREAD):
            continue
        if path.suffix == ".json":
            results |= leaves(json.loads(path.read_text()), name, paths)
        elif path.suffix == ".toml":
            results |= leaves(path.read_text(), name, paths)
        elif path.suffix == ".npz":
            with np.load(path) as arrays:
                results |= {f"{name}:{key}": arrays[key] for key in arrays.files}
        elif path.suffix == ".safetensors":
            for key, tensor in load_file(path).items():
                data = tensor.reshape(-1).view(torch.uint8).numpy()
                digest = hashlib.sha256(data).hexdigest()
                results[f"{name}:{key}"] = f"{tensor.dtype} {list(tensor.shape)} {digest}"
        else:
            digest = "" if name in UNSTEADY else hashlib.sha256(path.read_bytes()).hexdigest()
            results[f"{name} (SHA-256)"] = digest
    return results


def leaves(value: Any, name: str, paths: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of JSON with their names, without the keys that golden_names.toml leaves
    out.
    """
    if isinstance(value, dict) and value:
        for old_key, part in value.items():
            key = RENAMED.get(old_key, old_key)
            if key not in LEFT_OUT and not (key == "instruction" and ".rows." in name):
                yield from leaves(part, f"{name}.{key}", paths)
    elif isinstance(value, list) and value and all(isinstance(part, float) for part in value):
        yield name, np.array(value)
    elif isinstance(value, list):
        yield f"{name} (length)", len(value)
        for i, part in enumerate(value):
            yield from leaves(part, f"{name}.{i}", paths)
    elif isinstance(value, str):
        for path, word in paths.items():
            value = value.replace(path, word)
        yield name, RENAMED.get(value, value)
    else:
        yield name, value if isinstance(value, bool | int | float) else json.dumps(value)
