"""The checkpoints that are known by name: their sizes, the actions they speak, and how they are asked by default.

Sizes and repositories: NVIDIA's model cards and released configs. A policy checkpoint has the sizes of its base
model, so sizes do not tell what its actions mean: that comes from this table by name, from the checkpoint's own
metadata, or from the caller, and never from a width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from strands_cosmos3.embodiments import EDGE_POLICY_PRESET, MIDTRAIN_PRESET, POLICY_PRESET, SamplerPreset
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.errors import UnknownNameError, VariantError

PromptFormat = Literal["plain", "json"]
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "hidden_act",
)


@dataclass(frozen=True)
class Variant:
    """One released checkpoint, or a small one of the same architecture.

    Args:
        name: What ``variant=`` calls it.
        repo_id: Where it is released, or None.
        sizes: Values its config must have; empty for small ones.
        action_space: What its actions mean, or None where each checkpoint says so itself.
        preset: Reference sampling.
        prompt_format: Reference prompt. For the Nano policy the released server sends the plain one although the open
            recipe trains JSON; it could not be checked against real weights.
    """

    name: str
    repo_id: str | None
    sizes: Mapping[str, object]
    action_space: str | None
    preset: SamplerPreset
    prompt_format: PromptFormat = "json"

    def check(self, config: TransformerConfig) -> None:
        """Compare a config with this variant.

        Raises:
            VariantError: A size differs; all of them are listed.
        """
        wrong = [
            f"{name} is {getattr(config, name)}, {self.name} has {value}"
            for name, value in self.sizes.items()
            if getattr(config, name) != value
        ]
        if wrong:
            raise VariantError(f"this is not a {self.name!r} checkpoint: {'; '.join(wrong)}. Leave `variant` unset?")


def _sizes(*values: object) -> Mapping[str, object]:
    return MappingProxyType(dict(zip(_SIZES, values, strict=True)))


_EDGE = _sizes(2048, 28, 16, 8, 9216, 131072, "relu2")
_NANO = _sizes(4096, 36, 32, 8, 12288, 151936, "silu")
_SUPER = _sizes(5120, 64, 64, 8, 25600, 151936, "silu")
_ANY: Mapping[str, object] = MappingProxyType({})
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        v.name: v
        for v in (
            Variant("edge", "nvidia/Cosmos3-Edge", _EDGE, "midtrain", MIDTRAIN_PRESET),
            Variant("nano", "nvidia/Cosmos3-Nano", _NANO, "midtrain", MIDTRAIN_PRESET),
            Variant("super", "nvidia/Cosmos3-Super", _SUPER, "midtrain", MIDTRAIN_PRESET),
            Variant("nano-policy-droid", "nvidia/Cosmos3-Nano-Policy-DROID", _NANO, "joint_pos", POLICY_PRESET, "plain"),
            Variant("edge-policy-droid", "nvidia/Cosmos3-Edge-Policy-DROID", _EDGE, "joint_pos", EDGE_POLICY_PRESET),
            Variant("small-silu", None, MappingProxyType({"hidden_act": "silu"}), None, MIDTRAIN_PRESET),
            Variant("small-relu2", None, MappingProxyType({"hidden_act": "relu2"}), None, MIDTRAIN_PRESET),
        )
    }
)


def get_variant(name: str) -> Variant:
    """The variant of that name.

    Raises:
        UnknownNameError: No such variant; the message lists them.
    """
    if name not in VARIANTS:
        raise UnknownNameError("variant", name, VARIANTS)
    return VARIANTS[name]


def variant_of_repo(repo_id: str) -> Variant | None:
    """The variant released under a repository, or in a local folder of the same name; None if none is."""
    tail = repo_id.rsplit("/", 1)[-1]
    return next((v for v in VARIANTS.values() if v.repo_id and v.repo_id.rsplit("/", 1)[-1] == tail), None)


def variant_of_sizes(config: TransformerConfig) -> Variant:
    """The small variant of a config's kind, for a checkpoint that no table and no metadata names."""
    return VARIANTS["small-relu2" if config.hidden_act == "relu2" else "small-silu"]
