"""The two towers: text prefills keys and values once; generation reads them at every denoising step.

Shape suffixes: N generation tokens, S text tokens, V vision tokens, T action rows, D hidden, P numbers in a vision
token, A action width, h query heads, k key heads, d head width, B branches of guidance: the conditional pass and,
where guidance applies, the unconditional one, which share every matrix product and differ in the prompt that they
attend to.

Source: diffusers 0.42.1 ``Cosmos3OmniTransformer``, the numeric oracle of the tests; operations that round are kept
in its order, so that bfloat16 agrees too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from strands_cosmos3.engine.config import TIME_CHANNELS, TransformerConfig

Rope = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
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
        rows = x_ND.flatten(0, -2)
        if rows.device.type == "cpu" and len(rows) > _CPU_BLOCK_ROWS:  # keep temporaries in the cache and off mmap
            return torch.cat([self._block(block) for block in rows.split(_CPU_BLOCK_ROWS)]).view_as(x_ND)
        return self._block(x_ND)

    def _block(self, x_ND: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(torch.relu(self.up(x_ND)).square())
        if torch.is_grad_enabled():
            return self.down(F.silu(self.gate(x_ND)) * self.up(x_ND))
        return self.down(F.silu(self.gate(x_ND), inplace=True).mul_(self.up(x_ND)))


class DecoderLayer(nn.Module):
    """One layer of either tower: pre-norm attention and MLP with residuals. A leading B may stand before every shape."""

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

    def forward(self, x_ND: torch.Tensor, rope: Rope, attend: Attend, first: int = 0) -> torch.Tensor:
        """The whole layer for the tokens from ``first`` on, as training takes it: one call, so that its weights may be
        gathered from several processes around it.

        Args:
            x_ND: Hidden states.
            rope: Cosine and sine [N, d].
            attend: From queries [h, n, d] and own keys and values [k, N, d] to what is attended [h, n, d].
            first: Tokens before it serve as keys and values only.
        """
        normed = self.attention_norm(x_ND)
        keys, values = rotate(self.keys(normed), rope).transpose(-3, -2), self.values(normed)
        asking = rope[0][..., first:, :], rope[1][..., first:, :]
        queries = self.queries(normed[..., first:, :], asking)
        return self.finish(x_ND[..., first:, :], attend(queries, keys, values))

    def queries(self, normed_ND: torch.Tensor, rope: Rope) -> torch.Tensor:
        """[h, N, d], normalised and rotated."""
        return rotate(self.q_norm(self._heads(self.q(normed_ND))), rope).transpose(-3, -2)

    def keys(self, normed_ND: torch.Tensor) -> torch.Tensor:
        """[N, k, d], normalised, not rotated."""
        return self.k_norm(self._heads(self.k(normed_ND)))

    def values(self, normed_ND: torch.Tensor) -> torch.Tensor:
        """[k, N, d]"""
        return self._heads(self.v(normed_ND)).transpose(-3, -2)

    def finish(self, x_ND: torch.Tensor, attended_hNd: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP, each with its residual."""
        x_ND = self.out(attended_hNd.transpose(-3, -2).flatten(-2)).add_(x_ND)
        return self.mlp(self.mlp_norm(x_ND)).add_(x_ND)

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
            kept.append((rotate(k_gen, rope).transpose(0, 1).contiguous(), v_kSd.contiguous()))
            if i + 1 < len(self.layers):
                k_kSd = rotate(k_Skd, rope).transpose(0, 1)
                x_SD = layer.finish(x_SD, _attend(layer.queries(normed, rope), k_kSd, v_kSd, causal=True))
        return TextKV(tuple(kept))


class GenerationTower(nn.Module):
    """Full attention of the generation tokens over the prompt and themselves."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config, qk_norm=True) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config)

    def forward(self, x_BND: torch.Tensor, rope: Rope, texts: Sequence[TextKV], groups: Sequence[slice]) -> list[torch.Tensor]:
        """Final hidden states [B, tokens, D] of some groups of tokens; in the last layer nothing else is computed.

        Groups are computed one by one, so that a group's numbers do not depend on which others are asked for.

        Args:
            x_BND: Embedded tokens.
            rope: Cosine and sine [B, N, d].
            texts: Each branch's prompt.
            groups: Slices of the tokens.
        """
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            normed = layer.attention_norm(x_BND)
            keys, values = rotate(layer.keys(normed), rope).transpose(1, 2), layer.values(normed)
            memory = [
                (torch.cat([text.layers[i][0], k], dim=1), torch.cat([text.layers[i][1], v], dim=1))
                for text, k, v in zip(texts, keys, values, strict=True)
            ]
            if i + 1 == len(self.layers):
                return [self._last(layer, x_BND, normed, rope, memory, group) for group in groups]
            x_BND = layer.finish(x_BND, _attend_each(layer.queries(normed, rope), memory))
        raise AssertionError("a tower has at least one layer")

    def _last(
        self,
        layer: DecoderLayer,
        x_BND: torch.Tensor,
        normed_BND: torch.Tensor,
        rope: Rope,
        memory: Sequence[tuple[torch.Tensor, torch.Tensor]],
        group: slice,
    ) -> torch.Tensor:
        if group.start == group.stop:
            return x_BND[:, group]
        queries = layer.queries(normed_BND[:, group], (rope[0][:, group], rope[1][:, group]))
        return self.norm(layer.finish(x_BND[:, group], _attend_each(queries, memory)))


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
        texts: Sequence[TextKV],
        head: ActionHead,
        vision_group: slice,
        action_group: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Velocities of one denoising step.

        Args:
            vision_VP: Vision tokens. action_TA: Action rows.
            time_D: Embedding of the step's timestep, in the model's type; only noisy tokens receive it.
            noisy_N1: 1 where a token is noisy, 0 where it is given, in the model's type.
            rope: Cosine and sine [B, N, d] of the generation tokens: positions follow from a prompt's length.
            texts: The B prompts.
            vision_group, action_group: Tokens whose velocities are wanted.

        Returns:
            Velocities of the two groups, [B, tokens, P] and [B, tokens, A], in the model's type.
        """
        vision_VD = self.proj_in(vision_VP.to(self.dtype))
        action_TD = action_TA.to(self.dtype) @ head.w_in + head.b_in + self.action_modality_embed
        x_ND = torch.cat([vision_VD, action_TD]) + noisy_N1 * time_D
        x_BND = x_ND.expand(len(texts), -1, -1)
        of_vision, of_action = self.generation(x_BND, rope, texts, (vision_group, action_group))
        return self.proj_out(of_vision), of_action @ head.w_out + head.b_out


def _attend(q_hNd: torch.Tensor, k_kMd: torch.Tensor, v_kMd: torch.Tensor, causal: bool = False) -> torch.Tensor:
    return F.scaled_dot_product_attention(q_hNd[None], k_kMd[None], v_kMd[None], is_causal=causal, enable_gqa=True)[0]


def _attend_each(q_BhNd: torch.Tensor, memory: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Each branch over its own keys and values, which differ in number."""
    return torch.stack([_attend(q_hNd, k, v) for q_hNd, (k, v) in zip(q_BhNd, memory, strict=True)])


def rotate(x_Nhd: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Queries or keys [N, h, d] turned by their positions; a leading B may stand before every shape."""
    cos_Nd, sin_Nd = rope  # both halves of a row are equal
    first, second = x_Nhd.chunk(2, dim=-1)
    if torch.is_grad_enabled():
        return x_Nhd * cos_Nd[..., None, :] + torch.cat([-second, first], dim=-1) * sin_Nd[..., None, :]
    sin = sin_Nd[..., None, : first.shape[-1]]
    rotated = x_Nhd * cos_Nd[..., None, :]
    rotated[..., : first.shape[-1]] -= second * sin
    rotated[..., first.shape[-1] :] += first * sin
    return rotated
