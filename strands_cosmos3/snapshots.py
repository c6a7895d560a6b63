"""Snapshots of objects that change: a copy of their fields, to which they can return."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

_CONTAINERS = (list, dict, set, deque, np.ndarray)


class Restorable:
    """An object whose fields named in ``STATE`` are all that changes, and those named in ``PARTS``,
    which have snapshots of their own or are None.

    Containers and arrays are copied; what they hold, and every other value, is shared, because it
    is replaced and never changed.
    """

    STATE: ClassVar[tuple[str, ...]] = ()
    PARTS: ClassVar[tuple[str, ...]] = ()

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the state, which stays as it is."""
        own = {name: _copied(getattr(self, name)) for name in self.STATE}
        return own | snapshot_parts(self._parts())

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a snapshot, exactly; it can be restored again."""
        for name in self.STATE:
            setattr(self, name, _copied(state[name]))
        restore_parts(self._parts(), state)

    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.PARTS}


def snapshot_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the snapshots of parts by name; that of None is None."""
    return {name: None if part is None else part.snapshot() for name, part in parts.items()}


def restore_parts(parts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Return parts to their snapshots of the same names."""
    for name, part in parts.items():
        if part is not None:
            part.restore(state[name])


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value
