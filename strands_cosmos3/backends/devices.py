"""The device of torch's backends."""

from __future__ import annotations

import torch

from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.engine.preflight import torch_device


def resolve_device(options: EngineOptions) -> torch.device:
    """Return the device: CUDA if torch sees a GPU, else the CPU; the option wins."""
    return torch_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
