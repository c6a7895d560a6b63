"""Monitors: what is noticed in an inference, by name; it is counted, and warned of.

A score is a number of a chunk (``ActionChunk.scores``) that is computed where the model runs; what
it means beyond its limit stands in ``BackendInfo.scores``. Policies and servers show each inference
to the :class:`Watch` of the backend that answered.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from strands_cosmos3.types import ActionChunk, JointTrajectory, Request

Plan = JointTrajectory | ActionChunk | None
"""What a policy made of a chunk: None on a server, and where the arm cannot follow it."""


@dataclass(frozen=True)
class ScoreLimit:
    """Meaning of a score.

    Args:
        score: Name of the score.
        limit: Largest usual value.
        counter: Name under which larger values are counted.
        warning: Text about the first of them, in which ``{score}`` stands for the value.
        category: The warning's class.
    """

    score: str
    limit: float
    counter: str
    warning: str
    category: type[Warning] = UserWarning


class Monitor(Protocol):
    """Looks at each inference.

    Attributes:
        counters: Names of the events that it can notice.
    """

    counters: Sequence[str]

    def events(
        self, request: Request, chunk: ActionChunk, plan: Plan
    ) -> Iterable[tuple[str, Warning]]:
        """Return the events that it notices by name, with a warning each."""
        ...


class ScoreMonitor:
    """Notices scores beyond their limits."""

    def __init__(self, limits: Sequence[ScoreLimit]):
        self._limits = limits
        self.counters: Sequence[str] = [limit.counter for limit in limits]

    def events(
        self, request: Request, chunk: ActionChunk, plan: Plan
    ) -> Iterable[tuple[str, Warning]]:
        """Yield the event of each score that exceeds its limit."""
        for limit in self._limits:
            score = chunk.scores.get(limit.score, limit.limit)
            if score > limit.limit:
                yield limit.counter, limit.category(limit.warning.format(score=score))


class Watch:
    """Shows inferences to monitors, counts the events, and warns of the first of each name.

    Attributes:
        counters: Events so far; those that have not happened are 0.
    """

    def __init__(self, *monitors: Monitor):
        self._monitors = monitors
        self.counters = Counter({name: 0 for each in monitors for name in each.counters})

    def see(self, request: Request, chunk: ActionChunk, plan: Plan = None) -> None:
        """Take notice of an inference."""
        for monitor in self._monitors:
            for name, warning in monitor.events(request, chunk, plan):
                self.counters[name] += 1
                if self.counters[name] == 1:  # a server would warn with every request
                    warnings.warn(warning, stacklevel=2)
