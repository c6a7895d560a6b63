"""The generation sequence divided among ranks: each has every P-th token of each stream and, within
attention, some heads of all tokens.

A layer exchanges twice. Before attention every rank sends the queries, keys and values of its
tokens to the ranks of their heads; after it, what the queries attend to returns to the ranks of the
tokens. All else in a layer acts on single tokens. Tokens are dealt out in turn, so that any run of
them, such as the noisy ones, is shared evenly.

A stream whose tokens do not divide is padded with zeros. Padding is dropped from keys and values
before attention, and from velocities when they are gathered: no result depends on it.

Shape suffixes: P ranks, B branches, N all tokens, n those of a rank, S text tokens, h heads, d head
width.

Source of the two exchanges: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.parallel_context import Velocities
from strands_cosmos3.engine.text_cache import KeysValues, TextKV
from strands_cosmos3.engine.transformer import Attend, over_prompts
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.parallel.collectives import Group


def require_sp_size(config: TransformerConfig, tp_size: int, sp_size: int) -> None:
    """Raise a ConfigError that lists the valid degrees if the query heads of a tensor-parallel rank
    cannot be divided.
    """
    heads = config.num_attention_heads // tp_size
    if heads % sp_size:
        valid = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"sp_size={sp_size} does not divide the {heads} query heads that each rank has with "
            f"tp_size={tp_size}; valid: {', '.join(map(str, valid))}."
        )


def repeats(key_heads: int, ranks: int) -> int:
    """Return how often each key head is repeated, so that all ranks have equally many."""
    return ranks // math.gcd(key_heads, ranks)


def own_heads(text: TextKV, group: Group) -> TextKV:
    """Return the keys and values [..., h / P, S, d] that this rank's heads read of a prompt's."""

    def own(x_hSd: torch.Tensor) -> torch.Tensor:
        each = repeats(x_hSd.shape[-3], group.size)
        own_part = x_hSd.repeat_interleave(each, dim=-3).chunk(group.size, dim=-3)[group.rank]
        return own_part.clone()  # the others' are freed

    return TextKV(tuple((own(keys), own(values)) for keys, values in text.layers))


@dataclass(frozen=True)
class SharedSequence:
    """A sequence as a group of ranks divides it.

    Args:
        group: The ranks.
        counts: Tokens of each stream, in the order of the sequence.
    """

    group: Group
    counts: tuple[int, ...]

    def own(self, stream: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [..., n, width] of a stream [..., N, width]."""
        ranks = self.group.size
        padded = F.pad(stream, (0, 0, 0, -stream.shape[-2] % ranks))
        return padded[..., self.group.rank :: ranks, :]

    def own_of_all(self, sequence: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [..., n, width] of all streams [..., N, width]."""
        return torch.cat([self.own(part) for part in sequence.split(self.counts, -2)], dim=-2)

    def own_group(self, group: slice) -> slice:
        """Return this rank's tokens of a stream that have its share of a group. They are equally
        many on all ranks; the first and the last may lie outside the group.
        """
        start = group.start // self.group.size
        stop = -(-group.stop // self.group.size) if group.stop > group.start else start
        return slice(start, stop)

    def whole_groups(self, parts: Sequence[torch.Tensor], groups: Sequence[slice]) -> Velocities:
        """Return each stream's group [B, tokens, width] from all ranks' parts [P, B, n, width]."""
        skipped = [group.start % self.group.size for group in groups]
        return tuple(
            _in_turn(part)[:, first : first + group.stop - group.start]
            for part, group, first in zip(parts, groups, skipped, strict=True)
        )

    def attention(
        self, prompts: Sequence[KeysValues], keys_Bhnd: torch.Tensor, values_Bhnd: torch.Tensor
    ) -> Attend:
        """Return an attention over prompts, of this rank's heads, and over all ranks' tokens."""
        each = repeats(keys_Bhnd.shape[1], self.group.size)
        # they are sent with the first queries: one exchange less
        waiting = [x.repeat_interleave(each, dim=1) for x in (keys_Bhnd, values_Bhnd)]
        ready: list[Attend] = []

        def attend(queries_Bhnd: torch.Tensor) -> torch.Tensor:
            sent = [self._by_heads(x) for x in (queries_Bhnd, *waiting)]
            del queries_Bhnd
            waiting.clear()
            queries_PBnhd, *memory = self._exchange(sent)
            if memory:
                ready.append(over_prompts(prompts, *map(self._without_padding, memory)))
                memory.clear()
            queries_BNhd = _in_turn(queries_PBnhd)
            del queries_PBnhd  # with it all that was received, of which it is a view
            attended_BNhd = ready[0](queries_BNhd.transpose(1, 2)).transpose(1, 2)
            del queries_BNhd
            returned = [attended_BNhd.unflatten(1, (-1, self.group.size)).movedim(2, 0)]
            del attended_BNhd
            (attended_PBnhd,) = self._exchange(returned)
            return attended_PBnhd.movedim(0, 2).flatten(2, 3).transpose(1, 2)

        return attend

    def _by_heads(self, x_Bhnd: torch.Tensor) -> torch.Tensor:
        """[P, B, n, h / P, d]: what each rank gets of all heads."""
        return x_Bhnd.transpose(1, 2).unflatten(2, (self.group.size, -1)).movedim(2, 0)

    def _without_padding(self, x_PBnhd: torch.Tensor) -> torch.Tensor:
        """[B, h, N, d] of all ranks' tokens."""
        shares = [-(-count // self.group.size) for count in self.counts]
        parts = zip(x_PBnhd.split(shares, dim=2), self.counts, strict=True)
        return torch.cat([_in_turn(part)[:, :count] for part, count in parts], dim=1).transpose(
            1, 2
        )

    def _exchange(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send what [P, ...] has for each rank, and return what each rank had for this one. The
        list is emptied before: what it alone holds is freed.
        """
        shapes = [x.shape[1:] for x in tensors]
        sizes = [math.prod(shape) for shape in shapes]
        packed = tensors[0].new_empty(self.group.size, sum(sizes))
        for place, x in zip(packed.split(sizes, dim=1), tensors, strict=True):
            place.unflatten(1, x.shape[1:]).copy_(x)
        tensors.clear()
        received = self.group.swap(packed, "heads").split(sizes, dim=1)
        return [x.unflatten(1, shape) for x, shape in zip(received, shapes, strict=True)]


def _in_turn(x_PBn: torch.Tensor) -> torch.Tensor:
    """[B, N, ...] of tokens [P, B, n, ...] that were dealt out in turn."""
    return x_PBn.movedim(0, 2).flatten(1, 2)
