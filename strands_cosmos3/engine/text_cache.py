"""Cache of prompts' keys and values across denoising steps and calls, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from strands_cosmos3.engine.transformer import TextKV
from strands_cosmos3.errors import InputError

Ids = tuple[int, ...]


class TextCache:
    """Least-recently-used cache of :class:`TextKV` by token ids, for the weights of one engine.

    ``prefill`` computes a missing entry. A prompt above ``limit_bytes`` is not kept.
    """

    def __init__(self, limit_bytes: int, prefill: Callable[[Ids], TextKV]):
        if limit_bytes < 0:
            raise InputError(f"limit_bytes is {limit_bytes}; it must be 0 (keep nothing) or more.")
        self._limit = limit_bytes
        self._prefill = prefill
        self._held: OrderedDict[Ids, TextKV] = OrderedDict()
        self.nbytes = 0
        self.prefills = 0
        self.hits = 0

    def get(self, ids: Ids) -> TextKV:
        """Keys and values of a prompt."""
        if ids in self._held:
            self._held.move_to_end(ids)
            self.hits += 1
            return self._held[ids]
        self.prefills += 1
        text = self._prefill(ids)
        if text.nbytes <= self._limit:
            while self.nbytes + text.nbytes > self._limit:
                self.nbytes -= self._held.popitem(last=False)[1].nbytes
            self._held[ids] = text
            self.nbytes += text.nbytes
        return text

    def clear(self) -> None:
        """Drop all prompts."""
        self._held.clear()
        self.nbytes = 0
