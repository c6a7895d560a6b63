"""Velocities of a batch of windows with a gradient, through the engine's towers.

The engine answers one request; here each window has its own prompt, and attends to padded prompts
under a mask.

Shape suffixes as in the engine: B windows, G prompts, S text tokens, V vision tokens, T action rows
(a state row included), n tokens of a stream, N tokens of all, P numbers in a token, A action width,
D hidden, h / k heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.sequence import (
    SequenceLayout,
    generation_positions,
    text_positions,
)
from strands_cosmos3.engine.transformer import (
    ActionHead,
    Attend,
    Cosmos3Transformer,
    KeysValues,
    Rope,
    TextKV,
    rope_tables,
)

T = TypeVar("T")


class TrainedPolicy(nn.Module):
    """The engine's transformer and the action head of one domain as one module."""

    def __init__(self, transformer: Cosmos3Transformer, head: ActionHead):
        super().__init__()
        self.transformer = transformer
        self.w_in = nn.Parameter(head.w_in)
        self.b_in = nn.Parameter(head.b_in)
        self.w_out = nn.Parameter(head.w_out)
        self.b_out = nn.Parameter(head.b_out)

    def forward(self, job: Callable[[TrainedPolicy], T]) -> T:
        """Run a job on this policy. FSDP gathers sharded weights around a module's forward, so
        jobs are passed to it.
        """
        return job(self)

    @property
    def head(self) -> ActionHead:
        """The action head in the engine's form."""
        return ActionHead(self.w_in, self.b_in, self.w_out, self.b_out)


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of B windows."""

    text: TextKV  # keys and values [B, k, S, d] of each layer, padded to the longest prompt
    mask_BS: torch.Tensor  # True where a token belongs to the prompt
    lengths: tuple[int, ...]  # tokens of each prompt

    def select(self, prompt_B: torch.Tensor) -> PromptBatch:
        """The prompts with these indices, one a window."""
        chosen = prompt_B.to(self.mask_BS.device)
        lengths = tuple(self.lengths[i] for i in prompt_B.tolist())
        layers = tuple(
            (k.index_select(0, chosen), v.index_select(0, chosen)) for k, v in self.text.layers
        )
        return PromptBatch(TextKV(layers), self.mask_BS.index_select(0, chosen), lengths)


def read_prompts(transformer: Cosmos3Transformer, prompts: Sequence[Sequence[int]]) -> PromptBatch:
    """Run the text tower over the token ids of G prompts, padded at the end, where causal
    attention does not look.
    """
    lengths = tuple(len(ids) for ids in prompts)
    longest = max(lengths)
    device = transformer.action_modality_embed.device
    ids_GS = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in prompts], device=device)
    rope = rope_tables(text_positions(longest), transformer.config, device, transformer.dtype)
    mask_GS = (
        torch.arange(longest, device=device)[None] < torch.tensor(lengths, device=device)[:, None]
    )
    return PromptBatch(transformer.text(ids_GS, rope), mask_GS, lengths)


def _rope(
    layout: SequenceLayout, config: TransformerConfig, lengths: Sequence[int], like: torch.Tensor
) -> Rope:
    """Cosine and sine [B, N, d] for prompts of these lengths, on the device and in the dtype of
    ``like``.
    """
    tables = {
        n: rope_tables(generation_positions(layout, config, n), config, like.device, like.dtype)
        for n in set(lengths)
    }
    cos, sin = (torch.stack([tables[n][i] for n in lengths]) for i in (0, 1))
    return cos, sin


def velocity(
    policy: TrainedPolicy,
    tokens: Sequence[torch.Tensor],
    timestep_B: torch.Tensor,
    noisy_BN1: torch.Tensor,
    layout: SequenceLayout,
    prompts: PromptBatch,
    first: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Velocities of B windows, as :meth:`Cosmos3Transformer.velocity` gives them one by one.

    Args:
        tokens: The tokens [B, n, P] of each stream, in the order of the sequence.
        timestep_B: Timestep of each window, 0..999; it is added to noisy tokens only.
        noisy_BN1: 1 where a token is noisy, 0 where it is given.
        layout: The sequence of each window, whose clock begins after its prompt.
        first: First token whose velocity is wanted; the last layer computes nothing before it.

    Returns:
        [B, tokens from ``first`` on, P] of each stream.
    """
    model = policy.transformer
    head = policy.head
    rope = _rope(layout, model.config, prompts.lengths, tokens[0])
    time_B1D = model.time_embedder(timestep_B).to(model.dtype)[:, None]
    x_BND = model.embed(tokens, time_B1D, noisy_BN1.to(model.dtype), head)
    own = torch.ones(x_BND.shape[:2], dtype=torch.bool, device=x_BND.device)
    mask = torch.cat([prompts.mask_BS, own], dim=1)
    attentions = [partial(_attend_masked, mask, layer) for layer in prompts.text.layers]
    (x_BND,) = model.generation(x_BND, rope, attentions, (slice(first, None),))
    return model.project(x_BND.split(layout.counts_from(first), dim=1), head)


def _attend_masked(
    mask_BM: torch.Tensor, prompt: KeysValues, keys: torch.Tensor, values: torch.Tensor
) -> Attend:
    """Attention over the padded prompts and the windows' own tokens."""
    memory = torch.cat([prompt[0], keys], dim=2), torch.cat([prompt[1], values], dim=2)
    return lambda queries: F.scaled_dot_product_attention(
        queries, *memory, attn_mask=mask_BM[:, None, None], enable_gqa=True
    )
