"""Known checkpoints: sizes (source: NVIDIA's model cards and released configs), action spaces and
default sampling.

A policy checkpoint has the sizes of its base model, so the action space never follows from them: it
comes from this table by name, from the checkpoint's metadata, or from the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from strands_cosmos3.embodiments import EDGE_POLICY_PRESET, MIDTRAIN_PRESET, POLICY_PRESET, Sampling
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.errors import UnknownNameError, VariantError
from strands_cosmos3.observe.views import Composition

PromptFormat = Literal["plain", "json"]
_HEADS = ("num_attention_heads", "num_key_value_heads")
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    *_HEADS,
    "intermediate_size",
    "vocab_size",
    "hidden_act",
)


@dataclass(frozen=True)
class Variant:
    """One released checkpoint, or a small one of the same architecture.

    For the Nano policy the released server sends the plain prompt although the open recipe trains
    JSON; we could not check it against real weights.
    """

    name: str
    repo_id: str | None
    sizes: Mapping[str, object]  # required values of the config
    action_space: str | None  # None if each checkpoint states its own
    preset: Sampling  # reference sampling
    prompt_format: PromptFormat = "json"
    composition: Composition = "letterbox"  # how three views become one picture

    def check(self, config: TransformerConfig) -> None:
        """Raise VariantError with every size of a config that differs."""
        found = {name: getattr(config, name) for name in self.sizes}
        wrong = [
            f"{k} is {found[k]}, {self.name} has {size}"
            for k, size in self.sizes.items()
            if found[k] != size
        ]
        if wrong:
            raise VariantError(
                f"this is not a {self.name!r} checkpoint: {'; '.join(wrong)}. Leave `variant` "
                "unset?"
            )


def _sizes(*values: object) -> Mapping[str, object]:
    return MappingProxyType(dict(zip(_SIZES, values, strict=True)))


_EDGE = _sizes(2048, 28, 16, 8, 9216, 131072, "relu2")
_NANO = _sizes(4096, 36, 32, 8, 12288, 151936, "silu")
_SUPER = _sizes(5120, 64, 64, 8, 25600, 151936, "silu")
_ACTS = ("silu", "relu2")
_NVIDIA = "nvidia/Cosmos3-"
_ALL = (
    Variant("edge", f"{_NVIDIA}Edge", _EDGE, "midtrain", MIDTRAIN_PRESET),
    Variant("nano", f"{_NVIDIA}Nano", _NANO, "midtrain", MIDTRAIN_PRESET),
    Variant("super", f"{_NVIDIA}Super", _SUPER, "midtrain", MIDTRAIN_PRESET),
    Variant(
        "nano-policy-droid",
        f"{_NVIDIA}Nano-Policy-DROID",
        _NANO,
        "joint_pos",
        POLICY_PRESET,
        "plain",
        "framework",
    ),
    Variant(
        "edge-policy-droid",
        f"{_NVIDIA}Edge-Policy-DROID",
        _EDGE,
        "joint_pos",
        EDGE_POLICY_PRESET,
        "json",
        "framework",
    ),
    *(
        Variant(f"small-{act}", None, MappingProxyType({"hidden_act": act}), None, MIDTRAIN_PRESET)
        for act in _ACTS
    ),
)
VARIANTS: Mapping[str, Variant] = MappingProxyType({v.name: v for v in _ALL})


def get_variant(name: str) -> Variant:
    """The variant with this name; UnknownNameError lists the names."""
    if name not in VARIANTS:
        raise UnknownNameError("variant", name, VARIANTS)
    return VARIANTS[name]


def variant_of_repo(repo_id: str) -> Variant | None:
    """The variant released as this repository or in a local folder of the same name, or None."""
    tail = repo_id.rsplit("/", 1)[-1]
    return next(
        (v for v in VARIANTS.values() if v.repo_id and v.repo_id.rsplit("/", 1)[-1] == tail), None
    )


def variant_of_sizes(config: TransformerConfig) -> Variant:
    """The small variant that fits a config, for a checkpoint without a known name."""
    return VARIANTS[f"small-{config.hidden_act}"]
