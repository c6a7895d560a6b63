"""Both deployments of a fleet, built from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import ray
import ray.serve
from ray.serve import Application

from strands_cosmos3.serving.ray_app.ingress import HEALTH_S, Ingress
from strands_cosmos3.serving.ray_app.replica import PolicyReplica
from strands_cosmos3.serving.ray_app.settings import FleetSettings

_serve: Any = cast("Any", ray.serve)
_RESERVE = 64  # pages and handshakes that an ingress answers beside its sockets
_DRAIN_S = 10.0  # for an ingress to notice that it is to end
_STARTS = 3
_INGRESS_CPUS = 0.1  # without any, Ray spreads them at random instead of in turn


def build(arguments: Mapping[str, Any]) -> Application:
    """Build the application from the arguments that a config file gives by name.

    Raises:
        ConfigError, InputError: As :class:`~strands_cosmos3.serving.ray_app.FleetSettings`.
    """
    return application(FleetSettings.of(arguments))


def application(settings: FleetSettings) -> Application:
    """Build the application; it runs on GPUs if the cluster has some, and the device is not given.

    A replica of several ranks is one bundle of a placement group, so that all are on one machine.
    """
    settings.server_config()  # raises here what an ingress would
    policy = _serve.deployment(PolicyReplica).options(
        name="Policy",
        max_ongoing_requests=2 * settings.max_batch,
        max_queued_requests=settings.max_queued,
        graceful_shutdown_timeout_s=settings.grace,
        max_surge_percent=settings.max_surge_percent,
        max_constructor_retry_count=_STARTS,
        **_count(settings),
        **_resources(settings),
    )
    ingress = _serve.deployment(_serve.ingress()(Ingress)).options(
        name="Ingress",
        num_replicas=settings.ingresses,
        max_ongoing_requests=settings.max_clients + _RESERVE,
        graceful_shutdown_timeout_s=settings.grace + _DRAIN_S,
        health_check_period_s=HEALTH_S,
        max_surge_percent=100,  # sockets that are closed find another ingress at once
        max_constructor_retry_count=_STARTS,
        ray_actor_options={"num_cpus": _INGRESS_CPUS},
    )
    return ingress.bind(settings, policy.bind(settings))


def _count(settings: FleetSettings) -> dict[str, Any]:
    """How many replicas of the policy there are."""
    if settings.max_replicas in (None, settings.replicas):
        return {"num_replicas": settings.replicas}
    bounds = {"min_replicas": settings.replicas, "max_replicas": settings.max_replicas}
    target = max(1, settings.max_batch // 2)
    return {"autoscaling_config": {**bounds, "target_ongoing_requests": target}}


def _resources(settings: FleetSettings) -> dict[str, Any]:
    """What a replica of the policy takes of its machine."""
    ranks = settings.policy.parallel.ranks
    gpus = ranks if on_gpus(settings) else 0
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": ranks, "num_gpus": gpus}}
    if ranks > 1:
        bundle = {"CPU": ranks, "GPU": gpus} if gpus else {"CPU": ranks}
        options |= {"placement_group_bundles": [bundle], "placement_group_strategy": "STRICT_PACK"}
    return options


def on_gpus(settings: FleetSettings) -> bool:
    """Return whether a rank takes a GPU: as the device says, else if the cluster has some."""
    device = settings.policy.engine.device
    if device is None:
        return cast("Any", ray).cluster_resources().get("GPU", 0) > 0
    return str(device).startswith("cuda")
