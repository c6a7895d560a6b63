"""ModelOpt's static FP8 in the released layout: weights are dequantised while they are read.

Source: cosmos-framework 5eee9ed5, ``utils/generator/quantization.py``. Other packings (NVFP4, block FP8, W4A16) are refused.
"""

from __future__ import annotations

from strands_cosmos3.engine.formats.layout import Layout
from strands_cosmos3.engine.formats.names import renamed
from strands_cosmos3.engine.formats.sources import Dequantized, Renamed
from strands_cosmos3.engine.weight_files import WeightFiles
from strands_cosmos3.engine.weight_source import DTYPES, WeightSource
from strands_cosmos3.errors import LayoutError
from strands_cosmos3.resources import shown

QUANTIZATION = "hf_quant_config.json"


class ModelOptFp8(Layout):
    """A folder in the released layout with FP8 linear layers."""

    format = "ModelOpt FP8"

    def weights(self) -> WeightSource:
        config = self.read(QUANTIZATION)
        if config.get("quant_method") != "modelopt" or config.get("quant_algo") != "FP8":
            raise LayoutError(
                f"{self.root}/{QUANTIZATION} says {shown(config)}; of quantised checkpoints only ModelOpt's FP8 with one scale "
                "a tensor is read. Take the BF16 checkpoint that it was made from."
            )
        files = WeightFiles(self.root / "transformer", self.root, dtypes=(*DTYPES, "F8_E4M3"))
        weights = Dequantized(files)
        names, self.skipped = renamed(weights.shapes, "")
        return Renamed(weights, names)

    @property
    def needs_contract(self) -> bool:
        return bool(self.contract)  # its repository may be a known one
