"""Deltas and LoRA adapters on a base: some weights whole, others as low-rank factors, in either
scheme of names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from strands_cosmos3.engine.formats.framework import is_vision, renamed
from strands_cosmos3.engine.formats.layout import Implemented, OnBase, require_implemented
from strands_cosmos3.engine.formats.sources import Overlay, Renamed, WithLora
from strands_cosmos3.engine.variants import repository_of
from strands_cosmos3.engine.weight_files import DTYPES, WeightFiles, WeightSource, readable
from strands_cosmos3.errors import LayoutError, WeightsError
from strands_cosmos3.resources import shown

CONFIGS = ("adapter_config.json", "lora_config.json")
STEMS = ("adapter_model", "pytorch_lora_weights", "model")
_PREFIX = re.compile(r"^(base_model\.)?(model\.)?(transformer\.|net\.|module\.)?")
_FACTOR = re.compile(r"\.lora_(A|B|down|up)(\.default)?(\.weight)?$")
_RANK, _ALPHA = ("r", "rank", "lora_rank"), ("lora_alpha", "alpha")
_MOST_SCALE = 1000
_BASE = "base_model_name_or_path"
_WITHOUT_EFFECT = (
    *(
        "target_modules",
        "targets",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "task_type",
        "lora_dropout",
    ),
    *(
        "inference_mode",
        "peft_version",
        "revision",
        "auto_mapping",
        "megatron_core",
        "qalora_group_size",
        "digest",
    ),
)
_IMPLEMENTED: Implemented = {
    **dict.fromkeys((*_RANK, *_ALPHA, _BASE), ()),
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian"),  # others change the base
    **dict.fromkeys(_WITHOUT_EFFECT, ()),
}


class Adapter(OnBase):
    """A folder with a delta of a base: ``*.safetensors``, and a LoRA config if it has low-rank
    factors.
    """

    format = "adapter"

    def weights(self) -> WeightSource:
        files = WeightFiles(self.root, self.root, self._stem())
        base = self._base().weights()
        whole, factors = _sorted(files)
        names, self.skipped = renamed(whole, "")
        self.skipped += tuple(name for name in factors if is_vision(name))
        factors = {name: pair for name, pair in factors.items() if not is_vision(name)}
        if not names and not factors:
            raise WeightsError(
                f"{self.root} holds no weight of {base.folder}, only {shown(self.skipped[:4])}: "
                "it is no adapter of it."
            )
        if surplus := sorted(set(names) - set(base.shapes)):
            raise WeightsError(
                f"{self.root} changes {shown(surplus[:6])}, which its base {base.folder} does not "
                "have."
            )
        over = Overlay(base, Renamed(files, {name: whole[bare] for name, bare in names.items()}))
        config = self._config()
        return (
            WithLora(over, files, factors, self._scale(config, files, factors)) if factors else over
        )

    def _stem(self) -> str:
        for stem in STEMS:
            if self.has(f"{stem}.safetensors") or self.has(f"{stem}.safetensors.index.json"):
                return stem
        single = sorted(path.stem for path in self.root.glob("*.safetensors"))
        if len(single) != 1:
            raise LayoutError(
                f"{self.root} holds {len(single)} safetensors files, none of {', '.join(STEMS)}; "
                "keep one."
            )
        return single[0]

    def _config(self) -> dict[str, Any]:
        names = [name for name in CONFIGS if self.has(name)]
        if len(names) > 1:
            raise LayoutError(f"{self.root} holds {' and '.join(names)}; keep the one that counts.")
        config = self.read(names[0]) if names else {}
        if names:
            require_implemented(
                config, _IMPLEMENTED, self.root / names[0], "Merge it where it was made."
            )
        base_name, base = config.get(_BASE), self._base().root
        if base_name and repository_of(base).split("/")[-1] not in str(base_name).split("/"):
            raise LayoutError(
                f"{self.root / names[0]}: {_BASE} = {shown(base_name)}, and the base here is "
                f"{base}; "
                "name that base, or correct "
                "the line if it is the same checkpoint."
            )
        return config

    def _scale(
        self, config: Mapping[str, Any], files: WeightFiles, factors: Mapping[str, tuple[str, str]]
    ) -> float:
        stated = {name: config[name] for name in (*_RANK, *_ALPHA) if name in config}
        rank: Any
        alpha: Any
        rank, alpha = (
            next((stated[name] for name in names if name in stated), None)
            for names in (_RANK, _ALPHA)
        )
        if any(value != (rank if name in _RANK else alpha) for name, value in stated.items()):
            listed = ", ".join(f"{name} = {shown(value)}" for name, value in stated.items())
            raise LayoutError(f"{self.root}: its config contradicts itself: {listed}.")
        if (
            type(rank) is not int
            or rank < 1
            or type(alpha) not in (int, float)
            or not 0 < alpha <= _MOST_SCALE * rank
        ):
            raise LayoutError(
                f"{self.root} has low-rank factors, and no {' or '.join(CONFIGS)} with r and "
                "lora_alpha, both above zero (got "
                f"r={shown(rank)}, lora_alpha={shown(alpha)}); their scale cannot be guessed."
            )
        if wrong := sorted(
            {files.dtypes[name] for pair in factors.values() for name in pair} - set(DTYPES)
        ):
            raise WeightsError(
                f"{self.root}: factors are stored as {', '.join(wrong)}; only {', '.join(DTYPES)} "
                "are loaded."
            )
        if wrong := [name for name, (a, _) in factors.items() if files.shapes[a][:1] != (rank,)]:
            raise WeightsError(
                f"{self.root}: the factors of {shown(wrong[:4])} have another rank than the "
                f"config's {rank}."
            )
        return alpha / rank


def _sorted(files: WeightFiles) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Bare name -> stored name of whole weights, and released name of a weight -> stored names of
    its factors A and B.

    Raises WeightsError if two weights have one name, or a factor is alone.
    """
    whole: dict[str, str] = {}
    pairs: dict[str, dict[str, str]] = {}
    for key in files.shapes:
        bare = _PREFIX.sub("", key)
        factor = _FACTOR.search(bare)
        if factor is None:
            side, stored = bare, whole
        else:
            side = {"down": "A", "up": "B"}.get(factor[1], factor[1])
            stored = pairs.setdefault(f"{bare[: factor.start()]}.weight", {})
        if side in stored:
            raise WeightsError(
                f"{readable(key)} and {readable(stored[side])} are both {readable(bare)}; one is "
                "wrong."
            )
        stored[side] = key
    if half := [name for name in pairs if set(pairs[name]) != {"A", "B"}]:
        raise WeightsError(
            f"{readable(half[0])} has only one of its two low-rank factors; download it again."
        )
    names, unnamed = renamed(pairs, "")
    of = {**names, **{bare: bare for bare in unnamed}}
    return whole, {name: (pairs[bare]["A"], pairs[bare]["B"]) for name, bare in of.items()}
