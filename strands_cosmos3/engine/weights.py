"""Which weights a checkpoint holds, their shapes, and what our parameters are called there.

Source: diffusers 0.42.1 ``Cosmos3OmniTransformer``, whose state dict is the released layout. D hidden, I intermediate,
h / k query / key heads, d head width, V vocabulary, A action width, P numbers in a vision token.
"""

from __future__ import annotations

import re

from strands_cosmos3.engine.config import TIME_CHANNELS, TransformerConfig

OPTIONAL = ("lm_head.weight", "audio_proj_in.", "audio_proj_out.", "audio_modality_embed")
"""Keys (or their beginnings) that may be there or not: nothing here reads them."""

_TEXT_LAYER = {
    "q.": "self_attn.to_q.",
    "k.": "self_attn.to_k.",
    "v.": "self_attn.to_v.",
    "out.": "self_attn.to_out.",
    "q_norm.": "self_attn.norm_q.",
    "k_norm.": "self_attn.norm_k.",
    "k_norm_for_gen.": "self_attn.k_norm_und_for_gen.",
    "attention_norm.": "input_layernorm.",
    "mlp_norm.": "post_attention_layernorm.",
    "mlp.gate.": "mlp.gate_proj.",
    "mlp.up.": "mlp.up_proj.",
    "mlp.down.": "mlp.down_proj.",
}
_GENERATION_LAYER = {
    "q.": "self_attn.add_q_proj.",
    "k.": "self_attn.add_k_proj.",
    "v.": "self_attn.add_v_proj.",
    "out.": "self_attn.to_add_out.",
    "q_norm.": "self_attn.norm_added_q.",
    "k_norm.": "self_attn.norm_added_k.",
    "attention_norm.": "input_layernorm_moe_gen.",
    "mlp_norm.": "post_attention_layernorm_moe_gen.",
    "mlp.gate.": "mlp_moe_gen.gate_proj.",
    "mlp.up.": "mlp_moe_gen.up_proj.",
    "mlp.down.": "mlp_moe_gen.down_proj.",
}
_ELSEWHERE = {"text.embed.weight": "embed_tokens.weight", "generation.norm.weight": "norm_moe_gen.weight"}
_LAYER = re.compile(r"(text|generation)\.layers\.(\d+)\.(.+\.)(weight|bias)")


def checkpoint_key(parameter: str) -> str:
    """What the released layout calls one of our parameters, e.g. ``generation.layers.3.q.weight``."""
    match = _LAYER.fullmatch(parameter)
    if match is None:
        return _ELSEWHERE.get(parameter, parameter)
    tower, layer, inner, leaf = match.groups()
    names = _TEXT_LAYER if tower == "text" else _GENERATION_LAYER
    return f"layers.{layer}.{names[inner]}{leaf}"


def expected_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Every key of the released layout, sound heads and ``lm_head`` included, with its shape."""
    D, V = config.hidden_size, config.vocab_size
    A, P, domains = config.action_dim, config.patch_dim, config.num_embodiment_domains
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (V, D),
        "lm_head.weight": (V, D),
        "norm.weight": (D,),
        "norm_moe_gen.weight": (D,),
        "proj_in.weight": (D, P),
        "proj_in.bias": (D,),
        "proj_out.weight": (P, D),
        "proj_out.bias": (P,),
        "time_embedder.linear_1.weight": (D, TIME_CHANNELS),
        "time_embedder.linear_1.bias": (D,),
        "time_embedder.linear_2.weight": (D, D),
        "time_embedder.linear_2.bias": (D,),
        "action_proj_in.fc.weight": (domains, A * D),
        "action_proj_in.bias.weight": (domains, D),
        "action_proj_out.fc.weight": (domains, D * A),
        "action_proj_out.bias.weight": (domains, A),
        "action_modality_embed": (D,),
    }
    if config.sound_dim:
        S = config.sound_dim
        shapes |= {"audio_proj_in.weight": (D, S), "audio_proj_in.bias": (D,), "audio_proj_out.weight": (S, D)}
        shapes |= {"audio_proj_out.bias": (S,), "audio_modality_embed": (D,)}
    for layer in range(config.num_hidden_layers):
        for names, text in ((_TEXT_LAYER, True), (_GENERATION_LAYER, False)):
            for ours, shape in _layer_shapes(config, text).items():
                shapes[f"layers.{layer}.{names[ours]}weight"] = shape
                if config.attention_bias and ours in ("q.", "k.", "v.", "out."):
                    shapes[f"layers.{layer}.{names[ours]}bias"] = shape[:1]
    return shapes


def _layer_shapes(config: TransformerConfig, text: bool) -> dict[str, tuple[int, ...]]:
    D, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    hd, kd = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {"q.": (hd, D), "k.": (kd, D), "v.": (kd, D), "out.": (D, hd)}
    shapes |= {"attention_norm.": (D,), "mlp_norm.": (D,), "mlp.up.": (inner, D), "mlp.down.": (D, inner)}
    if config.hidden_act == "silu":
        shapes["mlp.gate."] = (inner, D)
    if not text or config.qk_norm_for_text:
        shapes |= {"q_norm.": (d,), "k_norm.": (d,)}
    if text and config.text_k_norm_for_gen:
        shapes["k_norm_for_gen."] = (d,)
    return shapes


def optional(key: str) -> bool:
    """Whether a checkpoint may lack this key, or hold it without need."""
    return key.startswith(OPTIONAL)
