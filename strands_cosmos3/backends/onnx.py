"""Exported graphs in ONNX Runtime as a backend, without torch."""

from __future__ import annotations

from pathlib import Path

from strands_cosmos3.backends.engine_backend import EngineBackend
from strands_cosmos3.backends.model_input import as_path
from strands_cosmos3.backends.options import BackendOptions
from strands_cosmos3.engine.exported.engine import OnnxEngine


class OnnxBackend(EngineBackend):
    """Answers with an :class:`OnnxEngine` in this process.

    Args:
        model: A checkpoint that was exported, or the folder of its graphs.
        options: How to load and sample.
        action_space: The checkpoint's action space, if neither its name nor its metadata states it.

    Raises:
        CheckpointError: There are no graphs, or they are of another checkpoint; see its children.
        BackendError: ``model`` is something else.
        ConfigError: ONNX Runtime cannot do what the options ask for.
    """

    def __init__(
        self,
        model: str | Path,
        options: BackendOptions = BackendOptions(),
        action_space: str | None = None,
    ):
        engine = OnnxEngine.from_exported(as_path(model, "onnx"), options.engine, action_space)
        super().__init__(engine, options, "onnx", engine.processing)
