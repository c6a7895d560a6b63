"""Options of a policy. Each is declared once, with its help text, default and the backends that
heed it; ``Cosmos3Policy``, the commands, the TOML of ``evaluate`` and the LeRobot plugin are built
from them. Importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from strands_cosmos3.backends.options import BackendOptions, SamplingOptions, ServiceOptions
from strands_cosmos3.checks import instance_of, positive, typed_fields, whole_number
from strands_cosmos3.collision import Obstacle
from strands_cosmos3.embodiments import GripperConvention
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.extras import EXTRAS
from strands_cosmos3.monitors import OnEvent
from strands_cosmos3.options import (
    MODEL_BACKENDS,
    TORCH_BACKENDS,
    BackendName,
    changed_options,
    heeds,
    option,
    options_of,
    section,
    with_options,
)
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.robots.joints import JointLimits
from strands_cosmos3.types import OFF_POSE_BOUND_M

_OPTION_OF_ARGUMENT = {"actions_per_step": "replan_rows"}


@dataclass(frozen=True, kw_only=True)
class ArmOptions:
    """The arm that a policy moves. With ``robot=None`` only the grippers' units and the cameras
    count.
    """

    arm_model: Any = None
    """Its MuJoCo model, path or name; None is the packaged one."""
    limits: JointLimits | None = None
    """Limits of its joints; None is the robot's own."""
    servo_lead: bool = True
    """Whether targets are sent early to cancel the lag of position servos (0.1 s for a Panda's) in
    a simulator whose model states them. Elsewhere, and with False, targets are the planned joint
    angles.
    """
    obstacles: Sequence[Obstacle] | None = None
    """Boxes (:class:`~strands_cosmos3.collision.Obstacle`) to keep off; None is those of our Robot,
    else none.
    """
    off_pose_bound_m: float = OFF_POSE_BOUND_M
    """Distance from its pose up to which a row is executed; the first that misses it by more, and
    those after it, hold the arm (``off_pose_held``).
    """
    cameras: Sequence[str] | None = None
    """Names of the robot's cameras, if known, so that a missing view is an error of the
    constructor.
    """
    observed_gripper: str | GripperConvention | None = None
    """Unit of the observation's gripper: ``fraction``, ``closed_fraction``, ``finger_m`` or
    ``tendon`` (:data:`~strands_cosmos3.embodiments.GRIPPERS`), or a ``GripperConvention``;
    None is metres for a Panda's finger joint, else the open fraction.
    """
    commanded_gripper: str | GripperConvention | None = None
    """Unit of the action's gripper, likewise; None also follows a host's model
    (:meth:`~strands_cosmos3.policy.Cosmos3Policy.set_sim_context`).
    """

    def __post_init__(self) -> None:
        typed_fields(self)
        positive(self.off_pose_bound_m, "off_pose_bound_m")
        if isinstance(self.cameras, str):
            raise InputError(f"cameras must be a list of names, got {self.cameras!r}.")
        model = self.arm_model  # compared by name, because importing MuJoCo takes time
        if not (isinstance(model, str | Path | None) or type(model).__name__ == "MjModel"):
            raise InputError(f"arm_model must be a path, a name or an MjModel, got {model!r:.80}.")


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The policy.

    Raises:
        InputError: A number is out of range.
    """

    backend: BackendName | None = None
    """Where actions come from: a checkpoint in this process, by PyTorch (native) or as exported
    graphs (onnx), in several processes (distributed) or in the stock diffusers pipeline
    (diffusers), a policy server (service), a recording (replay), or an expert that reads the
    simulator's state (scripted). None: distributed where degrees of parallelism are given, service
    with its address, onnx for the bundled policy where ONNX Runtime is installed and heeds the
    options, else native.
    """
    model: str | None = option(None, *MODEL_BACKENDS)
    """For native, onnx, distributed and diffusers: a checkpoint's folder, or owner/name[@revision]
    on the Hugging Face hub; for onnx also the folder of its graphs. None is the bundled
    policy, which can reach, pick and place on one simulated table.
    """
    action_space: Literal["midtrain", "joint_pos"] | None = None
    """Action space, where neither the checkpoint nor the server states it: pose deltas (midtrain)
    or joint angles (joint_pos). None: as stated, for a server joint_pos, else the embodiment's.
    """
    chunk_rows: int | None = None
    """Rows of a chunk; None is the checkpoint's number, else the embodiment's (DROID: 16 pose
    deltas or 32 joint rows at 15 Hz). A server may return another number.
    """
    replan_rows: int | None = None
    """Rows to execute before the next chunk is requested; None is the checkpoint's number (8 for
    the bundled policy), else the whole chunk.
    """
    borrow_domain: bool = False
    """Let a model drive a robot that Cosmos 3 has no domain for, by another robot's rows."""
    decode_frames: int | None = option(None, hidden=True)
    """Frames of the predicted video to decode: the observed one and one for each row. None is all
    of them.
    """
    sound: bool = option(False, *TORCH_BACKENDS, "service")
    """Predict the sound of the video too: last_rollout["sound"], and the track of a film. It is
    denoised with the actions, which are then others than without it. For checkpoints that have ears
    (checkpoint inspect), and servers of this package that were started with it.
    """
    on_event: OnEvent = "warn"
    """What follows from implausible inputs (a camera that is dead, frozen, swapped, upside down
    ..., a state that is stuck or jumps): a warning (warn), an arm that holds until they are right
    again (hold), or the end of the episode (error). On a real arm use hold; see docs/safety.md.
    """
    rollout_folder: str | Path | None = option(None, hidden=True)
    """Folder of files with what is predicted: last_rollout["video"] and ["sound"] are then paths of
    an .mp4 and a .wav, or None, instead of arrays.
    """
    sampling: SamplingOptions = section(SamplingOptions)
    engine: EngineOptions = section(EngineOptions)
    parallel: ParallelConfig = section(ParallelConfig)
    service: ServiceOptions = section(ServiceOptions)
    arm: ArmOptions = section(ArmOptions, hidden=True)

    def __post_init__(self) -> None:
        typed_fields(self)
        for name, lowest, highest in (
            ("chunk_rows", 1, 256),
            ("replan_rows", 1, None),
            ("decode_frames", 0, None),
        ):
            if (value := getattr(self, name)) is not None:
                whole_number(value, name, lowest, highest)

    @classmethod
    def of(cls, options: PolicyOptions | Mapping[str, Any]) -> PolicyOptions:
        """Return options that are given as such, or by name in one flat dictionary, e.g.
        ``{"policy_frames": 1, "tp": 2}``.

        Raises:
            ConfigError: There is no such option.
        """
        if isinstance(options, Mapping):
            return with_options(cls(), options)
        return instance_of(options, PolicyOptions, "options")

    def with_arguments(self, arguments: Mapping[str, Any]) -> PolicyOptions:
        """Return the options with those that are arguments of ``Cosmos3Policy``; None and False are
        not set, and arguments that are no options are left out.

        Raises:
            ConfigError: One of them is set already.
        """
        values = {
            option: value
            for name, value in arguments.items()
            if (option := _OPTION_OF_ARGUMENT.get(name, name)) in options_of(PolicyOptions)
            and value is not None
            and value is not False
        }
        if twice := sorted(changed_options(self).keys() & values.keys()):
            raise ConfigError(
                f"{', '.join(twice)} is given as an argument and in options; give it once."
            )
        return with_options(self, values)

    def once(self, name: str, argument: Any) -> Any:
        """Return an argument, or the option of its name.

        Raises:
            ConfigError: Both are set.
        """
        value = getattr(self, name)
        if argument is not None and value is not None:
            raise ConfigError(f"{name} is given as an argument and in options; give it once.")
        return value if argument is None else argument

    def backend_with(self, model: Any, default: str = "native") -> str:
        """Return the backend, or the one that follows from a model and the other options: without
        PyTorch, a checkpoint's exported graphs run it.
        """
        if self.backend is not None:
            return self.backend
        if model is None and changed_options(self.service):
            return "service"
        if self.parallel.ranks > 1:
            return "distributed"
        if model is None:
            return default
        exported = isinstance(model, str | Path) and (Path(model) / "onnx/export.json").is_file()
        only = EXTRAS["engine"].absent and not EXTRAS["onnx"].absent and heeds("onnx", self)
        return "onnx" if exported and only else "native"

    @property
    def bundled_backend(self) -> str:
        """What runs the bundled policy: its exported graphs, where ONNX Runtime is installed and
        heeds every option that is set, else this package's engine in torch.
        """
        usable = not EXTRAS["onnx"].absent and heeds("onnx", self)
        return "onnx" if usable else "native"

    @property
    def for_backend(self) -> BackendOptions:
        """The part that backends read: the fields that ``BackendOptions`` has too, and that an
        engine loads what predicts sound.
        """
        parts = {name: getattr(self, name) for name in _OF_BACKENDS}
        if self.sound:
            parts["engine"] = replace(self.engine, decode_sound=True)
        return BackendOptions(**parts)

    @property
    def without_backend(self) -> Self:
        """The options of a policy whose backend is made already: without what makes one."""
        unset = PolicyOptions()
        names = ("backend", "model", *_OF_BACKENDS)
        return replace(self, **{name: getattr(unset, name) for name in names})


_OF_BACKENDS = {part.name for part in fields(PolicyOptions)} & {
    part.name for part in fields(BackendOptions)
}
