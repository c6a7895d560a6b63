"""Requests and results as bytes: tensors as safetensors, everything else as JSON in its header.
Nothing is pickled.

A frame is the output of ``safetensors.torch.save``: header length (8 bytes, little-endian), JSON
header, tensor data. Our JSON is the metadata entry ``strands_cosmos3`` of the header; in it
``{"tensor": NAME}`` stands for a tensor of the frame.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load, save

from strands_cosmos3.engine.request import Cosmos3ActionRequest
from strands_cosmos3.tables import as_tuples

_KEY = "strands_cosmos3"


def encode_requests(requests: Sequence[Cosmos3ActionRequest]) -> bytes:
    """Return the requests of a batch as one frame. A tensor that several of them hold is sent
    once.
    """
    return encode_results([vars(request) for request in requests])


def decode_requests(frame: bytes) -> list[Cosmos3ActionRequest]:
    """Return the requests in a frame, validated like any others, but for pixels, which the leader
    has read; tensors that were sent once are one object again. InputError: a field is invalid.
    """
    return [
        Cosmos3ActionRequest(**{name: as_tuples(value) for name, value in values.items()})
        for values in decode_results(frame)
    ]


def encode_results(results: Sequence[dict[str, Any]]) -> bytes:
    """Return the results of an engine's batch as one frame."""
    tensors: dict[str, torch.Tensor] = {}

    def named(tensor: torch.Tensor) -> dict[str, str]:
        name = str(id(tensor))
        tensors[name] = tensor.detach().cpu().contiguous()
        return {"tensor": name}

    text = json.dumps(results, default=named)
    return save(tensors, metadata={_KEY: text})


def decode_results(frame: bytes) -> list[dict[str, Any]]:
    """Return the results in a frame. See ``Cosmos3Engine.step_batch``."""
    tensors = load(frame)
    length = int.from_bytes(frame[:8], "little")
    text = json.loads(frame[8 : 8 + length])["__metadata__"][_KEY]

    def plain(value: dict[str, Any]) -> Any:
        return tensors[value["tensor"]] if "tensor" in value else value

    return json.loads(text, object_hook=plain)
