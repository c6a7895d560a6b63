"""Deltas and LoRA adapters on a base: some weights whole, others as low-rank factors, in either scheme of names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from strands_cosmos3.engine.formats.layout import OnBase
from strands_cosmos3.engine.formats.names import renamed
from strands_cosmos3.engine.formats.sources import Overlay, Renamed, WithLora
from strands_cosmos3.engine.weight_files import WeightFiles
from strands_cosmos3.engine.weight_source import WeightSource, readable
from strands_cosmos3.errors import LayoutError, WeightsError
from strands_cosmos3.resources import shown

CONFIGS = ("adapter_config.json", "lora_config.json")
STEMS = ("adapter_model", "pytorch_lora_weights", "model")
_PREFIX = re.compile(r"^(base_model\.)?(model\.)?(transformer\.|net\.|module\.)?")
_FACTOR = re.compile(r"\.lora_(A|B|down|up)(\.default)?(\.weight)?$")
_UNSUPPORTED = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save")


class Adapter(OnBase):
    """A folder with a delta of a base: ``*.safetensors``, and a LoRA config if it has low-rank factors."""

    format = "adapter"

    def weights(self) -> WeightSource:
        files = WeightFiles(self.root, self.root, self._stem(), dtypes=None)
        base = self._base().weights()
        whole, factors = _sorted(files)
        names, _ = renamed(whole, "")
        if surplus := sorted(set(names) - set(base.shapes)):
            raise WeightsError(f"{self.root} changes {shown(surplus[:6])}, which its base {base.folder} does not have.")
        over = Overlay(base, Renamed(files, {name: whole[bare] for name, bare in names.items()}))
        return WithLora(over, files, factors, self._scale(files, factors)) if factors else over

    def _stem(self) -> str:
        for stem in STEMS:
            if self.has(f"{stem}.safetensors") or self.has(f"{stem}.safetensors.index.json"):
                return stem
        single = sorted(path.stem for path in self.root.glob("*.safetensors"))
        if len(single) != 1:
            raise LayoutError(f"{self.root} holds {len(single)} safetensors files, none of {', '.join(STEMS)}; keep one.")
        return single[0]

    def _scale(self, files: WeightFiles, factors: Mapping[str, tuple[str, str]]) -> float:
        config: dict[str, Any] = next((self.read(name) for name in CONFIGS if self.has(name)), {})
        if refused := [name for name in _UNSUPPORTED if config.get(name)]:
            raise LayoutError(f"{self.root}: {', '.join(refused)} of an adapter are not supported; merge it where it was made.")
        rank = next((config[name] for name in ("r", "rank", "lora_rank") if name in config), None)
        alpha = next((config[name] for name in ("lora_alpha", "alpha") if name in config), None)
        if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise LayoutError(
                f"{self.root} has low-rank factors, and no {' or '.join(CONFIGS)} with r and lora_alpha (got r={shown(rank)}, "
                f"lora_alpha={shown(alpha)}); their scale cannot be guessed."
            )
        if wrong := [name for name, (a, _) in factors.items() if files.shapes[a][:1] != (rank,)]:
            raise WeightsError(f"{self.root}: the factors of {shown(wrong[:4])} have another rank than the config's {rank}.")
        return alpha / rank


def _sorted(files: WeightFiles) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Bare name -> stored name of whole weights, and released name of a weight -> stored names of its factors A and B."""
    whole: dict[str, str] = {}
    pairs: dict[str, dict[str, str]] = {}
    for key in files.shapes:
        bare = _PREFIX.sub("", key)
        found = _FACTOR.search(bare)
        if found is None:
            whole[bare] = key
        else:
            side = {"down": "A", "up": "B"}.get(found[1], found[1])
            pairs.setdefault(f"{bare[: found.start()]}.weight", {})[side] = key
    names, _ = renamed(pairs, "")
    if half := [name for name, bare in names.items() if set(pairs[bare]) != {"A", "B"}]:
        raise WeightsError(f"{readable(half[0])} has only one of its two low-rank factors; download it again.")
    return whole, {name: (pairs[bare]["A"], pairs[bare]["B"]) for name, bare in names.items()}
