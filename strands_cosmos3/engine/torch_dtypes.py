"""Torch's types of the weights that are read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
}
"""By the names that safetensors gives them."""
