"""The released layout of the weights: names, shapes and dtypes, read off the model on the meta
device.

Source: diffusers 0.42.1 ``Cosmos3OmniTransformer``, whose state dict is the layout.
Shape suffixes: D hidden, A action width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.transformer import (
    TEXT_NAMES,
    Cosmos3Transformer,
    DecoderLayer,
    SoundHead,
)

# field of ActionHead -> key of the matrix that holds one row a domain
HEAD_KEYS: Mapping[str, str] = {
    "w_in": "action_proj_in.fc.weight",
    "b_in": "action_proj_in.bias.weight",
    "w_out": "action_proj_out.fc.weight",
    "b_out": "action_proj_out.bias.weight",
}
# Keys with these prefixes may be missing, or surplus.
OPTIONAL = ("lm_head.weight", "audio_proj_in.", "audio_proj_out.", "audio_modality_embed")
TEXT = "text."  # prefix of the text tower's parameters, which can be offloaded


def checkpoint_key(parameter: str) -> str:
    """Released name of a parameter of the transformer, e.g. ``layers.3.mlp.up_proj.weight``."""
    return parameter.removeprefix(TEXT).removeprefix("generation.")


def kept_dtype(parameter: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype in which a parameter is kept: the time embedder is always float32."""
    return torch.float32 if parameter.startswith("time_embedder.") else dtype


def head_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of one domain's action head."""
    A = config.action_dim
    D = config.hidden_size
    return {"w_in": (A, D), "b_in": (D,), "w_out": (D, A), "b_out": (A,)}


@cache
def parameter_shapes(config: TransformerConfig) -> Mapping[str, tuple[int, ...]]:
    """Every parameter of the transformer with its shape: what is loaded, apart from action
    heads.
    """
    with torch.device("meta"):
        return _shapes(Cosmos3Transformer(config))


def expected_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Every key of the released layout with its shape, including what is not loaded."""
    shapes = {checkpoint_key(name): shape for name, shape in parameter_shapes(config).items()}
    domains = config.num_embodiment_domains
    D = config.hidden_size
    vocab = config.vocab_size
    shapes |= {
        HEAD_KEYS[field]: (domains, math.prod(shape))
        for field, shape in head_shapes(config).items()
    }
    with torch.device("meta"):
        last = _shapes(DecoderLayer(config, TEXT_NAMES))
    shapes |= {
        f"layers.{config.num_hidden_layers - 1}.{name}": shape for name, shape in last.items()
    }
    shapes |= {"norm.weight": (D,), "lm_head.weight": (vocab, D)}
    return shapes | sound_shapes(config)


def sound_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Every key of the head of sound with its shape; none if the transformer has no such head."""
    if config.sound_dim is None:
        return {}
    with torch.device("meta"):
        return _shapes(SoundHead(config))


def _shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
