"""Requests and results as bytes: tensors as safetensors, everything else as JSON in its header.
Nothing is pickled.

A frame is the output of ``safetensors.torch.save``: header length (8 bytes, little-endian), JSON
header, tensor data. Our JSON is the metadata entry ``strands_cosmos3`` of the header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from strands_cosmos3.engine.request import Cosmos3ActionRequest
from strands_cosmos3.errors import WireFormatError

_KEY = "strands_cosmos3"
_MAX_HEADER = 1 << 20
_FIELDS = tuple(f.name for f in fields(Cosmos3ActionRequest))
_TUPLES = ("video_shape", "cond_frame_indexes", "guidance_interval")


def encode(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> bytes:
    """Return a frame of tensors and JSON values."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(contiguous, metadata={_KEY: json.dumps(dict(values))})


def decode(frame: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and JSON values of a frame; a WireFormatError if it is none."""
    try:
        (length,) = struct.unpack_from("<Q", frame)
        if length > min(_MAX_HEADER, len(frame) - 8):
            raise WireFormatError(f"a header of {length} bytes in a frame of {len(frame)}.")
        values = json.loads(json.loads(frame[8 : 8 + length])["__metadata__"][_KEY])
        tensors = load(bytes(frame))
    except (struct.error, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise WireFormatError(
            f"these {len(frame)} bytes are not a frame of tensors and JSON ({error})."
        ) from None
    if not isinstance(values, dict):
        raise WireFormatError(f"the frame's JSON is a {type(values).__name__}, not an object.")
    return tensors, values


def encode_requests(requests: Sequence[Cosmos3ActionRequest]) -> bytes:
    """Return the requests of a batch as one frame. A tensor that several of them hold is sent
    once.
    """
    return encode_results(
        [
            {name: getattr(request, name) for name in _FIELDS} | {"mode": str(request.mode)}
            for request in requests
        ]
    )


def decode_requests(frame: bytes) -> list[Cosmos3ActionRequest]:
    """Return the requests in a frame, validated like any others; tensors that were sent once are
    one object again.

    Raises:
        WireFormatError, InputError: The frame is damaged or holds no requests; or a field is
            invalid.
    """
    requests = []
    for values in decode_results(frame):
        if set(values) != set(_FIELDS):
            raise WireFormatError(
                "not a request: its fields differ in "
                f"{', '.join(sorted(set(values) ^ set(_FIELDS)))}."
            )
        values |= {name: tuple(values[name]) for name in _TUPLES if values[name] is not None}
        requests.append(Cosmos3ActionRequest(**values))
    return requests


def encode_results(results: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the results of an engine's batch as one frame.

    A tensor is replaced by ``{"tensor": its name in the frame}``.
    """
    tensors: dict[str, torch.Tensor] = {}

    def named(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors[str(id(value))] = value
        return {"tensor": str(id(value))}

    items = [{name: named(value) for name, value in result.items()} for result in results]
    return encode(tensors, {"items": items})


def decode_results(frame: bytes) -> list[dict[str, Any]]:
    """Return the results in a frame; a WireFormatError if it is damaged. See
    ``Cosmos3Engine.step_batch``.
    """
    tensors, values = decode(frame)

    def plain(value: Any) -> Any:
        return tensors[value["tensor"]] if isinstance(value, dict) and "tensor" in value else value

    try:
        return [{name: plain(value) for name, value in item.items()} for item in values["items"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise WireFormatError(
            f"the frame holds no list of requests or results ({error!r})."
        ) from None
