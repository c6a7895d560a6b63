"""Will it fit? Asked of a checkpoint's headers and the device, before a weight is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.weight_files import Cut, cut_shape
from strands_cosmos3.engine.weights import optional
from strands_cosmos3.errors import PreflightError

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_HEADROOM = 1.05
_DROID_TOKENS = 3093


def kept_bytes(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    *,
    decoder: bool,
    text: bool,
    domains: int = 1,
    cut: Callable[[str, tuple[int, ...]], Cut] = lambda _, shape: (),
) -> int:
    """Bytes of weights that stay on the device.

    Args:
        checkpoint: Whose headers to read.
        dtype: What they are kept as.
        decoder: Whether the VAE's decoder is kept. text: Whether the text tower and the embeddings are.
        domains: Action heads in use.
        cut: Name and whole shape of a weight -> the part of it that is kept.
    """
    size = torch.empty((), dtype=dtype).element_size()
    share = domains / checkpoint.config.num_embodiment_domains
    total = 0.0
    for key, shape in checkpoint.weights.shapes.items():
        if optional(key) or (not text and _of_text(key)):
            continue
        width = 4 if key.startswith("time_embedder") else size
        total += math.prod(cut_shape(shape, cut(key, shape))) * width * (share if key.startswith("action_proj") else 1)
    for key, shape in checkpoint.vae_weights.shapes.items():
        if decoder or not key.startswith(("decoder.", "post_quant_conv.")):
            total += math.prod(shape) * size
    return int(total)


def _of_text(key: str) -> bool:
    generation = ("add_", "to_add_out", "norm_added", "_moe_gen")
    return key.startswith(("embed_tokens", "norm.")) or (
        key.startswith("layers.") and not any(part in key for part in generation)
    )


def working_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """A rough bound on the activations of one step at DROID's 480-tier sequence, all layers' text keys included."""
    config, size = checkpoint.config, torch.empty((), dtype=dtype).element_size()
    widest = config.intermediate_size * 3 + config.hidden_size * 6
    return _DROID_TOKENS * widest * size


def available_bytes(device: torch.device) -> int:
    """Memory that a device has left. On a CPU, what the kernel says can be had without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62  # no way to know


def preflight(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    *,
    decoder: bool,
    offload_text: bool,
    cut: Callable[[str, tuple[int, ...]], Cut] = lambda _, shape: (),
) -> None:
    """Check device, type and memory together.

    Raises:
        PreflightError: Something will not work; every failure is listed.
    """
    failures = []
    if dtype not in _TYPES:
        failures.append(f"dtype {dtype} is not supported; valid: float32, bfloat16, float16")
    if device.type == "cuda" and not torch.cuda.is_available():
        failures.append(f"device {device} was asked for, but this torch ({torch.__version__}) sees no CUDA device")
    elif device.type not in ("cuda", "cpu"):
        failures.append(f"device {device} is not supported; valid: cpu, cuda, cuda:N")
    elif dtype in _TYPES:
        kept = kept_bytes(checkpoint, dtype, decoder=decoder, text=not offload_text, cut=cut)
        needed = int(kept * _HEADROOM) + working_bytes(checkpoint, dtype)
        if needed > (free := available_bytes(device)):
            failures.append(
                f"{device} has {free / 2**30:.2f} GiB left, {needed / 2**30:.2f} GiB are needed "
                f"({kept / 2**30:.2f} GiB of weights as {dtype}); use bfloat16, decode_video=False, offload_text=True, "
                "or another device"
            )
    if failures:
        raise PreflightError(f"{checkpoint.root} cannot be loaded: " + "; ".join(failures) + ".")
