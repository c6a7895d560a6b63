"""ModelOpt's static FP8 in the released layout: weights are dequantised while they are read.

Source: cosmos-framework 5eee9ed5, ``utils/generator/quantization.py``. Other packings (NVFP4, block
FP8, W4A16) are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from strands_cosmos3.engine.formats.layout import Implemented, Layout, require_implemented
from strands_cosmos3.engine.formats.names import renamed
from strands_cosmos3.engine.formats.sources import Dequantized, Renamed
from strands_cosmos3.engine.weight_files import WeightFiles
from strands_cosmos3.engine.weight_source import DTYPES, WeightSource
from strands_cosmos3.errors import LayoutError
from strands_cosmos3.resources import shown

QUANTIZATION = "hf_quant_config.json"
_IMPLEMENTED: Implemented = {
    "quant_method": ("modelopt",),
    "quant_algo": ("FP8",),
    **dict.fromkeys(
        ("quantization", "producer", "exclude_modules", "ignore", "kv_cache_quant_algo"), ()
    ),
}
_INSTEAD = "Only ModelOpt's FP8 with one scale a tensor is read; take the BF16 checkpoint that it was made from."


class ModelOptFp8(Layout):
    """A folder in the released layout with FP8 linear layers."""

    format = "ModelOpt FP8"

    def weights(self) -> WeightSource:
        config = self.read(QUANTIZATION)
        if not {"quant_method", "quant_algo"} <= config.keys():
            raise LayoutError(
                f"{self.root}/{QUANTIZATION} does not say quant_method and quant_algo, got "
                f"{shown(config)}. {_INSTEAD}"
            )
        nested = config.get("quantization")
        for block in (config, nested if isinstance(nested, Mapping) else {}):
            require_implemented(block, _IMPLEMENTED, self.root / QUANTIZATION, _INSTEAD)
        files = WeightFiles(self.root / "transformer", self.root, dtypes=(*DTYPES, "F8_E4M3"))
        weights = Dequantized(files)
        names, self.skipped = renamed(weights.shapes, "")
        return Renamed(weights, names)
