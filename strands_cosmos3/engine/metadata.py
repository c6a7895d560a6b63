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

from strands_cosmos3.embodiments import Sampling
from strands_cosmos3.engine.formats.contract import FIELDS, SAMPLING
from strands_cosmos3.engine.variants import VARIANTS
from strands_cosmos3.engine.weight_files import inside, read_config
from strands_cosmos3.errors import LayoutError, ShapeError
from strands_cosmos3.observe.views import TIERS
from strands_cosmos3.resources import require_file, shown

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
        figures = (
            np.array([self.mean, self.std], dtype=np.float64)
            if len(self.mean) == len(self.std) == WIDTH
            else None
        )
        if figures is None or not np.isfinite(figures).all() or (figures[1] <= 0).any():
            raise LayoutError(
                f"state: mean and std must be {WIDTH} finite numbers each, std above zero; got "
                f"{shown(self)}."
            )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> StateRow | None:
        """The state row that a checkpoint records, or None; raises LayoutError if the record is
        not valid.
        """
        found = metadata.get("state")
        if found is None:
            return None
        if not isinstance(found, Mapping) or found.get("columns") != COLUMNS:
            raise LayoutError(
                f"checkpoint.json: state must have columns {COLUMNS!r} with mean and std, got "
                f"{shown(found)}."
            )
        try:
            return cls(tuple(map(float, found["mean"])), tuple(map(float, found["std"])))
        except (KeyError, TypeError, ValueError):
            raise LayoutError(
                "checkpoint.json: state must have mean and std, ten numbers each."
            ) from None

    def to_metadata(self) -> dict[str, Any]:
        """The record for ``checkpoint.json``."""
        return {"columns": COLUMNS, "mean": list(self.mean), "std": list(self.std)}

    def scaled(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows in the model's scale from states [..., 10]: metres, rot6d, open fraction. Raises
        ShapeError for other widths.
        """
        state = np.asarray(state, dtype=np.float64)
        if state.shape[-1:] != (WIDTH,):
            raise ShapeError(
                f"a state has {WIDTH} columns (translation, rot6d, open fraction), got "
                f"{list(state.shape)}."
            )
        return (state - np.array(self.mean)) / np.array(self.std)


METADATA = "checkpoint.json"
_MOST = {
    "policy_frames": 1000,
    "replan_rows": 10_000,
    "prefix_rows": 10_000,
    "dynamics_steps": 1000,
}
_NAMES = {
    "variant": tuple(VARIANTS),
    "action_space": ("joint_pos", "midtrain"),
    "prompt_format": ("plain", "json"),
    "composition": ("letterbox", "framework"),
    "dynamics_prompt": ("empty", "instruction"),
    "dynamics_start": ("noise", "frame"),
    "future_mode": ("policy", "forward_dynamics"),
}
CONTRACT_FIELDS = ("width", "chunk", "fps", "normalization", "statistics", "gripper", "views")
_SHA256 = re.compile("[0-9a-f]{64}")


def read_metadata(root: Path) -> Mapping[str, Any]:
    """The ``strands_cosmos3`` object of ``checkpoint.json``, empty if there is none; raises
    LayoutError for invalid values.
    """
    if not os.path.lexists(root / METADATA):
        return {}
    found = read_config(root / METADATA, root).get("strands_cosmos3", {})
    if not isinstance(found, dict):
        raise _invalid("strands_cosmos3", found, "an object")
    for name, valid in _NAMES.items():
        if found.get(name) is not None and found[name] not in valid:
            raise _invalid(name, found[name], f"one of {', '.join(valid)}")
    if found.get("domain") is not None and not FIELDS["domain"][0](found["domain"]):
        raise _invalid("domain", found["domain"], "an embodiment's name")
    tier = found.get("resolution_tier")
    if tier is not None and (
        isinstance(tier, bool) or not isinstance(tier, int) or tier not in TIERS
    ):
        raise _invalid("resolution_tier", tier, f"one of {', '.join(map(str, TIERS))}")
    for name in CONTRACT_FIELDS:
        if found.get(name) is not None and not FIELDS[name][0](found[name]):
            raise _invalid(name, found[name], FIELDS[name][1])
    _require_files(root, found.get("sha256"))
    return found


def _require_files(root: Path, recorded: Any) -> None:
    """Require that recorded digests are digests, of files inside the checkpoint."""
    if not isinstance(recorded, dict | None):
        raise _invalid("sha256", recorded, "an object of file -> digest")
    for name, digest in (recorded or {}).items():
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise _invalid(f"sha256 of {shown(name)}", digest, "64 lower-case hexadecimal digits")
        require_file(
            inside(root / name, root),
            LayoutError,
            hint=f"{METADATA} records its sha256; download it again.",
        )


def read_sampling(metadata: Mapping[str, Any]) -> Sampling | None:
    """The recorded preset, or None; raises LayoutError if it is incomplete or out of range."""
    found = metadata.get("sampling")
    if found is None:
        return None
    figures: list[Any] = [found.get(name) for name in SAMPLING] if isinstance(found, dict) else []
    if not FIELDS["sampling"][0](dict(zip(SAMPLING, figures, strict=False))):
        raise _invalid("sampling", found, FIELDS["sampling"][1])
    steps, guidance, shift = figures
    return Sampling(steps, float(guidance), float(shift))


def read_policy_frames(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The recorded clip lengths, the default first; empty if there are none."""
    found = metadata.get("policy_frames", [])
    choices = found if isinstance(found, list) else [found]
    if not all(_count("policy_frames", n) for n in choices):
        raise _invalid(
            "policy_frames", found, f"whole numbers of at least 1, at most {_MOST['policy_frames']}"
        )
    return tuple(choices)


def read_count(metadata: Mapping[str, Any], name: str) -> int | None:
    """A recorded number of rows or steps, or None."""
    found = metadata.get(name)
    if found is not None and not _count(name, found):
        raise _invalid(name, found, f"a whole number of at least 1, at most {_MOST[name]}")
    return found


def read_novelty(metadata: Mapping[str, Any]) -> float | None:
    """The recorded 99.9 % quantile of the reconstruction's RMS error on validation pictures, in
    0..1, or None.
    """
    found = metadata.get("novelty_rmse")
    if found is not None and not (type(found) in (int, float) and 0 < found <= 1):
        raise _invalid("novelty_rmse", found, "a number above 0, at most 1")
    return found


def _count(name: str, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST[name]


def _invalid(name: str, found: object, wanted: str) -> LayoutError:
    return LayoutError(
        f"{METADATA}: {name} must be {wanted}, got {shown(found)}. Correct it, or download it "
        "again."
    )
