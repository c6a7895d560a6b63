"""Options of backends: how a model is loaded and sampled, and which option belongs to which
backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from strands_cosmos3.embodiments import Sampling
from strands_cosmos3.engine.options import DTYPES, DecodeVideo, Dtype, EngineOptions
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.observe.views import Composition
from strands_cosmos3.parallel.config import ParallelConfig

COMPOSITIONS: tuple[str, ...] = get_args(Composition)
MODEL_BACKENDS = ("native", "distributed", "diffusers")
OPTION_BACKENDS = {
    **dict.fromkeys(("guidance_scale", "device", "dtype", "prompt_format"), MODEL_BACKENDS),
    "num_steps": (*MODEL_BACKENDS, "service"),
    **dict.fromkeys(("policy_frames", "composition", "replicas"), ("native", "distributed")),
    **dict.fromkeys((option.name for option in fields(EngineOptions)), ("native", "distributed")),
    **dict.fromkeys(("tp", "cfg", "parallel"), ("distributed",)),
    **dict.fromkeys(("trajectory", "trajectory_episode"), ("replay",)),
    **dict.fromkeys(("host", "port", "api_key", "client", "dialect"), ("service",)),
}
"""Option -> the backends that heed it. An option that is not listed is everybody's."""


def require_backend(backend: str | None, given: dict[str, Any], flags: bool = False) -> None:
    """Refuse options that a backend does not heed.

    Args:
        backend: Its name.
        given: Options by name; those that are None are not given.
        flags: Whether to write them as on the command line.

    Raises:
        ConfigError: One is given that the backend does not heed; the message names it and the
            backends that do.
    """
    for name, value in given.items():
        owners = OPTION_BACKENDS[name]
        if value is None or backend in owners:
            continue
        option = f"--{name.replace('_', '-')} {value}" if flags else name
        owner = " or ".join(filter(None, (", ".join(owners[:-1]), owners[-1])))
        raise ConfigError(
            f"{option} belongs to {'--' * flags}backend {owner}, not to {backend}; leave it out."
        )


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(Sampling):
    """Options of a model backend. None follows the checkpoint, else the domain's preset; an
    explicit value wins.

    Args:
        num_steps, guidance_scale, flow_shift, guidance_interval: As in
            :class:`~strands_cosmos3.embodiments.Sampling`.
        device: ``cpu``, ``cuda`` or ``cuda:N``; None is CUDA where torch sees it, else the CPU.
        dtype: ``float32`` or ``bfloat16``; None is bfloat16 on CUDA, else float32. ``auto`` is
            bfloat16 on a CPU too if the model is wide and the CPU multiplies bfloat16 much faster
            (:func:`~strands_cosmos3.engine.preflight.choose_dtype`).
        image_size: Resolution tier.
        prompt_format: ``plain`` or ``json``.
        composition: ``framework`` or ``letterbox``: how three views become one picture
            (:mod:`strands_cosmos3.engine.frames`).
        decode_video: Whether the predicted video is decoded; ``"preview"`` does so cheaply and less
            exactly if the checkpoint has a preview decoder.
        policy_frames: Frames of a policy's clip: 1 answers actions without a future, several times
            faster, where the checkpoint was trained to. None is the checkpoint's first, or its
            longest if the predicted video is decoded; where forward dynamics predict the video (a
            checkpoint's ``future_mode``), the first in any case.
        check_language: Whether a checkpoint that declares its language refuses sentences that it
            does not understand.
        engine: For ``native`` and ``distributed``: options of speed and memory.
        parallel: For ``distributed``: a :class:`~strands_cosmos3.parallel.config.ParallelConfig`;
            None is one process.
    """

    device: str | None = None
    dtype: Dtype | None = None
    image_size: int | None = None
    prompt_format: Literal["plain", "json"] | None = None
    composition: Composition | None = None
    decode_video: DecodeVideo = False
    policy_frames: int | None = None
    check_language: bool = True
    engine: EngineOptions = field(default_factory=EngineOptions)
    parallel: ParallelConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in (None, *DTYPES):
            raise ConfigError(f"dtype {self.dtype!r} is not supported; valid: {', '.join(DTYPES)}.")
        if not isinstance(self.decode_video, bool) and self.decode_video != "preview":
            raise ConfigError(
                f"decode_video {self.decode_video!r} is unknown; valid: True, False, 'preview'."
            )
        if self.composition not in (None, *COMPOSITIONS):
            raise ConfigError(
                f"composition {self.composition!r} does not exist; valid: "
                f"{', '.join(COMPOSITIONS)}."
            )
