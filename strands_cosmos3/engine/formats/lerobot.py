"""LeRobot policy folders: one safetensors file with transformer and VAE, their configs inside ``config.json``.

Source: huggingface/lerobot 68ff20d2 (pull request 3745), ``policies/cosmos3``, and ``processor/normalize_processor.py``. The
statistics are in the state of the steps ``normalizer_processor`` and ``unnormalizer_processor``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.formats.contract import FIELDS
from strands_cosmos3.engine.formats.layout import Layout, OnBase, first_existing
from strands_cosmos3.engine.formats.names import is_vision
from strands_cosmos3.engine.formats.sources import Renamed
from strands_cosmos3.engine.weight_files import WeightFiles, opened
from strands_cosmos3.engine.weight_source import WeightSource, require_finite
from strands_cosmos3.errors import LayoutError
from strands_cosmos3.resources import shown

TYPES = ("cosmos3", "cosmos3_edge")
_MODES = {"IDENTITY": "none", "QUANTILES": "quantile", "MEAN_STD": "meanstd", "MIN_MAX": "minmax"}
_NEEDED = {"quantile": ("q01", "q99"), "meanstd": ("mean", "std"), "minmax": ("min", "max")}
_FIGURES = ("q01", "q99", "mean", "std", "min", "max")
_NAMED = {
    "domain_name": "domain",
    "action_space": "action_space",
    "raw_action_dim": "width",
    "chunk_size": "chunk",
    "conditioning_fps": "fps",
    "resolution_tier": "resolution_tier",
    "image_keys": "views",
}
_SAMPLING = {"num_inference_steps": "num_steps", "guidance_scale": "guidance_scale", "shift": "flow_shift"}
_LANDMARKS = {"transformer": "time_embedder.linear_1.weight", "vae": "decoder.conv_in.weight"}
_STEPS = "policy_postprocessor.json"


class LeRobotPolicy(OnBase):
    """A folder that LeRobot's ``save_pretrained`` wrote. Only the tokenizer comes from the base, or from the folder."""

    format = "LeRobot policy"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._config = self.read("config.json")
        self._files: WeightFiles | None = None

    def model_index(self) -> dict[str, Any]:
        return {}

    def transformer_config(self) -> dict[str, Any]:
        return self._inlined("transformer_config")

    def vae_config(self) -> dict[str, Any]:
        return self._inlined("vae_config" if "vae_config" in self._config else "wan_vae_config")

    def scheduler_config(self) -> dict[str, Any]:
        return self._inlined("scheduler_config")

    def weights(self) -> WeightSource:
        prefix, other = self._prefix("transformer"), self._prefix("vae")
        stored = self._stored().shapes
        self.skipped = tuple(sorted(key for key in stored if not key.startswith((prefix, other))))
        if unknown := [key for key in self.skipped if not is_vision(key)]:
            raise LayoutError(f"{self.root} holds weights of neither transformer nor VAE: {shown(unknown[:6])}.")
        return self._part(prefix)

    def vae_weights(self) -> WeightSource:
        return self._part(self._prefix("vae"))

    def preview(self) -> None:
        return None

    @property
    def tokenizer(self) -> Path:
        for folder in (self.root / "text_tokenizer", self.root):
            if (folder / "tokenizer.json").exists():
                return folder
        return self._base().tokenizer

    def recorded(self) -> Mapping[str, Any]:
        """The policy's config and processor steps. The gripper's sense is known where ``invert_gripper`` is set alone."""
        config = self._config
        found = {ours: config[theirs] for theirs, ours in _NAMED.items() if theirs in config}
        found["sampling"] = {ours: config.get(theirs) for theirs, ours in _SAMPLING.items()}
        if config.get("invert_gripper") is True:  # their rows count 1 as closed, and the model's are flipped
            found["gripper"] = "1=open"
        tier = found.get("resolution_tier")
        found["resolution_tier"] = int(tier) if isinstance(tier, str) and tier.isdecimal() else tier
        valid = {name: value for name, value in found.items() if FIELDS[name][0](value)}
        return valid | self._normalization()

    def _normalization(self) -> dict[str, Any]:
        mapping = self._config.get("normalization_mapping")
        mode = _MODES.get(str(mapping.get("ACTION")) if isinstance(mapping, Mapping) else "")
        if mode is None or mode == "none":
            return {} if mode is None else {"normalization": mode}
        figures = self._action_statistics()
        complete = {"q01", "q99", *_NEEDED[mode]} <= set(figures)
        return {"normalization": mode} | ({"statistics": figures} if complete else {})

    def _action_statistics(self) -> dict[str, list[float]]:
        """Figures of ``action`` in the state of the step that un-normalises; empty if there is none."""
        if not self.has(_STEPS):
            return {}
        steps = self.read(_STEPS).get("steps")
        for step in steps if isinstance(steps, list) else []:
            if not isinstance(step, Mapping) or step.get("registry_name") != "unnormalizer_processor":
                continue
            name = step.get("state_file")
            if name is None:
                return {}
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise LayoutError(f"{self.root}/{_STEPS} names {shown(name)}; only safetensors files beside it are opened.")
            if first_existing(self.root, name) is None:
                raise LayoutError(f"{self.root}/{_STEPS} names {shown(name)}, and there is no such file beside it.")
            with opened(self.root / name) as file:
                stored = set(file.keys())
                return {f: _row(file, f"action.{f}") for f in _FIGURES if f"action.{f}" in stored}
        return {}

    def _inlined(self, name: str) -> dict[str, Any]:
        found = self._config.get(name)
        if not isinstance(found, dict):
            raise LayoutError(
                f"{self.root}/config.json has no {name}: a Cosmos 3 policy of LeRobot has one. A policy of another "
                "architecture may bear the same type; run it with the code that trained it."
            )
        return found

    def _stored(self) -> WeightFiles:
        self._files = self._files or WeightFiles(self.root, self.root, "model", dtypes=None)
        return self._files

    def _prefix(self, part: str) -> str:
        mark = _LANDMARKS[part]
        found = [key.removesuffix(mark) for key in self._stored().shapes if key == mark or key.endswith(f".{mark}")]
        if len(found) != 1:
            raise LayoutError(f"{self.root} holds {len(found)} weights ...{mark}, where a {self.format} has one: no {part}.")
        return found[0]

    def _part(self, prefix: str) -> Renamed:
        stored = self._stored()
        names = {key.removeprefix(prefix): key for key in stored.shapes if key.startswith(prefix) and not is_vision(key)}
        return Renamed(stored, names)


def _row(file: Any, name: str) -> list[float]:
    tensor: torch.Tensor = file.get_tensor(name).double().reshape(-1)
    if not 0 < tensor.numel() <= 64:
        raise LayoutError(f"{name} has {tensor.numel()} numbers, where 1 to 64 action columns are possible.")
    require_finite(tensor, name)
    return np.asarray(tensor).tolist()


def exported_config(layout: Layout, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of a checkpoint as a LeRobot policy; raises ContractError if its contract cannot be said so."""
    method = {mode: name for name, mode in _MODES.items()} | {"quantile_rot": "QUANTILES"}
    found = {theirs: metadata[ours] for theirs, ours in _NAMED.items()}
    found |= {theirs: metadata["sampling"][ours] for theirs, ours in _SAMPLING.items()}
    return {
        "type": "cosmos3",
        "text_processor_name_or_path": "text_tokenizer",
        "transformer_config": layout.transformer_config(),
        "vae_config": layout.vae_config(),
        "scheduler_config": layout.scheduler_config(),
        **found,
        "resolution_tier": str(found["resolution_tier"]),
        "n_action_steps": found["chunk_size"],
        "max_action_dim": layout.transformer_config().get("action_dim"),
        "domain_id": get_embodiment(metadata["domain"]).domain_id,
        "invert_gripper": False,  # rows leave this policy as the model means them
        "num_views": len(metadata["views"]),
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "IDENTITY", "ACTION": method[metadata["normalization"]]},
    }


def exported_step(registry: str, state: str | None) -> dict[str, Any]:
    """A step of a processor that (un)normalises actions."""
    step: dict[str, Any] = {"registry_name": registry, "config": {"eps": 1e-8}}
    return step if state is None else step | {"state_file": state}
