"""Backends: one contract, several places where inference may happen."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from strands_cosmos3.backends.base import Backend, BackendInfo, adapted
from strands_cosmos3.backends.options import BackendOptions, ServiceOptions
from strands_cosmos3.checks import known_name
from strands_cosmos3.errors import ConfigError, MissingDependencyError
from strands_cosmos3.options import BACKENDS, changed_options, require_heeded

EXPERT = "strands_cosmos3.worlds.table.expert:ScriptedBackend"
"""``scripted`` where no world names its own expert."""
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
    return adapted(backend).info


def make_backend(
    backend: str | Backend | None,
    model: Any = None,
    options: BackendOptions | None = None,
    action_space: str | None = None,
) -> Backend:
    """Return a backend by name, or the given one.

    Args:
        backend: A name from :data:`~strands_cosmos3.options.BACKENDS`, or a :class:`Backend`; other
            objects with its members are adapted. None is ``native`` with a model (``distributed``
            on several ranks), ``service`` with one of its options.
        model: For ``replay``, a path, a ``Recording`` or a ``LimbRecording``; for ``native``,
            ``distributed`` and ``diffusers``, a checkpoint's folder or hub repository.
        options: Options of the backend; those of another one are refused.
        action_space: Action space of a model whose checkpoint does not state it.

    Raises:
        ConfigError: No backend was chosen, an option belongs to another one, or the object is no
            backend.
        CheckpointError: The checkpoint cannot be loaded.
        UnknownNameError: No such backend.
    """
    options = options or BackendOptions()
    if backend is None and isinstance(model, str | Path):
        backend = "native" if options.parallel.world_size == 1 else "distributed"
    if backend is None and changed_options(options.service):
        backend = "service"
    if backend is None:
        raise ConfigError(
            f"no backend was chosen: pass backend= one of {', '.join(BACKENDS)}, or a Backend of "
            "your own."
        )
    if not isinstance(backend, str):
        own = adapted(backend)
        require_heeded(type(backend).__name__, options)
        return own
    known_name(backend, "backend", BACKENDS)
    require_heeded(backend, options)
    if model is not None and backend in _WITHOUT_MODEL:
        raise ConfigError(
            f"backend {backend!r} runs no model, and model={str(model)!r} was given; leave one of "
            "them out: a model alone is run by 'native'."
        )
    return _by_name(backend, model, options, action_space)


def _by_name(
    backend: str, model: Any, options: BackendOptions, action_space: str | None
) -> Backend:
    if backend == "scripted":
        module, _, expert = EXPERT.partition(":")
        return getattr(import_module(module), expert)()
    if backend == "replay":
        from strands_cosmos3.backends.replay import (
            LimbRecording,
            Recording,
            ReplayBackend,
            recording_at,
        )

        if model is None:
            raise ConfigError(
                "backend 'replay' needs a recording: pass model= a path (.json, .npz, a dataset) "
                "or a Recording."
            )
        return ReplayBackend(
            model if isinstance(model, Recording | LimbRecording) else recording_at(model)
        )
    if backend == "service":
        return _make_service(options.service, action_space, options.sampling.num_steps)
    if model is None:
        raise ConfigError(
            f"backend {backend!r} needs a checkpoint: pass model= its folder or hub repository "
            "(owner/name)."
        )
    return _model_backend(backend, model, options, action_space)


def _make_service(
    service: ServiceOptions, action_space: str | None, num_steps: int | None
) -> Backend:
    try:
        from strands_cosmos3.backends.service import LiberoServiceBackend, ServiceBackend
        from strands_cosmos3.serving.client import ClientConfig, PolicyClient
        from strands_cosmos3.serving.http_client import HttpPolicyClient
        from strands_cosmos3.serving.wire import get_dialect
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"backend 'service' needs {error.name}: pip install 'strands-cosmos3[serve]'."
        ) from None
    dialect = get_dialect(service.dialect or "robolab")
    if num_steps is not None and not dialect.sampling:
        raise ConfigError(
            f"num_steps={num_steps}: of the dialects only vllm-omni has it, not {dialect.name}; "
            "leave it out."
        )
    client: Any = service.client
    kind, other = (
        (HttpPolicyClient, PolicyClient) if dialect.http else (PolicyClient, HttpPolicyClient)
    )
    if client is None:
        client = kind(
            ClientConfig(
                service.host or "localhost", service.port, service.api_key, path=dialect.path
            )
        )
    elif service.host or service.port or service.api_key:
        raise ConfigError("a client knows its server already; leave host, port and api_key out.")
    elif isinstance(client, other):
        raise ConfigError(
            f"dialect {dialect.name!r} needs a {kind.__name__}, got a {type(client).__name__}."
        )
    if dialect.http:
        return LiberoServiceBackend(client)
    return ServiceBackend(client, dialect.name, action_space=action_space, num_steps=num_steps)


def _model_backend(
    name: str, model: Any, options: BackendOptions, action_space: str | None
) -> Backend:
    try:
        if name == "native":
            from strands_cosmos3.backends.native import NativeBackend

            return NativeBackend(model, options, action_space)
        if name == "distributed":
            from strands_cosmos3.backends.distributed import DistributedBackend

            return DistributedBackend(model, options, action_space)
        from strands_cosmos3.backends.diffusers import DiffusersBackend

        return DiffusersBackend(model, options, action_space)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"backend {name!r} needs {error.name}: pip install 'strands-cosmos3[engine]'."
        ) from error
