"""Checkpoints in the released layout whose linear layers are stored in 8 bits: ModelOpt's FP8, and
the INT8 that ``checkpoint convert --quantize int8`` writes.

Beside each weight stand ``weight_scale``, with which it is multiplied, and for FP8
``input_scale``. Of the buffers of ModelOpt's quantizers ``_amax`` of weights and inputs is skipped,
since the scales were made of it; any other changes what is computed, and is refused. What the
numbers mean is stated in ``hf_quant_config.json``, plain or nested, and in ``quantization_config``
of ``transformer/config.json``; all that is stated is read, and has to agree, also with the layers
that are in 8 bits: all linears of a tower, or none, but for those that are excluded. Other packings
(NVFP4, block FP8, W4A16) are refused.

Source of FP8: cosmos-framework 5eee9ed5 ``utils/generator/quantization.py``, ModelOpt's
``hf_quant_config.json``, diffusers 0.42.1 ``NVIDIAModelOptConfig``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.formats.framework import renamed
from strands_cosmos3.engine.formats.layout import (
    STATED,
    Layout,
    require_implemented,
    stated_blocks,
)
from strands_cosmos3.engine.formats.sources import Renamed, Wanted
from strands_cosmos3.engine.precision import (
    STORED_DTYPES,
    EightBit,
    Family,
    StepPolicy,
    StoredScale,
)
from strands_cosmos3.engine.quantised import linears, rounded, row_scales
from strands_cosmos3.engine.weight_files import (
    WeightFiles,
    WeightSource,
    readable,
)
from strands_cosmos3.errors import LayoutError, WeightsError
from strands_cosmos3.resources import shown

OURS = "strands_cosmos3"
"""The ``quant_method`` of files that this package writes."""
_POLICY = "diffusion_step_policy"
_QUANTIZERS = "_quantizer."
# the largest numbers, of which the scales were made; outputs, keys and scores are not rounded here
_KNOWN_BUFFERS = (".input_quantizer._amax", ".weight_quantizer._amax")
# lists of layers that are not in 8 bits: TensorRT-LLM's, Hugging Face's, and diffusers'
_EXCLUDED = "excluded"
_EXCLUSIONS = ("exclude_modules", "ignore", "modules_to_not_convert")
_FAMILIES: Mapping[str, Family] = {"modelopt": "fp8", OURS: "int8"}
_SINGLE = ((), (1,), (1, 1))  # shapes of one number
_ROWS = 512  # of a weight that are compared at once
_INSTEAD = (
    "Only ModelOpt's FP8 with one scale a tensor and this package's INT8 are read; take the BF16 "
    "checkpoint that it was made from."
)


class EightBitLayout(Layout):
    """A folder in the released layout with linear layers in 8 bits."""

    format = "8-bit weights"

    def config(self, part: str) -> dict[str, Any]:
        config = super().config(part)
        config.pop(STATED, None)
        return config

    def weights(self) -> WeightSource:
        files = WeightFiles(self.root / "transformer", self.root)
        weights = Dequantized(files, *self._stated())
        names, skipped = renamed(weights.shapes, "")
        self.skipped = (*weights.skipped, *skipped)
        return Renamed(weights, names)

    def _stated(self) -> tuple[Family, StepPolicy | None, bool | None, Collection[str]]:
        """The type of the weights, the precision of each step, whether activations are rounded at
        all, and patterns of the layers that are excluded; None is not stated.
        """
        blocks = stated_blocks(self.root)
        facts: dict[str, tuple[Any, Path]] = {}
        excluded: set[str] = set()
        for name, stated in blocks.items():
            where = self.root / name
            for fact, value in _facts(stated, where):
                if fact == _EXCLUDED:
                    excluded.update(map(str, value))
                    continue
                known, place = facts.setdefault(fact, (value, where))
                if known != value:
                    raise LayoutError(
                        f"{place} and {where} contradict each other: {fact} is {shown(known)} and "
                        f"{shown(value)}. {_INSTEAD}"
                    )
        method, algorithm, policy, rounds = (
            facts[name][0] if name in facts else None
            for name in ("quant_method", "quant_algo", _POLICY, "input_activations")
        )
        family = _FAMILIES.get(str(method))
        if family is None or algorithm != family.upper():
            raise LayoutError(
                f"{self.root}: {' and '.join(blocks)} must state quant_method and quant_algo, got "
                f"{shown(method)} and {shown(algorithm)}. {_INSTEAD}"
            )
        if family != "fp8" and (policy, rounds) != (None, None):
            named = "config_groups" if policy is None else _POLICY
            raise LayoutError(
                f"{self.root}: {named} is for weights in FP8, not {shown(algorithm)}. {_INSTEAD}"
            )
        if policy is not None and rounds is False:
            raise LayoutError(
                f"{self.root}: {_POLICY} names steps that round activations, and config_groups "
                f"state that none are (input_activations is not set). {_INSTEAD}"
            )
        return family, policy, rounds, excluded


def _facts(stated: Any, where: Path) -> Iterator[tuple[str, Any]]:
    """What a place states, also in the objects that it nests as ``quantization``: pairs of a name
    and a value, of which the same name may come again.
    """
    block = _object(stated, where)
    while block:
        block = {name: _spelt(name, value) for name, value in block.items()}
        require_implemented(block, "quantization", where, _INSTEAD)
        maker = _part(block, "producer", where).get("name")
        for fact, value in (
            ("quant_method", block.get("quant_method") or maker),
            ("quant_algo", block.get("quant_algo")),
            ("quant_algo", block.get("quant_type")),
        ):
            if value:
                yield fact, value
        runtime = _part(block, "runtime", where)
        require_implemented(runtime, "quantization.runtime", where, _INSTEAD)
        if runtime.get(_POLICY) is not None:
            yield _POLICY, StepPolicy.parse(runtime[_POLICY], str(where))
        for option in _EXCLUSIONS:
            listed = block.get(option) or []
            yield _EXCLUDED, listed if isinstance(listed, list) else [listed]
        for group in _part(block, "config_groups", where).values():
            yield "input_activations", _rounds_activations(_object(group, where), where)
        block = _part(block, "quantization", where)


def _spelt(name: str, value: Any) -> Any:
    """An option as it is usually spelt: ``FP8``, and ``modelopt``."""
    if not isinstance(value, str):
        return value
    spelling = {"quant_algo": str.upper, "quant_type": str.upper, "quant_method": str.lower}
    return spelling.get(name, str)(value)


def _object(value: Any, where: Path) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise LayoutError(f"{where} must hold JSON objects, got {shown(value)}. {_INSTEAD}")
    return value


def _part(block: Mapping[str, Any], name: str, where: Path) -> Mapping[str, Any]:
    """An object in a block; empty if there is none."""
    return _object(block.get(name) or {}, where)


def require_stated(weights: WeightSource, config: TransformerConfig) -> None:
    """Raise WeightsError if a layer is stored in 8 bits although its checkpoint excludes it, or is
    not, although others of its tower are and it is not excluded.
    """
    stored = weights.eight_bit
    if stored is None:
        return
    small, generation, every = stored.scales.keys(), linears(config, False), linears(config, True)
    groups = (generation, every - generation, small - every)
    wrong = [
        name
        for group in groups
        if group & small
        for name in group
        if stored.excludes(name) == (name in small)
    ]
    _refuse(
        weights.folder,
        wrong,
        f"must be either stored as {stored.dtype}, as others of their tower are, or excluded by "
        f"the config, which excludes {shown(sorted(stored.excluded))}. {_INSTEAD}",
    )


def _refuse(folder: object, names: Collection[str], why: str) -> None:
    """Raise WeightsError if there are names of tensors that must be otherwise."""
    if names:
        first = ", ".join(map(readable, sorted(names)[:6]))
        raise WeightsError(f"{folder}: {first} {why}")


def _rounds_activations(group: Mapping[str, Any], where: Path) -> bool:
    """Whether a group of layers rounds its inputs as well as its weights."""
    require_implemented(group, "quantization.config_groups", where, _INSTEAD)
    weights, inputs = (_part(group, name, where) for name in ("weights", "input_activations"))
    for numbers in (weights, inputs):
        require_implemented(numbers, "quantization.numbers", where, _INSTEAD)
    if not weights:
        raise LayoutError(
            f"{where}: a group in config_groups does not say how its weights are stored. {_INSTEAD}"
        )
    return bool(inputs)


class Dequantized(WeightSource):
    """Weights of which some are stored in 8 bits, as float32: ``weight * weight_scale``.

    Args:
        rounds_activations: Whether the checkpoint states that inputs are rounded, too; None if it
            does not say.
        excluded: Patterns of the layers that are not in 8 bits.

    Attributes:
        quantized: Names of the weights in 8 bits.
        skipped: Names of the quantizers' buffers.

    Raises WeightsError if no weight is stored so, if a scale is missing, has another shape, is not
    above zero, or contradicts what is stated, and for a buffer whose meaning is unknown.
    """

    def __init__(
        self,
        source: WeightSource,
        family: Family,
        policy: StepPolicy | None,
        rounds_activations: bool | None = None,
        excluded: Collection[str] = (),
    ):
        self.source, self.sources, self.folder = source, (source,), source.folder
        self.quantized = self._stored_as(family)
        self.skipped = self._known_buffers()
        of_weight = {f"{key}_scale": key for key in self.quantized}
        of_input = self._input_scales(rounds_activations) if family == "fp8" else {}
        single: dict[str, tuple[Any, ...]] = dict.fromkeys((*of_weight, *of_input), _SINGLE)
        if family == "int8":  # or one a row
            single = {name: (*_SINGLE, source.shapes[key][:1]) for name, key in of_weight.items()}
        _refuse(
            self.folder,
            [name for name, shapes in single.items() if source.shapes.get(name) not in shapes],
            "must be there and a single number each; 8-bit weights need their scales.",
        )
        stored = {
            name: scale.float().reshape(-1)
            for name, scale in source.parts({n: (n, ()) for n in (*of_weight, *of_input)})
        }
        _refuse(
            self.folder,
            [name for name, s in stored.items() if not bool((s.isfinite() & (s > 0)).all())],
            "must be positive numbers, for they are scales; download it again.",
        )
        activations = {key: float(stored[name]) for name, key in of_input.items()}
        self._scales = {
            key: StoredScale(stored[name], activations.get(key)) for name, key in of_weight.items()
        }
        self.eight_bit = EightBit(
            family, self._scales, policy, rounds_activations is False, excluded
        )
        aside = {*of_weight, *of_input, *self.skipped}
        self.shapes = {key: shape for key, shape in source.shapes.items() if key not in aside}
        self.dtypes = {**source.dtypes, **dict.fromkeys(self.quantized, "F32")}

    def _stored_as(self, family: Family) -> tuple[str, ...]:
        """Names of the weights that are stored in the type which is stated."""
        dtype, dtypes = STORED_DTYPES[family], self.source.dtypes
        eight_bit = {*STORED_DTYPES.values()} - {dtype}
        _refuse(
            self.folder,
            [key for key, stored in dtypes.items() if stored in eight_bit],
            f"must be stored as {dtype}, for the config states {family.upper()}. {_INSTEAD}",
        )
        names = tuple(sorted(key for key, stored in dtypes.items() if stored == dtype))
        if not names:
            raise WeightsError(
                f"{self.folder} stores no weight as {dtype}, and its config states "
                f"{family.upper()}: its numbers were not rounded when it was saved. {_INSTEAD}"
            )
        return names

    def _known_buffers(self) -> tuple[str, ...]:
        """Names of the quantizers' buffers that change no result."""
        buffers = tuple(key for key in self.source.shapes if _QUANTIZERS in key)
        _refuse(
            self.folder,
            [key for key in buffers if not key.endswith(_KNOWN_BUFFERS)],
            "must not be there: it changes what its layer computes, and of quantizers only _amax "
            f"of weights and inputs is known. {_INSTEAD}",
        )
        return buffers

    def _input_scales(self, rounds_activations: bool | None) -> dict[str, str]:
        """Name of an input's scale -> its weight's: of all weights in 8 bits, or of none."""
        names = {f"{key.removesuffix('.weight')}.input_scale": key for key in self.quantized}
        present = names.keys() & self.source.shapes.keys()
        if rounds_activations is False:
            _refuse(
                self.folder,
                present,
                "must not be there: config_groups state that activations are not rounded "
                f"(input_activations is not set). {_INSTEAD}",
            )
        if not present and not rounds_activations:
            return {}
        _refuse(
            self.folder,
            names.keys() - present,
            "must be there: layers that round their inputs need the scales of all of them. "
            "Download it again.",
        )
        return names

    def parts(self, requests: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
        for key, part in self.source.parts(requests):
            name, index = requests[key]
            stored = self._scales.get(name)
            yield key, part if stored is None else _widened(part, stored.part(index))


def _widened(part: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """A part of a weight in float32; ``scale`` is one number, or one a row."""
    assert scale is not None
    return part.float().mul_(scale[:, None] if part.ndim == 2 else scale)


class Quantised(WeightSource):
    """Weights of which some are rounded to INT8 while they are read, each with its ``weight_scale``
    beside it, [rows].

    Attributes:
        names: Names of those that are.
        errors: By the name of a weight that was read: the RMS of what rounding changed, relative to
            the weight's.
    """

    def __init__(self, source: WeightSource, names: frozenset[str]):
        self.source, self.sources, self.names = source, (source,), names
        self.folder = source.folder
        self.errors: dict[str, float] = {}
        scales = {f"{name}_scale": source.shapes[name][:1] for name in names}
        self.shapes = source.shapes | scales
        self.dtypes = source.dtypes | dict.fromkeys(names, "I8") | dict.fromkeys(scales, "F32")

    def parts(self, requests: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
        for key, (name, index) in requests.items():
            weight_name = name.removesuffix("_scale")
            ((_, part),) = self.source.parts({key: (weight_name, index)})
            if weight_name not in self.names:
                yield key, part
            elif name != weight_name:
                yield key, row_scales(part, torch.int8)
            else:
                yield key, self._rounded(name, part)

    def _rounded(self, name: str, weight_NK: torch.Tensor) -> torch.Tensor:
        scale_N = row_scales(weight_NK, torch.int8)
        small = rounded(weight_NK, scale_N, torch.int8)
        blocks = [tensor.split(_ROWS) for tensor in (weight_NK, small, scale_N)]
        norms = [
            (
                float(torch.dist(before.float(), _widened(after, scale))),
                float(before.float().norm()),
            )
            for before, after, scale in zip(*blocks, strict=True)
        ]
        changed, whole = map(math.hypot, *norms)
        self.errors[name] = changed / max(whole, sys.float_info.min)
        return small

    def described(self, errors: Mapping[str, float]) -> dict[str, Any]:
        """``quantization_config`` of the weights: how they were made, and the error of each."""
        recipe = {"weights": "one scale a row, absmax / 127", "layers": sorted(self.names)}
        return {"quant_method": OURS, "quant_algo": "INT8", "recipe": recipe, "errors": errors}
