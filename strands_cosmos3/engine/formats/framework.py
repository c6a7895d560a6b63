"""cosmos-framework's Hugging Face export (``export_model``): ``model.net.<framework name>`` in the
root, no VAE.

Source: cosmos-framework 5eee9ed5, ``scripts/export_model.py``. A contract is inside for Edge
policies alone, and not whole: ``checkpoint.json.policy`` has the domain, the rows of an answer and
their rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strands_cosmos3.engine.formats.contract import Stated
from strands_cosmos3.engine.formats.layout import OnBase
from strands_cosmos3.engine.formats.names import is_vision, renamed
from strands_cosmos3.engine.formats.sources import Renamed
from strands_cosmos3.engine.weight_files import WeightFiles
from strands_cosmos3.engine.weight_source import WeightSource
from strands_cosmos3.errors import LayoutError, VariantError
from strands_cosmos3.resources import shown

MODEL_TYPE = "cosmos3_omni"
_POLICY = {"domain_name": "domain", "action_chunk_size": "chunk", "conditioning_fps": "fps"}
_EDGE = ("Nemotron3DenseVL", "nemotron_3_dense_vl", "Cosmos3-Edge")


class FrameworkExport(OnBase):
    """A folder that ``cosmos_framework.scripts.export_model`` wrote."""

    format = "cosmos-framework export"

    def transformer_config(self) -> dict[str, Any]:
        """The base's; raises VariantError if the export is of the other architecture, or a
        changed one.
        """
        config, own = super().transformer_config(), self._model_config()
        edge = any(word in str(own.get("vlm_config")) for word in _EDGE)
        if own.get("vlm_config") is not None and edge != (config.get("hidden_act") == "relu2"):
            raise VariantError(
                f"{self.root} is {'an Edge' if edge else 'no Edge'} model and its base "
                f"{self._base().root} is "
                f"{'none' if edge else 'one'}; name the base that it was trained from."
            )
        if (width := own.get("max_action_dim")) not in (None, config.get("action_dim")):
            raise VariantError(
                f"{self.root} has max_action_dim {shown(width)}, its base "
                f"{shown(config.get('action_dim'))}."
            )
        return config

    def weights(self) -> WeightSource:
        files = WeightFiles(self.root, self.root, "model", dtypes=None)
        names, self.skipped = renamed(files.shapes, "model.net.")
        require_vision(self.skipped, self)
        return Renamed(files, names)

    def recorded(self) -> Sequence[Stated]:
        if not self.has("checkpoint.json"):
            raise LayoutError(
                f"{self.root} has no checkpoint.json, which the export writes last; export it "
                "again."
            )
        policy = self.read("checkpoint.json").get("policy") or {}
        if not isinstance(policy, Mapping):
            raise LayoutError(
                f"{self.root}/checkpoint.json: policy must be an object, got {shown(policy)}."
            )
        found = {ours: policy[theirs] for theirs, ours in _POLICY.items() if theirs in policy}
        return [(f"{self.root}/checkpoint.json", found)]

    def _model_config(self) -> Mapping[str, Any]:
        model = self.read("config.json").get("model")
        if not isinstance(model, Mapping) or not isinstance(
            config := model.get("config", {}), Mapping
        ):
            raise LayoutError(f"{self.root}/config.json has no model.config; export it again.")
        target = str(model.get("_target_") or model.get("_target") or "OmniMoTModel")
        if not target.endswith("OmniMoTModel") or any("4d" in str(name).lower() for name in config):
            raise VariantError(
                f"{self.root} was trained with {shown(target)} and a changed sequence "
                f"({shown(sorted(config))}): it carries "
                "cosmos-framework's label, but is not the released model. Run it with the code "
                "that trained it."
            )
        return config


def require_vision(skipped: tuple[str, ...], layout: OnBase) -> None:
    """Raise LayoutError if a weight that would be skipped is not a picture encoder's."""
    if unknown := [name for name in skipped if not is_vision(name)]:
        raise LayoutError(
            f"{layout.root} holds {len(unknown)} weights that a {layout.format} does not have: "
            f"{shown(unknown[:6])}; nothing "
            "was loaded."
        )
