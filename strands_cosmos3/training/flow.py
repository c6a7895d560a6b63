"""Velocities of many windows at a time, through the engine's own modules and with a gradient.

The engine answers one request: one layout, a prompt or two, no gradient. Training needs many windows with different prompts
and a gradient. Weights, norms, rotations and projections are the engine's modules; what is written anew is the loop over
layers, so that windows share matrix products and each reads its own prompt under a mask. A test holds it to the engine's
``velocity``.

Shape suffixes as in the engine: B windows, G prompts, S text tokens, V vision tokens, T action rows (the state row
included), N = V + T, P numbers in a vision token, A action width, D hidden, h / k heads, d head width.
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
from strands_cosmos3.engine.sequence import SequenceLayout, generation_positions, rope_tables, text_positions
from strands_cosmos3.engine.transformer import ActionHead, Cosmos3Transformer, DecoderLayer, Rope, rotate

T = TypeVar("T")


class TrainedPolicy(nn.Module):
    """A transformer and the action head of one domain, as one module.

    Args:
        transformer: The engine's.
        head: The domain's projections; they become parameters.
    """

    def __init__(self, transformer: Cosmos3Transformer, head: ActionHead):
        super().__init__()
        self.transformer = transformer
        self.w_in, self.b_in = nn.Parameter(head.w_in), nn.Parameter(head.b_in)
        self.w_out, self.b_out = nn.Parameter(head.w_out), nn.Parameter(head.b_out)

    def forward(self, job: Callable[[TrainedPolicy], T]) -> T:
        """Run a job on this policy. Spread weights are gathered around a module's forward, so jobs come in by it."""
        return job(self)

    @property
    def head(self) -> ActionHead:
        """The head as the engine takes it."""
        return ActionHead(self.w_in, self.b_in, self.w_out, self.b_out)


@dataclass(frozen=True)
class Memory:
    """What windows read of their prompts: for each layer keys and values [B, k, S, d], and which tokens count [B, S]."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    counts_BS: torch.Tensor
    lengths: tuple[int, ...]

    def of(self, prompt_B: torch.Tensor) -> Memory:
        """The memory of windows, each of which names its prompt."""
        layers = tuple((k.index_select(0, prompt_B), v.index_select(0, prompt_B)) for k, v in self.layers)
        lengths = tuple(self.lengths[i] for i in prompt_B.tolist())
        return Memory(layers, self.counts_BS.index_select(0, prompt_B), lengths)


def read_prompts(transformer: Cosmos3Transformer, prompts: Sequence[Sequence[int]]) -> Memory:
    """Run the text tower over G prompts at once. They are padded at their ends, which causal attention never looks back from.

    Args:
        transformer: Whose tower.
        prompts: Token ids.
    """
    config, tower = transformer.config, transformer.text
    longest = max(len(ids) for ids in prompts)
    device = tower.embed.weight.device
    ids_GS = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in prompts], device=device)
    rope = rope_tables(text_positions(longest), config, device, transformer.dtype)
    x_GSD = tower.embed(ids_GS)
    kept = []
    for i, layer in enumerate(tower.layers):
        assert isinstance(layer, DecoderLayer)
        normed = layer.attention_norm(x_GSD)
        k_GSkd, v_GkSd = layer.keys(normed), layer.values(normed)
        for_generation = k_GSkd if layer.k_norm_for_gen is None else layer.k_norm_for_gen(k_GSkd)
        kept.append((rotate(for_generation, rope).transpose(1, 2), v_GkSd))
        if i + 1 < len(tower.layers):
            k_GkSd = rotate(k_GSkd, rope).transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                layer.queries(normed, rope), k_GkSd, v_GkSd, is_causal=True, enable_gqa=True
            )
            x_GSD = layer.finish(x_GSD, attended)
    lengths = tuple(len(ids) for ids in prompts)
    counts = torch.arange(longest, device=device)[None] < torch.tensor(lengths, device=device)[:, None]
    return Memory(tuple(kept), counts, lengths)


def rope_of(layout: SequenceLayout, config: TransformerConfig, lengths: Sequence[int], like: torch.Tensor) -> Rope:
    """Cosine and sine [B, N, d]: generation positions follow from each prompt's length."""
    tables = {n: rope_tables(generation_positions(layout, config, n), config, like.device, like.dtype) for n in set(lengths)}
    cos, sin = (torch.stack([tables[n][i] for n in lengths]) for i in (0, 1))
    return cos, sin


def velocity(
    policy: TrainedPolicy,
    vision_BVP: torch.Tensor,
    action_BTA: torch.Tensor,
    timestep_B: torch.Tensor,
    noisy_BN1: torch.Tensor,
    rope: Rope,
    memory: Memory,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Velocities of B windows; the engine's :meth:`Cosmos3Transformer.velocity` for each.

    Args:
        policy: Transformer and head.
        vision_BVP: Vision tokens. action_BTA: Action rows.
        timestep_B: What each window is told, 0..999; only noisy tokens hear it.
        noisy_BN1: 1 where a token is noisy, 0 where it is given.
        rope: From :func:`rope_of`. memory: Each window's prompt.
        first: The first token whose velocity is wanted; in the last layer nothing before it is computed.

    Returns:
        [B, vision tokens from ``first`` on, P] and [B, action rows from ``first`` on, A].
    """
    model, head = policy.transformer, policy.head
    vision_BVD = model.proj_in(vision_BVP.to(model.dtype))
    action_BTD = action_BTA.to(model.dtype) @ head.w_in + head.b_in + model.action_modality_embed
    time_BD = model.time_embedder(timestep_B).to(model.dtype)
    x_BND = torch.cat([vision_BVD, action_BTD], dim=1) + noisy_BN1.to(model.dtype) * time_BD[:, None]
    x_BWD = _generate(model, x_BND, rope, memory, first)
    vision_left = max(vision_BVP.shape[1] - first, 0)
    return model.proj_out(x_BWD[:, :vision_left]), x_BWD[:, vision_left:] @ head.w_out + head.b_out


def _generate(model: Cosmos3Transformer, x_BND: torch.Tensor, rope: Rope, memory: Memory, first: int) -> torch.Tensor:
    """Final hidden states of the tokens from ``first`` on."""
    tower = model.generation
    own = torch.ones(x_BND.shape[:2], dtype=torch.bool, device=x_BND.device)
    mask = torch.cat([memory.counts_BS, own], dim=1)[:, None, None, :]
    last = len(tower.layers) - 1
    for i, layer in enumerate(tower.layers):
        x_BND = layer(x_BND, rope, partial(_attend, memory.layers[i], mask), first if i == last else 0)
    return tower.norm(x_BND)


def _attend(
    text: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attention over the prompt and the sequence itself."""
    keys, values = torch.cat([text[0], keys], dim=2), torch.cat([text[1], values], dim=2)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
