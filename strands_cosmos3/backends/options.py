"""Options of backends: how a model is loaded, sampled and divided, or where its server is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from strands_cosmos3.checks import known_name, typed_fields
from strands_cosmos3.embodiments import Sampling
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.observe.views import Composition
from strands_cosmos3.options import MODEL_BACKENDS, SAMPLER_BACKENDS, option, section
from strands_cosmos3.parallel.config import ParallelConfig

ViewPointName = Literal[
    "ego_view",
    "third_person_view",
    "wrist_view",
    "concat_view",
    "top_down_2d_view",
    "video_game_view",
]
_OF_PROCESSOR = (
    "policy_frames",
    "image_size",
    "prompt_format",
    "composition",
    "view_point",
    "negative_prompt",
    "fps",
)
COMPOSITIONS: tuple[str, ...] = get_args(Composition)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Sampling):
    """Input and sampling of a model. None follows the checkpoint, else its embodiment.

    Raises:
        ConfigError: There is no such composition.
        InputError: A value is out of range or has another type.
    """

    policy_frames: int | None = option(None, *SAMPLER_BACKENDS)
    """Video frames that a policy denoises; 1 is actions only, several times faster, for checkpoints
    that were trained so. None: the checkpoint's first number, or its largest if the predicted video
    is decoded or its sound is (still the first if the checkpoint predicts videos from actions).
    """
    image_size: int | None = option(None, *MODEL_BACKENDS)
    """Resolution tier: 256, 480, 704 or 720 (128 for this project's small checkpoints)."""
    prompt_format: Literal["plain", "json"] | None = option(None, *MODEL_BACKENDS)
    """Format of the caption. Sources disagree for Nano-Policy-DROID (docs/wire.md)."""
    composition: Composition | None = option(None, *SAMPLER_BACKENDS)
    """How three views become one picture: stretched, as by NVIDIA's policy server (framework), or
    letterboxed.
    """
    view_point: ViewPointName | None = option(None, *MODEL_BACKENDS)
    """Camera sentence of the caption."""
    negative_prompt: str | None = option(None, *MODEL_BACKENDS)
    """Caption of the unconditional branch; None is a blank one."""
    fps: float | None = option(None, *MODEL_BACKENDS)
    """Rows and frames a second."""
    use_karras_sigmas: Literal["true", "false", "checkpoint"] | None = option(
        None, *SAMPLER_BACKENDS
    )
    """Karras' noise levels, the native flow schedule, or what the checkpoint's scheduler says.
    Default: the native one.
    """

    @property
    def of_processor(self) -> dict[str, Any]:
        """The options that ``Cosmos3PolicyProcessor`` takes."""
        return {name: getattr(self, name) for name in _OF_PROCESSOR}

    @property
    def karras(self) -> bool | None:
        """``use_karras_sigmas`` as the engine takes it."""
        return None if self.use_karras_sigmas == "checkpoint" else self.use_karras_sigmas == "true"

    @property
    def stated(self) -> list[str]:
        """Names of a contract's fields that these options state."""
        sampled = None not in (self.num_steps, self.guidance_scale, self.flow_shift)
        values = {
            "fps": self.fps,
            "prompt_format": self.prompt_format,
            "resolution_tier": self.image_size,
            "sampling": sampled or None,
        }
        return [name for name, value in values.items() if value is not None]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.composition is not None:
            known_name(self.composition, "composition", COMPOSITIONS)


@dataclass(frozen=True)
class ServiceOptions:
    """Address of a policy server. Its token is read from the environment variable
    STRANDS_COSMOS3_TOKEN.
    """

    host: str | None = option(None, "service")
    """Host or address of the policy server; None is localhost."""
    port: int | None = option(None, "service")
    """Port of the policy server; None is 8000."""
    api_key: str | None = option(None, "service", hidden=True, repr=False)
    """Token of the policy server."""
    client: Any = option(None, "service", hidden=True)
    """A :class:`~strands_cosmos3.serving.client.PolicyClient` (``HttpPolicyClient`` for
    ``libero``), instead of the three above.
    """
    dialect: Literal["robolab", "openpi", "vllm-omni", "roboarena", "libero"] | None = option(
        None, "service"
    )
    """The server's variant of openpi's protocol; None is robolab. libero is NVIDIA's LIBERO server,
    over HTTP.
    """
    priority: Literal["realtime", "bulk"] | None = option(None, "service")
    """Class in which a server of this package is asked: requests of realtime clients go before
    those of bulk. None is the class that the server gives to the token, else bulk.
    """
    deadline_s: float | None = option(None, "service")
    """Seconds after which a chunk is useless: a server of this package then refuses the request at
    once, and says when to ask again. None: in real time the rest of the motion under way, else any
    time.
    """
    pictures: Literal["jpeg", "raw"] | None = option(None, "service")
    """How views are sent to a server of this package, which composes them: as JPEG of quality 95,
    or raw, to the bit. None is jpeg. Other servers get raw pictures in any case.
    """

    def __post_init__(self) -> None:
        typed_fields(self)


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """All options of backends.

    Args:
        sampling: Input and sampling, for a model.
        engine: Device, speed and memory, for a model.
        parallel: Division among processes, for ``distributed``.
        service: The server, for ``service``.
        check_language: Whether a checkpoint that declares its language refuses sentences that it
            does not understand.
    """

    sampling: SamplingOptions = section(SamplingOptions)
    engine: EngineOptions = section(EngineOptions)
    parallel: ParallelConfig = section(ParallelConfig)
    service: ServiceOptions = section(ServiceOptions)
    check_language: bool = True
