"""Who is served next, and how soon: classes of clients, their turns, and what inferences take. No
threads and no clock here.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Job = TypeVar("Job")

_RECENT = 16  # inferences of a size
_REMEMBERED_S = 30.0
"""Whoever is refused measures nothing: what was slow once would be thought slow for ever."""


class Priority(StrEnum):
    """The class of a client."""

    REALTIME = "realtime"
    BULK = "bulk"


@dataclass(frozen=True)
class Client:
    """Who asks, as far as turns are concerned."""

    name: str
    priority: Priority = Priority.BULK


class Turns(Generic[Job]):
    """Jobs that wait. Realtime goes before bulk. In a class clients take turns, however many jobs
    one of them has; a client's own jobs keep their order.
    """

    def __init__(self) -> None:
        self._waiting: dict[Client, deque[Job]] = {}  # in the order of their turns

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, client: Client, job: Job) -> None:
        """Append a job to a client's."""
        self._waiting.setdefault(client, deque()).append(job)

    def pop(self) -> Job:
        """Return the next job. ValueError if there is none."""
        client = min(self._waiting, key=lambda client: client.priority is Priority.BULK)
        jobs = self._waiting.pop(client)
        job = jobs.popleft()
        if jobs:
            self._waiting[client] = jobs  # behind all others
        return job

    def discard(self, client: Client, unwanted: Callable[[Job], bool]) -> None:
        """Remove those of a client's jobs that nobody waits for any more."""
        if jobs := [job for job in self._waiting.get(client, ()) if not unwanted(job)]:
            self._waiting[client] = deque(jobs)
        else:
            self._waiting.pop(client, None)

    def ahead(self, client: Client, count: int = 1) -> int:
        """Return how many jobs go before the last of ``count`` that a client would add now, if
        nobody else adds any.
        """
        trial = Turns[bool]()
        for waiting, jobs in self._waiting.items():
            trial._waiting[waiting] = deque([False] * len(jobs))
        for number in range(count):
            trial.put(client, number == count - 1)
        ahead = 0
        while not trial.pop():
            ahead += 1
        return ahead


class Durations:
    """What inferences took lately, by the number of requests that shared one."""

    def __init__(self) -> None:
        self._recent_s: dict[int, deque[float]] = {}
        self._measured_s: dict[int, float] = {}

    def observe(self, size: int, seconds: float, now_s: float) -> None:
        """Add the duration of an inference that has ended now."""
        self._recent_s.setdefault(size, deque(maxlen=_RECENT)).append(seconds)
        self._measured_s[size] = now_s

    def expected_s(self, size: int, now_s: float) -> float:
        """Return what an inference for ``size`` requests takes; 0 if nothing is known.

        A size that was not measured is underestimated, so that nothing is refused for what is not
        known: it counts as the next smaller one, or as its share of the smallest.
        """
        sizes = [n for n, at_s in self._measured_s.items() if now_s - at_s <= _REMEMBERED_S]
        nearest = max((n for n in sizes if n <= size), default=min(sizes, default=0))
        if not nearest:
            return 0.0
        return statistics.median(self._recent_s[nearest]) * min(1.0, size / nearest)

    def until_done_s(
        self, free_in_s: Sequence[float], ahead: int, waiting: int, most: int, now_s: float
    ) -> float:
        """Return the time until a job that waits is done.

        Args:
            free_in_s: When each worker takes its next jobs, from now.
            ahead: Jobs that go before it.
            waiting: All jobs that wait, it included.
            most: Jobs that a worker takes at a time.
            now_s: The time.
        """
        batches = ahead // most
        rounds, worker = divmod(batches, len(free_in_s))
        own_s = self.expected_s(min(most, waiting - batches * most), now_s)
        return sorted(free_in_s)[worker] + rounds * self.expected_s(most, now_s) + own_s
