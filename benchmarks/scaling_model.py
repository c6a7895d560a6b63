"""Cost of parallelism as formulas: a transformer's exchanges, bytes, memory and time
(benchmarks/NOTES.md).

``tests/parallel/test_scaling_model.py`` compares every count with what a rank counted, and the
memory with what it keeps. The time is a model: the caller gives a machine's rates. How many GPUs a
number of robots need is in ``queueing_model.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.weight_files import sliced_shape
from strands_cosmos3.engine.weights import checkpoint_key, head_shapes, kept_dtype, parameter_shapes
from strands_cosmos3.parallel.collectives import Traffic
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.parallel.mesh import key_heads, shard_slices
from strands_cosmos3.parallel.shared_sequence import repeats

KINDS = ("layer", "embedding", "heads", "velocity", "guidance")
"""Exchanges of the transformer, as ``Traffic`` names them; the VAE's have other names."""


@dataclass(frozen=True)
class Work:
    """One inference, as far as its cost goes.

    Args:
        tokens: N, generation tokens. action_rows: How many of them are action rows.
        noisy_vision, noisy_action: Those whose velocity is wanted: the last ones of either.
        steps: Denoising steps. guided: How many of them apply guidance.
        prompt: Tokens of the conditional prompt if it has to be prefilled; 0 if it is known from an
            earlier call, as the unconditional one always is.
    """

    tokens: int
    action_rows: int
    noisy_vision: int
    noisy_action: int
    steps: int
    guided: int
    prompt: int = 0


def exchanges(
    config: TransformerConfig, parallel: ParallelConfig, rank: int, work: Work, number_bytes: int
) -> Traffic:
    """Exchanges of a rank's transformer in one inference.

    In each layer two sums over the tensor-parallel group, of the hidden states of the rank's
    tokens; in the last layer only of the wanted ones. In each layer two exchanges of heads in the
    sequence-parallel group, in the last one two for each kind of wanted tokens, and a gathering of
    their velocities a step. With two groups of guidance one packed exchange of the velocities for
    each step with guidance, none for others.

    Args:
        number_bytes: Of one number: 2 in bfloat16, 4 in float32.
    """
    traffic = Traffic()
    token = config.hidden_size * number_bytes

    def add(kind: str, count: int, nbytes: int) -> None:
        if count:
            traffic.messages[kind] += count
            traffic.payload[kind] += count * nbytes

    tokens, wanted = own_tokens(parallel, work)
    inner = config.num_hidden_layers - 1
    both = work.guided if parallel.cfg_size == 1 else 0  # steps that compute both branches
    passes = (both, 2), (work.steps - both, 1)
    if parallel.tp_size > 1:
        for steps, branches in passes:
            add("layer", steps * 2 * inner, branches * sum(tokens) * token)
            for noisy in filter(None, wanted):
                add("layer", steps * 2, branches * noisy * token)
        conditional = parallel.coordinates(rank)[0] == 0 or work.guided < work.steps
        if work.prompt and conditional:
            add("embedding", 1, work.prompt * token // parallel.tp_size)
            add("layer", 2 * inner, work.prompt * token)
    if parallel.sp_size > 1:
        queries, keys = (
            heads * config.head_dim * number_bytes for heads in _heads(config, parallel)
        )
        memory = sum(tokens) * 2 * keys
        velocities = (wanted[0] * config.patch_dim + wanted[1] * config.action_dim) * number_bytes
        for steps, branches in passes:
            add("heads", steps * inner, branches * (sum(tokens) * queries + memory))
            add("heads", steps * inner, branches * sum(tokens) * queries)
            for i, noisy in enumerate(filter(None, wanted)):
                add("heads", steps, branches * (noisy * queries + (0 if i else memory)))
                add("heads", steps, branches * noisy * queries)
            add("velocity", steps, branches * velocities)
    if parallel.cfg_size == 2:
        vision = work.noisy_vision * config.patch_dim
        action = work.noisy_action * config.action_dim
        add("guidance", work.guided, (vision + action) * number_bytes)
    return traffic


def own_tokens(parallel: ParallelConfig, work: Work) -> tuple[tuple[int, int], tuple[int, int]]:
    """Vision tokens and action rows of each rank, padding included, and those of them that it
    computes in the last layer.
    """

    def share(count: int, noisy: int) -> tuple[int, int]:
        ranks = parallel.sp_size
        most = -(-count // ranks)
        return most, most - (count - noisy) // ranks if noisy else 0

    vision = share(work.tokens - work.action_rows, work.noisy_vision)
    action = share(work.action_rows, work.noisy_action)
    return (vision[0], action[0]), (vision[1], action[1])


def _heads(config: TransformerConfig, parallel: ParallelConfig) -> tuple[int, int]:
    """Query heads of a rank's layers, and key heads that it sends of them."""
    keys = len(key_heads(config, 0, parallel.tp_size))
    return config.num_attention_heads // parallel.tp_size, keys * repeats(keys, parallel.sp_size)


def sent_bytes(traffic: Traffic, parallel: ParallelConfig) -> float:
    """Bytes that one rank sends for the transformer's exchanges, with the algorithms that gloo and
    NCCL use for large tensors: a sum sends each part around a ring twice, a gathering sends every
    tensor to everybody, and of an exchange of heads all but the rank's own part is sent.
    """
    return sum(_sent_by_kind(traffic, parallel).values())


def _sent_by_kind(traffic: Traffic, parallel: ParallelConfig) -> dict[str, float]:
    tp, sp = parallel.tp_size, parallel.sp_size
    factors = {
        "layer": 2 * (tp - 1) / tp,
        "embedding": tp - 1,
        "heads": (sp - 1) / sp,
        "velocity": sp - 1,
        "guidance": parallel.cfg_size - 1,
    }
    return {kind: factor * traffic.payload[kind] for kind, factor in factors.items()}


def weight_bytes(
    config: TransformerConfig, tp_size: int, number_bytes: int, domains: int = 1
) -> int:
    """Bytes of a transformer's weights on each rank.

    Args:
        domains: Action heads in use.
    """
    total = domains * number_bytes * sum(map(math.prod, head_shapes(config).values()))
    for name, shape in parameter_shapes(config).items():
        slices = shard_slices(checkpoint_key(name), shape, config, 0, tp_size)
        single = kept_dtype(name, torch.bfloat16) is torch.float32
        total += math.prod(sliced_shape(shape, slices)) * (4 if single else number_bytes)
    return total


def text_bytes(
    config: TransformerConfig, parallel: ParallelConfig, tokens: int, number_bytes: int
) -> int:
    """Bytes of one prompt's keys and values on a rank."""
    heads = _heads(config, parallel)[1] // parallel.sp_size
    return 2 * config.num_hidden_layers * tokens * heads * config.head_dim * number_bytes


@dataclass(frozen=True)
class Link:
    """What a rank sends a second [bytes], and the latency of one exchange [s]."""

    bytes_s: float
    latency_s: float


@dataclass(frozen=True)
class Cluster:
    """Rates of the devices and of what connects them; assumptions, to be stated beside every figure
    made with them.

    Args:
        flops: Floating-point operations a second in a device's matrix products.
        node: Devices of a node. inside, across: Links within a node and between nodes.
    """

    flops: float
    node: int
    inside: Link
    across: Link


def step_flops(
    config: TransformerConfig, parallel: ParallelConfig, work: Work, prompt: int = 0
) -> int:
    """Floating-point operations of a rank's matrix products in one guided step; a multiplication
    and an addition are two.

    Args:
        prompt: Tokens of each branch's prompt, which attention reads too.
    """
    D = config.hidden_size
    d = config.head_dim
    tp = parallel.tp_size
    tokens, wanted = own_tokens(parallel, work)
    N = sum(tokens)
    h = config.num_attention_heads // tp
    k = len(key_heads(config, 0, tp))
    mlp = (3 if config.hidden_act == "silu" else 2) * D * config.intermediate_size // tp
    # for each token: q, out, the MLP, attention to all tokens, as many heads as of one's own
    rest = 2 * h * d * D + mlp + 2 * (prompt + work.tokens) * h * d
    layers = config.num_hidden_layers
    hidden = layers * N * 2 * k * d * D + ((layers - 1) * N + sum(wanted)) * rest
    into = tokens[0] * config.patch_dim + tokens[1] * config.action_dim
    out = wanted[0] * config.patch_dim + wanted[1] * config.action_dim
    branches = 1 if parallel.cfg_size == 2 else 2
    return 2 * (branches * (hidden + out * D) + into * D)


def step_seconds(
    config: TransformerConfig, parallel: ParallelConfig, work: Work, cluster: Cluster
) -> float:
    """Model of one guided denoising step in bfloat16: a rank's arithmetic, then its exchanges,
    nothing overlapping.

    Ranks of tensor parallelism are neighbours, then those of sequence parallelism. A ring that
    leaves a node is as fast as the link between nodes; of an exchange of heads only what is for
    other nodes' ranks takes that link.
    """
    traffic = exchanges(config, parallel, 0, replace(work, steps=1, guided=1, prompt=0), 2)
    seconds = step_flops(config, parallel, work) / cluster.flops
    for kind, sent in _sent_by_kind(traffic, parallel).items():
        seconds += sent * _seconds_a_byte(kind, parallel, cluster)
        seconds += traffic.messages[kind] * _link(kind, parallel, cluster).latency_s
    return seconds


def _link(kind: str, parallel: ParallelConfig, cluster: Cluster) -> Link:
    """The slowest link of a kind of exchange."""
    reach = {"layer": parallel.tp_size, "embedding": parallel.tp_size, "guidance": parallel.ranks}
    crosses = reach.get(kind, parallel.layer_ranks) > cluster.node
    return cluster.across if crosses else cluster.inside


def _seconds_a_byte(kind: str, parallel: ParallelConfig, cluster: Cluster) -> float:
    if kind != "heads" or parallel.sp_size == 1:
        return 1 / _link(kind, parallel, cluster).bytes_s
    peers = parallel.sp_size - 1
    near = min(peers, max(cluster.node // parallel.tp_size, 1) - 1) / peers
    return near / cluster.inside.bytes_s + (1 - near) / cluster.across.bytes_s
