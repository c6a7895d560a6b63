"""NVIDIA's LIBERO protocol, JSON over HTTP, for the client and the server alike: a picture and a
prompt in, actions out.

A request has no state, no seed and no session: ``image`` (base64 of a PNG: third person left, wrist
right), ``prompt`` (with the sentences that describe these views), ``domain_name`` and
``image_size`` (the height to which the picture is scaled). Actions [16, 10] travel de-normalised
with q01 and q99 of the unprocessed data (``quantile_rot``); chunks have the model's units. Gripper:
1 is open, as in the model.

Source: cosmos-framework @5eee9ed5, ``scripts/action_policy_server_libero.py`` and
``simulation/libero/closed_loop_eval.py``.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.controller_rows import METHOD, controller_rows
from strands_cosmos3.actions.stats import normalize_chunk
from strands_cosmos3.checks import MAX_IMAGE_SIDE, image_array, whole_number
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import (
    ActionOutOfRangeError,
    BackendError,
    InputError,
    InstructionError,
    ServiceChunkError,
    ServiceRefusedError,
    ServiceUnreadableError,
    ShapeError,
    WireFormatError,
)
from strands_cosmos3.observe.prompts import VIEW_SENTENCES, libero_client_prompt
from strands_cosmos3.observe.views import resize
from strands_cosmos3.serving.routes import HttpDialect, Route, ServedModel, read_object
from strands_cosmos3.serving.wire import (
    MAX_PROMPT_CHARACTERS,
    keys_of,
    require_rows,
    require_sendable,
    short,
)
from strands_cosmos3.types import ActionChunk, Request

DOMAIN = "libero"
PREDICT = "/predict"
PREDICT_BATCH = "/predict_batch"
INFO = "/info"
MAX_ITEMS = 64
MAX_PIXELS = 2**19
"""Of a picture. A PNG may hold a thousand times its size, so its size says little."""
_IMAGE_SIZE = 256
_LEAST_ASPECT = 1.5  # width by height of two views side by side; one view alone has less
_VIEW_SENTENCE = VIEW_SENTENCES["concat"]
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def items_of_batch(body: bytes) -> list[Mapping[str, Any]]:
    """Return the items of a batch's body.

    Raises:
        WireFormatError: It is not JSON, or has no list of 1 to 64 items.
    """
    items = read_object(body).get("items")
    if not isinstance(items, list) or not 1 <= len(cast("list[Any]", items)) <= MAX_ITEMS:
        raise WireFormatError(f"'items' must be a list of 1 to {MAX_ITEMS} requests.")
    if any(not isinstance(item, dict) for item in cast("list[Any]", items)):
        raise WireFormatError("'items' must be a list of JSON objects.")
    return cast("list[Mapping[str, Any]]", items)


def encode_request(request: Request) -> dict[str, Any]:
    """Return the item of a request.

    Raises:
        BackendError: The request is not for LIBERO, or has no picture.
    """
    if request.embodiment.name != DOMAIN:
        raise BackendError(
            f"NVIDIA's LIBERO server is for embodiment {DOMAIN!r}, not "
            f"for {request.embodiment.name!r}."
        )
    if request.composite is None:
        raise BackendError(
            "a LIBERO server requires a picture (third person left, wrist right), and the request "
            "has none."
        )
    prompt = request.prompt or libero_client_prompt(request.instruction)
    return {
        "image": _to_png(request.composite),
        "prompt": prompt,
        "domain_name": DOMAIN,
        "image_size": _IMAGE_SIZE,
    }


def decode_request(item: Mapping[str, Any], model: ServedModel) -> Request:
    """Return the request in an item. The sentences about the views are cut off: a model's caption
    has its own.

    Raises:
        InputError: A key is missing or malformed; the message names it.
        InstructionError: The instruction is blank.
    """
    prompt = item.get("prompt")
    domain = item.get("domain_name")
    if not isinstance(prompt, str) or len(prompt) > MAX_PROMPT_CHARACTERS:
        raise InputError(f"'prompt' must be text of at most {MAX_PROMPT_CHARACTERS} characters.")
    instruction = prompt.partition(_VIEW_SENTENCE)[0].strip()
    if not instruction.strip("."):
        raise InstructionError("'prompt' is blank; send the instruction as text.")
    if domain != DOMAIN:
        raise InputError(f"'domain_name' must be {DOMAIN!r}, got {str(domain)[:60]!r}.")
    height = whole_number(item.get("image_size"), "'image_size'", 1, MAX_IMAGE_SIDE)
    picture = _from_png(item.get("image"), "'image'")
    if picture.shape[1] < _LEAST_ASPECT * picture.shape[0]:
        got = f"{picture.shape[0]} x {picture.shape[1]}"
        raise ShapeError(
            f"'image' is {got} pixels (height x width), but it holds two views side by side: third "
            "person left, wrist right."
        )
    width = max(1, round(picture.shape[1] * height / picture.shape[0]))
    if width * height > MAX_PIXELS:
        raise InputError(
            f"'image_size' {height} makes a picture of {height} x {width}; at most {MAX_PIXELS} "
            "pixels are read."
        )
    if picture.shape[0] != height:
        picture = np.clip(
            np.floor(resize(picture, (height, width), "bilinear") + 0.5), 0, 255
        ).astype(np.uint8)
    embodiment = get_embodiment(DOMAIN)
    space = embodiment.action_space()
    return Request(
        embodiment,
        space,
        instruction,
        model.chunk_rows or embodiment.chunk_rows(),
        None,
        1.0,
        composite=picture,
        seed=model.seed,
    )


def encode_reply(chunk: ActionChunk) -> str:
    """Return the reply with a chunk as JSON: its rows de-normalised, and its video's frames.

    Raises:
        ActionOutOfRangeError, BackendError: The rows must not be sent.
    """
    rows = controller_rows(chunk)
    require_sendable(rows)
    frames = [] if chunk.video is None else [_to_png(frame) for frame in chunk.video]
    return json.dumps({"action": rows.astype(np.float32).tolist(), "video": frames})


def encode_batch(replies: Sequence[str]) -> str:
    """Return the reply to a batch: the actions of its items' replies."""
    return json.dumps({"actions": [json.loads(reply)["action"] for reply in replies]})


def info(model: ServedModel, model_sha256: str | None) -> dict[str, Any]:
    """Return what ``/info`` says; None is what a backend does not tell."""
    embodiment = get_embodiment(DOMAIN)
    return {
        "run_name": model.name,
        "checkpoint": model_sha256,
        "fps": embodiment.fps,
        "seed": model.seed,
        "action_chunk_size": model.chunk_rows or embodiment.chunk_rows(),
        "max_action_dim": 64,
        "raw_action_dim": embodiment.action_space().width,
        "config_file": None,
        "config_file_type": None,
        "guidance": None,
        "num_steps": None,
        "action_stats_path": None,
    }


def encode_requests(requests: Sequence[Request]) -> tuple[str, dict[str, Any]]:
    """Return the path for requests, and what is posted to it. Errors: as encode_request."""
    items = [encode_request(request) for request in requests]
    return (PREDICT, items[0]) if len(items) == 1 else (PREDICT_BATCH, {"items": items})


def model_of(info: Mapping[str, Any], request: Request) -> object:
    """Return what a server's ``/info`` says of its checkpoint. Raises ServiceUnreadableError if its
    rows have another width.
    """
    width = info.get("raw_action_dim")
    if isinstance(width, int) and width != request.action_space.width:
        raise ServiceUnreadableError(
            f"the server's rows have {width} columns; those of {request.embodiment.name!r} "
            f"have {request.action_space.width}."
        )
    return info.get("checkpoint")


def decode_replies(reply: Mapping[str, Any], requests: Sequence[Request]) -> list[ActionChunk]:
    """Return the chunks in the reply to requests, or to one.

    Raises:
        ServiceRefusedError: The reply is an error.
        ServiceUnreadableError: It does not follow the protocol.
        ServiceChunkError: Its rows must not be executed.
    """
    if reply.get("error"):
        raise ServiceRefusedError(f"the server reports an error: {short(reply['error'])}")
    batch = len(requests) > 1
    actions = reply.get("actions") if batch else [reply.get("action")]
    chunks = cast("list[Any]", actions) if isinstance(actions, list) else []
    if len(chunks) != len(requests) or not all(isinstance(rows, list) for rows in chunks):
        expected = f"list 'actions' of {len(requests)} chunks" if batch else "list 'action'"
        raise ServiceUnreadableError(f"the reply has no {expected}; it has {keys_of(reply)}.")
    video = None if batch else _video(reply.get("video"))
    return [_chunk(rows, request, video) for rows, request in zip(chunks, requests, strict=True)]


def _chunk(rows: Any, request: Request, video: NDArray[np.uint8] | None) -> ActionChunk:
    try:
        array = np.array(
            [
                [float(value) if type(value) in (int, float) else None for value in row]
                for row in rows
            ],
            float,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ServiceChunkError(
            f"the server's rows are not lists of numbers of one length ({short(error)})."
        ) from None
    require_rows(array, request.action_space)
    try:
        rows = normalize_chunk(array, request.embodiment, None, METHOD)
        return ActionChunk(
            rows, request.action_space, request.embodiment, seed=request.seed, video=video
        )
    except ActionOutOfRangeError as error:
        raise ServiceChunkError(f"the server's rows are not LIBERO's actions: {error}") from None


def _video(frames: Any) -> NDArray[np.uint8] | None:
    """The frames [F, H, W, 3], or None if they are no pictures of one size."""
    if not isinstance(frames, list) or not frames or len(cast("list[Any]", frames)) > MAX_ITEMS:
        return None
    try:
        return np.stack([_from_png(frame, "'video'") for frame in cast("list[Any]", frames)])
    except (InputError, ValueError):
        return None


def _to_png(picture: NDArray[np.uint8]) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()


def _from_png(text: object, key: str) -> NDArray[np.uint8]:
    """The picture [H, W, 3] in a base64 text, which may have a ``data:`` prefix, white space,
    and no padding.
    """
    from PIL import Image

    if not isinstance(text, str):
        raise InputError(f"{key} must be the base64 text of a PNG, got {type(text).__name__}.")
    try:
        text = text.partition(",")[2] if text[:5].lower() == "data:" else text
        bare = text.encode("ascii").translate(_URL_SAFE, b" \t\r\n")
        raw = base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
        with Image.open(io.BytesIO(raw), formats=("PNG",)) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise InputError(
                    f"{key} has {height} x {width} pixels; at most {MAX_PIXELS} are read."
                )
            if picture.mode.startswith("I"):  # PIL cuts 16 bits off at 255
                picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
            return image_array(np.array(picture.convert("RGB")), key)
    except InputError:
        raise
    except Image.UnidentifiedImageError:  # its text is a Python object's
        raise InputError(
            f"{key} is not the base64 text of a PNG: its bytes are no PNG's."
        ) from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"{key} is not the base64 text of a PNG: {short(error)}.") from None


def _encode_error(key: str, message: str) -> str:
    return json.dumps({key: [], "error": message})


_ONE = Route(
    lambda body: [read_object(body)], lambda replies: replies[0], partial(_encode_error, "action")
)
LIBERO = HttpDialect(
    name="libero",
    embodiment=DOMAIN,
    routes={
        PREDICT: _ONE,
        PREDICT_BATCH: Route(items_of_batch, encode_batch, partial(_encode_error, "actions")),
        "/": _ONE,
    },
    pages={"/": lambda model, digest: {"status": "ok"}, INFO: info},
    decode_request=decode_request,
    encode_reply=encode_reply,
    info_path=INFO,
    model_of=model_of,
    encode_requests=encode_requests,
    decode_replies=decode_replies,
    batches=True,
)
