"""Deltas and LoRA adapters on a base: some weights whole, others as low-rank factors, in either
scheme of names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from strands_cosmos3.engine.formats.framework import is_vision, renamed
from strands_cosmos3.engine.formats.layout import OnBase, require_implemented
from strands_cosmos3.engine.formats.sources import Overlay, Renamed, WithLora
from strands_cosmos3.engine.variants import repository_of
from strands_cosmos3.engine.weight_files import (
    DTYPES,
    WeightFiles,
    WeightSource,
    claim,
    opened,
    readable,
)
from strands_cosmos3.errors import LayoutError, WeightsError
from strands_cosmos3.resources import json_object, shown

CONFIGS = ("adapter_config.json", "lora_config.json")
STEMS = ("adapter_model", "pytorch_lora_weights", "model")
_PREFIX = re.compile(r"^(base_model\.)?(model\.)?(transformer\.|net\.|module\.)?")
_FACTOR = re.compile(r"\.lora_(A|B|down|up)(\.default)?(\.weight)?$")
_RANK = ("r", "rank", "lora_rank")
_ALPHA = ("lora_alpha", "alpha")
_MOST_SCALE = 1000
_BASE = "base_model_name_or_path"
_HEADER = "lora_adapter_metadata"
"""Where diffusers keeps the config: in the header of the weights, for its ``save_lora_weights``
under ``transformer.``.
"""
_INSTEAD = "Merge it where it was made."


class Adapter(OnBase):
    """A folder with a delta of a base: ``*.safetensors``, and a LoRA config if it has low-rank
    factors.
    """

    format = "adapter"

    def weights(self) -> WeightSource:
        files = WeightFiles(self.root, self.root, self._stem())
        config = self._config(files)
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
                f"{self.root} changes {shown(surplus[:6])}, which its base "
                f"{base.folder} does not have."
            )
        self._require_saved(config, names, base)
        over = Overlay(base, Renamed(files, {name: whole[bare] for name, bare in names.items()}))
        if not factors:
            return over
        return WithLora(over, files, factors, self._scales(config, files, factors))

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

    def _config(self, files: WeightFiles) -> dict[str, Any]:
        """The config of the folder, and that in the header of the weights."""
        configs = {name: self.read(name) for name in CONFIGS if self.has(name)}
        for path in files.files:
            with opened(path) as file:
                text = (file.metadata() or {}).get(_HEADER)
            if text is not None:
                name = f"{_HEADER} of {path.name}"
                fields = json_object(text, f"{self.root}: {name}", LayoutError, _INSTEAD)
                configs[name] = {
                    key.removeprefix("transformer."): value for key, value in fields.items()
                }
        if len(configs) > 1:
            raise LayoutError(
                f"{self.root} holds {' and '.join(configs)}; keep the one that counts."
            )
        name, config = next(iter(configs.items()), ("", {}))
        where = self.root / name
        if any("lora_magnitude_vector" in key for key in files.shapes):
            config["use_dora"] = True
        require_implemented(config, "lora", where, _INSTEAD)
        base_name = config.get(_BASE)
        base = self._base().root
        if base_name and repository_of(base).split("/")[-1] not in str(base_name).split("/"):
            raise LayoutError(
                f"{where}: {_BASE} = {shown(base_name)}, and the base here is {base}; name that "
                "base, or correct the line if it is the same checkpoint."
            )
        return config

    def _require_saved(
        self, config: Mapping[str, Any], names: Mapping[str, str], base: WeightSource
    ) -> None:
        """Raise LayoutError if weights of ``modules_to_save`` are not all among the whole ones."""
        saved = config.get("modules_to_save") or []
        for module in saved if isinstance(saved, list) else [saved]:
            mine = {_module(name) for name, bare in names.items() if f".{module}." in f".{bare}"}
            lacking = [key for key in base.shapes if _module(key) in mine and key not in names]
            if lacking or not mine:
                raise LayoutError(
                    f"{self.root}: modules_to_save = {shown(module)}: its weights are not all in "
                    "the file; download it again."
                )

    def _scales(
        self, config: Mapping[str, Any], files: WeightFiles, factors: Mapping[str, tuple[str, str]]
    ) -> dict[str, float]:
        """lora_alpha / r of each weight, or lora_alpha / sqrt(r) with rsLoRA."""
        if wrong := sorted(
            {files.dtypes[name] for pair in factors.values() for name in pair} - set(DTYPES)
        ):
            raise WeightsError(
                f"{self.root}: factors are stored as {', '.join(wrong)}; only {', '.join(DTYPES)} "
                "are loaded."
            )
        modules = [_FACTOR.sub("", _PREFIX.sub("", a)) for a, _ in factors.values()]
        ranks = self._by_module(config, _RANK, "rank_pattern", modules)
        alphas = self._by_module(config, _ALPHA, "alpha_pattern", modules)
        power = 0.5 if config.get("use_rslora") else 1
        scales: dict[str, float] = {}
        for (name, (a, _)), rank, alpha in zip(factors.items(), ranks, alphas, strict=True):
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
            if files.shapes[a][:1] != (rank,):
                raise WeightsError(
                    f"{self.root}: the factors of {shown(name)} have another rank than the "
                    f"config's {rank}."
                )
            scales[name] = alpha / rank**power
        return scales

    def _by_module(
        self, config: Mapping[str, Any], names: Sequence[str], patterns: str, modules: Sequence[str]
    ) -> list[Any]:
        """A number of the config for each module: what the first of ``patterns`` has that is the
        end of the module's name (after ``^`` all of it), else the one that ``names`` state.
        """
        stated = {name: config[name] for name in names if name in config}
        general = next(iter(stated.values()), None)
        if any(value != general for value in stated.values()):
            listed = ", ".join(f"{name} = {shown(value)}" for name, value in stated.items())
            raise LayoutError(f"{self.root}: its config contradicts itself: {listed}.")
        special: dict[str, Any] = config.get(patterns) or {}
        if (
            not isinstance(special, dict)
            or len(special) > len(modules)
            or not all(any(_names(part, module) for module in modules) for part in special)
        ):
            raise LayoutError(
                f"{self.root}: {patterns} = {shown(special)}: only names of modules with factors "
                f"are read, no expressions. {_INSTEAD}"
            )
        return [
            next((value for part, value in special.items() if _names(part, module)), general)
            for module in modules
        ]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _names(part: str, module: str) -> bool:
    return part == f"^{module}" or f".{module}".endswith(f".{part}")


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
            claim(whole, bare, key)
        else:
            side = {"down": "A", "up": "B"}.get(factor[1], factor[1])
            claim(pairs.setdefault(f"{bare[: factor.start()]}.weight", {}), side, key)
    if half := [name for name in pairs if set(pairs[name]) != {"A", "B"}]:
        raise WeightsError(
            f"{readable(half[0])} has only one of its two low-rank factors; download it again."
        )
    names, unnamed = renamed(pairs, "")
    of = {**names, **{bare: bare for bare in unnamed}}
    return whole, {name: (pairs[bare]["A"], pairs[bare]["B"]) for name, bare in of.items()}
