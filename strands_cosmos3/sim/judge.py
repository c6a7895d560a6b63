"""Judges of an episode: whether a task's condition has held for long enough."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import mujoco


class Judge(ABC):
    """Judges one episode: a condition must hold without a break for ``hold_s``.

    A subclass may keep what happened so far in fields of its own; :meth:`restart` forgets it.
    """

    def __init__(self, hold_s: float):
        self.hold_s = hold_s
        self._now_s = -float("inf")
        self._since_s: float | None = None

    @abstractmethod
    def holds(self, data: mujoco.MjData) -> bool:
        """Add the state after the last physics step; return whether the condition holds."""

    def restart(self) -> None:  # noqa: B027 - most conditions have no history
        """Forget what happened so far."""

    def succeeded(self, data: mujoco.MjData) -> bool:
        """Return whether the condition has held for long enough; call it at every tick.

        A clock that goes back starts a new episode.
        """
        now_s = float(data.time)
        if now_s < self._now_s:
            self.restart()
            self._since_s = None
        self._now_s = now_s
        if not self.holds(data):
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= self.hold_s - 1e-9

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of what happened so far."""
        return copy.deepcopy(vars(self))

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a snapshot."""
        vars(self).update(copy.deepcopy(state))
