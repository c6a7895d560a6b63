"""A restricted unpickler: it builds records out of the named classes and never imports, calls or
builds anything else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from strands_cosmos3.errors import LayoutError
from strands_cosmos3.resources import shown

_BROKEN = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
)
_BROKEN += (OverflowError, MemoryError, RecursionError, AssertionError)


class Record:
    """Stands for an object of a named class: its arguments and its attributes, and no behaviour."""

    kind = ""

    def __init__(self, *args: Any):
        self.args = args
        self.fields: Mapping[Any, Any] = {}  # by name, or by position

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, Mapping) else dict(enumerate(state))

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__  # records are keys before their state is known


def unpickle(
    data: bytes,
    allowed: Mapping[str, Any],
    where: str,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Read a pickle in which only ``allowed`` names, ``module.name`` -> what stands for it, may
    occur.

    Args:
        persistent: Reads persistent ids; None refuses them.

    Raises LayoutError if it is damaged or names anything else; nothing of it was run then.
    """

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" not in allowed:
                raise pickle.UnpicklingError(
                    f"it names {shown(f'{module}.{name}')}, which no checkpoint needs"
                )
            return allowed[f"{module}.{name}"]

        def persistent_load(self, pid: Any) -> Any:
            if persistent is None:
                raise pickle.UnpicklingError("it has persistent ids")
            return persistent(pid)

    try:
        return Restricted(io.BytesIO(data)).load()
    except _BROKEN as error:
        reason = str(error).encode("ascii", "backslashreplace").decode()[:200]
        raise LayoutError(
            f"{where} is not readable ({reason}); nothing of it was run. Download it again."
        ) from None


def record(name: str) -> type[Record]:
    """A kind of record for the class of this name."""
    return type(name, (Record,), {"kind": name})
