"""LeRobot policy folders: one safetensors file with transformer and VAE, their configs inside
``config.json``.

Source: huggingface/lerobot 68ff20d2 (pull request 3745), ``policies/cosmos3``, and
``processor/normalize_processor.py``. The statistics are in the state of the steps
``normalizer_processor`` and ``unnormalizer_processor``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strands_cosmos3.actions.stats import FIGURES
from strands_cosmos3.embodiments import ACTION_DIM, get_embodiment
from strands_cosmos3.engine.formats.contract import FIELDS, Stated, restated
from strands_cosmos3.engine.formats.framework import is_vision, require_vision
from strands_cosmos3.engine.formats.layout import (
    CONFIG_FILES,
    IMPLEMENTED,
    Layout,
    OnBase,
    require_implemented,
)
from strands_cosmos3.engine.formats.sources import Renamed
from strands_cosmos3.engine.weight_files import (
    WeightFiles,
    WeightSource,
    named_file,
    opened,
    readable,
    require_finite,
)
from strands_cosmos3.errors import LayoutError
from strands_cosmos3.resources import shown

TYPES = ("cosmos3", "cosmos3_edge")
_MODES = {"IDENTITY": "none", "QUANTILES": "quantile", "MEAN_STD": "meanstd", "MIN_MAX": "minmax"}
_FIELDS = {
    "domain_name": "domain",
    "action_space": "action_space",
    "raw_action_dim": "width",
    "chunk_size": "chunk",
    "conditioning_fps": "fps",
    "resolution_tier": "resolution_tier",
}
_COMPARED = {
    "domain_id": "domain_id",
    "num_views": "num_views",
    "max_action_dim": "action_dim",
    "use_state": "state_row",
}
_VIEWS = {
    "wrist_cam": "wrist",
    "over_shoulder_left_camera": "exterior_1",
    "over_shoulder_right_camera": "exterior_2",
}
_PICTURES = "observation.images."
_SAMPLING = {
    "num_inference_steps": "num_steps",
    "guidance_scale": "guidance_scale",
    "shift": "flow_shift",
}
_LANDMARKS = {"transformer": "time_embedder.linear_1.weight", "vae": "decoder.conv_in.weight"}
_PIPELINES = ("policy_preprocessor.json", "policy_postprocessor.json")
_WITHOUT_EFFECT = ("device_processor", "to_batch_processor")


class LeRobotPolicy(OnBase):
    """A folder that LeRobot's ``save_pretrained`` wrote. Only the tokenizer comes from the base,
    or from the folder.
    """

    format = "LeRobot policy"

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self.read("config.json")

    @cached_property
    def _stored(self) -> WeightFiles:
        return WeightFiles(self.root, self.root, "model", "model")

    def model_index(self) -> dict[str, Any]:
        return {}

    def config(self, part: str) -> dict[str, Any]:
        name = f"{part}_config"
        if part == "vae" and name not in self._config:
            name = "wan_vae_config"
        config = self._config.get(name)
        if not isinstance(config, dict):
            raise LayoutError(
                f"{self.root}/config.json has no {name}: a Cosmos 3 policy of LeRobot has one. A "
                "policy of another architecture may bear the same type; run it with the code that "
                "trained it."
            )
        return config

    def weights(self) -> WeightSource:
        prefix = self._prefix("transformer")
        other = self._prefix("vae")
        stored = self._stored.shapes
        self.skipped = tuple(sorted(key for key in stored if not key.startswith((prefix, other))))
        require_vision(self.skipped, f"{self.root} holds weights of neither transformer nor VAE")
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

    def recorded(self) -> Sequence[Stated]:
        """Fields of the policy's config and its processors' steps: each file is a source, and so
        are two keys of the config.
        """
        where = str(self.root / "config.json")
        config = self._config
        fixed = {name: config[name] for name in IMPLEMENTED["lerobot"] if name in config}
        require_implemented(
            fixed, "lerobot", self.root / "config.json", "Run it with the code that trained it."
        )
        fields = restated(config, _FIELDS | _COMPARED)
        fields["sampling"] = restated(config, _SAMPLING)
        tier = fields.get("resolution_tier")
        mapping = config.get("normalization_mapping")
        fields["resolution_tier"] = (
            int(tier) if isinstance(tier, str) and tier.isdecimal() else tier
        )
        fields["normalization"] = _mode(mapping)
        if not isinstance(flipped := config.get("invert_gripper", False), bool) or (
            flipped and fields["normalization"] != "none"
        ):
            raise LayoutError(
                f"{where}: invert_gripper = {shown(flipped)} with ACTION normalised by "
                f"{shown(mapping)}: it flips normalised "
                "values (x -> 1 - x), for which no contract has a word. Only true with IDENTITY, "
                "or false, is implemented."
            )
        is_count = FIELDS["chunk"][0]
        rows = config.get("n_action_steps")
        chunk: Any = fields.get("chunk")
        if is_count(rows) and is_count(chunk) and rows < chunk:
            fields["replan_rows"] = rows
        if flipped:  # their rows count 1 as closed, and the model's are flipped
            fields["gripper"] = "1=open"
        steps = [
            (str(self.root / name), self._pipeline(name)) for name in _PIPELINES if self.has(name)
        ]
        tensors = {"action_dim": self.config("transformer").get("action_dim")}
        return [
            (where, fields),
            (f"{where} (image_keys)", self._views()),
            (f"{where} (transformer_config)", tensors),
            *steps,
        ]

    def _views(self) -> dict[str, Any]:
        """The pictures: where an embodiment composes them under its own names if they are known,
        those of the pull request.
        """
        keys = self._config.get("image_keys")
        if keys is None:
            return {}
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise LayoutError(
                f"{self.root}/config.json: image_keys must be a list of names, got {shown(keys)}."
            )
        domain: Any = self._config.get("domain_name")
        rig = get_embodiment(domain).rig if FIELDS["domain"][0](domain) else None
        if rig is None:
            return {"num_views": len(keys), "views": keys}
        views = [_VIEWS.get(name, name) for name in (key.removeprefix(_PICTURES) for key in keys)]
        are_recognised = set(views) <= set(rig.views) or len(set(views)) < len(views)
        return {"num_views": len(keys)} | ({"views": views} if are_recognised else {})

    def _pipeline(self, file: str) -> dict[str, Any]:
        """Fields of actions in the steps of one processor; raises LayoutError for a step that
        changes them in other ways.
        """
        steps = self.read(file).get("steps")
        if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
            raise LayoutError(f"{self.root}/{file} has no list of steps; download it again.")
        names = [str(step.get("registry_name") or step.get("class")) for step in steps]
        ours = "normalizer_processor" if file == _PIPELINES[0] else "unnormalizer_processor"
        after = [
            name for name in names if name != ours and (file == _PIPELINES[1] or "action" in name)
        ]
        if (foreign := [name for name in after if name not in _WITHOUT_EFFECT]) or names.count(
            ours
        ) > 1:
            raise LayoutError(
                f"{self.root}/{file} has the steps {', '.join(map(readable, names))}; implemented "
                f"is one {ours}, and "
                f"{' and '.join(_WITHOUT_EFFECT)}, which change "
                f"nothing{'' if foreign else ': keep the one that counts'}."
            )
        step: Mapping[str, Any] = steps[names.index(ours)] if ours in names else {}
        config = step.get("config")
        figures = self._figures(file, step.get("state_file"))
        mode = _mode(config.get("norm_map")) if isinstance(config, Mapping) else None
        return {"normalization": mode, **({"statistics": figures} if figures else {})}

    def _figures(self, file: str, name: object) -> dict[str, list[float]]:
        """Figures of ``action`` in the state of a step."""
        if name is None:
            return {}
        with opened(named_file(self.root, name, self.root, self.root / file)) as state:
            stored = set(state.keys())
            return {
                figure: _row(state, f"action.{figure}")
                for figure in FIGURES
                if f"action.{figure}" in stored
            }

    def _prefix(self, part: str) -> str:
        mark = _LANDMARKS[part]
        prefixes = [
            key.removesuffix(mark)
            for key in self._stored.shapes
            if key == mark or key.endswith(f".{mark}")
        ]
        if len(prefixes) != 1:
            raise LayoutError(
                f"{self.root} holds {len(prefixes)} weights ...{mark}, where a {self.format} has "
                f"one: no {part}."
            )
        return prefixes[0]

    def _part(self, prefix: str) -> Renamed:
        stored = self._stored
        names = {
            key.removeprefix(prefix): key
            for key in stored.shapes
            if key.startswith(prefix) and not is_vision(key)
        }
        return Renamed(stored, names)


def _mode(mapping: object) -> object:
    """The normalisation of actions in a map of feature types; None if it says none."""
    mode = mapping.get("ACTION") if isinstance(mapping, Mapping) else None
    return _MODES.get(mode, mode) if isinstance(mode, str) else mode


def _row(file: Any, name: str) -> list[float]:
    stored: torch.Tensor = file.get_tensor(name)
    tensor = stored.double().reshape(-1)
    if not 0 < tensor.numel() <= ACTION_DIM or not stored.is_floating_point():
        raise LayoutError(
            f"{name} is {stored.dtype} {list(stored.shape)}, where 1 to {ACTION_DIM} columns of "
            "numbers belong."
        )
    require_finite(tensor, name)
    return np.asarray(tensor).tolist()


def exported_config(layout: Layout, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of a checkpoint, with a whole contract, as a LeRobot policy."""
    fields = {theirs: metadata[ours] for theirs, ours in _FIELDS.items()}
    fields |= {theirs: metadata["sampling"][ours] for theirs, ours in _SAMPLING.items()}
    domain = get_embodiment(metadata["domain"])
    return {
        "type": "cosmos3",
        "text_processor_name_or_path": "text_tokenizer",
        **{f"{part}_config": layout.config(part) for part in CONFIG_FILES},
        **fields,
        "resolution_tier": str(fields["resolution_tier"]),
        "n_action_steps": metadata.get("replan_rows", fields["chunk_size"]),
        "max_action_dim": layout.config("transformer").get("action_dim"),
        "domain_id": domain.domain_id,
        "use_state": domain.action_space(metadata["action_space"]).state_row,
        "invert_gripper": False,  # rows leave this policy as the model means them
        "image_keys": metadata["views"],
        "num_views": len(metadata["views"]),
        "normalization_mapping": _norm_map(metadata),
    }


def exported_step(registry: str, state: str | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A step of a processor that (un)normalises actions."""
    features = {"action": {"type": "ACTION", "shape": [metadata["width"]]}}
    step = {
        "registry_name": registry,
        "config": {"eps": 1e-8, "features": features, "norm_map": _norm_map(metadata)},
    }
    return step if state is None else step | {"state_file": state}


def _norm_map(metadata: Mapping[str, Any]) -> dict[str, str]:
    method = {mode: name for name, mode in _MODES.items()} | {"quantile_rot": "QUANTILES"}
    return {"VISUAL": "IDENTITY", "STATE": "IDENTITY", "ACTION": method[metadata["normalization"]]}
