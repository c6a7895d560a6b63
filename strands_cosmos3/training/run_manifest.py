"""Settings that a run's folder was made with: written once, compared when the run resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strands_cosmos3.checks import differences
from strands_cosmos3.datasets import Dataset
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import load_json, write_json


def keep_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write settings, or raise ConfigError unless the file holds the same ones."""
    now: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    if not path.exists():
        write_json(path, now)
    recorded = load_json(path)
    if other := differences(recorded, now, "{} {} (now {})"):
        raise ConfigError(
            f"{path.parent} holds a run with {', '.join(other)}; choose another "
            "folder, or its settings."
        )


def identity_of(dataset: Dataset) -> dict[str, Any]:
    """Return what distinguishes a dataset from others: its folder, episodes and frames."""
    return {
        "path": str(dataset.root.resolve()),
        "episodes": len(dataset),
        "frames": dataset.n_frames,
    }
