"""Draw a step's windows while a GPU computes the step before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """A function of a step whose next value another thread makes. Each value must depend on the
    step alone.
    """

    def __init__(self, make: Callable[[int], T]):
        self._make = make
        self._pool = ThreadPoolExecutor(1)
        self._next: dict[int, Future[T]] = {}

    def __call__(self, step: int) -> T:
        """Return the value of a step, and begin the next one's."""
        future = self._next.get(step)
        made = self._make(step) if future is None else future.result()
        self._next = {step + 1: self._pool.submit(self._make, step + 1)}
        return made
