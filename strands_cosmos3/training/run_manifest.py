"""Settings that a run's folder was made with: written once, compared when the run resumes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from strands_cosmos3.datasets import Dataset
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import write_json


def read_or_write(path: Path, value: Any) -> Any:
    """Return the content of a JSON file; write ``value`` first if there is none."""
    if not path.exists():
        write_json(path, value)
    return json.loads(path.read_text(encoding="utf-8"))


def keep_settings(
    path: Path,
    settings: Mapping[str, Any],
    optional: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Write settings, or raise ConfigError unless the file holds the same ones.

    An older file may lack ``optional`` names, which are not compared then, and those of
    ``defaults``, whose values it had.
    """
    now: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    recorded: dict[str, Any] = {
        **json.loads(json.dumps(dict(defaults or {}))),
        **read_or_write(path, now),
    }
    if missing := [name for name in now if name not in recorded and name not in optional]:
        raise ConfigError(
            f"{path.parent} was made by an older version, which did not record "
            f"{', '.join(missing)}; choose another folder, or "
            "continue with that version."
        )
    if unknown := [name for name in recorded if name not in now]:
        raise ConfigError(
            f"{path.parent} was made by another version, with {', '.join(unknown)}; choose "
            "another folder."
        )
    if other := [
        f"{name} {recorded[name]} (now {now[name]})"
        for name in recorded
        if recorded[name] != now[name]
    ]:
        raise ConfigError(
            f"{path.parent} holds a run with {', '.join(other)}; choose another folder, or its "
            "settings."
        )
    if len(recorded) < len(now):
        write_json(path, now)


def identity_of(dataset: Dataset) -> dict[str, Any]:
    """Return what distinguishes a dataset from others: its folder, episodes and frames."""
    return {
        "path": str(dataset.root.resolve()),
        "episodes": len(dataset),
        "frames": dataset.n_frames,
    }
