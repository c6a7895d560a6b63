"""cosmos-framework: its names of weights, and its Hugging Face export (``export_model``).

Names of other formats become the released (diffusers) names: a rename is the whole conversion,
there are no transposes and no fused matrices. An export holds ``model.net.<framework name>`` in the
root and no VAE; a contract is inside for Edge policies alone, and not whole
(``checkpoint.json.policy`` has the domain, the rows of an answer and their rate).

Source: cosmos-framework 5eee9ed5, ``scripts/_convert_model_to_diffusers.py``,
``inference/model.py`` and ``scripts/export_model.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from strands_cosmos3.engine.computed import require_computed
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.formats.contract import Stated, restated
from strands_cosmos3.engine.formats.layout import OnBase
from strands_cosmos3.engine.formats.sources import Renamed
from strands_cosmos3.engine.weight_files import WeightFiles, WeightSource, claim
from strands_cosmos3.errors import LayoutError, VariantError
from strands_cosmos3.resources import shown

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
        claim(names, released_name(key.removeprefix(prefix)), key)
    return names, tuple(rest)


MODEL_TYPE = "cosmos3_omni"
_POLICY = {"domain_name": "domain", "action_chunk_size": "chunk", "conditioning_fps": "fps"}
_EDGE = ("Nemotron3DenseVL", "nemotron_3_dense_vl", "Cosmos3-Edge")


class FrameworkExport(OnBase):
    """A folder that ``cosmos_framework.scripts.export_model`` wrote."""

    format = "cosmos-framework export"

    def config(self, part: str) -> dict[str, Any]:
        """The base's; raises VariantError if the export's transformer is of the other architecture,
        or a changed one.
        """
        config = super().config(part)
        if part == "transformer":
            self._require_same(config)
        return config

    def _require_same(self, config: Mapping[str, Any]) -> None:
        export = self._model_config()
        edge = any(word in str(export.get("vlm_config")) for word in _EDGE)
        if export.get("vlm_config") is not None and edge != (config.get("hidden_act") == "relu2"):
            raise VariantError(
                f"{self.root} is {'an Edge' if edge else 'no Edge'} model and its base "
                f"{self._base().root} is "
                f"{'none' if edge else 'one'}; name the base that it was trained from."
            )
        expert = export.get("diffusion_expert_config")
        stated = {**export, **(expert if isinstance(expert, Mapping) else {})}
        base = TransformerConfig.from_dict(config)
        where = self.root / "config.json"
        require_computed("transformer/config.json", stated, base, where, VariantError)
        others = [
            f"{name} {shown(stated[name])}, its base {shown(value)}"
            for name, value in vars(base).items()
            if stated.get(name) not in (None, value)
        ]
        if others:
            raise VariantError(f"{self.root} has {'; '.join(others)}.")

    def weights(self) -> WeightSource:
        files = WeightFiles(self.root, self.root, "model")
        names, self.skipped = renamed(files.shapes, "model.net.")
        require_vision(
            self.skipped, f"{self.root} holds weights that a {self.format} does not have"
        )
        return Renamed(files, names)

    def recorded(self) -> Sequence[Stated]:
        if not self.has("checkpoint.json"):
            raise LayoutError(
                f"{self.root} has no checkpoint.json, which the export writes "
                "last; export it again."
            )
        policy = self.read("checkpoint.json").get("policy") or {}
        if not isinstance(policy, Mapping):
            raise LayoutError(
                f"{self.root}/checkpoint.json: policy must be an object, got {shown(policy)}."
            )
        return [(f"{self.root}/checkpoint.json", restated(policy, _POLICY))]

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


def require_vision(skipped: tuple[str, ...], fault: str) -> None:
    """Raise LayoutError, which begins with ``fault``, if a weight that would be skipped is not a
    picture encoder's.
    """
    if unknown := [name for name in skipped if not is_vision(name)]:
        raise LayoutError(
            f"{fault}, {len(unknown)} of them: {shown(unknown[:6])}; nothing was loaded."
        )
