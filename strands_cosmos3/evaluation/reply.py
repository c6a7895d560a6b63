"""What an actor returns: a value, or an error as text, because not every process can unpickle
every error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from strands_cosmos3.errors import Cosmos3Error, ReplicaLostError
from strands_cosmos3.parallel.group import error_from_name


@dataclass(frozen=True)
class Reply:
    """The outcome of an actor's method: ``done`` with a value; ``error`` with type name and
    message; or ``lost``, an error after which the episode should run again because its replica is
    gone.
    """

    kind: Literal["done", "lost", "error"]
    value: Any = None
    error: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, work: Callable[[], Any]) -> Reply:
        """Run ``work`` and return its outcome."""
        try:
            return cls("done", work())
        except Cosmos3Error as error:
            kind = "lost" if isinstance(error, ReplicaLostError) else "error"
            return cls(kind, error=(type(error).__name__, str(error)))

    def unwrap(self) -> Any:
        """Return the value, or raise the error."""
        if self.kind != "done":
            raise error_from_name(*self.error)
        return self.value
