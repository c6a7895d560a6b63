"""Snapshots of objects that change: a copy of their fields, to which they can return."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any, ClassVar

import numpy as np

_CONTAINERS = (list, dict, set, deque, np.ndarray)


class Restorable:
    """An object whose fields named in ``STATE`` are all that changes.

    Containers and arrays are copied; what they hold, and every other value, is shared, because it
    is replaced and never changed.
    """

    STATE: ClassVar[tuple[str, ...]] = ()

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the state, which stays as it is."""
        return {name: _copied(getattr(self, name)) for name in self.STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a snapshot, exactly; it can be restored again."""
        for name in self.STATE:
            setattr(self, name, _copied(state[name]))


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value
