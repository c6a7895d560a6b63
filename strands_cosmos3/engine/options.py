"""Options of an engine. Importing this loads no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

from strands_cosmos3.checks import known_name, typed_fields, whole_number
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.options import (
    ENGINE_BACKENDS,
    MODEL_BACKENDS,
    SAMPLER_BACKENDS,
    TORCH_BACKENDS,
    option,
)

Dtype = Literal["auto", "bfloat16", "float32"]
DecodeVideo = bool | Literal["preview"]
Quantize = Literal["int8", "int8-weights", "fp8"]
QUANTIZE: tuple[str, ...] = get_args(Quantize)
ExecutionProvider = Literal["cpu", "cuda", "tensorrt"]
PROVIDERS: tuple[str, ...] = get_args(ExecutionProvider)
DTYPES: tuple[str, ...] = get_args(Dtype)
TEXT_CACHE_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Device, speed and memory of a model. All but dtype and quantisation change results by
    rounding at most.

    Raises:
        ConfigError: ``dtype``, ``quantize``, ``execution_provider`` or ``decode_video`` is unknown.
        InputError: A value has another type, or ``text_cache_bytes`` is negative.
    """

    device: str | None = option(None, *TORCH_BACKENDS)
    """cpu, cuda or cuda:N; None is cuda where torch sees a GPU, else cpu."""
    dtype: Dtype | None = option(None, *TORCH_BACKENDS)
    """Type of weights and hidden states; None is bfloat16 on cuda, else float32. auto is bfloat16
    on a CPU too if the model is wide and the CPU multiplies bfloat16 much faster.
    """
    quantize: Quantize | None = option(None, *ENGINE_BACKENDS)
    """Keep the generation tower's linear layers in 8 bits. int8 and fp8 also multiply in 8 bits and
    save time and memory; a CPU splits the activations of int8 into two terms of 8 bits, so that a
    small model, such as the bundled one, gains no time. int8-weights saves memory alone and rounds
    no activations. None: as the checkpoint stores them.
    """
    quantize_text: bool = option(False, *ENGINE_BACKENDS)
    """Keep the text tower's linear layers in 8 bits too."""
    decode_video: DecodeVideo = option(False, *MODEL_BACKENDS, hidden=True)
    """Decode the predicted video. preview is cheaper and less exact, for checkpoints with a preview
    decoder.
    """
    decode_sound: bool = option(False, *TORCH_BACKENDS, "service", hidden=True)
    """Load what predicts sound, for requests that ask for it."""
    cuda_graphs: bool = option(False, *ENGINE_BACKENDS)
    """Replay all denoising steps as one CUDA graph, one for each shape, number of steps and lengths
    of prompts.
    """
    compile: bool = option(False, *ENGINE_BACKENDS)
    """Compile the transformer's layers with torch.compile: the first chunk takes up to a minute, a
    new shape hardly longer.
    """
    offload_text: bool = option(False, *ENGINE_BACKENDS)
    """Keep the text tower in host memory except while it reads a new prompt."""
    text_cache_bytes: int = option(TEXT_CACHE_BYTES, *SAMPLER_BACKENDS)
    """Bytes of prompts' keys and values to keep across calls; 0 keeps none."""
    execution_provider: ExecutionProvider | None = option(None, "onnx")
    """What ONNX Runtime computes on: cpu, the default, or cuda or tensorrt, which need
    onnxruntime-gpu. Weights and hidden states are float32.
    """

    def __post_init__(self) -> None:
        typed_fields(self)
        whole_number(self.text_cache_bytes, "text_cache_bytes", 0)
        for name, choices in (
            ("dtype", DTYPES),
            ("quantize", QUANTIZE),
            ("execution_provider", PROVIDERS),
        ):
            if (value := getattr(self, name)) is not None:
                known_name(value, name, choices)
        if self.quantize_text and self.quantize is None:
            raise ConfigError("quantize_text needs quantize: " + ", ".join(QUANTIZE) + ".")
        if not isinstance(self.decode_video, bool) and self.decode_video != "preview":
            raise ConfigError(
                f"decode_video {self.decode_video!r} is unknown; valid: True, False, 'preview'."
            )

    def answers_digest(self, digest: str) -> str:
        """A checkpoint's digest, or another where these options round its weights to 8 bits."""
        if self.quantize is None:
            return digest
        text = f"{digest} {self.quantize} {self.quantize_text}"
        return hashlib.sha256(text.encode()).hexdigest()

    def require_runnable(self, device: str, layer_ranks: int = 1) -> None:
        """Raise a ConfigError if a kind of device, or ranks that exchange within layers, cannot
        run these options.
        """
        if self.cuda_graphs and device != "cuda":
            raise ConfigError(
                f"cuda_graphs needs a CUDA device, and the device is {device!r}; leave it out, or "
                "use device='cuda'."
            )
        if self.compile and layer_ranks > 1:
            raise ConfigError(
                f"compile does not reach across the {layer_ranks} ranks that tp_size and sp_size "
                "make; leave it out, or use cfg_size alone."
            )
