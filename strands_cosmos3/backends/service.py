"""Inference on a policy server: ours, another one with openpi's protocol, or one of an HTTP
dialect.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.backends.options import ServiceOptions
from strands_cosmos3.errors import ConfigError, ServiceChunkError
from strands_cosmos3.options import changed_options
from strands_cosmos3.serving.client import ClientConfig, PolicyClient, ServiceClient
from strands_cosmos3.serving.dialects import HTTP_DIALECTS
from strands_cosmos3.serving.http_client import HttpPolicyClient, Post
from strands_cosmos3.serving.routes import HttpDialect
from strands_cosmos3.serving.wire import (
    SERVED_MODEL,
    Encoding,
    agreed_pictures,
    decode_reply,
    encode_request,
    encode_reset,
    get_dialect,
    require_reset_reply,
    stated_space,
)
from strands_cosmos3.types import ActionChunk, Request


class RemoteBackend(Backend):
    """A backend whose inference runs at the other end of a connection. After a request, its
    ``info`` has the digest that the server states of its model.
    """

    info = BackendInfo(name="service")
    answer_error = ServiceChunkError

    def __init__(self, client: ServiceClient):
        self._client = client

    def _wait_s(self, request: Request) -> float:
        """The time for which the answer is waited for."""
        return min(request.wait_s, self._client.config.deadline_s or math.inf)

    @property
    def counters(self) -> Mapping[str, int]:
        """The connection's events by name, including ``reconnects``, and those of its watch."""
        return Counter({**self._client.counters, **super().counters})

    def _answered_by(self, model: object) -> None:
        self.info = replace(self.info, model_sha256=model if isinstance(model, str) else None)

    def cancel(self) -> bool:
        """Break off an exchange under way in another thread."""
        self._client.cancel()
        return True

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class ServiceBackend(RemoteBackend):
    """Sends requests to a policy server. It connects on the first inference.

    Our own server states its action space, which is used unless another was asked for.
    ``joint_pos`` returns joint angles. ``midtrain`` and ``pose_abs`` send the measured pose, and
    the server returns the poses that it integrated from it: those chunks are ``pose_abs`` with that
    departure. Domains without ``pose_abs`` return rows in their own columns and need no robot. The
    simulator's state is never sent.

    Args:
        client: The connection.
        dialect: ``robolab`` (also ``openpi``), ``vllm-omni`` or ``roboarena``.
        requires_images: Whether the server wants pictures; model servers do.
        action_space: The server's action space; None is the one it states, else ``joint_pos`` if
            the embodiment has it.
        num_steps: Denoising steps that a vLLM-Omni server is asked for; None leaves them to it.

    Raises:
        UnknownNameError: No such dialect over a WebSocket; :class:`HttpServiceBackend` has those
            over HTTP.
    """

    def __init__(
        self,
        client: ServiceClient,
        dialect: str = "robolab",
        requires_images: bool = True,
        action_space: str | None = None,
        num_steps: int | None = None,
    ):
        super().__init__(client)
        self._num_steps = num_steps
        self._asked_space = action_space
        self._dialect = get_dialect(dialect)
        self.info = BackendInfo(
            name="service",
            sound=self._dialect.extensions,
            takes_views=True,
            requires_images=requires_images,
            preferred_space="joint_pos",  # that of the released policy servers
        )
        self._session = _new_session()
        self._calls = 0
        self._asked = False
        # the action space that the server of the last request states, and how it reads pictures
        self._agreed: tuple[str | None, Encoding | None] = (None, None)

    def infer(self, request: Request) -> ActionChunk:
        """Return the server's chunk.

        Raises:
            ServiceError: The server is unavailable, timed out, closed, unreadable, refused, or sent
                an unusable chunk.
            BackendError: The request lacks what its action space needs.
        """
        self._calls += 1
        number = self._calls
        agreed = self._agreed
        sent = self._as_served(request, agreed[0])
        first = self._message(sent, number)  # raises before anything is dialled

        def message(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
            nonlocal sent
            self._answered_by(metadata.get(SERVED_MODEL))
            space = stated_space(metadata) if self._asked_space is None else None
            self._agreed = space, agreed_pictures(metadata)
            sent = self._as_served(request, space)
            return first if self._agreed == agreed else self._message(sent, number)

        def read(reply: Any) -> ActionChunk:
            chunk = decode_reply(reply, sent, number)
            if isinstance(reply, Mapping) and SERVED_MODEL in reply:  # a fleet may have replaced it
                self._answered_by(cast("Mapping[str, Any]", reply)[SERVED_MODEL])
            return chunk

        self._asked = True
        return self._client.exchange(message, read)

    def _message(self, request: Request, number: int) -> dict[str, Any]:
        return encode_request(
            request,
            self._dialect,
            self._session,
            number,
            self._num_steps,
            self._wait_s(request),
            self._agreed[1],
        )

    def _as_served(self, request: Request, space: str | None) -> Request:
        """The request in the action space that the server states."""
        spaces = request.embodiment.spaces
        if space is None or space == request.action_space.name or space not in spaces:
            return request
        return replace(request, action_space=spaces[space])

    def reset(self, seed: int | None = None) -> None:
        """Start another session, and tell a server whose dialect has a reset endpoint if it has had
        a request.

        Raises:
            ServiceError: The reset failed.
        """
        old = self._session
        self._session = _new_session()
        if self._dialect.endpoint and self._asked:
            self._asked = False
            self._client.exchange(encode_reset(old), require_reset_reply)


def _new_session() -> str:
    return uuid.uuid4().hex


def service_backend(
    service: ServiceOptions, action_space: str | None, num_steps: int | None
) -> RemoteBackend:
    """Return the backend of a policy server, by its dialect. Raises ConfigError if the options do
    not go together.
    """
    name = service.dialect or "robolab"
    http = HTTP_DIALECTS.get(name)
    dialect = get_dialect(name) if http is None else None
    if num_steps is not None and not (dialect and dialect.sampling):
        raise ConfigError(
            f"num_steps={num_steps}: of the dialects only vllm-omni has it, not {name}; leave it "
            "out."
        )
    if http is not None and service.pictures is not None:
        raise ConfigError(
            f"pictures={service.pictures!r}: dialect {name!r} sends PNG; leave it out."
        )
    client: Any = service.client
    kinds = (HttpPolicyClient, PolicyClient)
    kind, other = reversed(kinds) if http is None else kinds
    if client is None:
        host = service.host or "localhost"
        path = dialect.path if dialect else ""
        asking: Any = {
            "priority": service.priority,
            "deadline_s": service.deadline_s,
            "pictures": service.pictures,
        }
        client = kind(ClientConfig(host, service.port, service.api_key, path=path, **asking))
    elif changed_options(service).keys() - {"client", "dialect"}:
        raise ConfigError(
            "a client knows its server already; leave host, port, api_key, priority, deadline_s "
            "and pictures out."
        )
    elif isinstance(client, other):
        raise ConfigError(
            f"dialect {name!r} needs a {kind.__name__}, got a {type(client).__name__}."
        )
    if http is not None:
        return HttpServiceBackend(client, http)
    return ServiceBackend(client, name, action_space=action_space, num_steps=num_steps)


class HttpServiceBackend(RemoteBackend):
    """Posts requests in an HTTP dialect, and returns the chunks in the model's own units.

    Args:
        client: The connection.
        dialect: The server's dialect.
    """

    def __init__(self, client: HttpPolicyClient, dialect: HttpDialect):
        super().__init__(client)
        self._dialect = dialect

    def infer(self, request: Request) -> ActionChunk:
        """Return the server's chunk.

        Raises:
            ServiceError: The server is unavailable, timed out, closed, unreadable, refused, or sent
                an unusable chunk.
            BackendError: The request is not for this dialect, or lacks what it sends.
        """
        return self._ask((request,))[0]

    def infer_batch(self, requests: Sequence[Request]) -> list[ActionChunk]:
        """Return the chunk for each request, of one inference if the dialect has batches. Errors:
        as :meth:`infer`.
        """
        if not requests or not self._dialect.batches:
            return super().infer_batch(requests)
        return self._ask(requests)

    def _ask(self, requests: Sequence[Request]) -> list[ActionChunk]:
        dialect = self._dialect
        path, content = dialect.encode_requests(requests)  # raises before anything is dialled

        def check_info(info: Mapping[str, Any]) -> None:
            self._answered_by(dialect.model_of(info, requests[0]))

        return self._client.exchange(
            Post(dialect, path, content, check_info, self._wait_s(requests[0])),
            lambda reply: dialect.decode_replies(reply, requests),
        )
