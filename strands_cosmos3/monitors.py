"""Monitors: what is noticed in an inference, by name; it is counted, and warned of once in an
episode.

A score is a number of a chunk (``ActionChunk.scores``) that is computed where the model runs; what
it means beyond its limit stands in ``BackendInfo.scores``. Policies and servers show each inference
to the :class:`Watch` of the backend that answers: its inputs before it, with what is remembered of
the episode (:class:`~strands_cosmos3.input_monitor.InputMonitor`), and the chunk after it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.errors import SensorError
from strands_cosmos3.input_monitor import InputMonitor
from strands_cosmos3.types import ActionChunk, JointTrajectory, Request

OnEvent = Literal["warn", "hold", "error"]
"""What follows from implausible inputs."""

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


class InputWarning(UserWarning):
    """A camera view or the measured state is implausible."""


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
    """Shows inferences to monitors, counts the events, and warns of the first of each name in an
    episode.

    Attributes:
        counters: Events so far; those that have not happened are 0.
    """

    def __init__(self, *monitors: Monitor):
        self._monitors = monitors
        names = (name for each in (*monitors, InputMonitor) for name in each.counters)
        self.counters = Counter(dict.fromkeys(names, 0))

    def look(
        self,
        request: Request,
        episode: InputMonitor,
        on_event: OnEvent = "warn",
        views: Mapping[str, NDArray[np.uint8]] | None = None,
    ) -> None:
        """Take notice of the inputs of an inference, before it.

        Args:
            request: The inference.
            episode: What is remembered of the episode.
            on_event: Whether to warn of what is noticed, or to raise it.
            views: The views by name; None is those of the request, or the parts of its composite.

        Raises:
            SensorError: Something is noticed; with ``error`` its ``final`` is true.
        """
        events = episode.look(request, views)
        for name, text in events:
            self._count(name, InputWarning(text), episode, warn=on_event == "warn")
        if events and on_event != "warn":
            said = " ".join(text for _, text in events)
            raise SensorError(
                f"{said} on_event is {on_event!r}: nothing is inferred from it. Check the sensors, "
                "or pass on_event='warn'.",
                final=on_event == "error",
            )

    def see(
        self, request: Request, chunk: ActionChunk, episode: InputMonitor, plan: Plan = None
    ) -> None:
        """Take notice of an inference."""
        for monitor in self._monitors:
            for name, warning in monitor.events(request, chunk, plan):
                self._count(name, warning, episode)

    def _count(self, name: str, warning: Warning, episode: InputMonitor, warn: bool = True) -> None:
        self.counters[name] += 1
        if warn and name not in episode.warned:
            episode.warned.add(name)
            warnings.warn(warning, stacklevel=3)
