"""Which weights of a released checkpoint are trained: named modules, low-rank adapters beside named ones, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from strands_cosmos3.engine.weights import checkpoint_key
from strands_cosmos3.errors import ConfigError, MissingDependencyError
from strands_cosmos3.training.flow import TrainedPolicy

HEADS = ("action_proj_*", "action_modality_embed")
"""The action heads, as the released layout calls them: what post-training needs least."""
_HEAD_KEYS = {
    "w_in": "action_proj_in.fc.weight",
    "b_in": "action_proj_in.bias.weight",
    "w_out": "action_proj_out.fc.weight",
    "b_out": "action_proj_out.bias.weight",
}


def released_key(parameter: str) -> str:
    """What the released layout calls a parameter of a :class:`TrainedPolicy`."""
    return _HEAD_KEYS.get(parameter) or checkpoint_key(parameter.removeprefix("transformer."))


def train_only(policy: TrainedPolicy, patterns: Sequence[str]) -> list[str]:
    """Freeze everything but what some patterns name.

    Args:
        policy: Changed in place.
        patterns: Shell patterns on the released layout's keys, e.g. ``layers.*.mlp_moe_gen.*``.

    Returns:
        The keys that are trained.

    Raises:
        ConfigError: A pattern matches nothing; keys that there are are named.
    """
    keys = {name: released_key(name) for name, _ in policy.named_parameters()}
    for pattern in patterns:
        if not any(fnmatchcase(key, pattern) for key in keys.values()):
            some = ", ".join(sorted(keys.values())[:: max(1, len(keys) // 8)])
            raise ConfigError(f"--train {pattern!r} names no weight of this checkpoint; there are e.g. {some}.")
    trained = []
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(keys[name], pattern) for pattern in patterns))
        if parameter.requires_grad:
            trained.append(keys[name])
    return trained


def add_lora(policy: TrainedPolicy, rank: int, targets: Sequence[str] = ("q", "k", "v", "out")) -> None:
    """Low-rank adapters beside the generation tower's projections; the weights themselves stay as they are.

    Args:
        policy: Changed in place; what was trained before still is.
        rank: Of the adapters.
        targets: Projections of a layer: ``q``, ``k``, ``v``, ``out``, ``gate``, ``up``, ``down``.

    Raises:
        MissingDependencyError: peft is not installed.
        ConfigError: No such projection.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingDependencyError("--lora-rank needs peft: pip install 'strands-cosmos3[train]'.") from error
    tower = policy.transformer.generation
    known = {name.rsplit(".", 1)[-1] for name, module in tower.named_modules() if isinstance(module, nn.Linear)}
    if unknown := [target for target in targets if target not in known]:
        raise ConfigError(f"--lora-targets {', '.join(unknown)}: a layer's projections are {', '.join(sorted(known))}.")
    before = {name for name, p in policy.named_parameters() if p.requires_grad}
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=list(targets))
    inject_adapter_in_model(config, tower)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_("lora_" in name or name.replace(".base_layer.", ".") in before)


def merged_state(policy: TrainedPolicy) -> dict[str, torch.Tensor]:
    """The policy's weights under their plain names, adapters folded in."""
    from_adapters: Any = deepcopy(policy)
    for module in from_adapters.modules():
        if hasattr(module, "base_layer") and hasattr(module, "merge"):
            module.merge()
    state = from_adapters.state_dict()
    return {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if "lora_" not in name}
