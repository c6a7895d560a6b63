"""Cost of parallelism as formulas: exchanges, bytes, memory and time (benchmarks/NOTES.md).

``tests/parallel/test_scaling_model.py`` compares every count with
:class:`~strands_cosmos3.parallel.collectives.Traffic`, and the memory with what a rank keeps. The
time is a model: the caller gives a machine's rates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.vae import SPATIAL_COMPRESSION
from strands_cosmos3.engine.weight_files import sliced_shape
from strands_cosmos3.engine.weights import checkpoint_key, head_shapes, kept_dtype, parameter_shapes
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.parallel.mesh import key_heads, shard_slices
from strands_cosmos3.parallel.sharded_vae import shard_widths

_FLOAT32 = 4


@dataclass
class Exchanges:
    """What one rank puts into exchanges, by kind; the same counts as ``Traffic``."""

    messages: Counter[str] = field(default_factory=Counter)
    payload: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, count: int, nbytes: int) -> None:
        """Count some exchanges of ``nbytes`` each."""
        if count:
            self.messages[kind] += count
            self.payload[kind] += count * nbytes


@dataclass(frozen=True)
class Work:
    """One inference, as far as its cost goes.

    Args:
        tokens: N, generation tokens. action_rows: How many of them are action rows.
        noisy_vision, noisy_action: Those whose velocity is wanted.
        steps: Denoising steps. guided: How many of them apply guidance.
        conditional, unconditional: Tokens of a prompt that has to be prefilled; 0 where it is known
            from an earlier call.
        last_video: Whether the last step's video velocity is wanted.
    """

    tokens: int
    action_rows: int
    noisy_vision: int
    noisy_action: int
    steps: int
    guided: int
    conditional: int = 0
    unconditional: int = 0
    last_video: bool = True


def transformer_exchanges(
    config: TransformerConfig, parallel: ParallelConfig, rank: int, work: Work, number_bytes: int
) -> Exchanges:
    """Exchanges of a rank's transformer in one inference.

    In each layer two sums over the tensor-parallel group, of every token's hidden state; in the
    last layer only of the wanted tokens. With two groups one packed exchange of the velocities for
    each step with guidance, none for others.

    Args:
        number_bytes: Of one number: 2 in bfloat16, 4 in float32.
    """
    made, cfg_rank = Exchanges(), parallel.coordinates(rank)[0]
    D, layers = config.hidden_size, config.num_hidden_layers
    token = D * number_bytes
    if parallel.tp_size > 1:
        for step in range(work.steps):
            # which steps does not matter
            branches = 2 if parallel.cfg_size == 1 and step < work.guided else 1
            made.add("layer", 2 * (layers - 1), branches * work.tokens * token)
        for wanted, steps in (
            (work.noisy_vision, work.steps - (not work.last_video)),
            (work.noisy_action, work.steps),
        ):
            twice = min(work.guided, steps) if parallel.cfg_size == 1 else 0
            made.add("layer", 2 * (steps - twice) if wanted else 0, wanted * token)
            made.add("layer", 2 * twice if wanted else 0, 2 * wanted * token)
        for prompt in _prefilled(parallel, cfg_rank, work):
            made.add("embedding", 1, prompt * token // parallel.tp_size)
            made.add("layer", 2 * (layers - 1), prompt * token)
    if parallel.cfg_size == 2:
        vision, action = work.noisy_vision * config.patch_dim, work.noisy_action * config.action_dim
        made.add("guidance", work.guided, (vision + action) * number_bytes)
    return made


def _prefilled(parallel: ParallelConfig, cfg_rank: int, work: Work) -> list[int]:
    own = {0: work.conditional, 1: work.unconditional}
    mine = {0, 1} if parallel.cfg_size == 1 else {cfg_rank}
    needed = (mine if work.guided else set()) | ({0} if work.guided < work.steps else set())
    return [own[i] for i in sorted(needed) if own[i]]


@dataclass(frozen=True)
class _Side:
    """Where a rank's shard ends: how many neighbours it has, and whether the left one is among
    them.
    """

    neighbours: int
    left: int
    widest: int


def encode_exchanges(
    vae: Mapping[str, Any],
    frames: int,
    height: int,
    columns: int,
    ranks: int,
    rank: int,
    number_bytes: int,
) -> Exchanges:
    """Exchanges of one rank that encodes a clip together with others.

    Args:
        vae: The VAE's config. frames, height: Of the clip, in pixels. columns: Its width in latents
            (16 pixels).
    """
    made, side = Exchanges(), _side(columns, ranks, rank)
    dims = [vae["base_dim"] * m for m in (1, *vae["dim_mult"])]
    for first, t in _chunks(frames):
        h = height // vae["patch_size"]
        _halo(made, side, vae["in_channels"] * t * h * number_bytes)
        for i, (narrow, wide) in enumerate(pairwise(dims)):
            for channels in _resnets(narrow, wide, vae["num_res_blocks"]):
                _halo(made, side, channels * t * h * number_bytes)
            if i + 1 < len(vae["dim_mult"]):  # halving the width looks to the right alone
                made.add("halo", side.left, wide * t * h * number_bytes)
                h //= 2
                t = t // 2 if vae["temperal_downsample"][i] and not first else t
        _middle(made, side, dims[-1], t, h, number_bytes)
        _halo(made, side, dims[-1] * t * h * number_bytes)
    latents = (frames - 1) // vae["scale_factor_temporal"] + 1
    made.add(
        "latents",
        1,
        vae["z_dim"] * latents * (height // SPATIAL_COMPRESSION) * side.widest * _FLOAT32,
    )
    return made


def decode_exchanges(
    vae: Mapping[str, Any],
    latents: int,
    rows: int,
    columns: int,
    ranks: int,
    rank: int,
    number_bytes: int,
) -> Exchanges:
    """Exchanges of one rank that decodes together with others, what it hands to rank 0 included.

    Args:
        vae: The VAE's config. latents, rows, columns: Frames, height and width in latents.
    """
    made, side = Exchanges(), _side(columns, ranks, rank)
    mults = list(vae["dim_mult"])[::-1]
    dims = [vae["decoder_base_dim"] * m for m in (mults[0], *mults)]
    for frame in range(latents):
        t, h = 1, rows
        _halo(made, side, vae["z_dim"] * t * h * number_bytes)
        _middle(made, side, dims[0], t, h, number_bytes)
        for i, (before, after) in enumerate(pairwise(dims)):
            for channels in _resnets(before, after, vae["num_res_blocks"] + 1):
                _halo(made, side, channels * t * h * number_bytes)
            if i + 1 < len(mults):
                t = t * 2 if list(vae["temperal_downsample"])[::-1][i] and frame else t
                _halo(made, side, after * t * h * number_bytes)  # before its height doubles
                h *= 2
        _halo(made, side, dims[-1] * t * h * number_bytes)
    if rank:
        frames = (latents - 1) * vae["scale_factor_temporal"] + 1
        size = SPATIAL_COMPRESSION
        made.add("pixels", 1, 3 * frames * rows * size * side.widest * size * _FLOAT32)
    return made


def _side(columns: int, ranks: int, rank: int) -> _Side:
    return _Side((rank > 0) + (rank + 1 < ranks), int(rank > 0), max(shard_widths(columns, ranks)))


def _chunks(frames: int) -> Iterable[tuple[bool, int]]:
    return [(True, 1), *[(False, 4)] * ((frames - 1) // 4)]


def _resnets(before: int, after: int, count: int) -> list[int]:
    """Channels that each convolution of some residual blocks reads."""
    return [before, after, *[after] * (2 * (count - 1))]


def _halo(made: Exchanges, side: _Side, nbytes: int) -> None:
    made.add("halo", side.neighbours, nbytes)


def _middle(made: Exchanges, side: _Side, channels: int, t: int, h: int, number_bytes: int) -> None:
    for _ in range(4):
        _halo(made, side, channels * t * h * number_bytes)
    made.add("attention", 1, 2 * channels * t * h * side.widest * number_bytes)


def sent_bytes(kind: str, payload: float, ranks: int) -> float:
    """Bytes that one rank sends for an exchange, with the ring algorithms that gloo and NCCL use
    for large tensors.

    A sum sends each part around twice, a gathering sends every tensor to everybody; a halo and
    pixels go to one rank.

    Args:
        kind: As ``Traffic`` names it. payload: Bytes of the rank's tensor. ranks: Of the group that
            exchanges.
    """
    if kind == "layer":
        return 2 * (ranks - 1) / ranks * payload
    if kind in ("embedding", "guidance", "attention", "latents"):
        return (ranks - 1) * payload
    return payload


def weight_bytes(
    config: TransformerConfig, tp_size: int, number_bytes: int, domains: int = 1
) -> tuple[int, int]:
    """(bytes of a transformer's weights on each rank, how many of them every rank has alike).

    Args:
        domains: Action heads in use.
    """
    heads = sum(math.prod(shape) for shape in head_shapes(config).values()) * domains * number_bytes
    mine, shared = float(heads), heads * (1 - 1 / tp_size)
    for name, shape in parameter_shapes(config).items():
        size = _FLOAT32 if kept_dtype(name, torch.bfloat16) is torch.float32 else number_bytes
        kept = (
            math.prod(
                sliced_shape(shape, shard_slices(checkpoint_key(name), shape, config, 0, tp_size))
            )
            * size
        )
        mine += kept
        # what a rank has beyond its fair share: whole weights, and key heads that several ranks
        # keep
        shared += kept - math.prod(shape) * size / tp_size
    return int(mine), int(shared * tp_size / (tp_size - 1)) if tp_size > 1 else int(mine)


def text_bytes(config: TransformerConfig, tp_size: int, tokens: int, number_bytes: int) -> int:
    """Bytes of one prompt's keys and values on a rank."""
    heads = len(key_heads(config, 0, tp_size))
    return 2 * config.num_hidden_layers * tokens * heads * config.head_dim * number_bytes


@dataclass(frozen=True)
class Machine:
    """Rates of one device and of what connects it; assumptions, to be stated beside every figure
    made with them.

    Args:
        flops: Floating-point operations a second in matrix products.
        link: Bytes a second that a rank sends. latency_s: Of one exchange.
    """

    flops: float
    link: float
    latency_s: float


def step_flops(
    config: TransformerConfig, parallel: ParallelConfig, work: Work, prompt: int = 0
) -> int:
    """Floating-point operations of a rank's matrix products in one guided step; a multiplication
    and an addition are two.

    Args:
        prompt: Tokens of each branch's prompt, which attention reads too.
    """
    D, inner, d, tp = (
        config.hidden_size,
        config.intermediate_size,
        config.head_dim,
        parallel.tp_size,
    )
    h, k = config.num_attention_heads // tp, len(key_heads(config, 0, tp))
    mlp = (3 if config.hidden_act == "silu" else 2) * D * inner // tp
    wanted, N = work.noisy_vision + work.noisy_action, work.tokens
    # for each token: q, out, the MLP, attention
    rest = 2 * h * d * D + mlp + 2 * (prompt + N) * h * d
    hidden = (
        config.num_hidden_layers * N * 2 * k * d * D
        + ((config.num_hidden_layers - 1) * N + wanted) * rest
    )
    vision, action = N - work.action_rows, work.action_rows
    into = vision * config.patch_dim * D + action * config.action_dim * D
    out = work.noisy_vision * config.patch_dim * D + work.noisy_action * config.action_dim * D
    branches = 1 if parallel.cfg_size == 2 else 2
    return 2 * (branches * (hidden + out) + into)


def step_seconds(
    config: TransformerConfig, parallel: ParallelConfig, work: Work, machine: Machine
) -> float:
    """Model of one guided denoising step in bfloat16: a rank's arithmetic, then its exchanges,
    nothing overlapping.
    """
    one = replace(work, steps=1, guided=1, conditional=0, unconditional=0)
    made = transformer_exchanges(config, parallel, 0, one, 2)
    groups = {"layer": parallel.tp_size, "guidance": parallel.cfg_size}
    sent = sum(sent_bytes(kind, nbytes, groups[kind]) for kind, nbytes in made.payload.items())
    arithmetic = step_flops(config, parallel, one) / machine.flops
    return arithmetic + sent / machine.link + sum(made.messages.values()) * machine.latency_s
