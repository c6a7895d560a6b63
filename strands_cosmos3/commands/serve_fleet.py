"""``serve --ray``: a fleet of replicas on Ray Serve, until Ctrl-C."""

from __future__ import annotations

import logging
import signal
import socket
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from rich.console import Console

from strands_cosmos3.commands.progress import WaitNotice, terminated_as_interrupted
from strands_cosmos3.errors import BackendError, Cosmos3Error
from strands_cosmos3.extras import needed_by
from strands_cosmos3.options import MODEL_BACKENDS

if TYPE_CHECKING:
    from strands_cosmos3.serving.ray_app.settings import FleetSettings

_RENEW = signal.SIGHUP


def serve_fleet(
    settings: FleetSettings,
    address: str | None,
    http: dict[str, Any],
    console: Console,
    wait: WaitNotice,
) -> int:
    """Serve until SIGINT or SIGTERM; return 0. SIGHUP replaces the replicas, one after the other,
    by such that read the checkpoint anew.

    Args:
        settings: The fleet.
        address: A running cluster of Ray, or None for Ray on this machine.
        http: Ray Serve's options of HTTP.
        console: Where the address is printed.
        wait: Says what is waited for.

    Raises:
        Cosmos3Error: The fleet cannot be served so, or does not start.
    """
    _check_model(settings)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it tells how it deploys
    with needed_by("serve --ray"):
        from strands_cosmos3.serving.ray_app.run import running_fleet
    wait.begin(f"starting {_size(settings)} on Ray")
    with terminated_as_interrupted(), running_fleet(settings, address, http) as renew:
        asked = SimpleQueue[int]()
        for number in (signal.SIGINT, signal.SIGTERM, _RENEW):
            signal.signal(number, lambda number, _: asked.put(number))
        wait.end()
        scheme = "wss" if "ssl_certfile" in http else "ws"
        console.print(
            f"serving {settings.backend} for {settings.embodiment} on "
            f"{scheme}://{http['host']}:{http['port']} with {_size(settings)}; Ctrl-C stops, "
            "SIGHUP reads the checkpoint anew",
            highlight=False,
            soft_wrap=True,
        )
        while asked.get() == _RENEW:
            try:
                _check_model(settings)
            except Cosmos3Error as error:
                console.print(f"the replicas stay as they are: {error}", markup=False)
                continue
            try:
                renew()
                console.print("all replicas were replaced")
            except BackendError as error:
                console.print(f"not all replicas were replaced: {error}", markup=False)
        wait.begin("closing connections")
    console.print("stopped")
    return 0


def http_options(host: str, port: int, cert: Path | None, key: Path | None) -> dict[str, Any]:
    """Return Ray Serve's options of HTTP; port 0 becomes a free one."""
    files = {"ssl_certfile": cert, "ssl_keyfile": key}
    tls = {name: str(path.resolve()) for name, path in files.items() if path is not None}
    if not port:
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
    return {"host": host, "port": port, **tls}


def _check_model(settings: FleetSettings) -> None:
    """Raise now what every replica would raise."""
    if settings.backend in MODEL_BACKENDS and settings.model is not None:
        with needed_by("serve"):
            from strands_cosmos3.engine.checkpoint import Checkpoint, locate
        space = settings.policy.action_space
        checkpoint = Checkpoint.open(locate(settings.model), action_space=space)
        settings.policy.parallel.check_transformer(checkpoint.config)


def _size(settings: FleetSettings) -> str:
    most = settings.max_replicas
    count = str(settings.replicas) if most is None else f"{settings.replicas} to {most}"
    ranks = settings.policy.parallel.ranks
    of_ranks = f" of {ranks} ranks" if ranks > 1 else ""
    return f"{count} replica{'s' * (count != '1')}{of_ranks}"
