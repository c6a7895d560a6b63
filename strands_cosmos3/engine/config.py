"""Architecture of a checkpoint, read from ``transformer/config.json`` and validated. Unknown
keys are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from strands_cosmos3.checks import typed_fields
from strands_cosmos3.engine.computed import require_computed
from strands_cosmos3.errors import InputError, LayoutError
from strands_cosmos3.resources import shown

_LARGEST = {  # nothing is built of larger ones
    "hidden_size": 262_144,
    "num_hidden_layers": 512,
    "num_attention_heads": 262_144,
    "num_key_value_heads": 262_144,
    "head_dim": 262_144,
    "intermediate_size": 262_144,
    "vocab_size": 4_194_304,
    "latent_channel": 4096,
    "latent_patch_size": 64,
    "action_dim": 262_144,
    "num_embodiment_domains": 262_144,
}
TIME_CHANNELS = 256  # width of the sinusoidal timestep embedding


@dataclass(frozen=True)
class TransformerConfig:
    """Hyperparameters of a Cosmos 3 transformer; names and defaults are those of the released
    config files.

    Raises LayoutError if a value is invalid.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    action_dim: int
    latent_channel: int = 48
    latent_patch_size: int = 2
    num_embodiment_domains: int = 32
    # silu: gated MLP, RMSNorm; relu2 (Edge): ungated, Nemotron norm
    hidden_act: Literal["silu", "relu2"] = "silu"
    qk_norm_for_text: bool = True  # whether text queries and keys are normalised per head
    # whether text keys are normalised for the generation tower only (Edge)
    use_und_k_norm_for_gen: bool = False
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5e6
    # temporal, vertical, horizontal; sum: head_dim / 2
    rope_axes_dim: tuple[int, int, int] = (24, 20, 20)
    base_fps: float = 24.0
    enable_fps_modulation: bool = True
    unified_3d_mrope_reset_spatial_ids: bool = True
    # position gap between text and the first frame
    unified_3d_mrope_temporal_modality_margin: int = 15000
    timestep_scale: float = 0.001  # factor on the timestep before its embedding
    sound_dim: int | None = None  # channels of sound latents; None without sound
    sound_latent_fps: float = 25.0  # sound latents a second

    @property
    def patch_dim(self) -> int:
        """Values per vision token: patch x patch x latent channels."""
        return self.latent_patch_size**2 * self.latent_channel

    @property
    def nemotron(self) -> bool:
        """Whether norms apply their weight in float32 (Edge)."""
        return self.hidden_act == "relu2"

    @property
    def text_k_norm_for_gen(self) -> bool:
        """Whether text keys have a separate norm for the generation tower."""
        return self.use_und_k_norm_for_gen and not self.qk_norm_for_text

    def __post_init__(self) -> None:
        try:
            typed_fields(self)
        except InputError as error:
            problems = [str(error).rstrip(".")]
        else:
            problems = [
                f"{name} is {shown(getattr(self, name))}, not from 1 to {most}"
                for name, most in _LARGEST.items()
                if not 0 < getattr(self, name) <= most
            ] or self._inconsistencies()
        if problems:
            raise LayoutError(
                f"transformer/config.json is invalid: {'; '.join(problems)}. Download it again."
            )

    def _inconsistencies(self) -> list[str]:
        half = self.head_dim // 2
        margin = self.unified_3d_mrope_temporal_modality_margin
        is_wrong = {
            f"head_dim {self.head_dim} is odd": self.head_dim % 2,
            f"{self.num_attention_heads} heads are not a multiple of "
            f"{self.num_key_value_heads} KV heads": (
                self.num_attention_heads % self.num_key_value_heads
            ),
            f"rope_axes_dim {self.rope_axes_dim} must be 3 values and sum to head_dim/2 = {half}": (
                min(self.rope_axes_dim) < 0 or sum(self.rope_axes_dim) != half
            ),
            f"hidden_act is {self.hidden_act!r}; valid: silu, relu2": (
                self.hidden_act not in ("silu", "relu2")
            ),
            "unified_3d_mrope_temporal_modality_margin or sound_dim is out of range": (
                not 0 <= margin < 1 << 31
                or not 0 < (self.sound_dim or 1) <= _LARGEST["hidden_size"]
            ),
        }
        for name in (
            "rms_norm_eps",
            "rope_theta",
            "base_fps",
            "timestep_scale",
            "sound_latent_fps",
        ):
            value = getattr(self, name)
            is_wrong[f"{name} is {value!r}, not a positive number"] = not 0 < value < float("inf")
        return [problem for problem, applies in is_wrong.items() if applies]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TransformerConfig:
        """Read a released ``config.json``. Raises LayoutError that lists the missing or invalid
        keys.
        """
        values = {f.name: data[f.name] for f in fields(cls) if data.get(f.name) is not None}
        missing = sorted(
            f.name for f in fields(cls) if f.default is MISSING and f.name not in values
        )
        if missing:
            raise LayoutError(
                f"transformer/config.json lacks {', '.join(missing)}; is this a Cosmos 3 "
                "transformer with actions?"
            )
        scaling = data.get("rope_scaling")
        sections = data.get("rope_axes_dim") or (
            scaling.get("mrope_section") if isinstance(scaling, dict) else None
        )
        if sections:
            values["rope_axes_dim"] = tuple(sections) if isinstance(sections, list) else sections
        if not data.get("sound_gen"):
            values.pop("sound_dim", None)
        if not data.get("action_gen", True):
            raise LayoutError(
                "transformer/config.json has action_gen = false: this "
                "checkpoint has no action heads."
            )
        config = cls(**values)
        require_computed("transformer/config.json", data, config)
        return config
