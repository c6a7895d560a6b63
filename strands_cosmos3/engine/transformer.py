"""The two towers of Cosmos 3: text yields keys and values once; generation reads them at every
denoising step.

Modules carry the names of the released checkpoint. Below ``text.`` and ``generation.`` a
parameter's name is its key there.

Shape suffixes: N generation tokens, n those of a stream, P numbers in one, S text tokens, T action
rows, A action width, D hidden, h query heads, k key heads, d head width; B guidance branches in
inference, windows in training.

Source: diffusers 0.42.1 ``Cosmos3OmniTransformer``, the oracle of the tests, whose order of
rounding is kept for bfloat16, and ``Cosmos3VLTextRotaryEmbedding``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from strands_cosmos3.engine.arrays import Array
from strands_cosmos3.engine.config import TIME_CHANNELS, TransformerConfig
from strands_cosmos3.engine.sequence import Rope, rotations
from strands_cosmos3.engine.text_cache import KeysValues, TextKV

# from queries [..., h, n, d] to what they attend to, of the same shape
Attend = Callable[[torch.Tensor], torch.Tensor]
# from a layer's own keys and values [..., k, N, d]
Attention = Callable[[torch.Tensor, torch.Tensor], Attend]
# of a layer: from its keys and values of each prompt, and its own
PromptAttention = Callable[[Sequence[KeysValues], torch.Tensor, torch.Tensor], Attend]
ALL_TOKENS = (slice(None),)
_CPU_BLOCK_ROWS = 1024

TEXT_NAMES: Mapping[str, str] = {
    "q": "self_attn.to_q",
    "k": "self_attn.to_k",
    "v": "self_attn.to_v",
    "out": "self_attn.to_out",
    "q_norm": "self_attn.norm_q",
    "k_norm": "self_attn.norm_k",
    "k_norm_for_gen": "self_attn.k_norm_und_for_gen",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
}
GENERATION_NAMES: Mapping[str, str] = {
    "q": "self_attn.add_q_proj",
    "k": "self_attn.add_k_proj",
    "v": "self_attn.add_v_proj",
    "out": "self_attn.to_add_out",
    "q_norm": "self_attn.norm_added_q",
    "k_norm": "self_attn.norm_added_k",
    "attention_norm": "input_layernorm_moe_gen",
    "mlp_norm": "post_attention_layernorm_moe_gen",
    "mlp": "mlp_moe_gen",
}


def rope_tables(
    positions_3N: Array, config: TransformerConfig, device: torch.device, dtype: torch.dtype
) -> Rope:
    """Cosine and sine [N, d] of :func:`~strands_cosmos3.engine.sequence.rotations`, which are
    computed on the CPU.
    """
    cos_Nd, sin_Nd = rotations(positions_3N, rope_frequencies(config), config)
    return cos_Nd.to(device, dtype), sin_Nd.to(device, dtype)


def rope_frequencies(config: TransformerConfig) -> torch.Tensor:
    """[d / 2] angles a position, float32, as the oracle rounds them."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / (config.rope_theta**exponent)


@dataclass(frozen=True)
class ActionHead:
    """Projections of one domain: into the model [A, D] and [D], out of it [D, A] and [A]; a
    leading R for several requests'.
    """

    w_in: torch.Tensor
    b_in: torch.Tensor
    w_out: torch.Tensor
    b_out: torch.Tensor

    def read(self, action_TA: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, D] of action rows; a leading R is allowed."""
        return action_TA @ self.w_in + (self.b_in if self.b_in.ndim == 1 else self.b_in[:, None])

    def write(self, action_BTD: torch.Tensor) -> torch.Tensor:
        """Velocities [B, T, A] of final hidden states, for whole rounds of the R requests."""
        if self.b_out.ndim == 1:
            return action_BTD @ self.w_out + self.b_out
        by_request = action_BTD.unflatten(0, (-1, len(self.b_out)))
        return (by_request @ self.w_out + self.b_out[:, None]).flatten(0, 1)


@dataclass(frozen=True)
class StreamHead:
    """From the tokens [n, P] of a stream to hidden states [n, D], and from these to velocities."""

    read: Callable[[torch.Tensor], torch.Tensor]
    write: Callable[[torch.Tensor], torch.Tensor]


class RmsNorm(nn.Module):
    """RMS norm over the last axis. Edge (``nemotron``) multiplies the weight in float32, the
    others in the weight's dtype.
    """

    def __init__(self, size: int, config: TransformerConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = config.rms_norm_eps
        self.nemotron = config.nemotron

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.weight.shape
        if self.nemotron:
            return F.rms_norm(x.float(), shape, self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x.to(self.weight.dtype), shape, eps=self.eps) * self.weight


class Mlp(nn.Module):
    """silu(gate) * up, or relu(up) squared without a gate."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        D = config.hidden_size
        inner = config.intermediate_size
        self.gate_proj = nn.Linear(D, inner, bias=False) if config.hidden_act == "silu" else None
        self.up_proj = nn.Linear(D, inner, bias=False)
        self.down_proj = nn.Linear(inner, D, bias=False)

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        rows = x_ND.flatten(0, -2)
        # keep temporaries in the cache and off mmap
        if rows.device.type == "cpu" and len(rows) > _CPU_BLOCK_ROWS:
            return torch.cat([self._block(block) for block in rows.split(_CPU_BLOCK_ROWS)]).view_as(
                x_ND
            )
        return self._block(x_ND)

    def _block(self, x_ND: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(torch.relu(self.up_proj(x_ND)).square())
        if torch.is_grad_enabled():
            return self.down_proj(F.silu(self.gate_proj(x_ND)) * self.up_proj(x_ND))
        return self.down_proj(F.silu(self.gate_proj(x_ND), inplace=True).mul_(self.up_proj(x_ND)))


class DecoderLayer(nn.Module):
    """One layer of either tower: pre-norm attention and MLP with residuals. A leading B may stand
    before every shape.

    Args:
        names: :data:`TEXT_NAMES` or :data:`GENERATION_NAMES`: role of a module -> its released
            name.
        keys_only: Whether to make only what keys and values need.
    """

    def __init__(
        self, config: TransformerConfig, names: Mapping[str, str], keys_only: bool = False
    ):
        super().__init__()
        D = config.hidden_size
        d = config.head_dim
        heads = config.num_attention_heads * d
        key_heads = config.num_key_value_heads * d
        linear = partial(nn.Linear, bias=config.attention_bias)
        normed = config.qk_norm_for_text or names is GENERATION_NAMES
        modules: dict[str, nn.Module] = {
            "q": linear(D, heads),
            "k": linear(D, key_heads),
            "v": linear(D, key_heads),
            "out": linear(heads, D),
            "q_norm": RmsNorm(d, config) if normed else nn.Identity(),
            "k_norm": RmsNorm(d, config) if normed else nn.Identity(),
            "k_norm_for_gen": RmsNorm(d, config) if config.text_k_norm_for_gen else nn.Identity(),
            "attention_norm": RmsNorm(D, config),
            "mlp_norm": RmsNorm(D, config),
            "mlp": Mlp(config),
        }
        self.names = names
        self.head_dim = d
        self.self_attn = nn.Module()
        for role in names:
            if not keys_only or role in ("k", "v", "k_norm", "k_norm_for_gen", "attention_norm"):
                owner, _, name = names[role].rpartition(".")
                self.get_submodule(owner).add_module(name, modules[role])

    def at(self, role: str) -> Any:
        """The module of a role; its name depends on the tower."""
        return attrgetter(self.names[role])(self)

    def forward(
        self,
        x_ND: torch.Tensor,
        rope: Rope,
        attention: Attention,
        groups: Sequence[slice] = ALL_TOKENS,
    ) -> list[torch.Tensor]:
        """Run the layer for some groups of tokens; all of ``x_ND`` serve as keys and values.

        Groups are computed one by one, so that the numbers of one do not depend on which others are
        wanted. The layer is one call, so that training can gather its weights from several
        processes around it.
        """
        normed = self.at("attention_norm")(x_ND)
        attend = attention(rotate(self.keys(normed), rope).transpose(-3, -2), self.values(normed))
        hidden = [
            self._group(x_ND[..., group, :], normed[..., group, :], _part(rope, group), attend)
            for group in groups
        ]
        # the MLP needs their memory; torch.compile knows no `del` of what a comprehension reads
        normed = attend = None
        return [self.with_mlp(group) if group.shape[-2] else group for group in hidden]

    def _group(
        self, x_ND: torch.Tensor, normed_ND: torch.Tensor, rope: Rope, attend: Attend
    ) -> torch.Tensor:
        if not x_ND.shape[-2]:
            return x_ND
        return self.with_attended(x_ND, attend(self.queries(normed_ND, rope)))

    def queries(self, normed_ND: torch.Tensor, rope: Rope) -> torch.Tensor:
        """[h, N, d], normalised and rotated."""
        return rotate(self.at("q_norm")(self._heads(self.at("q")(normed_ND))), rope).transpose(
            -3, -2
        )

    def keys(self, normed_ND: torch.Tensor) -> torch.Tensor:
        """[N, k, d], normalised, not rotated."""
        return self.at("k_norm")(self._heads(self.at("k")(normed_ND)))

    def values(self, normed_ND: torch.Tensor) -> torch.Tensor:
        """[k, N, d]"""
        return self._heads(self.at("v")(normed_ND)).transpose(-3, -2)

    def with_attended(self, x_ND: torch.Tensor, attended_hNd: torch.Tensor) -> torch.Tensor:
        """Output projection and its residual."""
        return self.at("out")(attended_hNd.transpose(-3, -2).flatten(-2)).add_(x_ND)

    def with_mlp(self, x_ND: torch.Tensor) -> torch.Tensor:
        """MLP and its residual."""
        return self.at("mlp")(self.at("mlp_norm")(x_ND)).add_(x_ND)

    def _heads(self, flat: torch.Tensor) -> torch.Tensor:
        # head counts follow from the weights: shards of them work too
        return flat.unflatten(-1, (-1, self.head_dim))


class TextTower(nn.Module):
    """Causal attention over the prompt. The last layer yields keys and values only and has no
    other modules.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        embedding = torch.empty(config.vocab_size, config.hidden_size)
        # the default, normal_, makes torch import for seconds on the meta device
        embedding.uniform_(-1, 1)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=embedding)
        last = config.num_hidden_layers - 1
        self.layers = nn.ModuleList(
            DecoderLayer(config, TEXT_NAMES, keys_only=i == last) for i in range(last + 1)
        )

    def forward(self, ids_S: torch.Tensor, rope: Rope) -> TextKV:
        """Keys and values of one prompt [S], or of several [B, S] that are padded at their ends.

        Weights that are kept elsewhere than ``ids_S`` come to its device one layer at a time.
        """
        device = ids_S.device
        with on_device(self.embed_tokens, device):
            x_SD = self.embed_tokens(ids_S)
        layers_kv = []
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            with on_device(layer, device):
                normed = layer.at("attention_norm")(x_SD)
                k_Skd = layer.keys(normed)
                v_kSd = layer.values(normed)
                k_gen_kSd = rotate(layer.at("k_norm_for_gen")(k_Skd), rope).transpose(-3, -2)
                layers_kv.append((k_gen_kSd.contiguous(), v_kSd.contiguous()))
                if i + 1 < len(self.layers):
                    k_kSd = rotate(k_Skd, rope).transpose(-3, -2)
                    q_hSd = layer.queries(normed, rope)
                    attended_hSd = grouped_attention(q_hSd, k_kSd, v_kSd, causal=True)
                    x_SD = layer.with_mlp(layer.with_attended(x_SD, attended_hSd))
        return TextKV(tuple(layers_kv))


@contextmanager
def on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Copies of a module's weights on a device, where they are elsewhere."""
    kept = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter.device != device
    ]
    for owner, name, parameter in kept:
        copied = nn.Parameter(parameter.to(device), requires_grad=False)
        owner.register_parameter(name, copied)
    try:
        yield
    finally:
        for owner, name, parameter in kept:
            owner.register_parameter(name, parameter)


class GenerationTower(nn.Module):
    """Attention of the generation tokens over the prompt and themselves."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.layers = nn.ModuleList(
            DecoderLayer(config, GENERATION_NAMES) for _ in range(config.num_hidden_layers)
        )
        self.norm_moe_gen = RmsNorm(config.hidden_size, config)

    def forward(
        self,
        x_BND: torch.Tensor,
        rope: Rope,
        attentions: Sequence[Attention],
        groups: Sequence[slice],
    ) -> list[torch.Tensor]:
        """Final hidden states [B, tokens, D] of some groups of tokens; in the last layer nothing
        else is computed.

        ``attentions``, one for each layer, know the prompts' keys and values there; ``rope`` is
        cosine and sine [B, N, d].
        """
        *inner, last = zip(self.layers, attentions, strict=True)
        for layer, attention in inner:
            (x_BND,) = layer(x_BND, rope, attention)
        return [self.norm_moe_gen(hidden) for hidden in last[0](x_BND, rope, last[1], groups)]


class SoundHead(nn.Module):
    """Projections of sound latents [S, P] into the model and out of it. Its parameters carry their
    released names, which are those of the transformer itself.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        assert config.sound_dim is not None
        self.audio_proj_in = nn.Linear(config.sound_dim, config.hidden_size)
        self.audio_proj_out = nn.Linear(config.hidden_size, config.sound_dim)
        self.audio_modality_embed = nn.Parameter(torch.zeros(config.hidden_size))

    def read(self, sound_SP: torch.Tensor) -> torch.Tensor:
        """Hidden states [S, D] of sound latents; a leading R is allowed."""
        return self.audio_proj_in(sound_SP) + self.audio_modality_embed


class TimeEmbedder(nn.Module):
    """Sinusoid of a timestep (cosines first, base 10000), then two linear layers; always in
    float32.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.linear_1 = nn.Linear(TIME_CHANNELS, config.hidden_size)
        self.linear_2 = nn.Linear(config.hidden_size, config.hidden_size)
        self.scale = config.timestep_scale

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        """[steps, D] for integer timesteps [steps]."""
        half = TIME_CHANNELS // 2
        exponent = (
            -math.log(10000)
            * torch.arange(half, dtype=torch.float32, device=timesteps.device)
            / half
        )
        angle = (timesteps * self.scale)[:, None].float() * torch.exp(exponent)
        sinusoid = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.linear_1.weight.dtype)
        return self.linear_2(F.silu(self.linear_1(sinusoid)))


def grouped_attention(
    q_hNd: torch.Tensor, k_kMd: torch.Tensor, v_kMd: torch.Tensor, causal: bool = False
) -> torch.Tensor:
    """Attention [h, N, d] with grouped heads; a leading B may stand before every shape."""
    if q_hNd.ndim == 4:
        return F.scaled_dot_product_attention(
            q_hNd, k_kMd, v_kMd, is_causal=causal, enable_gqa=True
        )
    return F.scaled_dot_product_attention(
        q_hNd[None], k_kMd[None], v_kMd[None], is_causal=causal, enable_gqa=True
    )[0]


def over_prompts(
    prompts: Sequence[KeysValues], keys_BkNd: torch.Tensor, values_BkNd: torch.Tensor
) -> Attend:
    """Attention of each branch over its own prompt and its own tokens. No mask hides anything, so
    that torch takes the fastest kernel that the device has.
    """
    sizes = [len(keys) for keys, _ in prompts]
    own = zip(keys_BkNd.split(sizes), values_BkNd.split(sizes), strict=True)
    memory = [
        [torch.cat(pair, dim=-2) for pair in zip(prompt, tokens, strict=True)]
        for prompt, tokens in zip(prompts, own, strict=True)
    ]

    def attend(queries_BhNd: torch.Tensor) -> torch.Tensor:
        outputs = [
            grouped_attention(queries, keys, values)
            for queries, (keys, values) in zip(queries_BhNd.split(sizes), memory, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    return attend


class Cosmos3Transformer(nn.Module):
    """Both towers and the projections of tokens; the caller passes the action head, since one of
    32 is in use. ``sound`` is the head of sound, where it is loaded.
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
        self.sound: SoundHead | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the projections, hence of all hidden states."""
        return self.proj_in.weight.dtype

    def heads(self, action: ActionHead, streams: int) -> tuple[StreamHead, ...]:
        """The heads of the streams, in the order of the sequence; two have no sound among them."""
        vision = StreamHead(self.proj_in, self.proj_out)
        rows = StreamHead(lambda rows: action.read(rows) + self.action_modality_embed, action.write)
        if streams == 2:
            return vision, rows
        assert self.sound is not None  # whoever made the streams checked it
        return vision, StreamHead(self.sound.read, self.sound.audio_proj_out), rows

    def embed(
        self,
        tokens: Sequence[torch.Tensor],
        time_D: torch.Tensor,
        noisy_N1: torch.Tensor,
        head: ActionHead,
    ) -> torch.Tensor:
        """Hidden states [N, D] before the first layer; arguments as in :meth:`velocity`. A
        leading B is allowed.
        """
        streams = zip(self.heads(head, len(tokens)), tokens, strict=True)
        read = [of_stream.read(tokens_nP.to(self.dtype)) for of_stream, tokens_nP in streams]
        return torch.cat(read, dim=-2) + noisy_N1 * time_D

    def project(self, hidden: Sequence[torch.Tensor], head: ActionHead) -> tuple[torch.Tensor, ...]:
        """Velocities of each stream from its final hidden states."""
        streams = zip(self.heads(head, len(hidden)), hidden, strict=True)
        return tuple(of_stream.write(hidden_nD) for of_stream, hidden_nD in streams)

    def velocity(
        self,
        tokens: Sequence[torch.Tensor],
        time_D: torch.Tensor,
        noisy_N1: torch.Tensor,
        rope: Rope,
        texts: Sequence[TextKV],
        head: ActionHead,
        groups: Sequence[slice],
        attention: PromptAttention = over_prompts,
    ) -> tuple[torch.Tensor, ...]:
        """Velocities of one denoising step, [B, tokens, P] for each stream's group of tokens.

        Args:
            tokens: The tokens [n, P] of each stream, in the order of the sequence.
            time_D: Embedding of the step's timestep, in the model's dtype; it is added to noisy
                tokens only.
            noisy_N1: 1 where a token is noisy, 0 where it is given, in the model's dtype.
            rope: Cosine and sine [B, N, d]; positions depend on the length of a branch's prompt.
            texts: The B prompts, see :func:`side_by_side`.
            groups: Those tokens of each stream whose velocity is wanted.
            attention: What a layer's tokens attend to.

        A leading R is allowed, for several requests: B is then R or 2 R, with the prompts of one
        branch after the other's.
        """
        x_RND = self.embed(tokens, time_D, noisy_N1, head)
        branches = len(rope[0]) // math.prod(x_RND.shape[:-2])
        # in one layout for any number of branches, so that compiled layers are one graph
        x_BND = x_RND.expand(branches, *x_RND.shape).flatten(0, -3).contiguous()
        attentions = [
            partial(attention, prompts)
            for prompts in zip(*(text.layers for text in texts), strict=True)
        ]
        firsts = accumulate((state.shape[-2] for state in tokens[:-1]), initial=0)
        of_sequence = [
            slice(first + group.start, first + group.stop)
            for first, group in zip(firsts, groups, strict=True)
        ]
        return self.project(self.generation(x_BND, rope, attentions, of_sequence), head)


def _part(rope: Rope, group: slice) -> Rope:
    return rope[0][..., group, :], rope[1][..., group, :]


def rotate(x_Nhd: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Queries or keys [N, h, d] rotated by their positions; a leading B may stand before every
    shape.
    """
    cos_Nd, sin_Nd = rope
    other_halves = x_Nhd.roll(x_Nhd.shape[-1] // 2, dims=-1)
    return other_halves.mul_(sin_Nd[..., None, :]).add_(x_Nhd * cos_Nd[..., None, :])
