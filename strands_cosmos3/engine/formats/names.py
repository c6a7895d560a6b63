"""Names of weights: cosmos-framework's "net" names and prefixes of other formats -> the released
(diffusers) names.

Source: cosmos-framework 5eee9ed5, ``scripts/_convert_model_to_diffusers.py`` and
``inference/model.py``. A rename is the whole conversion: there are no transposes and no fused
matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from strands_cosmos3.engine.weight_source import readable
from strands_cosmos3.errors import WeightsError

# the longer names first: q_proj_moe_gen before q_proj
ATTENTION: Mapping[str, str] = MappingProxyType(
    {
        "q_proj_moe_gen": "add_q_proj",
        "k_proj_moe_gen": "add_k_proj",
        "v_proj_moe_gen": "add_v_proj",
        "o_proj_moe_gen": "to_add_out",
        "q_norm_moe_gen": "norm_added_q",
        "k_norm_moe_gen": "norm_added_k",
        "q_proj": "to_q",
        "k_proj": "to_k",
        "v_proj": "to_v",
        "o_proj": "to_out",
        "q_norm": "norm_q",
        "k_norm": "norm_k",
    }
)
HEADS: Mapping[str, str] = MappingProxyType(
    {
        "vae2llm": "proj_in",
        "llm2vae": "proj_out",
        "action2llm": "action_proj_in",
        "llm2action": "action_proj_out",
        "sound2llm": "audio_proj_in",
        "llm2sound": "audio_proj_out",
        "sound_modality_embed": "audio_modality_embed",
    }
)
TIME = MappingProxyType(
    {
        "time_embedder.mlp.0.": "time_embedder.linear_1.",
        "time_embedder.mlp.2.": "time_embedder.linear_2.",
    }
)
# the reasoner's picture encoder, which no action policy reads
_EYES = ("visual", "vision", "siglip", "projector")


def released_name(name: str) -> str:
    """The released name of a framework name without its prefix; a released name stays."""
    for old, new in TIME.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    name = name.removeprefix("language_model.").removeprefix("model.")
    head, dot, rest = name.partition(".")
    if head in HEADS:
        return f"{HEADS[head]}{dot}{rest}"
    parts = name.split(".")
    if parts[0] == "layers" and "self_attn" in parts:
        return ".".join(ATTENTION.get(part, part) for part in parts)
    return name


def framework_name(name: str) -> str:
    """The framework's name of a released one: the inverse of :func:`released_name`."""
    back = {new: old for old, new in (*ATTENTION.items(), *HEADS.items())}
    for old, new in TIME.items():
        name = name.replace(new, old)
    head, dot, rest = name.partition(".")
    if head in back:
        return f"{back[head]}{dot}{rest}"
    if head in ("layers", "embed_tokens", "norm", "norm_moe_gen"):
        return "language_model.model." + ".".join(back.get(part, part) for part in name.split("."))
    return f"language_model.{name}" if head == "lm_head" else name


def is_vision(name: str) -> bool:
    """Whether a weight belongs to a picture encoder: it is listed, and skipped."""
    return any(eye in part for part in name.split(".")[:-1] for eye in _EYES)


def renamed(stored: Iterable[str], prefix: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Released name -> stored name of all weights under ``prefix``, and the rest.

    Raises WeightsError if two weights have one name.
    """
    names: dict[str, str] = {}
    rest = []
    for key in sorted(stored):
        if not key.startswith(prefix) or is_vision(key):
            rest.append(key)
            continue
        name = released_name(key.removeprefix(prefix))
        if name in names:
            raise WeightsError(
                f"{readable(key)} and {readable(names[name])} are both {readable(name)}; one is "
                "wrong."
            )
        names[name] = key
    return names, tuple(rest)
