"""A fleet on Ray of this machine or on a cluster, for as long as a command runs."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import ray
import ray.serve
from ray.exceptions import RayError
from ray.serve.schema import LoggingConfig

from strands_cosmos3.errors import BackendError, ConfigError
from strands_cosmos3.fleet.cluster import cluster, joinable
from strands_cosmos3.serving.ray_app.app import application, on_gpus
from strands_cosmos3.serving.ray_app.settings import FleetSettings
from strands_cosmos3.serving.wire import short

_ray: Any = cast("Any", ray)
serve: Any = cast("Any", ray.serve)
NAME = "strands-cosmos3"
"""Of the application."""


@contextmanager
def running_fleet(
    settings: FleetSettings, address: str | None, http: dict[str, Any]
) -> Generator[Callable[[], None]]:
    """Run a fleet, and end what was started for it; the value is what deploys it again.

    Args:
        settings: The fleet.
        address: A running cluster of Ray, or None for Ray on this machine.
        http: Ray Serve's options of HTTP: host and port, maybe TLS.

    Raises:
        ConfigError: The port is taken, the cluster has no room, or it runs a fleet already.
        BackendError: The fleet does not start.
        EvaluationError: Ray does not start, or cannot be joined.
    """
    address = joinable(address)
    most = settings.max_replicas or settings.replicas
    cpus = 2 * most * settings.policy.parallel.ranks  # old and new ones during an update
    cpus += settings.ingresses
    if address is None:
        _require_free(http["host"], http["port"])
    with cluster(address, cpus):
        _require_room(settings)
        before = serve.status()
        if NAME in before.applications:
            raise ConfigError(
                f"a fleet runs at {address} already; end it, or update it with a config file "
                "(docs/fleet.md)."
            )
        quiet = LoggingConfig(log_level="ERROR")
        try:
            if not before.proxies:
                where = "HeadOnly" if address is None else "EveryNode"
                _start(proxy_location=where, http_options=http, logging_config=quiet)
            if address is None and not on_gpus(settings):
                settings = replace(settings, max_surge_percent=100)
            deploy(settings)
            yield partial(deploy, settings)
        finally:
            with suppress(TimeoutError):  # Ray Serve goes on with it
                serve.delete(NAME)  # while proxies are there to pass the close frames on
            if not before.proxies:
                serve.shutdown()


def deploy(settings: FleetSettings) -> None:
    """Start the fleet, or replace its replicas, one after the other; return when all are ready.

    Raises:
        BackendError: They do not start.
    """
    try:
        serve.run(application(settings), name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise BackendError(f"the fleet does not start: {_reason() or error}") from None


def _reason() -> str:
    """What a replica raised, of the traceback that Ray Serve keeps; empty if there is none."""
    fleet = serve.status().applications.get(NAME)
    texts = [] if fleet is None else [part.message for part in fleet.deployments.values()]
    raised = [
        re.findall(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception): .+)$", text, re.M) for text in texts
    ]
    return next((lines[-1] for lines in raised if lines), "")


def _start(**options: Any) -> None:
    try:
        serve.start(**options)
    except (RayError, TimeoutError) as error:
        raise BackendError(f"Ray Serve does not start: {short(error)}") from None


def _require_free(host: str, port: int) -> None:
    """Raise ConfigError if another program has the port: Ray Serve would wait for it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        problem = "is in use; choose another --port" if taken else f"cannot be used: {error}"
        raise ConfigError(f"{host}:{port} {problem}.") from None


def _require_room(settings: FleetSettings) -> None:
    """Raise ConfigError if the replicas cannot all be placed, which Ray would wait for."""
    ranks = settings.policy.parallel.ranks
    kind = "GPU" if on_gpus(settings) else "CPU"
    nodes = [node["Resources"].get(kind, 0) for node in _ray.nodes() if node["Alive"]]
    room = sum(int(units // ranks) for units in nodes)
    if room < settings.replicas:
        raise ConfigError(
            f"{settings.replicas} replicas of {ranks} ({settings.policy.parallel}) want "
            f"{ranks} {kind}s of one machine each; the cluster's machines have "
            f"{', '.join(f'{units:.0f}' for units in nodes)}: room for {room}. Use fewer "
            "--replicas or smaller degrees."
        )
