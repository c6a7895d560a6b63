"""Keys and values of prompts, which depend on nothing but the prompt, and are kept across calls.

Shape suffixes: S text tokens, k key heads, d head width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from array_api_compat import array_namespace

from strands_cosmos3.engine.arrays import Array

KeysValues = tuple[Array, Array]


@dataclass(frozen=True)
class TextKV:
    """Keys and values of a prompt in each layer, [..., k, S, d]; keys are normalised, rotated."""

    layers: tuple[KeysValues, ...]

    @property
    def tokens(self) -> int:
        """S, the length of the prompt."""
        return self.layers[0][0].shape[-2]

    @property
    def nbytes(self) -> int:
        """Size of the keys and values in bytes."""
        return sum(t.nbytes for layer in self.layers for t in layer)


def side_by_side(texts: Sequence[TextKV]) -> tuple[TextKV, ...]:
    """Prompts [k, S, d] as batches [b, k, S, d] of neighbours of equal length, in their order."""
    batches = []
    for _, alike in groupby(texts, lambda text: text.tokens):
        layers = [*zip(*(text.layers for text in alike), strict=True)]
        stack = array_namespace(layers[0][0][0]).stack
        stacked = [tuple(map(stack, zip(*layer, strict=True))) for layer in layers]
        batches.append(TextKV(tuple((k, v) for k, v in stacked)))
    return tuple(batches)


class TextCache:
    """Least-recently-used cache of :class:`TextKV` by token ids, for the weights of one engine.

    ``prefill`` computes a missing entry. A prompt above ``limit_bytes`` is not kept.
    """

    def __init__(self, limit_bytes: int, prefill: Callable[[tuple[int, ...]], TextKV]):
        self._limit = limit_bytes
        self._prefill = prefill
        self._held: OrderedDict[tuple[int, ...], TextKV] = OrderedDict()
        self.nbytes = 0
        self.prefills = 0
        self.hits = 0

    def get(self, ids: tuple[int, ...]) -> TextKV:
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
