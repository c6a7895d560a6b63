"""Inference on a policy server: ours, or another one with openpi's protocol."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from strands_cosmos3.backends.base import Backend
from strands_cosmos3.serving.wire import decode_reply, encode_request, encode_reset, get_dialect, require_reset_reply
from strands_cosmos3.types import ActionChunk, Request

_T = TypeVar("_T")


class Exchange(Protocol):
    """The part that this backend uses of a :class:`~strands_cosmos3.serving.client.PolicyClient`."""

    @property
    def counters(self) -> Mapping[str, int]: ...
    def exchange(self, message: Any, read: Callable[[Any], _T]) -> _T: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class ServiceBackend(Backend):
    """Sends requests to a policy server. It connects on the first inference.

    ``joint_pos`` returns joint angles. ``midtrain`` and ``pose_abs`` send the measured pose, and the server returns the poses
    that it integrated from it: those chunks are ``pose_abs`` with that departure. The simulator's state is never sent.

    Args:
        client: The connection.
        dialect: ``robolab`` (also ``openpi``), ``vllm-omni`` or ``roboarena``.
        requires_images: Whether the server wants pictures; model servers do.

    Raises:
        UnknownNameError: No such dialect.
    """

    name = "service"
    takes_views = True
    action_space = "joint_pos"  # that of the released policy servers

    def __init__(self, client: Exchange, dialect: str = "robolab", requires_images: bool = True):
        self.requires_images = requires_images
        self._client = client
        self._dialect = get_dialect(dialect)
        self._session = _new_session()
        self._calls = 0
        self._asked = False

    def infer(self, request: Request) -> ActionChunk:
        """Return the server's chunk.

        Raises:
            ServiceError: The server is unavailable, timed out, closed, unreadable, refused, or sent an unusable chunk.
            BackendError: The request lacks what its action space needs.
        """
        self._calls += 1
        number = self._calls
        message = encode_request(request, self._dialect, self._session, number)
        self._asked = True
        return self._client.exchange(message, lambda reply: decode_reply(reply, request, number))

    def reset(self, seed: int | None = None) -> None:
        """Start another session, and tell a server whose dialect has a reset endpoint if it has had a request.

        Raises:
            ServiceError: The reset failed.
        """
        old, self._session = self._session, _new_session()
        if self._dialect.endpoint and self._asked:
            self._asked = False
            self._client.exchange(encode_reset(old), require_reset_reply)

    @property
    def counters(self) -> Mapping[str, int]:
        """The connection's events by name, including ``reconnects``."""
        return self._client.counters

    def cancel(self) -> bool:
        """Break off an exchange under way in another thread."""
        self._client.cancel()
        return True

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _new_session() -> str:
    return uuid.uuid4().hex
