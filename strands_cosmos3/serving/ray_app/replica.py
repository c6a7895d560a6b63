"""A replica of the served policy: the deployment that infers. It knows no client, and keeps
nothing of a session between two requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strands_cosmos3.backends.base import BackendInfo
from strands_cosmos3.errors import BackendError
from strands_cosmos3.serving.admission import Client
from strands_cosmos3.serving.inference_queue import InferenceQueue
from strands_cosmos3.serving.metrics import Metrics
from strands_cosmos3.serving.ray_app.settings import FleetSettings
from strands_cosmos3.serving.served import Answer, Message, Session

_SICK_AFTER = 3
"""Failed inferences in a row, after which a replica is replaced."""


@dataclass(frozen=True)
class ReplicaModel:
    """What a replica serves: its backend's properties, the checkpoint's digest, and the action
    space that clients are told.
    """

    info: BackendInfo
    model_sha256: str | None
    action_space: str


@dataclass(frozen=True, eq=False)
class RemoteRequest:
    """A request as it travels to a replica.

    Args:
        frame: As of a :class:`~strands_cosmos3.serving.served.Message`.
        session: Its session, with the episode that it belongs to; times count from now.
        client: Who asks.
        wait_s: Time for which the client waits.
        action_space: What the client was told.
        known_sha256: Digest of the model that the sender knows of.
    """

    frame: bytes | str | Mapping[str, Any]
    session: Session
    client: Client
    wait_s: float
    action_space: str
    known_sha256: str | None


@dataclass(frozen=True, eq=False)
class RemoteAnswer:
    """An answer, the session after it, and what the replica serves if the sender did not know."""

    answer: Answer
    session: Session
    served: ReplicaModel | None


class PolicyReplica:
    """Ray Serve's replica of the policy. It is ready when it has inferred once.

    Raises:
        Cosmos3Error: The backend cannot be made or served, or does not warm up.
    """

    def __init__(self, settings: FleetSettings):
        self._settings = settings
        self._backend = settings.make_backend()
        self._policy = policy = settings.served(self._backend)
        space = policy.about["action_space"]
        self._served = ReplicaModel(self._backend.info, self._backend.model_sha256, space)
        config = settings.server_config()
        self._queue = InferenceQueue([policy], Metrics(), config.max_batch, config.queue_s)
        (warm,) = self._queue.started
        warm.result()

    async def served(self) -> ReplicaModel:
        """Return what is served."""
        return self._served

    async def answer(self, request: RemoteRequest) -> RemoteAnswer:
        """Answer a request; if the caller cancels it while it is queued, it is not inferred for."""
        served = None if request.known_sha256 == self._served.model_sha256 else self._served
        if request.action_space != self._served.action_space:
            text = f"the checkpoint was replaced; it has {self._served.action_space} rows now"
            return RemoteAnswer(Answer(text, "moved"), request.session, served)
        session = request.session.moved(time.monotonic())
        message = Message(request.frame, session, time.monotonic())
        nobody_leaves = asyncio.get_running_loop().create_future()
        async with self._queue.answered(
            request.client, nobody_leaves, [message], request.wait_s
        ) as answers:
            assert answers is not None
            (answer,) = answers
        return RemoteAnswer(answer, session.moved(-time.monotonic()), served)

    def check_health(self) -> None:
        """Raise if this replica is to be replaced: it is stuck, or fails again and again."""
        (busy_s,) = self._queue.busy_s()
        if busy_s > self._settings.stalled_after:
            raise BackendError(f"an inference has taken {busy_s:.0f} s.")
        if self._policy.failures >= _SICK_AFTER:
            raise BackendError(f"the last {self._policy.failures} inferences failed.")

    def __del__(self) -> None:
        """End the ranks; Ray Serve calls this when the last inference is done."""
        if hasattr(self, "_backend"):
            self._backend.close()
