"""The deployment that holds the clients' sockets: sessions, tokens, limits and HTTP, and a call of
a replica for each inference.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, cast

import ray.serve
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette

from strands_cosmos3.backends.base import Backend
from strands_cosmos3.errors import BackendError
from strands_cosmos3.fleet.cluster import WORKER_FAILURES
from strands_cosmos3.serving.front import Front
from strands_cosmos3.serving.metrics import Metrics
from strands_cosmos3.serving.places import Places
from strands_cosmos3.serving.ray_app.asgi import FrontApp
from strands_cosmos3.serving.ray_app.remote import RemoteReplicas
from strands_cosmos3.serving.ray_app.replica import ReplicaModel
from strands_cosmos3.serving.ray_app.settings import FleetSettings
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.types import ActionChunk, Request

_serve: Any = cast("Any", ray.serve)
HEALTH_S = 1.0
"""Interval at which Ray Serve asks after an ingress' health."""
_FORGOTTEN_S = 3.0
"""Ray Serve gives a replica no notice of its end, but asks after its health no longer."""


class DescribedBackend(Backend):
    """What a replica's backend says of itself, where it does not run."""

    def __init__(self, served: ReplicaModel):
        self.info = served.info
        self._model_sha256 = served.model_sha256

    @property
    def model_sha256(self) -> str | None:
        return self._model_sha256

    def infer(self, request: Request) -> ActionChunk:
        """Raise BackendError: a replica infers."""
        raise BackendError("an ingress does not infer.")


class Ingress:
    """Ray Serve's replica of the ingress, ready when a replica of the policy is."""

    async def __init__(self, settings: FleetSettings, policy: Any):
        self._settings = settings
        served: ReplicaModel = await policy.served.remote()
        described = self._described(served)
        config = settings.server_config()
        metrics = Metrics(described.about)
        wait_s = settings.max_queue_age + settings.stalled_after
        self._replicas = replicas = RemoteReplicas(
            policy.answer.remote, served, metrics, described.limits, wait_s, self._changed
        )
        self._front = Front(
            described, config, metrics, Places(config, metrics), replicas, asyncio.Event()
        )
        self._app = FrontApp(self._front)
        self._asked_s = time.monotonic()
        self._watching = asyncio.create_task(self._end_when_forgotten())

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application; Ray Serve calls this when the ingress is made."""
        return self._app.asgi

    async def check_health(self) -> None:
        """Note that Ray Serve still asks, or asks again."""
        self._asked_s = time.monotonic()
        self._front.stopping.clear()

    def _described(self, served: ReplicaModel) -> ServedPolicy:
        return self._settings.served(DescribedBackend(served))

    def _changed(self, served: ReplicaModel) -> None:
        """Tell clients that connect from now on of another model."""
        self._front.policy = described = self._described(served)
        self._front.metrics.about = described.about

    async def _end_when_forgotten(self) -> None:
        """Close all sockets once Ray Serve, while it answers, does not ask after this ingress any
        more: it waits for the sockets to be closed, and would cut them off in the end. Requests
        that replicas have not answered in the time that these have to end are refused.
        """
        while True:
            await asyncio.sleep(HEALTH_S)
            began_s = time.monotonic()
            if began_s - self._asked_s < _FORGOTTEN_S:
                continue
            if began_s - self._asked_s > _FORGOTTEN_S + self._settings.grace:
                self._replicas.give_up()
            with suppress(RayServeException, *WORKER_FAILURES):
                # waits while the controller itself is being replaced, and all goes on as before
                await asyncio.to_thread(_serve.status)
                await asyncio.sleep(HEALTH_S)
                if self._asked_s < began_s:
                    self._app.end_sockets()
