"""How an in-process model is loaded and sampled, whichever backend runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from strands_cosmos3.embodiments import SamplerPreset
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.parallel.config import ParallelConfig

MODEL_BACKENDS = ("native", "distributed", "diffusers")
_BELONG = {
    "num_steps": MODEL_BACKENDS,
    "guidance_scale": MODEL_BACKENDS,
    "device": MODEL_BACKENDS,
    "policy_frames": ("native", "distributed"),
}


def refuse_model_options(backend: str, **given: Any) -> None:
    """Refuse options of a model, as the command line names them, where the backend would not heed them.

    Args:
        backend: Its name.
        given: ``num_steps``, ``guidance_scale``, ``device``, ``policy_frames``; None is not given.

    Raises:
        ConfigError: One is given that the backend does not heed; the message names it and whose it is.
    """
    for name, value in given.items():
        if value is not None and backend not in _BELONG[name]:
            *most, last = _BELONG[name]
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} belongs to --backend {', '.join(most)} or {last}, not to {backend}; "
                "leave it out."
            )


@dataclass(frozen=True)
class InferenceOptions:
    """Options of a model backend; None follows the checkpoint's and the domain's preset, an explicit value wins.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``; None is CUDA where torch sees it, else the CPU.
        dtype: ``float32`` or ``bfloat16``; None is bfloat16 on CUDA, else float32.
        num_steps: Denoising steps.
        guidance_scale: ``v = u + g (c - u)``.
        guidance_interval: Guidance only where lo < timestep < hi.
        flow_shift: Shift of the native flow schedule.
        image_size: Resolution tier.
        prompt_format: ``plain`` or ``json``.
        decode_video: Whether the predicted world is decoded.
        policy_frames: Frames of a policy's clip: 1 answers actions without a future, several times faster, where the checkpoint
            was trained to. None is its own way.
        parallel: For ``distributed``: a :class:`~strands_cosmos3.parallel.config.ParallelConfig`; None is one process.
    """

    device: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    num_steps: int | None = None
    guidance_scale: float | None = None
    guidance_interval: tuple[float, float] | None = None
    flow_shift: float | None = None
    image_size: int | None = None
    prompt_format: Literal["plain", "json"] | None = None
    decode_video: bool = False
    policy_frames: int | None = None
    parallel: ParallelConfig | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ConfigError(f"dtype {self.dtype!r} is not supported; valid: bfloat16, float32.")
        if self.num_steps is not None and self.num_steps < 1:
            raise InputError(f"num_steps must be at least 1, got {self.num_steps}.")

    def sampler(self, preset: SamplerPreset) -> SamplerPreset:
        """The preset with what was set here in place."""
        return SamplerPreset(
            preset.num_steps if self.num_steps is None else self.num_steps,
            preset.guidance_scale if self.guidance_scale is None else self.guidance_scale,
            preset.flow_shift if self.flow_shift is None else self.flow_shift,
            preset.guidance_interval if self.guidance_interval is None else self.guidance_interval,
        )
