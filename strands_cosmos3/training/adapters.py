"""Weights of a released checkpoint in training: those that are trained, low-rank adapters, and
released names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.loading import load_action_head, load_transformer
from strands_cosmos3.engine.transformer import GENERATION_NAMES
from strands_cosmos3.engine.weights import HEAD_KEYS, checkpoint_key
from strands_cosmos3.errors import ConfigError, MissingDependencyError
from strands_cosmos3.extras import pip_command
from strands_cosmos3.training.flow import TrainedPolicy

ALPHA = 2
"""An adapter is added as ``ALPHA`` B A: its ``lora_alpha`` is ``ALPHA`` times its rank."""
_PROJECTIONS = {role: GENERATION_NAMES[role].rpartition(".")[2] for role in ("q", "k", "v", "out")}
_PROJECTIONS |= {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def released_key(parameter: str) -> str:
    """Released name of a parameter of a :class:`TrainedPolicy`."""
    return HEAD_KEYS.get(parameter) or checkpoint_key(parameter.removeprefix("transformer."))


def train_only(policy: TrainedPolicy, patterns: Sequence[str]) -> list[str]:
    """Freeze every parameter that no shell pattern matches; return the others' names. One
    without a match: ConfigError.
    """
    keys = {name: released_key(name) for name, _ in policy.named_parameters()}
    for pattern in patterns:
        if not any(fnmatchcase(key, pattern) for key in keys.values()):
            some = ", ".join(sorted(keys.values())[:: max(1, len(keys) // 8)])
            raise ConfigError(
                f"--train {pattern!r} matches no weight of this checkpoint; it "
                f"has, for example, {some}."
            )
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(keys[name], pattern) for pattern in patterns))
    return [keys[name] for name, p in policy.named_parameters() if p.requires_grad]


def add_lora(policy: TrainedPolicy, rank: int, targets: Sequence[str], seed: int) -> None:
    """Freeze projections (q, k, v, out, gate, up, down; else ConfigError) of the generation
    tower and add low-rank adapters, in every process the same.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingDependencyError(f"--lora-rank needs peft: {pip_command(['train'])}") from error
    tower = policy.transformer.generation
    made = {name.rpartition(".")[2] for name, _ in tower.named_modules()}
    known = {role: name for role, name in _PROJECTIONS.items() if name in made}
    if unknown := [target for target in targets if target not in known]:
        raise ConfigError(
            f"--lora-targets {', '.join(unknown)}: a layer's projections "
            f"are {', '.join(sorted(known))}."
        )
    before = {name for name, p in policy.named_parameters() if p.requires_grad}
    config = LoraConfig(
        r=rank,
        lora_alpha=ALPHA * rank,
        lora_dropout=0.0,
        target_modules=[known[target] for target in targets],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, tower)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_("lora_" in name or name.replace(".base_layer.", ".") in before)


def merged_state(policy: TrainedPolicy) -> dict[str, torch.Tensor]:
    """The policy's weights with adapters merged into them, under the names they have without
    adapters.
    """
    state = policy.state_dict()
    return merged_weights(state, state.__getitem__)  # it has those that adapters are added to


def merged_weights(
    weights: Mapping[str, torch.Tensor], base: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """As :func:`merged_state`, of weights without those that adapters are added to, which ``base``
    returns by their names.
    """
    merged = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in weights.items()
        if ".lora_" not in name
    }
    for name, down in weights.items():
        module, found, adapter = name.partition(".lora_A.")
        if found:
            key, up = f"{module}.weight", weights[f"{module}.lora_B.{adapter}"]
            trained = merged.get(key)
            merged[key] = (base(key) if trained is None else trained) + ALPHA * up @ down
    return merged


def adapter_numbers(shapes: Mapping[str, Sequence[int]], rank: int, targets: Sequence[str]) -> int:
    """Return how many numbers adapters have, of a checkpoint with weights of these shapes."""
    ends = tuple(f"{_PROJECTIONS.get(target)}.weight" for target in targets)
    adapted = [name for name in shapes if name.endswith(ends) and ".mlp." not in name]
    return rank * sum(sum(shapes[name]) for name in adapted)


def adapter_state(policy: TrainedPolicy) -> dict[str, torch.Tensor]:
    """The adapters alone, named as diffusers' ``load_lora_adapter`` reads them; empty without
    adapters.
    """
    state = {}
    for name, tensor in policy.state_dict().items():
        # ..., "A.default.weight" or "B.default.weight"
        module, found, side = name.partition(".lora_")
        if found:
            key = released_key(f"{module}.weight").removesuffix(".weight")
            state[f"transformer.{key}.lora_{side[0]}.weight"] = tensor.detach().contiguous()
    return state


def load_policy(checkpoint: Checkpoint, domain: int) -> TrainedPolicy:
    """The transformer of a checkpoint and the head of one domain, in float32, for training."""
    device = torch.device("cpu")
    dtype = torch.float32
    head = load_action_head(checkpoint, domain, device, dtype)
    return TrainedPolicy(load_transformer(checkpoint, device, dtype), head)


def replace_weights(
    weights: Mapping[str, torch.Tensor], policy: Mapping[str, torch.Tensor], domain: int
) -> dict[str, torch.Tensor]:
    """Released tensors with those of a :class:`TrainedPolicy`, which fill one domain's row of
    the heads; dtypes stay.
    """
    out = dict(weights)
    for name, tensor in policy.items():
        if (key := released_key(name)) not in out:  # it is in another file of the checkpoint
            continue
        stored = out[key]
        tensor = tensor.detach().to(stored.dtype)
        if name in HEAD_KEYS:
            out[key] = stored.clone()
            out[key][domain] = tensor.reshape(-1)
        else:
            out[key] = tensor.reshape(stored.shape).contiguous()
    return out
