"""Requests and results as bytes: tensors as safetensors, everything else as JSON in its header. Nothing is pickled.

A frame is the output of ``safetensors.torch.save``: header length (8 bytes, little-endian), JSON header, tensor data. Our JSON
is the metadata entry ``strands_cosmos3`` of the header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
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


def encode(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> bytes:
    """Return a frame of tensors and JSON values."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(held, metadata={_KEY: json.dumps(dict(about))})


def decode(frame: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and JSON values of a frame; a WireFormatError if it is none."""
    try:
        (length,) = struct.unpack_from("<Q", frame)
        if length > min(_MAX_HEADER, len(frame) - 8):
            raise WireFormatError(f"a header of {length} bytes in a frame of {len(frame)}.")
        about = json.loads(json.loads(frame[8 : 8 + length])["__metadata__"][_KEY])
        tensors = load(bytes(frame))
    except (struct.error, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise WireFormatError(f"these {len(frame)} bytes are not a frame of tensors and JSON ({error}).") from None
    if not isinstance(about, dict):
        raise WireFormatError(f"the frame's JSON is a {type(about).__name__}, not an object.")
    return tensors, about


def encode_request(request: Cosmos3ActionRequest) -> bytes:
    """Return a request as a frame."""
    values = {name: getattr(request, name) for name in _FIELDS}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    plain = {name: value for name, value in values.items() if name not in tensors}
    return encode(tensors, {**plain, "mode": str(request.mode)})


def decode_request(frame: bytes) -> Cosmos3ActionRequest:
    """Return the request in a frame, validated like any other.

    Raises:
        WireFormatError, InputError: The frame is damaged or not a request; or a field is invalid.
    """
    tensors, plain = decode(frame)
    values: dict[str, Any] = {**plain, **tensors}
    if set(values) != set(_FIELDS):
        raise WireFormatError(f"not a request: its fields differ in {', '.join(sorted(set(values) ^ set(_FIELDS)))}.")
    values |= {name: tuple(values[name]) for name in _TUPLES if values[name] is not None}
    return Cosmos3ActionRequest(**values)


def encode_result(result: Mapping[str, Any]) -> bytes:
    """Return the result of an engine's step as a frame."""
    tensors = {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
    return encode(tensors, {name: value for name, value in result.items() if name not in tensors})


def decode_result(frame: bytes) -> dict[str, Any]:
    """Return the result in a frame; a WireFormatError if it is damaged. See ``Cosmos3Engine.step``."""
    tensors, plain = decode(frame)
    return {**plain, **tensors}
