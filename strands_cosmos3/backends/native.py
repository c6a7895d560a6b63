"""The engine in this process on one device as a backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from strands_cosmos3.backends.devices import resolve_device
from strands_cosmos3.backends.engine_backend import EngineBackend
from strands_cosmos3.backends.model_input import as_path
from strands_cosmos3.backends.options import BackendOptions
from strands_cosmos3.engine.engine import Cosmos3Engine


class NativeBackend(EngineBackend):
    """Answers with a :class:`Cosmos3Engine` in this process.

    Args:
        model: A checkpoint's folder, a hub repository, or a loaded engine.
        options: How to load and sample.
        action_space: The checkpoint's action space, if neither its name nor its metadata states it.

    Raises:
        CheckpointError: The checkpoint cannot be loaded; see its children.
        BackendError: ``model`` is something else.
    """

    def __init__(
        self,
        model: str | Path | Cosmos3Engine,
        options: BackendOptions = BackendOptions(),
        action_space: str | None = None,
    ):
        if isinstance(model, Cosmos3Engine):
            engine = model
            options = replace(options, engine=model.options)
        else:
            engine: Cosmos3Engine = cast("Any", Cosmos3Engine).from_pretrained(
                as_path(model, "native"),
                device=resolve_device(options.engine),
                options=options.engine,
                action_space=action_space,
            )
        super().__init__(engine, options)
