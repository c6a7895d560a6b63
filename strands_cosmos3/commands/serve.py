"""``strands-cosmos3 serve``: a policy behind a WebSocket, for robots and simulators that speak
openpi's protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro
from rich.console import Console

from strands_cosmos3.checks import positive, seed_number, whole_number
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.extras import OF_BACKEND, needed_by
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.parallel.rank import exit_rank

if TYPE_CHECKING:
    from strands_cosmos3.backends.base import Backend
    from strands_cosmos3.backends.options import InferenceOptions

_OF_MODEL = ("num_steps", "guidance_scale", "policy_frames", "device", "dtype", "prompt_format")


@dataclass(frozen=True)
class Serve:
    """Serve a policy over a WebSocket, for robots and simulators.

    Clients of openpi, RoboLab, IsaacLab-Arena, vLLM-Omni and NVIDIA's LIBERO can use it
    (docs/wire.md). Ctrl-C or SIGTERM finishes the running inference and stops.

    Anyone who reaches the port can move the robot, so it listens on this machine only unless you
    set a token.
    """

    backend: Literal["native", "distributed", "diffusers", "replay", "scripted"] | None = None
    """Where inference runs. The default is native (distributed with --tp or --cfg), and replay
    with --trajectory. scripted is refused: it needs the simulator's state, which never leaves
    its process.
    """
    model: Annotated[str | None, tyro.conf.arg(aliases=["--checkpoint"])] = None
    """For native, distributed and diffusers: a checkpoint's folder or hub repository. The
    default is the bundled policy, which knows one simulated table.
    """
    num_steps: int | None = None
    """Denoising steps. The default is the checkpoint's preset."""
    guidance_scale: float | None = None
    """Guidance; 1 is none. The default is the checkpoint's preset."""
    policy_frames: int | None = None
    """For native and distributed: frames of the clip that a policy denoises. 1 answers actions
    without a future, several times faster, where the checkpoint was trained to. The default is
    the checkpoint's own.
    """
    device: str | None = None
    """cpu, cuda or cuda:N. The default is cuda where there is one."""
    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Type of weights. The default is bfloat16 on cuda, else float32; auto is bfloat16
    on a CPU too if the model is wide and the CPU multiplies bfloat16 much faster."""
    prompt_format: Literal["plain", "json"] | None = None
    """Form of the model's caption. The default is the checkpoint's; sources disagree for
    Nano-Policy-DROID (docs/wire.md).
    """
    engine_options: Annotated[
        EngineOptions, tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff
    ] = field(default_factory=EngineOptions)
    """For native and distributed: speed and memory."""
    tp: int = 1
    """For distributed: ranks that split every layer."""
    cfg: int = 1
    """For distributed: 2 computes guidance's two passes on two groups of ranks. tp x cfg
    processes are started.
    """
    replicas: int | None = None
    """For native and distributed: processes (groups of tp x cfg) that infer side by side, each
    with the weights; the default is 1. One that dies or hangs is replaced, and all connections
    stay. With 0, native infers in the server's own process.
    """
    stalled_after: float = 600.0
    """For native and distributed: seconds without progress after which such a process is
    replaced.
    """
    trajectory: Path | None = None
    """For replay: a DROID episode (.json) or the recording of a rollout (rollout --npz)."""
    embodiment: str = "droid"
    """Name of the embodiment."""
    action_space: Literal["joint_pos", "midtrain"] | None = None
    """Action space on the wire: joint_pos, or midtrain (answered as absolute poses). The default
    is the checkpoint's, and midtrain for replay.
    """
    host: str = "127.0.0.1"
    """Interface. Any but this machine's own wants a token."""
    port: int = 8000
    """Port; 0 takes a free one and prints it."""
    token_file: Path | None = None
    """File with the tokens that clients must show: one per line, with or without the client's
    name before it, not readable by other users. Without it, the token is the environment's
    STRANDS_COSMOS3_TOKEN.
    """
    tls_cert: Path | None = None
    """Certificate chain (PEM), with --tls-key: clients then connect to wss://."""
    tls_key: Path | None = None
    """Private key (PEM) of the certificate."""
    max_clients: int = 128
    """Connections at a time. A further client takes the place of one that sent no request for 10
    s, or is refused.
    """
    max_batch: int = 8
    """Requests that are inferred for together, at most, of those that wait."""
    max_queue_age: float = 30.0
    """Seconds that a request may wait for other clients' inferences; one that waited longer is
    refused.
    """
    grace: float = 30.0
    """Seconds that a shutdown waits for the running inference."""
    libero: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Answer NVIDIA's LIBERO requests over HTTP too (/predict); with --embodiment libero that is
    so anyway. The checkpoint must have the libero domain.
    """
    seed: int = 0
    """Noise seed for clients that send none."""
    verbose: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Log connections too, not only what goes wrong."""
    token: Annotated[str | None, tyro.conf.Suppress] = field(
        default=None, repr=False, metadata={"environment": "STRANDS_COSMOS3_TOKEN"}
    )

    GROUPS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Policy": (
            "backend",
            "model",
            "trajectory",
            "embodiment",
            "action_space",
            "libero",
            "seed",
        ),
        "Server": ("host", "port", "token_file", "tls_cert", "tls_key", "verbose"),
        "Checkpoint (native, distributed and diffusers)": (
            *(
                "num_steps",
                "guidance_scale",
                "policy_frames",
                "device",
                "dtype",
                "prompt_format",
                "tp",
                "cfg",
            ),
            *EngineOptions.__dataclass_fields__,
        ),
        "Load": ("replicas", "stalled_after", "max_clients", "max_batch", "max_queue_age", "grace"),
    }

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs."""
        return (
            "serve",
            *OF_BACKEND.get(self.backend or ("replay" if self.trajectory else "native"), ()),
        )

    def run(self) -> int:
        """Serve until stopped; return 0."""
        with needed_by("serve"):
            from strands_cosmos3.serving.served import ServedPolicy
            from strands_cosmos3.serving.server import PolicyServer, ServerConfig
            from strands_cosmos3.serving.server_config import Tokens
        seed_number(self.seed, "--seed")
        config = ServerConfig(
            self.host,
            self.port,
            self.token if self.token_file is None else Tokens.read(self.token_file).by_client,
            self.grace,
            self.max_clients,
            queue_s=self.max_queue_age,
            max_batch=self.max_batch,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )
        name, backends = self._backends()
        space = (
            self.action_space
            or backends[0].info.action_space
            or ("midtrain" if name == "replay" else None)
        )
        logging.basicConfig(
            level=logging.INFO if self.verbose else logging.WARNING,
            format="%(asctime)s %(levelname)s %(message)s",
        )
        try:
            policies = [
                ServedPolicy(
                    backend,
                    self.embodiment,
                    space,
                    self.seed,
                    warm_up_message=_warm_up_message(backend),
                    libero=self.libero or None,
                )
                for backend in backends
            ]
            server = PolicyServer(policies, config)
            console = Console()
            server.run(
                ready=lambda server: console.print(
                    self._says(name, server.port), highlight=False, soft_wrap=True
                )
            )
            if server.busy_s:
                console.print(
                    f"stopped; an inference that still ran after {self.grace:g} s was abandoned"
                )
                # its thread would be torn down by Python's shutdown, which ends in SIGABRT
                exit_rank(0)
        finally:
            for backend in backends:
                backend.close()
        console.print("stopped")
        return 0

    def _backends(self) -> tuple[str, Sequence[Backend]]:
        """The backend's name, and one backend for each replica."""
        from strands_cosmos3.backends import make_backend
        from strands_cosmos3.backends.options import InferenceOptions, require_backend

        if self.model is not None and self.trajectory is not None:
            raise ConfigError(
                "--model and --trajectory are two different things to serve; give one."
            )
        parallel = ParallelConfig(self.tp, self.cfg) if (self.tp, self.cfg) != (1, 1) else None
        default = "native" if parallel is None else "distributed"
        name = self.backend or (default if self.trajectory is None else "replay")
        if name == "replay" and "pose_abs" not in get_embodiment(self.embodiment).spaces:
            raise ConfigError(
                f"--embodiment {self.embodiment}: a recording is sent as poses, which only droid "
                "has on the wire; leave it out."
            )
        degrees = {} if parallel is None else {"tp": self.tp, "cfg": self.cfg}
        given: dict[str, Any] = {option: getattr(self, option) for option in _OF_MODEL}
        flags = {
            "trajectory": self.trajectory,
            "replicas": self.replicas,
            **degrees,
            **self.engine_options.given,
        }
        require_backend(name, {**given, **flags}, flags=True)
        model = self.trajectory or self.model
        if model is None and name in ("native", "distributed"):
            model = embedded_checkpoint(self.embodiment)
        options = InferenceOptions(**given, engine=self.engine_options, parallel=parallel)
        count = (
            1
            if self.replicas is None
            else whole_number(self.replicas, "--replicas", int(name == "distributed"), 64)
        )
        if count and name in ("native", "distributed") and model is not None:
            return name, self._replicas(count, model, options)
        return name, [make_backend(name, model, options, self.action_space)]

    def _replicas(
        self, count: int, model: str | Path, options: InferenceOptions
    ) -> Sequence[Backend]:
        from strands_cosmos3.parallel.group import RankTimeouts

        timeouts = RankTimeouts(stalled_s=positive(self.stalled_after, "--stalled-after"))
        with needed_by("serve"):
            from strands_cosmos3.backends.distributed import replicas
        return replicas(count, model, options, self.action_space, timeouts)

    def _says(self, name: str, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "ws" if self.tls_cert is None else "wss"
        address = f"{scheme}://{host}:{port}"
        also = "/predict, " if self.libero or self.embodiment == "libero" else ""
        return f"serving {name} for {self.embodiment} on {address} (also {also}/healthz, /readyz and /metrics); Ctrl-C stops"


def _warm_up_message(backend: Any) -> dict[str, Any] | None:
    """A replay can only be asked from where it starts."""
    from strands_cosmos3.actions.rotations import matrix_to_quaternion
    from strands_cosmos3.backends.replay import Recording, ReplayBackend
    from strands_cosmos3.serving import wire

    if not isinstance(backend, ReplayBackend):
        return None
    if not isinstance(backend.recording, Recording):
        raise ConfigError(
            "a dataset's episodes are replayed by rollout, not served; give a file (.json or .npz)."
        )
    T = backend.recording.T_base_cosmos[0]
    return {
        wire.POSITION: T[:3, 3],
        wire.QUATERNION: matrix_to_quaternion(T[:3, :3]),
        wire.JOINTS: backend.recording.q_start_rad,
        wire.GRIPPER: 0.0,
    }
