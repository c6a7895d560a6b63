"""What an HTTP dialect is: a protocol of JSON over HTTP, in one file of its own beside ``wire.py``.

The server, the served policy and the client know a dialect by :class:`HttpDialect` only;
``dialects.py`` names those that there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from strands_cosmos3.embodiments import Embodiment
from strands_cosmos3.errors import WireFormatError
from strands_cosmos3.serving.wire import short
from strands_cosmos3.types import ActionChunk, Request

_MAX_MARKS = 2**16  # of punctuation outside text, which bounds a JSON message's values


def read_json(body: bytes) -> Any:
    """Return the JSON value in a body. Raises WireFormatError if there is none, or it has more than
    65,536 values.
    """
    if sum(body.count(mark) for mark in (b",", b":", b"[", b"{")) > _MAX_MARKS:
        raise WireFormatError(f"the message has more than {_MAX_MARKS} values.")
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise WireFormatError(f"the message is not JSON: {short(error)}.") from None


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Errors: as read_json, and if it is another value."""
    content = read_json(body)
    if not isinstance(content, dict):
        raise WireFormatError(f"the message must be a JSON object, got {type(content).__name__}.")
    return cast("dict[str, Any]", content)


@dataclass(frozen=True)
class ServedModel:
    """What a dialect may read, and say, of the policy behind a server.

    Args:
        name: The server's name, version and backend.
        embodiment: The policy's embodiment.
        seed: Noise seed for requests without one.
        chunk_rows: Rows of the backend's chunks; None is the embodiment's.
    """

    name: str
    embodiment: Embodiment
    seed: int
    chunk_rows: int | None = None


@dataclass(frozen=True)
class Route:
    """A path to which requests are posted.

    Args:
        read_items: Returns the items of a body, each of which is one request for an inference.
            Raises WireFormatError (status 400) if the body has none.
        join_replies: Returns the body with the items' replies, in their order.
        encode_error: Returns the body that says an error of an item.
    """

    read_items: Callable[[bytes], Sequence[Mapping[str, Any]]]
    join_replies: Callable[[Sequence[str]], str]
    encode_error: Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class HttpDialect:
    """A protocol of JSON over HTTP. A request has no session: each is answered by itself.

    Args:
        name: Its name among dialects.
        embodiment: Name of the embodiment whose policies answer it without being told.
        routes: The paths of POST requests; ``/`` is another name of one of them.
        pages: The paths of GET requests, and what makes the object that each returns, of the model
            and its digest (None if the backend does not tell it).
        decode_request: Returns the request in an item. Raises InputError or another Cosmos3Error,
            whose text is the item's reply.
        encode_reply: Returns the reply to an item. Raises Cosmos3Error if the chunk must not be
            sent.
        info_path: The page that a client reads first, which a server may lack (404); empty is none.
        model_of: Returns the digest that the page's object states of the model. Raises
            ServiceUnreadableError if the server is for others than the request.
        encode_requests: Returns the path for requests and the object that is posted to it. Raises
            BackendError if they cannot be sent.
        read_reply: Returns what a reply's body holds. Raises WireFormatError if it cannot be read.
        decode_replies: Returns the chunks in that, for the requests. Raises ServiceError.
        batches: Whether several requests may be sent as one.
    """

    name: str
    embodiment: str | None = None
    routes: Mapping[str, Route]
    pages: Mapping[str, Callable[[ServedModel, str | None], Mapping[str, Any]]]
    decode_request: Callable[[Mapping[str, Any], ServedModel], Request]
    encode_reply: Callable[[ActionChunk], str]
    info_path: str = ""
    model_of: Callable[[Mapping[str, Any], Request], object]
    encode_requests: Callable[[Sequence[Request]], tuple[str, Mapping[str, Any]]]
    decode_replies: Callable[[Any, Sequence[Request]], list[ActionChunk]]
    read_reply: Callable[[bytes], Any] = read_object
    batches: bool = False

    @property
    def paths(self) -> list[str]:
        """The paths of POST requests by their own names."""
        return [path for path in self.routes if path != "/"]


def is_json(content_types: Sequence[str], encodings: Sequence[str]) -> bool:
    """Return whether ``Content-Type`` and ``Content-Encoding`` are those of plain JSON in UTF-8."""
    kind, _, rest = ",".join(content_types).lower().partition(";")
    plain = ",".join(encodings).strip().lower() in ("", "identity")
    return (
        plain
        and kind.strip() == "application/json"
        and rest.replace('"', "").strip() in ("", "charset=utf-8")
    )
