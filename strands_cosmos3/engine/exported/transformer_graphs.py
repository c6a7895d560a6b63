"""Graphs of the text tower and of one denoising step; what they compute, says
:mod:`~strands_cosmos3.engine.transformer`.

Shape suffixes: B branches, N generation tokens, V vision tokens, T action rows, S text tokens, v t
tokens of both streams whose velocity is wanted, P numbers in a vision token, A action width, D
hidden, h query heads, k key heads, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strands_cosmos3.engine.config import TIME_CHANNELS, TransformerConfig
from strands_cosmos3.engine.exported.graph_builder import GraphBuilder
from strands_cosmos3.engine.transformer import GENERATION_NAMES, TEXT_NAMES
from strands_cosmos3.engine.weights import HEAD_KEYS


@dataclass
class _Tower:
    """The layers of one tower in a graph.

    Args:
        rope: Cosine and sine [B, N, d / 2] of the tokens.
    """

    g: GraphBuilder
    config: TransformerConfig
    names: Mapping[str, str]
    rope: tuple[str, str]

    def linear(self, x: str, *keys: str) -> str:
        """Linear layers side by side, by the released names of the modules."""
        weights, biases = ([f"{key}.{kind}" for key in keys] for kind in ("weight", "bias"))
        product = self.g("MatMul", x, self.g("Transpose", self._rows(weights), perm=[1, 0]))
        if not self.g.has_weight(biases[0]):
            return product
        return self.g("Add", product, self._rows(biases))

    def _rows(self, keys: Sequence[str]) -> str:
        values = [self.g.weight(key) for key in keys]
        return values[0] if len(values) == 1 else self.g("Concat", *values, axis=0)

    def norm(self, x: str, key: str) -> str:
        """RMS norm over the last axis."""
        weight = self.g.weight(f"{key}.weight")
        return self.g("RMSNormalization", x, weight, axis=-1, epsilon=self.config.rms_norm_eps)

    def by_head(self, x: str, heads: int, key: str) -> str:
        """Queries or keys [B, N, heads d], normalised where there is such a norm."""
        d = self.config.head_dim
        if not self.g.has_weight(f"{key}.weight"):
            return x
        normed = self.norm(self.g.reshape(x, 0, 0, heads, d), key)
        return self.g.reshape(normed, 0, 0, heads * d)

    def rotate(self, x: str, heads: int, rope: tuple[str, str]) -> str:
        """Rotate queries or keys by their positions."""
        return self.g("RotaryEmbedding", x, *rope, num_heads=heads)

    def projected(self, i: int, normed: str, roles: str) -> list[str]:
        """Of the roles ``q``, ``k`` and ``v`` those that are wanted, of normalised tokens."""
        config = self.config
        heads = dict.fromkeys("kv", config.num_key_value_heads)
        heads["q"] = config.num_attention_heads
        flat = self.linear(normed, *(self.key(i, role) for role in roles))
        sizes = self.g.sizes(*(heads[role] * config.head_dim for role in roles))
        parts = self.g.several(len(roles), "Split", flat, sizes, axis=-1)
        return [
            part if role == "v" else self.by_head(part, heads[role], self.key(i, f"{role}_norm"))
            for role, part in zip(roles, parts, strict=True)
        ]

    def key(self, i: int, role: str) -> str:
        """The released name of a layer's module."""
        return f"layers.{i}.{self.names[role]}"

    def attention(self, queries: str, keys: str, values: str, *past: str, causal: int = 0) -> str:
        """Attention [B, N, h d] over tokens after a prompt's keys and values."""
        heads = self.config.num_attention_heads, self.config.num_key_value_heads
        optional = ("", *past) if past else ()
        # with past keys ONNX Runtime's kernel needs the outputs that join them, too
        attended, *_ = self.g.several(
            3 if past else 1,
            "Attention",
            *(queries, keys, values, *optional),
            q_num_heads=heads[0],
            kv_num_heads=heads[1],
            is_causal=causal,
        )
        return attended

    def finished(self, i: int, x: str, attended: str) -> str:
        """Output projection and MLP with their residuals."""
        x = self.g("Add", x, self.linear(attended, self.key(i, "out")))
        mlp = self.key(i, "mlp")
        normed = self.norm(x, self.key(i, "mlp_norm"))
        if self.config.hidden_act == "relu2":
            up = self.g("Relu", self.linear(normed, f"{mlp}.up_proj"))
            inner = self.g("Mul", up, up)
        else:
            both = self.linear(normed, f"{mlp}.gate_proj", f"{mlp}.up_proj")
            gate, up = self.g.several(2, "Split", both, axis=-1, num_outputs=2)
            inner = self.g("Mul", silu(self.g, gate), up)
        return self.g("Add", x, self.linear(inner, f"{mlp}.down_proj"))


def silu(g: GraphBuilder, x: str) -> str:
    """``x sigmoid(x)``."""
    return g("Mul", x, g("Sigmoid", x))


def text_names(config: TransformerConfig) -> list[str]:
    """Names of keys and values in the graphs, layer by layer."""
    return [f"{kind}_{i}" for i in range(config.num_hidden_layers) for kind in ("key", "value")]


def write_text(g: GraphBuilder, config: TransformerConfig, path: Path) -> None:
    """Keys and values [B, k, S, d] of each layer, of prompts [B, S]."""
    half, k, d = config.head_dim // 2, config.num_key_value_heads, config.head_dim
    ids = g.input("ids", ("B", "S"), integers=True)
    rope = g.input("cosines", ("B", "S", half)), g.input("sines", ("B", "S", half))
    tower = _Tower(g, config, TEXT_NAMES, rope)
    x = g("Gather", g.weight("embed_tokens.weight"), ids)
    outputs = []
    for i in range(config.num_hidden_layers):
        last = i + 1 == config.num_hidden_layers
        normed = tower.norm(x, tower.key(i, "attention_norm"))
        *queries, keys, values = tower.projected(i, normed, "kv" if last else "qkv")
        for_generation = keys
        if config.text_k_norm_for_gen:
            for_generation = tower.by_head(keys, k, tower.key(i, "k_norm_for_gen"))
        for_generation, keys = (tower.rotate(each, k, rope) for each in (for_generation, keys))
        for each in (for_generation, values):
            outputs.append(g("Transpose", g.reshape(each, 0, 0, k, d), perm=[0, 2, 1, 3]))
        if not last:
            query = tower.rotate(queries[0], config.num_attention_heads, rope)
            x = tower.finished(i, x, tower.attention(query, keys, values, causal=1))
    shape = "B", k, "S", d
    named = zip(text_names(config), outputs, strict=True)
    g.save(path, {name: (value, shape) for name, value in named})


def write_step(g: GraphBuilder, config: TransformerConfig, path: Path) -> None:
    """Velocities [B, v, P] and [B, t, A] of the wanted tokens of both streams."""
    D, A, half = config.hidden_size, config.action_dim, config.head_dim // 2
    vision = g.input("vision", ("B", "V", config.patch_dim))
    action = g.input("action", ("B", "T", A))
    timestep = g.input("timestep", (1,))
    noisy = g.input("noisy", ("B", "N", 1))
    rope = g.input("cosines", ("B", "N", half)), g.input("sines", ("B", "N", half))
    domain = g.input("domain", ("B",), integers=True)
    wanted_vision = g.input("wanted_vision", ("v",), integers=True)
    wanted_action = g.input("wanted_action", ("t",), integers=True)
    shape = "B", config.num_key_value_heads, "S", config.head_dim
    past = [g.input(name, shape) for name in text_names(config)]

    tower = _Tower(g, config, GENERATION_NAMES, rope)
    heads = {field: g("Gather", g.weight(key), domain) for field, key in HEAD_KEYS.items()}
    rows = g("MatMul", action, g.reshape(heads["w_in"], -1, A, D))
    rows = g("Add", rows, g.reshape(heads["b_in"], -1, 1, D))
    rows = g("Add", rows, g.weight("action_modality_embed"))
    x = g("Concat", tower.linear(vision, "proj_in"), rows, axis=1)
    x = g("Add", x, g("Mul", noisy, _time(tower, timestep)))

    vision_tokens = g("Shape", vision, start=1, end=2)
    wanted = g("Concat", wanted_vision, g("Add", wanted_action, vision_tokens), axis=0)
    for i in range(config.num_hidden_layers):
        normed = tower.norm(x, tower.key(i, "attention_norm"))
        if i + 1 < config.num_hidden_layers:
            queries, keys, values = tower.projected(i, normed, "qkv")
            of_queries = rope
        else:  # here nothing else is computed than what is wanted
            keys, values = tower.projected(i, normed, "kv")
            x, normed, *tables = (g("Gather", each, wanted, axis=1) for each in (x, normed, *rope))
            (queries,) = tower.projected(i, normed, "q")
            of_queries = tables[0], tables[1]
        queries = tower.rotate(queries, config.num_attention_heads, of_queries)
        keys = tower.rotate(keys, config.num_key_value_heads, rope)
        attended = tower.attention(queries, keys, values, *past[2 * i : 2 * i + 2])
        x = tower.finished(i, x, attended)

    x = tower.norm(x, "norm_moe_gen")
    count = g("Shape", wanted_vision)
    zero, end, axis = g.sizes(0), g.sizes(2**31 - 1), g.sizes(1)
    of_vision, of_rows = g("Slice", x, zero, count, axis), g("Slice", x, count, end, axis)
    velocity = g("MatMul", of_rows, g.reshape(heads["w_out"], -1, D, A))
    velocity = g("Add", velocity, g.reshape(heads["b_out"], -1, 1, A))
    outputs = {
        "vision_velocity": (tower.linear(of_vision, "proj_out"), ("B", "v", config.patch_dim)),
        "action_velocity": (velocity, ("B", "t", A)),
    }
    g.save(path, outputs)


def _time(tower: _Tower, timestep: str) -> str:
    """Embedding [1, D] of a timestep [1]."""
    g, half = tower.g, TIME_CHANNELS // 2
    rates = np.exp(-math.log(10000) * np.arange(half) / half)
    scaled = g("Mul", timestep, g.constant(tower.config.timestep_scale))
    angle = g("Mul", g.reshape(scaled, 1, 1), g.constant(rates))
    sinusoid = g("Concat", g("Cos", angle), g("Sin", angle), axis=1)
    hidden = silu(g, tower.linear(sinusoid, "time_embedder.linear_1"))
    return tower.linear(hidden, "time_embedder.linear_2")
