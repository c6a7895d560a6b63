"""Refuse config files that describe another computation than the engine's.

Released files state more than the engine reads. A field that is listed in ``computed.toml`` must
say what the engine computes, otherwise the weights would be run as another model. All other fields
that are not read are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strands_cosmos3.errors import CheckpointError, LayoutError
from strands_cosmos3.resources import shown
from strands_cosmos3.tables import as_tuples, read_toml

_TABLES = read_toml(Path(__file__).with_suffix(".toml"))


def require_computed(
    file: str,
    stated: Mapping[str, Any],
    config: object = None,
    where: object = None,
    refusal: type[CheckpointError] = LayoutError,
) -> None:
    """Raise ``refusal`` if a config states a computation that the engine does not do.

    Args:
        file: Name of the config in the released layout.
        stated: Its contents. Fields that are None are not stated.
        config: What was read of it; a field of the table may have to equal one of its fields.
        where: Name of the file for the message, if it has another one.
    """
    wrong = []
    for name, computed in _TABLES[file].items():
        value: Any = stated
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        valid = [getattr(config, computed)] if isinstance(computed, str) else computed
        if value is not None and as_tuples(value) not in as_tuples(valid):
            words = " or ".join(map(repr, valid)) or "none"
            wrong.append(f"{name} is {shown(value)}, the engine computes {words}")
    if wrong:
        raise refusal(
            f"{where or file}: {'; '.join(wrong)}. Take the file from the release of these "
            "weights, or run them with the code that trained them."
        )
