"""The dtype of an engine's weights and hidden states."""

from __future__ import annotations

import time
from functools import cache

import torch

from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.options import DTYPES, Dtype
from strands_cosmos3.errors import ConfigError

LEAST_WIDTH = 1024
LEAST_GAIN = 2.5
_ROWS, _RUNS = 256, 5


def choose_dtype(
    dtype: torch.dtype | Dtype | None, device: torch.device, config: TransformerConfig
) -> torch.dtype:
    """Return the dtype that an engine is loaded with.

    Args:
        dtype: The dtype or its name. None is bfloat16 on CUDA and float32 on a CPU. ``auto`` is
            bfloat16 on a CPU too if the model is at least :data:`LEAST_WIDTH` wide and matrix
            products of its width take this process at least :data:`LEAST_GAIN` times less time in
            bfloat16 (:func:`bfloat16_gain`), which needs AMX or AVX512-BF16. Narrow models, such as
            the bundled policy, gain little and stay in float32.

    Raises:
        ConfigError: Another name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; valid: {', '.join(DTYPES)}.")
    if dtype is not None and dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cuda":
        return torch.bfloat16
    if dtype is None or config.hidden_size < LEAST_WIDTH:
        return torch.float32
    gain = bfloat16_gain(config.hidden_size, config.intermediate_size, torch.get_num_threads())
    return torch.bfloat16 if gain >= LEAST_GAIN else torch.float32


@cache
def bfloat16_gain(width: int, inner: int, threads: int) -> float:
    """Return how many times faster a CPU multiplies [256, width] by [width, inner] in bfloat16 than
    in float32.

    The best of five runs each, in turn: some 0.1 s at a width of 1024, once per process.
    ``threads``, torch's number of threads, only tells cached results apart.
    """
    pairs = []
    for dtype in (torch.float32, torch.bfloat16):
        pairs.append((torch.ones(_ROWS, width, dtype=dtype), torch.ones(inner, width, dtype=dtype)))
    with torch.inference_mode():
        # the first warms up
        runs = [[_seconds(x, weight) for x, weight in pairs] for _ in range(_RUNS + 1)][1:]
    single, half = (min(times) for times in zip(*runs, strict=True))
    return single / half


def _seconds(x: torch.Tensor, weight: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.nn.functional.linear(x, weight)
    return time.perf_counter() - start
