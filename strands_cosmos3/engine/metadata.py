"""Contents of ``checkpoint.json`` and their checks. :mod:`.checkpoint` lists the keys.

A checkpoint of this project may record ``"state": {"columns": "pose9_opening", "mean": [10], "std":
[10]}``; released ones have none. Its action sequence then starts, at temporal offset 0, with the
measured pose of the Cosmos frame in the robot's base (translation [m], rot6d) and the gripper's
open fraction, centred and scaled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import finite_array
from strands_cosmos3.engine.formats.contract import FIELDS, OPTIONAL, Field, one_of, whole_from
from strands_cosmos3.engine.weight_files import inside, read_config
from strands_cosmos3.errors import InputError, LayoutError
from strands_cosmos3.resources import load_json, require_file, shown, write_json

COLUMNS = "pose9_opening"
STATE_COLUMNS = ("x_m", "y_m", "z_m", *(f"r{i}" for i in range(6)), "gripper (1 = open)")
WIDTH = len(STATE_COLUMNS)


@dataclass(frozen=True)
class StateRow:
    """Scale of the state row, (state - mean) / std; raises LayoutError unless both are ten
    finite numbers, std above zero.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        try:
            _, std = finite_array((self.mean, self.std), "state", (2, WIDTH))
        except InputError:
            std = np.zeros(WIDTH)
        if (std <= 0).any():
            raise LayoutError(
                f"state: mean and std must be {WIDTH} finite numbers each, std above "
                f"zero; got {shown(self)}."
            )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> StateRow | None:
        """The state row that a checkpoint records, or None; raises LayoutError if the record is
        not valid.
        """
        record = metadata.get("state")
        if record is None:
            return None
        try:
            columns, mean, std = (record[name] for name in ("columns", "mean", "std"))
            if columns == COLUMNS:
                return cls(tuple(mean), tuple(std))
        except (KeyError, TypeError, ValueError):
            pass
        raise LayoutError(
            f"checkpoint.json: state must have columns {COLUMNS!r} with mean and std, ten numbers "
            f"each, got {shown(record)}."
        )

    def to_metadata(self) -> dict[str, Any]:
        """The record for ``checkpoint.json``."""
        return {"columns": COLUMNS, "mean": list(self.mean), "std": list(self.std)}

    def scaled(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows in the model's scale from states [..., 10]: metres, rot6d, open fraction."""
        return (state - np.array(self.mean)) / np.array(self.std)


METADATA = "checkpoint.json"
_SHA256 = re.compile("[0-9a-f]{64}")


def _count(most: int) -> Field:
    return whole_from(1, most), f"a whole number of at least 1, at most {most}"


RECORDED: Mapping[str, Field] = {
    **FIELDS,
    **OPTIONAL,
    "dynamics_prompt": one_of("empty", "instruction"),
    "dynamics_start": one_of("noise", "frame"),
    "future_mode": one_of("policy", "forward_dynamics"),
    "replan_rows": _count(10_000),
    "prefix_rows": _count(10_000),
    "dynamics_steps": _count(1000),
    "novelty_rmse": (
        lambda value: type(value) in (int, float) and 0 < value <= 1,
        "a number above 0, at most 1",
    ),
}
"""Field -> its check, and its valid values in words; ``state``, ``language`` and ``sha256`` are
checked apart.
"""


def write_metadata(root: Path, fields: Mapping[str, Any]) -> None:
    """Record fields in ``checkpoint.json`` beside those that it has; None removes one."""
    path = root / METADATA
    content = load_json(path) if path.exists() else {}
    ours = {**content.get("strands_cosmos3", {}), **fields}
    recorded = {name: value for name, value in ours.items() if value is not None}
    write_json(path, {**content, "strands_cosmos3": recorded})


def read_metadata(root: Path) -> Mapping[str, Any]:
    """The ``strands_cosmos3`` object of ``checkpoint.json``, empty if there is none; raises
    LayoutError for invalid values.
    """
    if not os.path.lexists(root / METADATA):
        return {}
    fields = read_config(root / METADATA, root).get("strands_cosmos3", {})
    if not isinstance(fields, dict):
        raise _invalid("strands_cosmos3", fields, "an object")
    for name, (is_valid, words) in RECORDED.items():
        if fields.get(name) is not None and not is_valid(fields[name]):
            raise _invalid(name, fields[name], words)
    recorded = fields.get("sha256") or {}
    if not isinstance(recorded, dict):
        raise _invalid("sha256", recorded, "an object of file -> digest")
    for name, digest in recorded.items():
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise _invalid(f"sha256 of {shown(name)}", digest, "64 lower-case hexadecimal digits")
        hint = f"{METADATA} records its sha256; download it again."
        require_file(inside(root / name, root), LayoutError, hint=hint)
    return fields


def _invalid(name: str, value: object, words: str) -> LayoutError:
    return LayoutError(
        f"{METADATA}: {name} must be {words}, got {shown(value)}. Correct it, or download it again."
    )
