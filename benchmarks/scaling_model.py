"""Cost of parallelism as formulas: a transformer's exchanges, bytes, memory and time
(benchmarks/NOTES.md).

``tests/parallel/test_scaling_model.py`` compares every count with what a rank counted, and the
memory with what it keeps. The time is a model: the caller gives a machine's rates.
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

KINDS = ("layer", "embedding", "guidance")
"""Exchanges of the transformer, as ``Traffic`` names them; the VAE's have other names."""


@dataclass(frozen=True)
class Work:
    """One inference, as far as its cost goes.

    Args:
        tokens: N, generation tokens. action_rows: How many of them are action rows.
        noisy_vision, noisy_action: Those whose velocity is wanted.
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

    In each layer two sums over the tensor-parallel group, of every token's hidden state; in the
    last layer only of the wanted tokens. With two groups one packed exchange of the velocities for
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

    if parallel.tp_size > 1:
        sums = 2 * (config.num_hidden_layers - 1)
        both = work.guided if parallel.cfg_size == 1 else 0  # steps that compute both branches
        for steps, branches in ((both, 2), (work.steps - both, 1)):
            add("layer", steps * sums, branches * work.tokens * token)
            for noisy in filter(None, (work.noisy_vision, work.noisy_action)):
                add("layer", steps * 2, branches * noisy * token)
        conditional = parallel.coordinates(rank)[0] == 0 or work.guided < work.steps
        if work.prompt and conditional:
            add("embedding", 1, work.prompt * token // parallel.tp_size)
            add("layer", sums, work.prompt * token)
    if parallel.cfg_size == 2:
        vision = work.noisy_vision * config.patch_dim
        action = work.noisy_action * config.action_dim
        add("guidance", work.guided, (vision + action) * number_bytes)
    return traffic


def sent_bytes(traffic: Traffic, parallel: ParallelConfig) -> float:
    """Bytes that one rank sends for the transformer's exchanges, with the ring algorithms that gloo
    and NCCL use for large tensors: a sum sends each part around twice, a gathering sends every
    tensor to everybody.
    """
    tp = parallel.tp_size
    payload = traffic.payload
    sums = 2 * (tp - 1) / tp * payload["layer"]
    return sums + (tp - 1) * payload["embedding"] + (parallel.cfg_size - 1) * payload["guidance"]


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
    D = config.hidden_size
    d = config.head_dim
    tp = parallel.tp_size
    N = work.tokens
    h = config.num_attention_heads // tp
    k = len(key_heads(config, 0, tp))
    mlp = (3 if config.hidden_act == "silu" else 2) * D * config.intermediate_size // tp
    # for each token: q, out, the MLP, attention
    rest = 2 * h * d * D + mlp + 2 * (prompt + N) * h * d
    last = work.noisy_vision + work.noisy_action
    layers = config.num_hidden_layers
    hidden = layers * N * 2 * k * d * D + ((layers - 1) * N + last) * rest
    into = (N - work.action_rows) * config.patch_dim + work.action_rows * config.action_dim
    out = work.noisy_vision * config.patch_dim + work.noisy_action * config.action_dim
    branches = 1 if parallel.cfg_size == 2 else 2
    return 2 * (branches * (hidden + out * D) + into * D)


def step_seconds(
    config: TransformerConfig, parallel: ParallelConfig, work: Work, machine: Machine
) -> float:
    """Model of one guided denoising step in bfloat16: a rank's arithmetic, then its exchanges,
    nothing overlapping.
    """
    traffic = exchanges(config, parallel, 0, replace(work, steps=1, guided=1, prompt=0), 2)
    arithmetic_s = step_flops(config, parallel, work) / machine.flops
    sent_s = sent_bytes(traffic, parallel) / machine.link
    return arithmetic_s + sent_s + traffic.messages.total() * machine.latency_s
