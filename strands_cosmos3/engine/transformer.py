"""The two towers: text prefills keys and values once; generation reads them at every denoising step.

Shape suffixes: N generation tokens, S text tokens, V vision tokens, T action rows, D hidden, P numbers in a vision
token, A action width, h query heads, k key heads, d head width. Batch is one and packed, so no shape carries it.

Source: diffusers 0.42.1 ``Cosmos3OmniTransformer``, the numeric oracle of the tests; operations that round are kept
in its order, so that bfloat16 agrees too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from strands_cosmos3.engine.config import TIME_CHANNELS, TransformerConfig

Rope = tuple[torch.Tensor, torch.Tensor]
_CPU_BLOCK_ROWS = 1024


@dataclass(frozen=True)
class TextKV:
    """What generation needs of a prompt: for each layer keys and values [k, S, d], keys normalised and rotated."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def tokens(self) -> int:
        """S, the prompt's length."""
        return self.layers[0][0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer)


@dataclass(frozen=True)
class ActionHead:
    """One domain's projections: into the model [A, D] and [D], out of it [D, A] and [A]."""

    w_in: torch.Tensor
    b_in: torch.Tensor
    w_out: torch.Tensor
    b_out: torch.Tensor


class RmsNorm(nn.Module):
    """Root-mean-square norm over the last axis; Edge (``nemotron``) multiplies its weight in float32, the others after
    rounding to the weight's type."""

    def __init__(self, size: int, config: TransformerConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = config.rms_norm_eps
        self.nemotron = config.nemotron

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.nemotron:
            return (self.weight.float() * normed).to(x.dtype)
        return normed.to(self.weight.dtype) * self.weight


class Mlp(nn.Module):
    """silu(gate) * up, or relu(up) squared without a gate."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        D, inner = config.hidden_size, config.intermediate_size
        self.gate = nn.Linear(D, inner, bias=False) if config.hidden_act == "silu" else None
        self.up = nn.Linear(D, inner, bias=False)
        self.down = nn.Linear(inner, D, bias=False)

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        if x_ND.device.type == "cpu" and len(x_ND) > _CPU_BLOCK_ROWS:  # keep temporaries in the cache and off mmap
            return torch.cat([self._block(block) for block in x_ND.split(_CPU_BLOCK_ROWS)])
        return self._block(x_ND)

    def _block(self, x_ND: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(torch.relu(self.up(x_ND)).square())
        return self.down(F.silu(self.gate(x_ND)) * self.up(x_ND))


class DecoderLayer(nn.Module):
    """One layer of either tower: pre-norm attention and MLP with residuals."""

    def __init__(self, config: TransformerConfig, *, qk_norm: bool, k_norm_for_gen: bool = False):
        super().__init__()
        D, d, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = d
        self.q = nn.Linear(D, config.num_attention_heads * d, bias=bias)
        self.k = nn.Linear(D, config.num_key_value_heads * d, bias=bias)
        self.v = nn.Linear(D, config.num_key_value_heads * d, bias=bias)
        self.out = nn.Linear(config.num_attention_heads * d, D, bias=bias)
        self.q_norm = RmsNorm(d, config) if qk_norm else nn.Identity()
        self.k_norm = RmsNorm(d, config) if qk_norm else nn.Identity()
        self.k_norm_for_gen = RmsNorm(d, config) if k_norm_for_gen else None
        self.attention_norm = RmsNorm(D, config)
        self.mlp_norm = RmsNorm(D, config)
        self.mlp = Mlp(config)

    def queries(self, normed_ND: torch.Tensor, rope: Rope) -> torch.Tensor:
        """[h, N, d], normalised and rotated."""
        return _rotate(self.q_norm(self._heads(self.q(normed_ND))), rope).transpose(0, 1)

    def keys(self, normed_ND: torch.Tensor) -> torch.Tensor:
        """[N, k, d], normalised, not rotated."""
        return self.k_norm(self._heads(self.k(normed_ND)))

    def values(self, normed_ND: torch.Tensor) -> torch.Tensor:
        """[k, N, d]"""
        return self._heads(self.v(normed_ND)).transpose(0, 1)

    def finish(self, x_ND: torch.Tensor, attended_hNd: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP, each with its residual."""
        x_ND = x_ND + self.out(attended_hNd.transpose(0, 1).flatten(-2))
        return x_ND + self.mlp(self.mlp_norm(x_ND))

    def _heads(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.unflatten(-1, (-1, self.head_dim))  # head counts follow from the weights: slices of them work too


class TextTower(nn.Module):
    """Causal attention over the prompt. Its last layer yields keys and values only, so the rest of it does not
    exist."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, qk_norm=config.qk_norm_for_text, k_norm_for_gen=config.text_k_norm_for_gen)
            for _ in range(config.num_hidden_layers)
        )
        last = self.layers[-1]
        for unused in ("q", "q_norm", "out", "mlp_norm", "mlp"):
            delattr(last, unused)

    def forward(self, ids_S: torch.Tensor, rope: Rope) -> TextKV:
        x_SD = self.embed(ids_S)
        kept = []
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            normed = layer.attention_norm(x_SD)
            k_Skd, v_kSd = layer.keys(normed), layer.values(normed)
            k_gen = k_Skd if layer.k_norm_for_gen is None else layer.k_norm_for_gen(k_Skd)
            kept.append((_rotate(k_gen, rope).transpose(0, 1).contiguous(), v_kSd.contiguous()))
            if i + 1 < len(self.layers):
                k_kSd = _rotate(k_Skd, rope).transpose(0, 1)
                x_SD = layer.finish(x_SD, _attend(layer.queries(normed, rope), k_kSd, v_kSd, causal=True))
        return TextKV(tuple(kept))


class GenerationTower(nn.Module):
    """Full attention of the generation tokens over the prompt and themselves."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config, qk_norm=True) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config)

    def forward(self, x_ND: torch.Tensor, rope: Rope, text: TextKV, groups: Sequence[slice]) -> list[torch.Tensor]:
        """Final hidden states of some groups of tokens; in the last layer nothing else is computed.

        Groups are computed one by one, so that a group's numbers do not depend on which others are asked for.
        """
        for layer, (k_text, v_text) in zip(self.layers, text.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            normed = layer.attention_norm(x_ND)
            k_all = torch.cat([k_text, _rotate(layer.keys(normed), rope).transpose(0, 1)], dim=1)
            v_all = torch.cat([v_text, layer.values(normed)], dim=1)
            if layer is self.layers[-1]:
                return [self._last(layer, x_ND, normed, rope, k_all, v_all, group) for group in groups]
            x_ND = layer.finish(x_ND, _attend(layer.queries(normed, rope), k_all, v_all))
        raise AssertionError("a tower has at least one layer")

    def _last(
        self,
        layer: DecoderLayer,
        x_ND: torch.Tensor,
        normed_ND: torch.Tensor,
        rope: Rope,
        k_all: torch.Tensor,
        v_all: torch.Tensor,
        group: slice,
    ) -> torch.Tensor:
        if group.start == group.stop:
            return x_ND[group]
        queries = layer.queries(normed_ND[group], (rope[0][group], rope[1][group]))
        return self.norm(layer.finish(x_ND[group], _attend(queries, k_all, v_all)))


class TimeEmbedder(nn.Module):
    """Sinusoid of a timestep (cosines first, base 10000), then two linear layers, in float32 whatever the model's
    type."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.linear_1 = nn.Linear(TIME_CHANNELS, config.hidden_size)
        self.linear_2 = nn.Linear(config.hidden_size, config.hidden_size)
        self.scale = config.timestep_scale

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        """[steps, D] for integer timesteps [steps]."""
        half = TIME_CHANNELS // 2
        exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
        angle = (timesteps * self.scale)[:, None].float() * torch.exp(exponent)
        sinusoid = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.linear_1.weight.dtype)
        return self.linear_2(F.silu(self.linear_1(sinusoid)))


class Cosmos3Transformer(nn.Module):
    """Text tower, generation tower and the projections between tokens and hidden states.

    The action heads of the domains are not part of it: one of 32 is in use, and it is handed in.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.text = TextTower(config)
        self.generation = GenerationTower(config)
        self.proj_in = nn.Linear(config.patch_dim, config.hidden_size)
        self.proj_out = nn.Linear(config.hidden_size, config.patch_dim)
        self.time_embedder = TimeEmbedder(config)
        self.action_modality_embed = nn.Parameter(torch.zeros(config.hidden_size))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the projections, hence of all hidden states."""
        return self.proj_in.weight.dtype

    def velocity(
        self,
        vision_VP: torch.Tensor,
        action_TA: torch.Tensor,
        time_D: torch.Tensor,
        noisy_N1: torch.Tensor,
        rope: Rope,
        text: TextKV,
        head: ActionHead,
        vision_group: slice,
        action_group: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Velocities of one denoising step.

        Args:
            vision_VP: Vision tokens. action_TA: Action rows.
            time_D: Embedding of the step's timestep, in the model's type; only noisy tokens receive it.
            noisy_N1: 1 where a token is noisy, 0 where it is given, in the model's type.
            rope: Cosine and sine [N, d] of the generation tokens.
            vision_group, action_group: Tokens whose velocities are wanted.

        Returns:
            Velocities of the two groups, [tokens, P] and [tokens, A], in the model's type.
        """
        vision_VD = self.proj_in(vision_VP.to(self.dtype))
        action_TD = action_TA.to(self.dtype) @ head.w_in + head.b_in + self.action_modality_embed
        x_ND = torch.cat([vision_VD, action_TD]) + noisy_N1 * time_D
        of_vision, of_action = self.generation(x_ND, rope, text, (vision_group, action_group))
        return self.proj_out(of_vision), of_action @ head.w_out + head.b_out


def _attend(q_hNd: torch.Tensor, k_kMd: torch.Tensor, v_kMd: torch.Tensor, causal: bool = False) -> torch.Tensor:
    return F.scaled_dot_product_attention(q_hNd[None], k_kMd[None], v_kMd[None], is_causal=causal, enable_gqa=True)[0]


def _rotate(x_Nhd: torch.Tensor, rope: Rope) -> torch.Tensor:
    cos_Nd, sin_Nd = rope
    first, second = x_Nhd.chunk(2, dim=-1)
    return x_Nhd * cos_Nd[:, None] + torch.cat([-second, first], dim=-1) * sin_Nd[:, None]
