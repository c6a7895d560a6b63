"""Requests that replicas of the policy answer, wherever they run, and what becomes of those that no
replica takes or that are lost with one.

A request is sent once. Ray repeats none of it: a replica that dies in an inference may have
finished it.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from ray.serve.exceptions import BackPressureError

from strands_cosmos3.errors import InputError
from strands_cosmos3.fleet.cluster import WORKER_FAILURES
from strands_cosmos3.serving.admission import Client
from strands_cosmos3.serving.codec import Limits, peek
from strands_cosmos3.serving.inference_queue import SOONEST_S
from strands_cosmos3.serving.metrics import Metrics
from strands_cosmos3.serving.ray_app.replica import RemoteAnswer, RemoteRequest, ReplicaModel
from strands_cosmos3.serving.served import Answer, Message
from strands_cosmos3.serving.wire import REQUEST_ID, SESSION, session_of

_RECENT = 16  # answers whose times tell when to ask again
_LATE = "ServiceBusyError: no replica answered in time."
_FULL = "ServiceBusyError: as many requests wait for a replica as may; ask again."
_LOST = (
    "ServiceBusyError: the replica that had this request is gone, and none answers it; ask again."
)


class RemoteReplicas:
    """Has replicas of the policy answer; a server's front asks it as its queue.

    Args:
        ask: Sends a request to a replica, and returns Ray Serve's response to await or cancel.
        served: What the replicas serve.
        metrics: Counts requests.
        limits: Size limits of messages.
        wait_s: Longest time that any request waits for its answer.
        changed: Told when a replica serves another model.
    """

    def __init__(
        self,
        ask: Callable[[RemoteRequest], Any],
        served: ReplicaModel,
        metrics: Metrics,
        limits: Limits,
        wait_s: float,
        changed: Callable[[ReplicaModel], None],
    ):
        self._ask = ask
        self._served = served
        self._metrics = metrics
        self._limits = limits
        self._wait_s = wait_s
        self._changed = changed
        self._took_s = deque[float](maxlen=_RECENT)
        self._given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def give_up(self) -> None:
        """Refuse all requests that no replica has answered yet."""
        self._given_up.set_result(None)
        self._given_up = asyncio.get_running_loop().create_future()

    def busy_s(self) -> Sequence[float]:
        """Return nothing: how long an inference takes is a replica's own health."""
        return ()

    @asynccontextmanager
    async def answered(
        self,
        client: Client,
        left: asyncio.Future[Any],
        messages: Sequence[Message],
        wait_s: float,
    ) -> AsyncGenerator[list[Answer] | None]:
        """Provide the answers to a client's messages; None if it leaves first, and what is still
        queued is dropped. What no replica takes, or is lost, is refused.
        """
        self._metrics.in_flight += len(messages)
        try:
            answers = await asyncio.gather(
                *(self._answer(client, left, message, wait_s) for message in messages)
            )
            for answer in answers:
                self._metrics.count(client.priority, answer)
            whole = [answer for answer in answers if answer is not None]
            yield whole if len(whole) == len(answers) else None
        finally:
            self._metrics.in_flight -= len(messages)

    async def _answer(
        self, client: Client, left: asyncio.Future[Any], message: Message, wait_s: float
    ) -> Answer | None:
        session = message.session.sent(self._session_name(message.frame))
        served = self._served
        response = self._ask(
            RemoteRequest(
                message.frame, session, client, wait_s, served.action_space, served.model_sha256
            )
        )
        reply = asyncio.ensure_future(_awaited(response))
        limit_s = min(wait_s, self._wait_s)
        try:
            done, _ = await asyncio.wait(
                {left, reply, self._given_up},
                timeout=limit_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if reply not in done:
                response.cancel()
                if left in done:
                    return None
                outcome, why = ("lost", _LOST) if done else ("refused", _LATE)
                return self._refused(message, wait_s, outcome, why)
            return self._taken(message, reply.result())
        except BackPressureError:
            return self._refused(message, wait_s, "refused", _FULL)
        except WORKER_FAILURES:
            return self._refused(message, wait_s, "lost", _LOST)
        finally:
            reply.cancel()

    def _taken(self, message: Message, reply: RemoteAnswer) -> Answer:
        """The answer in a replica's reply."""
        message.session.returned(reply.session)
        if reply.served is not None:
            self._served = reply.served
            self._changed(reply.served)
        if reply.answer.outcome == "ok":
            self._took_s.append(time.monotonic() - message.arrived_s)
        return reply.answer

    def _refused(self, message: Message, wait_s: float, outcome: str, why: str) -> Answer:
        """The refusal of a request, in words that its client knows."""
        answer = Answer(why, outcome)
        if wait_s < math.inf or self._knows_refusals(message.frame):
            again_s = statistics.median(self._took_s) if self._took_s else SOONEST_S
            return replace(answer, retry_after_s=max(again_s, SOONEST_S))
        return replace(answer, outcome="late" if outcome == "refused" else "error")

    def _knows_refusals(self, frame: bytes | str | Mapping[str, Any]) -> bool:
        """Whether a request is of HTTP, or of a client that uses our keys."""
        return isinstance(frame, Mapping) or self._peek(frame, REQUEST_ID) is not None

    def _session_name(self, frame: bytes | str | Mapping[str, Any]) -> str:
        if isinstance(frame, Mapping):
            return ""
        try:
            return session_of({SESSION: self._peek(frame, SESSION)})
        except InputError:  # the replica's answer says why
            return ""

    def _peek(self, frame: bytes | str, key: str) -> Any:
        try:
            return None if isinstance(frame, str) else peek(frame, key, self._limits)
        except InputError:
            return None


async def _awaited(response: Any) -> Any:
    return await response
