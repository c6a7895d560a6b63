"""What a run's folder was begun with: written once, and held against what is asked when it is gone on from."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from strands_cosmos3.datasets import Dataset
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_json


def keep(path: Path, value: Any) -> Any:
    """What was written first: ``value``, or what is there already."""
    if not path.exists():
        write_json(path, value)
    return json.loads(path.read_text(encoding="utf-8"))


def keep_settings(path: Path, settings: Mapping[str, Any], free: Collection[str] = ()) -> None:
    """Write settings, or hold those that are there against them.

    Args:
        path: The file.
        settings: What is asked for.
        free: Names that an older version's file may lack, because nothing that they decide was made yet.

    Raises:
        ConfigError: The folder holds a run with other settings, or of a version that recorded fewer or other ones.
    """
    asked: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    known: dict[str, Any] = keep(path, asked)
    lacking = [name for name in asked if name not in known and name not in free]
    if lacking:
        raise ConfigError(
            f"{path.parent} was made by an older version, which did not record {', '.join(lacking)}; choose another folder, or "
            "go on with that version."
        )
    strange = [name for name in known if name not in asked]
    if strange:
        raise ConfigError(f"{path.parent} was made by another version, with {', '.join(strange)}; choose another folder.")
    other = [f"{name} {known[name]} (now {asked[name]})" for name in known if known[name] != asked[name]]
    if other:
        raise ConfigError(f"{path.parent} holds a run with {', '.join(other)}; choose another folder, or its settings.")
    if len(known) < len(asked):
        write_json(path, asked)


def identity_of(dataset: Dataset) -> dict[str, Any]:
    """What tells a dataset from another: its folder, episodes and frames."""
    return {"path": str(dataset.root.resolve()), "episodes": len(dataset), "frames": dataset.n_frames}
