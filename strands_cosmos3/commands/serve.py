"""``strands-cosmos3 serve``: a policy behind a WebSocket, for robots and simulators that speak
openpi's protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from strands_cosmos3.backends.options import ServiceOptions
from strands_cosmos3.checks import positive, seed_number, whole_number
from strands_cosmos3.commands.flags import from_environment, require_owned
from strands_cosmos3.commands.progress import WaitNotice
from strands_cosmos3.commands.serve_fleet import http_options, serve_fleet
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError, MissingDependencyError
from strands_cosmos3.extras import OF_BACKEND, needed_by, pip_command
from strands_cosmos3.options import (
    ENGINE_BACKENDS,
    MODEL_BACKENDS,
    SAMPLER_BACKENDS,
    option,
    require_heeded,
    section,
)
from strands_cosmos3.parallel.launched import told
from strands_cosmos3.parallel.rank import exit_rank
from strands_cosmos3.policy.options import PolicyOptions

if TYPE_CHECKING:
    from strands_cosmos3.backends.base import Backend
    from strands_cosmos3.serving.routes import HttpDialect
    from strands_cosmos3.serving.server import PolicyServer

_OF_FLEETS: Mapping[str, str] = dict.fromkeys(
    ("address", "max_replicas", "ingresses", "max_queued"), "a fleet (--ray)"
)


@dataclass(frozen=True, kw_only=True)
class ServedOptions(PolicyOptions):
    """The policy that is served."""

    backend: Literal["native", "onnx", "distributed", "diffusers", "replay"] | None = None
    """Where inference runs. None: replay with --trajectory, distributed where degrees of
    parallelism are given, else native.
    """
    chunk_rows: int | None = option(None, hidden=True)
    replan_rows: int | None = option(None, hidden=True)
    borrow_domain: bool = option(False, hidden=True)
    service: ServiceOptions = section(ServiceOptions, hidden=True)


@dataclass(frozen=True)
class ServeCommand:
    """Serve a policy over a WebSocket, for robots and simulators.

    Clients of openpi, RoboLab, IsaacLab-Arena, vLLM-Omni and NVIDIA's LIBERO can use it
    (docs/wire.md). Ctrl-C or SIGTERM finishes the running inference and stops. Under torchrun, on
    one machine or several, all processes are one engine, and rank 0 serves (docs/scaling.md).

    Anyone who reaches the port can move the robot, so it listens on this machine only unless you
    set a token.
    """

    replicas: int | None = option(None, *ENGINE_BACKENDS)
    """For native and distributed: processes (groups of ranks) that infer side by side, each with
    the weights; the default is 1. One that dies or hangs is replaced, and all connections stay.
    With 0, native infers in the server's own process.
    """
    ray: bool = False
    """Serve a fleet on Ray Serve: --replicas of the policy on this machine or a cluster, which may
    grow to --max-replicas, at one address; see docs/fleet.md.
    """
    address: str | None = None
    """With --ray: a running Ray cluster, HOST:PORT, or auto for that of RAY_ADDRESS, else one on
    this machine. By default Ray runs on this machine while the fleet does.
    """
    max_replicas: int | None = None
    """With --ray: the most replicas; Ray Serve adds and removes them as requests come. Default:
    always --replicas.
    """
    ingresses: int = 2
    """With --ray: processes that hold the clients' connections, --max-clients each."""
    max_queued: int = 64
    """With --ray: requests of each of these that wait for a replica; a further one is refused."""
    stalled_after: float = 600.0
    """For native and distributed: seconds without progress after which such a process is
    replaced.
    """
    trajectory: Path | None = option(None, "replay")
    """For replay: a DROID episode (.json) or the recording of a rollout (rollout --npz)."""
    embodiment: str = "droid"
    """Name of the embodiment."""
    host: str = "127.0.0.1"
    """Interface. Any but this machine's own wants a token."""
    port: int = 8000
    """Port; 0 takes a free one and prints it."""
    token_file: Path | None = None
    """File with the tokens that clients must show: one per line, with or without the client's
    name before it, not readable by other users. After both may stand realtime: that
    client's requests go before all others. Without a file, the token is the environment's
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
    max_per_address: int | None = None
    """Connections at a time of one address; None is no limit, since machines behind a proxy share
    one.
    """
    max_batch: int = 8
    """Requests that are inferred for together, at most, of those that wait."""
    max_queue_age: float = 30.0
    """Seconds that a request may wait for other clients' inferences; one that waited longer is
    refused.
    """
    grace: float = 30.0
    """Seconds that a shutdown waits for the running inference."""
    http: str | None = None
    """HTTP dialect that is answered too, on the same port: libero (NVIDIA's, /predict). With
    --embodiment libero that is so anyway. The checkpoint must have the libero domain.
    """
    seed: int = 0
    """Noise seed for clients that send none."""
    verify: bool = option(False, "native", "distributed", "diffusers")
    """Read every byte of the checkpoint for its SHA-256, which clients are told,
    whatever is remembered of files of the same size, inode and times.
    """
    verbose: bool = False
    """Log connections too, not only what goes wrong."""
    policy: ServedOptions = section(ServedOptions)
    token: str | None = from_environment("STRANDS_COSMOS3_TOKEN")

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs."""
        return ("serve", *OF_BACKEND.get(self._backend, ()), *("scale",) * self.ray)

    def run(self) -> int:
        """Serve until stopped; return 0."""
        if not self.ray:
            require_owned(self, "serve", _OF_FLEETS)
        elif told("RANK"):
            raise ConfigError("--ray starts its own processes; leave torchrun out.")
        if told("RANK"):
            self._backends()  # the process ends in it
        # the first line of standard output is the address
        with WaitNotice(Console(stderr=True)) as wait:
            return (self._serve_fleet if self.ray else self._serve)(Console(), wait)

    def _serve(self, console: Console, wait: WaitNotice) -> int:
        wait.begin(f"loading policy {self._backend} for {self.embodiment}")
        with needed_by("serve"):
            from strands_cosmos3.serving.served import ServedPolicy
            from strands_cosmos3.serving.server import PolicyServer, ServerConfig
            from strands_cosmos3.serving.server_config import Tokens
        seed_number(self.seed, "--seed")
        tokens = None if self.token_file is None else Tokens.read(self.token_file)
        config = ServerConfig(
            self.host,
            self.port,
            self.token if tokens is None else tokens.by_client,
            self.grace,
            self.max_clients,
            queue_s=self.max_queue_age,
            max_batch=self.max_batch,
            max_per_address=self.max_per_address,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            realtime=() if tokens is None else tokens.realtime,
        )
        name = self._backend
        backends = self._backends()
        self._log()
        try:
            policies = [
                ServedPolicy(
                    backend,
                    self.embodiment,
                    self.policy.action_space,
                    self.seed,
                    warm_up_message=_warm_up_message(backend),
                    http=self.http,
                    on_event=self.policy.on_event,
                )
                for backend in backends
            ]
            server = PolicyServer(policies, config)
            wait.begin("waiting for the first answer")

            def show_address(server: PolicyServer) -> None:
                wait.end()
                banner = self._banner(name, server.port, policies[0].dialect)
                console.print(banner, highlight=False, soft_wrap=True)

            server.run(ready=show_address)
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

    def _log(self) -> None:
        logging.basicConfig(
            level=logging.INFO if self.verbose else logging.WARNING,
            format="%(asctime)s %(levelname)s %(message)s",
        )

    def _serve_fleet(self, console: Console, wait: WaitNotice) -> int:
        wait.begin("reading the checkpoint")
        if self.trajectory is not None:
            raise ConfigError("--trajectory is replayed by one server; leave --ray out.")
        try:
            with needed_by("serve"):
                from strands_cosmos3.serving.ray_app import FleetSettings
        except ModuleNotFoundError as error:  # Ray is there, without what Ray Serve needs
            raise MissingDependencyError(
                f"serve --ray needs {error.name}, which is not installed: {pip_command(['scale'])}"
            ) from None
        same = {part.name for part in fields(FleetSettings)} & {part.name for part in fields(self)}
        values = {name: getattr(self, name) for name in same}
        values["replicas"] = 1 if self.replicas is None else self.replicas
        if self.token_file is not None:
            values["token_file"] = str(self.token_file.resolve())
        settings = FleetSettings(**values)
        settings.server_config(
            host=self.host, port=self.port, tls_cert=self.tls_cert, tls_key=self.tls_key
        ).tls()
        self._log()
        http = http_options(self.host, self.port, self.tls_cert, self.tls_key)
        return serve_fleet(settings, self.address, http, console, wait)

    @property
    def _backend(self) -> str:
        default = "native" if self.trajectory is None else "replay"
        return self.policy.backend_with(self.policy.model, default)

    def _backends(self) -> Sequence[Backend]:
        """Return one backend for each replica."""
        from strands_cosmos3.backends import make_backend
        from strands_cosmos3.parallel.group import RankTimeouts

        policy = self.policy
        name = self._backend
        if policy.model is not None and self.trajectory is not None:
            raise ConfigError("--model and --trajectory are mutually exclusive.")
        if name == "replay" and "pose_abs" not in get_embodiment(self.embodiment).spaces:
            raise ConfigError(
                f"--embodiment {self.embodiment}: a recording is sent as poses, which only droid "
                "has on the wire; leave it out."
            )
        require_heeded(name, self, flags=True)
        model = self.trajectory or policy.model
        if model is None and name in SAMPLER_BACKENDS:
            model = embedded_checkpoint(self.embodiment)
        if self.verify and name in MODEL_BACKENDS:
            with needed_by("serve"):
                from strands_cosmos3.engine.checkpoint import Checkpoint, locate
            Checkpoint.open(locate(str(model)), action_space=policy.action_space).read_anew()
        lowest = int(name == "distributed")
        count = 1 if self.replicas is None else self.replicas
        processes = told("WORLD_SIZE", 1)
        count = whole_number(count, "--replicas", lowest, 64 if processes == 1 else 1)
        if processes > 1:
            policy.parallel.check_world(processes)
        if processes > 1 or not count or name not in ENGINE_BACKENDS or model is None:
            return [make_backend(name, model, policy.for_backend, policy.action_space)]
        timeouts = RankTimeouts(stalled_s=positive(self.stalled_after, "--stalled-after"))
        with needed_by("serve"):
            from strands_cosmos3.backends.distributed import replicas
        return replicas(count, model, policy.for_backend, policy.action_space, timeouts, name)

    def _banner(self, name: str, port: int, dialect: HttpDialect | None) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "ws" if self.tls_cert is None else "wss"
        address = f"{scheme}://{host}:{port}"
        also = "" if dialect is None else f"{dialect.paths[0]}, "
        return (
            f"serving {name} for {self.embodiment} on {address} (also {also}/healthz, /readyz and "
            "/metrics); Ctrl-C stops"
        )


def _warm_up_message(backend: Any) -> dict[str, Any] | None:
    """A replay can only be asked from where it starts."""
    from strands_cosmos3.actions.rotations import matrix_to_quaternion
    from strands_cosmos3.backends.replay import ReplayBackend
    from strands_cosmos3.serving import wire

    if not isinstance(backend, ReplayBackend):
        return None
    if backend.recording.embodiment is not None:
        raise ConfigError(
            "a dataset's episodes are replayed by rollout, not served; give a file (.json or .npz)."
        )
    (recording,) = backend.recording.by_limb.values()
    T = recording.T_base_cosmos[0]
    return {
        wire.POSITION: T[:3, 3],
        wire.QUATERNION: matrix_to_quaternion(T[:3, :3]),
        wire.JOINTS: recording.q_start_rad,
        wire.GRIPPER: 0.0,
    }
