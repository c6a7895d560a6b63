"""Options of an engine that change its speed and its memory, not its results. Importing this
loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from strands_cosmos3.checks import typed_fields, whole_number
from strands_cosmos3.errors import ConfigError

Dtype = Literal["auto", "bfloat16", "float32"]
DecodeVideo = bool | Literal["preview"]
DTYPES: tuple[str, ...] = get_args(Dtype)
TEXT_CACHE_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine computes. Results are the same up to rounding.

    Args:
        cuda_graphs: Replay a CUDA graph at each denoising step, one for each shape and length of
            prompts (CUDA only).
        compile: Compile the denoising step with ``torch.compile``; each new shape then takes a
            minute or more once.
        offload_text: Keep the text tower in host memory except while it reads a new prompt.
        text_cache_bytes: Bytes of prompts' keys and values to keep across calls; 0 keeps none.

    Raises:
        InputError: A value has another type, or ``text_cache_bytes`` is negative.
    """

    cuda_graphs: bool = False
    compile: bool = False
    offload_text: bool = False
    text_cache_bytes: int = TEXT_CACHE_BYTES

    def __post_init__(self) -> None:
        typed_fields(self)
        whole_number(self.text_cache_bytes, "text_cache_bytes", 0)

    @classmethod
    def of(cls, options: EngineOptions | Mapping[str, Any] | None) -> EngineOptions:
        """Return options that are given as such, by name or not at all; raises ConfigError for
        an unknown name.
        """
        if options is None or isinstance(options, EngineOptions):
            return options or cls()
        valid = [field.name for field in fields(cls)]
        if unknown := [repr(name) for name in options if name not in valid]:
            raise ConfigError(
                f"unknown engine option {', '.join(unknown)}; valid: {', '.join(valid)}."
            )
        return cls(**options)

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    def require_runnable(self, device: str, tp_size: int = 1) -> None:
        """Raise a ConfigError if a kind of device, or layers that are split over ranks, cannot
        run these options.
        """
        if self.cuda_graphs and device != "cuda":
            raise ConfigError(
                f"cuda_graphs needs a CUDA device, and the device is {device!r}; leave it out, or "
                "use device='cuda'."
            )
        if self.compile and tp_size > 1:
            raise ConfigError(
                f"compile does not reach across the ranks of tp_size={tp_size}; leave it out, or "
                "use cfg_size alone."
            )
