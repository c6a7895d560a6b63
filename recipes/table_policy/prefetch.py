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
        self._next: tuple[int, Future[T]] | None = None

    def __call__(self, step: int) -> T:
        """Return the value of a step, and begin the next one's."""
        made = (
            self._next[1].result()
            if self._next is not None and self._next[0] == step
            else self._make(step)
        )
        self._next = step + 1, self._pool.submit(self._make, step + 1)
        return made
