"""Choose the dtype, and check device, dtype and memory, before a weight is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from timeit import timeit
from typing import Any

import torch

from strands_cosmos3.checks import known_name
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.options import DTYPES, Dtype, EngineOptions
from strands_cosmos3.engine.quantised import Quantization
from strands_cosmos3.engine.weight_files import Shard, sliced_shape, unsharded
from strands_cosmos3.engine.weights import (
    TEXT,
    checkpoint_key,
    head_shapes,
    kept_dtype,
    parameter_shapes,
)
from strands_cosmos3.errors import ConfigError, PreflightError

LEAST_WIDTH = 1024
LEAST_GAIN = 2.5
_ROWS = 256
_RUNS = 5


def torch_device(device: str | torch.device) -> torch.device:
    """Return torch's device of a name; ConfigError: torch knows no such device."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r}: {error}; give cpu, cuda or cuda:N.") from None


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
        UnknownNameError: Another name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is not None and known_name(dtype, "dtype", DTYPES) != "auto":
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
    products = [
        partial(
            torch.nn.functional.linear,
            torch.ones(_ROWS, width, dtype=dtype),
            torch.ones(inner, width, dtype=dtype),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]
    with torch.inference_mode():
        # the first warms up
        runs = [[timeit(product, number=1) for product in products] for _ in range(_RUNS + 1)][1:]
    single, half = (min(times) for times in zip(*runs, strict=True))
    return single / half


_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_HEADROOM = 1.05
_DROID_TOKENS = 3093
_CPU = torch.device("cpu")
_HALF = torch.bfloat16


def kept_bytes(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    *,
    device: torch.device = _CPU,
    decoder: bool = False,
    text: bool = True,
    shard: Shard = unsharded,
    sound: Callable[[torch.dtype], int] | None = None,
) -> int:
    """Bytes of weights on the device with one action head, with or without the VAE's decoder and
    the text tower. ``sound`` says those of what predicts sound, where it is loaded.
    """
    numbers = sum(math.prod(shape) for shape in head_shapes(checkpoint.config).values())
    for key, shape in checkpoint.vae_weights.shapes.items():
        if decoder or not key.startswith(("decoder.", "post_quant_conv.")):
            numbers += math.prod(shape)
    total = numbers * dtype.itemsize + (0 if sound is None else sound(dtype))
    for name, shape in parameter_shapes(checkpoint.config).items():
        if text or not name.startswith(TEXT):
            key = checkpoint_key(name)
            kept_shape = sliced_shape(shape, shard(key, shape))
            if quantization is not None and key in quantization.names:
                total += quantization.bytes_of(kept_shape, device)
            else:
                total += math.prod(kept_shape) * kept_dtype(name, dtype).itemsize
    return total


def needed_bytes(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    **kept: Any,
) -> int:
    """Memory of a device for weights, some headroom and one step; arguments as of
    :func:`kept_bytes`.
    """
    weights = kept_bytes(checkpoint, dtype, quantization, **kept)
    return int(weights * _HEADROOM) + working_bytes(checkpoint.config, dtype)


FORMS: Mapping[str, tuple[torch.dtype, EngineOptions]] = {
    "float32": (torch.float32, EngineOptions()),
    "bfloat16": (_HALF, EngineOptions()),
    "int8 or fp8": (_HALF, EngineOptions(quantize="int8")),
    "int8 or fp8 with quantize_text": (_HALF, EngineOptions(quantize="int8", quantize_text=True)),
    "bfloat16 with offload_text": (_HALF, EngineOptions(offload_text=True)),
    "int8 or fp8 with offload_text": (_HALF, EngineOptions(quantize="int8", offload_text=True)),
}
"""Forms in which a checkpoint can be loaded."""


def memory_forms(needs: Callable[..., int], config: TransformerConfig) -> dict[str, int]:
    """What a device needs for each of :data:`FORMS`, in bytes, by :func:`needed_bytes`."""
    return {
        name: needs(dtype, Quantization.of(config, None, options), text=not options.offload_text)
        for name, (dtype, options) in FORMS.items()
    }


def gib(size: int) -> str:
    """Bytes as messages show them."""
    return f"{size / 2**30:.2f} GiB"


def working_bytes(config: TransformerConfig, dtype: torch.dtype) -> int:
    """A rough bound on the activations of one step with DROID's sequence at tier 480."""
    widest = config.intermediate_size * 3 + config.hidden_size * 6
    return _DROID_TOKENS * widest * dtype.itemsize


def available_bytes(device: torch.device) -> int:
    """Free memory of a device; on a CPU, the kernel's estimate without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    kernel = Path("/proc/meminfo")
    text = kernel.read_text(encoding="utf-8") if kernel.exists() else ""
    available = re.search(r"MemAvailable:\s*(\d+)", text)
    return int(available[1]) * 1024 if available else 1 << 62  # unknown


def preflight(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    *,
    decoder: bool,
    offload_text: bool,
    shard: Shard = unsharded,
    quantization: Quantization | None = None,
    sound: Callable[[torch.dtype], int] | None = None,
) -> None:
    """Raise PreflightError with all that is wrong; arguments as in
    :meth:`Cosmos3Engine.from_pretrained`. Raises ConfigError if the device cannot multiply what is
    quantised.
    """
    failures = []
    if dtype not in _TYPES:
        failures.append(f"dtype {dtype} is not supported; valid: float32, bfloat16, float16")
    if device.type == "cuda" and not torch.cuda.is_available():
        failures.append(
            f"device {device} was asked for, but this torch "
            f"({torch.__version__}) sees no CUDA device"
        )
    elif device.type not in ("cuda", "cpu"):
        failures.append(f"device {device} is not supported; valid: cpu, cuda, cuda:N")
    elif dtype in _TYPES:
        parts: Any = {"device": device, "decoder": decoder, "shard": shard, "sound": sound}
        needs = partial(needed_bytes, checkpoint, **parts)
        needed = needs(dtype, quantization, text=not offload_text)
        if quantization is not None:
            shapes = checkpoint.weights.shapes
            names = sorted(quantization.names)
            kept = {name: sliced_shape(shapes[name], shard(name, shapes[name])) for name in names}
            quantization.require_kernels(kept, device, dtype)
        if needed > (free := available_bytes(device)):
            forms = memory_forms(needs, checkpoint.config)
            listed = ", ".join(f"{name} {gib(size)}" for name, size in forms.items())
            failures.append(
                f"{device} has {gib(free)} left, {gib(needed)} are needed as {dtype}; use a form "
                f"that fits ({listed}), decode_video=False, or another device"
            )
        host = needs(dtype, quantization, text=True) - needed if offload_text else 0
        if host > (free := available_bytes(_CPU)):
            failures.append(
                f"the text tower needs {gib(host)} of host memory, {gib(free)} are left; leave "
                "offload_text out"
            )
    if failures:
        raise PreflightError(f"{checkpoint.root} cannot be loaded: " + "; ".join(failures) + ".")
