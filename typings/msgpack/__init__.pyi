"""What serving/codec.py uses of msgpack 1.x, which ships no types."""

from collections.abc import Callable
from typing import Any

class UnpackException(Exception): ...

class Packer:
    def __init__(
        self, *, default: Callable[[Any], Any] | None = ..., autoreset: bool = ...
    ) -> None: ...
    def pack(self, obj: Any) -> bytes | None: ...
    def getbuffer(self) -> memoryview: ...

def unpackb(
    packed: bytes,
    *,
    raw: bool = ...,
    strict_map_key: bool = ...,
    object_hook: Callable[[dict[Any, Any]], Any] | None = ...,
) -> Any: ...
