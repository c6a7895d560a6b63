"""Requests that wait for a policy's inferences: turns, deadlines, and what is refused."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from strands_cosmos3.serving.admission import Client
from strands_cosmos3.serving.metrics import Metrics
from strands_cosmos3.serving.served import Answer, Message, ReadMessage, ServedPolicy
from strands_cosmos3.serving.worker import Workers

SOONEST_S = 0.01
"""After which a refused client may ask again."""


class InferenceQueue:
    """The queue before a policy, or before replicas of it with a backend each, which answer
    requests at the same time on threads of their own.

    A message is read, and its pictures are composed, from its arrival on, in the order of turns,
    by as many further threads. It keeps its place among those that wait for an inference meanwhile;
    whoever infers for it waits for the rest.

    Args:
        policies: The policies; each warms up at once.
        metrics: Counts requests.
        max_batch: Maximum number of waiting requests that share one inference.
        queue_s: Requests that have waited longer are refused without an inference.

    Attributes:
        started: The outcomes of warming up.
    """

    def __init__(
        self,
        policies: Sequence[ServedPolicy],
        metrics: Metrics,
        max_batch: int,
        queue_s: float,
    ):
        self._metrics = metrics
        self._queue_s = queue_s
        self._workers: Workers[ServedPolicy, Message, Answer] = Workers(
            policies,
            ServedPolicy.warm_up,
            self._answers,
            max_batch,
            lambda answer: answer.outcome == "ok",
        )
        self._readers: Workers[ServedPolicy, Message, ReadMessage] = Workers(
            policies,
            lambda policy: None,
            lambda policy, messages: [policy.read(message) for message in messages],
            most=1,
            name="reading",
        )
        self.started = self._workers.started

    def busy_s(self) -> list[float]:
        """Return the age of each policy's running inference; 0 if there is none."""
        now = time.monotonic()
        return [0.0 if since is None else now - since for since in self._workers.busy_since]

    def close(self, timeout_s: float) -> None:
        """End the threads after the queued requests; wait for at most ``timeout_s``."""
        self._workers.close(timeout_s)
        self._readers.close(timeout_s)

    def _answers(self, policy: ServedPolicy, messages: list[Message]) -> list[Answer]:
        """The answers to messages that are inferred for together; those that waited too long are
        refused. On a worker.
        """
        now = time.monotonic()
        limit_s = self._queue_s
        timely = [message for message in messages if now - message.arrived_s <= limit_s]
        inferred = dict(zip(timely, policy.answer(timely), strict=True))
        return [
            replace(
                inferred.get(message) or _late(now - message.arrived_s, limit_s),
                waited_s=now - message.arrived_s,
            )
            for message in messages
        ]

    @asynccontextmanager
    async def answered(
        self,
        client: Client,
        left: asyncio.Future[Any],
        messages: Sequence[Message],
        wait_s: float,
    ) -> AsyncGenerator[list[Answer] | None]:
        """Provide the answers to a client's messages; None if it leaves first, and what is still
        queued is dropped. Until they are sent, or inferred for, the messages count as in flight.

        What would not be answered in the time that the client waits is refused: at once, and when
        that has passed before its turn.
        """
        until_s = messages[0].arrived_s + wait_s
        refusal = self._refusal(client, len(messages), until_s)
        loop = asyncio.get_running_loop()

        def landed(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed: an inference outlived the server
                loop.call_soon_threadsafe(self._end_flight)

        jobs = [] if refusal else [self._submit(client, message) for message in messages]
        self._metrics.in_flight += len(jobs)
        try:
            answers = await asyncio.gather(*(_unless_left(left, job, until_s) for job in jobs))
            answers = answers or [refusal] * len(messages)
            if not left.done():  # those without an answer have expired
                now_s = time.monotonic()
                answers = [answer or self._refusal(client, 1, now_s) for answer in answers]
            for answer in answers:
                self._metrics.count(client.priority, answer)
            whole = [answer for answer in answers if answer is not None]
            yield whole if len(whole) == len(answers) else None
        finally:
            for job in jobs:
                job.add_done_callback(landed)

    def _submit(self, client: Client, message: Message) -> Future[Answer]:
        """Have a message read and answered; if the answer is cancelled, it is not read either."""
        reading = self._readers.submit(client, message)
        job = self._workers.submit(client, replace(message, reading=reading))
        job.add_done_callback(lambda _: reading.cancel())
        return job

    def _refusal(self, client: Client, count: int, until_s: float) -> Answer | None:
        """The refusal of so many messages of a client, which does not wait longer than until a time
        on the monotonic clock; None if they may be answered by then.
        """
        if until_s == math.inf:
            return None
        left_s = max(0.0, until_s - time.monotonic())
        expected_s = self._workers.expected_s(client, count)
        if expected_s < left_s:
            return None
        text = (
            f"ServiceBusyError: an answer takes about {expected_s:.2f} s now, and the request can "
            f"wait for {left_s:.2f} s."
        )
        return Answer(text, "refused", retry_after_s=max(expected_s - left_s, SOONEST_S))

    def _end_flight(self) -> None:
        self._metrics.in_flight -= 1


async def _unless_left(
    left: asyncio.Future[Any], job: Future[Answer], until_s: float
) -> Answer | None:
    """Return a job's answer, or None if the client leaves first, or the job still waits at a time
    on the monotonic clock; a queued job is then dropped.
    """
    answered = asyncio.wrap_future(job)
    first = partial(asyncio.wait, {left, answered}, return_when=asyncio.FIRST_COMPLETED)
    try:
        done, _ = await first(timeout=until_s - time.monotonic())
        if not done and not job.cancel():
            await first()
        return answered.result() if answered.done() else None
    finally:
        answered.cancel()  # a job that runs goes on


def _late(waited_s: float, limit_s: float) -> Answer:
    return Answer(
        f"BackendError: the request waited {waited_s:.1f} s for other clients' inferences; at most "
        f"{limit_s:g} s are useful.",
        "late",
    )
