"""Encode and decode messages of the policy protocol: msgpack, with numpy arrays in openpi's format.

An array is a map with **bytes** keys: ``b"__ndarray__": True``, ``b"data"``, ``b"dtype"`` (numpy's
``dtype.str``) and ``b"shape"``; a numpy scalar has ``b"__npgeneric__"`` instead. Source of the
convention: openpi-client 0.1.2, ``msgpack_numpy``.

Input from the network is untrusted. A frame's tags are checked before anything is built, which
bounds its depth, keys and values. An array's dtype is looked up in a short table, never parsed, and
the number of bytes must match the shape. Decoded arrays are read-only views of the received bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.errors import WireFormatError


@dataclass(frozen=True)
class Limits:
    """Size limits of a message."""

    max_bytes: int = 16 * 2**20  # of the frame
    max_depth: int = 8  # nesting of containers; an array counts as a map that holds a list
    max_keys: int = 64  # of one map
    max_values: int = 4096  # of the whole message, keys included; an array counts as nine
    max_text_bytes: int = 256 * 2**10  # of all text; in memory, Python may need four times as many


DEFAULT_LIMITS = Limits()
MAX_NDIM = 5
_BASES = ("u1", "i4", "i8", "f4", "f8", "b1")
_DTYPES: Mapping[str, np.dtype[Any]] = {
    f"{order}{base}": np.dtype(base) for base in _BASES for order in "|<"
}
_ALLOWED = frozenset(_DTYPES.values())
_ARRAY = b"__ndarray__"
_SCALAR = b"__npgeneric__"
_DTYPE_NAMES = "uint8, int32, int64, float32, float64, bool, little-endian"

_PLAIN, _BYTES, _TEXT, _LIST, _MAP = range(5)
_TAGS: tuple[
    tuple[int, int, int] | None, ...
] = (  # by tag: kind, bytes of the length or number that follows, length in the tag
    *[(_PLAIN, 0, 0)] * 0x80,
    *((_MAP, 0, n) for n in range(16)),
    *((_LIST, 0, n) for n in range(16)),
    *((_TEXT, 0, n) for n in range(32)),
    *[(_PLAIN, 0, 0), None, (_PLAIN, 0, 0), (_PLAIN, 0, 0)],  # nil, never used, false, true
    *((_BYTES, 2**i, 0) for i in range(3)),
    *[None] * 3,  # extensions
    *((_PLAIN, 4 * 2**i, 0) for i in range(2)),  # floats
    *((_PLAIN, 2**i, 0) for _ in range(2) for i in range(4)),  # integers
    *[None] * 5,  # extensions of fixed lengths
    *((_TEXT, 2**i, 0) for i in range(3)),
    *((_LIST, 2 * 2**i, 0) for i in range(2)),
    *((_MAP, 2 * 2**i, 0) for i in range(2)),
    *[(_PLAIN, 0, 0)] * 0x20,
)
_CUT_SHORT = "the message is truncated."


def encode(message: Any, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Encode None, booleans, numbers, text, bytes, lists, maps with text keys, numpy arrays and
    scalars of allowed dtypes.

    Of the receiver's ``limits``, only ``max_bytes`` is checked.

    Raises:
        WireFormatError: A value cannot be encoded, or the message is too large.
    """
    return bytes(encode_view(message, limits))


def encode_view(message: Any, limits: Limits = DEFAULT_LIMITS) -> memoryview:
    """As :func:`encode`, without copying the frame out of the packer's memory, which lives as
    long as the view.
    """
    packer = msgpack.Packer(default=_to_wire, autoreset=False)
    try:
        packer.pack(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, WireFormatError):
            raise
        raise WireFormatError(
            f"this message cannot be encoded: {error}. Use maps, lists, numbers, text and arrays."
        ) from None
    frame = packer.getbuffer()
    if len(frame) > limits.max_bytes:
        raise WireFormatError(
            f"the message has {len(frame)} bytes; at most {limits.max_bytes} are allowed. Send "
            "smaller images."
        )
    return frame


@dataclass(frozen=True)
class UnsupportedArray:
    """Stands for an array or scalar of a dtype that is not part of the protocol; its data are
    dropped.
    """

    dtype: str

    def __str__(self) -> str:
        return f"arrays of dtype {self.dtype!r} are not supported; allowed: {_DTYPE_NAMES}."


def decode(
    frame: bytes, limits: Limits = DEFAULT_LIMITS, *, writable: bool = False, strict: bool = False
) -> Any:
    """Decode a frame; anything invalid raises WireFormatError.

    Arrays are read-only and may share the frame's memory, unless ``writable`` asks for copies.
    Those of an unsupported dtype become :class:`UnsupportedArray`, because keys that nobody reads
    must not make a request invalid; ``strict`` refuses them.
    """
    if len(frame) > limits.max_bytes:
        raise WireFormatError(
            f"the message has {len(frame)} bytes; at most {limits.max_bytes} are allowed."
        )
    _walk(frame, limits)
    try:
        return msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            object_hook=lambda value: _from_wire(value, writable, strict),
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        # UnicodeDecodeError is a ValueError
        if isinstance(error, WireFormatError):
            raise
        raise WireFormatError(f"this message cannot be decoded: {error}.") from None


def peek(frame: bytes, key: str, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Return the value under a key of a frame's map, None if it has none; nothing else of the frame
    is decoded. Errors as of :func:`decode`.
    """
    members, key_bytes = _walk(frame, limits), encode(key)
    for place, start in enumerate(members[::2]):
        if frame.startswith(key_bytes, start):
            first, *rest = members[2 * place + 1 :]
            return decode(frame[first : rest[0] if rest else None], limits)
    return None


def _to_wire(value: object) -> dict[bytes, Any]:
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        dtype = _allowed(array.dtype)
        if array.ndim > MAX_NDIM:
            raise WireFormatError(
                f"an array has {array.ndim} dimensions; at most {MAX_NDIM} are allowed."
            )
        whole = np.ascontiguousarray(array, dtype=dtype)
        data = whole.data.cast("B") if whole.size and whole.ndim else whole.tobytes()
        return {_ARRAY: True, b"data": data, b"dtype": dtype.str, b"shape": array.shape}
    if isinstance(value, np.generic):
        scalar = cast("np.generic[Any]", value)
        return {_SCALAR: True, b"data": scalar.item(), b"dtype": _allowed(scalar.dtype).str}
    raise WireFormatError(
        f"a {type(value).__name__} cannot be encoded; use maps, lists, numbers, text and arrays."
    )


def _allowed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    little = dtype.newbyteorder("<") if dtype.kind in "biuf" else dtype
    if little not in _ALLOWED:
        raise WireFormatError(
            f"arrays of {dtype} are not part of the protocol; allowed: {_DTYPE_NAMES}."
        )
    return little


def _from_wire(value: dict[Any, Any], writable: bool, strict: bool) -> Any:
    if _ARRAY not in value and _SCALAR not in value:
        return value
    name = value.get(b"dtype")
    if not isinstance(name, str):
        raise WireFormatError(
            f"an array's dtype must be text, got {type(name).__name__}; allowed: {_DTYPE_NAMES}."
        )
    if name not in _DTYPES:
        unsupported = UnsupportedArray(name[:40])
        if strict:
            raise WireFormatError(str(unsupported))
        return unsupported
    return (
        _array(value, _DTYPES[name], writable) if _ARRAY in value else _scalar(value, _DTYPES[name])
    )


def _array(value: dict[Any, Any], dtype: np.dtype[Any], writable: bool) -> NDArray[Any]:
    shape = value.get(b"shape")
    data = value.get(b"data")
    if not isinstance(shape, list) or not all(
        type(n) is int and n >= 0 for n in cast("list[Any]", shape)
    ):
        raise WireFormatError("an array's shape must be a list of non-negative integers.")
    sizes = cast("list[int]", shape)
    if len(sizes) > MAX_NDIM:
        raise WireFormatError(
            f"an array has {len(sizes)} dimensions; at most {MAX_NDIM} are allowed."
        )
    if not isinstance(data, bytes) or math.prod(sizes) * dtype.itemsize != len(data):
        have = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise WireFormatError(
            f"an array {sizes} of {dtype} needs "
            f"{math.prod(sizes) * dtype.itemsize} bytes, got {have}."
        )
    buffer = bytearray(data) if writable else data
    array = (np.frombuffer(buffer, dtype=dtype) if data else np.empty(0, dtype)).reshape(sizes)
    array.setflags(write=writable)
    return array


def _scalar(value: dict[Any, Any], dtype: np.dtype[Any]) -> Any:
    item = value.get(b"data")
    if not isinstance(item, int | float):
        raise WireFormatError(f"a numpy scalar must hold a number, got {type(item).__name__}.")
    try:
        return dtype.type(item)
    except (OverflowError, ValueError) as error:
        raise WireFormatError(f"a scalar of {dtype} cannot hold its number: {error}.") from None


def _walk(frame: bytes, limits: Limits) -> list[int]:
    """Check the tags of a frame from end to end without building anything; return where the members
    of the message begin.
    """
    members: list[int] = []
    at = 0
    end = len(frame)
    values = 0
    text = 0
    # values left in the innermost container, the first being the message, and in those around it
    left = 1
    outer: list[int] = []
    while True:
        while not left:
            if not outer:
                if at == end:
                    return members
                raise WireFormatError(
                    _CUT_SHORT
                    if at > end
                    else f"the message ends after {at} bytes, but the frame has {end}."
                )
            left = outer.pop()
        left -= 1
        values += 1
        if values > limits.max_values:
            raise WireFormatError(
                f"the message has more than {limits.max_values} values; use arrays for numbers."
            )
        if at >= end:
            raise WireFormatError(_CUT_SHORT)
        if len(outer) == 1:
            members.append(at)
        if (tag := _TAGS[frame[at]]) is None:
            raise WireFormatError(
                f"msgpack tag 0x{frame[at]:02x} (an extension) is not part of the protocol."
            )
        kind, width, count = tag
        at += 1 + width
        if kind == _PLAIN:
            continue
        if width:
            count = int.from_bytes(frame[at - width : at], "big")
        if kind <= _TEXT:
            at += count
            text += count if kind == _TEXT else 0
            if text > limits.max_text_bytes:
                raise WireFormatError(
                    f"the message has more than {limits.max_text_bytes} bytes of text."
                )
            continue
        if kind == _MAP and count > limits.max_keys:
            raise WireFormatError(f"a map has {count} keys; at most {limits.max_keys} are allowed.")
        if len(outer) >= limits.max_depth:
            raise WireFormatError(f"containers are nested deeper than {limits.max_depth}.")
        outer.append(left)
        left = count * (2 if kind == _MAP else 1)
