"""Backends: one contract, several places where inference may happen."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from strands_cosmos3.backends.base import Backend, BackendInfo, own_backend
from strands_cosmos3.backends.options import BackendOptions
from strands_cosmos3.checks import known_name
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.extras import needed_by
from strands_cosmos3.options import BACKENDS, require_heeded
from strands_cosmos3.tables import packaged_worlds

_MAKERS = {
    "replay": "strands_cosmos3.backends.replay:replay_backend",
    "service": "strands_cosmos3.backends.service:service_backend",
    "native": "strands_cosmos3.backends.native:NativeBackend",
    "onnx": "strands_cosmos3.backends.onnx:OnnxBackend",
    "distributed": "strands_cosmos3.backends.distributed:DistributedBackend",
    "diffusers": "strands_cosmos3.backends.diffusers:DiffusersBackend",
}
_WITHOUT_MODEL = ("scripted", "service")
_INPUTS = {
    "scripted": BackendInfo(name="scripted", needs_privileged=True, requires_images=False),
    "replay": BackendInfo(name="replay", requires_images=False),
}


def required_inputs(backend: Any) -> BackendInfo:
    """Return a backend's properties; of a name only ``requires_images`` and ``needs_privileged``,
    without an import of its module, which may need torch. ConfigError: it is no backend.
    """
    if backend is None or isinstance(backend, str):
        return _INPUTS.get(backend or "", BackendInfo())
    return own_backend(backend).info


def make_backend(
    backend: str | Backend,
    model: Any = None,
    options: BackendOptions = BackendOptions(),
    action_space: str | None = None,
) -> Backend:
    """Return a backend by name, or the given one.

    Args:
        backend: A name from :data:`~strands_cosmos3.options.BACKENDS`, or a :class:`Backend`.
        model: For ``replay``, a path, a ``Recording`` or a ``LimbRecording``; for ``native``,
            ``distributed`` and ``diffusers``, a checkpoint's folder or hub repository.
        options: Options of the backend; those of another one are refused.
        action_space: Action space of a model whose checkpoint does not state it.

    Raises:
        ConfigError: An option belongs to another backend, or the object is no backend.
        CheckpointError: The checkpoint cannot be loaded.
        UnknownNameError: No such backend.
    """
    if not isinstance(backend, str):
        own = own_backend(backend)
        require_heeded(type(backend).__name__, options)
        return own
    known_name(backend, "backend", BACKENDS)
    require_heeded(backend, options)
    if model is not None and backend in _WITHOUT_MODEL:
        raise ConfigError(
            f"backend {backend!r} runs no model, and model={str(model)!r} was given; leave one of "
            "them out: a model alone is run by 'native'."
        )
    default_world = next(iter(packaged_worlds().values()))  # where none brings its own expert
    place = default_world["expert"] if backend == "scripted" else _MAKERS[backend]
    module, _, attribute = place.partition(":")
    with needed_by(f"backend {backend!r}"):
        make: Any = getattr(import_module(module), attribute)
        if backend == "scripted":
            return make()
        if backend == "service":
            return make(options.service, action_space, options.sampling.num_steps)
        if model is None:
            needed = (
                "a recording: pass model= a path (.json, .npz, a dataset) or a Recording"
                if backend == "replay"
                else "a checkpoint: pass model= its folder or hub repository (owner/name)"
            )
            raise ConfigError(f"backend {backend!r} needs {needed}.")
        return make(model) if backend == "replay" else make(model, options, action_space)
