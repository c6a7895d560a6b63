"""Backends: one protocol, several places where inference may happen."""

from __future__ import annotations

from typing import Any

from strands_cosmos3.backends.base import Backend
from strands_cosmos3.errors import ConfigError, UnknownNameError

BACKENDS = ("scripted", "replay")
"""Backends that this version has, by name."""


def make_backend(backend: str | Backend | None, model: Any = None) -> Backend:
    """A backend by name, or the one given.

    Args:
        backend: A name from :data:`BACKENDS`, or an object that keeps the protocol.
        model: For ``replay``, a path or a ``Recording``.

    Raises:
        ConfigError: No backend was chosen, or it lacks its model.
        UnknownNameError: No such backend.
    """
    if backend is None:
        raise ConfigError(
            f"no backend was chosen: pass backend= one of {', '.join(BACKENDS)}, or an object with infer(), reset() and "
            "close(). This version ships no checkpoint to run by default."
        )
    if not isinstance(backend, str):
        if not isinstance(backend, Backend):
            raise ConfigError(f"{type(backend).__name__} is no backend: it needs infer(), reset(), close() and a name.")
        return backend
    if backend == "scripted":
        from strands_cosmos3.backends.scripted import ScriptedBackend

        return ScriptedBackend()
    if backend == "replay":
        from strands_cosmos3.backends.replay import Recording, ReplayBackend, load_recording

        if model is None:
            raise ConfigError("backend 'replay' needs a recording: pass model= a path (.json, .npz) or a Recording.")
        return ReplayBackend(model if isinstance(model, Recording) else load_recording(model))
    raise UnknownNameError("backend", backend, BACKENDS)
