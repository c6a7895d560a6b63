"""Inference on NVIDIA's LIBERO server, or on one that answers as it does: the service backend's
dialect ``libero``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strands_cosmos3.backends.service import RemoteBackend
from strands_cosmos3.serving import libero
from strands_cosmos3.types import ActionChunk, Request


class LiberoServiceBackend(RemoteBackend):
    """Posts pictures and instructions, and returns the chunks in the model's own units. Seed and
    state are not sent.

    Args:
        client: The connection, a :class:`~strands_cosmos3.serving.http_client.HttpPolicyClient`.
    """

    def infer(self, request: Request) -> ActionChunk:
        """Return the server's chunk.

        Raises:
            ServiceError: The server is unavailable, timed out, closed, unreadable, refused, or sent
                an unusable chunk.
            BackendError: The request is not for LIBERO, or has no picture.
        """
        return self._ask((request,), batch=False)[0]

    def infer_batch(self, requests: Sequence[Request]) -> list[ActionChunk]:
        """Return the chunk for each request, of one inference. Errors: as :meth:`infer`."""
        return (
            self._ask(requests, batch=True)
            if len(requests) > 1
            else [self.infer(request) for request in requests]
        )

    def _ask(self, requests: Sequence[Request], batch: bool) -> list[ActionChunk]:
        items = [libero.encode_request(request) for request in requests]

        def message(info: Mapping[str, object]) -> Mapping[str, object]:
            libero.require_width(info, requests[0])
            return {"items": items} if batch else items[0]

        return self._client.exchange(
            message, lambda reply: libero.decode_replies(reply, requests, batch)
        )
